"""Engine selection, and explanations of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from regard.engines import flex, inspection, native, reference, sdpa, tiled, triton
from regard.engines.cost import TILE, forward_flops, visited_entries
from regard.engines.problem import Engine, Problem
from regard.engines.tiled import tile_size
from regard.masks import tiles

ENGINES: dict[str, Engine] = {
    engine.ENGINE.name: engine.ENGINE for engine in (native, sdpa, triton, flex, reference, tiled)
}
"""Engines in order of preference; the first without an objection is picked."""


class CannotCompute(ValueError):
    """Raised when the engine requested by name does not support the call, for these `reasons`.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 1, 4, 8)
    >>> try:
    ...     rg.attention(q, k, v, sink=0.0, engine="sdpa")
    ... except rg.CannotCompute as error:
    ...     print(error.reasons)
    ['its kernel has no sink']
    """

    def __init__(self, name: str, reasons: list[str], able: list[str]) -> None:
        super().__init__(
            f"engine {name!r} cannot compute this: {'; '.join(reasons)}. Engines that can: {', '.join(able)}"
        )
        self.reasons = reasons


def select(problem: Problem, name: str | None = None) -> Engine:
    """Return the engine with this name, or the first without an objection to the problem."""
    if name is not None:
        if not isinstance(name, str) or name not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, but is {name!r}")
        if reasons := ENGINES[name].why_not(problem):
            able = [other for other, engine in ENGINES.items() if not engine.why_not(problem)]
            raise CannotCompute(name, reasons, able)
        return ENGINES[name]
    for engine in ENGINES.values():
        if not engine.why_not(problem) and not engine.why_avoid(problem):
            return engine
    return next(engine for engine in reversed(ENGINES.values()) if not engine.why_not(problem))


def select_inspection(problem: Problem, parts: Sequence[Tensor] | None = None) -> ModuleType:
    """Return the module that inspects the weights of a problem: by kernels, or `inspection` in torch.

    parts: indices of the heads, rows and columns whose weights are requested, which may have to be differentiable.
    """
    outside = torch.compiler.is_compiling() or problem.in_transform or not problem.direct or not problem.softmax
    if outside or (parts is not None and (problem.grad or problem.tangent or not all(map(len, parts)))):
        return inspection
    rows = None if parts is None else parts[1]
    for kernels in (native.inspection, triton.inspection):
        if not kernels.why_not(problem, rows):
            return kernels
    return inspection


@contextmanager
def exclude_engine(name: str) -> Iterator[None]:
    """Exclude an engine, so that an exported graph consists of torch's own operators."""
    before = dict(ENGINES)
    ENGINES.pop(name)
    try:
        yield
    finally:
        ENGINES.clear()
        ENGINES.update(before)


@dataclass(frozen=True)
class Explanation:
    """How a call is computed; `print` it for a summary.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 1, 256, 8)
    >>> rg.Attention(mask=rg.causal()).explain(q, k, v, engine="reference").flops
    2097152

    `tiles` are visited and total tiles, `flops` those of the forward pass, `peak_bytes` the memory beyond inputs and
    output, `reasons` the objections to each engine that was not picked, `fallbacks` what the engine leaves to another,
    `remarks` what a user should know before relying on it.
    """

    description: str
    sizes: dict[str, int]
    engine: str
    reasons: dict[str, list[str]]
    tile: tuple[int, int]
    tiles: tuple[int, int]
    flops: int
    peak_bytes: int
    fallbacks: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        visited, total = self.tiles
        lines = [
            self.description,
            f"  sizes   {'  '.join(f'{axis}={n}' for axis, n in self.sizes.items())}",
            f"  engine  {self.engine}",
            *(f"          {line}" for line in self.fallbacks + self.remarks),
            *(f"          not {name}: {'; '.join(reasons)}" for name, reasons in self.reasons.items()),
            f"  tiles   {visited:,} of {total:,} visited ({visited / max(total, 1):.1%}), each {_times(self.tile)}",
            f"  FLOPs   {_units(self.flops)}FLOP forward",
            f"  memory  {_units(self.peak_bytes)}B beyond inputs and output",
        ]
        return "\n".join(lines)


def explain(problem: Problem, description: str, name: str | None = None) -> Explanation:
    """Return the result of `select` with its cost."""
    engine, frame = select(problem, name), problem.frame
    order = list(ENGINES)
    reasons = {
        other: ENGINES[other].why_not(problem) + ENGINES[other].why_avoid(problem)
        for other in order
        if other != engine.name
    }
    size = tile_size(problem) if engine.name == "tiled" else TILE
    table = tiles(problem.mask, frame, size)
    dense = engine.dense(problem)
    computed = frame.B * frame.H * frame.Q * frame.K if dense else visited_entries(problem.mask, frame, size)
    return Explanation(
        description=description,
        sizes={"B": frame.B, "H": frame.H, "G": problem.G, "Q": frame.Q, "K": frame.K, "D": problem.D, "E": problem.E},
        engine=engine.name,
        reasons={other: objections for other, objections in reasons.items() if objections},
        tile=size,
        tiles=(table.total if dense else table.visited, table.total),
        flops=forward_flops(computed, problem.score, problem.D, problem.E),
        peak_bytes=engine.peak_bytes(problem),
        fallbacks=tuple(engine.fallback(problem)),
        remarks=tuple(engine.remarks(problem)),
    )


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _units(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000 or unit == "T":
            return f"{number:,.0f} {unit}" if unit == "" else f"{number:,.1f} {unit}"
        number /= 1000
    return ""
