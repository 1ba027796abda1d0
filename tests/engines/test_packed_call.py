"""Calls that are repeated with packed arguments: nothing that a call depends on may be remembered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import regard as rg
from regard.attention import INTERVENTION, OBSERVERS
from regard.engines import native
from regard.engines.select import exclude_engine

from .calls import gradients
from .packed_calls import close, expected, masks, plans_of, tokens, warm

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "available")


# Each takes a warm call, changes something, and checks the result. The tensors of the warm call are plain float32.


def other_values(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = tokens(seed=9)
    assert close(attend(*other), expected(attend, other))


def other_strides(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tokens(seed=9)]
    assert close(attend(*other), expected(attend, other))


def strided_columns(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = [torch.stack([tensor, -tensor], -1).flatten(-2)[..., ::2] for tensor in tokens(seed=9)]
    assert close(attend(*other), expected(attend, other))


def other_dtype(attend: rg.Attention, tensors: list[Tensor]) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        other = tokens(seed=9, dtype=dtype)
        output = attend(*other)
        assert output.dtype == dtype
        assert close(output, expected(attend, other))


def mixed_dtypes(attend: rg.Attention, tensors: list[Tensor]) -> None:
    with pytest.raises(TypeError, match="share one dtype"):
        attend(tensors[0], tensors[1].double(), tensors[2])


def fewer_rows(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = [tensors[0][:, :, 2:], *tensors[1:]]
    assert close(attend(*other), expected(attend, other))


def batch_of_one(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = [tensors[0], tensors[1][:1], tensors[2][:1]]
    assert close(attend(*other), expected(attend, other))


def same_tensor(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = [tensors[1]] * 3
    for _ in range(3):
        assert close(attend(*other), expected(attend, other))


def no_tensor(attend: rg.Attention, tensors: list[Tensor]) -> None:
    with pytest.raises(TypeError, match="value must be"):
        attend(tensors[0], tensors[1], None)
    with pytest.raises(TypeError, match=r"key must be a torch\.Tensor"):
        attend(tensors[0], tensors[1].numpy(), tensors[2])


def unknown_keyword(attend: rg.Attention, tensors: list[Tensor]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        attend(*tensors, is_causal=True)


def log_sum_exp(attend: rg.Attention, tensors: list[Tensor]) -> None:
    for _ in range(3):
        for actual, wanted in zip(
            attend(*tensors, return_lse=True), expected(attend, tensors, return_lse=True), strict=True
        ):
            assert close(actual, wanted)
    assert close(attend(*tensors), expected(attend, tensors))


def grad_of_one(attend: rg.Attention, tensors: list[Tensor]) -> None:
    for place in range(3):
        mine, other = ([tensor.clone() for tensor in tensors] for _ in range(2))
        for some in (mine, other):
            some[place].requires_grad_()
        for _ in range(3):
            output = attend(*mine)
            wanted = expected(attend, other)
            assert close(output, wanted)
            assert close(gradients(output, [mine[place]])[0], gradients(wanted, [other[place]])[0])


def no_grad(attend: rg.Attention, tensors: list[Tensor]) -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    for enabled in (True, False, True, False):
        for _ in range(3):
            with torch.set_grad_enabled(enabled):
                output = attend(*leaves)
            assert output.requires_grad is enabled
            assert close(output, expected(attend, tensors))


def inference(attend: rg.Attention, tensors: list[Tensor]) -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    attend(*leaves)
    with torch.inference_mode():
        for _ in range(3):
            output = attend(*leaves)
            assert output.is_inference()
            assert close(output, expected(attend, tensors))
            fresh = attend(*(tensor + 0 for tensor in tensors))
            assert close(fresh, expected(attend, tensors))
    assert attend(*leaves).requires_grad


def autocast(attend: rg.Attention, tensors: list[Tensor]) -> None:
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = attend(*tensors)
        assert output.dtype == torch.bfloat16
        assert close(output, expected(attend, tensors))
    assert attend(*tensors).dtype == torch.float32


def pending_negation(attend: rg.Attention, tensors: list[Tensor]) -> None:
    for place in range(3):
        other = list(tensors)
        other[place] = torch.complex(tensors[place], tensors[place]).conj().imag
        assert other[place].is_neg()
        assert close(attend(*other), expected(attend, [x.resolve_neg() for x in other]))
        packed = torch.empty_like(tensors[place])  # of the strides of the warm call
        negative = torch._neg_view(packed.copy_(tensors[place]))
        other[place] = negative
        assert close(attend(*other), expected(attend, [x.resolve_neg() for x in other]))


def zeros_without_storage(attend: rg.Attention, tensors: list[Tensor]) -> None:
    for place in range(3):
        other = list(tensors)
        other[place] = torch._efficientzerotensor(tensors[place].shape)
        assert close(attend(*other), expected(attend, [x.clone() for x in other]))


def freed_memory(attend: rg.Attention, tensors: list[Tensor]) -> None:
    other = tensors[0].clone()
    other.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError)):
        attend(other, *tensors[1:])


def subclass(attend: rg.Attention, tensors: list[Tensor]) -> None:
    class Other(Tensor):
        pass

    other = [tensor.as_subclass(Other) for tensor in tensors]
    assert close(attend(*other).as_subclass(Tensor), expected(attend, tensors))


def vmap(attend: rg.Attention, tensors: list[Tensor]) -> None:
    many = torch.stack([tensors[0], -tensors[0]])
    for _ in range(2):
        output = torch.func.vmap(lambda query: attend(query, *tensors[1:]))(many)
        for one, query in zip(output, many, strict=True):
            assert close(one, expected(attend, [query, *tensors[1:]]))


def tangents(attend: rg.Attention, tensors: list[Tensor]) -> None:
    moves = tokens(seed=20)
    wide = [tensor.double() for tensor in tensors]
    _, wanted = torch.func.jvp(
        lambda *x: expected(attend, list(x)), tuple(wide), tuple(move.double() for move in moves)
    )
    for _ in range(2):
        _, moved = torch.func.jvp(lambda *x: attend(*x), tuple(tensors), tuple(moves))
        assert close(moved, wanted)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, move) for x, move in zip(tensors, moves, strict=True)]
            assert close(forward_ad.unpack_dual(attend(*duals)).tangent, wanted)


def functional_gradient(attend: rg.Attention, tensors: list[Tensor]) -> None:
    actual = torch.func.grad(lambda query: attend(query, *tensors[1:]).sin().sum())(tensors[0])
    query = tensors[0].double().requires_grad_()
    (wanted,) = torch.autograd.grad(expected(attend, [query, *tensors[1:]]).sin().sum(), query)
    assert close(actual, wanted)


def traced(attend: rg.Attention, tensors: list[Tensor]) -> None:
    graph = make_fx(lambda *x: attend(*x))(*tensors)
    other = tokens(seed=9)
    assert close(graph(*other), expected(attend, other))


def compiled(attend: rg.Attention, tensors: list[Tensor]) -> None:
    torch.compiler.reset()
    function = torch.compile(attend, backend="eager", fullgraph=True)
    for seed in (0, 9):
        assert close(function(*tokens(seed=seed)), expected(attend, tokens(seed=seed)))


def without_the_engine(attend: rg.Attention, tensors: list[Tensor]) -> None:
    with exclude_engine("native"):
        assert plans_of(attend).repeat_last(*tensors, attend.mask, False) is None
        assert close(attend(*tensors), expected(attend, tensors))


def other_engine(attend: rg.Attention, tensors: list[Tensor]) -> None:
    assert close(attend(*tensors, engine="tiled"), expected(attend, tensors))
    with pytest.raises(ValueError, match="engine must be one of"):
        attend(*tensors, engine="none")


def threads(attend: rg.Attention, tensors: list[Tensor]) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 3, before):
            torch.set_num_threads(count)
            assert close(attend(*tensors), expected(attend, tensors))
    finally:
        torch.set_num_threads(before)


def deterministic(attend: rg.Attention, tensors: list[Tensor]) -> None:
    wanted = attend(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(attend(*tensors), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def observed(attend: rg.Attention, tensors: list[Tensor]) -> None:
    seen: list[Tensor] = []
    token = OBSERVERS.set((lambda description, query, key, value: seen.append(query),))
    try:
        output = attend(*tensors)
    finally:
        OBSERVERS.reset(token)
    assert seen[0] is tensors[0]
    assert close(output, expected(attend, tensors))


def intervened(attend: rg.Attention, tensors: list[Tensor]) -> None:
    token = INTERVENTION.set(lambda description, query, key, again: (description, torch.tensor([0.0, 1.0, 1.0, 1.0])))
    try:
        output = attend(*tensors)
    finally:
        INTERVENTION.reset(token)
    assert (output[:, 0] == 0).all()


def cleared(attend: rg.Attention, tensors: list[Tensor]) -> None:
    rg.clear_cache()
    assert plans_of(attend).last is None
    assert close(attend(*tensors), expected(attend, tensors))


CHANGES: list[Callable[[rg.Attention, list[Tensor]], None]] = [
    other_values, other_strides, strided_columns, other_dtype, mixed_dtypes, fewer_rows, batch_of_one, same_tensor,
    no_tensor, unknown_keyword, log_sum_exp, grad_of_one, no_grad, inference, autocast, pending_negation,
    zeros_without_storage, freed_memory, subclass, vmap, tangents, functional_gradient, traced, compiled,
    without_the_engine, other_engine, threads, deterministic, observed, intervened, cleared,
]  # fmt: skip


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_repeated_calls_counts(change: Callable, mask: str) -> None:
    attend = rg.Attention(mask=masks(mask)[0])
    warm(attend, tokens())
    change(attend, tokens())
    assert close(attend(*tokens()), expected(attend, tokens()))


@given(st.lists(st.sampled_from([each for each in CHANGES if each is not compiled]), max_size=6), st.data())
def test_changes_in_any_order_count(changes: list[Callable], data: st.DataObject) -> None:
    mask, lengths = masks(data.draw(st.sampled_from(["none", "causal", "padding", "both"])))
    attend = rg.Attention(mask=mask)
    for change in changes:
        for _ in range(data.draw(st.integers(0, 3))):
            attend(*tokens())
        change(attend, tokens())
        lengths.data[1] = data.draw(st.integers(0, 7))
        assert close(attend(*tokens()), expected(attend, tokens()))


@pytest.mark.parametrize("write", [lambda x: x.fill_(2), lambda x: x.data.fill_(2), lambda x: x.numpy().fill(2)])
def test_a_mask_that_changes_counts(write: Callable[[Tensor], Any]) -> None:
    for name in ("padding", "both"):
        mask, lengths = masks(name)
        attend = rg.Attention(mask=mask)
        warm(attend, tokens())
        before = attend(*tokens())
        write(lengths)
        assert not close(attend(*tokens()), before)
        assert close(attend(*tokens()), expected(attend, tokens()))


def test_an_offset_that_changes_counts() -> None:
    offset = torch.zeros(2, dtype=torch.int64)
    attend = rg.Attention(mask=rg.causal(), offset=offset)
    for _ in range(3):
        attend(*tokens())
    offset.fill_(3)
    assert close(attend(*tokens()), expected(attend, tokens()))


def test_dropout_is_drawn_again_after_eval() -> None:
    attend = rg.Attention(dropout=0.5).eval()
    for _ in range(4):
        assert close(attend(*tokens()), expected(attend, tokens()))
    attend.train()
    assert not close(attend(*tokens()), attend(*tokens()))


def test_learned_parts_are_never_remembered() -> None:
    scale = torch.nn.Parameter(torch.ones(4))
    attend = rg.Attention(rg.Dot(scale=scale))
    for _ in range(3):
        before = attend(*tokens())
    scale.data.mul_(3)
    assert not close(attend(*tokens()), before)


def test_a_function_shares_its_description_over_all_shapes() -> None:
    for _ in range(3):
        for count in (5, 7, 6):
            q, k, v = (tensor[:, :, :count].contiguous() for tensor in tokens())
            assert close(rg.attention(q, k, v), rg.attention(q, k, v, engine="reference"))


def test_a_repeated_call_holds_no_tensors() -> None:
    for grad in (False, True):
        attend, tensors = rg.Attention(mask=rg.causal()), tokens()
        for tensor in tensors:
            tensor.requires_grad_(grad)
        warm(attend, tensors)
        if grad:
            attend(*tensors).sum().backward()
        references = [weakref.ref(tensor) for tensor in tensors]
        del tensors, tensor
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
