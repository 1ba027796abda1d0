"""Few queries over many keys: the keys are split into parts, which are computed in parallel and combined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard as rg
from regard.engines import triton
from regard.engines.triton import attention
from tests.engines.calls import normal

pytestmark = pytest.mark.skipif(
    bool(triton.why_missing()) or not triton.is_interpreted(), reason="needs triton and TRITON_INTERPRET=1"
)
B, H, G, K, D, E = 2, 2, 1, 560, 8, 5
SOME = rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h + b) % 5 < 2)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": rg.causal()},
    "lengths that leave parts without keys": {"mask": rg.padding([3, 400]), "sink": torch.tensor([0.5, -0.5])},
    "tiles and alibi": {"mask": SOME, "bias": rg.alibi(H)},
    "dropout": {"dropout": 0.3},
    "empty rows": {"mask": rg.padding([0, 560])},
}


FEW = [(name, 1, torch.float32) for name in CASES]
FEW += [("causal", 3, torch.float32), ("tiles and alibi", 16, torch.float16), ("causal", 1, torch.bfloat16)]


@pytest.mark.parametrize(("name", "Q", "dtype"), FEW)
def test_parts_are_combined(name: str, Q: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    split = attention.forward_in_parts
    monkeypatch.setattr(attention, "forward_in_parts", lambda *given: parts.append(given[-1]) or split(*given))
    query, key, value = normal(B, H, Q, D, seed=1), normal(B, G, K, D, seed=2), normal(B, G, K, E, seed=3)
    given = [x.to(dtype) for x in (query, key, value)]
    torch.manual_seed(1)
    ours = rg.attention(*given, engine="triton", return_lse=True, **CASES[name])
    torch.manual_seed(1)
    exact = rg.attention(*(x.double() for x in given), engine="reference", return_lse=True, **CASES[name])
    assert max(parts, default=1) > 1
    for one, other in zip(ours, exact, strict=True):
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_gradients_follow_from_combined_results() -> None:
    query = normal(1, 2, 2, D, seed=1, dtype=torch.float32).requires_grad_()
    key, value = (normal(1, 2, K, D, seed=n, dtype=torch.float32).requires_grad_() for n in (2, 3))
    actual = []
    for engine in ("triton", "reference"):
        output = rg.attention(query, key, value, mask=rg.causal(), engine=engine)
        actual.append(torch.autograd.grad(output.square().sum(), (query, key, value)))
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_masked_value_that_is_not_finite_stays_in_its_part() -> None:
    query, key, value = (normal(1, 1, n, D, seed=n, dtype=torch.float32) for n in (1, K, K))
    value = value.clone()
    clean = rg.attention(query, key, value, mask=rg.padding([500]), engine="triton")
    value[:, :, 520:] = float("nan")
    torch.testing.assert_close(rg.attention(query, key, value, mask=rg.padding([500]), engine="triton"), clean)
    value[:, :, 7] = float("nan")
    assert rg.attention(query, key, value, mask=rg.padding([500]), engine="triton").isnan().all()
