"""The compiled kernels. Agreement with the reference on random calls is tested together with the other engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.engines import inspection, native
from regard.scores import Score
from tests.engines.calls import gradients, tensors

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "the library is there")


def assert_like_reference(inputs: list[Tensor], tolerance: float = 1e-10, **description: object) -> None:
    """Compare with the reference; `inputs` are query, key, value, and the description's parameters."""
    seeds = {}
    for engine in ("native", "reference"):
        torch.manual_seed(3)
        output, lse = rg.attention(*inputs[:3], engine=engine, return_lse=True, **description)  # type: ignore[arg-type]
        seeds[engine] = [output, lse, *gradients(output + lse.unsqueeze(-1).nan_to_num(0, 0, 0), inputs)]
    for ours, theirs in zip(*seeds.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


SIZES = [
    (1, 1, 1, 1, 1, 1),
    (7, 13, 5, 3, 1, 1),
    (64, 64, 32, 32, 2, 1),
    (65, 129, 33, 17, 4, 2),
    (200, 300, 64, 80, 2, 2),
]


@pytest.mark.parametrize(("Q", "K", "D", "E", "H", "G"), SIZES)
@pytest.mark.parametrize(
    "mask", [None, rg.causal(), rg.window(20, 3), rg.global_tokens([2]) | rg.window(9, 0)], ids=repr
)
def test_sizes_that_fit_no_register_agree_with_the_reference(Q, K, D, E, H, G, mask) -> None:
    assert_like_reference(tensors((2, H, Q, D), (2, G, K, D), (2, G, K, E)), mask=mask)


def test_widths_up_to_512_agree_with_the_reference() -> None:
    assert_like_reference(tensors((1, 1, 40, 512), (1, 1, 50, 512), (1, 1, 50, 511)), mask=rg.causal())


def described() -> dict[str, tuple[list[Tensor], dict]]:
    """Return every feature of the kernel once: parameters and description."""
    H, Q, K, D, E = 4, 70, 100, 16, 24
    table, buckets, keys, values, dense, heads = tensors((15, H), (32, H), (9, D), (9, E), (1, H, Q, K), (H,))
    row = dense[:, :, :, :1].detach().requires_grad_()
    weight, weights = tensors((D,), (H, D), seed=11)
    return {
        "additive": ([weight], {"score": rg.Additive(weight), "temperature": 0.7}),
        "additive, a weight for each head": ([weights], {"score": rg.Additive(weights), "mask": rg.causal()}),
        "additive with all biases": (
            [weight, table, keys, values, dense, heads],
            {
                "score": rg.Additive(weight),
                "bias": rg.relative(table) + rg.shaw(keys, values) + rg.dense_bias(dense),
                "mask": rg.window(40, 9),
                "sink": heads,
            },
        ),
        "additive, dropped": (
            [weights],
            {"score": rg.Additive(weights), "dropout": 0.5, "mask": rg.global_tokens([2]) | rg.window(9, 0)},
        ),
        "additive, rows that see nothing": ([weight], {"score": rg.Additive(weight), "mask": rg.padding([3, 0])}),
        "softcap": ([], {"score": rg.Dot(softcap=3.0)}),
        "learned scale": ([heads], {"score": rg.Dot(scale=heads)}),
        "cosine": ([heads], {"score": rg.Cosine(scale=heads)}),
        "temperature": ([], {"temperature": 0.7}),
        "sink": ([heads], {"sink": heads, "mask": rg.padding([3, 0])}),
        "alibi": ([], {"bias": rg.alibi(H), "mask": rg.causal()}),
        "relative": ([table], {"bias": rg.relative(table), "temperature": 2.0}),
        "t5": ([buckets], {"bias": rg.t5(buckets)}),
        "shaw": ([keys, values], {"bias": rg.shaw(keys, values), "offset": [5, -3]}),
        "dense bias": ([dense], {"bias": dense}),
        "bias that is one for all keys": ([row], {"bias": row, "sink": 0.3}),
        "all biases": (
            [table, keys, values, dense],
            {
                "bias": rg.relative(table) + rg.shaw(keys, values) + rg.dense_bias(dense),
                "score": rg.Dot(softcap=5.0),
                "mask": rg.causal(),
            },
        ),
        "dropout": ([], {"dropout": 0.5}),
        "dropout with shaw": (
            [keys, values],
            {"dropout": 0.5, "bias": rg.shaw(keys, values), "mask": rg.window(30, 5)},
        ),
        "documents": ([], {"mask": rg.documents([0] * 30 + [1] * 33 + [2] * 37) & rg.causal()}),
        "bits": ([], {"mask": rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h + b) % 5 < 2)}),
    }


