"""Normalisations other than softmax: definitions, derivatives, masks, inspection, and what they refuse."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.distributed.sharded_attention import sharded_attention
from regard.view.weight_steps import weight_steps
from tests.engines.calls import INF, NAN, normal, tensors

KINDS: dict[str, Any] = {
    "sigmoid": lambda: rg.Sigmoid(-0.5),
    "sigmoid with a bias per head": lambda: rg.Sigmoid(nn.Parameter(normal(2, seed=9))),
    "relu": lambda: rg.ReLU(),
    "relu squared": lambda: rg.ReLU(power=2),
    "relu to the 2.5": lambda: rg.ReLU(power=2.5),
    "entmax": lambda: rg.Entmax(),
    "sparsemax": lambda: rg.Entmax(alpha=2),
    "entmax 1.2": lambda: rg.Entmax(alpha=1.2),
    "entmax 2.5": lambda: rg.Entmax(alpha=2.5),
}
IN_KERNELS = ("sigmoid", "sigmoid with a bias per head", "relu", "relu squared")
COMPUTED = [(kind, engine) for kind in KINDS for engine in ("reference", "tiled")]
COMPUTED += [(kind, "native") for kind in IN_KERNELS]
MASKS: dict[str, rg.Mask | None] = {
    "no mask": None,
    "causal": rg.causal(),
    "window and padding": rg.window(3, 1) & rg.padding([9, 0]),
    "columns": rg.where(lambda b, h, p, j: (p + j + h) % 3 != 0),
}


def engines_of(kind: str) -> list[str]:
    return [engine for computed, engine in COMPUTED if computed == kind]


def plain_weights(kind: str, logits: Tensor, bias: Tensor | None = None) -> Tensor:
    """The weights of rows of finite logits, from the definition, row by row."""
    if kind.startswith("sigmoid"):
        shift = -0.5 if bias is None else bias.detach().reshape(-1, 1, 1)
        return 1 / (1 + torch.exp(-(logits + shift)))
    if kind.startswith("relu"):
        power = {"relu": 1, "relu squared": 2, "relu to the 2.5": 2.5}[kind]
        return torch.where(logits > 0, logits.abs() ** power, 0.0)
    alpha = {"entmax": 1.5, "sparsemax": 2.0, "entmax 1.2": 1.2, "entmax 2.5": 2.5}[kind]
    x = (alpha - 1) * logits
    low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(200):  # bisection of the sum of weights
        middle = (low + high) / 2
        total = (x - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(-1, keepdim=True)
        low, high = torch.where(total > 1, middle, low), torch.where(total > 1, high, middle)
    return (x - low).clamp(min=0).pow(1 / (alpha - 1))


def plain_attention(kind: str, inputs: list[Tensor], mask: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and output from the definition; hidden keys are left out of their rows."""
    query, key, value = inputs
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    weights = torch.zeros_like(logits)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
        if (seen := mask[b, h, i]).any():
            own = None if bias is None else bias[h]
            weights[b, h, i, seen] = plain_weights(kind, logits[b, h, i, seen], own).reshape(-1)
    return weights, weights @ value


