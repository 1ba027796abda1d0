"""torch's FlexAttention, for accelerators: the description lowered to its `mask_mod` and `score_mod`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.cache import CACHE
from regard.engines import tiled
from regard.engines.derivatives import Tensors, differentiable_twice
from regard.engines.lowering import LoweredTensors, lower
from regard.engines.mask_layout import TILE, mask_layout
from regard.engines.problem import Engine, Problem
from regard.engines.reference import replace_nonfinite
from regard.fingerprint import without_transforms
from regard.geometry import Frame
from regard.masks import Mask, tiles
from regard.masks.tiles import Tiles
from regard.positions.biases import Bias, Shaw, Sum, is_built_in
from regard.scores import Bilinear, Cosine, Dot, Modified, Score

DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")
BLOCK = (128, 128)  # queries and keys of a block of torch's BlockMask


def run(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if not _has_double_backward(problem):
        return _attend(problem, query, key, value)

    def kernel(tensors: Tensors) -> tuple[Tensor, Tensor]:
        output, lse = _attend(tiled.with_tensors(problem, tensors[3:]), *tensors[:3])
        assert lse is not None
        return output, lse

    output, lse = differentiable_twice(kernel, tiled.TiledOperator(problem, None), query, key, value, *problem.tensors)
    return output, lse


def _has_double_backward(problem: Problem) -> bool:
    """Whether `tiled` provides the derivatives that torch's kernel lacks."""
    closed = problem.score.closes_over_trainable(problem.device)
    return problem.grad and not closed and not torch.compiler.is_compiling()


def fallback(problem: Problem) -> list[str]:
    return ["tiled computes second derivatives"] if _has_double_backward(problem) else []


def _attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest

    bad = None
    if problem.mask is not None:
        key, value, bad = replace_nonfinite(key, value)
    modifier = problem.score.function if isinstance(problem.score, Modified) else None
    base = replace(problem, score=_base(problem.score))
    x, _, scale = lower(base, query, key, value)
    # torch's kernel cannot be traced with views that have the negative bit.
    x = LoweredTensors._make(None if tensor is None else tensor.resolve_neg() for tensor in x)
    softcap = base.score.softcap if isinstance(base.score, Dot) else None
    # Compiled for a CPU, torch's kernel has no log-sum-exp.
    wants = problem.lse or problem.grad or x.sink is not None
    result = _kernel(query.device.type)(
        x.query, x.key, x.value, score_mod=_score_mod(problem, x, softcap, modifier, bad),
        block_mask=block_mask(problem, query.device), scale=scale, enable_gqa=problem.G != problem.frame.H,
        return_aux=AuxRequest(lse=True) if wants else None,
    )  # fmt: skip
    if not wants:
        return result, None
    output, lse = result[0], result[1].lse.to(problem.compute_dtype)
    if x.sink is not None:
        total = torch.logaddexp(lse, x.sink[:, None])
        output = (output * (lse - total).exp().unsqueeze(-1)).to(problem.dtype)
        lse = total
    return output, lse


def _base(score: Score) -> Score:
    return score.score if isinstance(score, Modified) else score


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compile FlexAttention; on a CPU it runs uncompiled, which is enough for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cpu":
        return torch.compile(flex_attention)

    def eager(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*arguments, **options)

    return eager


def block_mask(problem: Problem, device: torch.device) -> Any:
    """Return the mask as torch's BlockMask, built from the tile table and cached by content; None without a mask.

    Its mask function reads the mask layout of the kernels, whose tensors are inputs of the compiled kernel.
    """
    if problem.mask is None:
        return None
    mask, key = problem.mask.snapshot(), problem.frame.cache_key()
    content = mask.content()
    known = None if content is None else ("block mask", content, key, device)
    with without_transforms():
        return CACHE.get_or_build(known, lambda: _build_block_mask(mask, problem.frame, device), owner=mask)


def _build_block_mask(mask: Mask, frame: Frame, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    table = tiles(mask, frame, BLOCK)
    kinds = torch.from_numpy(_tile_map(table, np.where(table.full, 2, 1), 0, step=False))
    if frame.Q % BLOCK[0]:  # to torch, a block that is cut off is not full
        kinds[..., -1, :].clamp_(max=1)
    if frame.K % BLOCK[1]:
        kinds[..., -1].clamp_(max=1)

    def blocks_of_kind(kind: int) -> tuple[Tensor, Tensor]:
        chosen = kinds == kind
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)  # those of this kind first, ascending
        return chosen.sum(-1, dtype=torch.int32).to(device), order.int().to(device)

    (partial, partial_at), (full, full_at) = blocks_of_kind(1), blocks_of_kind(2)
    return BlockMask.from_kv_blocks(
        partial, partial_at, full, full_at, BLOCK_SIZE=BLOCK, mask_mod=_mask_mod(mask, frame, device),
        seq_lengths=(frame.Q, frame.K),
    )  # fmt: skip


def _tile_map(table: Tiles, values: np.ndarray, empty: int, *, step: bool) -> np.ndarray:
    """Return a number for each tile, (B or 1, H or 1, row tiles, key tiles): the value of its run.

    empty: the number of empty tiles. step: count values that are not negative up along a run.
    """
    length = table.stop - table.start
    line = np.repeat(np.repeat(np.arange(len(table.pointer) - 1), np.diff(table.pointer)), length)
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    tile_map = np.full((*table.extent, *table.grid), empty, np.int64)
    per_tile = np.repeat(values, length)
    tile_map.reshape(-1, table.grid[1])[line, np.repeat(table.start, length) + inside] = np.where(
        step & (per_tile >= 0), per_tile + inside, per_tile
    )
    return tile_map


