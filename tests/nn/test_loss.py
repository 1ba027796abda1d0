"""token_loss and its gradients match torch's cross entropy for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn import loss as module
from regard.nn import token_loss
from regard.nn.loss import restricted_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 19])
def test_loss_and_gradients_match_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, count: int, biased: bool, smoothing: float
) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", 8)
    torch.manual_seed(count)
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (count, 13))
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True) if biased else None
    targets = torch.randint(0, 13, (count,))
    ours = token_loss(hidden, weight, targets, bias=bias, smoothing=smoothing)
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = [hidden, weight, *([bias] if bias is not None else [])]
    for actual, other in zip(
        torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * theirs, leaves), strict=True
    ):
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_many_tokens_are_as_exact_as_in_torch(dtype: torch.dtype) -> None:
    """Loss and gradients of a mean over 60,000 tokens, whose sum overflows half precision."""
    torch.manual_seed(0)
    count = 60_000
    hidden, weight, bias = torch.randn(count, 8).to(dtype), torch.randn(40, 8).to(dtype), torch.randn(40).to(dtype)
    targets = torch.randint(0, 40, (count,))

    def errors(loss: Callable[..., Tensor]) -> list[float]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        actual = loss(*leaves)
        gradients = torch.autograd.grad(actual / count, leaves)
        exact = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
        expected = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
        pairs = zip((actual, *gradients), (expected, *torch.autograd.grad(expected / count, exact)), strict=True)
        return [
            float((ours.detach().double() - right.detach()).norm() / right.detach().norm()) for ours, right in pairs
        ]

    ours = errors(lambda *x: token_loss(*x[:2], targets, bias=x[2]))
    theirs = errors(lambda *x: F.cross_entropy(F.linear(*x), targets, reduction="sum"))
    assert ours[0] < 1e-3
    assert all(actual < max(1.2 * other, 1e-3) for actual, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softcapped_logits_match_cross_entropy(monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    torch.manual_seed(0)
    leaves = [torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (9, 13)]
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True)
    targets, leaves = torch.randint(0, 13, (9,)), [*leaves, bias]
    ours = token_loss(*leaves[:2], targets, bias=bias, smoothing=smoothing, softcap=1.5)
    capped = 1.5 * torch.tanh(F.linear(*leaves) / 1.5)
    theirs = F.cross_entropy(capped, targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for actual, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)


def test_target_minus_100_is_ignored_as_in_torch() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (6, 9)]
    targets = torch.tensor([3, -100, 8, -100, 0, 1])
    ours = token_loss(*leaves, targets, smoothing=0.1)
    theirs = F.cross_entropy(F.linear(*leaves), targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    for actual, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(actual, other)
    assert token_loss(*leaves, torch.full((6,), -100)).item() == 0


@pytest.mark.parametrize("wrong", [-1, 9])
def test_a_target_outside_the_vocabulary_raises(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"0 ... 8.*got {wrong}"):
        token_loss(torch.randn(2, 5), torch.randn(9, 5), torch.tensor([3, wrong]))


def test_hidden_states_wider_than_the_weights_are_not_rounded() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(9, 8), torch.randn(5, 8).bfloat16(), torch.randint(0, 5, (9,))
    expected = F.cross_entropy(hidden @ weight.float().T, targets, reduction="sum")
    torch.testing.assert_close(token_loss(hidden, weight, targets), expected)


def test_large_logits_and_empty_inputs_are_supported() -> None:
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    assert token_loss(hidden, weight, torch.tensor([0, 2])).item() == 0
    assert token_loss(hidden[:0], weight, torch.tensor([], dtype=torch.long)).item() == 0


def test_nothing_is_saved_without_gradients() -> None:
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


def test_wrong_shapes_raise() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 8\).*flatten batches first"):
        token_loss(torch.randn(2, 3, 8), torch.randn(9, 8), torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_restricted_loss_ignores_classes_that_are_not_allowed(smoothing: float) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 9, dtype=torch.float64, requires_grad=True), torch.randint(0, 9, (6,))
    allowed = (torch.rand(6, 9) < 0.5).index_put((torch.arange(6), targets), torch.tensor(True))
    loss, right = restricted_loss(logits, targets, allowed, smoothing=smoothing), torch.zeros(()).double()
    for row, target, classes in zip(logits, targets, allowed, strict=True):
        place = classes[:target].sum()[None]
        right = right + F.cross_entropy(row[classes][None], place, label_smoothing=smoothing)
    torch.testing.assert_close(loss, right)
    for actual, other in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(right, logits), strict=True):
        torch.testing.assert_close(actual, other)


def call(loss: Callable[..., Tensor], ignored: bool = True) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    targets = torch.tensor([3, -100 if ignored else 0, 12, 0, -100 if ignored else 7])

    def called(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if loss is token_loss:
            return token_loss(hidden, weight, targets, bias=bias, smoothing=0.1, softcap=3.0)
        logits = 3 * (F.linear(hidden, weight, bias) / 3).tanh()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)

    return called


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (13, 4), (13,))]


def test_a_penalty_on_the_gradient_is_differentiated() -> None:
    """A gradient penalty needs second derivatives, whose loss would otherwise go unnoticed."""
    results = []
    for loss in (token_loss, F.cross_entropy):
        inputs = tensors()
        total = call(loss)(*inputs)
        first = torch.autograd.grad(total, inputs, create_graph=True)
        total = total + sum(grad.square().sum() for grad in first)
        results.append(torch.autograd.grad(total, inputs))
    for actual, other in zip(*results, strict=True):
        torch.testing.assert_close(actual, other)


def test_forward_mode_and_transforms_match_cross_entropy() -> None:
    inputs, directions = [x.detach() for x in tensors()], [torch.randn_like(x) for x in tensors()]
    for transform in (
        lambda f: torch.func.jvp(f, tuple(inputs), tuple(directions))[1],
        lambda f: torch.func.grad(f, (0, 1, 2))(*inputs),
        lambda f: torch.vmap(f, (0, None, None))(torch.stack([inputs[0], 2 * inputs[0]]), *inputs[1:]),
        lambda f: torch.func.hessian(f)(*inputs),
    ):
        torch.testing.assert_close(transform(call(token_loss)), transform(call(F.cross_entropy)))


@pytest.mark.parametrize("ignored", [False, True])
def test_targets_are_ignored_when_compiled(ignored: bool) -> None:
    torch._dynamo.reset()
    inputs = tensors()
    ours = torch.compile(call(token_loss, ignored), backend="aot_eager")(*inputs)
    theirs = call(F.cross_entropy, ignored)(*inputs)
    torch.testing.assert_close(ours, theirs)
    for actual, other in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        torch.testing.assert_close(actual, other)
