"""Forward and backward calls of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.triton import launch as launching
from regard.engines.triton.arguments import Layout, empty_output, pack
from regard.engines.triton.availability import is_interpreted
from regard.engines.triton.blocks import (
    ADDITIVE_BACKWARD,
    BACKWARD,
    DECODE,
    DECODE_ROWS,
    FORWARD,
    FORWARD_WITH_BIAS,
    PART_KEYS,
    SINGLE,
    Blocks,
    choose,
)


def forward(
    x: LoweredTensors, fixed: LoweredConstants, layout: Layout, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, in another dtype if given, log-sum-exp and mass by distance, which is empty unless requested."""
    from regard.engines.triton.kernels.forward import forward_kernel

    (B, H, Q, _), device = x.query.shape, x.query.device
    output = empty_output(x.query, x.value.shape[3], dtype)
    if (parts := count_parts(x, fixed)) > 1:
        return output, forward_in_parts(x, fixed, layout, output, parts), torch.empty(0, device=device)
    lse = torch.empty((B, H, Q), dtype=torch.float32, device=device)
    shape = (B, H, Q, 2 * fixed.sizes[0] + 1) if fixed.sizes[1] else (0,)
    mass = torch.zeros(shape, dtype=torch.float32, device=device)
    biased = any(each is not None for each in (x.diagonal, x.row_table, x.bias))
    blocks = choose_blocks(FORWARD_WITH_BIAS if biased else FORWARD, x, layout)
    launching.launch(
        device, forward_kernel, -(-Q // blocks.rows) * B * H,
        pack(x, fixed, layout), output, output.stride(), lse, mass if fixed.sizes[1] else None, 1,
        BM=blocks.rows, BN=blocks.keys, **widths(x), **blocks.options(),
    )  # fmt: skip
    return output, lse, mass


def count_parts(x: LoweredTensors, fixed: LoweredConstants) -> int:
    """Return the number of parts into which the keys of few queries are split, so that all processors have work."""
    (B, H, Q, _), K = x.query.shape, x.key.shape[2]
    if Q > DECODE_ROWS or K < 2 * PART_KEYS or fixed.sizes[1]:
        return 1
    return min(-(-2 * processors(x.query.device) // max(B * H, 1)), -(-K // PART_KEYS), 64)


@cache
def processors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors."""
    if device.type == "cpu":
        return 4  # the interpreter has none; tests take the same paths as a GPU
    return getattr(torch, device.type).get_device_properties(device).multi_processor_count


def forward_in_parts(x: LoweredTensors, fixed: LoweredConstants, layout: Layout, output: Tensor, parts: int) -> Tensor:
    """Compute the output of few queries by parts of the keys, in parallel, and return the log-sum-exp."""
    from regard.engines.triton.kernels.forward import combine_kernel, forward_kernel

    (B, H, Q, _), E, device = x.query.shape, x.value.shape[3], x.query.device
    sums = torch.empty((parts, B, H, Q, E), dtype=torch.float32, device=device)
    logsums = torch.empty((parts, B, H, Q), dtype=torch.float32, device=device)
    lse = torch.empty((B, H, Q), dtype=torch.float32, device=device)
    blocks = choose_blocks(DECODE, x, layout)
    launching.launch(
        device, forward_kernel, parts * B * H, pack(x._replace(sink=None), fixed, layout), sums, sums.stride(), logsums,
        None, parts, BM=blocks.rows, BN=blocks.keys, **widths(x), **blocks.options(),
    )  # fmt: skip
    sizes = widths(x)
    launching.launch(
        device, combine_kernel, B * H * Q, sums, logsums, x.sink, output, output.stride(), lse, H, Q, E, parts,
        B * H * Q, PARTS=1 << (parts - 1).bit_length(), BE=sizes["BE"],
        PRECISION=sizes["PRECISION"], num_warps=1,
    )  # fmt: skip
    return lse


def architecture(device: torch.device) -> str:
    """Return the row of the table of block sizes for a device."""
    if is_interpreted():
        return "interpreter"
    import triton

    with launching.current_device(device):
        target = triton.runtime.driver.active.get_current_target()
    return architecture_of(target.backend, target.arch)


def architecture_of(backend: str, arch: int | str) -> str:
    """Return the row of the table for a target of Triton; sm_120 has the tensor cores of sm_89."""
    if backend == "hip":
        return "gfx9"
    if backend != "cuda":
        return "sm_80"
    return {9: "sm_90", 10: "sm_100"}.get(int(arch) // 10, "sm_80")


def choose_blocks(table: Mapping[str, tuple[Blocks, ...]], x: LoweredTensors, layout: Layout) -> Blocks:
    single = SINGLE if x.query.dtype == torch.float32 and product_precision() == "ieee" else None
    limit = single if x.weight is None else ADDITIVE_BACKWARD if table is BACKWARD else SINGLE
    width = max(x.query.shape[3], x.value.shape[3])
    return choose(table, architecture(x.query.device), width, without_cores=limit, tiles=len(layout.rows) == 5)


def widths(x: LoweredTensors) -> dict[str, Any]:
    """Return the widths of blocks, powers of two, and the precision of products in float32."""
    d, e = (max(16, 1 << (n - 1).bit_length()) for n in (x.query.shape[3], x.value.shape[3]))
    return {"BD": d, "BE": e, "PRECISION": product_precision()}


def product_precision() -> str:
    if is_interpreted():
        return "interpreter"
    # `allow_tf32` raises where a program uses this newer setting
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
