"""Tensors that are not plain memory: pending negations, zeros without storage, subclasses, fake tensors, modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.engines import native
from regard.engines.packed_linear import PackedWeight
from regard.engines.tensor_memory import data_address

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "the library is there")
B, H, N, D = 2, 2, 70, 16  # more than a tile, and too large for sdpa to be preferred


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that values that are never written are noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs() -> dict[str, Tensor]:
    shapes = {
        "query": (B, H, N, D), "key": (B, H, N, D), "value": (B, H, N, D), "bias": (H, N, N), "sink": (H,),
        "scale": (H,), "weight": (H, D), "matrix": (H, D, D),
    }  # fmt: skip
    return {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


SCORES: dict[str, Callable[[dict[str, Tensor]], rg.Score]] = {
    "dot": lambda x: rg.Dot(scale=x["scale"]),
    "cosine": lambda x: rg.Cosine(scale=x["scale"]),
    "additive": lambda x: rg.Additive(x["weight"]),
    "bilinear": lambda x: rg.Bilinear(x["matrix"]),
}
READ = {"dot": "scale", "cosine": "scale", "additive": "weight", "bilinear": "matrix"}
CASES = [("plain", name) for name in ("query", "key", "value")]
CASES += [("dot", name) for name in ("query", "key", "value", "bias", "sink", "scale")]
CASES += [(score, name) for score, name in READ.items() if score != "dot"]


def attention(score: str, x: dict[str, Tensor]) -> rg.Attention:
    if score == "plain":
        return rg.Attention(mask=rg.causal())
    return rg.Attention(SCORES[score](x), rg.causal(), x["bias"], sink=x["sink"])


def dense(score: str, x: dict[str, Tensor]) -> Tensor:
    """Compute the same in dense torch."""
    q, k, scale = x["query"], x["key"], x["scale"][:, None, None]
    if score == "plain":
        logits = q @ k.mT / D**0.5
    elif score == "dot":
        logits = scale * (q @ k.mT)
    elif score == "cosine":
        logits = scale * (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT
    elif score == "additive":
        logits = ((q.unsqueeze(-2) + k.unsqueeze(-3)).tanh() * x["weight"][:, None, None]).sum(-1)
    else:
        logits = q @ x["matrix"] @ k.mT  # the matrix is the whole scale
    sink = torch.full((B, H, N, 1), -torch.inf, dtype=q.dtype)
    if score != "plain":
        logits = logits + x["bias"]
        sink = x["sink"][:, None, None].expand(B, H, N, 1)
    logits = logits.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ x["value"]


def negated(tensor: Tensor) -> Tensor:
    """Return the same numbers as a view of memory that holds their negatives."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    return view


class Wrapper(Tensor):
    """A wrapper around a tensor, without memory, that records the operators called on it."""

    inner: Tensor
    seen: list[str]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        Wrapper.seen.append(str(func))

        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda x: Wrapper(x) if isinstance(x, Tensor) else x, result)


def unwrap(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Wrapper) else tensor


class Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("score", "name"), CASES)
def test_a_negated_view_is_read_with_its_sign(score: str, name: str, grad: bool) -> None:
    x = inputs()
    expected = dense(score, x)
    given = x | {name: negated(x[name])}
    if grad:
        given["value"].requires_grad_()
    output = attention(score, given)(given["query"], given["key"], given["value"], engine="native")
    torch.testing.assert_close(output.detach(), expected, rtol=1e-11, atol=1e-11)


def test_a_negated_gradient_is_read_with_its_sign() -> None:
    x, grad = inputs(), normal(B, H, N, D, seed=9)
    results = []
    for each in (grad, negated(grad)):
        tensors = [x[name].clone().requires_grad_() for name in ("query", "key", "value", "bias")]
        output = rg.attention(*tensors[:3], bias=tensors[3], engine="native")
        results.append(torch.autograd.grad(output, tensors, each))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["query", "key", "bias"])
