"""Linear attention against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard.linear.logs
from regard.linear import Favor, LinearAttention, LinearState, favor
from regard.linear.features import _directions
from regard.masks import causal, padding, window
from tests.linear.naive import FEATURES, MASKS, draw, kernel, naive


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(("Q", "K"), [(70, 70), (130, 130), (71, 200), (1, 70), (90, 70)])
def test_it_is_its_definition_masked_or_not_for_grouped_heads_and_all_alignments(features, mask, Q, K):
    q, k, v = draw(2, 4, 2, Q, K, 5, 3)
    out = LinearAttention(features, mask)(q, k, v)
    torch.testing.assert_close(out, naive(features, mask, q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 449])
def test_lengths_around_the_chunks_make_no_difference(features, length):
    q, k, v = draw(1, 2, 1, length, length, 4, 3)
    out = LinearAttention(features, causal())(q, k, v)
    torch.testing.assert_close(out, naive(features, causal(), q, k, v), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3),
    G=st.integers(1, 3),
    R=st.integers(1, 3),
    Q=st.integers(0, 140),
    K=st.integers(0, 140),
    D=st.integers(1, 9),
    E=st.integers(0, 5),
    features=st.sampled_from(FEATURES),
    masked=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_definition(B, G, R, Q, K, D, E, features, masked, seed):
    q, k, v = draw(B, G * R, G, Q, K, D, E, seed=seed)
    lengths = torch.randint(0, K + 1, (B,), generator=torch.Generator().manual_seed(seed))
    parts = [part for part, chosen in zip((causal(), padding(lengths)), masked, strict=True) if chosen]
    mask = None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]
    out = LinearAttention(features, mask)(q, k, v)
    torch.testing.assert_close(out, naive(features, mask, q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_gradients_are_those_of_the_definition(features, mask):
    q, k, v = draw(2, 4, 2, 100, 133, 5, 3, grad=True)
    towards = torch.randn(2, 4, 100, 3, dtype=torch.float64)
    fast = torch.autograd.grad((LinearAttention(features, mask)(q, k, v) * towards).sum(), (q, k, v))
    slow = torch.autograd.grad((naive(features, mask, q, k, v) * towards).sum(), (q, k, v))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("features", ["elu", favor(3)], ids=repr)
@pytest.mark.parametrize("mask", [None, causal(), causal() & padding([4, 0])], ids=repr)
@pytest.mark.parametrize("Q", [3, 5])  # the kernel computes causal calls with as many queries as keys
def test_first_and_second_gradients_are_those_of_finite_differences(features, mask, Q):
    inputs = draw(2, 2, 1, Q, 5, 2, 2, grad=True)
    assert torch.autograd.gradcheck(LinearAttention(features, mask), inputs)
    assert torch.autograd.gradgradcheck(LinearAttention(features, mask), inputs)


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_float32_at_least_and_the_result_is_rounded_once(features, mask, dtype):
    q, k, v = draw(1, 2, 2, 300, 300, 16, 8, dtype=dtype)
    out, exact = LinearAttention(features, mask)(q, k, v), naive(features, mask, q, k, v)
    assert out.dtype == dtype
    atol = 2e-6 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
def test_tensors_of_two_and_three_axes_come_back_with_their_own_shape(mask):
    attend, (q, k, v) = LinearAttention(mask=mask), draw(1, 4, 2, 9, 9, 5, 3)
    whole = attend(q, k, v)
    assert torch.equal(attend(q[0], k[0], v[0]), whole[0])
    torch.testing.assert_close(attend(q[0, 0], k[0, 0], v[0, 0]), whole[0, 0])


@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_decoding_token_by_token_equals_the_causal_call(features):
    attend, (q, k, v) = LinearAttention(features, causal()), draw(2, 4, 2, 80, 80, 5, 3)
    outputs, state = [], None
    for t in range(80):
        out, state = attend.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 2), attend(q, k, v), rtol=0, atol=1e-13)
    assert isinstance(state, LinearState)
    features = 5 if features == "elu" else features.count
    assert state.scale.shape == (2, 2, features, 1)
    assert state.sums.shape == (2, 2, features, 4)


@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_a_prompt_and_the_tokens_after_it_equal_the_causal_call(features):
    attend, (q, k, v) = LinearAttention(features, causal()), draw(1, 2, 2, 300, 300, 5, 3, dtype=torch.float32)
    outputs, state, start = [], None, 0
    for stop in (150, 150, 151, 153, 300):
        out, state = attend.step(*(x[:, :, start:stop] for x in (q, k, v)), state)
        outputs.append(out)
        start = stop
    torch.testing.assert_close(torch.cat(outputs, 2), attend(q, k, v), rtol=0, atol=2e-6)


def test_gradients_flow_through_the_steps():
    attend, inputs = LinearAttention("elu", causal()), draw(1, 1, 1, 6, 6, 3, 2, grad=True)
    total, state = 0, None
    for t in range(6):
        out, state = attend.step(*(x[:, :, t : t + 1] for x in inputs), state)
        total = total + out.square().sum()
    fast = torch.autograd.grad(total, inputs)
    slow = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("mask", [padding([40, 0]), causal() & padding([40, 0])], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_in_padded_keys_and_values_reach_nothing(features, mask, bad):
    q, k, v = draw(2, 2, 1, 100, 100, 5, 3)
    spoilt = []
    for x in (k, v):
        x = x.clone()
        x[0, :, 40:] = bad
        x[1] = bad
        spoilt.append(x)
    clean, dirty = [q, k, v], [q, *spoilt]
    results = []
    for inputs in (clean, dirty):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = LinearAttention(features, mask)(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert b.isfinite().all()


@pytest.mark.parametrize("causally", [False, True])
def test_padded_keys_are_ignored_even_if_the_real_ones_have_tiny_features(causally):
    q, k, v = draw(1, 1, 1, 70, 70, 16, 4, dtype=torch.float32)
    k = k * 20
    k[:, :, 30:] = 0
    mask = causal() & padding([30]) if causally else padding([30])
    out = LinearAttention(favor(32), mask)(q, k, v)
    logs = favor(32).logs(q.double())[..., None, :] + favor(32).logs(k.double())[..., None, :30, :]
    allowed = torch.ones(70, 30).tril().bool() if causally else torch.ones(70, 30).bool()
    exact = logs.logsumexp(-1).masked_fill(~allowed, -math.inf).softmax(-1) @ v[:, :, :30].double()
    assert (out - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("at", [1, 30, 63, 64, 65, 150])
def test_a_key_that_is_nan_reaches_no_query_before_it(features, at):
    q, k, v = draw(1, 1, 1, 200, 200, 5, 3)
    attend = LinearAttention(features, causal())
    before = attend(q, k, v)[:, :, :at]
    k[:, :, at], v[:, :, at] = math.nan, math.nan
    after = attend(q, k, v)
    assert torch.equal(after[:, :, :at], before)
    assert after[:, :, at:].isnan().all()


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("mask", [padding([3, 0]), causal() & padding([3, 0])], ids=repr)
def test_rows_that_see_nothing_give_zero_and_finite_gradients(features, mask):
    inputs = draw(2, 2, 1, 9, 7, 5, 3, grad=True)
    out = LinearAttention(features, mask)(*inputs)
    assert (out[1] == 0).all()
    assert (out[0, :, :2] == 0).all() == (mask != padding([3, 0]))
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[1] == 0).all() for grad in grads)


@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
@pytest.mark.parametrize("features", ["elu", favor(64)], ids=repr)
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3, 1e6])
def test_large_inputs_neither_overflow_nor_vanish_and_stay_within_the_values(features, mask, size):
    q, k, v = draw(1, 2, 2, 200, 200, 16, 4, dtype=torch.float32)
    out = LinearAttention(features, mask)(q * size, k * size, torch.ones_like(v))
    torch.testing.assert_close(out, torch.ones_like(out))


def test_a_small_key_after_large_ones_does_not_drown_what_came_before():
    # The log features of large keys are hundreds below those of a small one; a maximum over all keys would drown them.
    attend, (q, k, v) = LinearAttention(favor(32), causal()), draw(1, 1, 1, 70, 70, 16, 4, dtype=torch.float32)
    k = k * 20
    before = attend(q, k, v)
    logs = favor(32).logs(q.double())[..., None, :] + favor(32).logs(k.double())[..., None, :, :]
    weights = logs.logsumexp(-1).masked_fill(~torch.ones(70, 70).tril().bool(), -math.inf).softmax(-1)
    assert (weights @ v.double() - before).norm() < 1e-3 * before.norm()
    k[:, :, [40, 69]] = 0
    after = attend(q, k, v)
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])


def test_very_negative_inputs_of_elu_are_weighted_and_not_lost():
    q, k, v = draw(1, 1, 1, 5, 5, 3, 2, dtype=torch.float32)
    out = LinearAttention("elu")(q - 200, k - 200, v)
    exact = torch.softmax(torch.logsumexp((q - 200)[..., None, :] + (k - 200)[..., None, :, :], -1).double(), -1)
    torch.testing.assert_close(out.double(), exact @ v.double(), rtol=0, atol=1e-4)


def test_elu_has_the_right_slope_at_zero():
    q, k, v = draw(1, 1, 1, 4, 4, 3, 2)
    q, k = torch.zeros_like(q).requires_grad_(), torch.zeros_like(k).requires_grad_()
    towards = torch.arange(8.0, dtype=torch.float64).reshape(1, 1, 4, 2)
    fast = torch.autograd.grad((LinearAttention("elu")(q, k, v) * towards).sum(), (q, k))
    slow = torch.autograd.grad((naive("elu", None, q, k, v) * towards).sum(), (q, k))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_favors_directions_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    directions = _directions(1000, 16, 0)
    unit = directions / directions.norm(dim=1, keepdim=True)
    for block in unit.split(16):
        torch.testing.assert_close(block @ block.T, torch.eye(len(block), dtype=block.dtype), rtol=0, atol=1e-12)
    assert abs(directions.square().sum(1).mean().item() / 16 - 1) < 0.03
    assert abs(directions.mean().item()) < 0.01


def test_favors_kernel_is_that_of_softmax_on_average():
    q, k, _ = draw(1, 1, 1, 4, 4, 8, 1)
    q, k = q / 4, k / 4
    mean = sum(kernel(favor(64, seed), q, k) / 64 for seed in range(100)) / 100
    torch.testing.assert_close(mean, torch.exp(q @ k.mT / math.sqrt(8)), rtol=0.03, atol=0)


def test_favor_depends_on_its_seed_alone_and_leaves_torchs_generator_as_it_was():
    inputs = draw(1, 1, 1, 6, 6, 4, 4)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = LinearAttention(favor(7, seed=5))(*inputs)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first, LinearAttention(favor(7, seed=5))(*inputs))
    assert not torch.equal(first, LinearAttention(favor(7, seed=6))(*inputs))
    torch.testing.assert_close(
        _directions(2, 2, 0).flatten().tolist(), [1.843126, 1.022610, -0.466752, 0.841261], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
def test_favors_error_against_softmax_falls_like_one_over_the_root_of_count(mask):
    q, k, v = draw(1, 1, 1, 200, 200, 64, 8, dtype=torch.float32)
    q, k = q / 4, k / 4
    logits = q @ k.mT / 8
    if mask is not None:
        logits = logits.masked_fill(~torch.ones(200, 200).tril().bool(), -math.inf)
    exact = logits.softmax(-1) @ v

    def error(count):
        runs = [LinearAttention(favor(count, seed), mask)(q, k, v) - exact for seed in range(20)]
        return torch.stack(runs).square().mean().sqrt().item() / exact.square().mean().sqrt().item()

    few, some, many = error(64), error(256), error(1024)  # four times as many: half the error
    assert 1.8 < few / some < 2.2
    assert 1.8 < some / many < 2.2
    assert many < 0.05


@pytest.mark.parametrize(
    ("features", "mask"),
    [("elu", None), ("elu", causal() & padding([6, 3])), (favor(8), padding([6, 3])), (favor(8), causal())],
    ids=repr,
)
def test_it_compiles_into_one_graph_forward_and_backward(features, mask, monkeypatch):
    monkeypatch.setattr(regard.linear.logs, "_CHUNK", 4)
    torch.compiler.reset()
    attend, inputs = LinearAttention(features, mask), draw(2, 2, 1, 6, 7, 4, 3, dtype=torch.float32, grad=True)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(out, attend(*inputs))
    fast = torch.autograd.grad(out.square().sum(), inputs)
    slow = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b)


def test_the_step_compiles_into_one_graph():
    torch.compiler.reset()
    attend, (q, k, v) = LinearAttention(favor(8), causal()), draw(1, 2, 1, 1, 1, 4, 3)
    step = torch.compile(attend.step, fullgraph=True, backend="aot_eager")
    _, state = step(q, k, v)
    out, state = step(q, k, v, state)
    torch.testing.assert_close(out, v.expand(1, 2, 1, 3))


@pytest.mark.parametrize("features", FEATURES, ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_it_maps_over_a_leading_axis(features, mask):
    attend, inputs = (
        LinearAttention(features, mask),
        [
            torch.stack(pair)
            for pair in zip(draw(2, 2, 1, 70, 70, 4, 3), draw(2, 2, 1, 70, 70, 4, 3, seed=1), strict=True)
        ],
    )
    expected = torch.stack([attend(*one) for one in zip(*inputs, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(*inputs), expected)


def test_autocast_leaves_the_sums_in_float32():
    attend, inputs = LinearAttention(mask=causal()), draw(1, 2, 2, 100, 100, 8, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs)
    assert torch.equal(out, attend(*inputs))


def test_expanded_and_transposed_inputs_and_a_subset_of_gradients_are_fine():
    attend, (q, k, v) = LinearAttention(mask=causal()), draw(2, 3, 3, 20, 20, 4, 4)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(attend(*turned), attend(q, k, v))
    wide = k[:1, :1].expand(2, 3, 20, 4)
    torch.testing.assert_close(attend(q, wide, wide), attend(q, wide.contiguous(), wide.contiguous()))
    for chosen in (q, k, v):
        chosen.requires_grad_()
        attend(q, k, v).sum().backward()
        assert chosen.grad is not None
        chosen.requires_grad_(False)


def test_empty_axes_give_well_formed_output():
    for mask in (None, causal()):
        attend = LinearAttention(mask=mask)
        assert attend(*draw(0, 2, 1, 5, 5, 4, 3)).shape == (0, 2, 5, 3)
        assert attend(*draw(1, 2, 1, 0, 5, 4, 3)).shape == (1, 2, 0, 3)
        assert torch.equal(attend(*draw(1, 2, 1, 5, 0, 4, 3)), torch.zeros(1, 2, 5, 3, dtype=torch.float64))


def test_memory_grows_with_the_length_and_not_with_its_square():
    def saved(length):
        total = 0

        def count(x):
            nonlocal total
            total += x.numel()
            return x

        inputs = draw(1, 1, 1, length, length, 16, 16, dtype=torch.float32, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            LinearAttention("elu", causal())(*inputs)
        return total

    assert saved(8192) < 2.1 * saved(4096)


def test_it_is_a_value_that_prints_itself():
    attend = LinearAttention(favor(256, seed=1), causal() & padding([3, 2]))
    assert repr(attend) == "LinearAttention(features=favor(256, seed=1), mask=causal() & padding([3, 2]))"
    assert attend == LinearAttention(favor(256, seed=1), causal() & padding([3, 2]))
    assert attend != LinearAttention(favor(256, seed=2), causal() & padding([3, 2]))
    assert hash(attend) == hash(LinearAttention(favor(256, seed=1), causal() & padding([3, 2])))
    assert isinstance(favor(3), Favor)


ATTEND = LinearAttention(mask=causal())
Q, K, V = draw(2, 4, 2, 5, 5, 8, 3)
STATE = ATTEND.step(Q, K, V)[1]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: LinearAttention("relu"), ValueError, "features must be 'elu', 'identity' or favor.*, but is 'relu'"),
        (lambda: LinearAttention(64), TypeError, "features must be 'elu', 'identity' or favor.*, but is 64"),
        (lambda: LinearAttention(mask=Q > 0), TypeError, "mask must be a mask or None, but is Tensor; use causal"),
        (
            lambda: LinearAttention(mask=window(2, 0)),
            ValueError,
            r"mask must be composed of causal.* but has window\(2, 0\)",
        ),
        (
            lambda: LinearAttention(mask=causal() | padding([3])),
            ValueError,
            "but has causal.* regard.attention supports",
        ),
        (lambda: favor(0), ValueError, "count must be from 1 to .* but is 0; try favor"),
        (lambda: favor(2.5), TypeError, "count must be a whole number, but is 2.5"),
        (lambda: favor(8, seed=-1), ValueError, "seed must be from 0 to 4294967295, but is -1"),
        (lambda: ATTEND([1], K, V), TypeError, "query must be a tensor, but is list; try torch.as_tensor"),
        (lambda: ATTEND(Q, K.long(), V), TypeError, "key must be float32, .* but is torch.int64; try key.float"),
        (
            lambda: ATTEND(Q, K, V.float()),
            TypeError,
            "value must have the dtype of query, torch.float64, but is torch.float32",
        ),
        (lambda: ATTEND(Q, K.to("meta"), V), ValueError, "key must be on the device of query, cpu, but is on meta"),
        (lambda: ATTEND(Q[0, 0, 0], K, V), ValueError, r"query must have 2, 3 or 4 axes .* but has the shape \(8,\)"),
        (
            lambda: ATTEND(Q, K[0], V),
            ValueError,
            r"key must have as many axes as query, 4, but has the shape \(2, 5, 8\)",
        ),
        (lambda: ATTEND(Q, K[..., :7], V), ValueError, "key must have the width of query, .* key is .2, 2, 5, 7."),
        (lambda: ATTEND(Q[..., :0], K[..., :0], V), ValueError, "key must have the width of query, at least 1"),
        (lambda: ATTEND(Q, K, V[:, :, :4]), ValueError, "value must have one row per key, 5, .* value is .2, 2, 4, 3."),
        (lambda: ATTEND(Q, K, V[:, :1]), ValueError, "value must have the heads of key, 2"),
        (
            lambda: ATTEND(Q[:, :3], K, V),
            ValueError,
            "query must have a multiple of the heads of key, but has H = 3 for G = 2",
        ),
        (lambda: ATTEND(Q, K.repeat(2, 1, 1, 1), V), ValueError, r"must have the same batch size, or 1 where"),
        (lambda: LinearAttention(mask=padding([9, 1]))(Q, K, V), ValueError, "lengths must be at most .*K = 5.* is 9"),
        (
            lambda: LinearAttention(mask=padding([1, 1, 1]))(Q, K, V),
            ValueError,
            "lengths must have one number for each",
        ),
        (
            lambda: LinearAttention(mask=padding([3])).step(Q, K, V),
            ValueError,
            "mask must be None or causal.. for step",
        ),
        (lambda: ATTEND.step(Q[:, :, :1], K, V), ValueError, "query and key must have the same number of tokens"),
        (
            lambda: ATTEND.step(Q, K, V, (1, 2)),
            TypeError,
            "state must be a LinearState returned by an earlier call, or None, but is tuple",
        ),
        (
            lambda: ATTEND.step(Q[:1], K[:1], V[:1], STATE),
            ValueError,
            "state must fit this call: sums of shape .1, 2, 8, 4.",
        ),
        (
            lambda: ATTEND.step(Q.float(), K.float(), V.float(), STATE),
            TypeError,
            "state must be torch.float32 for this call, but is torch.float64",
        ),
    ],
)
def test_errors_name_the_expected_and_the_actual_value(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