def tensor_of(mask: rg.Mask | None, shape: tuple[int, ...]) -> Tensor:
    _, H, Q, K = shape
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    p, j = torch.arange(Q)[:, None] + K - Q, torch.arange(K)
    if mask is MASKS["causal"]:
        return (j <= p).expand(shape)
    if mask is MASKS["window and padding"]:
        lengths = torch.tensor([9, 0])[:, None, None, None]
        return ((p - j <= 3) & (j - p <= 1) & (j < lengths)).expand(shape)
    return ((p + j + torch.arange(H)[:, None, None]) % 3 != 0).expand(shape)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_weights_map_and_statistics_equal_the_definition(kind: str, mask: str) -> None:
    shape = (2, 2, 11, 13)
    inputs = [normal(2, 2, 11, 4, seed=1), normal(2, 2, 13, 4, seed=2), normal(2, 2, 13, 3, seed=3)]
    normalization = KINDS[kind]()
    attend = rg.Attention(mask=MASKS[mask], normalization=normalization)
    visible = tensor_of(MASKS[mask], shape)
    bias = normalization.bias if kind == "sigmoid with a bias per head" else None
    weights, output = plain_attention(kind, inputs, visible, bias)
    close = {"rtol": 1e-10, "atol": 1e-12}
    with torch.no_grad():
        for engine in engines_of(kind):
            torch.testing.assert_close(attend(*inputs, engine=engine), output, **close)
        torch.testing.assert_close(attend(*inputs), output, **close)
        torch.testing.assert_close(attend.weights(*inputs[:2]), weights, **close)
        part = attend.weights(*inputs[:2], heads=[1], rows=[2, 5], columns=slice(3, 9))
        torch.testing.assert_close(part, weights[:, 1:, [2, 5], 3:9], **close)
        pooled = nn.functional.adaptive_avg_pool2d(weights, (4, 5))
        torch.testing.assert_close(attend.map(*inputs[:2], size=(4, 5)), pooled, **close)
        rows = attend.statistics(*inputs[:2], top=3, mass_on=[0, 12])
    torch.testing.assert_close(rows.mass, weights[..., 0] + weights[..., 12], **close)
    torch.testing.assert_close(rows.top_weights, weights.topk(3).values, **close)
    shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(rows.entropy, entropy, **close)
    logits = (inputs[0] @ inputs[1].mT / 2).masked_fill(~visible, -INF)
    torch.testing.assert_close(rows.max_logit, logits.amax(-1), **close)
    torch.testing.assert_close(rows.lse, torch.logsumexp(logits, -1), **close)


@pytest.mark.parametrize(("kind", "engine"), COMPUTED)
def test_first_second_and_forward_derivatives(kind: str, engine: str) -> None:
    inputs = tensors((1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2), seed=5)
    attend = rg.Attention(mask=rg.causal(), bias=rg.alibi(2), normalization=KINDS[kind]())
    own = list(attend.parameters())

    def call(*given: Tensor) -> Tensor:
        description = attend.replace(normalization=rg.Sigmoid(given[3])) if own else attend
        return description(*given[:3], engine=engine)

    given = (*inputs, *(x.detach().requires_grad_() for x in own))
    assert torch.autograd.gradcheck(call, given, check_forward_ad=engine == "reference", atol=1e-6, rtol=1e-4)
    assert torch.autograd.gradgradcheck(call, given, atol=1e-5, rtol=1e-4)
    direction = tuple(normal(*x.shape, seed=20 + n) for n, x in enumerate(inputs))
    _, tangent = torch.func.jvp(lambda *x: attend(*x, engine=engine), tuple(x.detach() for x in inputs), direction)
    step = 1e-6
    ahead, behind = (
        attend(*(x.detach() + sign * step * d for x, d in zip(inputs, direction, strict=True)), engine="reference")
        for sign in (1, -1)
    )
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "engine"), COMPUTED)
def test_a_masked_key_reaches_nothing_and_empty_rows_give_zero(kind: str, engine: str) -> None:
    clean = [normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 4, seed=2), normal(1, 2, 5, 4, seed=3)]
    planted = [x.clone() for x in clean]
    planted[1][:, :, 3], planted[2][:, :, 4] = NAN, INF
    attend = rg.Attention(mask=rg.padding([3]) & rg.window(4, -1 + 1), offset=-1, normalization=KINDS[kind]())
    results = []
    for inputs in (clean, planted):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attend(*leaves, engine=engine)
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        results.append([output.detach(), *gradients])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert not results[0][0][:, :, 0].any()  # the first query is before all keys
    rest = rg.Attention(normalization=KINDS[kind](), mask=rg.causal())(*planted, engine=engine)
    assert rest[:, :, 3:].isnan().all()
    assert rest[:, :, :3].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_zeroes_weights_and_scales_the_others(kind: str) -> None:
    inputs = [normal(1, 2, 40, 4, seed=n) for n in (1, 2)]
    value = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)
    attend = rg.Attention(normalization=KINDS[kind](), dropout=0.4)
    weights = attend.weights(*inputs).detach()
    outputs = []
    for engine in engines_of(kind):
        torch.manual_seed(3)
        outputs.append(attend(*inputs, value, engine=engine).detach())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-12, atol=1e-12)
    kept = outputs[0] != 0
    torch.testing.assert_close(outputs[0][kept], weights[kept] / 0.6, rtol=1e-6, atol=1e-12)
    assert 0.5 < kept[weights > 0].double().mean() < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_half_precision_stay_close_to_float64(kind: str) -> None:
    inputs = [normal(2, 2, 65, 16, seed=n) for n in (1, 2, 3)]
    attend = rg.Attention(mask=rg.causal(), normalization=KINDS[kind]())
    exact = attend(*inputs, engine="reference").detach()
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        rounded = [x.to(dtype) for x in inputs]
        for engine in (*engines_of(kind), None):
            output = attend(*rounded, engine=engine)
            assert output.dtype == dtype
            assert (output.double() - exact).abs().max() <= allowed * exact.abs().max()


