"""The mean errors of the engines compared with those of dense torch, over many random calls.

`make errors` writes the table of docs/inside/rounding.md. Dense torch is `tests.definition` in float32: torch.softmax
and matrix products, without a line of the library. Errors are root mean squares over all numbers of all calls, against
the exact result in float64.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.definition import Reader, dense
from tests.strategies import Call
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES

PAGE = Path("docs/inside/rounding.md")
NAMES = ("output", "lse", "query", "key", "value", "learned")
Maker = Callable[[Callable[..., Tensor]], dict[str, Any]]
KINDS: dict[str, Maker] = {
    "plain": lambda table: {},
    "causal": lambda table: {"mask": rg.causal(), "bias": rg.alibi(2)},
    "wide": lambda table: {"sink": table(2)},
    "softcap": lambda table: {"score": rg.Dot(softcap=2.0)},
    "cosine": lambda table: {"score": rg.Cosine(table(2))},
    "bilinear": lambda table: {"score": rg.Bilinear(table(32, 32, size=32**-0.5))},
    "additive": lambda table: {"score": rg.Additive(table(32))},
    "relative": lambda table: {"bias": rg.relative(table(9, 2)) + rg.shaw(table(7, 32), table(7, 32))},
    "dropout": lambda table: {"dropout": 0.5},
}


def random_call(kind: str, seed: int) -> Call:
    """A call of this kind; its tensors are float64 with numbers that float32 holds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    learned: list[Tensor] = []

    def table(*shape: int, size: float = 1.0) -> Tensor:
        learned.append((normal(*shape) * size).requires_grad_())
        return learned[-1]

    Q, K = (int(torch.randint(1, 200, (), generator=generator)) for _ in range(2))
    D = 128 if kind == "wide" else 32
    description = KINDS[kind](table)
    return Call(normal(1, 2, Q, D), normal(1, 2, K, D), normal(1, 2, K, 32), description, learned)


def computed_results(call: Call, engine: str | None, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Output, log-sum-exp and gradients; without an engine those of dense torch."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in call.tensors()]
    torch.manual_seed(5)
    read = Reader(dtype)
    if engine is not None:
        output, lse = rg.attention(*inputs, engine=engine, return_lse=True, **call.description)
        learned = call.learned
    else:
        seed = int(torch.randint(2**62, (), dtype=torch.int64)) if call.description.get("dropout") else None
        query, key, value = inputs
        exact = dense(query, key, value, call.description, read, seed)
        output, lse, learned = exact.output, exact.lse, [read.leaf(t) for t in call.learned]
    generator = torch.Generator().manual_seed(1)
    visible = ~lse.isneginf()
    given = [torch.randn(y.shape, generator=generator).to(dtype) for y in (output, lse)]
    given[1] = given[1].masked_fill(~visible, 0.0)
    gradients = torch.autograd.grad([output, lse], [*inputs, *learned], given)
    joined = torch.cat([g.flatten() for g in gradients[3:]]) if learned else None
    return dict(zip(NAMES, (output, lse[visible], *gradients[:3], joined), strict=True))


def mean_errors(engine: str, kind: str, count: int) -> dict[str, tuple[float, float]]:
    """Root mean square errors of an engine and of dense torch, both in float32, by result."""
    sums: dict[str, list[float]] = {}
    for seed in range(count):
        call = random_call(kind, seed)
        exact = computed_results(call, None, torch.float64)
        computed = [computed_results(call, name, torch.float32) for name in (engine, None)]
        for name, best in exact.items():
            for n, each in enumerate(computed):
                if best is not None and (value := each[name]) is not None:
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[n] += float((value.detach().double() - best.detach()).square().sum())
    return {name: (ours**0.5, torchs**0.5) for name, (ours, torchs) in sums.items()}


def table(count: int) -> list[str]:
    lines = [f"| engine and call | {' | '.join(NAMES)} |", f"| --- |{' ---: |' * len(NAMES)}"]
    for engine in ("native", "tiled", "reference"):
        for kind in KINDS:
            call = random_call(kind, 0)
            problem = rg.Attention(**call.description).problem(*(t.float() for t in call.tensors()), return_lse=True)
            if ENGINES[engine].why_not(problem):
                continue
            errors = mean_errors(engine, kind, count)
            shares = [f"{errors[name][0] / errors[name][1]:.2f}" if name in errors else "" for name in NAMES]
            lines.append(f"| {engine}, {kind} | {' | '.join(shares)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rounding", description=__doc__)
    parser.add_argument("--calls", type=int, default=100, help="of every kind")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    lines = table(options.calls)
    text = options.page.read_text()
    new = "\n".join([f"<!-- errors: {options.calls} calls of every kind -->", "", *lines, "", "<!-- end -->"])
    options.page.write_text(re.sub(r"<!-- errors.*?<!-- end -->", lambda _: new, text, flags=re.DOTALL))
    worst = max(float(share) for line in lines[2:] for share in line.split("|")[2:-1] if share.strip())
    print(f"the largest ratio is {worst:.2f}, of at most 2")
    return worst > 2


if __name__ == "__main__":
    sys.exit(main())
