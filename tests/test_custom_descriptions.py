"""User-defined scores, biases and score functions work with every engine, copy, mode and backward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import regard as rg
from regard.geometry import CallSlice, Indices
from regard.positions.biases import Bias, DenseBias, Relative
from regard.scores import Dot, Score

H, D, N = 2, 8, 6
DISTANCE = torch.arange(N) - torch.arange(N)[:, None]
ENGINES = ("reference", "tiled", None)
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, 2, H, N, D, dtype=torch.float64).unbind())


def attention(logits: Tensor, value: Tensor) -> Tensor:
    """The definition."""
    return logits.softmax(-1) @ value


class Opposite(Dot):
    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return -super().tile(query, key, at)


class DoubleRelative(Relative):
    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        return 2 * super().tile(at, query, scale)


class DoubleDense(DenseBias):
    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        return 2 * super().tile(at, query, scale)


@pytest.mark.parametrize("train", [False, True])
def test_a_subclass_of_a_score_computes_what_it_says(train: bool) -> None:
    q, k, v = (x.requires_grad_(train) for x in inputs())
    expected = attention(-(q @ k.mT) / D**0.5, v)
    for engine in ENGINES:
        assert torch.allclose(rg.attention(q, k, v, score=Opposite(), engine=engine), expected)
    assert torch.allclose(rg.Attention(score=Opposite()).weights(q, k) @ v, expected)
    with pytest.raises(ValueError, match="dot products and the additive score, not"):
        rg.attention(q, k, v, score=Opposite(), engine="native")


def test_a_subclass_of_a_bias_computes_what_it_says() -> None:
    q, k, v = inputs()
    table, dense = torch.randn(5, H, dtype=torch.float64), torch.randn(N, N, dtype=torch.float64)
    dots = q @ k.mT / D**0.5
    expected = attention(dots + 2 * table[DISTANCE.clamp(-2, 2) + 2].permute(2, 0, 1), v)
    assert torch.allclose(rg.attention(q, k, v, bias=DoubleRelative(table)), expected)
    assert torch.allclose(rg.attention(q, k, v, bias=DoubleDense(dense)), attention(dots + 2 * dense, v))
    dense.requires_grad_()
    for engine in ENGINES:
        output, expected = rg.attention(q, k, v, bias=DoubleDense(dense), engine=engine), attention(dots + 2 * dense, v)
        (grads,) = torch.autograd.grad(output.square().sum(), dense)
        assert torch.allclose(grads, torch.autograd.grad(expected.square().sum(), dense)[0])
    both = attention(dots + 2 * dense + dense, v)
    assert torch.allclose(rg.attention(q, k, v, bias=DoubleDense(dense) + rg.dense_bias(dense)), both)


@dataclass(eq=False)
class Projected(Score):
    """A score that holds a module."""

    project: nn.Module

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return self.project(query) @ key.mT


@dataclass(eq=False)
class Summed(Score):
    """A score that holds scores."""

    scores: nn.ModuleList

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return sum(score.tile(query, key, at) for score in self.scores)  # type: ignore[union-attr, misc]


@dataclass(eq=False)
class Curve(Bias):
    """A bias that holds a module."""

    curve: nn.Module

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        return self.curve((at.j - at.p).to(query).unsqueeze(-1)).squeeze(-1)


class WithoutDataclass(Score):
    """A score with a custom constructor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return self.factor * (query @ key.mT)


@dataclass(eq=False)
class WithDerivedTensor(Score):
    """A score that creates its parameter."""

    factor: float
    half: float = field(init=False, default=0.5)

    def __post_init__(self) -> None:
        self.learned = nn.Parameter(torch.tensor(self.factor, dtype=torch.float64))

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return 2 * self.half * self.learned * (query @ key.mT)


