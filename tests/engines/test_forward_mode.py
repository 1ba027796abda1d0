"""Tangents: every description, engine and transform against a dense definition that shares no code with the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import assume, given, settings
from torch import Tensor

import regard as rg
from regard.engines import native
from regard.engines.select import ENGINES
from regard.positions.biases import Bias
from regard.scores import Score
from tests.strategies import Call, calls, lay_out

B, H, G, Q, K, D, E, R = 2, 4, 2, 7, 9, 5, 3, 2
OFFSET = K - Q
i, j = torch.arange(Q)[:, None], torch.arange(K)
DISTANCE = j - (i + OFFSET)
CLIPPED = DISTANCE.clamp(-R, R) + R
NEEDED = ("native", "tiled", "reference")
Tensors = tuple[Tensor, ...]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(seed: int = 0) -> Tensors:
    return normal(B, H, Q, D, seed=seed), normal(B, G, K, D, seed=seed + 1), normal(B, G, K, E, seed=seed + 2)


def heads(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // G, 1)


def products(q: Tensor, k: Tensor, scale: float | Tensor | None = None) -> Tensor:
    return (q * (1 / math.sqrt(D) if scale is None else scale)) @ heads(k).mT


class Case(NamedTuple):
    """A description: the shapes of its tensors, how to build it, its logits, and the rest of the definition."""

    shapes: tuple[tuple[int, ...], ...]
    describe: Callable[..., dict[str, Any]]
    logits: Callable[..., Tensor]
    allowed: Tensor | None = None
    sink: Callable[..., Tensor] | None = None
    values: Callable[..., Tensor] | None = None  # Shaw's (2R + 1, E)


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def per_head(x: Tensor) -> Tensor:
    return x[:, None, None]


BUCKETS = torch.where(DISTANCE > 0, 2, 0) + DISTANCE.abs().clamp(max=1)  # t5 with four: near and far, each side
SLOPES = 2.0 ** (-8 * torch.arange(1, H + 1, dtype=torch.float64) / H)  # of alibi, for a power of two of heads
SCATTERED = (i + 2 * j) % 3 != 0
CASES = {
    "dot": Case((), dict, products),
    "causal": Case((), lambda: {"mask": rg.causal()}, products, DISTANCE <= 0),
    "rows that see nothing": Case(
        (), lambda: {"mask": rg.causal() & rg.dense(i > 1)}, products, (DISTANCE <= 0) & (i > 1)
    ),
    "tiles of a mask": Case((), lambda: {"mask": SCATTERED}, products, SCATTERED),
    "temperature": Case((), lambda: {"temperature": 0.6}, lambda q, k: products(q, k) / 0.6),
    "a learned scale": Case((H,), lambda s: {"score": rg.Dot(scale=s)}, lambda q, k, s: products(q, k, per_head(s))),
    "softcap": Case(
        (), lambda: {"score": rg.Dot(softcap=1.5), "temperature": 0.7},
        lambda q, k: 1.5 * (products(q, k) / 1.5).tanh() / 0.7,
    ),
    "cosine": Case(
        (H,), lambda s: {"score": rg.Cosine(scale=s)}, lambda q, k, s: products(unit(q), unit(k), per_head(s))
    ),
    "bilinear": Case(
        (H, D, D), lambda m: {"score": rg.Bilinear(m), "mask": rg.causal()}, lambda q, k, m: products(q @ m, k, 1.0),
        DISTANCE <= 0,
    ),
    "additive": Case(
        (H, D), lambda w: {"score": rg.Additive(w)},
        lambda q, k, w: ((q[:, :, :, None] + heads(k)[:, :, None]).tanh() * w[:, None, None]).sum(-1),
    ),
    "a function with a tensor": Case(
        (H,), lambda s: {"score": lambda x, b, h, p, j: x.sin() - s[h] * (p - j).abs()},
        lambda q, k, s: products(q, k).sin() - per_head(s) * DISTANCE.abs(),
    ),
    "relative": Case(
        (2 * R + 1, H), lambda t: {"bias": rg.relative(t), "mask": rg.causal(), "temperature": 1.4},
        lambda q, k, t: (products(q, k) + t[CLIPPED].permute(2, 0, 1)) / 1.4, DISTANCE <= 0,
    ),
    "t5": Case(
        (4, H), lambda t: {"bias": rg.t5(t, max_distance=2)},
        lambda q, k, t: products(q, k) + t[BUCKETS].permute(2, 0, 1),
    ),
    "shaw": Case(
        (2 * R + 1, D), lambda a: {"bias": rg.shaw(a), "mask": SCATTERED},
        lambda q, k, a: products(q, k) + ((q / math.sqrt(D)) @ a.T).gather(-1, CLIPPED.expand(B, H, Q, K)), SCATTERED,
    ),
    "a dense bias and alibi": Case(
        (H, Q, 1), lambda x: {"bias": rg.dense_bias(x) + rg.alibi(H), "temperature": 0.8},
        lambda q, k, x: (products(q, k) + x - per_head(SLOPES) * DISTANCE.abs()) / 0.8,
    ),
    "sink": Case(
        (H,), lambda s: {"sink": s, "mask": rg.causal()}, lambda q, k, s: products(q, k), DISTANCE <= 0,
        sink=lambda s: per_head(s),
    ),
}  # fmt: skip
CASES = {name: case._replace(shapes=(case.shapes,) if case.shapes else ()) for name, case in CASES.items()}
CASES["shaw with values, and a sink"] = Case(
    ((2 * R + 1, D), (2 * R + 1, E), (1,)),
    lambda a, b, s: {"bias": rg.shaw(a, b), "sink": s},
    lambda q, k, a, b, s: products(q, k) + ((q / math.sqrt(D)) @ a.T).gather(-1, CLIPPED.expand(B, H, Q, K)),
    sink=lambda a, b, s: s[:, None, None],
    values=lambda a, b, s: b,
)


def tensors_of(case: Case, seed: int = 0) -> Tensors:
    return *qkv(seed), *(normal(*shape, seed=seed + 10 + n) for n, shape in enumerate(case.shapes))


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the definition."""
    logits = case.logits(q, k, *own).expand(B, H, Q, K)
    if case.allowed is not None:
        logits = logits.masked_fill(~case.allowed, -math.inf)
    sees = torch.ones(Q, 1, dtype=torch.bool) if case.allowed is None else case.allowed.expand(Q, K).any(-1, True)
    if case.sink is not None:
        logits = torch.cat([logits, case.sink(*own).expand(B, H, Q, 1)], -1)
        sees = torch.ones_like(sees)
    logits = logits.masked_fill(~sees, 0.0)
    top = logits.detach().amax(-1, keepdim=True)
    weights = (logits - top).exp() / (logits - top).exp().sum(
        -1, keepdim=True
    )  # torch's softmax fails in reverse over forward
    weights = weights[..., :K] * sees
    output = weights @ heads(v)
    if case.values is not None:
        output = output + torch.einsum("bhqk,qke->bhqe", weights, case.values(*own)[CLIPPED])
    lse = (logits - top).exp().sum(-1).log() + top.squeeze(-1)
    return output, lse.masked_fill(~sees[:, 0], -math.inf)