@pytest.mark.parametrize("name", described())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_feature_agrees_with_the_reference(name: str, threads: int) -> None:
    learned, description = described()[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_like_reference(
            [*tensors((2, 4, 70, 16), (2, 2, 100, 16), (2, 2, 100, 24), seed=7), *learned], **description
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.where(lambda b, h, p, j: (p + j) % 3 > 0)], ids=repr)
@pytest.mark.parametrize("shape", [(2, 4, 70, 100), (1, 4, 70, 100), (2, 1, 70, 100), (4, 1, 100), (70, 1)])
def test_the_gradient_of_a_dense_bias_is_fully_written(shape: tuple[int, ...], mask: rg.Mask) -> None:
    inputs = tensors((2, 4, 70, 16), (2, 2, 100, 16), (2, 2, 100, 24), shape)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        assert_like_reference(inputs, bias=inputs[3], mask=mask)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    inputs = tensors((1, 2, 130, 64), (1, 2, 200, 64), (1, 2, 200, 64), dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    attend = rg.Attention(mask=rg.causal())
    ours, best = attend(*inputs, engine="native"), attend(*exact, engine="reference")
    assert ours.dtype == dtype
    eps = torch.finfo(dtype).eps
    # The CPU's products of bfloat16 numbers round the weights first: half a unit in the last place of each.
    pairs = dtype == torch.bfloat16 and native.multiplies_bfloat16()
    rounded = eps / 2 * (attend.weights(*exact[:2]) @ exact[2].abs()) if pairs else 0.0
    assert ((ours.double() - best.to(dtype).double()).abs() <= eps * best.abs() + 1e-6 + rounded).all()
    for actual, theirs in zip(gradients(ours, inputs), gradients(best, exact), strict=True):
        assert (actual.double() - theirs).abs().max() < 8 * torch.finfo(dtype).eps * theirs.abs().max()


@pytest.mark.parametrize("engine", ["native", "sdpa"])
def test_a_bilinear_matrix_of_more_digits_than_the_call_keeps_them(engine: str) -> None:
    query, key, value = (t.detach() for t in tensors((1, 1, 1, 2), (1, 1, 3, 2), (1, 1, 3, 4), dtype=torch.bfloat16))
    query[...] = 1.0
    matrix = torch.tensor([[1.001, 0.0], [-1.0, 0.0]])  # the queries become (0.001, 0): rounded first, (0, 0)
    output = rg.attention(query, key * 1000, value, score=rg.Bilinear(matrix), engine=engine)
    expected = torch.softmax(key[..., 0].float(), -1).unsqueeze(-2) @ value.float()
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(1, 4, 512, 64), (2, 3, 100, 40), (1, 1, 2048, 128)])
def test_float32_is_within_twice_the_error_of_dense_torch(shape: tuple[int, ...]) -> None:
    exact = tensors(shape, shape, shape)
    single = [t.detach().float().requires_grad_() for t in exact]
    best = rg.attention(*exact, engine="reference")
    ours = rg.attention(*single, engine="native")
    dense = torch.softmax(single[0] @ single[1].mT / shape[-1] ** 0.5, -1) @ single[2]
    expected = [best, *gradients(best, exact)]
    for a, b, c in zip([ours, *gradients(ours, single)], [dense, *gradients(dense, single)], expected, strict=True):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-7


# Every way in which the kernel computes tanh: a polynomial, one exponential a vector in pairs and alone, and directly.
RANGES = [(0.05, 0.0), (1.0, 0.0), (5.0, 3.0), (12.0, 0.0), (60.0, 0.0), (30.0, 50.0), (1e6, 0.0), (1e30, 0.0)]


@pytest.mark.parametrize(("size", "apart"), RANGES)
def test_additive_scores_are_exact_for_queries_and_keys_of_any_size(size: float, apart: float) -> None:
    query, key, value, weight = tensors((1, 2, 40, 17), (1, 2, 50, 17), (1, 2, 50, 9), (2, 17))
    with torch.no_grad():
        query.mul_(size).add_(apart), key.mul_(size).sub_(apart)
        weight[0, 3] = 0.0
    assert_like_reference([query, key, value, weight], 1e-11, score=rg.Additive(weight), mask=rg.causal())


