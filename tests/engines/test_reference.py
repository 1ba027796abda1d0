"""The reference against loops from the definition, and properties that every engine shares with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.geometry import Frame
from tests.engines.calls import EXACT, INF, NAN, inputs, normal, run
from tests.oracle import attend
from tests.strategies import masks


class TestTheDefinition:
    SCORES = ("dot", "scaled", "per head", "softcap", "cosine", "additive", "additive per head", "bilinear",
              "bilinear per head", "modified")  # fmt: skip

    @staticmethod
    def score(kind: str, H: int, D: int) -> tuple[Any, Callable[[Tensor, Tensor, int], Tensor]]:
        """Return a score, and the same for one query and one key of head h."""
        scales, weight, matrix = normal(H, seed=4), normal(H, D, seed=5), normal(H, D, D, seed=6)
        return {
            "dot": (rg.Dot(), lambda q, k, h: (q * k).sum() / math.sqrt(D)),
            "scaled": (rg.Dot(scale=0.3), lambda q, k, h: 0.3 * (q * k).sum()),
            "per head": (rg.Dot(scale=scales), lambda q, k, h: scales[h] * (q * k).sum()),
            "softcap": (rg.Dot(softcap=1.5), lambda q, k, h: 1.5 * torch.tanh((q * k).sum() / math.sqrt(D) / 1.5)),
            "cosine": (rg.Cosine(scale=3.0), lambda q, k, h: 3 * (q * k).sum() / q.norm() / k.norm()),
            "additive": (rg.Additive(weight[0]), lambda q, k, h: (weight[0] * torch.tanh(q + k)).sum()),
            "additive per head": (rg.Additive(weight), lambda q, k, h: (weight[h] * torch.tanh(q + k)).sum()),
            "bilinear": (rg.Bilinear(matrix[0]), lambda q, k, h: q @ matrix[0] @ k),
            "bilinear per head": (rg.Bilinear(matrix), lambda q, k, h: q @ matrix[h] @ k),
            "modified": (
                lambda s, b, h, p, j: s.cos() + 0.5 * h,
                lambda q, k, h: torch.cos((q * k).sum() / math.sqrt(D)) + 0.5 * h,
            ),
        }[kind]

    @pytest.mark.parametrize("kind", SCORES)
    @settings(max_examples=12)
    @given(data=st.data())
    def test_it_is_what_loops_over_queries_and_keys_give(self, kind: str, data: st.DataObject) -> None:
        draw = data.draw
        B, G, repeats = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
        H, Q, K, D, E = G * repeats, *(draw(st.integers(1, 5)) for _ in range(4))
        offset = draw(st.integers(-3, K) | st.lists(st.integers(-3, K), min_size=B, max_size=B))
        mask = draw(st.none() | masks(B, H, Q, K))
        sink = draw(st.sampled_from([None, 0.3, normal(H, seed=7)]))
        temperature = draw(st.sampled_from([1.0, 0.6]))
        query, key, value = inputs(B, H, G, Q, K, D, E)
        bias = normal(B, H, Q, K, seed=8)
        score, one = self.score(kind, H, D)
        at = Frame(B, H, Q, K, offset if isinstance(offset, int) else torch.tensor(offset)).indices()
        allowed = torch.ones(B, H, Q, K, dtype=torch.bool) if mask is None else mask.allows(at).expand(B, H, Q, K)
        description = {"score": score, "mask": mask, "bias": bias, "offset": offset, "temperature": temperature,
                       "sink": sink}  # fmt: skip
        output, lse = rg.attention(query, key, value, engine="reference", return_lse=True, **description)
        weights = rg.Attention(**description).weights(query, key)
        expected = attend(query, key, value, score=one, allowed=allowed, bias=bias, temperature=temperature, sink=sink)
        for ours, theirs in zip((output, weights, lse), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_a_scale_of_one_is_the_default_of_cosine_and_one_over_the_root_of_the_width_that_of_dot(self) -> None:
        query, key, value = inputs()
        for default, explicit in ((rg.Cosine(), rg.Cosine(scale=1.0)), (rg.Dot(), rg.Dot(scale=5**-0.5))):
            assert torch.equal(
                rg.attention(query, key, value, score=default, engine="reference"),
                rg.attention(query, key, value, score=explicit, engine="reference"),
            )

    def test_the_last_query_is_at_the_last_key_by_default(self) -> None:
        tensors = inputs()
        default = rg.attention(*tensors, mask=rg.causal())
        torch.testing.assert_close(default, rg.attention(*tensors, mask=rg.causal(), offset=3))
        top_left = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(rg.attention(*tensors, mask=rg.causal(), offset=0), top_left)

    def test_a_modifier_gets_the_position_of_the_query(self) -> None:
        seen = {}

        def modifier(score: Tensor, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
            seen.update(b=b.flatten().tolist(), h=h.flatten().tolist(), p=p.flatten().tolist(), j=j.flatten().tolist())
            return score

        rg.attention(*inputs(), score=modifier, offset=2, engine="reference")
        assert seen == {"b": [0, 1], "h": [0, 1, 2, 3], "p": [2, 3, 4, 5, 6, 7], "j": list(range(9))}


NOTHING = {
    "padding": {"mask": rg.padding([0, 4])},
    "queries before the keys": {"mask": rg.causal(), "offset": -3},
    "per head": {"mask": rg.dense(torch.arange(4)[:, None, None] != 1)},
    "a hole": {"mask": ~rg.global_tokens([5])},
    "everywhere": {"mask": rg.dense(torch.zeros(1, 1, dtype=torch.bool))},
}


@pytest.mark.parametrize("name", NOTHING)
class TestARowThatMayAttendToNothing:
    @staticmethod
    def empty_rows(description: dict[str, Any]) -> Tensor:
        frame = Frame(2, 4, 6, 9, description.get("offset", 3))
        empty = ~description["mask"].allows(frame.indices()).expand(2, 4, 6, 9).any(-1)
        assert empty.any()
        return empty

    @pytest.mark.parametrize("bias", [None, "alibi"])
    @pytest.mark.parametrize("engine", EXACT)
    def test_it_has_output_zero_and_finite_gradients(self, engine: str, bias: str | None, name: str) -> None:
        description = NOTHING[name] | ({"bias": rg.alibi(4)} if bias else {})
        empty = self.empty_rows(description)
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        output = run(engine, tensors, **description)
        assert (output[empty] == 0).all()
        assert output.isfinite().all()
        if (~empty).any():
            assert (output[~empty] != 0).all()
        grads = torch.autograd.grad(output.sin().sum() + output.sum(), tensors)
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][empty] == 0).all()

    @pytest.mark.parametrize("engine", ["reference", "tiled"])
    def test_it_has_log_sum_exp_minus_infinity_and_other_gradients_stay_finite(self, engine: str, name: str) -> None:
        description, empty = NOTHING[name], self.empty_rows(NOTHING[name])
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        output, lse = rg.attention(*tensors, engine=engine, return_lse=True, **description)
        assert (lse[empty] == -INF).all()
        assert lse[~empty].isfinite().all()
        loss = output.sum() + lse.masked_fill(empty, 0.0).sum()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, tensors))

    def test_its_weights_are_zero_and_so_are_its_statistics(self, name: str) -> None:
        attend, empty = rg.Attention(**NOTHING[name]), self.empty_rows(NOTHING[name])
        query, key, _ = inputs()
        weights = attend.weights(query, key)
        assert (weights[empty] == 0).all()
        torch.testing.assert_close(weights.sum(-1), (~empty).double())
        statistics = attend.statistics(query, key, top=2)
        assert (statistics.entropy[empty] == 0).all()
        assert (statistics.distance[empty] == 0).all()
        assert (statistics.max_logit[empty] == -INF).all()
        assert (statistics.lse[empty] == -INF).all()
        assert (statistics.top_keys[empty] == -1).all()
        assert (statistics.top_weights[empty] == 0).all()


HIDDEN = {
    # a description, and the key positions that no query sees: (batch row, key/value head, key)
    "padding": ({"mask": rg.padding([6, 9])}, [(0, 0, 6), (0, 1, 8)]),
    "causal": ({"mask": rg.causal(), "offset": 0}, [(0, 0, 6), (1, 1, 8)]),
    "causal per row": ({"mask": rg.causal(), "offset": [0, 3]}, [(0, 0, 8), (0, 1, 6)]),
    "window": ({"mask": rg.window(2, 0), "offset": 3}, [(0, 0, 0), (1, 1, 0)]),
    "per head": (
        {"mask": rg.dense((torch.arange(9) + torch.arange(4)[:, None, None]) % 2 == 0) & rg.padding([5, 7])},
        [(0, 0, 5), (0, 1, 8), (1, 0, 7)],
    ),
    "with a bias": ({"mask": rg.padding([6, 9]), "bias": rg.alibi(4)}, [(0, 0, 7)]),
    "with a sink": ({"mask": rg.padding([6, 9]), "sink": 0.5}, [(0, 0, 7)]),
    "softcap": ({"mask": rg.padding([6, 9]), "score": rg.Dot(softcap=2.0)}, [(0, 0, 7)]),
    "cosine": ({"mask": rg.padding([6, 9]), "score": rg.Cosine(scale=2.0)}, [(0, 0, 7)]),
    "additive": ({"mask": rg.padding([6, 9]), "score": rg.Additive(normal(5))}, [(0, 0, 7)]),
    "bilinear": ({"mask": rg.padding([6, 9]), "score": rg.Bilinear(normal(5, 5))}, [(0, 0, 7)]),
    "modified": ({"mask": rg.padding([6, 9]), "score": lambda s, b, h, p, j: s * 2}, [(0, 0, 7)]),
    "all": ({"mask": rg.padding([0, 9])}, [(0, 0, 0), (0, 1, 5)]),
}


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("place", ["keys", "values", "both", "one channel"])
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("engine", EXACT)
def test_values_of_a_hidden_key_do_not_reach_the_output(engine: str, name: str, place: str, poison: float) -> None:
    description, hidden = HIDDEN[name]
    clean = [tensor.requires_grad_() for tensor in inputs()]
    poisoned = [tensor.detach().clone() for tensor in clean]
    for b, g, j in hidden:
        if place in ("keys", "both"):
            poisoned[1][b, g, j] = poison
        if place in ("values", "both"):
            poisoned[2][b, g, j] = poison
        if place == "one channel":
            poisoned[1][b, g, j, 2], poisoned[2][b, g, j, 3] = poison, poison
    poisoned = [tensor.requires_grad_() for tensor in poisoned]
    results = []
    for tensors in (clean, poisoned):
        output = run(engine, tensors, **description)
        results.append([output, *torch.autograd.grad((output * normal(*output.shape, seed=5)).sum(), tensors)])
    for without, planted in zip(*results, strict=True):
        torch.testing.assert_close(planted, without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", EXACT)
def test_a_key_hidden_from_some_heads_spoils_only_those_that_see_it(engine: str) -> None:
    visible = torch.ones(4, 1, 9, dtype=torch.bool)
    visible[1, 0, 4] = visible[2, 0, 4] = False  # one query head of each key/value head
    tensors = inputs()
    expected = run(engine, tensors, mask=visible)
    tensors[1][0, :, 4] = NAN
    output = run(engine, tensors, mask=visible)
    assert output[0, [0, 3]].isnan().all()
    torch.testing.assert_close(output[0, [1, 2]], expected[0, [1, 2]])
    torch.testing.assert_close(output[1], expected[1])


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("mask", [None, rg.causal()], ids=["no mask", "causal"])
@pytest.mark.parametrize("engine", EXACT)
def test_nan_that_is_visible_makes_the_row_nan(engine: str, mask: rg.Mask | None, where: str) -> None:
    tensors = inputs(Q=9)
    tensors[1 if where == "key" else 2][0, 0, 5] = NAN
    output = run(engine, tensors, mask=mask)
    sees = torch.zeros(2, 4, 9, dtype=torch.bool)
    sees[0, :2, 0 if mask is None else 5 :] = True
    assert output[sees].isnan().all()
    assert not output[~sees].isnan().any()


@pytest.mark.parametrize("engine", EXACT)
def test_nan_in_a_query_stays_in_its_row(engine: str) -> None:
    tensors = inputs()
    expected = run(engine, tensors)
    tensors[0][1, 2, 3] = NAN
    output = run(engine, tensors)
    assert output[1, 2, 3].isnan().all()
    output[1, 2, 3] = expected[1, 2, 3]
    torch.testing.assert_close(output, expected)


EMPTY_MASKS = {
    "none": lambda K: None,
    "causal": lambda K: rg.causal() & rg.window(3, 0),
    "documents": lambda K: rg.documents(torch.zeros(K, dtype=torch.int64)),
    "random blocks": lambda K: rg.random_blocks(2, 2) | rg.global_tokens([0]),
    "dilated": lambda K: ~rg.dilated(2, 2),
    "dense": lambda K: rg.dense(torch.ones(1, K, dtype=torch.bool)),
}


@pytest.mark.parametrize("mask", EMPTY_MASKS)
@pytest.mark.parametrize(("B", "Q", "K"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (2, 0, 0)], ids=lambda n: str(n))
@pytest.mark.parametrize("bias", [None, "alibi"])
def test_empty_axes_give_well_formed_results_and_gradients(B: int, Q: int, K: int, mask: str, bias: str | None) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(B=B, Q=Q, K=K, E=3)]
    description = {"mask": EMPTY_MASKS[mask](K), "bias": rg.alibi(4) if bias else None}
    output, lse = rg.attention(*tensors, return_lse=True, **description)
    assert output.shape == (B, 4, Q, 3)
    assert lse.shape == (B, 4, Q)
    assert (output == 0).all()
    if K == 0:
        assert (lse == -INF).all()
    output.sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()
    attend = rg.Attention(**description)
    assert attend.weights(*tensors[:2]).shape == (B, 4, Q, K)
    assert attend.map(*tensors[:2], size=(2, 2)).shape == (B, 4, 2, 2)
    assert attend.statistics(*tensors[:2], top=2).top_keys.shape == (B, 4, Q, 2)
    assert attend.explain(*tensors).tiles[0] == 0 or B == 0


@pytest.mark.parametrize("mask", [None, rg.causal(), torch.tril(torch.ones(6, 9, dtype=torch.bool), 3)], ids=str)
@pytest.mark.parametrize("engine", EXACT)
def test_missing_leading_axes_count_as_one_and_stay_missing(engine: str, mask: Any) -> None:
    query, key, value = inputs(B=1, H=2, G=1)
    whole = rg.attention(query, key, value, mask=mask, engine="reference")
    three = run(engine, [query[0], key[0], value[0]], mask=mask)
    two = run(engine, [query[0, 1], key[0, 0], value[0, 0]], mask=mask)
    assert three.shape == (2, 6, 5)
    assert two.shape == (6, 5)
    torch.testing.assert_close(three, whole[0])
    torch.testing.assert_close(two, whole[0, 1])
    attend = rg.Attention(mask=mask)
    assert attend.weights(query[0, 1], key[0, 0]).shape == (6, 9)
    assert attend.map(query[0], key[0], size=(3, 2)).shape == (2, 3, 2)
    assert attend.statistics(query[0, 1], key[0, 0], top=3).top_keys.shape == (6, 3)
    assert attend.statistics(query[0, 1], key[0, 0], top=3).lse.shape == (6,)
    _, lse = rg.attention(query[0, 1], key[0, 0], value[0, 0], mask=mask, return_lse=True)
    assert lse.shape == (6,)


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.window(20, 5)], ids=["none", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("engine", EXACT)
def test_the_error_in_a_small_dtype_is_within_twice_that_of_dense_torch(
    engine: str, dtype: torch.dtype, mask: rg.Mask | None
) -> None:
    exact = inputs(H=4, G=4, Q=70, K=70, D=32, E=32)
    small = [tensor.to(dtype) for tensor in exact]
    allowed = torch.ones(70, 70, dtype=torch.bool) if mask is None else mask.allows(Frame(1, 1, 70, 70, 0).indices())

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * 32**-0.5).masked_fill(~allowed, -INF).softmax(-1) @ value

    truth = dense(*(tensor.double() for tensor in small))
    ours = run(engine, small, mask=mask)
    assert ours.dtype == dtype
    error, theirs = (ours.double() - truth).abs().max(), (dense(*small).double() - truth).abs().max()
    assert error <= 2 * theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["reference", "tiled"])
def test_log_sum_exp_of_a_small_dtype_is_float32(engine: str, dtype: torch.dtype) -> None:
    tensors = [tensor.to(dtype) for tensor in inputs()]
    _, lse = rg.attention(*tensors, engine=engine, return_lse=True)
    assert lse.dtype == torch.float32
    exact = rg.attention(*(tensor.double() for tensor in tensors), return_lse=True)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["reference", "tiled"])
class TestASink:
    def test_it_is_one_more_key_with_value_zero(self, engine: str) -> None:
        query, key, value = inputs(G=4)
        sink = normal(4, seed=6)
        logits = torch.cat([query @ key.mT / math.sqrt(5), sink[:, None, None].expand(2, 4, 6, 1)], -1)
        output, lse = rg.attention(query, key, value, sink=sink, engine=engine, return_lse=True)
        torch.testing.assert_close(output, logits.softmax(-1)[..., :-1] @ value)
        torch.testing.assert_close(lse, logits.logsumexp(-1))

    def test_a_number_is_one_logit_for_all_heads(self, engine: str) -> None:
        tensors = inputs()
        one = rg.attention(*tensors, sink=0.7, engine=engine)
        torch.testing.assert_close(
            rg.attention(*tensors, sink=torch.full((4,), 0.7), engine=engine), one, rtol=1e-7, atol=1e-7
        )
        torch.testing.assert_close(
            rg.attention(*tensors, sink=torch.tensor(0.7).double(), engine=engine), one, rtol=1e-7, atol=1e-7
        )

    def test_neither_temperature_nor_bias_changes_it(self, engine: str) -> None:
        query, key, value = inputs(G=4)
        logits = (query @ key.mT / math.sqrt(5) + 1) / 2
        total = logits.exp().sum(-1, keepdim=True) + math.exp(0.3)
        output = rg.attention(query, key, value, sink=0.3, temperature=2.0, bias=torch.ones(1), engine=engine)
        torch.testing.assert_close(output, logits.exp() / total @ value)

    def test_a_sink_of_minus_infinity_is_none(self, engine: str) -> None:
        tensors = inputs()
        description = {"mask": rg.padding([0, 5]), "engine": engine, "return_lse": True}
        for with_sink, without in zip(
            rg.attention(*tensors, sink=-INF, **description), rg.attention(*tensors, **description), strict=True
        ):
            torch.testing.assert_close(with_sink, without)

    def test_a_row_that_sees_nothing_has_the_sinks_log_sum_exp_and_output_zero(self, engine: str) -> None:
        output, lse = rg.attention(*inputs(), sink=0.4, mask=rg.padding([0, 5]), engine=engine, return_lse=True)
        assert (output[0] == 0).all()
        torch.testing.assert_close(lse[0], torch.full((4, 6), 0.4, dtype=torch.float64))

    def test_its_gradient_equals_finite_differences(self, engine: str) -> None:
        tensors = inputs()

        def outputs(sink: Tensor) -> tuple[Tensor, Tensor]:
            return rg.attention(*tensors, sink=sink, mask=rg.padding([0, 5]), engine=engine, return_lse=True)

        for sink in (normal(4), normal(1), normal(1)[0]):
            assert torch.autograd.gradcheck(outputs, sink.clone().requires_grad_(), fast_mode=True)

    def test_a_very_large_one_takes_all_the_weight_without_overflow(self, engine: str) -> None:
        output, lse = rg.attention(*inputs(), sink=1e4, engine=engine, return_lse=True)
        assert (output == 0).all()
        assert (lse == 1e4).all()
