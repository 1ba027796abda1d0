"""Formats of packed weights: float32, bfloat16, and small integers with a scale per group of 32 inputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs that share a scale
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "int4_minimum": 4}  # numbers of csrc/regard.h
BYTES = {"float32": 4, "bfloat16": 2, "int8": 34 / 32, "int4": 18 / 32, "int4_minimum": 20 / 32}  # per number
CHOICES = ("float32", "bfloat16", "int8", "int4")  # formats that a float32 weight can be converted to
_INT4_STEPS = 24  # scales tried per group
_MINIMUM_FITS = 5  # scales and minimums tried per group
_MINIMUM_GAIN = 0.7  # share of the symmetric error below which a minimum per group is worth its bytes
LEAST_FACTOR = -125  # exponent of the least factor of float16 scales: their least step, 2^-24, becomes 2^-149
_CHUNK = 1 << 22  # numbers quantised at a time


class Quantized(NamedTuple):
    """Integers (N, K) and, per row and group of 32 inputs, a scale and perhaps a minimum, (N, ceil(K / 32)) float32.

    format: "int8" with numbers from -128 to 127, or "int4" or "int4_minimum" with numbers from 0 to 15.

    >>> import torch
    >>> from regard.engines.weight_formats import quantize
    >>> weight = torch.linspace(-1, 1, 64).view(2, 32)
    >>> (quantize(weight, "int8").dequantize() - weight).abs().max().item() < 1 / 127
    True
    """

    format: str
    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Return the weight (N, K) in float32: numbers * scale for int8, (numbers - 8) * scale for int4, and
        numbers * scale + minimum for int4_minimum."""
        return _dequantize(self.format, self.numbers, self.scale, self.minimum)