def ours(case: Case, engine: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
        return rg.attention(q, k, v, engine=engine, return_lse=True, **case.describe(*own))

    return call


def can(case: Case, engine: str | None, tensors: Tensors) -> bool:
    problem = rg.Attention(**case.describe(*tensors[3:])).problem(*tensors[:3], return_lse=True)
    return engine is None or not ENGINES[engine].why_not(problem)


def by_duals(call: Callable, tensors: Tensors, tangents: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return the results followed by their tangents."""
    with forward_ad.dual_level():
        pairs = zip(tensors, tangents, strict=True)
        results = [
            forward_ad.unpack_dual(x) for x in call(*(x if t is None else forward_ad.make_dual(x, t) for x, t in pairs))
        ]
        assert all(tangent is not None for _, tangent in results), "a tangent was dropped"
        return [x for x, _ in results] + [tangent for _, tangent in results]


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def finite(tangents: list[Tensor]) -> list[Tensor]:
    """Replace tangents of a log-sum-exp of -inf, which has none, by zeros."""
    return [torch.nan_to_num(x) for x in tangents]


@pytest.mark.parametrize("engine", [None, *NEEDED])
@pytest.mark.parametrize("name", CASES)
def test_every_description_has_the_tangents_of_the_definition(name: str, engine: str | None) -> None:
    case = CASES[name]
    tensors, tangents = tensors_of(case), tensors_of(case, seed=50)
    with forward_ad.dual_level():
        duals = tuple(forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True))
        if not can(case, engine, duals):
            pytest.skip(f"{engine} does not take it")
    expected, tangent = torch.func.jvp(lambda *x: dense(case, *x), tensors, tangents)
    actual = by_duals(ours(case, engine), tensors, tangents)
    close(actual[:2], expected)
    close(finite(actual[2:]), finite(list(tangent)))


@pytest.mark.parametrize("engine", NEEDED)
@pytest.mark.parametrize("name", ["causal", "shaw with values, and a sink", "cosine", "a dense bias and alibi", "sink"])
def test_any_subset_of_the_tensors_may_have_tangents(name: str, engine: str) -> None:
    case = CASES[name]
    tensors, tangents = tensors_of(case), tensors_of(case, seed=50)
    for n in range(len(tensors)):
        given = tuple(t if m == n else None for m, t in enumerate(tangents))
        zeros = tuple(t if m == n else torch.zeros_like(t) for m, t in enumerate(tangents))
        _, tangent = torch.func.jvp(lambda *x: dense(case, *x), tensors, zeros)
        with forward_ad.dual_level():
            duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in zip(tensors, given, strict=True)]
            output, lse = (forward_ad.unpack_dual(x).tangent for x in ours(case, engine)(*duals))
        assert output is not None, "a tangent was dropped"
        close([output], tangent[:1])
        close([torch.zeros_like(tangent[1]) if lse is None else lse], tangent[1:])


def test_a_tangent_is_the_limit_of_differences() -> None:
    case = CASES["shaw with values, and a sink"]
    tensors, tangents = tensors_of(case), tensors_of(case, seed=50)
    call, step = ours(case, "native" if not native.why_missing() else "tiled"), 1e-6
    ahead, behind = (call(*(x + s * t for x, t in zip(tensors, tangents, strict=True))) for s in (step, -step))
    actual = by_duals(call, tensors, tangents)[2:]
    close(actual, [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)], 1e-6)


@pytest.mark.parametrize("engine", ["native", "tiled"])
@pytest.mark.parametrize("learned", [False, True])
@given(call=calls())
@settings(max_examples=60, deadline=None)
def test_tangents_equal_those_of_the_reference(engine: str, learned: bool, call: Call) -> None:
    tensors = (call.query, call.key, call.value)
    tangents = (
        [torch.randn_like(x, generator=None) for x in tensors]
        if False
        else [normal(*x.shape, seed=n) for n, x in enumerate(tensors)]
    )
    outcomes = []
    with forward_ad.dual_level():
        own = {id(x): forward_ad.make_dual(x.detach(), normal(*x.shape, seed=9)) for x in call.learned}
        description = call.description
        if learned:  # the description's tensors have tangents too
            assume(call.learned and isinstance(description.get("score", rg.Dot()), Score))
            description = {name: substituted(part, own) for name, part in description.items()}
        duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
        problem = rg.Attention(**description).problem(*duals, return_lse=True)
        assume(not ENGINES[engine].why_not(problem))
        with torch.no_grad():
            for name in (engine, "reference"):
                results = rg.attention(*duals, engine=name, return_lse=True, **description)
                outcomes.append([x for pair in map(forward_ad.unpack_dual, results) for x in pair])
    (out, d_out, lse, d_lse), (out2, d_out2, lse2, d_lse2) = outcomes
    assert d_out is not None, "a tangent was dropped"
    close((out, d_out, lse), (out2, d_out2, lse2))
    close(finite([torch.zeros_like(lse) if d_lse is None else d_lse]), finite([d_lse2]))


def substituted(part: Any, tensors: dict[int, Tensor]) -> Any:
    from regard.engines.tiled import replace_leaves

    if isinstance(part, Tensor):
        return tensors.get(id(part), part)
    return replace_leaves(part, dict(tensors)) if isinstance(part, Bias | Score) else part


LONG = {
    "plain": {},
    "causal": {"mask": rg.causal(), "sink": 0.3},
    "tiles": {"mask": rg.where(lambda b, h, p, j: (p * j + h) % 5 != 0)},
    "a window, softcap and alibi": {"mask": rg.window(70, 300), "score": rg.Dot(softcap=9.0), "bias": rg.alibi(4)},
    "shaw": {"bias": rg.shaw(normal(9, 6, seed=1), normal(9, 5, seed=2)), "temperature": 0.5},
    "dropout": {"mask": rg.causal(), "dropout": 0.4},
}


@pytest.mark.parametrize("steep", [1.0, 40.0])
@pytest.mark.parametrize("name", LONG)
def test_many_steps_of_the_kernel_agree_with_the_reference(name: str, steep: float) -> None:
    """Keys are processed in several steps with the largest logits last, so that all earlier sums are rescaled."""
    shapes = (2, 4, 101, 6), (2, 2, 901, 6), (2, 2, 901, 5)
    tensors, tangents = (tuple(normal(*shape, seed=n + s) for n, shape in enumerate(shapes)) for s in (0, 9))
    tensors = (tensors[0], tensors[1] * torch.linspace(0.1, steep, 901, dtype=torch.float64)[:, None], tensors[2])
    results = []
    for engine in ("native", "reference"):
        torch.manual_seed(0)
        call = lambda *x, engine=engine: rg.attention(*x, engine=engine, return_lse=True, **LONG[name])  # noqa: E731
        results.append(by_duals(call, tensors, tangents))
    close(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("moved", [False, True])
def test_non_finite_numbers_reach_only_the_rows_that_see_them(which: int, moved: bool, dtype: torch.dtype) -> None:
    """A NaN in a tensor or its tangent does not change the tangents of rows that may not see it."""
    tensors, tangents = ([normal(1, 2, 70, 8, seed=n + s).to(dtype) for n in range(3)] for s in (0, 9))
    attend = rg.Attention(mask=rg.causal())
    call = lambda *x: attend(*x, engine="native", return_lse=True)  # noqa: E731
    clean = by_duals(call, tuple(tensors), tuple(tangents))
    (tangents if moved else tensors)[which][0, :, 40, 3] = math.nan
    actual = by_duals(call, tuple(tensors), tuple(tangents))
    rows = torch.zeros(70, dtype=torch.bool)
    rows[40 : 41 if which == 0 else 70] = True
    for n, (a, b) in enumerate(zip(actual, clean, strict=True)):
        torch.testing.assert_close(a[:, :, ~rows], b[:, :, ~rows])
        of_rows = a[:, :, rows]
        if n == 2 or not moved:
            assert of_rows.isnan().all()
        elif n < 2:
            torch.testing.assert_close(of_rows, b[:, :, rows])


@pytest.mark.parametrize("layout", ["heads last", "negated", "apart", "expanded"])
def test_tangents_of_any_strides(layout: str) -> None:
    tensors, tangents = qkv(), tuple(lay_out(x, layout) for x in qkv(50))
    call = ours(CASES["causal"], "native")
    close(by_duals(call, tensors, tangents), by_duals(call, tensors, tuple(x.contiguous() for x in tangents)), 1e-14)
    negated = tuple((1j * x).conj().imag for x in qkv(50))  # a pending negation
    close(by_duals(call, tensors, negated), by_duals(call, tensors, tuple(-x for x in qkv(50))), 1e-14)


@pytest.mark.parametrize("engine", ["native", "tiled"])
@pytest.mark.parametrize(
    "description", [{}, {"mask": rg.causal()}, {"bias": rg.shaw(normal(5, D, seed=1), normal(5, E, seed=2))}]
)
def test_dropout_drops_the_same_weights_from_the_tangent(engine: str, description: dict) -> None:
    tensors, tangents, results = qkv(), qkv(50), []
    for name in (engine, "reference"):
        torch.manual_seed(0)
        call = lambda *x, name=name: rg.attention(*x, engine=name, return_lse=True, dropout=0.3, **description)  # noqa: E731
        results.append(by_duals(call, tensors, tangents))
    close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["native", "tiled"])
def test_tangents_in_half_precision(engine: str, dtype: torch.dtype) -> None:
    case = CASES["causal"]
    tensors, tangents = (tuple(x.to(dtype) for x in qkv(seed)) for seed in (0, 50))
    actual = by_duals(ours(case, engine), tensors, tangents)
    wide = tuple(tuple(x.double() for x in some) for some in (tensors, tangents))
    results, tangent = torch.func.jvp(lambda *x: dense(case, *x), *wide)
    tolerance = 2e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    close([x.double() for x in actual], [*results, *tangent], tolerance)
    assert [x.dtype for x in actual] == 2 * [dtype, torch.float32]


@pytest.mark.parametrize("axes", [2, 3])
def test_tensors_of_fewer_axes(axes: int) -> None:
    tensors, tangents = (tuple(normal(*(2, 6, 4)[3 - axes :], seed=n + s) for n in range(3)) for s in (0, 9))
    plain = lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v  # noqa: E731
    _, tangent = torch.func.jvp(plain, tensors, tangents)
    close(by_duals(lambda *x: (rg.attention(*x),), tensors, tangents)[1:], [tangent])


def test_weights_have_tangents_and_other_inspections_raise() -> None:
    q, k, _ = qkv()
    t, _, _ = qkv(50)
    attend = rg.Attention(mask=rg.causal())
    plain = lambda q: products(q, k).masked_fill(DISTANCE > 0, -math.inf).softmax(-1)  # noqa: E731
    expected = torch.func.jvp(plain, (q,), (t,))[1]
    close([torch.func.jvp(lambda q: attend.weights(q, k), (q,), (t,))[1]], [expected])
    close(by_duals(lambda q: (attend.weights(q, k),), (q,), (t,))[1:], [expected])
    close(by_duals(lambda q: (attend.weights(q, k, rows=[2, 3]),), (q,), (t,))[1:], [expected[:, :, 2:4]])
    for refused in (attend.map, attend.statistics):
        with pytest.raises(NotImplementedError, match="not differentiable"):
            by_duals(lambda q, refused=refused: refused(q, k), (q,), (t,))
        with pytest.raises(NotImplementedError, match="not differentiable"):
            torch.func.jvp(lambda q, refused=refused: refused(q, k), (q,), (t,))


@pytest.mark.parametrize("features", ["elu", rg.favor(6)])
@pytest.mark.parametrize("mask", [None, rg.causal()])
def test_linear_attention_has_tangents(features: Any, mask: Any) -> None:
    attend = rg.LinearAttention(features, mask=mask)
    tensors, tangents = (tuple(normal(1, 2, 6, 4, seed=n + s) for n in range(3)) for s in (0, 9))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if features == "elu":
            a, b = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        else:
            a, b = features.logs(q).exp(), features.logs(k).exp()
        weights = a @ b.mT
        weights = weights if mask is None else weights.tril()
        return weights / weights.sum(-1, keepdim=True) @ v

    expected = torch.func.jvp(plain, tensors, tangents)
    close(by_duals(lambda *x: (attend(*x),), tensors, tangents), expected)
    close(torch.func.jvp(attend, tensors, tangents), expected)
    by, moved = normal(1, 2, 6, 4, seed=20), normal(1, 2, 6, 4, seed=21)
    results = []
    for call in (plain, attend):
        leaves = [x.clone().requires_grad_() for x in tensors]
        output = call(*leaves)
        with forward_ad.dual_level():
            grads = torch.autograd.grad(output, leaves, forward_ad.make_dual(by, moved))
            results.append([x for pair in map(forward_ad.unpack_dual, grads) for x in pair])
    close(*results)


def test_a_compiled_jvp_keeps_its_tangent() -> None:
    q, k, v = qkv()
    t, _, _ = qkv(50)
    call = lambda q, t: torch.func.jvp(lambda q: rg.attention(q, k, v, mask=rg.causal()), (q,), (t,))  # noqa: E731
    torch._dynamo.reset()
    close(torch.compile(call, backend="aot_eager")(q, t), call(q, t))


@pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap of grad"])
def test_long_sequences_stay_with_the_engines_that_need_no_dense_weights(transform: str) -> None:
    chosen = []
    attend = rg.Attention(mask=rg.causal())

    def call(q: Tensor) -> Tensor:
        chosen.append(attend.explain(q, q, q).engine)
        return q

    q = torch.zeros(1, 8, 4096, 8)
    if transform == "jvp":
        torch.func.jvp(call, (q,), (q,))
    elif transform == "grad":
        torch.func.grad(lambda q: call(q).sum())(q)
    else:
        torch.func.vmap(torch.func.grad(lambda q: call(q).sum()))(q[None])
    assert chosen == ["native"]
