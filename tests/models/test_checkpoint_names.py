"""Tensors and values of a checkpoint: missing, unknown, of other shapes; and those of older releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import regard as rg
from tests.models import transformers_models as t
from tests.models.checkpoint_folders import edit, rewrite, same, small


def test_missing_and_unknown_tensors_are_listed(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    rewrite(
        tmp_path, lambda held: {("odd" if name == "transformer.ln_f.bias" else name): x for name, x in held.items()}
    )
    with pytest.raises(ValueError, match=r"lacks transformer\.ln_f\.bias and has odd, which the model does not know"):
        rg.load(tmp_path)


def test_other_shapes_are_listed_with_both(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    edit(tmp_path, n_positions=30)
    with pytest.raises(ValueError, match=r"transformer\.wpe\.weight is \(20, 16\), not \(30, 16\)"):
        rg.load(tmp_path)


def test_a_tied_tensor_may_come_twice_and_under_either_name_but_not_with_two_values(tmp_path: Path) -> None:
    model = small()
    rg.save(model, tmp_path)
    table = "transformer.wte.weight"
    rewrite(tmp_path, lambda held: held | {"lm_head.weight": held[table].clone()})
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda held: {name: tensor for name, tensor in held.items() if name != table})
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda held: held | {table: held["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight and transformer\.wte\.weight must be equal"):
        rg.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"hidden_act": "mish"}, "hidden_act = 'mish' is not supported; supported are 'gelu'"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"architectures": ["BertForMultipleChoice"]}, "supported: BertModel, BertForMaskedLM"),
        ("bert", {"architectures": None}, "architectures"),
        ("bert", {"model_type": "mamba"}, "model_type = 'mamba' is not supported; supported: bert"),
        ("bert", {"hidden_size": None}, "must say hidden_size"),
        ("albert", {"inner_group_num": 2}, "inner_group_num"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("mistral", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "whole heads"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "whole heads",
        ),
        ("qwen2", {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_parameters.*rope_scaling.*differ"),
        ("gemma2", {"partial_rotary_factor": 0}, "partial_rotary_factor = 0"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "odd of rope_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj"),
        ("t5", {"eos_token_id": [1, 2]}, "eos_token_id"),
        ("marian", {"decoder_ffn_dim": 64}, "encoder_ffn_dim = 48 and decoder_ffn_dim = 64 must be equal"),
        ("marian", {"bad_words_ids": [[1, 2]]}, "bad_words_ids"),
        ("vit", {"patch_size": [8, 4]}, "patch_size"),
        ("detr", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("detr", {"use_timm_backbone": True, "backbone": "convnext"}, "backbone"),
    ],
)
def test_a_value_that_our_models_cannot_follow_is_an_error(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    t.stored(name, tmp_path)
    edit(tmp_path, **changes)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        rg.load(tmp_path)


def test_bert_with_the_first_release_s_names_loads(tmp_path: Path) -> None:
    t.stored("bert-mlm", tmp_path)
    expected = rg.load(tmp_path)

    def older(held: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
               for name, tensor in held.items()}  # fmt: skip
        extra = {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.seq_relationship.bias": torch.zeros(2)}
        return old | extra | {"cls.predictions.decoder.bias": held["cls.predictions.bias"].clone()}

    rewrite(tmp_path, older)
    same(rg.load(tmp_path), expected)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("bert", "bert.")])
def test_a_base_model_s_names_may_have_their_prefix_or_not(name: str, prefix: str, tmp_path: Path) -> None:
    t.stored(name, tmp_path)
    expected = rg.load(tmp_path)

    def turned(held: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {key.removeprefix(prefix) if key.startswith(prefix) else prefix + key: x for key, x in held.items()}
        return held | ({"h.0.attn.bias": torch.ones(1, 1, 40, 40).tril()} if name == "gpt2" else {})

    rewrite(tmp_path, turned)
    same(rg.load(tmp_path), expected)


def test_detr_with_the_names_of_timm_loads(tmp_path: Path) -> None:
    t.stored("detr", tmp_path)
    expected = rg.load(tmp_path)

    def timm(held: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {}
        for name, tensor in held.items():
            name = name.replace("embedder.embedder.convolution", "conv1").replace(
                "embedder.embedder.normalization", "bn1"
            )
            for n in range(4):
                name = name.replace(f"encoder.stages.{n}.layers", f"layer{n + 1}")
            for n in range(3):
                name = name.replace(f"layer.{n}.convolution", f"conv{n + 1}")
                name = name.replace(f"layer.{n}.normalization", f"bn{n + 1}")
            name = name.replace("shortcut.convolution", "downsample.0").replace(
                "shortcut.normalization", "downsample.1"
            )
            named[name] = tensor
        return named

    rewrite(tmp_path, timm)
    assert "model.backbone.conv_encoder.model.layer1.0.bn2.weight" in load_file(tmp_path / "model.safetensors")
    same(rg.load(tmp_path), expected)


def test_rotary_positions_are_read_under_the_older_names(tmp_path: Path) -> None:
    t.stored("llama-yarn", tmp_path)
    expected = rg.load(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    scaling = said.pop("rope_parameters")
    base = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(said | {"rope_theta": base, "rope_scaling": scaling}))
    assert rg.load(tmp_path).config == expected.config


def test_position_tables_that_the_model_would_not_compute_are_refused(tmp_path: Path) -> None:
    other = t.made("marian")
    sides = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    tables = {name: other.state_dict()[name].clone() for name in sides}
    other.save_pretrained(tmp_path)
    model = rg.load(tmp_path)
    rewrite(tmp_path, lambda held: held | tables)
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda held: held | {sides[1]: tables[sides[1]] + 0.1})
    with pytest.raises(ValueError, match=r"model\.decoder\.embed_positions\.weight is not.*up to 0\.1"):
        rg.load(tmp_path)


@pytest.mark.parametrize("name", ["vit", "detr"])
def test_the_names_that_transformers_has_in_memory_are_read(name: str, tmp_path: Path) -> None:
    t.made(name).save_pretrained(tmp_path)
    model = rg.load(tmp_path)
    rewrite(tmp_path, lambda held: {key: x.contiguous() for key, x in t.made(name).state_dict().items()})
    same(rg.load(tmp_path), model)
