"""Measures claims, one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

import torch

from regard.lab.claim import FULL, Budget, Claim, Findings, Result
from regard.lab.complexity import one_thread
from regard.lab.themes import (
    approximation,
    architectures,
    cost,
    examples,
    gradients,
    mechanism,
    softmax,
    symmetry,
    translation,
)

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for theme in (mechanism, softmax, symmetry, gradients, cost, approximation, architectures, translation, examples)
    for claim in theme.CLAIMS
}
"""All claims by name, in the order of the page."""


def select_claims(names: Iterable[str]) -> list[Claim]:
    """The claims of these names, in the order of the page; all, if there are none.

    >>> from regard.lab import select_claims
    >>> [claim.name for claim in select_claims(["range", "variance"])]
    ['variance', 'range']
    """
    names = list(names)
    for name in names:
        if name not in CLAIMS:
            near = get_close_matches(name, CLAIMS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"there is no claim {name!r}{hint} (regard lab --list shows all)")
    return [claim for claim in CLAIMS.values() if not names or claim.name in names]


def measure(claim: Claim, *, seed: int = 0, budget: Budget = FULL) -> Result:
    """What a claim's measurement finds, and its verdict.

    >>> from regard.lab import CLAIMS, measure
    >>> measure(CLAIMS["example-softmax-3"]).verdict.value
    'false as printed'
    """
    before, began = torch.get_rng_state(), time.process_time()
    try:
        with one_thread():  # the same bits on every machine of a kind, and no time spent on waiting for one another
            found = _plain(claim.measure(seed=seed, **budget.arguments(claim)))
    finally:
        torch.set_rng_state(before)
    return Result(claim, found, claim.judge(found), seed, time.process_time() - began)


def run(
    claims: Iterable[Claim],
    *,
    seed: int = 0,
    budget: Budget = FULL,
    on_start: Callable[[Claim], None] = lambda claim: None,
) -> Iterator[Result]:
    """The claims measured, one by one; `on_start` hears of each before it begins. What claims share is measured
    once."""
    done: dict[object, tuple[Findings, float]] = {}
    for claim in claims:
        on_start(claim)
        key = claim.measure, tuple(sorted(budget.arguments(claim).items()))
        if key in done:
            found, taken = done[key]
            yield Result(claim, found, claim.judge(found), seed, taken)
        else:
            result = measure(claim, seed=seed, budget=budget)
            done[key] = result.found, result.cpu_seconds
            yield result


def _plain(found: Findings) -> Findings:
    """Found things as JSON has them: what is no number is None."""

    def plain(thing: object) -> object:
        if isinstance(thing, float) and not math.isfinite(thing):
            return None
        if isinstance(thing, list | tuple):
            return [plain(each) for each in thing]
        return thing

    return {name: plain(thing) for name, thing in found.items()}
