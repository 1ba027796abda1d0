"""The exercises of docs/from_zero.md: the check refuses the attention of the page and accepts solutions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.check import PROPERTIES, Target, examine
from tests.test_docs import ROOT, fences

EXERCISES = ("masked-rows", "nan-leaks", "memory")


def attention_of_the_page() -> Target:
    blocks = fences((ROOT / "docs" / "from_zero.md").read_text("utf-8"))
    (source,) = (block.text for block in blocks if block.text.startswith("def attention("))
    names = {"torch": torch, "math": math}
    exec(source[: source.index("\n\n\n")], names)
    attention = names["attention"]
    return Target("page", lambda q, k, v, mask=None: attention(q, k, v, mask), growth=1)  # type: ignore[operator]


def solve(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, size: int = 64) -> Tensor:
    """Attention over blocks of keys, with a running maximum and a running sum."""
    scale, length = 1 / math.sqrt(q.shape[-1]), k.shape[2]
    highest = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(highest), q.new_zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, length, size):
        part = slice(start, min(start + size, length))
        keys, values = k[:, :, part], v[:, :, part]
        logits = q @ keys.mT * scale
        if mask is not None:
            seen = mask.expand(*mask.shape[:-1], length)[..., part]
            logits = logits.masked_fill(~seen, -torch.inf)
            hidden = ~seen.expand_as(logits).any(dim=(0, 1, 2))  # keys that no query sees: their values are not read
            values = values.masked_fill(hidden[:, None], 0)
        top = torch.maximum(highest, logits.amax(-1, keepdim=True))
        safe = top.masked_fill(top == -torch.inf, 0)
        weights, shrink = (logits - safe).exp(), (highest - safe).exp()
        total, out, highest = total * shrink + weights.sum(-1, keepdim=True), out * shrink + weights @ values, top
    return out / total.masked_fill(total == 0, 1)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_attention_of_the_page_fails(name: str) -> None:
    assert examine(attention_of_the_page(), PROPERTIES[name]).status == "failed"


@pytest.mark.parametrize("name", ["masked-rows", "nan-leaks", "memory", "row-sums"])
def test_a_solution_passes(name: str) -> None:
    solution = Target("solution", lambda q, k, v, mask=None: solve(q, k, v, mask), growth=1)
    report = examine(solution, PROPERTIES[name])
    assert report.status == "passed", report


def test_the_pages_name_these_properties() -> None:
    for page in ("from_zero.md", "zh/from_zero.md"):
        text = Path(ROOT / "docs" / page).read_text("utf-8")
        for name in EXERCISES:
            assert f"--only {name}" in text
