"""Tensors and values of checkpoints: missing, unknown, of wrong shapes, and of older releases."""

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
        tmp_path,
        lambda tensors: {("odd" if name == "transformer.ln_f.bias" else name): x for name, x in tensors.items()},
    )
    with pytest.raises(ValueError, match=r"lacks transformer\.ln_f\.bias and has odd, which the model does not have"):
        rg.load(tmp_path)


def test_wrong_shapes_are_listed_with_the_expected_ones(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    edit(tmp_path, n_positions=30)
    with pytest.raises(ValueError, match=r"transformer\.wpe\.weight is \(20, 16\), not \(30, 16\)"):
        rg.load(tmp_path)


def test_a_tied_tensor_may_be_stored_under_both_names_if_equal(tmp_path: Path) -> None:
    model = small()
    rg.save(model, tmp_path)
    table = "transformer.wte.weight"
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[table].clone()})
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != table})
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda tensors: tensors | {table: tensors["lm_head.weight"] + 1})
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
        ("bert", {"model_type": "mamba"}, "model_type = 'mamba' is not supported; .*supported: bert"),
        ("bert", {"hidden_size": None}, "must contain hidden_size"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
        ("deberta", {"share_att_key": False}, "DeBERTa without share_att_key is not supported"),
        ("deberta", {"pos_att_type": "c2p", "norm_rel_ebd": None}, "pos_att_type = c2p|p2c, norm_rel_ebd"),
        ("deberta", {"position_buckets": 8}, "position_buckets = 8 must be below the 8"),
        ("deberta", {"position_buckets": 1}, "span must be at least 2"),
        ("deberta", {"conv_kernel_size": 3}, "conv_kernel_size"),
        ("deberta", {"embedding_size": 16}, "embedding_size = hidden_size"),
        ("modernbert-mlm", {"decoder_bias": False}, "decoder_bias"),
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
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 4}}, "needs short_factor"),
        (
            "phi3-short",
            {"rope_parameters": {"rope_type": "su", "long_factor": [1.0] * 4, "short_factor": [1.0]}},
            "short_factor must have 4 factors, got 1",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("gpt-oss", {"sliding_window": 0}, "windows must be at least 1"),
        ("modernbert", {"local_attention": 1}, "windows must be at least 1"),
        ("gpt-oss", {"num_experts_per_tok": 9}, "per_token"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj"),
        ("t5", {"eos_token_id": [1, 2]}, "eos_token_id"),
        ("marian", {"decoder_ffn_dim": 64}, "encoder_ffn_dim = 48 and decoder_ffn_dim = 64 must be equal"),
        ("marian", {"bad_words_ids": [[1, 2]]}, "bad_words_ids"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("m2m100", {"pad_token_id": 0}, "pad_token_id"),
        ("vit", {"patch_size": [8, 4]}, "patch_size"),
        ("clip", {"vision_config": {"patch_size": [8, 4]}}, "vision_config: patch_size"),
        ("clip", {"text_config": {"hidden_size": "wide"}}, "text_config: hidden_size must be a whole number"),
        ("clip", {"text_config": []}, "text_config must be an object"),
        ("siglip", {"vision_config": {"vision_use_head": False}}, "vision_use_head"),
        ("siglip", {"text_config": {"projection_size": 7}}, "projection_size = 7"),
        ("detr", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("detr", {"use_timm_backbone": True, "backbone": "convnext"}, "backbone"),
    ],
)
def test_unsupported_values_raise(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    t.save_their_model(name, tmp_path)
    edit(tmp_path, **changes)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        rg.load(tmp_path)


def test_bert_with_the_names_of_the_first_release_loads(tmp_path: Path) -> None:
    t.save_their_model("bert-mlm", tmp_path)
    expected = rg.load(tmp_path)

    def to_older_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
               for name, tensor in tensors.items()}  # fmt: skip
        extra = {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.seq_relationship.bias": torch.zeros(2)}
        return old | extra | {"cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone()}

    rewrite(tmp_path, to_older_names)
    same(rg.load(tmp_path), expected)


def test_deberta_with_the_newer_names_of_its_head_loads(tmp_path: Path) -> None:
    t.save_their_model("deberta-mlm", tmp_path)
    expected, old = rg.load(tmp_path), "cls.predictions."

    def to_newer_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        new = {name.replace(f"{old}transform.", old).replace(old, "lm_predictions.lm_head."): x
               for name, x in tensors.items()}  # fmt: skip
        return {name: x for name, x in new.items() if "decoder" not in name}

    rewrite(tmp_path, to_newer_names)
    assert "lm_predictions.lm_head.dense.weight" in load_file(tmp_path / "model.safetensors")
    edit(tmp_path, legacy=False)
    same(rg.load(tmp_path), expected)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("bert", "bert.")])
def test_the_prefix_of_base_model_names_is_optional(name: str, prefix: str, tmp_path: Path) -> None:
    t.save_their_model(name, tmp_path)
    expected = rg.load(tmp_path)

    def toggle_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {
            key.removeprefix(prefix) if key.startswith(prefix) else prefix + key: x for key, x in tensors.items()
        }
        return tensors | ({"h.0.attn.bias": torch.ones(1, 1, 40, 40).tril()} if name == "gpt2" else {})

    rewrite(tmp_path, toggle_prefix)
    same(rg.load(tmp_path), expected)


def test_detr_with_the_names_of_timm_loads(tmp_path: Path) -> None:
    t.save_their_model("detr", tmp_path)
    expected = rg.load(tmp_path)

    def to_timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {}
        for name, tensor in tensors.items():
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

    rewrite(tmp_path, to_timm_names)
    assert "model.backbone.conv_encoder.model.layer1.0.bn2.weight" in load_file(tmp_path / "model.safetensors")
    same(rg.load(tmp_path), expected)


def test_rotary_settings_are_read_under_older_names(tmp_path: Path) -> None:
    t.save_their_model("llama-yarn", tmp_path)
    expected = rg.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    base = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": base, "rope_scaling": scaling}))
    assert rg.load(tmp_path).config == expected.config


def test_stored_position_tables_that_differ_raise(tmp_path: Path) -> None:
    other = t.their_model("marian")
    sides = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    tables = {name: other.state_dict()[name].clone() for name in sides}
    other.save_pretrained(tmp_path)
    model = rg.load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | tables)
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda tensors: tensors | {sides[1]: tables[sides[1]] + 0.1})
    with pytest.raises(ValueError, match=r"model\.decoder\.embed_positions\.weight is not.*up to 0\.1"):
        rg.load(tmp_path)


@pytest.mark.parametrize("name", ["vit", "detr"])
def test_state_dict_names_of_transformers_are_read(name: str, tmp_path: Path) -> None:
    t.their_model(name).save_pretrained(tmp_path)
    model = rg.load(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: x.contiguous() for key, x in t.their_model(name).state_dict().items()})
    same(rg.load(tmp_path), model)
