"""Tensors in a description are parameters and buffers of every module that holds it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import regard as rg
from regard.scores import Score

H, D, N = 4, 8, 6


class Slope(nn.Module):
    """A score function with a parameter."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.slope = tensor

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score - self.slope[h] * (q_index - k_index).abs()


@dataclass(eq=False)
class Scaled(Score):
    """A score as a user would write it."""

    factor: Tensor | None = None

    def tile(self, query: Tensor, key: Tensor, at: object) -> Tensor:
        return self.factor * (query @ key.mT)


Make = Callable[[Callable[..., Tensor]], rg.Attention]
DESCRIPTIONS: dict[str, Make] = {
    "sink": lambda new: rg.Attention(sink=new(H)),
    "relative": lambda new: rg.Attention(bias=rg.relative(new(5, H))),
    "t5": lambda new: rg.Attention(bias=rg.t5(new(8, H))),
    "shaw": lambda new: rg.Attention(bias=rg.shaw(new(5, D), new(5, D))),
    "dense_bias": lambda new: rg.Attention(bias=new(N, N)),
    "a sum of biases": lambda new: rg.Attention(bias=rg.relative(new(5, H)) + rg.alibi(H) + rg.dense_bias(new(N, N))),
    "Additive": lambda new: rg.Attention(score=rg.Additive(new(H, D))),
    "Bilinear": lambda new: rg.Attention(score=rg.Bilinear(new(D, D))),
    "Dot": lambda new: rg.Attention(score=rg.Dot(scale=new(H))),
    "Cosine": lambda new: rg.Attention(score=rg.Cosine(scale=new(1))),
    "Modified": lambda new: rg.Attention(score=rg.Modified(lambda score, *at: score, rg.Dot(scale=new(H)))),
    "a score function": lambda new: rg.Attention(score=Slope(new(H))),
    "a score of one's own": lambda new: rg.Attention(score=Scaled(new(1))),
}
LEARNED = {"a sum of biases": 2, "shaw": 2}  # tensors; one elsewhere


class Holder(nn.Module):
    """A module as a user would write it."""

    def __init__(self, attend: rg.Attention) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(H * D, H * D), attend

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D)).transpose(1, 2)
        return self.attend(x, x, x).transpose(1, 2).flatten(2)


class SelfHeld(nn.Module):
    """A user's module that holds a score and a bias, and describes the attention at every call."""

    def __init__(self, attend: rg.Attention) -> None:
        super().__init__()
        self.score, self.bias, self.sink = attend.score, attend.bias, attend.sink

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (H, D)).transpose(1, 2)
        return rg.attention(x, x, x, score=self.score, bias=self.bias, sink=self.sink).transpose(1, 2).flatten(2)


HOLDERS: dict[str, Callable[[rg.Attention], nn.Module]] = {
    "MultiHeadAttention": lambda attend: rg.nn.MultiHeadAttention(H * D, H, attend=attend),
    "a module of the user": Holder,
    "a module that holds the parts": SelfHeld,
}


def new_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def build(kind: str, holder: str, new: Callable[..., Tensor] = new_parameter) -> nn.Module:
    return HOLDERS[holder](DESCRIPTIONS[kind](new))


def learned(module: nn.Module) -> dict[str, nn.Parameter]:
    projections = ("qkv.", "output.", "project.")
    return {name: p for name, p in module.named_parameters() if not name.startswith(projections)}


both = pytest.mark.parametrize("holder", HOLDERS)
kinds = pytest.mark.parametrize("kind", DESCRIPTIONS)


@both
@kinds
def test_parameters_are_registered_and_trained(kind: str, holder: str) -> None:
    module, x = build(kind, holder), torch.randn(2, N, H * D)
    tensors = learned(module)
    assert len(tensors) == LEARNED.get(kind, 1)
    assert set(tensors) <= set(module.state_dict())
    optimizer = torch.optim.SGD(tensors.values(), lr=0.5)
    before = module(x)
    before.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in tensors.values())
    optimizer.step()
    assert not torch.allclose(module(x), before, atol=1e-4)


@both
@kinds
def test_another_dtype_converts_the_whole_description(kind: str, holder: str) -> None:
    module, x = build(kind, holder), torch.randn(2, N, H * D)
    before = module(x)
    module.double()
    assert {t.dtype for t in module.parameters()} == {torch.float64}
    assert torch.allclose(module(x.double()), before.double(), atol=1e-5)
    fresh = build(kind, holder).double()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(x.double()), module(x.double()))


