"""Rotary embeddings in configurations: `rope_theta` and `rope_scaling`, or both in `rope_parameters`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from regard.field_types import check_fields, check_value
from regard.nn import Rotary
from regard.positions import Dynamic, Linear, Llama3, LongRope, Yarn

PARAMETERS = dict[str, float | str | bool | list[float] | None]
TYPES: dict[str, Any] = {
    "rope_theta": float, "rope_scaling": PARAMETERS, "rope_parameters": PARAMETERS, "partial_rotary_factor": float,
}  # fmt: skip
NAMES = tuple(TYPES)

ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, tuple[Any, dict[str, str]]] = {
    "linear": (Linear, {"factor": "factor"}),
    "dynamic": (Dynamic, {"factor": "factor", "original": "max_position_embeddings"}),
    "yarn": (
        Yarn,
        {"original": ORIGINAL}
        | {name: name for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")}
        | {"truncate": "truncate"},
    ),
    "llama3": (
        Llama3,
        {
            "factor": "factor",
            "low_frequency": "low_freq_factor",
            "high_frequency": "high_freq_factor",
            "original": ORIGINAL,
        },
    ),
    "longrope": (
        LongRope,
        {
            "short": "short_factor",
            "long": "long_factor",
            "original": ORIGINAL,
            "factor": "factor",
            "attention_factor": "attention_factor",
        },
    ),
}
KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}


def read(theirs: dict[str, Any], *, base: float, d_head: int | None = None) -> Rotary:
    """Read the rotary embedding of a configuration; `base` is the default of rope_theta.

    d_head: given for families that rotate part of each head if partial_rotary_factor is below 1.
    """
    newer, older = theirs.get("rope_parameters"), theirs.get("rope_scaling")
    if newer and older and newer != older:
        raise ValueError(f"rope_parameters = {newer} and rope_scaling = {older} differ; remove one from config.json")
    given = newer or older or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    for theta in (theirs.get("rope_theta"), given.get("rope_theta")):  # the nested value takes precedence
        base = base if theta is None else theta
    check_value("rope_theta", base, float)
    d_rotary = _read_width(theirs, given, d_head)
    if kind != "default" and kind not in SCALINGS:
        raise ValueError(f"rope_type = {kind!r} is not supported; supported are default, {', '.join(SCALINGS)}")
    make, names = SCALINGS.get(str(kind), (None, {}))
    unknown = set(given) - KNOWN - {*names.values(), ORIGINAL} | ({"max_position_embeddings"} & set(given))
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} of rope_type {kind!r} is not supported")
    if make is None:
        return Rotary(base=float(base), d_rotary=d_rotary)
    values = _read_scaling(theirs, given, make, names)
    check_fields(make, values, names)
    for each in fields(make):
        if each.default is MISSING and each.name not in values:
            raise ValueError(f"rope_type = {kind!r} needs {names[each.name]}")
    if make is LongRope and not {"factor", "attention_factor"} & values.keys():
        raise ValueError(f"rope_type = {kind!r} needs factor or max_position_embeddings")
    if make is LongRope and d_head is not None:
        for name in ("short", "long"):
            if len(values[name]) != (pairs := (d_rotary or d_head) // 2):
                raise ValueError(f"{names[name]} must have {pairs} factors, got {len(values[name])}")
    return Rotary(base=float(base), d_rotary=d_rotary, scaling=make(**values))


def _read_width(theirs: dict[str, Any], given: dict[str, Any], d_head: int | None) -> int | None:
    """Return the number of rotated channels of a head, or None if all are."""
    nested = given.get("partial_rotary_factor")  # takes precedence
    factor = theirs.get("partial_rotary_factor") if nested is None else nested
    if factor is None or factor == 1:
        return None
    if d_head is None:  # transformers ignores it for rope_type default, and fails for others
        raise ValueError(
            f"partial_rotary_factor = {factor} is not supported: models of this family rotate whole heads; "
            "if this one does too, remove it from config.json"
        )
    check_value("partial_rotary_factor", factor, float)
    return int(d_head * factor)


def _read_scaling(theirs: dict[str, Any], given: dict[str, Any], make: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return the values of a scaling by our names."""
    longest = theirs.get("max_position_embeddings")
    values_json = {"max_position_embeddings": longest} | given
    if ORIGINAL in names.values():  # the value outside of the parameters takes precedence
        outside = {} if theirs.get(ORIGINAL) is None else {ORIGINAL: theirs[ORIGINAL]}
        values_json = {ORIGINAL: longest} | values_json | outside
    if make is LongRope:  # its factor is a ratio
        original = values_json.get(ORIGINAL)
        if values_json.get("factor") is None and isinstance(longest, int) and isinstance(original, int) and original:
            values_json["factor"] = longest / original
    values = {ours: values_json[name] for ours, name in names.items() if values_json.get(name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def write(rotary: Rotary | None, d_head: int) -> dict[str, Any]:
    """Write the names that all releases of transformers read."""
    if rotary is None or rotary.interleaved:
        raise ValueError("positions must be rotary and not interleaved")
    values: dict[str, Any] = {"rope_theta": rotary.base, "rope_scaling": None}
    if rotary.d_rotary is not None:
        values["partial_rotary_factor"] = rotary.d_rotary / d_head
    if rotary.scaling is not None:
        matches = [(kind, names) for kind, (make, names) in SCALINGS.items() if type(rotary.scaling) is make]
        if not matches:
            raise ValueError(f"the scaling {rotary.scaling!r} has no counterpart in rope_scaling")
        kind, names = matches[0]
        scaling_values = {
            name: getattr(rotary.scaling, ours) for ours, name in names.items() if name != "max_position_embeddings"
        }
        values["rope_scaling"] = {"rope_type": kind} | {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in scaling_values.items()
            if value is not None
        }
    return values
