"""Configurations of well-known checkpoints, from several releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
from regard.models import ResNetConfig, TextConfig, VisionConfig
from regard.models.checkpoints.families import FAMILIES, family_of
from tests.models import transformers_models as t

KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # content of config.json, and expected values of ours
    "all-mpnet-base-v2": (
        {"model_type": "mpnet", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
         "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
         "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "relative_attention_num_buckets": 32,
         "vocab_size": 30527},
        {"buckets": 32, "first_position": 2, "segments": 0, "positions": 514},
    ),
    "modernbert base": (
        {"model_type": "modernbert", "attention_bias": False, "attention_dropout": 0.0, "classifier_activation": "gelu",
         "classifier_bias": False, "classifier_pooling": "mean", "decoder_bias": True, "embedding_dropout": 0.0,
         "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu",
         "hidden_size": 768, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
         "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "norm_bias": False,
         "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "position_embedding_type": "absolute",
         "reference_compile": False, "tie_word_embeddings": True, "vocab_size": 50368},
        {"windows": (None, 64, 64) * 7 + (None,), "pooling": "mean", "norm": "layer_no_bias", "gated": True,
         "layer_rotary": (rg.nn.Rotary(160000.0), *(rg.nn.Rotary(10000.0),) * 2) * 7 + (rg.nn.Rotary(160000.0),)},
    ),
    "deberta-v3-base": (
        {"model_type": "deberta-v2", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
         "hidden_dropout_prob": 0.1, "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-07,
         "max_position_embeddings": 512, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm",
         "num_attention_heads": 12, "num_hidden_layers": 12, "pooler_dropout": 0, "pooler_hidden_act": "gelu",
         "pos_att_type": "p2c|c2p", "position_biased_input": False, "position_buckets": 256,
         "relative_attention": True, "share_att_key": True, "type_vocab_size": 0, "vocab_size": 128100},
        {"disentangled": 256, "max_distance": 512, "segments": 0, "head_activation": "gelu"},
    ),
    "gpt2": (
        {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "n_ctx": 1024,
         "layer_norm_epsilon": 1e-05, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
         "resid_pdrop": 0.1, "vocab_size": 50257},
        {"d_hidden": 3072, "tied": True, "activation": "gelu_tanh", "attention_dropout": None, "dropout": 0.1},
    ),
    "llama 2": (
        {"model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "pretraining_tp": 1,
         "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
         "vocab_size": 32000},
        {"kv_heads": None, "d_head": None, "rotary": rg.nn.Rotary(10000.0), "bias": False, "tied": False},
    ),
    "llama 3.1": (
        {"model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                          "original_max_position_embeddings": 8192}, "vocab_size": 128256},
        {"kv_heads": 8, "rotary": rg.nn.Rotary(500000.0, scaling=rg.positions.Llama3(8.0, 1.0, 4.0, 8192))},
    ),
    "mistral 0.3": (
        {"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
         "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
         "vocab_size": 32768},
        {"windows": (), "kv_heads": 8},
    ),
    "qwen 2.5 with YaRN": (
        {"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
         "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
         "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
         "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064,
         "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        {"windows": (), "qkv_bias": True, "bias": False,
         "rotary": rg.nn.Rotary(1000000.0, scaling=rg.positions.Yarn(4.0, 32768))},
    ),
    "gemma 2": (
        {"model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
         "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
         "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
         "sliding_window": 4096, "vocab_size": 256000},
        {"windows": (4096, None) * 13, "scale": 1 / 16, "embedding_scale": 48.0, "softcap": 50.0,
         "activation": "gelu_tanh", "tied": True},
    ),
    "qwen3 0.6B": (
        {"model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
         "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
         "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
         "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
        {"d_head": 128, "kv_heads": 8, "qk_norm": True, "tied": True, "rotary": rg.nn.Rotary(1000000.0)},
    ),
    "olmo 2 7B": (
        {"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
         "vocab_size": 100352},
        {"arrangement": "output", "qk_norm_span": "token", "kv_heads": None, "rotary": rg.nn.Rotary(500000.0)},
    ),
    "starcoder 2 3B": (
        {"model_type": "starcoder2", "attention_dropout": 0.1, "embedding_dropout": 0.1, "hidden_act":
         "gelu_pytorch_tanh", "hidden_size": 3072, "intermediate_size": 12288, "max_position_embeddings": 16384,
         "mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
         "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
         "sliding_window": 4096, "use_bias": True, "vocab_size": 49152},
        {"norm": "layer", "bias": True, "gated": False, "windows": (4096,), "tied": True, "dropout": 0.1,
         "activation": "gelu_tanh", "eps": 1e-5, "kv_heads": 2},
    ),
    "phi 4 mini": (
        {"model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072,
         "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 24,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
         "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
         "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064},
        {"rotary": rg.nn.Rotary(10000.0, 96, scaling=rg.positions.LongRope((1.0,) * 48, (2.0,) * 48, 4096, 32.0)),
         "windows": (262144,) * 32, "tied": True},
    ),
    "smollm3": (
        {"model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
         "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
         "use_sliding_window": False, "vocab_size": 128256},
        {"rotaries": (*(rg.nn.Rotary(5000000.0),) * 3, None) * 9, "windows": (), "tied": True},
    ),
    "gemma 3 1B": (
        {"model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation":
         "hybrid", "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
         "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
         "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
         "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
         "sliding_window_pattern": 6, "vocab_size": 262144},
        {"windows": (*(512,) * 5, None) * 4 + (512, 512), "qk_norm": True, "norm": "unit_rms", "kv_heads": 1,
         "layer_rotary": (*(rg.nn.Rotary(10000.0),) * 5, rg.nn.Rotary(1000000.0)) * 4 + (rg.nn.Rotary(10000.0),) * 2},
    ),
    "gpt-oss 20B without quantization": (
        {"model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
         "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
         "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
         "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
         "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                          "original_max_position_embeddings": 4096},
         "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088},
        {"sinks": True, "experts": 32, "experts_per_token": 4, "gate_limit": 7.0, "windows": (128, None) * 12,
         "rotary": rg.nn.Rotary(150000.0, scaling=rg.positions.Yarn(32.0, 4096, truncate=False))},
    ),
    "t5 1.0": (
        {"model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0,
         "dropout_rate": 0.1, "eos_token_id": 1, "layer_norm_epsilon": 1e-06, "num_heads": 8, "num_layers": 6,
         "relative_attention_num_buckets": 32, "vocab_size": 32128},
        {"gated": False, "activation": "relu", "output_scale": 512**-0.5, "tied": True, "start": 0, "stop": 1},
    ),
    "opus-mt": (
        {"model_type": "marian", "activation_function": "swish", "add_bias_logits": False,
         "add_final_layer_norm": False, "attention_dropout": 0.0, "bad_words_ids": [[58100]], "d_model": 512,
         "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 58100,
         "decoder_vocab_size": 58101, "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
         "encoder_layers": 6, "eos_token_id": 0, "max_position_embeddings": 512, "normalize_before": False,
         "normalize_embedding": False, "pad_token_id": 58100, "scale_embedding": True,
         "share_encoder_decoder_embeddings": True, "static_position_embeddings": True, "vocab_size": 58101},
        {"activation": "silu", "suppress_tokens": (58100,), "start": 58100, "stop": 0, "target_vocabulary": None,
         "embedding_scale": None, "attention_dropout": 0.0},
    ),
    "bart-large-cnn": (
        {"model_type": "bart", "activation_dropout": 0.0, "activation_function": "gelu", "add_final_layer_norm": False,
         "attention_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
         "decoder_layers": 12, "decoder_start_token_id": 2, "dropout": 0.1, "encoder_attention_heads": 16,
         "encoder_ffn_dim": 4096, "encoder_layers": 12, "eos_token_id": 2, "forced_bos_token_id": 0,
         "forced_eos_token_id": 2, "max_position_embeddings": 1024, "normalize_before": False,
         "normalize_embedding": True, "pad_token_id": 1, "scale_embedding": False, "vocab_size": 50264},
        {"positions": 1026, "first_position": 2, "prompt": (0,), "start": 2, "embedding_norm": True,
         "arrangement": "post", "embedding_scale": 1.0},
    ),
    "nllb-200 600M": (
        {"model_type": "m2m_100", "activation_function": "relu", "attention_dropout": 0.1, "d_model": 1024,
         "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12, "decoder_start_token_id": 2,
         "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12,
         "eos_token_id": 2, "max_position_embeddings": 1024, "pad_token_id": 1, "scale_embedding": True,
         "vocab_size": 256206},
        {"position": "fairseq", "first_position": 2, "embedding_scale": None, "prompt": (), "arrangement": "pre"},
    ),
    "whisper tiny": (
        {"model_type": "whisper", "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0,
         "begin_suppress_tokens": [220, 50257], "bos_token_id": 50257, "d_model": 384, "decoder_attention_heads": 6,
         "decoder_ffn_dim": 1536, "decoder_layerdrop": 0.0, "decoder_layers": 4, "decoder_start_token_id": 50258,
         "dropout": 0.0, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "encoder_layers": 4,
         "eos_token_id": 50257, "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]],
         "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80, "pad_token_id": 50257,
         "scale_embedding": False, "suppress_tokens": [1, 2, 7], "vocab_size": 51865},
        {"start": 50258, "stop": 50257, "prompt": (50259, 50359, 50363), "suppress_tokens": (1, 2, 7),
         "decoder_layers": None, "begin_suppress_tokens": (220, 50257),
         "frames": 1500, "positions": 448, "features": 80, "embedding_scale": 1.0},
    ),
    "wav2vec2-base-960h": (
        {"model_type": "wav2vec2", "activation_dropout": 0.1, "attention_dropout": 0.1, "conv_bias": False,
         "conv_dim": [512] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2], "conv_stride": [5, 2, 2, 2, 2, 2, 2],
         "do_stable_layer_norm": False, "feat_extract_activation": "gelu", "feat_extract_norm": "group",
         "hidden_act": "gelu", "hidden_dropout": 0.1, "hidden_size": 768, "intermediate_size": 3072,
         "layer_norm_eps": 1e-05, "layerdrop": 0.1, "mask_time_prob": 0.05, "num_attention_heads": 12,
         "num_conv_pos_embedding_groups": 16, "num_conv_pos_embeddings": 128, "num_hidden_layers": 12,
         "pad_token_id": 0, "vocab_size": 32},
        {"labels": 32, "arrangement": "post", "conv_norm": "group", "channels": (512,) * 7, "dropout": 0.1,
         "attention_dropout": None},
    ),
    "clip-vit-base-patch32": (
        {"model_type": "clip", "logit_scale_init_value": 2.6592, "projection_dim": 512, "text_config_dict": None,
         "text_config": {"attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "quick_gelu",
                         "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05, "vocab_size": 49408,
                         "max_position_embeddings": 77, "num_attention_heads": 8, "num_hidden_layers": 12},
         "vision_config": {"hidden_act": "quick_gelu", "hidden_size": 768, "image_size": 224, "patch_size": 32},
         "vision_config_dict": None},
        {"stop": None, "d_output": 512,
         "vision": VisionConfig(768, 12, 12, 3072, patch=32, eps=1e-5, activation="quick_gelu", patch_bias=False,
                                embedding_norm=True),
         "text": TextConfig(49408, 512, 12, 8, 2048, 77, segments=0, embedding_norm=False, causal=True, dropout=0.0,
                            arrangement="pre", eps=1e-5, activation="quick_gelu")},
    ),
    "siglip-base-patch16-224": (
        {"model_type": "siglip", "initializer_factor": 1.0, "text_config": {"model_type": "siglip_text_model"},
         "vision_config": {"model_type": "siglip_vision_model"}},
        {"text_pooling": "last", "d_output": 768, "logit_bias": True, "image_projection": False,
         "vision": VisionConfig(768, 12, 12, 3072, eps=1e-6, activation="gelu_tanh", class_token=False,
                                pooling="probe")},
    ),
    "dinov2-giant": (
        {"model_type": "dinov2", "apply_layernorm": True, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
         "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1536, "image_size": 518,
         "layer_norm_eps": 1e-06, "layerscale_value": 1.0, "mlp_ratio": 4, "num_attention_heads": 24,
         "num_channels": 3, "num_hidden_layers": 40, "patch_size": 14, "qkv_bias": True, "use_swiglu_ffn": True},
        {"d_hidden": 4096, "gated": True, "activation": "silu", "image": (518, 518), "arrangement": "layer_scale"},
    ),
    "detr with ResNet-50": (
        {"model_type": "detr", "activation_function": "relu", "backbone": "resnet50", "backbone_config": None,
         "d_model": 256, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "dilation": False,
         "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layers": 6,
         "id2label": {str(n): "thing" for n in range(91)}, "num_queries": 100, "position_embedding_type": "sine",
         "use_timm_backbone": True},
        {"backbone": ResNetConfig(), "classes": 91, "queries": 100, "decoder_layers": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_well_known_configurations_are_read_correctly(name: str) -> None:
    written, expected = KNOWN[name]
    family = family_of(written["model_type"])
    assert family is not None
    config = family.config_of(written)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("name", KNOWN)
def test_well_known_configurations_survive_a_round_trip(name: str) -> None:
    written, _ = KNOWN[name]
    family = family_of(written["model_type"])
    assert family is not None
    config = family.config_of(written)
    for architecture in family.architectures.values():
        assert family.why_not(config, architecture) is None
        with torch.device("meta"):
            architecture.model(config)


def test_names_of_families_and_architectures_are_unique() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)


def test_every_family_has_a_small_configuration_to_compare_with() -> None:
    assert t.FIRST.keys() == {family.model_type for family in FAMILIES}


def test_every_family_is_documented() -> None:
    listed = " ".join(str(rg.load.__doc__).split())
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "hugging_face.md").read_text()
    table = {line for line in page.splitlines() if line.startswith("| `")}
    for family in FAMILIES:
        models = ", ".join(dict.fromkeys(f"`{each.model.__name__}`" for each in family.architectures.values()))
        (row,) = (line for line in table if line.startswith(f"| {models} |"))
        assert family.title in row.split("|")[2].strip().split(", "), f"{row} in docs/how-to/hugging_face.md"
        assert family.title in listed, f"the docstring of regard.load lacks {family.title}"
