"""Run properties on targets, and shrink the inputs of failures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from regard.check import definition, gradients, masks, numbers, randomness, resources
from regard.check.case import Case
from regard.check.property import Property
from regard.check.reproduce import script
from regard.check.targets.engines import engine
from regard.check.targets.target import NotSupported, Target

SHRINK_SECONDS = 5.0  # time limit of the search for a smaller input

_FIRST = (
    resources.inputs_untouched, resources.own_output, resources.global_state, definition.output_shape,
    numbers.output_dtype, randomness.determinism, randomness.dropout_off,
)  # fmt: skip
_LAST = (definition.definition, masks.mask_definition, gradients, resources.memory)
_GROUPS = (*_FIRST, resources, definition, masks, numbers, randomness, *_LAST)


def _collect(groups: Sequence[Any]) -> dict[str, Property]:
    last = [each for each in _LAST if isinstance(each, Property)]
    properties: dict[str, Property] = {}
    for group in groups:
        members = [group] if isinstance(group, Property) else vars(group).values()
        own = [each for each in members if isinstance(each, Property)]
        properties |= {each.name: each for each in own if each is group or each not in last}
    return properties


PROPERTIES: dict[str, Property] = _collect(_GROUPS)
"""All properties, from specific to general: the first failure describes the defect best."""


@dataclass(frozen=True)
class Outcome:
    """The result of one property on one target.

    reason: why it failed or is not applicable, or a remark if it passed.
    code: a program that reproduces a failure.
    cases: number of cases that ran. refused: number of cases that the target does not support.
    """

    target: str
    property: str
    status: Literal["passed", "failed", "not applicable"]
    reason: str = ""
    code: str = ""
    case: str = ""
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0


def check(targets: Iterable[Target], properties: Sequence[Property] | None = None) -> Iterator[Outcome]:
    """Check every property on every target and yield the outcomes one by one.

    >>> from regard.check import PROPERTIES, check, target
    >>> [outcome.status for outcome in check([target("regard-reference")], [PROPERTIES["row-sums"]])]
    ['passed']
    """
    for target in targets:
        for each in PROPERTIES.values() if properties is None else properties:
            yield examine(target, each)


def examine(target: Target, prop: Property) -> Outcome:
    """Check one property on one target."""
    if not __debug__:
        raise RuntimeError("properties are `assert` statements: run Python without -O")
    started = time.perf_counter()
    for need in (prop.name, *sorted(prop.needs)):
        if need in target.unsupported:
            return Outcome(target.name, prop.name, "not applicable", target.unsupported[need])
    ran, refusals, remark = 0, [], ""
    for case in prop.cases[: target.max_cases]:
        if case.dtype not in target.dtypes:
            refusals.append(f"it does not support {str(case.dtype).removeprefix('torch.')}")
            continue
        try:
            remark = _run(target, prop, case) or remark
            ran += 1
        except NotSupported as refused:
            refusals.append(str(refused))
        except Exception as error:
            case, error = _shrink(target, prop, case, error)
            reason = _describe_error(error)
            return Outcome(
                target.name, prop.name, "failed", reason, script(target, prop, case, reason), str(case), ran + 1,
                len(refusals), time.perf_counter() - started,
            )  # fmt: skip
    seconds = time.perf_counter() - started
    why = "; ".join(dict.fromkeys(refusals))
    if not ran:
        return Outcome(target.name, prop.name, "not applicable", why, refused=len(refusals), seconds=seconds)
    if len(prop.cases) > (target.max_cases or len(prop.cases)):
        remark = f"{remark + '; ' if remark else ''}the first {target.max_cases} of {len(prop.cases)} cases"
    if refusals:
        remark = (
            f"{remark + '; ' if remark else ''}{len(refusals)} of {ran + len(refusals)} cases not applicable: {why}"
        )
    return Outcome(target.name, prop.name, "passed", remark, "", "", ran, len(refusals), seconds)


def _run(target: Target, prop: Property, case: Case) -> str | None:
    with _preserve_state():
        given = {"attend": target.attention, "alignment": target.alignment, "growth": target.growth, **case.tensors()}
        return prop.body(**{name: given[name] for name in prop.parameters})


@contextmanager
def _preserve_state() -> Iterator[None]:
    """Restore torch's generator, default dtype, threads and modes on exit."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic, grad = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_grad_enabled(True)
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            torch.use_deterministic_algorithms(deterministic)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _shrink(target: Target, prop: Property, case: Case, error: Exception) -> tuple[Case, Exception]:
    """Search axis by axis for the smallest case that fails in the same way."""
    until = time.perf_counter() + SHRINK_SECONDS if prop.shrinks else 0.0
    right = engine("reference", target.alignment)  # if it fails too, the case is too small for the property
    least = {axis: min(getattr(each, axis) for each in prop.cases) for axis in ("B", "H", "Q", "K", "D")}
    again = True
    while again:
        again = False
        for smaller in case.smaller(least):
            if time.perf_counter() > until:
                break
            try:
                _run(target, prop, smaller)
            except NotSupported:
                continue
            except Exception as same:
                if type(same) is type(error) and _holds(right, prop, smaller):
                    case, error, again = smaller, same, True
                    break
    return case, error


def _holds(target: Target, prop: Property, case: Case) -> bool:
    try:
        _run(target, prop, case)
    except Exception:
        return False
    return True


def _describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, AssertionError) else f"raises {type(error).__name__}: {lines[0]}"