def learned_parts(kind: str) -> tuple[rg.Attention, list[nn.Parameter]]:
    if kind == "bias with a module":
        net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
        return rg.Attention(bias=Curve(net)), list(net.parameters())
    if kind == "score with a module":
        score: Score = Projected(nn.Linear(D, D).double())
    elif kind == "score of scores":
        scales = [nn.Parameter(torch.tensor([x], dtype=torch.float64)) for x in (0.3, 0.5)]
        score = Summed(nn.ModuleList(map(Dot, scales)))
    else:
        score = WithoutDataclass(0.3) if kind == "no dataclass" else WithDerivedTensor(0.3)
    return rg.Attention(score=score), list(score.parameters())


def logits_of(kind: str, parameters: list[Tensor], q: Tensor, k: Tensor) -> Tensor:
    if kind == "bias with a module":
        first, shift, second = parameters
        hidden = (DISTANCE.double().unsqueeze(-1) @ first.mT + shift).tanh()
        return q @ k.mT / D**0.5 + (hidden @ second.mT).squeeze(-1)
    if kind == "score with a module":
        return (q @ parameters[0].mT + parameters[1]) @ k.mT
    return sum(parameters) * (q @ k.mT)


KINDS = ("bias with a module", "score with a module", "score of scores", "no dataclass", "derived tensor")


@pytest.mark.parametrize("trains_query", [False, True])
@engines
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_in_modules_and_attributes_are_trained(kind: str, engine: str | None, trains_query: bool) -> None:
    (attend, parameters), (q, k, v) = learned_parts(kind), inputs()
    q.requires_grad_(trains_query)
    leaves = [*parameters, q] if trains_query else parameters
    assert {id(p) for p in attend.parameters()} == {id(p) for p in parameters}
    for _ in range(2):
        output, expected = attend(q, k, v, engine=engine), attention(logits_of(kind, parameters, q, k), v)
        assert torch.allclose(output, expected)
        grads = torch.autograd.grad(output.square().sum(), leaves)
        for grad, want in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
            assert torch.allclose(grad, want, atol=1e-10)
        with torch.no_grad():
            for p in parameters:
                p.mul_(1.5)