def test_inspection_reads_negated_views(name: str) -> None:
    x = inputs()
    given = x | {name: negated(x[name])}
    plain, viewed = (rg.Attention(mask=rg.causal(), bias=each["bias"]) for each in (x, given))
    for call in (
        lambda attend, q, k: attend.weights(q, k, rows=[1, 2]),
        lambda attend, q, k: attend.map(q, k, size=(4, 4)),
        lambda attend, q, k: attend.statistics(q, k).entropy,
    ):
        expected = call(plain, x["query"], x["key"])
        torch.testing.assert_close(call(viewed, given["query"], given["key"]), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["q", "k", "v", "gradient"])
def test_linear_attention_reads_negated_views(name: str) -> None:
    x = dict(zip(("q", "k", "v", "gradient"), normal(4, B, H, N, D).unbind(), strict=True))
    results = []
    for given in (x, x | {name: negated(x[name])}):
        tensors = [given[each].detach().requires_grad_() for each in "qkv"]
        output = rg.LinearAttention(mask=rg.causal())(*tensors)
        results.append([output, *torch.autograd.grad(output, tensors, given["gradient"])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("score", "name"), CASES)
def test_zeros_without_storage_are_zeros(score: str, name: str) -> None:
    x = inputs()
    if name == "query" or (score == "cosine" and name == "key"):
        score = "dot"
    given = x | {name: torch._efficientzerotensor(x[name].shape, dtype=torch.float64)}
    expected = dense(score, x | {name: torch.zeros_like(x[name])})
    output = attention(score, given)(given["query"], given["key"], given["value"], engine="native")
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)


def test_a_view_of_zeros_without_storage_is_zero() -> None:
    x = inputs()
    zeros = torch._efficientzerotensor((2, H, N, N), dtype=torch.float64)[1]
    expected = dense("dot", x | {"bias": torch.zeros_like(x["bias"])})
    attend = attention("dot", x | {"bias": zeros})
    torch.testing.assert_close(attend(x["query"], x["key"], x["value"], engine="native"), expected)


@pytest.mark.parametrize(("score", "name"), CASES)
def test_a_wrapper_receives_the_operator(score: str, name: str) -> None:
    x = inputs()
    Wrapper.seen = []
    given = x | {name: Wrapper(x[name])}
    output = attention(score, given)(given["query"], given["key"], given["value"], engine="native")
    assert "regard.dot.default" in Wrapper.seen
    torch.testing.assert_close(unwrap(output), dense(score, x), rtol=1e-11, atol=1e-11)


def test_a_wrapper_is_read_by_inspection_and_linear_attention() -> None:
    x = inputs()
    Wrapper.seen = []
    query, bias = Wrapper(x["query"]), Wrapper(x["bias"])
    plain, wrapped = rg.Attention(bias=x["bias"]), rg.Attention(bias=bias)
    torch.testing.assert_close(unwrap(wrapped.weights(query, x["key"])), plain.weights(x["query"], x["key"]))
    linear = rg.LinearAttention(mask=rg.causal())
    expected = linear(x["query"], x["key"], x["value"])
    torch.testing.assert_close(unwrap(linear(query, x["key"], x["value"])), expected)


