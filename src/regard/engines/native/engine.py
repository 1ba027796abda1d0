"""The native engine: the problems that the kernels support, and their preparation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.engines import lowering, reference
from regard.engines.derivatives import apply, outside_transforms
from regard.engines.dropout import draw_seed
from regard.engines.lowering import (
    LoweredConstants,
    LoweredTensors,
    add_shaw_values,
    in_float32,
    lower,
    lower_normalization,
)
from regard.engines.mask_layout import MaskLayout, find_mask_layout, layout_tensors, mask_layout
from regard.engines.native.attention import Quantized, backward, forward, forward_output
from regard.engines.native.binding import why_missing
from regard.engines.native.jvp import NativeOperator
from regard.engines.native.packed_call import PackedCall
from regard.engines.problem import Engine, Problem
from regard.engines.tensor_memory import NoMemory, is_direct, materialize
from regard.positions.biases import Shaw
from regard.scores import Additive, Dot

SMALL = 1 << 24  # bytes of dense weights below which torch's own operators serve torch.func
MAX_PACKED = 16  # packed calls kept per problem, keyed by query, key and value
BITS_BYTES = 1 << 28  # limit for the bits of partial tiles
MAX_SIZE = 2**31 - 1 - 1024  # the kernels index keys and queries with 32 bits


def assume_constant(function: Any) -> None:
    """Mark a function as constant for tracing, like torch.compiler.assume_constant_result without its imports."""
    function._dynamo_marked_constant = True


assume_constant(why_missing)
assume_constant(layout_tensors)


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Any, ...]:
    if (problem.grad or problem.tangent) and (wide := in_float32(problem)) is not None:
        output, *others = run(wide, query.to(wide.dtype), key.to(wide.dtype), value.to(wide.dtype), seed)
        return output.to(problem.dtype), *others
    if torch.compiler.is_compiling() or not problem.direct:
        return _run_operator(problem, query, key, value, seed)
    if problem.max_logit:
        return _run_with_max_logit(problem, query, key, value, seed)
    try:
        if problem.memo and seed is None:  # packed before, so plain; the plan belongs to this differentiation mode
            return _attend_packed(problem, query, key, value)
        plain = seed is None and problem.bias is None and problem.sink is None and isinstance(problem.score, Dot)
        learned = problem.score.tensors() or problem.normalization.tensors()
        if plain and not (problem.tangent or problem.in_transform or learned):
            return _attend_packed(problem, query, key, value)
        x, shaw, fixed = prepare(problem, query, key, value, seed)
        return _run_kernel(problem, x, shaw, fixed)
    except NoMemory:  # zeros without storage, or freed memory
        return _run_operator(replace(problem, direct=False), query, key, value, seed)


def _run_with_max_logit(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    x, shaw, fixed = prepare(problem, query, key, value, seed)
    x = LoweredTensors(*(None if tensor is None else materialize(tensor) for tensor in x))  # type: ignore[arg-type]
    max_logit = query.new_empty(query.shape[:3], dtype=problem.compute_dtype)
    if problem.grad:
        output, lse, mass = apply(NativeOperator(fixed, max_logit), *x)
    else:
        output, lse, mass = forward(x, fixed, max_logit=max_logit)
    return add_shaw_values(problem, shaw, output, mass), lse, max_logit


def run_quantized(problem: Problem, query: Tensor, quantized: Quantized) -> tuple[Tensor, Tensor | None] | None:
    """Attend to quantized keys and values in place; None if the kernels cannot read them.

    query (B, H, Q, D); the problem is that of the dequantized keys and values.
    """
    key, value = quantized
    parts = (query, key.data, value.data, key.scale, value.scale)
    reads = isinstance(problem.score, Dot) and problem.dtype != torch.float64 and key.data.dtype == value.data.dtype
    if not reads or problem.grad or problem.tangent or problem.in_transform or not is_direct(parts):
        return None
    like, seed = query.new_empty(()), draw_seed(query.device) if problem.dropout else None
    x, shaw, fixed = prepare(problem, query, like.expand(key.shape), like.expand(value.shape), seed)
    output, lse, mass = forward(x, fixed, quantized)
    return add_shaw_values(problem, shaw, output, mass), lse


def _run_operator(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Materialise pending negations and zeros; tensors that are still not plain go to the registered operator."""
    x, shaw, fixed = prepare(problem, query, key, value, seed)
    if not torch.compiler.is_compiling():
        x = LoweredTensors(*(None if tensor is None else materialize(tensor) for tensor in x))  # type: ignore[arg-type]
        if is_direct(x):
            return _run_kernel(problem, x, shaw, fixed)
    output, lse, mass = torch.ops.regard.dot(*x, *fixed[:-1])
    return add_shaw_values(problem, shaw, output, mass), lse


def _run_kernel(
    problem: Problem, x: LoweredTensors, shaw: Shaw | None, fixed: LoweredConstants
) -> tuple[Tensor, Tensor | None]:
    if problem.grad or problem.tangent or problem.in_transform:
        output, lse, mass = apply(NativeOperator(fixed), *x)
    elif not problem.lse and not fixed.sizes[1]:
        return forward_output(x, fixed), None
    else:
        output, lse, mass = forward(x, fixed)
    return add_shaw_values(problem, shaw, output, mass), lse


