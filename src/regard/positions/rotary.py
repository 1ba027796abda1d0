"""Rotary positions: pairs of channels of q and k, rotated by an angle that grows with the position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Scaling(Protocol):
    """Protocol of the scalings that `rotary` accepts."""

    @property
    def magnitude(self) -> float:
        """The factor of the rotated channels."""

    def frequencies(self, base: float, d_rotary: int, positions: Tensor) -> Tensor:
        """Return the angle per position of each pair, `(d_rotary / 2,)`.

        Positions are (..., N); if the angle depends on the row, it is (..., d_rotary / 2).
        """


def rotary(
    x: Tensor,
    positions: Tensor | int | None = None,
    *,
    base: float = 10000.0,
    d_rotary: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
) -> Tensor:
    """Rotate `x` `(B, H, N, D)` by its positions; q·k of two rotated vectors depends on their distance only.

        angle = positions * base^(-2i / d_rotary)                        i = 0 ... d_rotary / 2 - 1
        (a, b) -> (a cos(angle) - b sin(angle), b cos(angle) + a sin(angle))

    positions: integers `(N,)` or `(B, N)`; an int is the position of the first token; by default 0 ... N - 1.
    d_rotary: the number of leading channels to rotate, by default D; the others are unchanged.
    interleaved: channel pairs are (2i, 2i + 1) when true (GPT-J), (i, i + d_rotary / 2) when false (Llama, GPT-NeoX).
    scaling: `Linear`, `Dynamic`, `Yarn`, `Llama3` or `LongRope` of `regard.positions`, to extend the trained context.

    `(N, D)` and `(H, N, D)` work too. Angles are computed in float64, the product at least in float32, and the result
    has the shape and dtype of `x`.

    >>> import regard as rg
    >>> q = torch.randn(2, 8, 10, 64)
    >>> torch.allclose(rg.rotary(q, 5)[:, :, 0], rg.rotary(q, torch.arange(5, 15))[:, :, 0])
    True
    """
    d_rotary = _check(x, base, d_rotary, scaling)
    angled = _positions(x, positions)
    if x.numel() == 0:
        return x
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary_table(angled, d_rotary, base=base, scaling=scaling, dtype=compute)

    rotated = x[..., :d_rotary].to(compute)
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    rotated = rotated.to(x.dtype)
    return rotated if d_rotary == x.shape[-1] else torch.cat((rotated, x[..., d_rotary:]), dim=-1)


def rotary_table(
    positions: Tensor, d_rotary: int, *, base: float = 10000.0, scaling: Scaling | None = None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotation at integer positions, `(*positions, d_rotary / 2)` each.

    >>> cos, sin = rotary_table(torch.arange(4), 8, dtype=torch.float32)
    >>> cos.shape, cos[0].tolist()
    (torch.Size([4, 4]), [1.0, 1.0, 1.0, 1.0])
    """
    if scaling is None:
        frequencies, magnitude = _frequencies(base, d_rotary, positions.device), 1.0
    else:
        frequencies, magnitude = scaling.frequencies(base, d_rotary, positions), scaling.magnitude
    angles = positions[..., None].to(frequencies.dtype) * frequencies.unsqueeze(-2)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


@dataclass(frozen=True)
class Linear:
    """Position interpolation: divides every angle by `factor`.

    >>> import regard as rg
    >>> x = torch.ones(4, 8)
    >>> torch.allclose(rg.rotary(x, scaling=rg.positions.Linear(2.0))[2], rg.rotary(x)[1])
    True
    """

    factor: float

    def __post_init__(self) -> None:
        _check_number("factor", self.factor, least=1)

    @property
    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, base: float, d_rotary: int, positions: Tensor) -> Tensor:
        return _frequencies(base, d_rotary, positions.device) / self.factor


@dataclass(frozen=True)
class Dynamic:
    """NTK-aware scaling beyond `original` positions: the base grows with the length of a sequence.

        length = max(largest position + 1, original)
        base   = base * (factor * length / original - factor + 1)^(d_rotary / (d_rotary - 2))

    With positions (B, N) every row has its own length, so that a row's result does not depend on the batch.
    Transformers uses the longest row of the batch for all and keeps it for later calls; both agree on one sequence.

    >>> import regard as rg
    >>> x = torch.randn(16, 8)
    >>> torch.equal(rg.rotary(x, scaling=rg.positions.Dynamic(2.0, original=16)), rg.rotary(x))
    True
    """

    factor: float
    original: int

    def __post_init__(self) -> None:
        _check_number("factor", self.factor, least=1)
        _check_number("original", self.original, least=1)

    @property
    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, base: float, d_rotary: int, positions: Tensor) -> Tensor:
        if d_rotary == 2:  # the only pair rotates by 1 for every base
            return _frequencies(base, d_rotary, positions.device)
        if not positions.shape[-1]:
            return _frequencies(base, d_rotary, positions.device)
        length = (positions.amax(-1) + 1).clamp(min=self.original).to(_precision(positions.device))
        growth = self.factor * length / self.original - (self.factor - 1)
        return _frequencies(base * growth.unsqueeze(-1) ** (d_rotary / (d_rotary - 2)), d_rotary, positions.device)