@pytest.mark.parametrize("engine", ["reference", "tiled", "native"])
def test_large_logits_do_not_overflow(engine: str) -> None:
    inputs = [1e3 * normal(1, 1, 6, 4, seed=1), 1e3 * normal(1, 1, 6, 4, seed=2), normal(1, 1, 6, 4, seed=3)]
    kinds = ("sigmoid", "entmax", "sparsemax", "entmax 1.2", "entmax 2.5")
    for kind in (kind for kind in kinds if (kind, engine) in COMPUTED):
        output = rg.attention(*(x.float() for x in inputs), normalization=KINDS[kind](), engine=engine)
        exact, _ = plain_attention(kind, inputs, torch.ones(1, 1, 6, 6, dtype=torch.bool))
        torch.testing.assert_close(output.double(), exact @ inputs[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", IN_KERNELS)
def test_kernels_of_long_rows_and_few_queries_are_close_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    allowed = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for queries, keys, mask in ((1, 700, None), (3, 129, rg.window(40, 0)), (257, 513, rg.causal()), (70, 300, None)):
        inputs = [normal(2, 4, queries, 16, seed=1), *(normal(2, 2, keys, 16, seed=n) for n in (2, 3))]
        normalization = rg.Sigmoid(normal(4, seed=9)) if "head" in kind else KINDS[kind]()
        attend = rg.Attention(mask=mask, normalization=normalization)
        results = []
        for engine, of in (("reference", torch.float64), ("native", dtype)):
            leaves = [x.to(dtype).to(of).requires_grad_() for x in inputs]
            output = attend(*leaves, engine=engine)
            results.append((output, *torch.autograd.grad(output.double().square().sum(), leaves)))
        smooth = (
            slice(None, None, 3) if kind == "relu" else slice(None)
        )  # rounding may change the slope of a logit near 0
        for exact, ours in zip(*(result[smooth] for result in results), strict=True):
            assert (ours.double() - exact).abs().max() <= allowed * exact.abs().max()


def test_a_fast_engine_computes_sigmoid_and_relu_by_default() -> None:
    inputs = [torch.zeros(1, 2, 64, 16)] * 3
    for kind in IN_KERNELS[::2]:
        attend = rg.Attention(mask=rg.causal(), normalization=KINDS[kind]())
        assert attend.explain(*inputs).engine == "native"
        torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(*inputs), attend(*inputs))


def test_temperature_scales_relu_as_documented() -> None:
    inputs = [normal(1, 2, 5, 4, seed=n) for n in (1, 2, 3)]
    for power in (1, 2, 2.5):
        whole = rg.attention(*inputs, normalization=rg.ReLU(power))
        divided = rg.attention(*inputs, normalization=rg.ReLU(power), temperature=7 ** (1 / power))
        torch.testing.assert_close(divided, whole / 7)


def test_outputs_over_shards_of_the_keys_add_up_without_a_sum_over_keys() -> None:
    query, key, value = (normal(1, 2, 9, 4, seed=n) for n in (1, 2, 3))
    for kind in ("sigmoid", "relu"):
        attend = rg.Attention(normalization=KINDS[kind]())
        shards = [attend(query, key[:, :, part], value[:, :, part]) for part in (slice(0, 4), slice(4, 9))]
        torch.testing.assert_close(sum(shards), attend(query, key, value))


def test_a_bias_is_a_parameter_of_the_module_that_holds_it() -> None:
    bias = nn.Parameter(torch.zeros(4))
    layer = rg.nn.MultiHeadAttention(16, 4, attend=rg.Attention(normalization=rg.Sigmoid(bias)))
    assert any(p is bias for p in layer.parameters())
    assert "attend.normalization.bias" in layer.state_dict()
    x = torch.randn(2, 5, 16)
    layer(x).square().mean().backward()
    assert bias.grad is not None
    assert bias.grad.abs().sum() > 0
    before = layer(x)
    with torch.no_grad():
        bias.data.fill_(3.0)
    assert not torch.allclose(layer(x), before)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), layer(x))
    assert twin.attend.normalization.bias is not bias
    assert layer.double().attend.normalization.bias.dtype == torch.float64


