"""Decays, the delta rule and states, by the kernels and by torch, against the recurrence token by token."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from regard.engines import native
from regard.linear.recurrence import run_recurrence, scan
from tests.linear.recurrence import draw_recurrence, recurrence

KINDS = [(decay, beta) for decay in (None, "head", "channel") for beta in (False, True)]
compiled = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "the library is there")


def results(function, inputs):
    """Return output, state and all gradients."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    output, state = function(*leaves)
    random = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.dtype) for x in (output, state)]
    total = (output * weights[0]).sum() + (state * weights[1]).sum()
    given = [x for x in leaves if x is not None]
    if not total.requires_grad:  # no tokens and no state
        return [output, state]
    return [output, state, *torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)]


def assert_equal(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        scale = 1 + (b.detach().abs().max().item() if b.numel() else 0)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * scale)


@settings(max_examples=25, deadline=None)
@given(
    B=st.integers(1, 2), N=st.integers(0, 100), D=st.integers(1, 40), E=st.integers(0, 40),
    heads=st.sampled_from([(1, 1, 1), (2, 2, 2), (2, 1, 1), (1, 1, 3), (2, 2, 4), (4, 2, 2)]),
    kind=st.sampled_from(KINDS), state=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@pytest.mark.parametrize("function", [pytest.param(run_recurrence, marks=compiled), scan], ids=["kernel", "torch"])
def test_any_shape_equals_the_recurrence(function, B, N, D, E, heads, kind, state, seed):
    resets = (N // 3, N // 2) if N and kind[0] else ()
    inputs = draw_recurrence(B, N, D, E, heads, *kind, state, seed, resets=resets)
    assert_equal(results(function, inputs), results(recurrence, inputs), 1e-12)


@compiled
@pytest.mark.parametrize(("decay", "beta"), [(None, False), ("head", True), ("channel", True)])
def test_sequences_longer_than_a_checkpoint_equal_the_recurrence(decay, beta):
    inputs = draw_recurrence(1, 550, 5, 3, (1, 1, 1), decay, beta, True)
    assert_equal(results(run_recurrence, inputs), results(recurrence, inputs), 1e-11)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "beta"), KINDS)
def test_the_kernel_is_as_near_to_float64_as_torch(dtype, decay, beta):
    inputs = draw_recurrence(1, 200, 24, 17, (1, 1, 2), decay, beta, True, dtype=dtype)
    exact = results(recurrence, [None if x is None else x.double() for x in inputs])
    for ours, theirs, best in zip(results(run_recurrence, inputs), results(scan, inputs), exact, strict=True):
        assert ours.dtype == theirs.dtype
        error, yardstick = ((x.double() - best).abs().max() for x in (ours, theirs))
        assert error <= 2 * yardstick + 4 * torch.finfo(ours.dtype).eps * best.abs().max()


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_slow_decays_keep_their_digits_over_many_tokens(decay):
    inputs = draw_recurrence(1, 3000, 4, 3, (1, 1, 1), decay, dtype=torch.float32)
    inputs[3] = inputs[3] * 1e-5
    exact = recurrence(*(None if x is None else x.double() for x in inputs))
    assert_equal(run_recurrence(*inputs), exact, 3e-5)


@pytest.mark.parametrize(("decay", "beta"), KINDS)
def test_derivatives_are_those_of_finite_differences(decay, beta):
    inputs = draw_recurrence(1, 3, 2, 2, (1, 1, 1), decay, beta, True)
    leaves = [x.requires_grad_() for x in inputs if x is not None]

    def call(*given):
        given = iter(given)
        return run_recurrence(*(None if x is None else next(given) for x in inputs))

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize(("decay", "beta"), KINDS)
def test_expanded_tensors_have_second_derivatives(decay, beta):
    inputs = draw_recurrence(2, 5, 3, 2, (2, 2, 2), decay, beta, True)
    inputs[1] = inputs[1][:1].expand(2, -1, -1, -1)
    leaves = [x.requires_grad_() for x in inputs if x is not None]

    def second(function):
        output, state = function(*inputs)
        loss = (output.sin() * output).sum() + state.square().sum()
        weights = torch.Generator().manual_seed(3)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(grads, leaves, [torch.randn(x.shape, generator=weights).to(x) for x in grads])

    assert_equal(second(run_recurrence), second(recurrence), 1e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("decay", "beta"), KINDS)
