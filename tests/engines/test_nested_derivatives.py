"""Derivatives of tangents and gradients, against a dense definition that shares no code with the library."""

from __future__ import annotations

import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES, CannotCompute
from tests.engines.test_forward_mode import CASES, NEEDED, D, can, close, dense, heads, normal, ours, qkv, tensors_of

NESTED = {
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "hessian": lambda f, x, t: torch.func.hessian(lambda x: f(x).sin().sum())(x),
    "linearize": lambda f, x, t: torch.func.linearize(f, x)[1](t),
    "jvp of jvp": lambda f, x, t: torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (t,))[1], (x,), (t,))[1],
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(lambda x: f(x).sin().sum()), (x,), (t,))[1],
    "grad of jvp": lambda f, x, t: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (t,))[1].sin().sum())(x),
    "grad of grad": lambda f, x, t: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).sin().sum())(x).cos().sum()
    )(x),
    "vmap of jvp": lambda f, x, t: torch.func.vmap(lambda t: torch.func.jvp(f, (x,), (t,))[1])(torch.stack([t, x, t])),
    "jvp of vmap": lambda f, x, t: torch.func.jvp(torch.func.vmap(f), (torch.stack([x, t]),), (torch.stack([t, x]),))[
        1
    ],
    "vmap of grad": lambda f, x, t: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(torch.stack([x, t])),
    "vjp under vmap": lambda f, x, t: torch.func.vmap(lambda g: torch.func.vjp(f, x)[1](g)[0])(
        torch.stack([f(x), f(t)])
    ),
    "autograd.functional.jvp": lambda f, x, t: torch.autograd.functional.jvp(f, x, t)[1],
    "autograd.functional.hvp": lambda f, x, t: torch.autograd.functional.hvp(lambda x: f(x).sin().sum(), x, t)[1],
    "autograd.functional.jacobian": lambda f, x, t: torch.autograd.functional.jacobian(
        f, x, strategy="forward-mode", vectorize=True
    ),
    "vectorized jacobian": lambda f, x, t: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "vectorized hessian": lambda f, x, t: torch.autograd.functional.hessian(
        lambda x: f(x).sin().sum(), x, vectorize=True
    ),
}


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa"])
def test_batched_gradients_and_their_gradients(engine: str) -> None:
    if engine not in ENGINES:
        pytest.skip("not available")
    inputs = [x.detach().requires_grad_() for x in qkv()]
    output = rg.attention(*inputs, mask=rg.causal(), engine=engine)
    by = torch.stack([normal(*output.shape, seed=seed) for seed in range(3)])
    batched = torch.autograd.grad(output, inputs, by, is_grads_batched=True, create_graph=True)
    separate = [torch.autograd.grad(output, inputs, one, create_graph=True) for one in by]
    for actual, theirs in zip(batched, zip(*separate, strict=True), strict=True):
        close(actual, torch.stack(theirs))
    again = torch.autograd.grad(torch.cat([x.flatten() for x in batched]).square().sum(), inputs, retain_graph=True)
    every = torch.cat([x.flatten() for some in separate for x in some])
    expected = torch.autograd.grad(every.square().sum(), inputs)
    close(again, expected)


@pytest.mark.parametrize("engine", [None, "native", "tiled"])
@pytest.mark.parametrize("transform", NESTED)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.filterwarnings("ignore")
def test_transforms_nest(transform: str, engine: str | None, which: int) -> None:
    case, tensors = CASES["causal"], qkv()
    tangent = qkv(50)[which]
    small = tuple(x[:1, :, :4] for x in tensors)

    def expected(x: Tensor) -> Tensor:
        q, k, v = (*small[:which], x, *small[which + 1 :])
        allowed = torch.ones(4, 4, dtype=torch.bool).tril()
        return (q / math.sqrt(D) @ heads(k).mT).masked_fill(~allowed, -math.inf).softmax(-1) @ heads(v)

    def actual(x: Tensor) -> Tensor:
        inputs = (*small[:which], x, *small[which + 1 :])
        try:
            return rg.attention(*inputs, engine=engine, **case.describe())
        except CannotCompute:
            assert engine is not None
            return rg.attention(*inputs, **case.describe())  # an engine that raises is replaced by the default

    x, t = small[which], tangent[:1, :, :4]
    close([NESTED[transform](actual, x, t)], [NESTED[transform](expected, x, t)])


