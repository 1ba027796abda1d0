"""The loss of a large vocabulary is torch's, its gradients too, whatever the number of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.nn import loss as module
from regard.nn import token_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 19])
def test_loss_and_gradients_are_those_of_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, count: int, biased: bool, smoothing: float
) -> None:
    monkeypatch.setattr(module, "ROWS", 8)
    torch.manual_seed(count)
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (count, 13))
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True) if biased else None
    targets = torch.randint(0, 13, (count,))
    ours = token_loss(hidden, weight, targets, bias=bias, smoothing=smoothing)
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = [hidden, weight, *([bias] if bias is not None else [])]
    for mine, other in zip(torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * theirs, leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_logits_that_overflow_an_exponential_and_no_tokens_are_no_trouble() -> None:
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    assert token_loss(hidden, weight, torch.tensor([0, 2])).item() == 0
    assert token_loss(hidden[:0], weight, torch.tensor([], dtype=torch.long)).item() == 0


def test_without_gradients_nothing_is_kept_for_them() -> None:
    hidden, weight = torch.randn(4, 8), torch.nn.Parameter(torch.randn(9, 8))
    with torch.no_grad():
        assert not token_loss(hidden, weight, torch.arange(4)).requires_grad
    assert token_loss(hidden, weight, torch.arange(4)).requires_grad


def test_under_autocast_the_loss_is_computed_in_the_precision_of_the_weights() -> None:
    hidden, weight, targets = torch.randn(4, 8), torch.nn.Parameter(torch.randn(9, 8)), torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = token_loss(hidden.bfloat16(), weight, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    torch.testing.assert_close(
        loss, F.cross_entropy(hidden.bfloat16().float() @ weight.T, targets, reduction="sum"), rtol=1e-5, atol=1e-5
    )


def test_shapes_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 8\).*flatten batches first"):
        token_loss(torch.randn(2, 3, 8), torch.randn(9, 8), torch.zeros(2, 3, dtype=torch.long))