def gradients(
    problem: Problem, tensors: Sequence[Tensor], seed: Tensor | None, output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return the differentiated inputs and their gradients; output and lse may cover more keys.

    Requires a problem without a sink and without Shaw's values.
    """
    if (wide := in_float32(problem)) is not None:
        problem, tensors = wide, [tensor.to(wide.dtype) for tensor in tensors]
        output, grad_output = output.to(wide.dtype), grad_output.to(wide.dtype)
    query, key, value = tensors
    x, _, fixed = prepare(problem, query, key, value, seed)
    with torch.no_grad():
        wants_bias = x.bias is not None and x.bias.requires_grad
        gradients = backward(x, fixed, (output, lse, lse), (grad_output, grad_lse, None), wants_bias)
    pairs = [(given, grad) for given, grad in zip(x, gradients, strict=True) if given is not None and grad is not None]
    return [given for given, _ in pairs], [grad for _, grad in pairs]


def prepare(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, held: MaskLayout | None = None
) -> tuple[LoweredTensors, Shaw | None, LoweredConstants]:
    """Return the lowered tensors, Shaw's bias and the constants of a call; `held` is its mask layout, if known."""
    x, shaw, scale = lower(problem, query, key, value)
    frame = problem.frame
    layout: tuple[Tensor, ...] = ()
    strides = 0, 0
    if held is not None:
        layout, strides = held.tensors, held.strides
    elif problem.mask is not None:
        *axes, offsets = frame.cache_key()
        # Sizes as ints: tracing specialises symbolic ones, since the mask layout depends on them.
        layout, strides = layout_tensors(
            problem.mask, (*map(operator.index, axes), tuple(map(operator.index, offsets)))
        )
        if not problem.direct:  # constants in the form that modes need: fake tensors, proxies
            layout = tuple(torch.ops.aten.lift_fresh_copy(tensor) for tensor in layout)
    offset, radius, wants = None, 0, 0
    if shaw is not None:
        with outside_transforms():
            offset = torch.tensor(frame.offsets(), device="cpu").expand(frame.B).contiguous()
        radius, wants = shaw.reach, int(shaw.values is not None)
    softcap = problem.score.softcap if isinstance(problem.score, Dot) else None
    kind, bias = lower_normalization(problem) or (0, 0.0)
    numbers = (scale, softcap or 0.0, problem.temperature, problem.dropout, float(kind), bias)
    return x, shaw, LoweredConstants(layout, offset, seed, numbers, (radius, wants, *strides), problem)


def _attend_packed(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Pack the call, or run a packed one with new addresses: packing would dominate a small call."""
    layout = (query.stride(), key.stride(), value.stride(), torch.get_num_threads())
    packed: PackedCall | None = problem.memo.get(layout)
    # The packed addresses of the mask layout require that it lives until the kernel is done.
    held = None if packed is None else packed.hold_mask_layout()
    if packed is None or (held is None and problem.mask is not None):
        cached = True
        if problem.mask is not None:
            held = mask_layout(problem.mask, problem.frame.cache_key())
            cached = find_mask_layout(problem.mask, problem.frame.cache_key()) is held
        x, _, fixed = prepare(problem, query, key, value, None, held)
        packed = PackedCall(problem, x, fixed, held, cached=cached)
        if len(problem.memo) >= MAX_PACKED:
            problem.memo.clear()
        if cached:
            problem.memo[layout] = packed
    return packed.attend(query, key, value)


def find_packed_call(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> PackedCall | None:
    """Return the packed call for tensors with these strides, if there is one that can be repeated."""
    if not problem.memo or query.dim() < 4 or problem.broadcasts:
        return None
    packed: PackedCall | None = problem.memo.get(
        (query.stride(), key.stride(), value.stride(), torch.get_num_threads())
    )
    return packed if packed is not None and packed.watch(query, key, value) else None


def why_not(problem: Problem) -> list[str]:
    reasons = []
    if reason := why_missing():
        reasons.append(reason)
    if problem.device.type != "cpu":
        reasons.append(f"its kernels run on a CPU, not on {problem.device}")
    frame = problem.frame
    sizes = {"B": frame.B, "H": frame.H, "Q": frame.Q, "K": frame.K, "D": problem.D, "E": problem.E}
    for axis, n in sizes.items():
        if n > MAX_SIZE:
            reasons.append(f"its kernels index up to {MAX_SIZE:,} along an axis, but {axis} is {n:,}")
    if not problem.direct and (problem.tangent or problem.in_transform):
        reasons.append("tangents and torch.func transforms of tensors that are not plain need torch's operators")
    if problem.max_logit and (
        torch.compiler.is_compiling() or problem.tangent or problem.in_transform or not problem.direct
    ):
        reasons.append("only a plain eager call of its kernels returns the largest logits")
    if problem.sharded:
        reasons.append("its operator has no rule for DTensor; pass the local shard, .to_local()")
    if problem.tangent and not problem.direct:
        reasons.append("its registered operator, which tensors that are not plain need, has no forward mode")
    return reasons + lowering.why_not(problem, elementwise=True)


def why_avoid(problem: Problem) -> list[str]:
    frame = problem.frame
    if problem.in_transform and reference.peak_bytes(problem) < SMALL:
        return ["small calls within torch.func are left to torch's operators, which batch them"]
    if problem.mask is None or problem.empty or not problem.mask.opaque:
        return []
    batch, heads = problem.mask.extent(frame)
    if (needed := batch * heads * frame.Q * frame.K // 8) > BITS_BYTES:
        return [f"the bits of the mask may take {needed / 1e6:,.0f} MB"]
    return []


def peak_bytes(problem: Problem) -> int:
    frame, itemsize = problem.frame, 8 if problem.compute_dtype == torch.float64 else 4
    return itemsize * torch.get_num_threads() * frame.K * (problem.D + problem.E)


def fallback(problem: Problem) -> list[str]:
    uses = ["tiled computes second derivatives"] if problem.grad else []
    if problem.tangent and (isinstance(problem.score, Additive) or not problem.softmax):
        uses.append("tiled computes tangents: the forward-mode kernel takes products and a softmax")
    return uses


ENGINE = Engine("native", why_not, why_avoid, run, peak_bytes, lambda problem: False, fallback)
