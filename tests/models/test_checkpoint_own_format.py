"""regard's own format, and the choice between it and the formats of other libraries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard as rg
from regard.models import (
    Detr,
    DetrConfig,
    LanguageConfig,
    LanguageModel,
    ResNetConfig,
    SentenceEmbedder,
    TextConfig,
    TextEncoder,
    Transformer,
    TransformerConfig,
)
from tests.models.checkpoint_folders import IDS, SMALL, edit, same, small

GROUPED = ResNetConfig(stem=32, widths=(32, 64), depths=(1, 1), bottleneck=False, norm="group")
OWN: list[tuple[nn.Module, str]] = [
    (Transformer(TransformerConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_hidden=32)), "Transformer"),
    (LanguageModel(LanguageConfig(50, 16, 2, 2, 32, arrangement="post", windows=(3, None))), "LanguageModel"),
    (
        LanguageModel(LanguageConfig(
            50, 16, 2, 2, 32, qk_norm=True, norm="rms", rotary=rg.nn.Rotary(scaling=rg.positions.Linear(2.0)))),
        "LanguageModel",
    ),
    (TextEncoder(TextConfig(50, 16, 2, 2, 32, arrangement="pre")), "TextEncoder"),
    (SentenceEmbedder(TextConfig(50, 16, 2, 2, 32, pooling="attention")), "SentenceEmbedder"),
    (Detr(DetrConfig(3, 4, 16, 1, 2, 32, backbone=GROUPED)), "Detr"),
    (Detr(DetrConfig(3, 4, 16, 1, 2, 32, backbone=replace(GROUPED, norm="batch"))), "Detr"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), OWN, ids=[f"{name}{n}" for n, (_, name) in enumerate(OWN)])
def test_own_format_round_trip(model: Any, name: str, tmp_path: Path) -> None:
    rg.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("regard", [name])
    again = rg.load(tmp_path)
    assert type(again) is type(model)
    assert again.config == model.config
    same(again, model)


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["Linear"]}, {"architectures": ["load"]}, {"architectures": []}, {"config": 3},
     {"config": {"is": "Popen", "args": "x"}}, {"config": {"is": "LanguageConfig", "odd": 1}}],
)  # fmt: skip
def test_own_format_refers_to_models_and_configurations_only(changes: dict[str, Any], tmp_path: Path) -> None:
    rg.save(OWN[1][0], tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json|LanguageModel|int"):
        rg.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (SMALL, "GPT2LMHeadModel"),
        (LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", rotary=rg.nn.Rotary()),
         "LlamaForCausalLM"),
        (LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", rotary=rg.nn.Rotary(),
                        windows=(4,)), "MistralForCausalLM"),
        (LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", qkv_bias=True,
                        tied=False, rotary=rg.nn.Rotary(50.0, scaling=rg.positions.Yarn(2.0, 64))), "Qwen2ForCausalLM"),
    ],
)  # fmt: skip
def test_a_model_is_saved_as_the_family_that_can_represent_it(
    config: LanguageConfig, architecture: str, tmp_path: Path
) -> None:
    import transformers

    model = small(config)
    rg.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    assert rg.load(tmp_path).config == config
    other = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), other(IDS).logits, rtol=1e-4, atol=1e-4)


def test_partial_rotary_is_not_saved_as_a_family_with_full_rotary(tmp_path: Path) -> None:
    rotary = rg.nn.Rotary(d_rotary=4)
    config = LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", rotary=rotary)
    model = small(config)
    rg.save(model, tmp_path)
    assert "LlamaForCausalLM" not in (tmp_path / "config.json").read_text()
    back = rg.load(tmp_path)
    assert back.config == config
    torch.testing.assert_close(back(IDS), model(IDS), rtol=0, atol=0)


def test_other_modules_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"one of regard\.models"):
        rg.save(nn.Linear(2, 2), tmp_path)
