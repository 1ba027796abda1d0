"""The kernels for GPUs under torch.compile, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines import triton
from tests.engines.calls import gradients, normal

pytestmark = pytest.mark.skipif(
    bool(triton.why_missing()) or not triton.is_interpreted(), reason="needs triton and TRITON_INTERPRET=1"
)
H, Q, K, D, E = 2, 20, 70, 8, 5
DESCRIPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": rg.causal()},
    "tiles and alibi": lambda: {"mask": rg.global_tokens([1]) | rg.window(3, 3), "bias": rg.alibi(H)},
    "a learned table": lambda: {"bias": rg.relative(normal(9, H, dtype=torch.float32).requires_grad_())},
    "a dense bias and a sink": lambda: {
        "bias": normal(H, 1, K, dtype=torch.float32).requires_grad_(),
        "sink": normal(H, dtype=torch.float32).requires_grad_(),
    },
    "shaw": lambda: {"bias": rg.shaw(normal(5, D, dtype=torch.float32), normal(5, E, dtype=torch.float32))},
    "softcap and dropout": lambda: {"score": rg.Dot(softcap=3.0), "mask": rg.padding([60]), "dropout": 0.3},
    "additive": lambda: {"score": rg.Additive(normal(D, dtype=torch.float32).requires_grad_())},
}


def random_inputs() -> list[Tensor]:
    shapes = (1, H, Q, D), (1, 1, K, D), (1, 1, K, E)
    return [normal(*shape, seed=n, dtype=torch.float32).requires_grad_() for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_it_compiles_into_one_graph_with_the_same_bits(name: str) -> None:
    torch.compiler.reset()
    inputs, attend = random_inputs(), rg.Attention(**DESCRIPTIONS[name]())
    given = [*inputs, *(tensor for tensor in attend.tensors() if tensor.requires_grad)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, engine="triton", return_lse=True)

    actual = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        torch.manual_seed(3)
        output, lse = function(*inputs)
        actual.append([output, lse, *torch.autograd.grad(output.square().sum() + lse.sum(), given)])
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_lengths_may_change_without_a_mask() -> None:
    torch.compiler.reset()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return rg.attention(query, key, value, engine="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (20, 33, 40):
        query, key, value = (normal(1, H, length, D, seed=n, dtype=torch.float32) for n in range(3))
        torch.testing.assert_close(compiled(query, key, value), call(query, key, value), rtol=0, atol=0)


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.engines.triton import launch

    torch.compiler.reset()
    kernels: list[str] = []
    run = launch.launch

    def record(device: torch.device, kernel: Any, *arguments: Any, **constants: Any) -> None:
        kernels.append(kernel.fn.__name__)
        run(device, kernel, *arguments, **constants)

    monkeypatch.setattr(launch, "launch", record)
    attend, inputs = rg.Attention(bias=rg.alibi(H)), random_inputs()
    output = torch.compile(lambda *x: attend(*x, engine="triton"), backend="aot_eager")(*inputs)
    gradients(output, inputs)
    assert kernels == ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    query, key, value = (tensor.contiguous() for tensor in random_inputs())
    sink = normal(H, dtype=torch.float32).requires_grad_()
    fixed = ([], None, None, [0.5, 0.0, 1.0, 0.0], [0] * 6)
    torch.library.opcheck(torch.ops.regard.triton_dot, (query, key, value, None, None, None, sink, None, *fixed))


def test_what_a_graph_cannot_contain_is_refused() -> None:
    torch.compiler.reset()
    inputs = [tensor.detach() for tensor in random_inputs()]

    def call(offset: Tensor) -> Tensor:
        return rg.attention(*inputs, mask=rg.causal(), offset=offset, engine="triton")

    with pytest.raises(rg.CannotCompute, match="a mask layout from a tensor of offsets"):
        torch.compile(call, backend="aot_eager")(torch.tensor([3]))
