"""Stacks of transformer blocks with packed weights, in one call of the kernels."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.engines.native.attention import pack_problem
from regard.engines.native.binding import ACTIVATIONS, BLOCK, PROBLEM, STACK, TENSOR, call, why_missing
from regard.engines.native.engine import prepare, why_not
from regard.engines.packed_linear import PackedWeight
from regard.engines.problem import Problem
from regard.engines.weight_formats import FORMATS


@dataclass(frozen=True)
class StackSizes:
    """What all blocks of a stack have in common. activation: a key of `binding.ACTIVATIONS`."""

    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_hidden: int
    post_norm: bool
    rms_norm: bool
    eps: float
    gated: bool
    activation: str

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise KeyError(self.activation)

    @property
    def qkv(self) -> int:
        """Width of the projected queries, keys and values of a token."""
        return (self.heads + 2 * self.kv_heads) * self.d_head

    @property
    def up(self) -> int:
        return 2 * self.d_hidden if self.gated else self.d_hidden


@dataclass(frozen=True)
class BlockTensors:
    """The tensors of a block. weights: qkv, output, up and down, each with its bias or None."""

    weights: tuple[tuple[PackedWeight, Tensor | None], ...]
    gains: tuple[Tensor, Tensor]
    shifts: tuple[Tensor, Tensor] | None
    attention: int  # index of its description


def pack_blocks(blocks: Sequence[BlockTensors]) -> Tensor:
    """Pack the addresses of all tensors; the caller keeps the tensors."""
    return _buffer([BLOCK.pack(*_block_fields(block)) for block in blocks])


def _block_fields(block: BlockTensors) -> list[float]:
    fields: list[float] = []
    for weight, bias in block.weights:
        layout = weight.layout_of_panels
        fields += [*layout[1:3], weight.panels.data_ptr(), 0 if bias is None else bias.data_ptr(), layout.factor]
        fields += [FORMATS[layout.format], bias is not None]
    fields += [gain.data_ptr() for gain in block.gains]
    fields += [0, 0] if block.shifts is None else [shift.data_ptr() for shift in block.shifts]
    return [*fields, block.attention]


def pack_attention(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[bytes, object] | None:
    """Pack a problem whose tensors the kernel reads as they are, with what it points to; None for other problems."""
    if why_missing() or why_not(problem) or problem.dropout or not problem.direct:
        return None
    x, shaw, fixed = prepare(problem, query, key, value, None)
    pairs = ((x.query, query), (x.key, key), (x.value, value))
    same = all(one.data_ptr() == other.data_ptr() and one.stride() == other.stride() for one, other in pairs)
    if shaw is not None or not same or x.weight is not None:
        return None
    return pack_problem(x, fixed), (x, fixed)


def with_keys(packed: bytes, keys: int) -> bytes:
    """Return a packed problem without a mask and biases for another number of keys."""
    at = PROBLEM.offsets["K"]
    return packed[:at] + struct.pack("@q", keys) + packed[at + 8 :]


def pack_caches(tensors: Sequence[Tensor]) -> Tensor:
    """Pack caches (B, G, capacity, D)."""
    return _buffer([TENSOR.pack(tensor.data_ptr(), *tensor.stride(), 1) for tensor in tensors])


@dataclass(frozen=True)
class Scratch:
    """Memory of one call, for B sequences of N tokens."""

    memory: Tensor
    y: int
    normed: int
    qkv: Tensor  # (B, N, H + 2 G, D)
    attended: int
    hidden: int

    @staticmethod
    def allocate(sizes: StackSizes, B: int, N: int) -> Scratch:
        d, attended = sizes.d_model, sizes.heads * sizes.d_head
        widths = [-(-B * N * width // 16) * 16 for width in (sizes.qkv, d, d, attended, sizes.up)]
        memory = torch.empty(sum(widths), dtype=torch.float32, device="cpu")
        qkv = memory[: B * N * sizes.qkv].view(B, N, -1, sizes.d_head)
        starts = [memory.data_ptr() + 4 * sum(widths[:n]) for n in range(1, 5)]
        return Scratch(memory, starts[0], starts[1], qkv, starts[2], starts[3])


def run_stack(
    sizes: StackSizes,
    blocks: Tensor,
    layers: int,
    x: Tensor,
    scratch: Scratch,
    attentions: Sequence[bytes],
    table: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    caches: tuple[Tensor, Tensor] | None,
) -> None:
    """Apply the blocks to x (B, N, d_model) in place.

    table: cosines and signed sines, contiguous, (N, d_rotary), (1, N, d_rotary) or (B, N, d_rotary). caches: keys and
        values by layer.
    """
    B, N = x.shape[:2]
    packed = _buffer(attentions)
    rotation = (0, 0, 0, 0)
    if table is not None:
        cos, sin = table
        rotation = cos.data_ptr(), sin.data_ptr(), cos.shape[-1], N if cos.dim() == 3 and len(cos) > 1 else 0
    keys, values = (0, 0) if caches is None else (tensors.data_ptr() for tensors in caches)
    given = STACK.pack(
        B, N, sizes.d_model, sizes.heads, sizes.kv_heads, sizes.d_head, sizes.d_hidden, layers, len(attentions),
        blocks.data_ptr(), packed.data_ptr(), keys, values, x.data_ptr(), scratch.y, scratch.normed,
        scratch.qkv.data_ptr(), scratch.attended, scratch.hidden, *rotation, sizes.eps, interleaved, caches is not None,
        sizes.post_norm, sizes.rms_norm, sizes.gated, ACTIVATIONS[sizes.activation], torch.get_num_threads(), 0,
    )  # fmt: skip
    call("regard_run_stack", given)


def _buffer(parts: Sequence[bytes]) -> Tensor:
    """Copy structures to memory that lives as long as the result."""
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