def _dequantize(format: str, numbers: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    columns = numbers.shape[-1]
    groups = F.pad(numbers, (0, -columns % GROUP)).unflatten(-1, (-1, GROUP)).float()
    if format == "int4":
        groups -= 8
    groups *= scale.unsqueeze(-1)
    if minimum is not None:
        groups += minimum.unsqueeze(-1)
    return groups.flatten(-2)[..., :columns].contiguous()


def quantize(weight: Tensor, format: str) -> Quantized:
    """Quantise a finite float32 weight (N, K) to "int8" or "int4", symmetrically.

    Scales are float16 numbers times one power of two per weight: groups whose numbers are all below 2^-28 of the
    largest number of the weight lose digits, and those below 2^-38 become 0. For int4 the scale of a group is the best
    of several in the sum of squared differences, and a weight whose groups are far from symmetric gets a minimum per
    group as well ("int4_minimum").
    """
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    # The scales of all groups are below 2^15 units. The least float16 number of units is one of float32.
    exponent = max(math.frexp(largest)[1] if largest else 0, LEAST_FACTOR + 16)
    parts = weight.detach().split(max(1, _CHUNK // weight.shape[1]))
    symmetric = _join(format, [_quantize_rows(part, format, 2.0 ** (exponent - 16)) for part in parts])
    if format != "int4":
        return symmetric
    shifted = _join("int4_minimum", [_shift_rows(part, 2.0 ** (exponent - 15)) for part in parts])
    errors = [(each.dequantize() - weight).square().sum(dtype=torch.float64) for each in (shifted, symmetric)]
    return shifted if errors[0] < _MINIMUM_GAIN * errors[1] else symmetric


def _join(format: str, parts: list[tuple[Tensor, ...]]) -> Quantized:
    return Quantized(format, *map(torch.cat, zip(*parts, strict=True)))


def _shift_rows(weight: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each group to 16 steps, at first from its least to its largest number.

    Then, in turns, the scale and minimum with the least sum of squared differences for these numbers, and the nearest
    numbers for that scale and minimum.
    """
    K = weight.shape[1]
    groups = F.pad(weight / unit, (0, -K % GROUP), mode="replicate").unflatten(-1, (-1, GROUP))
    mean = groups.mean(-1, keepdim=True)
    minimum = groups.amin(-1, keepdim=True).half().float()
    scale = ((groups.amax(-1, keepdim=True) - minimum) / 15).half().float()
    best: tuple[Tensor, ...] = groups, scale, minimum
    least = torch.full_like(scale, math.inf)
    for _ in range(_MINIMUM_FITS):
        numbers = torch.where(scale == 0, 0.0, (groups - minimum) / scale).round_().clamp_(0, 15)
        error = (numbers * scale + minimum - groups).square_().sum(-1, keepdim=True)
        best = tuple(map(torch.where, (error < least,) * 3, (numbers, scale, minimum), best))
        least = torch.minimum(least, error)
        middle = numbers.mean(-1, keepdim=True)
        centred = numbers - middle
        squares = centred.square().sum(-1, keepdim=True)
        fitted = (centred * groups).sum(-1, keepdim=True) / squares
        scale = torch.where(squares == 0, scale, fitted).half().float()
        minimum = (mean - scale * middle).half().float()
    numbers, scale, minimum = best
    return numbers.flatten(-2)[:, :K].to(torch.uint8), scale.squeeze(-1) * unit, minimum.squeeze(-1) * unit


def _quantize_rows(weight: Tensor, format: str, unit: float) -> tuple[Tensor, Tensor]:
    K = weight.shape[1]
    groups = F.pad(weight / unit, (0, -K % GROUP)).unflatten(-1, (-1, GROUP))

    def round_scale(scale: Tensor) -> Tensor:
        return scale.half().float()

    def nearest(scale: Tensor, least: int, most: int) -> Tensor:
        return torch.where(scale == 0, 0.0, groups / scale).round().clamp(least, most)

    if format == "int8":
        scale = round_scale(groups.abs().amax(-1, keepdim=True) / 127)
        numbers = nearest(scale, -127, 127)
    else:
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # becomes -8
        scale, best = torch.zeros_like(extreme), torch.full_like(extreme, math.inf)
        for divisor in (
            torch.linspace(-8.5, -6.5, _INT4_STEPS // 2).tolist()
            + torch.linspace(6.5, 8.5, _INT4_STEPS - _INT4_STEPS // 2).tolist()
        ):
            candidate = round_scale(extreme / divisor)
            error = (nearest(candidate, -8, 7) * candidate - groups).square_().sum(-1, keepdim=True)
            better = error < best
            scale, best = torch.where(better, candidate, scale), torch.where(better, error, best)
        numbers = nearest(scale, -8, 7) + 8
    dtype = torch.int8 if format == "int8" else torch.uint8
    return numbers.flatten(-2)[:, :K].to(dtype), scale.squeeze(-1) * unit


class PanelLayout(NamedTuple):
    """How panels hold a weight (rows, columns): csrc/regard.h describes the formats."""

    format: str
    rows: int
    columns: int
    factor: float = 1.0  # of all scales


def pack(weight: Tensor | Quantized, format: str, side: int) -> tuple[Tensor, PanelLayout]:
    """Pack a weight (N, K) into panels of `side` rows: (panels, K, side) for float32, otherwise bytes (panels, ...)."""
    if isinstance(weight, Quantized):
        return _pack_groups(weight, side)
    N, K = weight.shape
    if format == "float32":
        panels = F.pad(weight, (0, 0, 0, -N % side)).view(-1, side, K).transpose(1, 2)
        return copy_of(panels), PanelLayout(format, N, K)
    if format != "bfloat16":
        return _pack_groups(quantize(weight, format), side)
    padded = F.pad(weight.bfloat16(), (0, K % 2, 0, -N % side)).view(-1, side, (K + 1) // 2, 2)
    return _as_bytes(padded.transpose(1, 2)).flatten(1), PanelLayout(format, N, K)


def _pack_groups(weight: Quantized, side: int) -> tuple[Tensor, PanelLayout]:
    (N, K), groups = weight.numbers.shape, weight.scale.shape[1]
    parts = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    factor = _common_factor(parts)
    heads = []
    for part in parts:
        half = (part / factor).half()
        if not torch.equal(half.float() * factor, part):
            raise ValueError("the scales of a quantised weight must be float16 numbers times one power of two")
        heads.append(_as_bytes(F.pad(half, (0, 0, 0, -N % side)).view(-1, side, groups).transpose(1, 2)))
    neutral = 8 if weight.format == "int4" else 0
    numbers = F.pad(weight.numbers, (0, -K % GROUP, 0, -N % side), value=neutral).view(-1, side, groups, GROUP)
    if weight.format == "int8":
        body = _as_bytes(numbers.permute(0, 2, 3, 1)).flatten(2)
    else:
        pairs = numbers[..., 0::2] | numbers[..., 1::2] << 4  # (panels, side, groups, 16)
        body = copy_of(pairs.unflatten(-1, (4, 4)).permute(0, 2, 3, 1, 4)).flatten(2)
    return torch.cat([*heads, body], -1).flatten(1), PanelLayout(weight.format, N, K, factor)


def _common_factor(parts: list[Tensor]) -> float:
    """Return the power of two whose float16 multiples the numbers are: 1 if they are float16 numbers themselves."""
    if all(torch.equal(part.half().float(), part) for part in parts):
        return 1.0
    largest = max(float(part.abs().max()) for part in parts if part.numel())
    if not largest or not math.isfinite(largest):
        return 1.0
    # The least factor for which the largest scale is a float16 number, so that the fewest small ones lose digits.
    return 2.0 ** max(math.frexp(largest)[1] - 16, LEAST_FACTOR)


def unpack(panels: Tensor, layout: PanelLayout) -> Tensor:
    """Return the weight (N, K) in float32."""
    if layout.format == "float32":
        plain = copy_of(panels.transpose(1, 2)).flatten(0, 1)
        return plain if len(plain) == layout.rows else plain[: layout.rows].clone()
    if layout.format == "bfloat16":
        pairs = panels.view(torch.bfloat16).view(len(panels), (layout.columns + 1) // 2, -1, 2)
        return pairs.transpose(1, 2).flatten(2).flatten(0, 1)[: layout.rows, : layout.columns].float()
    return unpack_groups(panels, layout).dequantize()


def unpack_groups(panels: Tensor, layout: PanelLayout) -> Quantized:
    """Return the integers and scales of a weight that is packed in a format with groups."""
    numbers, scale, minimum = (
        None if part is None else part.flatten(0, 1)[: layout.rows]
        for part in _group_parts(panels, layout, slice(None), slice(None))
    )
    assert numbers is not None
    assert scale is not None
    return Quantized(layout.format, numbers, scale, minimum)


def read_rows(panels: Tensor, layout: PanelLayout, rows: Tensor) -> Tensor:
    """Return the rows of the weight with these numbers, (*rows.shape, K) in float32."""
    if layout.format == "float32":
        side = panels.shape[2]
        return panels[rows // side, :, rows % side]
    side = _side(panels, layout)
    panel, row = rows // side, rows % side
    if layout.format == "bfloat16":
        pairs = panels.view(torch.bfloat16).view(len(panels), (layout.columns + 1) // 2, side, 2)
        return pairs[panel, :, row].flatten(-2)[..., : layout.columns].float()
    numbers, scale, minimum = _group_parts(panels, layout, panel, row)
    assert numbers is not None
    assert scale is not None
    return _dequantize(layout.format, numbers, scale, minimum)


def _group_parts(
    panels: Tensor, layout: PanelLayout, panel: slice | Tensor, row: slice | Tensor
) -> tuple[Tensor | None, ...]:
    """Return numbers, scales and minimums of some rows, which are the last axis but one, or the index' own axes."""
    side, groups = _side(panels, layout), -(-layout.columns // GROUP)
    heads = 2 if layout.format == "int4_minimum" else 1
    bytes_ = panels.view(len(panels), groups, -1)

    def select(part: Tensor) -> Tensor:  # (panels, groups, side, n) to (..., rows, groups, n)
        return part.transpose(1, 2)[panel, row]

    numbers_per_group: list[Tensor | None] = []
    for n in range(2):
        if n >= heads:
            numbers_per_group.append(None)
            continue
        half = bytes_[..., 2 * side * n : 2 * side * (n + 1)].view(torch.float16).unsqueeze(-1)
        numbers_per_group.append(select(half).squeeze(-1).float() * layout.factor)
    body = bytes_[..., 2 * side * heads :]
    if layout.format == "int8":
        numbers = select(body.view(torch.int8).unflatten(-1, (GROUP, side)).transpose(2, 3))
    else:
        pairs = select(body.unflatten(-1, (4, side, 4)).transpose(2, 3)).flatten(-2)
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return numbers.flatten(-2)[..., : layout.columns], *numbers_per_group


def _side(panels: Tensor, layout: PanelLayout) -> int:
    """Return the number of rows of a panel."""
    groups = -(-layout.columns // GROUP)
    per_row = {
        "bfloat16": 4 * ((layout.columns + 1) // 2),
        "int8": groups * (2 + GROUP),
        "int4": groups * (2 + GROUP // 2),
        "int4_minimum": groups * (4 + GROUP // 2),
    }
    return panels.shape[1] // per_row[layout.format]


def copy_of(x: Tensor) -> Tensor:
    """Return a contiguous copy; `contiguous()` of panels with one column does not copy."""
    return x.clone(memory_format=torch.contiguous_format)


def _as_bytes(x: Tensor) -> Tensor:
    return copy_of(x).view(torch.uint8)
