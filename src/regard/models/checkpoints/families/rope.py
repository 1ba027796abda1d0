"""Rotary embeddings in configurations: `rope_theta` and `rope_scaling`, or both in `rope_parameters`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from regard.field_types import check_fields, check_value
from regard.nn import Rotary
from regard.positions import Dynamic, Linear, Llama3, Yarn

PARAMETERS = dict[str, float | str | bool | None]
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
}
KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}


def read(theirs: dict[str, Any], *, base: float) -> Rotary:
    """Read the rotary embedding of a configuration; `base` is the default of rope_theta."""
    newer, older = theirs.get("rope_parameters"), theirs.get("rope_scaling")
    if newer and older and newer != older:
        raise ValueError(f"rope_parameters = {newer} and rope_scaling = {older} differ; remove one from config.json")
    given = newer or older or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    for theta in (theirs.get("rope_theta"), given.get("rope_theta")):  # the nested value takes precedence
        base = base if theta is None else theta
    check_value("rope_theta", base, float)
    for factor in (given.get("partial_rotary_factor"), theirs.get("partial_rotary_factor")):
        if factor is not None and factor != 1:  # transformers ignores it for rope_type default, and fails for others
            raise ValueError(
                f"partial_rotary_factor = {factor} is not supported: models of this family rotate whole heads; "
                "if this one does too, remove it from config.json"
            )
    if kind != "default" and kind not in SCALINGS:
        raise ValueError(f"rope_type = {kind!r} is not supported; supported are default, {', '.join(SCALINGS)}")
    make, names = SCALINGS.get(str(kind), (None, {}))
    values_json = {"max_position_embeddings": theirs.get("max_position_embeddings")} | given
    if ORIGINAL in names.values():
        values_json = {ORIGINAL: theirs.get("max_position_embeddings")} | values_json
    unknown = set(given) - KNOWN - {*names.values(), ORIGINAL}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} of rope_type {kind!r} is not supported")
    if make is None:
        return Rotary(base=float(base))
    values = {ours: values_json[name] for ours, name in names.items() if values_json.get(name) is not None}
    check_fields(make, values, names)
    for each in fields(make):
        if each.default is MISSING and each.name not in values:
            raise ValueError(f"rope_type = {kind!r} needs {names[each.name]}")
    return Rotary(base=float(base), scaling=make(**values))


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
            name: value for name, value in scaling_values.items() if value is not None
        }
    return values