def test_printing_pickling_and_replacing() -> None:
    attend = rg.Attention(mask=rg.causal(), normalization=rg.Entmax(alpha=2))
    assert repr(attend) == "Attention(mask=causal(), normalization=Entmax(alpha=2))"
    assert repr(rg.Attention(normalization=rg.Softmax())) == "Attention()"
    assert repr(rg.Sigmoid(torch.zeros(3))) == "Sigmoid((3,))"
    assert repr(attend.replace(dropout=0.1)) == "Attention(mask=causal(), dropout=0.1, normalization=Entmax(alpha=2))"
    assert repr(pickle.loads(pickle.dumps(attend))) == repr(attend)
    x = torch.zeros(1, 1, 4, 8)
    report = attend.explain(x, x, x)
    assert "softmax, not Entmax(alpha=2)" in str(report)


def test_a_slice_of_a_call_keeps_the_normalisation() -> None:
    bias = normal(4, seed=7)
    inputs = [normal(1, 4, 6, 4, seed=n) for n in (1, 2, 3)]
    attend = rg.Attention(normalization=rg.Sigmoid(bias))
    frame = attend.problem(*inputs).frame
    part = rg.geometry.CallSlice(slice(1, 3), slice(2, 6), slice(0, 5))
    query, key, value = inputs[0][:, 1:3, 2:6], inputs[1][:, 1:3, :5], inputs[2][:, 1:3, :5]
    ours = attend.narrow(frame, part)(query, key, value)
    theirs = rg.Attention(normalization=rg.Sigmoid(bias[1:3]))(query, key, value)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