@pytest.mark.parametrize("function", [run_recurrence, scan], ids=["kernel", "torch"])
def test_nan_reaches_no_earlier_token_and_none_after_a_reset(function, decay, beta, bad):
    N, at, reset = 70, 40, 50
    clean = draw_recurrence(1, N, 3, 2, (1, 1, 1), decay, beta, resets=(reset,) if decay else ())
    visible = torch.ones(N, dtype=torch.bool)
    visible[at : reset if decay else N] = False
    for index, name in enumerate(("query", "key", "value", "decay", "beta")):
        if clean[index] is None or (name == "decay" and bad == math.inf):
            continue
        dirty = [None if x is None else x.clone() for x in clean]
        dirty[index][:, :, at] = bad
        results = []
        for inputs in (clean, dirty):
            leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
            output = function(*leaves)[0][:, :, visible]
            # The gradient of the query at a token depends on earlier keys and values only.
            results.append([output, torch.autograd.grad(output.sum(), leaves[0])[0][:, :, visible]])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("decay", "beta"), KINDS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("features", ["identity", "elu", rg.favor(6)], ids=repr)
def test_features_and_normalizer(features, normalize, decay, beta):
    q, k, v, g, b, _ = draw_recurrence(2, 40, 4, 3, (2, 1, 1), None if decay is None else decay, beta)
    attend = rg.LinearAttention(features, rg.causal(), normalize)
    if features == "elu":
        mapped = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    else:
        mapped = [q, k] if features == "identity" else [features.logs(x).exp() for x in (q, k)]
    if decay == "channel":
        g = g[..., :1].expand(-1, -1, -1, mapped[0].shape[-1])
    expected, _ = recurrence(*mapped, v, g, b, normalize=normalize)
    ours = attend(q, k, v, decay=g, beta=b)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 90), max_size=4), kind=st.sampled_from(KINDS), normalize=st.booleans(),
    features=st.sampled_from(["identity", "elu"]),
)  # fmt: skip
def test_a_sequence_can_be_split_anywhere(cuts, kind, normalize, features):
    q, k, v, g, b, _ = draw_recurrence(1, 90, 5, 3, (2, 2, 2), *kind)
    attend = rg.LinearAttention(features, rg.causal(), normalize)
    whole, final = attend(q, k, v, decay=g, beta=b, return_state=True)
    outputs, state = [], None
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 90], strict=True):
        part = [None if x is None else x[:, :, start:stop] for x in (q, k, v, g, b)]
        output, state = attend.step(*part[:3], state, decay=part[3], beta=part[4])
        outputs.append(output)
    # A sum that nearly cancels divides the rounding errors of the states.
    tolerance = 1e-6 if normalize and (features == "identity" or kind[1]) else 1e-11
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.sums, final.sums, rtol=0, atol=1e-11)


def test_single_steps_equal_the_chunked_form():
    q, k, v, g, b, _ = draw_recurrence(1, 80, 16, 16, (2, 2, 4), "head", True, dtype=torch.float32)
    attend, outputs, state = rg.LinearAttention.gated_deltanet(), [], None
    for t in range(80):
        now = slice(t, t + 1)
        output, state = attend.step(
            q[:, :, now], k[:, :, now], v[:, :, now], state, decay=g[:, :, now], beta=b[:, :, now]
        )
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), attend(q, k, v, decay=g, beta=b), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("decay", "beta"), KINDS)
def test_packed_documents_equal_separate_calls(decay, beta):
    lengths = [3, 40, 1, 36]
    q, k, v, g, b, _ = draw_recurrence(1, sum(lengths), 4, 3, (1, 1, 1), decay, beta)
    mask = rg.causal() & rg.documents(torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)))
    attend = rg.LinearAttention("identity", mask, normalize=False)
    alone = rg.LinearAttention("identity", rg.causal(), normalize=False)
    v[:, :, 3] = math.nan  # in the second document
    packed = attend(q, k, v, decay=g, beta=b)
    parts = [
        [None if x is None else part for part in (x if x is not None else q).split(lengths, 2)] for x in (q, k, v, g, b)
    ]
    for n, output in enumerate(packed.split(lengths, 2)):
        expected = alone(parts[0][n], parts[1][n], parts[2][n], decay=parts[3][n], beta=parts[4][n])
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_a_document_without_real_tokens_reads_no_other_document(decay, normalize):
    q, k, v, g, _, _ = draw_recurrence(1, 6, 4, 3, (1, 1, 1), decay)
    mask = rg.causal() & rg.documents([0, 0, 0, 1, 1, 1]) & rg.padding([2])
    k = k.requires_grad_()
    output, state = rg.LinearAttention("elu", mask, normalize)(q, k, v, decay=g, return_state=True)
    assert not output[:, :, 3:].any()
    assert not state.sums.any()
    assert not torch.autograd.grad(output[:, :, 3:].sum(), k)[0].any()