@both
@kinds
def test_loading_copying_and_pickling_carry_the_tensors(kind: str, holder: str) -> None:
    module, other, x = build(kind, holder), build(kind, holder), torch.randn(2, N, H * D)
    expected = module(x)
    assert not torch.allclose(other(x), expected, atol=1e-4)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), expected)
    third = build(kind, holder)
    third(x)
    third.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(third(x), expected)
    if kind != "Modified":  # a lambda cannot be pickled
        assert torch.equal(pickle.loads(pickle.dumps(module))(x), expected)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for p in learned(module).values():
            p.add_(torch.randn_like(p))
    assert torch.equal(copied(x), expected)
    assert not torch.allclose(module(x), expected, atol=1e-4)


@both
@kinds
def test_functional_call_uses_and_differentiates_what_it_is_given(kind: str, holder: str) -> None:
    module, x = build(kind, holder).double(), torch.randn(2, N, H * D, dtype=torch.float64)
    module(x)  # plans are made with the module's own tensors
    own = {name: p.detach().clone() for name, p in learned(module).items()}
    given = {name: (p + 0.3 * torch.randn_like(p)).requires_grad_() for name, p in own.items()}
    output = functional_call(module, given, (x,))
    grads = torch.autograd.grad(
        output.square().sum(), list(given.values())
    )  # after the module has its own tensors back
    with torch.no_grad():
        for name, p in learned(module).items():
            p.copy_(given[name])
    expected = module(x)
    assert torch.allclose(output, expected, atol=1e-12)
    grads_expected = torch.autograd.grad(expected.square().sum(), list(learned(module).values()))
    for grad, want in zip(grads, grads_expected, strict=True):
        assert torch.allclose(grad, want, atol=1e-10)


@pytest.mark.parametrize("holder", ["MultiHeadAttention", "a module of the user"])
@kinds
def test_plain_tensors_are_buffers(kind: str, holder: str) -> None:
    if kind == "a score function":
        pytest.skip("a module registers its own tensors")
    module, x = build(kind, holder, torch.randn), torch.randn(2, N, H * D)
    assert not learned(module)
    buffers = dict(module.named_buffers())
    assert len(buffers) == LEARNED.get(kind, 1)
    before = module(x)
    module.double()
    assert {t.dtype for t in module.buffers()} == {torch.float64}
    assert torch.allclose(module(x.double()), before.double(), atol=1e-5)


@kinds
def test_every_way_of_changing_a_parameter_is_seen(kind: str) -> None:
    module, x = build(kind, "a module of the user").double(), torch.randn(2, N, H * D, dtype=torch.float64)
    module(x)

    def expected() -> Tensor:
        fresh = copy.deepcopy(module)
        return fresh(x)

    for p in learned(module).values():
        p.data = p.data + torch.randn_like(p)
    assert torch.equal(module(x), expected())
    vector_to_parameters(parameters_to_vector(module.parameters()) * 1.5, module.parameters())
    assert torch.equal(module(x), expected())
    for name, p in list(learned(module).items()):
        torch.utils.swap_tensors(p, nn.Parameter(torch.randn_like(p)))
        assert learned(module)[name] is p
    assert torch.equal(module(x), expected())
    for p in learned(module).values():
        p.numpy(force=True)[...] *= 2
    assert torch.equal(module(x), expected())


def test_a_dense_bias_keeps_its_parameter() -> None:
    q = torch.randn(1, H, N, D)
    bias = nn.Parameter(torch.randn(N, N), requires_grad=False)
    with torch.no_grad():
        attend = rg.Attention(bias=bias)
    attend(q, q, q)
    bias.requires_grad_(True)
    attend(q, q, q).sum().backward()
    assert bias.grad is not None
    bias.data = torch.randn(N, N)
    weights = (q @ q.mT / D**0.5 + bias).softmax(-1)
    assert torch.allclose(attend(q, q, q), weights @ q, atol=1e-5)
    assert torch.allclose(attend.weights(q, q), weights, atol=1e-5)


def test_a_tensor_of_another_shape_is_checked_again() -> None:
    q, bias = torch.randn(1, H, N, D), nn.Parameter(torch.randn(N, N))
    attend = rg.Attention(bias=bias)
    attend(q, q, q)
    bias.data = torch.randn(3, 3)
    with pytest.raises(ValueError, match="bias must broadcast"):
        attend(q, q, q)