@dataclass(frozen=True)
class Yarn:
    """YaRN: pairs that rotate fast within `original` positions keep their angle, slow ones are interpolated.

    Pairs with more than `beta_fast` turns are kept, those with fewer than `beta_slow` are divided by `factor`, with a
    linear ramp between (rounded to whole pairs unless `truncate` is false). The rotated channels are multiplied by
    `attention_factor`; if None, by m(mscale) / m(mscale_all_dim) if both are given, else by m(1), where
    m(s) = 0.1 s ln(factor) + 1. Argument names are those of the checkpoints.

    >>> import regard as rg
    >>> rg.rotary(torch.randn(2, 4, 32, 64), scaling=rg.positions.Yarn(4.0, original=4096)).shape
    torch.Size([2, 4, 32, 64])
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_number("factor", self.factor, least=1)
        _check_number("original", self.original, least=1)
        _check_number("beta_slow", self.beta_slow, above=0)
        _check_number("beta_fast", self.beta_fast, above=0)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast must be greater than beta_slow, but they are {self.beta_fast} and "
                f"{self.beta_slow}; the paper has 32 and 1"
            )
        if self.attention_factor is not None:
            _check_number("attention_factor", self.attention_factor, above=0)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least=0)

    @property
    def magnitude(self) -> float:
        def yarn_magnitude(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.mscale) / yarn_magnitude(self.mscale_all_dim)
        return yarn_magnitude(1.0)

    def frequencies(self, base: float, d_rotary: int, positions: Tensor) -> Tensor:
        def pair(turns: float) -> float:
            """Return the (fractional) pair that makes this many turns within the original length."""
            return d_rotary * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, d_rotary - 1)
        span = last - first if last != first else 0.001
        unscaled = _frequencies(base, d_rotary, positions.device)  # (d_rotary / 2,)
        ramp = (torch.arange(d_rotary // 2, dtype=unscaled.dtype, device=unscaled.device) - first) / span
        return torch.lerp(unscaled, unscaled / self.factor, ramp.clamp(0, 1))


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: divides long wavelengths by `factor` and keeps short ones, with a smooth transition.

    A pair with more than `high_frequency` turns within `original` positions is kept, one with fewer than
    `low_frequency` turns is divided by `factor`; between the two, the blend is linear in the number of turns.

    >>> import regard as rg
    >>> scaling = rg.positions.Llama3(8.0, low_frequency=1.0, high_frequency=4.0, original=8192)
    >>> rg.rotary(torch.randn(2, 4, 32, 64), base=500000.0, scaling=scaling).shape
    torch.Size([2, 4, 32, 64])
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original: int

    def __post_init__(self) -> None:
        _check_number("factor", self.factor, least=1)
        _check_number("low_frequency", self.low_frequency, above=0)
        _check_number("high_frequency", self.high_frequency, above=0)
        _check_number("original", self.original, least=1)
        if self.high_frequency <= self.low_frequency:
            raise ValueError(
                f"high_frequency must be greater than low_frequency, but they are {self.high_frequency} and "
                f"{self.low_frequency}; Llama 3.1 has 4 and 1"
            )

    @property
    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, base: float, d_rotary: int, positions: Tensor) -> Tensor:
        unscaled = _frequencies(base, d_rotary, positions.device)
        turns = self.original * unscaled / (2 * math.pi)
        share = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0, 1)
        return torch.lerp(unscaled / self.factor, unscaled, share)


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: divides the angle of each pair by a factor of its own, `long` in sequences beyond `original` positions.

    short, long: factors, one per pair. factor: by how much the context was extended; the rotated channels are
    multiplied by `attention_factor`, by default sqrt(1 + ln(factor) / ln(original)). With positions (B, N) every row
    has its own length, so that a row's result does not depend on the batch. Transformers uses the longest row for all;
    both agree on one sequence.

    >>> import regard as rg
    >>> scaling = rg.positions.LongRope((1.0, 2.0), (1.0, 8.0), original=4096, factor=32.0)
    >>> rg.rotary(torch.randn(2, 4, 32, 4), scaling=scaling).shape
    torch.Size([2, 4, 32, 4])
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_number("original", self.original, least=2)
        _check_number("factor", self.factor, above=0)
        if self.attention_factor is not None:
            _check_number("attention_factor", self.attention_factor, above=0)
        for name in ("short", "long"):
            for value in getattr(self, name):
                _check_number(name, value, above=0)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + max(math.log(self.factor), 0.0) / math.log(self.original))

    def frequencies(self, base: float, d_rotary: int, positions: Tensor) -> Tensor:
        for name in ("short", "long"):
            if len(getattr(self, name)) != d_rotary // 2:
                raise ValueError(
                    f"{name} must have a factor for each of the d_rotary / 2 = {d_rotary // 2} pairs, got "
                    f"{len(getattr(self, name))}"
                )
        unscaled = _frequencies(base, d_rotary, positions.device)
        short, long = (unscaled / torch.tensor(x, dtype=unscaled.dtype, device=unscaled.device)
                       for x in (self.short, self.long))  # fmt: skip
        if not positions.shape[-1]:
            return short
        return torch.where((positions.amax(-1) >= self.original).unsqueeze(-1), long, short)


def _frequencies(base: float | Tensor, d_rotary: int, device: torch.device) -> Tensor:
    return base ** (-torch.arange(0, d_rotary, 2, dtype=_precision(device), device=device) / d_rotary)


def _precision(device: torch.device) -> torch.dtype:
    """Return the dtype of angles: float32 (MPS only) is wrong in the third digit at 100,000 positions."""
    return torch.float32 if device.type == "mps" else torch.float64


def _positions(x: Tensor, positions: Tensor | int | None) -> Tensor:
    """Return positions as a tensor that broadcasts against `x` without its last axis: `(N,)` or `(B, 1, N)`."""
    length = x.shape[-2]
    if positions is None:
        return torch.arange(length, device=x.device)
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        return torch.arange(length, device=x.device) + positions
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"positions must be a tensor of integers, a number or None, but is {type(positions).__name__}; "
            "try torch.tensor(positions)"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, but is {positions.dtype}; try positions.long()")
    if positions.device != x.device:
        raise ValueError(
            f"positions must be on the device of x, {x.device}, but is on {positions.device}; "
            "try positions.to(x.device)"
        )
    batch = x.shape[0] if x.ndim == 4 else 1
    shape = tuple(positions.shape)
    if shape == (length,):
        return positions
    if shape not in {(batch, length), (1, length)}:
        raise ValueError(
            f"positions must have the shape (N,) = ({length},) or (B, N) = ({batch}, {length}) for x of shape "
            f"{tuple(x.shape)}, but is {shape}; x is read as (B, H, N, D), (H, N, D) or (N, D)"
        )
    return positions[:, None] if x.ndim == 4 else positions[0]


def _check(x: Tensor, base: float, d_rotary: int | None, scaling: Scaling | None) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, but is {type(x).__name__}; try torch.as_tensor(x)")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, but is {x.dtype}; try x.float()")
    if x.ndim not in (2, 3, 4):
        raise ValueError(f"x must have the shape (B, H, N, D), (H, N, D) or (N, D), but its shape is {tuple(x.shape)}")
    _check_number("base", base, above=1)
    if scaling is not None and (isinstance(scaling, type) or not hasattr(scaling, "frequencies")):
        raise TypeError(
            "scaling must be None or one of Linear, Dynamic, Yarn, Llama3 and LongRope of regard.positions, but is "
            f"{scaling!r}; try scaling=regard.positions.Linear(2.0)"
        )
    size = x.shape[-1]
    if d_rotary is None:
        if size % 2:
            raise ValueError(
                f"x must have an even width D to be rotated in pairs, but it is {size}; try d_rotary={size - 1}"
            )
        return size
    if isinstance(d_rotary, bool) or not isinstance(d_rotary, int):
        raise TypeError(
            f"d_rotary must be an integer, but is {type(d_rotary).__name__} {d_rotary!r}; try d_rotary=int(...)"
        )
    if d_rotary % 2 or not 2 <= d_rotary <= size:
        raise ValueError(f"d_rotary must be even and between 2 and D = {size}, but is {d_rotary}")
    return d_rotary


def _check_number(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, but is {type(value).__name__} {value!r}; try {name}=float(...)")
    if not (least <= value < math.inf and value > above):
        bound = f"at least {least}" if least > above else f"greater than {above}"
        raise ValueError(f"{name} must be finite and {bound}, but is {value}")