@pytest.mark.parametrize(("size", "apart"), RANGES)
def test_additive_float32_is_within_twice_the_error_of_dense_torch(size: float, apart: float) -> None:
    query, key, value, weight = (t.detach() for t in tensors((1, 2, 130, 64), (1, 2, 130, 64), (1, 2, 130, 64), (64,)))
    single = [t.float() for t in (query * size + apart, key * size - apart, value, weight / 8)]
    results = []
    for inputs, engine in ((single, "native"), (single, "reference"), ([t.double() for t in single], "reference")):
        inputs = [t.clone().requires_grad_() for t in inputs]
        output = rg.attention(*inputs[:3], score=rg.Additive(inputs[3]), engine=engine)
        results.append([output, *gradients(output, inputs)])
    for n, (ours, dense, exact) in enumerate(zip(*results, strict=True)):
        error, allowed = (ours - exact).abs().max(), (dense - exact).abs().max()
        rounding = torch.finfo(torch.float32).eps * exact.abs().max()
        # The gradients use weights recomputed from a rounded log-sum-exp, as for dot products.
        assert error <= 2 * allowed + 4 * rounding * (1 if n == 0 else 4)


def test_a_cap_leaves_no_gradient_where_it_is_saturated() -> None:
    query, key, value = tensors((1, 1, 20, 8), (1, 1, 30, 8), (1, 1, 30, 8), dtype=torch.float32)
    for huge in (1e6, 1e12):
        inputs = [(query.detach() * huge).requires_grad_(), key, value]
        output = rg.attention(*inputs, score=rg.Dot(softcap=4.0), engine="native")
        exact = rg.attention(*(t.double() for t in inputs), score=rg.Dot(softcap=4.0), engine="reference")
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-6)
        dq, dk, _ = gradients(output, inputs)
        assert not dq.any()
        assert not dk.any()


@pytest.mark.parametrize("score", [rg.Dot(), rg.Additive(torch.linspace(-1, 1, 8))], ids=repr)
@pytest.mark.parametrize("mask", [rg.padding([20]), rg.padding([20]) | rg.edges([(3, 29)]), rg.causal()], ids=repr)
def test_non_finite_numbers_reach_only_the_rows_that_see_them(mask: rg.Mask, score: Score) -> None:
    inputs = tensors((1, 2, 30, 8), (1, 2, 30, 8), (1, 2, 30, 8))
    with torch.no_grad():
        inputs[1][0, 0, 25, 3] = float("nan")
        inputs[2][0, 1, 29, 0] = float("inf")
    results = []
    for engine in ("native", "reference"):
        output, lse = rg.attention(*inputs, mask=mask, score=score, engine=engine, return_lse=True)
        results.append([output[:, :, :25], lse[:, :, :25], *(grad[:, :, :25] for grad in gradients(output, inputs))])
    for ours, theirs in zip(*results, strict=True):
        seen = theirs.isfinite()  # the reference gives NaN for more gradients than necessary
        torch.testing.assert_close(ours[seen], theirs[seen], rtol=1e-10, atol=1e-10, equal_nan=True)
    assert results[0][0][:, :, :3].isfinite().all()


@pytest.mark.parametrize("mask", [rg.window(90, 0), rg.causal(), rg.window(40, 0) | rg.global_tokens([0])], ids=repr)
def test_a_non_finite_value_in_the_middle_of_the_keys(mask: rg.Mask) -> None:
    """Values are read in place up to the first non-finite one, and packed from there."""
    inputs = tensors((2, 2, 500, 64), (2, 2, 500, 64), (2, 2, 500, 64), dtype=torch.float32)
    with torch.no_grad():
        inputs[2][0, 1, 333, 63] = float("nan")
        inputs[2][1, 0, 499, 0] = -float("inf")
    output = rg.attention(*inputs, mask=mask, engine="native").double()
    query, key, value = (t.detach().double() for t in inputs)
    bad = (~value.isfinite()).any(-1, keepdim=True).expand_as(value)
    seen = rg.attention(query, key, bad.double(), mask=mask, engine="reference") > 0
    assert seen.any()
    assert output[seen].isnan().all()
    exact = rg.attention(query, key, value.nan_to_num(0, 0, 0), mask=mask, engine="reference")
    torch.testing.assert_close(output[~seen], exact[~seen], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", [0, 15, 31, 63, 64])  # the last ones of panels of every instruction set
def test_a_key_that_is_not_finite_may_be_any_of_its_panel(key: int) -> None:
    query, key_rows, value = (t.detach() for t in tensors(*[(1, 1, 70, 8)] * 3, dtype=torch.float32))
    key_rows[:, :, key] = float("inf")
    mask = rg.dense((torch.arange(70) != key).expand(1, 1, 70, 70))
    output = rg.attention(query, key_rows, value, mask=mask, engine="native")
    clean = rg.attention(query, key_rows.nan_to_num(0, 0, 0), value, mask=mask, engine="reference")
    torch.testing.assert_close(output, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.global_tokens([0, 700]) | rg.window(300, 300)], ids=repr)