X = torch.zeros(1, 2, 4, 8)
REFUSED = {
    "a sink": (lambda: rg.Attention(sink=0.0, normalization=rg.ReLU()), ValueError, "sink takes weight in a softmax"),
    "a log-sum-exp": (
        lambda: rg.attention(X, X, X, normalization=rg.Entmax(), return_lse=True), ValueError, "log-sum-exp belongs to",
    ),
    "a class": (lambda: rg.Attention(normalization=rg.Entmax), TypeError, "create an instance with Entmax"),
    "a name": (lambda: rg.Attention(normalization="sigmoid"), TypeError, "Softmax.*but is str"),
    "no bias": (lambda: rg.Sigmoid(None), TypeError, "bias must be a number.*log"),
    "an integer bias": (lambda: rg.Sigmoid(torch.zeros(2).long()), TypeError, "floating-point"),
    "an infinite bias": (lambda: rg.Sigmoid(INF), ValueError, "finite"),
    "a bias for other heads": (
        lambda: rg.attention(X, X, X, normalization=rg.Sigmoid(torch.zeros(3))), ValueError, "each of the 2 heads",
    ),
    "alpha 1": (lambda: rg.Entmax(1), ValueError, "above 1.*Softmax"),
    "alpha nan": (lambda: rg.Entmax(NAN), ValueError, "above 1"),
    "alpha as a tensor": (lambda: rg.Entmax(torch.tensor(1.5)), TypeError, "number above 1"),
    "power below 1": (lambda: rg.ReLU(0.5), ValueError, "at least 1"),
    "power True": (lambda: rg.ReLU(True), TypeError, "number"),
    "sdpa": (lambda: rg.attention(X, X, X, normalization=rg.ReLU(), engine="sdpa"), rg.CannotCompute, "softmax"),
    "native": (
        lambda: rg.attention(X, X, X, normalization=rg.ReLU(1.5), engine="native"), rg.CannotCompute,
        r"do not compute ReLU\(power=1.5\)",
    ),
    "triton": (
        lambda: rg.attention(X, X, X, normalization=rg.ReLU(), engine="triton"), rg.CannotCompute,
        r"do not compute ReLU\(power=1.0\)",
    ),
    "the largest logit": (
        lambda: rg.attention(X, X, X, normalization=rg.ReLU(), return_max=True), ValueError, "for a softmax",
    ),
    "a shared sequence": (
        lambda: sharded_attention(
            None, rg.Attention(normalization=rg.ReLU()), X, X, X, layout="contiguous", method=None, engine=None,
            return_lse=False,
        ), NotImplementedError, "only a softmax has",
    ),
    "flex": (lambda: rg.attention(X, X, X, normalization=rg.ReLU(), engine="flex"), rg.CannotCompute, "softmax"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_an_error(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_equals_single_calls(kind: str) -> None:
    inputs = [normal(3, 1, 2, 5, 4, seed=n) for n in (1, 2, 3)]
    attend = rg.Attention(mask=rg.causal(), normalization=KINDS[kind]())
    with torch.no_grad():
        together = torch.func.vmap(attend)(*inputs)
        apart = torch.stack([attend(*(x[n] for x in inputs)) for n in range(3)])
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("kind", ["sigmoid with a bias per head", "relu squared", "sparsemax"])
def test_compiled_calls_equal_eager_ones(kind: str) -> None:
    inputs = [normal(1, 2, 5, 4, seed=n, dtype=torch.float32) for n in (1, 2, 3)]
    attend = rg.Attention(mask=rg.causal(), normalization=KINDS[kind]().float() if "head" in kind else KINDS[kind]())
    with torch.no_grad():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)
        torch.testing.assert_close(compiled, attend(*inputs))


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 2.5])
def test_thresholds_are_found_for_rows_on_which_the_search_is_slow(alpha: float) -> None:
    steps = torch.arange(400, dtype=torch.float64)
    rows = torch.stack([-(0.5**steps), -(1 - 0.9**steps), -steps, torch.zeros(400), -1e-9 * steps, -1e9 * steps])
    for dtype, allowed in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        weights = rg.Entmax(alpha).weights(rows.to(dtype), None)
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(rows), dtype=dtype), rtol=allowed, atol=allowed)
        one = rg.Entmax(alpha).weights(torch.tensor([[1e4, -INF, 0.0]], dtype=dtype), None)
        assert one.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", ["sigmoid", "relu", "sparsemax"])
def test_the_viewer_captures_and_explains_the_weights(kind: str) -> None:
    torch.manual_seed(0)
    layer = rg.nn.MultiHeadAttention(8, 2, attend=rg.Attention(mask=rg.causal(), normalization=KINDS[kind]()))
    with rg.view.capture(layer) as record:
        layer(torch.randn(1, 6, 8))
    captured = record.attentions[0]
    weights = captured.weights()  # (heads, Q, K)
    logits = torch.full((6,), -INF, dtype=torch.float64)
    for key in range(4):
        steps = weight_steps(captured, 1, 3, key)
        logits[key] = steps.logit
        assert steps.weight == pytest.approx(float(weights[1, 3, key]), abs=1e-6)
        assert steps.normalization == repr(layer.attend.normalization)
        assert steps.normalization in str(steps)
    expected = plain_weights(kind, logits[:4])
    torch.testing.assert_close(weights[1, 3, :4].double(), expected, rtol=1e-4, atol=1e-6)