@pytest.mark.parametrize("engine", [None, *NEEDED])
@pytest.mark.parametrize("name", ["causal", "a learned scale", "shaw with values, and a sink", "softcap"])
@pytest.mark.parametrize("functional", [False, True])
def test_a_loss_that_contains_a_jvp_has_gradients(name: str, engine: str | None, functional: bool) -> None:
    case, results = CASES[name], []
    for call in (lambda *x: dense(case, *x), ours(case, engine)):
        tensors = [x.requires_grad_() for x in tensors_of(case)]
        tangents = [x.requires_grad_() for x in tensors_of(case, seed=50)]
        if functional:
            values, tangent = torch.func.jvp(call, tuple(tensors), tuple(tangents))
            loss = sum(x.sin().sum() for x in (*values, *tangent))
        else:
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
                actual = [x for pair in map(forward_ad.unpack_dual, call(*duals)) for x in pair]
                loss = sum(x.sin().sum() for x in actual)
        results.append(torch.autograd.grad(loss, [*tensors, *tangents]))
    close(*results)


@pytest.mark.parametrize("engine", [None, *NEEDED])
@pytest.mark.parametrize("name", [name for name in CASES if name != "rows that see nothing"])
def test_a_gradient_within_a_dual_level_has_a_tangent(name: str, engine: str | None) -> None:
    case, results = CASES[name], []
    if not can(case, engine, tensors_of(case)):
        pytest.skip(f"{engine} does not take it")
    for call in (lambda *x: dense(case, *x), ours(case, engine)):
        tensors, tangents = [x.requires_grad_() for x in tensors_of(case)], tensors_of(case, seed=50)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
            loss = sum(x.sin().sum() for x in call(*duals))
            grads = torch.autograd.grad(loss, tensors)
            results.append([x for pair in map(forward_ad.unpack_dual, grads) for x in pair])
    close(*results)


@pytest.mark.parametrize("engine", [None, *NEEDED, "sdpa"])
def test_a_gradient_of_a_dual_gradient_has_a_tangent(engine: str | None) -> None:
    """The call itself has no tangents, but the gradient of its output has."""
    case, results = CASES["causal"], []
    for call in (lambda *x: dense(case, *x)[0], lambda *x: rg.attention(*x, engine=engine, **case.describe())):
        tensors = [x.requires_grad_() for x in qkv()]
        output = call(*tensors)
        with forward_ad.dual_level():
            by = forward_ad.make_dual(normal(*output.shape, seed=7), normal(*output.shape, seed=8))
            grads = torch.autograd.grad(output, tensors, by)
            results.append([x for pair in map(forward_ad.unpack_dual, grads) for x in pair])
    close(*results)


@pytest.mark.parametrize("engine", [None, "native", "tiled", "sdpa", "reference"])
@pytest.mark.parametrize("order", [2, 3])
def test_small_calls_can_be_differentiated_again(engine: str | None, order: int) -> None:
    results = []
    for call in (lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, lambda *x: rg.attention(*x, engine=engine)):
        tensors = [normal(6, 4, seed=n).requires_grad_() for n in range(3)]
        total = call(*tensors).sin().sum()
        for _ in range(order):
            grads = torch.autograd.grad(total, tensors, create_graph=True)
            total = sum(x.sin().sum() for x in grads)
        results.append(grads)
    close(*results)


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "rows that see nothing"])
def test_second_derivatives_are_those_of_the_definition(name: str, engine: str) -> None:
    case, results = CASES[name], []
    call = lambda *x: rg.attention(*x[:3], engine=engine, **case.describe(*x[3:]))  # noqa: E731
    problem = rg.Attention(**case.describe(*tensors_of(case)[3:])).problem(*qkv())
    if ENGINES[engine].why_not(problem):
        pytest.skip(f"{engine} does not take it")
    for function in (lambda *x: dense(case, *x)[0], call):
        tensors = [x.requires_grad_() for x in tensors_of(case)]
        grads = torch.autograd.grad(function(*tensors).sin().sum(), tensors, create_graph=True, materialize_grads=True)
        again = torch.autograd.grad(sum(x.sin().sum() for x in grads), tensors)
        results.append([*grads, *again])
    close(*results)


def test_a_gradient_of_a_loss_with_a_jvp_can_be_differentiated_again() -> None:
    results = []
    for call in (lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, lambda *x: rg.attention(*x)):
        tensors, tangents = ([normal(6, 4, seed=n + s).requires_grad_() for n in range(3)] for s in (0, 9))
        _, tangent = torch.func.jvp(call, tuple(tensors), tuple(tangents))
        grads = torch.autograd.grad(tangent.sin().sum(), [*tensors, *tangents], create_graph=True)
        results.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), [*tensors, *tangents]))
    close(*results)