@engines
@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_reaches_tensors_in_modules_and_attributes(kind: str, engine: str | None) -> None:
    (attend, parameters), (q, k, v) = learned_parts(kind), inputs()
    given = [(p.detach() + 0.3).requires_grad_() for p in parameters]
    names = [name for name, _ in attend.named_parameters()]
    output = functional_call(attend, dict(zip(names, given, strict=True)), (q, k, v), {"engine": engine})
    expected = attention(logits_of(kind, given, q, k), v)
    assert torch.allclose(output, expected)
    grads = torch.autograd.grad(output.square().sum(), given)
    for grad, want in zip(grads, torch.autograd.grad(expected.square().sum(), given), strict=True):
        assert torch.allclose(grad, want, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_tangents_of_tensors_in_modules_and_attributes(kind: str) -> None:
    (attend, parameters), (q, k, v) = learned_parts(kind), inputs()
    names = [name for name, _ in attend.named_parameters()]
    values = tuple(p.detach() for p in parameters)
    directions = tuple(torch.randn_like(p) for p in values)
    _, tangents = torch.func.jvp(
        lambda *given: functional_call(attend, dict(zip(names, given, strict=True)), (q, k, v)), values, directions
    )
    _, want = torch.func.jvp(lambda *given: attention(logits_of(kind, list(given), q, k), v), values, directions)
    assert torch.allclose(tangents, want, atol=1e-10)


@dataclass(eq=False)
class Sharper(Score):
    """A score that depends on the mode."""

    factor: Tensor

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return self.factor * (query @ key.mT) * (3 if self.training else 1)


@engines
def test_the_mode_of_a_module_reaches_its_score(engine: str | None) -> None:
    factor, (q, k, v) = nn.Parameter(torch.tensor(0.3, dtype=torch.float64)), inputs()
    attend = rg.Attention(score=Sharper(factor))
    for times in (1, 3, 1):
        attend.train(times == 3)
        output, expected = attend(q, k, v, engine=engine), attention(times * factor * (q @ k.mT), v)
        assert torch.allclose(output, expected)
        (grads,) = torch.autograd.grad(output.square().sum(), factor)
        assert torch.allclose(grads, torch.autograd.grad(expected.square().sum(), factor)[0])


class Noise(nn.Module):
    """A score function that draws random numbers."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=learned)

    def forward(self, score: Tensor, *at: Tensor) -> Tensor:
        return self.dropout(score) * self.factor


@pytest.mark.parametrize("learned", [False, True])
@engines
def test_backward_draws_the_random_numbers_of_forward(engine: str | None, learned: bool) -> None:
    (q, k, v), direction, step = inputs(), torch.randn(2, H, N, D, dtype=torch.float64), 1e-6
    attend = rg.Attention(score=Noise(learned))

    def loss(query: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend(query, k, v, engine=engine).square().sum()

    q.requires_grad_()
    total = loss(q)
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(total, q, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)
    second = torch.autograd.grad((grad * direction).sum(), q)[0]

    def slope(query: Tensor) -> Tensor:
        return torch.autograd.grad(loss(query), query)[0]

    with torch.no_grad():
        want = (loss(q + step * direction) - loss(q - step * direction)) / (2 * step)
    assert torch.allclose((grad * direction).sum(), want, rtol=1e-5)
    ahead, behind = ((q + sign * step * direction).detach().requires_grad_() for sign in (1, -1))
    assert torch.allclose(second, (slope(ahead) - slope(behind)) / (2 * step), atol=1e-5)
    attend.eval()
    assert torch.allclose(attend(q, k, v, engine=engine), attention(q @ k.mT / D**0.5, v))


class Methods(nn.Module):
    """A module whose score function is one of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.attend = rg.Attention(score=self.steeper)

    def steeper(self, score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score - self.slope * (q_index - k_index).abs()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, engine: str | None = None) -> Tensor:
        return self.attend(q, k, v, engine=engine)


@pytest.mark.parametrize("learned", [False, True])
@engines
def test_a_method_over_replaced_tensors_is_right_or_refused(engine: str | None, learned: bool) -> None:
    module, (q, k, v) = Methods().requires_grad_(learned), inputs()
    q.requires_grad_()
    assert "steeper" in repr(module)
    slope = torch.tensor(0.7, dtype=torch.float64, requires_grad=learned)
    leaves = [q, slope] if learned else [q]
    output = functional_call(module, {"slope": slope}, (q, k, v, engine))
    expected = attention(q @ k.mT / D**0.5 - slope * DISTANCE.abs(), v)
    assert torch.allclose(output, expected)
    try:
        grads = torch.autograd.grad(output.square().sum(), leaves)
    except RuntimeError as error:
        assert "different values in the backward pass" in str(error)  # noqa: PT017
        assert engine != "reference"
    else:
        for grad, want in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
            assert torch.allclose(grad, want)
    output, expected = module(q, k, v, engine), attention(q @ k.mT / D**0.5 - module.slope * DISTANCE.abs(), v)
    leaves = [q, module.slope] if learned else [q]
    grads = torch.autograd.grad(output.square().sum(), leaves)
    for grad, want in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert torch.allclose(grad, want)


def test_tensors_that_torch_cannot_register_are_rejected() -> None:
    @dataclass(eq=False)
    class Many(Score):
        tensors: object
        others: object = ()

    parameter, score = nn.Parameter(torch.ones(1)), rg.Dot(nn.Parameter(torch.ones(1)))
    for held in ((parameter,), [parameter], {"one": parameter}, [score], (nn.Linear(1, 1),)):
        with pytest.raises(TypeError, match=r"Many\.tensors: torch does not see"):
            Many(held)
    with pytest.raises(TypeError, match=r"Many\.others: only one field"):
        Many((score,), (score,))
    assert len(list(Many(nn.ParameterList([parameter]), (score,)).parameters())) == 2
    assert Many([1, 2], (3, "x")).tensors == [1, 2]

    @dataclass
    class Equal(Score):
        factor: Tensor

    with pytest.raises(TypeError, match="eq=False"):
        Equal(parameter)


def test_hooks_run_with_and_without_an_added_mask() -> None:
    layer, calls = rg.nn.MultiHeadAttention(H * D, H), []
    layer.attend.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.attend.register_forward_hook(lambda *_: calls.append("after"))
    x = torch.randn(2, N, H * D)
    layer(x)
    layer(x, mask=rg.causal())
    assert calls == ["before", "after"] * 2
    # As profilers and summaries do; a score is not called, like an nn.ModuleList, and `Dot()` is shared.
    handles = [module.register_forward_hook(lambda *_: None) for module in layer.modules()]
    layer(x)
    for handle in handles:
        handle.remove()


def test_positions_that_are_written_to_are_seen() -> None:
    attend, (q, k, v) = rg.Attention(mask=rg.causal(), offset=torch.tensor([0, 0])), inputs()

    def expected(offset: int) -> Tensor:
        hidden = ~torch.ones(N, N, dtype=torch.bool).tril(offset)
        return attention((q @ k.mT / D**0.5).masked_fill(hidden, float("-inf")), v)

    assert torch.allclose(attend(q, k, v), expected(0))
    attend.offset.fill_(2)  # type: ignore[union-attr]
    assert torch.allclose(attend(q, k, v), expected(2))
    attend.load_state_dict({"offset": torch.tensor([1, 1])})
    assert torch.allclose(attend(q, k, v), expected(1))
    attend.load_state_dict({"offset": torch.tensor([3, 3])}, assign=True)
    assert torch.allclose(attend(q, k, v), expected(3))
    q.requires_grad_()
    output = attend(q, k, v, engine="tiled")
    attend.offset.fill_(0)  # type: ignore[union-attr]
    (grads,) = torch.autograd.grad(output.square().sum(), q)
    assert torch.allclose(grads, torch.autograd.grad(expected(3).square().sum(), q)[0])


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_a_parametrized_description_is_copied_after_a_call() -> None:
    layer = rg.nn.MultiHeadAttention(H * D, H, attend=rg.Attention(sink=nn.Parameter(torch.zeros(H))))
    nn.utils.parametrize.register_parametrization(layer.attend, "sink", Exponential())
    x = torch.randn(2, N, H * D)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)


