"""Derivatives of kernels: reverse mode, forward mode, and combinations of the two.

Torch cannot differentiate a kernel, so all derivatives are defined here. An `Operator` has the kernel, its gradients,
its tangents, and the same results by torch's own operators, from which all further derivatives follow. `apply` chooses
what a call needs. Nothing is dropped: a derivative that is not supported raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _functorch

Tensors = Sequence[Any]  # each a tensor, or None


class Operator:
    """A function of tensors, some of which may be None. Every method except `differentiable` gets plain tensors."""

    outputs: int  # number of differentiable results, which come first; the others are used by the gradients only

    def compute(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """The results."""
        raise NotImplementedError

    def gradients(self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
        """Return the gradients of the tensors, given those of the results (None: zero)."""
        raise NotImplementedError

    def tangents(self, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
        """Return the results, followed by the tangents of the differentiable ones, given those of the tensors."""
        raise NotImplementedError

    def differentiable(self, tensors: Tensors, save: bool) -> tuple[Tensor, ...]:
        """Return the differentiable results by torch's operators; `save` saves memory, but not within torch.func."""
        raise NotImplementedError

    def curvature(
        self, tensors: Tensors, tangents: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]
    ) -> Tensors:
        """How the gradients of the tensors, given those of the results, change along tangents of the tensors.

        It is the gradient of `grads · tangents of the results` too. The results are those of `tangents`. Here by a
        graph of all gradients, in the memory that it takes.
        """
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
            moved = [tangent is not None for tangent in tangents]
            gradients = _gradients_of(self.differentiable(leaves, True), leaves, grads, moved)
            return _select_wanted(_pull_back(gradients, leaves, tangents, False), wanted)