@pytest.mark.parametrize("features", ["elu", "identity"])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_neither_output_nor_state(features, causal):
    q, k, v, g, b, _ = draw_recurrence(2, 20, 4, 3, (2, 2, 2), "head", True)
    if not causal:
        g = b = None
    mask = rg.padding([20, 12])
    attend = rg.LinearAttention(features, mask & rg.causal() if causal else mask, normalize=False)
    alone = rg.LinearAttention(features, rg.causal() if causal else None, normalize=False)
    k, v = k.clone(), v.clone()
    k[1, :, 12:], v[1, :, 12:] = math.nan, math.inf
    output, state = attend(q, k, v, decay=g, beta=b, return_state=True)
    short = [None if x is None else x[1:, :, :12] for x in (q, k, v, g, b)]
    expected, final = alone(*short[:3], decay=short[3], beta=short[4], return_state=True)
    torch.testing.assert_close(output[1:, :, :12], expected)
    torch.testing.assert_close(state.sums[1:], final.sums)
    assert output.isfinite().all()


def test_unmasked_identity_features_are_products_without_a_softmax():
    q, k, v, *_ = draw_recurrence(1, 7, 4, 3, (4, 2, 2))
    weights = q @ k.repeat_interleave(2, 1).mT
    ours = rg.LinearAttention("identity", normalize=False)(q, k, v)
    torch.testing.assert_close(ours, weights @ v.repeat_interleave(2, 1))
    ours = rg.LinearAttention("identity")(q, k, v)
    torch.testing.assert_close(ours, weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(2, 1))


def test_named_constructors_are_the_published_recurrences():
    q, k, v, g, b, _ = draw_recurrence(1, 30, 4, 3, (2, 2, 2), "head", True)
    channel = draw_recurrence(1, 30, 4, 3, (2, 2, 2), "channel")[3]
    retention = torch.tensor([1 - 2.0**-5, 1 - 2.0**-6], dtype=torch.float64).log()[None, :, None].expand(1, 2, 30)
    cases = [
        (rg.LinearAttention.retnet(2), {}, {"decay": retention}),
        (rg.LinearAttention.gla(), {"decay": channel}, {"decay": channel}),
        (rg.LinearAttention.mamba2(), {"decay": g}, {"decay": g}),
        (rg.LinearAttention.deltanet(), {"beta": b}, {"beta": b}),
        (rg.LinearAttention.gated_deltanet(), {"decay": g, "beta": b}, {"decay": g, "beta": b}),
    ]
    for attend, given_, defined in cases:
        torch.testing.assert_close(attend(q, k, v, **given_), recurrence(q, k, v, **defined)[0], rtol=0, atol=1e-12)
    assert repr(rg.LinearAttention.gla()) == (
        "LinearAttention(features='identity', mask=causal(), normalize=False, needs=('decay',))"
    )


def test_tensors_of_two_and_three_axes_and_shared_gates():
    q, k, v, g, b, _ = draw_recurrence(1, 9, 4, 3, (2, 2, 2), "head", True)
    attend = rg.LinearAttention.gated_deltanet()
    whole = attend(q, k, v, decay=g, beta=b)
    torch.testing.assert_close(attend(q[0], k[0], v[0], decay=g[0], beta=b[0]), whole[0])
    torch.testing.assert_close(attend(*(x[0, 0] for x in (q, k, v)), decay=g[0, 0], beta=b[0, 0]), whole[0, 0])
    same = attend(q, k, v, decay=g[:, :1, :1], beta=b[..., :1])
    expected = attend(q, k, v, decay=g[:, :1, :1].expand_as(g), beta=b[..., :1].expand_as(b))
    torch.testing.assert_close(same, expected)
    two = [x.expand(2, *x.shape[1:]).clone().requires_grad_() for x in (k, v, g, b)]
    shared = attend(q, *two[:2], decay=two[2], beta=two[3])
    torch.testing.assert_close(shared, whole.expand(2, -1, -1, -1))
    gradient = torch.autograd.grad(shared.sum(), two[2])[0]
    torch.testing.assert_close(gradient[:1], gradient[1:])
    retnet = rg.LinearAttention.retnet(2)
    torch.testing.assert_close(retnet(q[0], k[0], v[0]), retnet(q, k, v)[0])


@compiled
@pytest.mark.parametrize("beta", [False, True])
def test_results_do_not_depend_on_threads_or_layout(beta):
    inputs = draw_recurrence(1, 130, 12, 70, (1, 1, 1), "head", beta, dtype=torch.float32)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None and x.dim() == 4 else x for x in inputs]
    before, outcomes = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outcomes += [results(run_recurrence, inputs), results(run_recurrence, apart)]
    finally:
        torch.set_num_threads(before)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


