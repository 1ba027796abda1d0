"""Properties of dropout and determinism.

Dropped weights are observed directly: with equal logits and an identity as values, the output is the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.check.case import Case
from regard.check.oracle import error
from regard.check.property import Attend, conformance_property

MANY = (Case(Q=64, K=16, D=16), Case(B=2, H=4, Q=64, K=32, D=32))


@conformance_property(cases=(Case(), Case(B=2, H=2, Q=33, K=65, D=8), Case(H=2, Q=128, K=300, D=16)))
def determinism(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The same call after the same seed gives the same bits, so that runs and bugs are reproducible."""
    torch.manual_seed(1)
    first = attend(q, k, v)
    for _ in range(5):
        torch.manual_seed(1)
        again = attend(q, k, v)
        assert torch.equal(first, again), f"the same call differs by {error(again, first):.3g} roundings"


@conformance_property(cases=(Case(), Case(B=2, H=2, Q=33, K=65, D=8)))
def dropout_off(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Without dropout, the output does not depend on the seed, and the generator does not advance."""
    torch.manual_seed(1)
    first, state = attend(q, k, v), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state()), "a call without dropout draws from torch's generator"
    torch.manual_seed(2)
    assert torch.equal(first, attend(q, k, v)), "a call without dropout depends on the seed"


@conformance_property("dropout", cases=MANY, shrinks=False)
def dropout_rate(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A dropout of p sets the fraction p of the weights to 0, not 1 - p, and not whole rows."""
    v = torch.eye(k.shape[2]).expand_as(v)
    dropped = attend(torch.zeros_like(q), k, v, dropout=0.25) == 0
    share, spread = dropped.double().mean().item(), (0.25 * 0.75 / dropped.numel()) ** 0.5
    assert abs(share - 0.25) < 5 * spread, f"dropout=0.25 drops {share:.1%} of {dropped.numel()} weights"


@conformance_property("dropout", cases=MANY, shrinks=False)
def dropout_rescaling(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Kept weights are divided by 1 - p, so that the mean is the same as without dropout."""
    v = torch.eye(k.shape[2]).expand_as(v)
    weights = attend(torch.zeros_like(q), k, v, dropout=0.25) * k.shape[2]
    kept = weights[weights != 0]
    far = error(kept, torch.full_like(kept, 1 / 0.75))
    assert far < 32, (
        f"with dropout=0.25 kept weights are multiplied by {kept.mean().item():.5g}, expected {1 / 0.75:.5g}"
    )


@conformance_property(
    "dropout",
    cases=(Case(H=2, Q=64, K=16, D=16), Case(B=2, Q=64, K=16, D=16), Case(B=2, H=3, Q=64, K=32, D=32)),
    shrinks=False,
)
def dropout_independence(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Heads, batch rows, queries and keys are dropped independently: a shared pattern regularises less."""
    v = torch.eye(k.shape[2]).expand_as(v)
    kept = (attend(torch.zeros_like(q), k, v, dropout=0.5) != 0).double() * 2 - 1  # independent signs
    for axis, name in enumerate(("batch rows", "heads", "queries", "keys")):
        if kept.shape[axis] > 1:
            alike = (kept * kept.roll(1, axis)).mean().item()
            spread = (2 / kept.numel()) ** 0.5  # a pair may be counted twice
            assert abs(alike) < 6 * spread, (
                f"the dropout patterns of neighbouring {name} are correlated by {alike:.2f}, expected 0"
            )


@conformance_property("dropout", cases=MANY, shrinks=False)
def dropout_seed(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """torch.manual_seed reproduces dropout, and consecutive calls differ."""
    torch.manual_seed(3)
    first, second = attend(q, k, v, dropout=0.5), attend(q, k, v, dropout=0.5)
    assert not torch.equal(first, second), "two consecutive calls drop the same weights"
    torch.manual_seed(3)
    assert torch.equal(first, attend(q, k, v, dropout=0.5)), "the same seed drops other weights"


@conformance_property("dropout", "gradients", cases=(Case(Q=8, K=8, D=4), Case(H=2, Q=33, K=65, D=8)))
def dropout_gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The backward pass drops the same weights as the forward pass: sum(v * grad) equals sum(output)."""
    v = v.requires_grad_()
    out = attend(q, k, v, dropout=0.5)
    weight = torch.linspace(-1.0, 2.0, out.numel()).reshape(out.shape)
    (grad,) = torch.autograd.grad((out * weight).sum(), v)
    through, along = (grad * v).sum().item(), (out * weight).sum().item()
    assert abs(through - along) < 1e-3 * (out * weight).abs().sum(), (
        f"sum(v * grad) is {through:.5g}, sum(output) {along:.5g}"
    )