@pytest.mark.parametrize("shape", ["rise", "fall", "spike"])
def test_the_largest_logit_of_a_row_may_be_anywhere(shape: str, mask: rg.Mask | None) -> None:
    """Moderate logits are weighted relative to a common bound, and again if a row is far below it."""
    inputs = tensors((1, 1, 1500, 16), (1, 1, 1500, 16), (1, 1, 1500, 8))
    with torch.no_grad():
        for t in inputs[:2]:
            t *= 0.5
        inputs[0][..., 0] = 5.0
        ramp = torch.linspace(-12, 12, 1500, dtype=torch.float64)
        inputs[1][..., 0] = {"rise": ramp, "fall": -ramp, "spike": 24.0 * (torch.arange(1500) == 1100) - 12}[shape]
    assert_like_reference(inputs, mask=mask)


def test_values_however_small_are_weighed_where_all_logits_lie_below_zero() -> None:
    query, value = torch.full((1, 1, 40, 16), 2.2), 1e-30 * torch.rand(1, 1, 900, 8)
    output = rg.attention(query, -query[:, :, :1].expand(1, 1, 900, 16), value, engine="native")
    expected = value.double().mean(2, keepdim=True).expand(1, 1, 40, 8).float()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("keys", [3, 6, 9, 17])  # one panel of every instruction set, of which a half is hidden
@pytest.mark.parametrize("mask", [rg.padding([1]), ~rg.padding([2]), rg.window(0, 0)], ids=repr)
def test_memory_of_an_earlier_call_does_not_reach_a_gradient(mask: rg.Mask, keys: int) -> None:
    inputs = tensors((1, 2, keys, 8), (1, 2, keys, 8), (1, 2, keys, 8))
    for described in ({}, {"score": rg.Dot(softcap=3.0), "bias": rg.alibi(heads=2)}):
        gradients(rg.attention(*(t * torch.nan for t in inputs), engine="native", **described), inputs)
        assert_like_reference(inputs, mask=mask, **described)


def test_rows_that_see_nothing_are_zero_and_have_zero_gradients() -> None:
    inputs = tensors((1, 1, 9, 4), (1, 1, 9, 4), (1, 1, 9, 4))
    output, lse = rg.attention(*inputs, mask=rg.padding([0]), engine="native", return_lse=True)
    assert not output.any()
    assert bool((lse == float("-inf")).all())
    assert not any(grad.any() for grad in gradients(output, inputs))


def test_any_strides_are_read_as_they_are() -> None:
    packed = tensors((2, 50, 3, 4, 8))[0]
    query, key, value = packed.unbind(2)  # (B, N, H, D)
    views = [t.transpose(1, 2) for t in (query, key, value)]
    turned = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in views]
    ours = rg.attention(*views, engine="native")
    torch.testing.assert_close(ours, rg.attention(*turned, engine="native"), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours, rg.attention(*views, engine="reference"), rtol=1e-12, atol=1e-12)
    wide = tensors((1, 1, 6, 1))[0].expand(1, 5, 6, 9)
    torch.testing.assert_close(
        rg.attention(wide, wide, wide, engine="native"), rg.attention(wide, wide, wide, engine="reference")
    )


def test_gradients_pass_gradcheck_twice() -> None:
    table = tensors((5, 2))[0]
    inputs = (*tensors((1, 2, 5, 3), (1, 1, 6, 3), (1, 1, 6, 2)), table)

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return rg.attention(q, k, v, mask=rg.causal(), bias=rg.relative(table), engine="native", return_lse=True)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