def apply(operator: Operator, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the results with all derivatives that may be requested."""
    tangents = tangents_of(tensors)
    if active_transforms():
        if tangents is None:
            return _Transformed.apply(operator, None, *tensors)
        return _duals(operator, _ResultsAndTangents.apply(operator, None, *map(primal_of, tensors), *tangents))
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _Call.apply(operator, None if tangents is None else _KnownTangents(tangents), *tensors)
    if tangents is None:
        return operator.compute(tensors)
    return _duals(operator, operator.tangents([primal_of(tensor) for tensor in tensors], tangents))


def differentiable_twice(
    kernel: Callable[[Tensors], tuple[Tensor, ...]], operator: Operator, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Call a kernel of torch that has its own backward; further derivatives are taken from the operator."""
    return _DoubleBackward.apply(kernel, operator, *tensors)


def active_transforms() -> list[str]:
    """Return the active torch.func transforms, outermost first: "Grad", "Jvp", "Vmap" and others."""
    if _functorch.peek_interpreter_stack() is None:
        return []
    return [interpreter.key().name for interpreter in _functorch.get_interpreter_stack() or ()]


def outside_transforms() -> AbstractContextManager:
    """Suspend all torch.func transforms, so that cached tensors do not belong to one."""
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def tangent_of(tensor: Tensor | None) -> Tensor | None:
    """Return the forward-mode tangent of a tensor at the innermost transform."""
    if tensor is None or forward_ad._current_level < 0 or _functorch.is_batchedtensor(tensor):
        return None
    return forward_ad.unpack_dual(tensor).tangent


def may_have_tangent(tensor: Tensor) -> bool:
    """Whether a tensor has a tangent, or may have one hidden by another transform."""
    if forward_ad._current_level < 0:
        return False
    if tangent_of(tensor) is not None:
        return True
    return _functorch.is_functorch_wrapped_tensor(tensor) and "Jvp" in active_transforms()


def tangents_of(tensors: Tensors) -> list[Tensor | None] | None:
    """Return the tangent of each tensor, or None."""
    if forward_ad._current_level < 0:
        return None
    tangents = [tangent_of(tensor) for tensor in tensors]
    return None if all(tangent is None for tangent in tangents) else tangents


def primal_of(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor without its tangent."""
    return tensor if tangent_of(tensor) is None else forward_ad.unpack_dual(tensor).primal


def transform_state(tensors: Tensors) -> tuple[bool, bool, tuple[str, ...]]:
    """Return the state that a plan depends on: possible tangents, need for torch's operators, active transforms."""
    if torch.compiler.is_compiling():  # which traces forward mode, but cannot inspect a tangent
        forward = forward_ad._current_level >= 0
        return forward, forward, ()
    if forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None:
        return False, False, ()
    tangent = any(tensor is not None and may_have_tangent(tensor) for tensor in tensors)
    return tangent, needs_torch_operators(tensors), tuple(active_transforms())


def needs_torch_operators(tensors: Tensors) -> bool:
    """Whether transforms are nested so deeply that only torch's own operators provide all derivatives.

    True for two or more of grad and jvp, for tangents within torch's first vmap, and for traced tangents.
    """
    running = active_transforms()
    if sum(kind in ("Grad", "Jvp") for kind in running) > 1 or "Functionalize" in running:
        return True
    tangents = tangents_of(tensors)
    if tangents is None:
        return False
    tracing = torch._C._len_torch_dispatch_stack() > 0
    return tracing or any(tangent is not None and _functorch.is_legacy_batchedtensor(tangent) for tangent in tangents)


def holds_transformed(part: Any) -> bool:
    """Whether a mask, or another part of a description, holds a tensor wrapped by a torch.func transform."""
    if isinstance(part, Tensor):
        return _functorch.is_functorch_wrapped_tensor(part)
    if isinstance(part, list | tuple):
        return any(map(holds_transformed, part))
    if is_dataclass(part):
        return any(holds_transformed(getattr(part, field.name)) for field in fields(part))
    return False


def push_forward(
    function: Callable[[Tensors], tuple[Tensor, ...]], tensors: Tensors, tangents: Tensors
) -> tuple[Tensor, ...]:
    """Return the results of a function of torch's operators, followed by their tangents (zeros if None)."""
    level = forward_ad.dual_level() if forward_ad._current_level < 0 else nullcontext()
    with level, forward_ad._set_fwd_grad_enabled(True), torch.no_grad():
        # torch gives a tangent the strides of its tensor, which it cannot do for an expanded one: hence contiguous.
        duals = [
            tensor
            if tensor is None or tangent is None
            else forward_ad.make_dual(tensor.detach().contiguous(), tangent.to(tensor))
            for tensor, tangent in zip(map(primal_of, tensors), map(primal_of, tangents), strict=True)
        ]
        pairs = [forward_ad.unpack_dual(result) for result in function(duals)]
        zeros = [torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs]
        return *(primal for primal, _ in pairs), *zeros


def _duals(operator: Operator, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Attach tangents to results."""
    count = len(values) - operator.outputs
    results, tangents = values[:count], values[count:]
    pairs = zip(results[: operator.outputs], tangents, strict=True)
    return *(forward_ad.make_dual(result, tangent) for result, tangent in pairs), *results[operator.outputs :]


@dataclass
class _KnownTangents:
    """Attach precomputed tangents, so that one pass of the kernel computes results and tangents."""

    tangents: Tensors
    values: tuple[Tensor, ...] | None = None


def _is_plain(tensors: Tensors) -> bool:
    """Whether a kernel may be called with these tensors: no active transform and no tangents."""
    return not active_transforms() and tangents_of(tensors) is None


def _each_batched(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate a backward pass, so that it runs once for each of the gradients that torch batches.

    `is_grads_batched=True` and `torch.autograd.functional.jacobian(vectorize=True)` batch them by torch's first vmap,
    which has no rules for kernels.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> tuple:
        axes = [0 if grad is not None and _functorch.is_legacy_batchedtensor(grad) else None for grad in grads]
        if 0 not in axes:
            return backward(ctx, *grads)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        plain = [
            x if axis is None else torch._remove_batch_dim(x, level, 0, 0) for x, axis in zip(grads, axes, strict=True)
        ]
        ctx.again = True  # each reads the graph of a kernel
        joined, _ = _loop(len(plain[axes.index(0)]), axes, plain, lambda some: backward(ctx, *some))
        return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in joined)

    return run


class _Call(torch.autograd.Function):
    """An operator in autograd outside torch.func, whose support adds overhead."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, known: _KnownTangents | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        if known is None:
            results = operator.compute(tensors)
        else:
            known.values = operator.tangents(tensors, known.tangents)
            results = known.values[: len(known.values) - operator.outputs]
        _save_context(ctx, operator, known, tensors, results)
        return results

    @staticmethod
    @_each_batched
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        tensors, results, given = saved[: ctx.count], saved[ctx.count :], grads[: ctx.operator.outputs]
        if active_transforms() or (torch.is_grad_enabled() and _is_plain((*tensors, *given))):
            gradients = _Gradients.apply(ctx.operator, wanted, ctx.count, *tensors, *results, *given)
        elif not _is_plain((*tensors, *given)):
            gradients = _gradients_with_graph(ctx.operator, tensors, given, wanted)
        else:
            gradients = ctx.operator.gradients(tensors, results, given, wanted)
        return None, None, *_select_wanted(gradients, wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        operator, tensors = ctx.operator, map(primal_of, ctx.saved_tensors)
        values = _ResultsAndTangents.apply(operator, ctx.known, *tensors, *tangents)
        count = len(values) - operator.outputs
        return *values[count:], *(None,) * (count - operator.outputs)


def _save_context(
    ctx: Any, operator: Operator, known: _KnownTangents | None, tensors: Tensors, results: Tensors
) -> None:
    ctx.operator, ctx.known, ctx.count = operator, known, len(tensors)
    ctx.save_for_backward(*tensors, *results)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)
    if len(results) > operator.outputs:
        ctx.mark_non_differentiable(*results[operator.outputs :])


_apply_call: Any = super(torch.autograd.Function, _Call).apply  # without a search for the wrappers of torch.func


def apply_plain(operator: Operator, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute the results with a graph: `apply` for tensors known to be plain, one of which requires grad."""
    return _apply_call(operator, None, *tensors)


class _Transformed(_Call):
    """An operator in autograd within torch.func."""

    @staticmethod
    def forward(operator: Operator, known: None, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        return operator.compute(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        operator, _, *tensors = inputs
        _save_context(ctx, operator, None, tensors, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, operator: Operator, known: None, *tensors: Tensor | None) -> tuple:
        return _loop(info.batch_size, in_dims[2:], tensors, lambda some: apply(operator, *some))


class _Gradients(torch.autograd.Function):
    """An operator's gradients, where they may be differentiated again or a torch.func transform is running."""

    @staticmethod
    def forward(operator: Operator, wanted: Sequence[bool], count: int, *given: Tensor | None) -> tuple:
        tensors, results, grads = given[:count], given[count : -operator.outputs], given[-operator.outputs :]
        gradients = operator.gradients(tensors, results, grads, wanted)
        return tuple(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.operator, ctx.wanted, ctx.count, *given = inputs
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    @_each_batched
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor | None, ...]:
        if active_transforms():
            raise NotImplementedError("a gradient of a gradient of the kernels is not supported within torch.func")
        operator, given = ctx.operator, ctx.saved_tensors
        tensors, grads = given[: ctx.count], given[-operator.outputs :]
        again, wanted = torch.is_grad_enabled(), ctx.needs_input_grad[3:]
        if not again and _is_plain((*tensors, *grads, *by)):
            values = operator.tangents(tensors, by)
            own = operator.curvature(tensors, by, values, grads, wanted[: ctx.count])
            between = (None,) * (len(given) - ctx.count - operator.outputs)
            return (
                None,
                None,
                None,
                *own,
                *between,
                *_select_wanted(values[-operator.outputs :], wanted[-operator.outputs :]),
            )
        with torch.enable_grad():
            tensors, grads = ([_leaf(x, again) for x in some] for some in (tensors, grads))
            gradients = _gradients_with_graph(operator, tensors, grads, ctx.wanted)
            inputs = [*tensors, *(None,) * (len(given) - ctx.count - operator.outputs), *grads]
            return None, None, None, *_pull_back(gradients, inputs, by, again)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("the tangent of a gradient of the kernels is not supported here; nest torch.func.jvp")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, operator: Operator, wanted: Sequence[bool], count: int, *given: Tensor | None
    ) -> tuple:
        return _loop(info.batch_size, in_dims[3:], given, lambda some: _Gradients.apply(operator, wanted, count, *some))


class _ResultsAndTangents(torch.autograd.Function):
    """An operator's results followed by their tangents, as a function of tensors followed by their tangents."""

    @staticmethod
    def forward(operator: Operator, known: _KnownTangents | None, *pairs: Tensor | None) -> tuple[Tensor, ...]:
        half = len(pairs) // 2
        if known is not None and known.values is not None:
            return tuple(tensor.detach() for tensor in known.values)
        return operator.tangents(pairs[:half], pairs[half:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.operator, _, *pairs = inputs
        ctx.results = len(output) - ctx.operator.outputs
        ctx.save_for_backward(*pairs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[ctx.operator.outputs : ctx.results])

    @staticmethod
    @_each_batched
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor | None, ...]:
        if active_transforms():
            raise NotImplementedError("a gradient of a tangent of the kernels is not supported within torch.func")
        operator, pairs = ctx.operator, ctx.saved_tensors
        again, wanted = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        if not again and _is_plain((*pairs, *by)):
            half = len(pairs) // 2
            return None, None, *_of_both(operator, pairs[:half], pairs[half:], by, wanted)
        with torch.enable_grad():
            pairs = [_leaf(x, again) for x in pairs]
            tensors, tangents = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
            results = operator.differentiable(tensors, True)
            # A tangent is linear in the tangents of the tensors: it is a gradient of a gradient, with a placeholder.
            holders = [torch.zeros_like(result).requires_grad_() for result in results]
            gradients = _gradients_of(results, tensors, holders, [tangent is not None for tangent in tangents])
            moved = _pull_back(gradients, holders, tangents, True)
            grads = _pull_back([*results, *moved], pairs, [*by[: operator.outputs], *by[ctx.results :]], again)
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("the tangent of a tangent of the kernels is not supported here; nest torch.func.jvp")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, operator: Operator, known: None, *pairs: Tensor | None) -> tuple:
        return _loop(info.batch_size, in_dims[2:], pairs, lambda some: _ResultsAndTangents.apply(operator, None, *some))


class _DoubleBackward(torch.autograd.Function):
    """The graph of a kernel, kept for its backward."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[[Tensors], tuple[Tensor, ...]], operator: Operator, *tensors: Tensor) -> Any:
        with torch.enable_grad():
            ctx.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            ctx.results = kernel(ctx.leaves)
        ctx.operator = operator
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in ctx.results)

    @staticmethod
    @_each_batched
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        given = (*grads, *(None,) * (ctx.operator.outputs - len(grads)))
        if not _is_plain((*tensors, *grads)):
            return None, None, *_gradients_with_graph(ctx.operator, tensors, given, wanted)
        if torch.is_grad_enabled():
            with torch.no_grad():
                results = ctx.operator.compute(tensors)
            gradients = _Gradients.apply(ctx.operator, wanted, len(tensors), *tensors, *results, *given)
            return None, None, *_select_wanted(gradients, wanted)
        keep = getattr(ctx, "again", False) or torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = _pull_back(ctx.results, ctx.leaves, grads, False, keep)
        # A CPU kernel multiplies masked values by 0, which yields NaN if they are not finite or overflow.
        if tensors[0].is_cpu and not all(grad is None or _is_finite(grad) for grad in gradients):
            gradients = ctx.operator.gradients(tensors, ctx.operator.compute(tensors), given, wanted)
        return None, None, *gradients


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(tensor, math.inf) < math.inf) if tensor.numel() else True


def _gradients_with_graph(operator: Operator, tensors: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
    """Compute gradients that torch can differentiate again, in either mode."""
    with torch.enable_grad():
        tensors = [_leaf(tensor, True) for tensor in tensors]
        return _gradients_of(operator.differentiable(tensors, not active_transforms()), tensors, grads, wanted)


def _gradients_of(results: Tensors, tensors: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
    inputs = [tensor if want else None for tensor, want in zip(tensors, wanted, strict=True)]
    return _pull_back(results, inputs, grads, True)


def _pull_back(
    results: Tensors, inputs: Tensors, by: Tensors, again: bool, keep: bool | None = None
) -> list[Tensor | None]:
    """Return the gradients of the inputs that require grad, given those of the results; both may be None."""
    pairs = [(x, grad) for x, grad in zip(results, by, strict=True) if x is not None and grad is not None]
    pairs = [(x, grad.to(x.dtype)) for x, grad in pairs if x.requires_grad]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    if not pairs or not leaves:
        return [None] * len(inputs)
    outputs, given = [x for x, _ in pairs], [grad for _, grad in pairs]
    gradients = iter(torch.autograd.grad(outputs, leaves, given, keep, again, allow_unused=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in inputs]


def _leaf(tensor: Tensor | None, again: bool) -> Tensor | None:
    """Return the tensor as a separate variable, since another one may have been computed from it.

    Keeps its history if it is to be differentiated further.
    """
    if tensor is None:
        return None
    return tensor.view_as(tensor) if again else tensor.detach().requires_grad_(tensor.requires_grad)


def _of_both(
    operator: Operator, tensors: Tensors, tangents: Tensors, by: Tensors, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of tensors and tangents, given those of the results (and what serves them) and their tangents."""
    of_results, of_tangents, half = by[: operator.outputs], by[-operator.outputs :], len(tensors)
    results = operator.tangents(tensors, tangents)
    count, nothing = len(results) - operator.outputs, [None] * half
    own: Tensors = nothing
    moved: Tensors = nothing
    along: Tensors = nothing
    if any(wanted[:half]) and any(grad is not None for grad in of_results):
        own = _select_wanted(operator.gradients(tensors, results[:count], of_results, wanted[:half]), wanted[:half])
    if any(grad is not None for grad in of_tangents):
        if any(wanted[:half]):
            moved = operator.curvature(tensors, tangents, results, of_tangents, wanted[:half])
        if any(wanted[half:]):
            along = _select_wanted(
                operator.gradients(tensors, results[:count], of_tangents, wanted[half:]), wanted[half:]
            )
    return [*(b if a is None else a if b is None else a + b for a, b in zip(own, moved, strict=True)), *along]


def _select_wanted(gradients: Tensors, wanted: Sequence[bool]) -> list[Tensor | None]:
    return [grad if want else None for grad, want in zip(gradients, wanted, strict=True)]


def _loop(
    count: int, axes: Sequence[int | None], tensors: Tensors, function: Callable[[Tensors], tuple[Tensor | None, ...]]
) -> tuple[tuple, tuple]:
    """Return the stacked results of a function of each entry along the axes, and their axes: vmap for kernels."""
    rows = []
    for n in range(count):
        pairs = zip(tensors, axes, strict=True)
        rows.append(function([x if x is None or axis is None else x.select(axis, n) for x, axis in pairs]))
    joined = tuple(None if some[0] is None else torch.stack(some) for some in zip(*rows, strict=True))
    return joined, tuple(None if x is None else 0 for x in joined)
