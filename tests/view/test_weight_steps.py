"""The steps of one weight, compared with a dense computation in float64 and with `Attention.weights`."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.view import Change, capture
from tests.view.models import Attends, attended

N, D = 9, 8
torch.manual_seed(0)
MATRIX, WEIGHT = torch.randn(D, D), torch.randn(D)
ATTENTIONS = {
    "dot": rg.Attention(mask=rg.causal()),
    "scale per head": rg.Attention(score=rg.Dot(scale=torch.tensor([0.1, 0.2, 0.3, 0.4]))),
    "softcap": rg.Attention(score=rg.Dot(scale=0.7, softcap=2.0), temperature=0.5),
    "cosine": rg.Attention(score=rg.Cosine(scale=5.0), mask=rg.causal() & rg.window(3, 0)),
    "bilinear": rg.Attention(score=rg.Bilinear(MATRIX)),
    "additive": rg.Attention(score=rg.Additive(WEIGHT)),
    "modified": rg.Attention(score=lambda score, b, h, i, j: score - 0.1 * (i - j).abs()),
    "bias and sink": rg.Attention(mask=rg.causal(), bias=rg.alibi(heads=4), sink=torch.tensor([0.5, 1.0, 0.0, -1.0])),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_steps_lead_to_the_weight(name: str) -> None:
    torch.manual_seed(1)
    attend = ATTENTIONS[name].eval()
    x = torch.randn(1, 4, N, D)
    record = attended(attend, x)
    weights = attend.weights(x, x)[0]
    shares = 0.0
    for key in range(7):
        steps = record.explain_weight(0, head=2, query=6, key=key)
        assert steps.weight == weights[2, 6, key].item()
        if not steps.allowed:
            assert steps.weight == 0
            assert steps.logit == -math.inf
            continue
        assert len(steps.terms) == steps.dimensions == D
        assert sum(term for *_, term in steps.terms) == pytest.approx(steps.product, rel=1e-12)
        assert [abs(term) for *_, term in steps.terms] == sorted((abs(term) for *_, term in steps.terms), reverse=True)
        expected = {
            "softcap": 2.0 * math.tanh(steps.product * 0.7 / 2.0), "bilinear": steps.product, "additive": steps.product,
            "modified": steps.product / math.sqrt(D) - 0.1 * (6 - key),
        }.get(name, None if steps.scale is None else steps.product * steps.scale)  # fmt: skip
        assert steps.score == pytest.approx(
            expected, rel=1e-6 if name == "modified" else 1e-12
        )  # its function is float32
        assert steps.logit == pytest.approx((steps.score + (steps.bias or 0)) / steps.temperature, rel=1e-12)
        assert math.exp(steps.logit - steps.lse) == pytest.approx(steps.weight, rel=2e-5)
        assert steps.contribution == pytest.approx(steps.weight * x[0, 2, key].double().norm().item(), rel=1e-6)
        shares += steps.share or 0.0
    if name == "dot":
        q, k = x[0, 2, 6].double(), x[0, 2, 3].double()
        steps = record.explain_weight(0, head=2, query=6, key=3)
        assert steps.product == pytest.approx(float(q @ k), rel=1e-12)
        assert steps.scale == 1 / math.sqrt(D)
        number, left, right, term = steps.terms[0]
        assert (left, right) == (float(q[number]), float(k[number]))
        assert term == left * right
        row = weights[2, 6].double()
        assert (steps.visible, steps.rank) == (7, int((row > row[3]).sum()) + 1)
        assert shares == pytest.approx(1.0, rel=1e-5)
    assert "weight" in str(steps)


def test_shared_heads_long_sequences_and_changes() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 3000, D), torch.randn(1, 2, 3000, D)
    attend = rg.Attention(mask=rg.causal())
    model = Attends(attend).eval()
    with capture(model) as record:
        model(q, k)
    for head in (0, 3):
        steps = record.explain_weight(0, head, query=2999, key=1234)
        assert steps.weight == attend.weights(q, k, rows=[2999], heads=[head])[0, 0, 0, 1234].item()
        values = k[0, head // 2].double()
        assert steps.value_length == pytest.approx(values[1234].norm().item(), rel=1e-9)
        row = attend.weights(q, k, rows=[2999], heads=[head])[0, 0, 0].double()
        output = row @ values
        assert steps.share == pytest.approx(float(row[1234] * (values[1234] @ output) / (output @ output)), rel=1e-4)
    changed = record.ablate(Change(head=3, factor=-0.5), Change(temperature=2.0), Change(force=[(5, 9)]))
    steps = changed.explain_weight(0, 3, query=2999, key=1234)
    assert (steps.factor, steps.temperature) == (-0.5, 2.0)
    assert steps.contribution == pytest.approx(0.5 * steps.weight * steps.value_length)
    assert changed.explain_weight(0, 3, query=5, key=9).weight == 1
    with pytest.raises(ValueError, match=r"key must be in 0 \.\.\. 2999"):
        record.explain_weight(0, 0, query=0, key=3000)


def test_scaled_windows_are_weights_times_value_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 50, D)
    attend = rg.Attention(mask=rg.causal())
    record = attended(attend, x)
    expected = attend.weights(x, x)[0, 1] * x[0, 1].norm(dim=-1)
    window = record.window(0, 1, (10, 40), (5, 30), scaled=True)
    torch.testing.assert_close(torch.from_numpy(window.weights), expected[10:40, 5:30])
    monkeypatch.setattr("regard.view.captured_attention.DIRECT", 100)
    pooled = record.window(0, 1, (10, 40), (5, 30), (7, 11), scaled=True)
    right = torch.nn.functional.adaptive_avg_pool2d(expected[None, 10:40, 5:30], (7, 11))[0]
    torch.testing.assert_close(torch.from_numpy(pooled.weights), right)


def test_relative_values_are_part_of_what_a_key_contributes() -> None:
    torch.manual_seed(2)
    keys, values = torch.randn(5, D), torch.randn(4, 5, D)
    attend = rg.Attention(mask=rg.causal(), bias=rg.shaw(keys, values) + rg.alibi(heads=4))
    x = torch.randn(1, 4, N, D)
    record = attended(attend, x)
    weights, out = attend.weights(x, x)[0, 2, 6].double(), attend(x, x, x)[0, 2, 6].double()
    total = torch.zeros(D, dtype=torch.float64)
    for key in range(7):
        steps = record.explain_weight(0, head=2, query=6, key=key)
        value = (x[0, 2, key] + values[2, max(key - 6, -2) + 2]).double()
        assert steps.value_length == pytest.approx(value.norm().item(), rel=1e-6)
        assert steps.contribution == pytest.approx((weights[key] * value.norm()).item(), rel=1e-5)
        assert steps.share == pytest.approx((weights[key] * (value @ out) / out.square().sum()).item(), abs=1e-5)
        total += weights[key] * value
    torch.testing.assert_close(total, out, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="the values of this attention depend on the query, by their relative part"):
        record.window("0", 2, (0, N), (0, N), (N, N), scaled=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_value_that_is_not_finite_contributes_nothing(bad: float) -> None:
    torch.manual_seed(3)
    x = torch.randn(1, 4, N, D)
    x[0, :, -1] = bad
    record = attended(rg.Attention(mask=rg.padding([N - 1])), x)
    steps = [record.explain_weight(0, head=1, query=3, key=key) for key in range(N)]
    assert (steps[-1].weight, steps[-1].contribution, steps[-1].share) == (0.0, 0.0, 0.0)
    assert sum(each.share or 0.0 for each in steps) == pytest.approx(1.0, rel=1e-6)