@kinds
def test_it_compiles_with_its_parameters(kind: str) -> None:
    if kind == "Additive":
        pytest.skip("tests/engines/test_registration.py compiles it")
    module, x = build(kind, "MultiHeadAttention"), torch.randn(2, N, H * D)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    assert torch.allclose(compiled(x), module(x), atol=1e-5)
    with torch.no_grad():
        for p in learned(module).values():
            p.add_(torch.randn_like(p))
    assert torch.allclose(compiled(x), module(x), atol=1e-5)
    compiled(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in learned(module).values())


def test_layers_that_share_a_description_share_its_parameters() -> None:
    attend = rg.Attention(sink=nn.Parameter(torch.zeros(H)))
    layers = nn.ModuleList(rg.nn.MultiHeadAttention(H * D, H, attend=attend) for _ in range(2))
    assert sum(p is attend.sink for p in layers.parameters()) == 1
    copied = copy.deepcopy(layers)
    assert copied[0].attend is copied[1].attend


def test_a_module_prints_its_description() -> None:
    module = rg.nn.MultiHeadAttention(8, 2, attend=rg.Attention(mask=rg.causal(), sink=nn.Parameter(torch.zeros(2))))
    assert "(attend): Attention(mask=causal(), sink=(2,))" in repr(module)


def test_dropout_follows_the_mode_of_the_module() -> None:
    q = torch.randn(1, H, N, D)
    attend = rg.Attention(dropout=0.5)
    expected = rg.attention(q, q, q)
    assert not torch.allclose(attend(q, q, q), expected)
    holder = Holder(attend).eval()
    assert torch.equal(holder.attend(q, q, q), expected)
    assert torch.equal(attend.replace(mask=rg.window(N, N))(q, q, q), expected)
    holder.train()
    assert not torch.allclose(attend(q, q, q), expected)


def test_fields_are_immutable_but_for_tensors_that_torch_replaces() -> None:
    attend = rg.Attention(mask=rg.causal(), sink=nn.Parameter(torch.zeros(H)))
    with pytest.raises(AttributeError, match="immutable"):
        attend.mask = None
    with pytest.raises(AttributeError, match="immutable"):
        attend.score.scale = 2.0  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="sink"):
        attend.sink = 1.0
    attend.sink = nn.Parameter(torch.full((H,), 30.0))
    q = torch.randn(1, H, N, D)
    assert attend(q, q, q).abs().max() < 1e-6


def test_second_derivatives_reach_the_tensors_of_every_engine() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, D, dtype=torch.float64)
    q.requires_grad_()
    table = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    results = []
    for engine in ("reference", "native", "tiled"):
        output = rg.attention(q, k, v, bias=rg.relative(table), engine=engine)
        first = torch.autograd.grad(output.square().sum(), (q, table), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (q, table)))
    for other in results[1:]:
        for grad, want in zip(other, results[0], strict=True):
            assert torch.allclose(grad, want, atol=1e-9)


def test_fsdp_shards_and_trains_the_tensors(tmp_path: Path) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    module, x = build("a sum of biases", "MultiHeadAttention"), torch.randn(2, N, H * D)
    plain = copy.deepcopy(module)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fsdp.fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        names = learned(plain)
        assert set(learned(module)) == set(names)
        for other in (module, plain):
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            for _ in range(2):
                other(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, p in learned(module).items():
            assert torch.allclose(p.full_tensor(), names[name], atol=1e-5)  # type: ignore[operator]
        assert torch.allclose(module(x), plain(x), atol=1e-5)
    finally:
        dist.destroy_process_group()


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_a_parametrized_tensor_is_computed_and_trained() -> None:
    module, x = build("Dot", "MultiHeadAttention"), torch.randn(2, N, H * D)
    scale, expected = module.attend.score.scale, copy.deepcopy(module)
    nn.utils.parametrize.register_parametrization(module.attend.score, "scale", Exponential())
    expected.attend.score.scale.data.exp_()
    assert torch.allclose(module(x), expected(x), atol=1e-6)
    module(x).square().sum().backward()
    assert scale.grad is not None
    assert bool(scale.grad.any())


@pytest.mark.parametrize("holder", ["MultiHeadAttention", "SelfAttention"])
def test_a_score_function_with_hidden_parameters_is_refused(holder: str) -> None:
    slope = nn.Parameter(torch.ones(()))
    attend = rg.Attention(score=lambda score, b, h, q_index, k_index: score * slope)
    with pytest.raises(TypeError, match=r"nn\.Module with forward"):
        rg.nn.MultiHeadAttention(8, 2, attend=attend) if holder == "MultiHeadAttention" else rg.nn.SelfAttention(
            8, 8, 8, attend=attend
        )
