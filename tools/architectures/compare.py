"""One architecture: `regard` compared with `eager` and `sdpa` in every way that the model offers."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from regard.integrations.coverage import missing_parts
from regard.integrations.transformers import coverage, enable
from tools.architectures.build import NotBuiltError, build, inputs_of

CLOSE = 2e-4  # of the largest number of a tensor
Result = dict[str, Tensor]


def compare(model_type: str, built: Callable[[], Any]) -> dict[str, Any]:
    """A row of the table: status, checks and notes. `built` is called when eager works, before regard runs."""
    enable()
    row: dict[str, Any] = {"architecture": model_type, "checks": {}, "notes": []}
    try:
        eager = build(model_type, "eager")
        inputs = inputs_of(eager)
    except Exception as error:
        return row | {"status": "not built", "notes": [_short(error)]}
    row |= {"class": type(eager).__name__, "inputs": sorted(inputs)}
    built()
    try:
        ours = build(model_type, "regard")
        ours.load_state_dict(eager.state_dict())
        row["missed"] = _cover(ours, inputs, row)
    except Exception as error:
        return row | {"status": "failed", "notes": [f"build: {_short(error)}"]}
    for name, check in _checks(eager, inputs).items():
        try:
            expected = check(eager)
            again = check(eager)
        except Exception as error:
            row["notes"].append(f"{name}: eager itself raises {_short(error)}") if name == "plain" else None
            continue
        if not expected:
            continue
        if not all(value.isfinite().any() for value in expected.values()):
            row["notes"].append(f"{name}: eager gives no finite number")
            continue
        row["checks"][name] = _judge(name, check, eager, ours, expected, again, row)
    return row | {"status": _status(row)}


def _judge(name: str, check: Callable, eager: Any, ours: Any, expected: Result, again: Result, row: dict) -> str:
    try:
        actual = check(ours)
    except NotImplementedError as error:
        if (note := _short(error)) not in row["notes"]:
            row["notes"].append(note)
        return "refused"
    except Exception as error:
        row["notes"].append(f"{name}: {_short(error)}")
        return "failed"
    differences = _differences(actual, expected)
    if not differences:
        return "exact"
    noise = _differences(again, expected)
    if set(differences) <= set(noise):
        row["notes"].append(f"{name}: eager differs from itself")
        return "eager differs from itself"
    if _equal_in_float64(check, eager, ours):
        worst = max(differences, key=lambda key: differences[key])
        row["notes"].append(f"{name}: {worst} differs by {differences[worst]:.1g} in float32 and is equal in float64")
        return "exact"
    worst = max(differences, key=lambda key: differences[key])
    theirs = float("nan")
    for implementation in ("sdpa", None):  # None: sdpa in the parts that have it
        try:
            other = build(row["architecture"], implementation)
            other.load_state_dict(eager.state_dict())
            sdpa = check(other)
        except Exception:  # many models refuse sdpa
            continue
        if len(expected) - len(actual) > row.get("others", 0):
            break  # what sdpa does not return is missing only from modules that do not run regard
        same = not _differences(actual, sdpa) and not _differences(sdpa, actual)
        if same or _equal_in_float64(check, other, ours):
            row["notes"].append(
                f"{name}: sdpa differs from eager in {worst} by {differences[worst]:.1g}, regard equals sdpa"
            )
            return "as sdpa"
        theirs = _differences(sdpa, expected).get(worst, 0.0)
    row["notes"].append(f"{name}: {worst} differs by {differences[worst]:.1g} (sdpa: {theirs:.1g})")
    return "wrong"


def _equal_in_float64(check: Callable, eager: Any, ours: Any) -> bool:
    """Return whether a difference vanishes in float64, and so is due to rounding."""
    try:
        expected, actual = (check(copy.deepcopy(model).double()) for model in (eager, ours))
    except Exception:
        return False
    if _differences(actual, expected):
        return False
    return all(torch.equal(actual[key].isfinite(), value.isfinite()) for key, value in expected.items())


def _cast(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    return {
        key: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
        for key, one in inputs.items()
    }


def _status(row: dict[str, Any]) -> str:
    checks = row["checks"].values()
    for status in ("wrong", "failed", "refused"):
        if status in checks:
            return status
    if not checks:
        return "not built"
    if row["missed"] == "none":
        return "no attention"
    if row["missed"]:
        return "warned"
    return "as sdpa" if "as sdpa" in checks else "exact"


def _cover(model: Any, inputs: dict, row: dict) -> list[str] | str:
    """Return the modules that do not run regard; add a note for each that no warning names."""
    try:
        report = coverage(model, **inputs)
    except NotImplementedError:
        return []
    row["computed"], row["others"], row["modules"] = len(report.covered), len(report.missed), len(report.parts)
    if not report.parts:
        return "none"
    warning = missing_parts(model) or ""
    named = [part for part in report.missed if warning.startswith("No attention") or part.kind in warning]
    silent = sorted({f"{part.kind} is in no warning: {part.reason}" for part in report.missed if part not in named})
    row["notes"] += silent
    named += [part for part in report.uncalled if part.kind in warning]
    reasons = {f"{part.kind} {part.reason}" for part in named}
    return sorted(reasons) or silent


def _checks(model: Any, inputs: dict[str, Tensor]) -> dict[str, Callable[[Any], Result]]:
    accepted = inspect.signature(model.forward).parameters

    def plain(one: Any) -> Result:
        return _forward(one, inputs)

    def attentions(one: Any) -> Result:
        if "output_attentions" not in accepted and "kwargs" not in accepted:
            return {}
        output = _forward(one, inputs | {"output_attentions": True})
        return {key: value for key, value in output.items() if "attentions" in key}

    def gradient(one: Any) -> Result:
        torch.manual_seed(0)
        one.zero_grad(set_to_none=True)
        with torch.enable_grad():
            outputs = [t for t in _tensors(one(**_cast(one, inputs))).values() if t.requires_grad]
            if not outputs:
                return {}
            weights = torch.Generator().manual_seed(2)
            finite = [t[t.isfinite()] for t in outputs]
            weighted = [(t * torch.randn(t.shape, generator=weights)).sum() for t in finite]
            scales = [t.detach().abs().mean().clamp(min=1e-6) for t in finite]
            torch.stack([loss / scale for loss, scale in zip(weighted, scales, strict=True)]).sum().backward()
        grads = {f"grad.{key}": p.grad.clone() for key, p in one.named_parameters() if p.grad is not None}
        one.zero_grad(set_to_none=True)
        return grads

    checks: dict[str, Callable[[Any], Result]] = {"plain": plain, "attentions": attentions, "gradient": gradient}
    if "input_ids" in inputs and "attention_mask" in accepted:
        checks |= {f"padding {side}": _padded(inputs, side) for side in ("left", "right")}
    if getattr(model, "can_generate", bool)() and "input_ids" in inputs | {"input_ids": None}:
        checks["generation"] = _generation(inputs)
    return checks


def _padded(inputs: dict[str, Tensor], side: str) -> Callable[[Any], Result]:
    mask = torch.ones(inputs["input_ids"].shape[:2], dtype=torch.long)
    mask[0, :4] = 0
    mask = mask.flip(1) if side == "right" else mask

    def check(one: Any) -> Result:
        results = {}
        for key, value in _forward(one, inputs | {"attention_mask": mask}).items():
            more = value.shape[1] - mask.shape[1] if value.dim() > 1 else 0
            if (
                "attentions" not in key and value.dim() == 3 and 0 <= more <= 1
            ):  # padding has no meaning; one may follow
                results[key] = value[nn.functional.pad(mask, (0, more), value=1).bool()]
            elif value.dim() == 2 or "decoder" in key:
                results[key] = value
        return results

    return check


def _generation(inputs: dict[str, Tensor]) -> Callable[[Any], Result]:
    given = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}

    def check(one: Any) -> Result:
        torch.manual_seed(0)
        settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1, "output_logits": True}
        with torch.no_grad():
            generated = one.generate(**_cast(one, given), **settings, return_dict_in_generate=True)
        return {f"step {n}": step for n, step in enumerate(generated.logits or ())}

    return check


def _forward(model: Any, inputs: dict) -> Result:
    torch.manual_seed(0)
    with torch.no_grad():
        return _tensors(model(**_cast(model, inputs)))


def _tensors(output: Any) -> Result:
    output = dict(output) if hasattr(output, "items") else {"output": output}
    output = {key: value for key, value in output.items() if "past_key_values" not in key and "cache" not in key}
    leaves = tree_flatten_with_path(output)[0]
    return {
        "".join(map(str, path)): value
        for path, value in leaves
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    }


def _differences(actual: Result, expected: Result) -> dict[str, float]:
    """Return the relative differences above `CLOSE`: infinite for a tensor that is missing or has another shape."""
    differences = {}
    largest = max((_size(value) for key, value in expected.items() if key.startswith("grad.")), default=0.0)
    for key, value in expected.items():
        other = actual.get(key)
        if other is None or other.shape != value.shape:
            differences[key] = float("inf")
            continue
        real = value.isfinite()
        scale = max(_size(value), 1e-3 * largest, 1e-6)
        difference = (other - value)[real].abs().max().item() / scale if real.any() else 0.0
        if not difference <= CLOSE:
            differences[key] = difference if difference == difference else float("inf")
    return differences


def _size(value: Tensor) -> float:
    value = value[value.isfinite()]
    return value.abs().max().item() if value.numel() else 0.0


def _short(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1].name if frames and not isinstance(error, NotBuiltError) else ""
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text}" + (f" (in {where})" if where else "")
