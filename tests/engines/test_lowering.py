"""Lowering: the tensors that the kernels read describe the same call, whole or in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines import lowering
from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.native.engine import prepare
from tests.engines.calls import inputs, normal

H, Q, K, D, E = 4, 6, 9, 5, 3


def call(**description: Any) -> tuple[list[Tensor], rg.Attention]:
    return inputs(Q=Q, K=K, D=D, E=E), rg.Attention(**description)


DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "dot": {},
    "one scale per head": {"score": rg.Dot(scale=normal(H))},
    "softcap and temperature": {"score": rg.Dot(softcap=2.0), "temperature": 0.7},
    "cosine": {"score": rg.Cosine(scale=normal(H))},
    "bilinear": {"score": rg.Bilinear(normal(H, D, D))},
    "additive": {"score": rg.Additive(normal(D))},
    "additive, one weight per head": {"score": rg.Additive(normal(H, D))},
    "alibi and relative": {"bias": rg.alibi(H) + rg.relative(normal(5, H)), "mask": rg.causal()},
    "t5": {"bias": rg.t5(normal(8, H), max_distance=6), "offset": [2, -1]},
    "two dense biases": {"bias": rg.dense_bias(normal(Q, 1)) + rg.dense_bias(normal(2, 1, 1, K))},
    "shaw": {"bias": rg.shaw(normal(5, D), normal(5, E)), "offset": [2, -1]},
    "sink": {"sink": normal(H), "mask": rg.padding([4, 9])},
}


def lowered(tensors: list[Tensor], attend: rg.Attention) -> tuple[LoweredTensors, LoweredConstants, Tensor | None]:
    x, shaw, fixed = prepare(attend.problem(*tensors, return_lse=True), *tensors, None)
    return x, fixed, None if shaw is None else shaw.values


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_the_lowered_call_has_the_results_of_the_description(name: str) -> None:
    tensors, attend = call(**DESCRIPTIONS[name])
    x, fixed, values = lowered(tensors, attend)
    output, lse, *mass = lowering.attend_lowered(x, fixed, save=False)
    if values is not None:
        output = output + mass[0] @ values
    expected, expected_lse = attend(*tensors, engine="reference", return_lse=True)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_a_plain_dot_product_is_passed_through() -> None:
    tensors, attend = call(mask=rg.causal())
    x, shaw, scale = lowering.lower(attend.problem(*tensors), *tensors)
    assert [a is b for a, b in zip(x[:3], tensors, strict=True)] == [True] * 3
    assert x[3:] == (None,) * 5
    assert (shaw, scale) == (None, D**-0.5)


def test_biases_by_distance_are_added_to_one_vector() -> None:
    tensors, attend = call(bias=rg.alibi(H) + rg.relative(normal(5, 1)))
    x, _, _ = lowering.lower(attend.problem(*tensors), *tensors)
    assert x.diagonal is not None
    assert x.diagonal.shape == (1, H, 1, Q + K - 1)
    assert x.row_table is None
    assert x.bias is None


@pytest.mark.parametrize("head", [None, 0, 3])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_part_has_the_tensors_of_its_head_and_rows(name: str, head: int | None) -> None:
    """The logits of the part are those of the whole, computed from the lowered tensors alone."""
    tensors, attend = call(**DESCRIPTIONS[name] | {"mask": None})
    x, fixed, _ = lowered(tensors, attend)
    rows = torch.arange(2, 5)
    part, own = lowering.select_part(x, fixed, head, rows)
    heads = slice(None) if head is None else slice(head, head + 1)
    torch.testing.assert_close(logits(part, own, len(rows)), logits(x, fixed, Q)[:, heads, 2:5])


def logits(x: LoweredTensors, fixed: LoweredConstants, count: int) -> Tensor:
    """Scores plus biases of lowered tensors with `count` rows."""
    repeats = x.query.shape[1] // x.key.shape[1]
    key = x.key.repeat_interleave(repeats, 1)
    if x.weight is not None:
        total = ((x.query.unsqueeze(3) + key.unsqueeze(2)).tanh() * x.weight.unsqueeze(3)).sum(-1)
    else:
        total = x.query @ key.mT * fixed.numbers[0]
    i, j = torch.arange(count)[:, None], torch.arange(K)
    if x.diagonal is not None:
        total = total + x.diagonal[:, :, 0][..., j - i + count - 1]
    if x.row_table is not None:
        assert fixed.offset is not None
        radius = fixed.sizes[0]
        away = (j - i - fixed.offset.reshape(-1, 1, 1, 1)).clamp(-radius, radius) + radius
        total = total + x.row_table.gather(-1, away.expand(*x.row_table.shape[:3], K))
    if x.bias is not None:
        total = total + x.bias
    return total if x.sink is None else torch.cat([total, x.sink.reshape(1, -1, 1, 1).expand(*total.shape[:3], 1)], -1)