def test_the_additive_score_can_be_differentiated_twice() -> None:
    inputs = (*tensors((1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1)), *tensors((2, 2)))

    def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rg.attention(
            q, k, v, score=rg.Additive(weight), mask=rg.causal(), temperature=2.0, engine="native", return_lse=True
        )

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


def test_shaw_can_be_differentiated_twice() -> None:
    inputs = (*tensors((1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 2)), *tensors((3, 3), (3, 2)))

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return rg.attention(q, k, v, bias=rg.shaw(keys, values), sink=0.1, engine="native")

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


@pytest.mark.parametrize("score", [rg.Dot(), rg.Additive(torch.linspace(-1, 1, 32, requires_grad=True))], ids=repr)
def test_results_are_bitwise_reproducible(score: Score) -> None:
    inputs = tensors((1, 3, 300, 32), (1, 1, 300, 32), (1, 1, 300, 32), dtype=torch.float32)
    inputs += score.tensors()
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        output = rg.attention(*inputs[:3], score=score, mask=rg.causal(), dropout=0.1, engine="native")
        runs.append([output, *gradients(output, inputs)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_gradients_are_finite_where_logits_are_too_large_for_their_digits() -> None:
    inputs = [t.detach().float().requires_grad_() for t in tensors((1, 18, 3, 4), (1, 18, 1, 4), (1, 18, 1, 4))]
    output = rg.attention(*inputs, bias=rg.alibi(18), offset=2**31, engine="native")
    for gradient in gradients(output, inputs):
        assert gradient.isfinite().all()


def test_the_dense_weights_are_never_materialised() -> None:
    q, k, v = (torch.randn(1, 1, 30_000, 8) for _ in range(3))
    output = rg.attention(q, k, v, mask=rg.window(64, 0), engine="native")
    some = F.scaled_dot_product_attention(q[:, :, 20_000:20_001], k[:, :, 19_936:20_001], v[:, :, 19_936:20_001])
    torch.testing.assert_close(output[:, :, 20_000:20_001], some, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in described() if "dropout" not in name])
def test_statistics_agree_with_those_of_the_tiles(name: str) -> None:
    _, description = described()[name]
    query, key, _ = (t.detach() for t in tensors((2, 4, 70, 16), (2, 2, 100, 16), (2, 2, 100, 24), seed=7))
    problem = rg.Attention(**description).problem(query, key)  # type: ignore[arg-type]
    with torch.no_grad():
        ours, theirs = native.statistics(problem, query, key, 3), inspection.statistics(problem, query, key, 3)
    for actual, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("logit", [-1e10, -1e31, -1e37])
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_a_row_whose_logits_all_lie_far_below_zero_is_not_taken_for_a_masked_one(logit: float, queries: int) -> None:
    q, k, v = torch.ones(1, 1, queries, 1), torch.full((1, 1, 70, 1), logit), torch.randn(1, 1, 70, 4)
    out, lse = rg.attention(q, k, v, engine="native", return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(1, 1, queries, 4))
    torch.testing.assert_close(lse, torch.full((1, 1, queries), logit))
    assert torch.isfinite(rg.Attention().statistics(q, k).lse).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_a_key_that_heads_share_are_rounded_once(dtype: torch.dtype) -> None:
    query, key, value = torch.randn(1, 8, 5, 16), 1e-3 * torch.randn(1, 1, 6, 16), torch.randn(1, 1, 6, 16)
    halves = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    wide = [tensor.detach().float().requires_grad_() for tensor in halves]
    attend = rg.Attention(score=rg.Additive(torch.randn(8, 16)), mask=rg.causal())
    attend(*halves, engine="native").sum().backward()
    attend(*wide, engine="native").sum().backward()
    for half, full in zip(halves, wide, strict=True):
        assert half.grad is not None
        assert full.grad is not None
        assert torch.equal(half.grad, full.grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_a_query_with_shaw_are_rounded_once(dtype: torch.dtype) -> None:
    halves = [torch.randn(1, 2, 5, 16).to(dtype).requires_grad_() for _ in range(3)]
    wide = [tensor.detach().float().requires_grad_() for tensor in halves]
    attend = rg.Attention(bias=rg.shaw(torch.randn(7, 16), torch.randn(7, 16)))
    attend(*halves, engine="native").sum().backward()
    attend(*wide, engine="native").sum().backward()
    for half, full in zip(halves, wide, strict=True):
        assert half.grad is not None
        assert full.grad is not None
        assert torch.equal(half.grad, full.grad.to(dtype))