def test_transforms_and_compilation_use_torch():
    q, k, v, g, b, _ = draw_recurrence(3, 10, 4, 3, (2, 2, 2), "head", True)
    attend = rg.LinearAttention.gated_deltanet()

    def call(q, k, v, g, b):
        return attend(q, k, v, decay=g, beta=b)

    whole = call(q, k, v, g, b)
    torch.testing.assert_close(torch.func.vmap(call)(q, k, v, g, b), whole)
    gradient = torch.func.grad(lambda x: call(x, k, v, g, b).sum())(q)
    q = q.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(call(q, k, v, g, b).sum(), q)[0])


@compiled
@pytest.mark.skipif("avx512" not in native.build_info().get("compiled for", ""), reason="one instruction set only")
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_other_instruction_sets_equal_the_recurrence(isa):
    names = native.build_info()["compiled for"].split()
    if isa not in names:
        pytest.skip(f"the library was not compiled for {isa}")
    code = """
from regard.engines import native
from regard.linear.recurrence import run_recurrence
from tests.linear.recurrence import draw_recurrence, recurrence
from tests.linear.test_recurrence import KINDS, assert_equal, results
print(native.build_info()["instruction set"])
for kind in KINDS:
    inputs = draw_recurrence(1, 75, 19, 37, (1, 1, 2), *kind, True)
    assert_equal(results(run_recurrence, inputs), results(recurrence, inputs), 1e-12)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "REGARD_ISA": isa}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == isa


Q, K, V, G, BETA, _ = draw_recurrence(2, 5, 4, 3, (2, 2, 2), "head", True)
GATED = rg.LinearAttention.gated_deltanet()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: rg.LinearAttention(normalize=rg.causal()), TypeError, "normalize must be True or False"),
        (lambda: GATED(Q, K, V, decay=G), ValueError, "needs beta; pass beta= of shape"),
        (lambda: rg.LinearAttention()(Q, K, V, decay=G), ValueError, "mask must contain causal.* but is None"),
        (lambda: GATED(Q, K, V, decay=-G, beta=BETA), ValueError, "decay must be the logarithm .* but is up to"),
        (lambda: GATED(Q, K, V, decay=G[0], beta=BETA), ValueError, r"decay must be \(B, H, N\)"),
        (lambda: GATED(Q, K, V, decay=G[..., :3], beta=BETA), ValueError, r"decay must be \(2, 2, 5\), or 1 along"),
        (lambda: GATED(Q, K, V, decay=G, beta=BETA[..., None]), ValueError, "beta must be .* try beta.squeeze"),
        (lambda: GATED(Q, K, V, decay=G, beta=1.0), TypeError, "beta must be a tensor, but is float"),
        (lambda: GATED(Q[:, :, 1:], K, V, decay=G, beta=BETA), ValueError, "must have the same number of tokens"),
        (lambda: GATED(Q, K.repeat(1, 2, 1, 1)[:, :3], V, decay=G, beta=BETA), ValueError, "largest number of heads"),
        (lambda: rg.LinearAttention.retnet(3)(Q, K, V), ValueError, "decays of 3 heads, but this call has 2"),
        (lambda: rg.LinearAttention.retnet(2)(Q, K, V, decay=G), ValueError, "decay must be None, because"),
        (lambda: rg.LinearAttention("identity", rg.causal(), decay=(1.0,)), ValueError, "log-decays, at most 0"),
        (lambda: rg.LinearAttention(needs=("gate",)), ValueError, "needs may contain 'decay' and 'beta'"),
        (
            lambda: rg.LinearAttention("elu", rg.causal() & rg.documents([0, 1, 0, 1, 1]))(Q, K, V),
            ValueError, "tokens of a document must be adjacent",
        ),
        (
            lambda: GATED(Q, K, V, decay=G, beta=BETA, state=rg.LinearState(torch.zeros(2, 2, 4, 4))),
            ValueError, r"sums of shape \(2, 2, 4, 3\), but they are \(2, 2, 4, 4\)",
        ),
        (
            lambda: rg.LinearAttention(mask=rg.causal())(Q, K, V, state=rg.LinearState(torch.zeros(2, 2, 4, 4))),
            ValueError, "without a scale",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_expected_and_the_actual_value(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_fake_tensors_have_the_shapes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = torch.empty(3, 2, 4, 40, 8).unbind()
        output = GATED(q, k, v, decay=torch.empty(2, 4, 40), beta=torch.empty(2, 4, 40))
    assert output.shape == (2, 4, 40, 8)


@pytest.mark.parametrize("name", ["Mamba2", "GatedDeltaNet"])
def test_layers_run_under_autocast(name):
    layer = {"Mamba2": rg.nn.Mamba2(16, 4, d_state=6), "GatedDeltaNet": rg.nn.GatedDeltaNet(16, 2)}[name]
    x = torch.randn(1, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), rtol=0.1, atol=0.1)
