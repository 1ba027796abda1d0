"""Select and measure claims."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches

import torch

from regard.lab.claim import FULL, Budget, Claim, Findings, Result, seed_of
from regard.lab.complexity import one_thread
from regard.lab.themes import (
    approximation,
    architectures,
    cost,
    examples,
    gradients,
    lengths,
    mechanism,
    recurrence,
    rows,
    softmax,
    symmetry,
    training,
    translation,
)
from regard.lab.theory import THEMES

PARTS = (
    recurrence, mechanism, training, lengths, softmax, rows, symmetry, gradients, cost, approximation, architectures,
    translation, examples,
)  # fmt: skip
CLAIMS: dict[str, Claim] = {
    claim.name: claim for theme in THEMES for part in PARTS for claim in part.CLAIMS if claim.theme == theme
}
"""All claims by name, in the order of the page."""


def select_claims(names: Iterable[str]) -> list[Claim]:
    """Return the claims with these names, in the order of the page; all of them without names.

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
    """Measure a claim and return the result with its verdict.

    >>> from regard.lab import CLAIMS, measure
    >>> measure(CLAIMS["example-softmax-3"]).verdict.value
    'false as printed'
    """
    before, began = torch.get_rng_state(), time.process_time()
    samples = []
    try:
        with one_thread():  # results do not depend on the number of cores, nor times on waiting for other threads
            for repetition in range(budget.repetitions(claim)):
                findings = claim.measure(seed=seed_of(seed, repetition), **budget.arguments(claim))
                samples.append(_to_json_values(findings))
    finally:
        torch.set_rng_state(before)
    return Result(claim, samples, seed, time.process_time() - began)


def run(
    claims: Iterable[Claim],
    *,
    seed: int = 0,
    budget: Budget = FULL,
    on_start: Callable[[Claim], None] = lambda claim: None,
) -> Iterator[Result]:
    """Measure claims and yield their results; claims that share a measurement run it once.

    on_start: called with each claim before it is measured.
    """
    done: dict[object, Result] = {}
    for claim in claims:
        on_start(claim)
        key = claim.measure, budget.repetitions(claim), tuple(sorted(budget.arguments(claim).items()))
        if key not in done:
            done[key] = measure(claim, seed=seed, budget=budget)
        yield replace(done[key], claim=claim)


def _to_json_values(findings: Findings) -> Findings:
    """Convert findings to JSON values; NaN and infinity become None."""

    def convert(value: object) -> object:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, list | tuple):
            return [convert(each) for each in value]
        return value

    return {name: convert(value) for name, value in findings.items()}
