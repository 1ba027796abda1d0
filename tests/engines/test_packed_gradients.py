"""Gradients and tangents of calls that are repeated with packed arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard.engines import native

from .calls import normal
from .packed_calls import LENGTHS, close, expected, masks, plans_of, tokens

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "available")


def leaves() -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tokens()]


def wanted_gradients(attend: rg.Attention, grad: Tensor) -> list[Tensor]:
    wide = [tensor.double().requires_grad_() for tensor in tokens()]
    return list(torch.autograd.grad(expected(attend, wide), wide, grad.double()))


def are_close(actual: Any, wanted: Any) -> bool:
    return all(close(a, b) for a, b in zip(actual, wanted, strict=True))


def warm_attention(mask: str, x: list[Tensor]) -> rg.Attention:
    attend = rg.Attention(mask=masks(mask)[0])
    for _ in range(3):
        output = attend(*x)
        torch.autograd.grad(output, x, torch.ones_like(output))
    assert plans_of(attend).last is not None
    return attend


with_masks = pytest.mark.parametrize("mask", ["none", "causal", "padding"])


@with_masks
def test_gradients_of_any_layout(mask: str) -> None:
    x = leaves()
    attend = warm_attention(mask, x)
    output = attend(*x)
    plain = normal(*output.shape, seed=5, dtype=torch.float32)
    forms = [
        plain, torch.ones(()).expand(output.shape), plain.transpose(1, 2).contiguous().transpose(1, 2),
        torch._neg_view(plain), torch.complex(plain, plain).conj().imag, torch._efficientzerotensor(output.shape),
        torch.stack([plain, plain], -1)[..., 0], plain,
    ]  # fmt: skip
    for grad in forms:
        for _ in range(2):
            actual = torch.autograd.grad(attend(*x), x, grad)
            assert are_close(actual, wanted_gradients(attend, grad.resolve_neg().clone()))


@with_masks
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_of_some(mask: str, wanted: tuple[int, ...]) -> None:
    x = leaves()
    attend = warm_attention(mask, x)
    output = attend(*x)
    grad = torch.ones_like(output)
    actual = torch.autograd.grad(output, [x[n] for n in wanted], grad)
    assert are_close(actual, [wanted_gradients(attend, grad)[n] for n in wanted])


@with_masks
def test_gradients_of_the_log_sum_exp(mask: str) -> None:
    x, wide = leaves(), [tensor.double().requires_grad_() for tensor in tokens()]
    attend = warm_attention(mask, x)
    for _ in range(3):
        output, lse = attend(*x, return_lse=True)
        actual = torch.autograd.grad((output.sin().sum() + lse.clamp(min=-9).sum()), x)
        output, lse = expected(attend, wide, return_lse=True)
        assert are_close(actual, torch.autograd.grad(output.sin().sum() + lse.clamp(min=-9).sum(), wide))


@with_masks
def test_second_derivatives(mask: str) -> None:
    x, wide = leaves(), [tensor.double().requires_grad_() for tensor in tokens()]
    attend = warm_attention(mask, x)
    actual = []
    for function, some in ((attend, x), (lambda *given: expected(attend, list(given)), wide)):
        first = torch.autograd.grad(function(*some).sin().sum(), some, create_graph=True)
        actual.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), some))
    assert are_close(*actual)


def other_layout(tensor: Tensor) -> Tensor:
    if tensor.dim() < 3:
        return tensor.clone()
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


@with_masks
@pytest.mark.parametrize("unpack", [torch.clone, other_layout, lambda x: torch._neg_view(-x)])
def test_saved_tensors_that_come_back_otherwise(mask: str, unpack: Callable[[Tensor], Tensor]) -> None:
    x = leaves()
    attend = warm_attention(mask, x)
    with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        output = attend(*x)
    grad = torch.ones_like(output)
    assert are_close(torch.autograd.grad(output, x, grad), wanted_gradients(attend, grad))


@with_masks
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(mask: str, reentrant: bool) -> None:
    x = leaves()
    attend = warm_attention(mask, x)
    output = checkpoint(attend, *x, use_reentrant=reentrant)
    output.sum().backward()
    assert are_close([tensor.grad for tensor in x], wanted_gradients(attend, torch.ones_like(output)))


def _evict() -> None:
    rg.clear_cache()
    gc.collect()


def _set_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


@with_masks
@pytest.mark.parametrize("between", [_evict, _set_threads])
def test_a_change_between_forward_and_backward(mask: str, between: Callable[[], None]) -> None:
    x, threads = leaves(), torch.get_num_threads()
    attend = warm_attention(mask, x)
    output = attend(*x)
    try:
        between()
        grad = torch.ones_like(output)
        assert are_close(torch.autograd.grad(output, x, grad), wanted_gradients(attend, grad))
    finally:
        torch.set_num_threads(threads)


def test_backward_uses_the_mask_of_its_forward() -> None:
    x, lengths = leaves(), torch.tensor(LENGTHS)
    attend, then = rg.Attention(mask=rg.padding(lengths)), rg.Attention(mask=rg.padding(LENGTHS))
    for _ in range(3):
        output = attend(*x)
    grad = torch.ones_like(output)
    lengths.fill_(1)
    attend(*(tensor.detach() for tensor in x))
    assert are_close(torch.autograd.grad(output, x, grad), wanted_gradients(then, grad))


@with_masks
@pytest.mark.parametrize("level", [forward_ad.dual_level, nullcontext])
def test_tangents_of_tensors_that_require_grad(mask: str, level: Callable[[], AbstractContextManager]) -> None:
    x, moves = leaves(), tokens(seed=20)
    attend = warm_attention(mask, x)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(tensor, move) for tensor, move in zip(x, moves, strict=True)]
        moved = forward_ad.unpack_dual(attend(*duals)).tangent
        actual = torch.autograd.grad(moved.sum(), x)
        wide = [tensor.double().requires_grad_() for tensor in tokens()]
        duals = [forward_ad.make_dual(tensor, move.double()) for tensor, move in zip(wide, moves, strict=True)]
        other = forward_ad.unpack_dual(expected(attend, duals)).tangent
        assert close(moved, other)
        assert are_close(actual, torch.autograd.grad(other.sum(), wide))
    with level():
        grad = torch.ones_like(moved)
        assert are_close(torch.autograd.grad(attend(*x), x, grad), wanted_gradients(attend, grad))
