"""Mixtures of experts against a sum over all experts."""

from __future__ import annotations

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