def test_a_slice_of_a_call_needs_narrow() -> None:
    layer = rg.nn.MultiHeadAttention(H * D, H, attend=rg.Attention(score=Opposite(), mask=rg.window(2, 0))).eval()
    x = torch.randn(1, N, H * D)
    expected, cache, results = layer(x), layer.cache(), []
    for token in x.split(1, 1):
        results.append(layer(token, cache=cache))
    assert torch.allclose(torch.cat(results, 1), expected, atol=1e-5)

    @dataclass(eq=False)
    class Positional(Score):
        def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
            return query @ key.mT + torch.sin(at.j.to(query))

    layer.attend = rg.Attention(score=Positional(), mask=rg.window(2, 0))
    cache = layer.cache()
    for token in x[:, :3].split(1, 1):
        layer(token, cache=cache)
    with pytest.raises(NotImplementedError, match=r"define narrow\(part\)"):
        layer(x[:, 3:4], cache=cache)


def test_a_part_of_a_subclass_is_of_the_subclass() -> None:
    """Every built-in part, subclassed without changes, keeps its class and mode in a slice of a call."""
    part = CallSlice(slice(1, 2), slice(0, 1), slice(1, N))
    tables = torch.randn(5, H), torch.randn(8, H), torch.randn(H, 5, D), torch.randn(1, H, N, N)
    parts = [rg.Dot(torch.ones(H)), rg.Cosine(), rg.Additive(torch.ones(H, D)), rg.Bilinear(torch.ones(H, D, D))]
    parts += [rg.Modified(abs), rg.alibi(H), rg.relative(tables[0]), rg.t5(tables[1])]  # type: ignore[arg-type, list-item]
    parts += [rg.shaw(tables[2]), rg.dense_bias(tables[3]), rg.alibi(H) + rg.alibi(H)]  # type: ignore[list-item]
    for one in parts:
        kind = type("Subclass", (type(one),), {})
        subclassed = kind(**{each.name: getattr(one, each.name) for each in fields(one)}).eval()
        narrowed = subclassed.narrow(part)
        assert type(narrowed) is kind
        assert not narrowed.training
