"""A call of the kernels that is packed once: when it is repeated, only the addresses of its tensors change."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.cache import CACHE
from regard.engines.derivatives import Operator, Tensors, apply, apply_plain
from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.mask_layout import MaskLayout, find_mask_layout, mask_layout
from regard.engines.native.attention import empty_output, pack_problem
from regard.engines.native.binding import ABSENT, GRADIENT, PROBLEM, RESULT, library, status_error, tensor_fields
from regard.engines.native.jvp import NativeOperator
from regard.engines.problem import Problem
from regard.engines.tensor_memory import SMALLEST_ADDRESS, NoMemory, data_address, is_direct

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = guards.TensorGuards
except (ImportError, AttributeError):  # then every call looks for its plan
    TensorGuards = None

Pack = Callable[..., bytes]
_ABSENT = (None,) * (len(LoweredTensors._fields) - 3)  # the tensors besides query, key and value
_UNWANTED = (False,) * len(_ABSENT)


class PackedCall(Operator):
    """A call with query, key and value of fixed sizes, strides and dtypes, and a fixed number of threads.

    The problem has no dropout, bias, sink or learned scale, and no torch.func transform or tangent is involved. As an
    operator, it maps query, key and value to output and log-sum-exp.
    """

    outputs = 2

    def __init__(
        self, problem: Problem, x: LoweredTensors, fixed: LoweredConstants, layout: MaskLayout | None, *, cached: bool
    ) -> None:
        self.problem = problem = replace(problem)  # a copy: the memo of the original keeps this call
        self.threads = torch.get_num_threads()
        self._constants = fixed._replace(mask_layout=(), problem=problem)
        self._mask_layout = None if layout is None else weakref.ref(layout)
        self._own_layout = None if cached else layout  # otherwise the cache keeps it
        self._epoch = CACHE.epoch  # of the cache when the mask layout was last found there
        self._needs_lse = problem.lse or problem.grad
        self._forms = _forms(x[:3])
        frame = problem.frame
        self._lse_dtype = problem.compute_dtype
        self._rows = frame.B, frame.H, frame.Q
        self._problem = _split_at_addresses(pack_problem(x, fixed), [PROBLEM.offsets[name] for name in "qkv"])
        output, lse = self._allocate(x.query)
        result = RESULT.pack(*tensor_fields(output), *tensor_fields(lse), *ABSENT, *ABSENT)
        self._result = _split_at_addresses(result, [RESULT.offsets[name] for name in ("out", "lse")])
        self._forward: Any = library().regard_dot_forward  # type: ignore[union-attr]
        self._backward: Any = library().regard_dot_backward  # type: ignore[union-attr]
        self._gradient: tuple[Callable[..., bool], Pack, list[bytes]] | None = None  # of the last backward pass
        self._is_alike: Callable[..., bool] | None = None
        self._grad_mode: bool | None = None  # the mode that the call needs, if one of its tensors requires grad

    def _allocate(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        problem = self.problem
        output = torch.empty_like(query) if problem.E == problem.D else empty_output(query, problem.E)
        if not self._needs_lse:
            return output, None
        return output, torch.empty(self._rows, dtype=self._lse_dtype, device="cpu")

    def hold_mask_layout(self) -> MaskLayout | None:
        """Return the mask layout whose addresses are packed, or None if there is none or it was evicted."""
        if self._mask_layout is None or self._own_layout is not None:
            return self._own_layout
        held, mask = self._mask_layout(), self.problem.mask
        if held is not None and mask is not None and self._epoch != CACHE.epoch:  # evicted, or else counts as used
            epoch = CACHE.epoch
            if find_mask_layout(mask, self.problem.frame.cache_key()) is not held:
                return None
            self._epoch = epoch
        return held

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp, with a graph if the problem has one; the caller holds the mask layout."""
        if not self.problem.grad:
            return self._compute(query, key, value)
        output, lse = apply(self, query, key, value)
        return output, lse

    def _compute(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        output, lse = self._allocate(query)
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if q < SMALLEST_ADDRESS or k < SMALLEST_ADDRESS or v < SMALLEST_ADDRESS:
            q, k, v = data_address(query), data_address(key), data_address(value)
        pack, (before, after_q, after_k, after_v) = self._problem
        given = pack(before, q, after_q, k, after_k, v, after_v)
        pack, (before, after_output, after_lse) = self._result
        result = pack(before, output.data_ptr(), after_output, 0 if lse is None else lse.data_ptr(), after_lse)
        if status := self._forward(given, result):
            raise status_error(status, given)
        return output, lse

    # Calls that are repeated

    def watch(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Prepare `repeat` for tensors like these, of which the problem was made; return whether that is possible."""
        if self._is_alike is None and TensorGuards is not None:
            self._grad_mode = self.problem.grad if any(x.requires_grad for x in (query, key, value)) else None
            self._is_alike = _guard((query, key, value))
        return self._is_alike is not None and self._is_alike(query, key, value)

    def repeat(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return output and log-sum-exp; None if the tensors differ in more than address and values, or torch's mode
        has changed: modes, autocast, transforms, forward mode, gradients, threads."""
        if self._is_alike is None or not self._is_alike(query, key, value) or forward_ad._current_level >= 0:
            return None
        if self._grad_mode is not None and torch.is_grad_enabled() is not self._grad_mode:
            return None
        held = self.hold_mask_layout()  # its packed addresses require that it lives until the kernel is done
        if held is None and self._mask_layout is not None:
            return None
        if torch.get_num_threads() != self.threads or torch._C._len_torch_dispatch_stack():
            return None
        try:
            if not self.problem.grad:
                return self._compute(query, key, value)
            output, lse = apply_plain(self, query, key, value)
            return output, lse
        except NoMemory:
            return None

    # Derivatives

    def compute(self, tensors: Tensors) -> tuple[Tensor, ...]:
        output, lse = self._compute(*tensors)
        assert lse is not None
        return output, lse

    def gradients(self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
        if grads[0] is not None and grads[1] is None:
            query, key, value, output, lse = *tensors, *results
            gradients = self._packed_gradients(query, key, value, output, lse, grads[0])
            if gradients is not None:
                return gradients
        mass = results[1].new_empty(0)
        return self._native().gradients((*tensors, *_ABSENT), (*results, mass), grads, (*wanted, *_UNWANTED))[:3]

    def _packed_gradients(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, d_output: Tensor
    ) -> tuple[Tensor, ...] | None:
        """Return the gradients of query, key and value; None if the saved tensors are not those of the call."""
        held, known, given = self.hold_mask_layout(), self._gradient, (query, key, value, output, lse, d_output)
        if held is None and self._mask_layout is not None:
            return None
        if torch.get_num_threads() != self.threads or torch._C._len_torch_dispatch_stack():
            return None
        layout = torch.contiguous_format
        gradients = tuple([torch.empty_like(x, memory_format=layout) for x in (query, key, value)])
        if known is None or not known[0](*given):
            if TensorGuards is None or not is_direct(given) or _forms(given[:3]) != self._forms:
                return None
            self._gradient = known = _guard(given), *_pack_gradient(output, lse, d_output, gradients)
        places = [x.data_ptr() for x in (*given, *gradients)]
        if min(places) < SMALLEST_ADDRESS:
            return None
        q, k, v, out, log, d_out, d_q, d_k, d_v = places
        pack, (before, after_q, after_k, after_v) = self._problem
        problem = pack(before, q, after_q, k, after_k, v, after_v)
        _, pack, (p0, p1, p2, p3, p4, p5, p6) = known
        if status := self._backward(problem, pack(p0, out, p1, log, p2, d_out, p3, d_q, p4, d_k, p5, d_v, p6)):
            raise status_error(status, problem)
        return gradients

    def tangents(self, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
        output, lse, _, *moves = self._native().tangents((*tensors, *_ABSENT), (*tangents, *_ABSENT))
        return output, lse, *moves

    def differentiable(self, tensors: Tensors, save: bool) -> tuple[Tensor, ...]:
        return self._native().differentiable((*tensors, *_ABSENT), save)

    def curvature(
        self, tensors: Tensors, tangents: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]
    ) -> Tensors:
        output, lse, *moves = results
        whole = output, lse, lse.new_empty(0), *moves
        given, along = (*tensors, *_ABSENT), (*tangents, *_ABSENT)
        return self._native().curvature(given, along, whole, grads, (*wanted, *_UNWANTED))[:3]

    def _native(self) -> NativeOperator:
        """Return the operator that packs every call, and supports all tensors and derivatives."""
        layout, mask = self.hold_mask_layout(), self.problem.mask
        if layout is None and mask is not None:
            layout = mask_layout(mask, self.problem.frame.cache_key())
        return NativeOperator(self._constants._replace(mask_layout=() if layout is None else layout.tensors))


def _forms(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return what is packed of each tensor besides its address."""
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return whether other tensors are like these in all but address and values.

    Compares types, dtypes, devices, `requires_grad`, sizes, strides and dispatch keys as they are now: pending
    negations, zeros without storage, autocast, inference mode, torch.func transforms, torch.jit.trace.
    """
    sizes, strides = ([list(form(x)) for x in tensors] for form in (Tensor.size, Tensor.stride))
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _split_at_addresses(packed: bytes, offsets: Sequence[int]) -> tuple[Pack, list[bytes]]:
    """Return how to pack parts and addresses in turns, and the parts of a structure around those at `offsets`."""
    ends, size = [*offsets, len(packed)], struct.calcsize("@P")
    parts = [packed[start:end] for start, end in zip([0, *(at + size for at in offsets)], ends, strict=True)]
    return struct.Struct("@" + "P".join(f"{len(part)}s" for part in parts)).pack, parts


_GRADIENTS = ("out", "lse", "d_out", "d_q", "d_k", "d_v")


def _pack_gradient(
    output: Tensor, lse: Tensor, d_output: Tensor, gradients: Sequence[Tensor]
) -> tuple[Pack, list[bytes]]:
    tensors = dict(zip(_GRADIENTS, (output, lse, d_output, *gradients), strict=True))
    fields = [tensor_fields(tensors.get(name)) for name in GRADIENT.fields]
    return _split_at_addresses(
        GRADIENT.pack(*(n for part in fields for n in part)), [GRADIENT.offsets[x] for x in _GRADIENTS]
    )
