"""A capture names the modules that mix tokens and are not in the record."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from regard.integrations.torch import replace
from regard.view import capture
from regard.view.document import document

SIZES: dict[str, Any] = {"vocabulary": 60, "d_model": 32, "layers": 4, "heads": 4, "d_hidden": 48}


class Both(nn.Module):
    """Attention of regard, and another module or function next to it."""

    def __init__(self, other: nn.Module | rg.LinearAttention | None = None) -> None:
        super().__init__()
        self.first, self.other = rg.nn.MultiHeadAttention(32, heads=4), other

    def forward(self, x: Tensor) -> Tensor:
        q, out = x[:, None], self.first(x)
        if self.other is None:
            return out + F.scaled_dot_product_attention(q, q, q)[:, 0]
        if isinstance(self.other, nn.MultiheadAttention):
            return out + self.other(x, x, x)[0]
        return out + (self.other(x) if isinstance(self.other, nn.Module) else self.other(q, q, q)[:, 0])


class Pool(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize(
    ("other", "name"),
    [(None, "Both"), (rg.LinearAttention(), "Both"), (rg.nn.DeltaNet(32, heads=2), "other"),
     (nn.MultiheadAttention(32, 4, batch_first=True), "other")],
    ids=["torch's function", "LinearAttention", "DeltaNet", "nn.MultiheadAttention"],
)  # fmt: skip
def test_what_is_not_captured_is_named(other: nn.Module | None, name: str) -> None:
    model = Both(other).eval()
    with pytest.warns(UserWarning, match=f"not in the record: {name}$"), capture(model) as record:
        model(torch.randn(2, 5, 32))
    assert record.uncaptured == (name,)
    assert [captured.name for captured in record.attentions] == ["first"]


def test_models_without_such_modules_give_no_warning() -> None:
    text = rg.models.TextEncoder(rg.models.TextConfig(**SIZES)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture(text) as record:
            text(torch.tensor([[5, 6, 7]]))
        replace(layer := nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval())
        with capture(layer):
            layer(torch.randn(1, 5, 32))
    assert record.uncaptured == ()
    assert document(record).about["uncaptured"] == ""


def test_rollout_needs_every_layer_of_the_stack() -> None:
    delta = rg.models.DeltaSizes(heads=2, value_heads=4, d_head=8, d_value=8)
    config = rg.models.LanguageConfig(**SIZES, delta=delta, delta_layers=(True, False))
    model = rg.models.LanguageModel(config).eval()
    with pytest.warns(UserWarning, match="not in the record"), capture(model) as record:
        model(torch.tensor([[5, 6, 7]]))
    assert record.uncaptured == ("stack.layers.0.attention", "stack.layers.2.attention")
    with pytest.raises(ValueError, match=r"rollout needs the attention of every layer, .* stack.layers.0.attention"):
        record.rollout()
    about = document(record).about
    assert about["rollout"] is None
    assert about["uncaptured"] == "stack.layers.0.attention, stack.layers.2.attention"


def test_attention_outside_of_the_stack_does_not_hide_the_rollout() -> None:
    model = nn.Sequential(OrderedDict({"layers": nn.Sequential(Both(nn.Identity())), "pool": Pool(32, 4)}))
    with pytest.warns(UserWarning, match="not in the record: pool$"), capture(model) as record:
        model(torch.randn(2, 5, 32))
    assert record.rollout().shape == (5, 5)


def test_layers_of_transformers_models_are_named() -> None:
    hf = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    config = hf.Lfm2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model = hf.Lfm2ForCausalLM._from_config(config, attn_implementation="regard").eval()
    with pytest.warns(UserWarning, match=r"not in the record: model.layers.0.conv$"), capture(model):
        model(torch.tensor([[5, 6, 7]]))
