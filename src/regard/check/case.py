"""One input of a property: sizes, a dtype and a seed that determine the tensors and the code that builds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Sizes of a call: B, H, G (default H), Q, K, D, E (default D); the values are drawn with `seed`.

    >>> from regard.check import Case
    >>> Case(Q=3, K=5).tensors()["k"].shape
    torch.Size([1, 1, 5, 2])
    """

    B: int = 1
    H: int = 1
    G: int | None = None
    Q: int = 2
    K: int = 2
    D: int = 2
    E: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        kv_heads, width = self.H if self.G is None else self.G, self.D if self.E is None else self.E
        return {
            "q": (self.B, self.H, self.Q, self.D),
            "k": (self.B, kv_heads, self.K, self.D),
            "v": (self.B, kv_heads, self.K, width),
            "mask": (self.B, self.H, self.Q, self.K),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Normally distributed q, k and v, and a mask that shows every query the first key and most others."""
        shapes = self.shapes()
        torch.manual_seed(self.seed)
        tensors = {name: torch.randn(shapes[name]).to(self.dtype) for name in "qkv"}
        tensors["mask"] = torch.rand(shapes["mask"]) < 0.6
        tensors["mask"][..., :1] = True
        return tensors

    def lines(self, mask: bool) -> list[str]:
        """Python code that builds the same tensors."""
        shapes = self.shapes()
        cast = "" if self.dtype == torch.float32 else f".to({self.dtype})"
        lines = [f"torch.manual_seed({self.seed})"]
        lines += [f"{name} = torch.randn{shapes[name]}{cast}" for name in "qkv"]
        return lines + ([f"mask = torch.rand{shapes['mask']} < 0.6", "mask[..., :1] = True"] if mask else [])

    def smaller(self, least: Mapping[str, int]) -> Iterator[Case]:
        """Cases with one shorter axis, the shortest first, but not below `least`."""
        for axis in least:
            size: int = getattr(self, axis)
            for less in sorted({*range(least[axis], min(size, least[axis] + 8)), max(size // 2, least[axis])} - {size}):
                case = replace(self, **{axis: less})
                if case.G is None or case.H % case.G == 0:
                    yield case

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values if value is not None)


def with_float64(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Every case, each followed by the same case in float64."""
    return tuple(each for case in cases for each in (case, replace(case, dtype=torch.float64)))
