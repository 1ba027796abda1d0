"""Mixtures of experts against a sum over all experts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.nn import Experts


def expected(layer: Experts, x: Tensor) -> Tensor:
    """Token by token, with the weights of each expert written out."""
    rows = []
    for token in x.flatten(0, -2):
        logits = layer.router.weight @ token + (0 if layer.router.bias is None else layer.router.bias)
        best = logits.argsort(descending=True)[: layer.per_token]
        total = torch.zeros_like(token)
        for share, n in zip(logits[best].softmax(0), best, strict=True):
            hidden = layer.up[n] @ token + (0 if layer.up_bias is None else layer.up_bias[n])
            gate, up = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
            if layer.limit is not None:
                gate, up = gate.minimum(torch.tensor(layer.limit)), up.clamp(-layer.limit, layer.limit) + 1
            out = layer.output[n] @ (F.silu(gate) * up)
            total = total + share * (out + (0 if layer.output_bias is None else layer.output_bias[n]))
        rows.append(total)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize(("bias", "limit", "per_token"), [(False, None, 2), (True, 0.5, 3), (True, None, 1)])
def test_experts_and_their_gradients_equal_a_sum_over_tokens(bias: bool, limit: float | None, per_token: int) -> None:
    torch.manual_seed(0)
    layer = Experts(6, 10, count=3, per_token=per_token, limit=limit, bias=bias).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    output, correct = layer(x), expected(layer, x)
    torch.testing.assert_close(output, correct)
    inputs, upstream = (x, *layer.parameters()), torch.randn_like(correct)
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (output, correct)), strict=True):
        torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), correct)


def test_experts_without_tokens_and_wrong_counts() -> None:
    assert Experts(6, 10, count=3, per_token=1)(torch.zeros(0, 6)).shape == (0, 6)
    with pytest.raises(ValueError, match="per_token must be between 1 and the 2 experts, got 3"):
        Experts(6, 10, count=2, per_token=3)
    base = {"vocabulary": 9, "d_model": 8, "layers": 1, "heads": 2, "d_hidden": 8}
    with pytest.raises(ValueError, match="set gated=True"):
        rg.models.LanguageModel(rg.models.LanguageConfig(**base, experts=2))
    with pytest.raises(ValueError, match="gate_limit is an option of experts"):
        rg.models.LanguageModel(rg.models.LanguageConfig(**base, gate_limit=2.0))
    with pytest.raises(ValueError, match="rotary and layer_rotary are alternatives"):
        rg.models.LanguageModel(
            rg.models.LanguageConfig(**base, rotary=rg.nn.Rotary(), layer_rotary=(rg.nn.Rotary(), None))
        )


def test_the_initial_output_of_a_deep_mixture_has_unit_variance() -> None:
    torch.manual_seed(0)
    config = rg.models.LanguageConfig(
        50, 64, 16, 4, 64, norm="rms", gated=True, bias=False, rotary=rg.nn.Rotary(), experts=4, experts_per_token=2
    )
    one = rg.models.LanguageConfig(50, 64, 16, 4, 64, norm="rms", gated=True, bias=False, rotary=rg.nn.Rotary())
    for each in (config, one):
        model = rg.models.LanguageModel(each)
        x = torch.randn(2, 20, 64)
        for layer in model.stack.layers:
            x = layer(x, mask=rg.causal())
        assert 0.8 < float(x.detach().std()) < 1.6


def route(logits: list[float], correction: list[float], routing: rg.nn.Routing, per_token: int) -> dict[int, float]:
    """The shares of the chosen experts of one token."""
    if routing.scores == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked, size = [a + b for a, b in zip(scores, correction, strict=True)], len(logits) // routing.groups
    groups = [ranked[n * size : (n + 1) * size] for n in range(routing.groups)]
    best = [max(group) if routing.group_score == "max" else sum(sorted(group)[-2:]) for group in groups]
    kept = sorted(range(routing.groups), key=lambda n: -best[n])[: routing.groups_per_token]
    among = [n for n in range(len(logits)) if n // size in kept]
    chosen = sorted(among, key=lambda n: -ranked[n])[:per_token]
    total = sum(scores[n] for n in chosen) if routing.normalize else 1.0
    return {n: scores[n] / total * routing.scale for n in chosen}


@pytest.mark.parametrize(
    "routing",
    [
        rg.nn.Routing("softmax"),
        rg.nn.Routing("softmax", normalize=True, scale=2.5),
        rg.nn.Routing("softmax", groups=4, groups_per_token=2),
        rg.nn.Routing("sigmoid", True, 1.5, 4, 2, "top2", corrected=True),
        rg.nn.Routing("sigmoid", corrected=True),
    ],
)
def test_routing_equals_its_definition(routing: rg.nn.Routing) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 12, dtype=torch.float64)
    correction = 0.5 * torch.randn(12, dtype=torch.float64) if routing.corrected else None
    chosen, shares = routing(logits, 4, correction)
    for row in range(50):
        expected = route(logits[row].tolist(), [0.0] * 12 if correction is None else correction.tolist(), routing, 4)
        actual = dict(zip(chosen[row].tolist(), shares[row].tolist(), strict=True))
        assert actual == pytest.approx(expected)


def test_shared_experts_are_added_with_a_gate() -> None:
    torch.manual_seed(0)
    shared, routing = rg.nn.GatedFeedForward(6, 8), rg.nn.Routing("softmax")
    layer = Experts(6, 10, count=4, per_token=2, routing=routing, shared=shared, shared_gate=True)
    x = torch.randn(3, 6)
    logits = x @ layer.router.weight.T
    parts = [sum(logits[n].softmax(0)[k] * layer.expert(int(k), x[n : n + 1])[0] for k in logits[n].topk(2).indices)
             for n in range(3)]  # fmt: skip
    gate = torch.sigmoid(x @ layer.shared_gate.weight.T)
    torch.testing.assert_close(layer(x), torch.stack(parts) + gate * shared(x))


def test_wrong_routings_raise() -> None:
    def build(routing: rg.nn.Routing, **options: object) -> None:
        Experts(6, 10, count=8, per_token=3, routing=routing, **options)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match='scores must be "chosen"'):
        build(rg.nn.Routing("other"))
    with pytest.raises(ValueError, match='scores="chosen" has no other options'):
        build(rg.nn.Routing(scale=2.0))
    with pytest.raises(ValueError, match="must be a multiple of groups"):
        build(rg.nn.Routing("softmax", groups=3))
    with pytest.raises(ValueError, match="are too few for per_token = 3"):
        build(rg.nn.Routing("softmax", groups=4))
    with pytest.raises(ValueError, match="shared_gate is an option of `shared`"):
        build(rg.nn.Routing(), shared_gate=True)
    base = {"vocabulary": 9, "d_model": 8, "layers": 1, "heads": 2, "d_hidden": 8}
    with pytest.raises(ValueError, match="d_shared and routing is an option of experts"):
        rg.models.LanguageModel(rg.models.LanguageConfig(**base, d_shared=4, routing=rg.nn.Routing("softmax")))
    with pytest.raises(ValueError, match="delta_layers needs the sizes"):
        rg.models.LanguageModel(rg.models.LanguageConfig(**base, delta_layers=(True,)))
    latent = rg.models.LatentSizes(4, 2, 4)
    with pytest.raises(ValueError, match="no qk_norm and no output_gate"):
        rg.models.LanguageModel(rg.models.LanguageConfig(**base, latent=latent, qk_norm=True))
