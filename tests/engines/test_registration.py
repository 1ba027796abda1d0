"""The native engine with torch.compile, threads, forks, and every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines import native
from regard.engines.problem import Problem
from tests.engines.calls import gradients, tensors

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "the library is there")


COMPILED = {
    "plain": rg.Attention(),
    "causal": rg.Attention(mask=rg.causal()),
    "longformer": rg.Attention(mask=rg.global_tokens([1]) | rg.window(3, 3), bias=rg.alibi(2)),
    "sink and softcap": rg.Attention(score=rg.Dot(softcap=9.0), sink=0.5),
    "additive": rg.Attention(score=rg.Additive(torch.linspace(-1, 1, 8, dtype=torch.float64)), mask=rg.causal()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_into_one_graph(name: str, dynamic: bool) -> None:
    torch.compiler.reset()
    inputs = tensors((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return COMPILED[name](q, k, v, engine="native")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*inputs)
    eager = attend(*inputs)
    for a, b in zip([compiled, *gradients(compiled, inputs)], [eager, *gradients(eager, inputs)], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    query, key, value = tensors((2, 2, 9, 4), (2, 1, 11, 4), (2, 1, 11, 3))
    bias, sink = tensors((1, 2, 9, 11), (2,))
    start, stop = torch.zeros(1, 1, 9, dtype=torch.int32), torch.arange(1, 10, dtype=torch.int32)[None, None]
    fixed = ([start, stop], None, None, [0.5, 0.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    torch.library.opcheck(torch.ops.regard.dot, (query, key, value, None, None, bias, sink, None, *fixed))
    weight, fixed = tensors((1, 1, 1, 4))[0], ([start, stop], None, None, [1.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    torch.library.opcheck(torch.ops.regard.dot, (query, key, value, None, None, bias, sink, weight, *fixed))


def test_many_python_threads_may_call_it() -> None:
    inputs = [t.detach() for t in tensors((1, 2, 100, 16), (1, 2, 100, 16), (1, 2, 100, 16))]
    expected, wrong = rg.attention(*inputs, engine="native"), []

    def work() -> None:
        wrong.extend(1 for _ in range(30) if not torch.equal(rg.attention(*inputs, engine="native"), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORCED = """
import numpy as np, torch, regard as rg
from torch.autograd import forward_ad
from regard.engines import native
q, k, v = (torch.randn(2, 4, n, 33, dtype=torch.float64, requires_grad=True) for n in (70, 130, 130))
for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
    sparse = {"mask": ~rg.window(9, 9), "score": rg.Dot(softcap=4.0), "dropout": 0.5}
    additive = {"score": rg.Additive(torch.linspace(-1, 1, 33, dtype=torch.float64)), "mask": rg.causal()}
    for description in ({}, {"mask": rg.causal(), "bias": rg.alibi(4)}, sparse, additive):
        results = []
        for engine in ("native", "reference"):
            torch.manual_seed(0)
            x = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
            out = rg.attention(*x, engine=engine, **description)
            results.append([out, *torch.autograd.grad(out.float().sin().sum(), x)])
            torch.manual_seed(0)
            with torch.no_grad(), forward_ad.dual_level():
                duals = [forward_ad.make_dual(t.detach(), t.detach().flip(2)) for t in x]
                out = rg.attention(*duals, engine=engine, **description)
                results[-1].append(forward_ad.unpack_dual(out).tangent)
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
for features in ("elu", rg.favor(24)):
    attend, x = rg.LinearAttention(features, mask=rg.causal()), [q[:, :, :67], k[:, :2, :67], v[:, :2, :67]]
    results = [attend(*x), attend.step(*x)[0]]
    grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in results]
    for a, b in zip([results[0], *grads[0]], [results[1], *grads[1]]):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
assert np.longdouble(3) / 2 == 1.5, "the kernels left numbers in registers of the x87 unit"
print(native.build_info()["instruction set"])
"""


@pytest.mark.parametrize("isa", native.build_info().get("compiled for", "").split())
def test_every_instruction_set_agrees_when_forced(isa: str) -> None:
    used = run_python(FORCED, REGARD_ISA=isa).strip()
    if used != isa:
        pytest.skip(f"this CPU has no {isa}")


def test_a_child_of_a_fork_can_use_it() -> None:
    code = """
import os, torch, regard as rg
torch.set_num_threads(2)
q = torch.randn(1, 8, 256, 32)
before = rg.attention(q, q, q, engine="native").numpy()
child = os.fork()
if child == 0:  # torch's own operators would wait for threads that are gone: numpy compares
    os._exit(0 if abs(rg.attention(q, q, q, engine="native").numpy() - before).max() < 1e-5 else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    run_python(code)


def test_a_missing_library_is_a_reason_not_an_error() -> None:
    code = """
import torch, regard as rg
q = torch.randn(1, 2, 16, 8)
explanation = rg.Attention().explain(q, q, q)
assert explanation.engine != "native" and "does not load" in " ".join(explanation.reasons["native"]), explanation
rg.attention(q, q, q)
"""
    run_python(code, REGARD_LIBRARY="/nowhere/_native.so")


def reasons(**description: object) -> str:
    q, k, v = tensors((1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3))
    problem = rg.Attention(**description).problem(q, k, v)  # type: ignore[arg-type]
    assert isinstance(problem, Problem)
    return "; ".join(native.why_not(problem))


def test_reasons_name_unsupported_descriptions() -> None:
    assert not reasons(mask=rg.causal(), bias=rg.alibi(2))
    assert not reasons(score=rg.Additive(torch.zeros(3)))
    assert "one shaw" in reasons(bias=rg.shaw(torch.zeros(3, 3)) + rg.shaw(torch.zeros(3, 3)))
    assert "not Modified" in reasons(score=lambda s, b, h, p, j: s)


SYMBOLIC: dict[str, Callable[[], dict[str, Any]]] = {
    "sink": lambda: {"sink": torch.randn(3)},
    "sigmoid": lambda: {"normalization": rg.Sigmoid(torch.randn(3))},
    "scale": lambda: {"score": rg.Dot(torch.rand(3))},
    "relative": lambda: {"bias": rg.relative(torch.randn(5, 3))},
    "t5": lambda: {"bias": rg.t5(torch.randn(8, 3))},
    "dense bias": lambda: {"bias": torch.randn(3, 1, 1)},
    "shaw": lambda: {"bias": rg.shaw(torch.randn(3, 5, 4))},
    "mask": lambda: {"mask": torch.ones(2, 1, 1, 5, dtype=torch.bool)},
    "documents": lambda: {"mask": rg.documents(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]))},
    "global tokens": lambda: {"mask": rg.global_tokens([[0], [1]])},
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes_are_compared_with_those_of_a_description(name: str) -> None:
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    attend = rg.Attention(**SYMBOLIC[name]())
    with torch.no_grad():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)(q, k, v)
        torch.testing.assert_close(compiled, attend(q, k, v))