def _mask_mod(mask: Mask, frame: Frame, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    layout = mask_layout(mask, frame.cache_key()).tensors
    if len(layout) == 2:
        start, stop = (edge.to(device).expand(frame.B, frame.H, frame.Q) for edge in layout)
        return lambda b, h, i, j: (start[b, h, i] <= j) & (j < stop[b, h, i])
    table, bits = tiles(mask, frame, (TILE, TILE)), layout[4].to(device).reshape(-1, TILE)
    if not len(bits):
        bits = torch.zeros(1, TILE, dtype=torch.int64, device=device)
    places = torch.from_numpy(_tile_map(table, layout[3].numpy(), -2, step=True))
    places = places.to(device).expand(frame.B, frame.H, *table.grid)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = places[b, h, i // TILE, j // TILE]
        seen = (bits[place.clamp(min=0), i % TILE] >> (j % TILE)) & 1
        return (place == -1) | ((place >= 0) & (seen == 1))

    return mask_mod


def _score_mod(
    problem: Problem, x: LoweredTensors, softcap: float | None, modifier: Callable | None, bad: Tensor | None
) -> Callable[..., Tensor] | None:
    """Build a score_mod that applies softcap, modifier, bias and temperature in the order of the definition."""
    B, H, Q, K = problem.frame.B, problem.frame.H, problem.frame.Q, problem.frame.K
    repeats, temperature, offset, radius = H // problem.G, problem.temperature, problem.frame.offset, 0
    if isinstance(offset, Tensor):
        offset = offset.to(x.query.device)
    diagonal = None if x.diagonal is None else x.diagonal.expand(B, H, 1, Q + K - 1)
    table = x.row_table
    bias = None if x.bias is None else x.bias.expand(B, H, Q, K)
    if table is not None:
        radius = table.shape[-1] // 2
    parts = diagonal, table, bias, modifier, softcap, bad
    if all(part is None for part in parts) and temperature == 1:
        return None

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * (s / softcap).tanh()
        p = i + (offset[b] if isinstance(offset, Tensor) else offset)
        if modifier is not None:
            s = modifier(s, b, h, p, j)
        if diagonal is not None:
            s = s + diagonal[b, h, 0, j - i + Q - 1]
        if table is not None:
            s = s + table[b, h, i, (j - p).clamp(-radius, radius) + radius]
        if bias is not None:
            s = s + bias[b, h, i, j]
        s = s / temperature
        return s if bad is None else torch.where(bad[b, h // repeats, j], float("nan"), s)

    return score_mod


def why_not(problem: Problem) -> list[str]:
    base = problem.score.score if isinstance(problem.score, Modified) else problem.score
    parts = problem.bias.parts() if isinstance(problem.bias, Bias | Sum) else ()
    reasons = []
    if problem.empty:
        reasons.append("an axis is empty")
    if not problem.softmax:
        reasons.append(f"its kernel computes a softmax, not {problem.normalization!r}")
    if problem.max_logit:
        reasons.append("its kernel does not return the largest logits")
    if problem.device.type == "meta":
        reasons.append("it reads values, and meta tensors have none")
    elif problem.device.type not in DEVICES:
        reasons.append(f"torch has no FlexAttention for {problem.device.type}")
    if type(base) not in (Dot, Cosine, Bilinear):
        reasons.append(f"its kernel supports dot products, not {base!r}")
    if problem.bias is not None and not is_built_in(problem.bias):
        reasons.append(f"its kernel does not support {problem.bias!r}")
    if problem.dropout:
        reasons.append("it has no dropout")
    if any(isinstance(part, Shaw) and part.values is not None for part in parts):
        reasons.append("it does not support the value part of shaw")
    if problem.device.type in ("cpu", "mps") and problem.grad:
        reasons.append(f"FlexAttention cannot train on {'a CPU' if problem.device.type == 'cpu' else 'mps'}")
    if problem.tangent:
        reasons.append("its kernel has no forward mode")
    if problem.in_transform:
        reasons.append("it uses vmap internally, and does not nest in one")
    return reasons


def why_avoid(problem: Problem) -> list[str]:
    reasons = []
    if problem.device.type == "cpu":
        reasons.append("on a CPU it computes densely unless compiled, which takes many seconds")
    if torch.compiler.is_compiling():
        reasons.append("its block mask is not built under torch.compile")
    return reasons


def peak_bytes(problem: Problem) -> int:
    if problem.device.type != "cpu":
        return 0
    frame = problem.frame
    return 3 * torch.empty((), dtype=problem.compute_dtype).element_size() * frame.B * frame.H * frame.Q * frame.K


def remarks(problem: Problem) -> list[str]:
    return [] if problem.device.type == "cpu" else ["not run on a GPU by its authors: only compiled for a CPU"]


def _dense(problem: Problem) -> bool:
    return problem.device.type == "cpu"


ENGINE = Engine("flex", why_not, why_avoid, run, peak_bytes, _dense, fallback, remarks)