def freed(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def freed_view(tensor: Tensor) -> Tensor:
    """Return a view like a shard of a flat parameter whose memory was freed: its address is its offset, not null."""
    flat = torch.cat([torch.zeros(100, dtype=tensor.dtype), tensor.flatten()])
    view = flat[100:].view(tensor.shape)
    flat.untyped_storage().resize_(0)
    assert view.data_ptr()
    return view


def test_a_view_of_freed_memory_has_no_address() -> None:
    tensor = normal(3)
    assert data_address(tensor[1:]) == tensor.data_ptr() + 8
    addresses = [data_address(free(tensor)) for free in (freed, freed_view)]  # pytest cannot print freed tensors
    assert addresses == [0, 0]


# Without tensors that torch reads before the kernels do: torch does not check, and the process would crash.
@pytest.mark.parametrize("free", [freed, freed_view])
@pytest.mark.parametrize(
    ("score", "name"),
    [("plain", "query"), ("plain", "key"), ("plain", "value"), ("dot", "key"), ("dot", "value"), ("dot", "bias"),
     ("dot", "sink"), ("additive", "weight")],
)  # fmt: skip
def test_freed_memory_is_an_error(score: str, name: str, free: Callable[[Tensor], Tensor]) -> None:
    x = inputs()
    given = x | {name: free(x[name])}
    with pytest.raises((ValueError, RuntimeError), match=r"without memory|out of bounds for storage of size 0"):
        attention(score, given)(given["query"], given["key"], given["value"], engine="native")


@pytest.mark.parametrize("free", [freed, freed_view])
def test_freed_memory_is_an_error_in_linear_attention(free: Callable[[Tensor], Tensor]) -> None:
    q, k, v = normal(3, B, H, N, D).unbind()
    with pytest.raises(ValueError, match="without memory"):
        rg.LinearAttention(mask=rg.causal())(q, k, free(v))


@pytest.mark.parametrize("mask", [rg.causal(), rg.causal() & rg.where(lambda b, h, i, j: (i + j) % 3 > 0)], ids=str)
def test_fake_tensors_stay_fake_and_are_not_cached(mask: rg.Mask) -> None:
    x = inputs()
    attend = rg.Attention(mask=mask, bias=rg.alibi(H))
    with FakeTensorMode():
        fake = attend(*(torch.empty(B, H, N, D, dtype=torch.float64) for _ in range(3)), engine="native")
    assert isinstance(fake, FakeTensor)
    assert fake.shape == (B, H, N, D)
    tensors = x["query"], x["key"], x["value"]
    torch.testing.assert_close(attend(*tensors, engine="native"), attend(*tensors, engine="reference"))


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("score", ["plain", *SCORES])
def test_make_fx_records_the_operator(score: str, tracing: str) -> None:
    def call(*tensors: Tensor) -> Tensor:
        given = dict(zip(x, tensors, strict=True))
        return attention(score, given)(given["query"], given["key"], given["value"], engine="native")

    x = inputs()
    graph = make_fx(call, tracing_mode=tracing)(*x.values())
    assert "regard.dot.default" in {str(node.target) for node in graph.graph.nodes}
    other = {name: tensor.flip(0) + 1 for name, tensor in x.items()}
    torch.testing.assert_close(graph(*other.values()), dense(score, other), rtol=1e-11, atol=1e-11)


def test_make_fx_records_the_gradients() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> Any:
        tensors = [each.detach().requires_grad_() for each in (query, key, value)]
        output = rg.attention(*tensors, mask=rg.causal(), engine="native")
        return torch.autograd.grad(output, tensors, grad)

    x, other = normal(4, B, H, N, D, seed=1), normal(4, B, H, N, D, seed=2)
    graph = make_fx(call)(*x)
    for ours, theirs in zip(graph(*other), call(*other), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backward_too", [False, True])
def test_a_mode_sees_the_operator(backward_too: bool) -> None:
    x = inputs()
    tensors = [x[name].clone().requires_grad_(backward_too) for name in ("query", "key", "value")]
    with Listing() as listing:
        output = rg.attention(*tensors, mask=rg.causal(), engine="native")
        if backward_too:
            output.sum().backward()
    assert "regard.dot.default" in listing.seen
    assert ("regard.dot_backward.default" in listing.seen) is backward_too
    torch.testing.assert_close(output.detach(), dense("plain", x), rtol=1e-11, atol=1e-11)


def test_a_mode_around_the_backward_pass_sees_it() -> None:
    x = inputs()
    query = x["query"].clone().requires_grad_()
    sums = [rg.attention(query, x["key"], x["value"], engine="native").sum() for _ in range(2)]
    (expected,) = torch.autograd.grad(sums[0], query)
    with Listing() as listing:
        (ours,) = torch.autograd.grad(sums[1], query)
    assert "regard.dot_backward.default" in listing.seen
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_results_are_the_same_where_operations_are_counted() -> None:
    x = inputs()
    with FlopCounterMode(display=False):
        output = rg.attention(x["query"], x["key"], x["value"], mask=rg.causal())
        linear = rg.LinearAttention(mask=rg.causal())(x["query"], x["key"], x["value"])
    torch.testing.assert_close(output, dense("plain", x), rtol=1e-11, atol=1e-11)
    assert not linear.isnan().any()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_is_not_that_of_the_call(device: str) -> None:
    x = inputs()
    mask = rg.causal() & rg.where(lambda b, h, i, j: (i + j) % 3 > -1)
    with torch.device(device):
        attend = rg.Attention(mask=mask, sink=-torch.inf)
        output, lse = attend(x["query"], x["key"], x["value"], return_lse=True, engine="native")
        entropy = attend.statistics(x["query"], x["key"]).entropy
        rows = attend.weights(x["query"], x["key"], rows=[3, 9])
    torch.testing.assert_close(output, dense("plain", x), rtol=1e-11, atol=1e-11)
    for each in (lse, entropy, rows):
        assert each.device.type == "cpu"
        assert not each.isnan().any()


def test_a_tensor_of_the_description_on_another_device_is_an_error() -> None:
    x = inputs()
    for description in ({"bias": x["bias"].to("meta")}, {"sink": x["sink"].to("meta")}):
        with pytest.raises(ValueError, match=r"on the device of the query, cpu, but one of shape .* is on meta"):
            rg.attention(x["query"], x["key"], x["value"], **description)


def test_inference_tensors_are_read_in_place() -> None:
    with torch.inference_mode():
        x = inputs()
        output = rg.attention(x["query"], x["key"], x["value"], mask=rg.causal(), engine="native")
    torch.testing.assert_close(output, dense("plain", x), rtol=1e-11, atol=1e-11)


def test_packed_weights_take_zeros_without_storage_and_negated_views() -> None:
    x, weight = normal(3, 8).float(), normal(64, 8).float()
    packed = PackedWeight.pack(weight)
    with torch.no_grad():
        assert not F.linear(torch._efficientzerotensor((3, 8), dtype=torch.float32), packed).any()
        torch.testing.assert_close(F.linear(negated(x), packed), x @ weight.T)


@pytest.fixture
def mesh() -> Iterator[Any]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_dtensors_are_left_to_torch_and_not_mixed_with_others(mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    x = inputs()
    tensors = [x[name] for name in ("query", "key", "value")]
    sharded = [distribute_tensor(tensor, mesh) for tensor in tensors]
    output = rg.attention(*sharded)
    torch.testing.assert_close(output.full_tensor(), rg.attention(*tensors, engine="reference"))
    with pytest.raises(ValueError, match="no rule for DTensor"):
        rg.attention(*sharded, engine="native")
    for description in ({"bias": distribute_tensor(x["bias"], mesh)}, {"sink": distribute_tensor(x["sink"], mesh)}):
        with pytest.raises(TypeError, match=r"must all be DTensors, or none; .*\.to_local\(\)"):
            rg.attention(*tensors, **description)


class Marked(Tensor):
    """A subclass with memory."""


def test_a_subclass_with_memory_stays_itself() -> None:
    x = inputs()
    output = rg.attention(x["query"].as_subclass(Marked), x["key"], x["value"], mask=rg.causal(), engine="native")
    assert type(output) is Marked
    torch.testing.assert_close(output.as_subclass(Tensor), dense("plain", x), rtol=1e-11, atol=1e-11)
