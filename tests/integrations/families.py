"""Tiny random models of every family, built from their configurations: (model class, config, inputs, real tokens)."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCABULARY, LENGTH = 99, 13
WIDE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
FOUR = {**WIDE, "num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {**FOUR, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
RESNET = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "embedding_size": 8, "out_features": ["stage4"]}


def tokens(side: str, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Three rows, two of them padded on one side."""
    ids = torch.randint(3, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, short in ((0, 5), (2, 1)):
        mask[row, slice(None, short) if side == "left" else slice(-short, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pair() -> dict[str, torch.Tensor]:
    return {**tokens("right"), "decoder_input_ids": tokens("left")["input_ids"][:, :7]}


def pixels(side: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def picture_with_border() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 64, 64, dtype=torch.long)
    mask[0, :, 32:] = 0
    return {"pixel_values": pixels(64), "pixel_mask": mask}


def speech() -> dict[str, torch.Tensor]:
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "decoder_input_ids": tokens("left")["input_ids"][:2, :7]}


def _decoders() -> dict[str, tuple[Any, Any]]:
    short = {"sliding_window": 4}
    return {
        "gpt2": (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
            ),
        ),
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
        "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, **short, head_dim=8)),
        "qwen2": (
            hf.Qwen2ForCausalLM,
            hf.Qwen2Config(**GROUPED, **short, use_sliding_window=True, max_window_layers=1),
        ),
        "gemma2": (
            hf.Gemma2ForCausalLM,
            hf.Gemma2Config(**GROUPED, **short, head_dim=8, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
        ),
        "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**FOUR)),
        "gpt_oss": (
            hf.GptOssForCausalLM,
            hf.GptOssConfig(
                **(GROUPED | {"intermediate_size": 32}), **short, head_dim=8, num_local_experts=4, num_experts_per_tok=2
            ),
        ),
        "llama4": (
            hf.Llama4ForCausalLM,
            hf.Llama4TextConfig(
                **GROUPED,
                head_dim=8,
                intermediate_size_mlp=37,
                attention_chunk_size=4,
                num_local_experts=2,
                moe_layers=[],
            ),
        ),
    }


def _encoders() -> dict[str, tuple[Any, Any]]:
    return {
        "bert": (hf.BertForMaskedLM, hf.BertConfig(**FOUR)),
        "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig(**FOUR)),
        "distilbert": (
            hf.DistilBertForMaskedLM,
            hf.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=37),
        ),
        "albert": (hf.AlbertForMaskedLM, hf.AlbertConfig(**FOUR, embedding_size=16)),
        "clip_text": (hf.CLIPTextModel, hf.CLIPTextConfig(**FOUR, eos_token_id=2)),
        "modernbert": (
            hf.ModernBertForMaskedLM,
            hf.ModernBertConfig(
                **FOUR,
                local_attention=4,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
            ),
        ),
    }


def _pairs() -> dict[str, tuple[Any, Any]]:
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return {
        "t5": (hf.T5ForConditionalGeneration, hf.T5Config(vocab_size=VOCABULARY, **t5)),
        "marian": (hf.MarianMTModel, hf.MarianConfig(**BOTH)),
        "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**BOTH)),
    }


def _others() -> dict[str, tuple[Any, Any, dict]]:
    eight = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
    whisper = {key: value for key, value in BOTH.items() if key != "max_position_embeddings"}
    detr = {
        **BOTH,
        "num_queries": 5,
        "backbone_config": hf.ResNetConfig(**RESNET),
        "use_timm_backbone": False,
        "backbone": None,
    }
    for name in (
        "vocab_size",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "forced_eos_token_id",
        "pad_token_id",
    ):
        detr.pop(name)
    vision = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "vit": (
            hf.ViTForImageClassification,
            hf.ViTConfig(**vision, image_size=32, patch_size=8),
            {"pixel_values": pixels()},
        ),
        "swin": (
            hf.SwinForImageClassification,
            hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
            {"pixel_values": pixels()},
        ),
        "detr": (hf.DetrForObjectDetection, hf.DetrConfig(**detr), picture_with_border()),
        "whisper": (hf.WhisperForConditionalGeneration, hf.WhisperConfig(**whisper, **eight), speech()),
    }


def _apart() -> dict[str, tuple[Any, Any]]:
    """Families that compute their attention themselves."""
    return {
        "longformer": (hf.LongformerForMaskedLM, hf.LongformerConfig(**{**FOUR, "attention_window": [4, 4]})),
        "bigbird": (hf.BigBirdForMaskedLM, hf.BigBirdConfig(**FOUR, attention_type="original_full")),
        "bloom": (hf.BloomForCausalLM, hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
        "mpt": (
            hf.MptForCausalLM,
            hf.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
        ),
        "gptj": (
            hf.GPTJForCausalLM,
            hf.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
        ),
        "falcon": (
            hf.FalconForCausalLM,
            hf.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        ),
        "xlnet": (
            hf.XLNetLMHeadModel,
            hf.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=37),
        ),
        "deberta_v2": (
            hf.DebertaV2ForMaskedLM,
            hf.DebertaV2Config(**FOUR, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16),
        ),
    }


DECODERS, ENCODERS, PAIRS, OTHERS, APART = _decoders(), _encoders(), _pairs(), _others(), _apart()


def build(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of the family in eval mode with eager attention, and inputs with padding."""
    if name in OTHERS:
        kind, config, inputs = OTHERS[name]
    else:
        kind, config = (DECODERS | ENCODERS | PAIRS | APART)[name]
        left = name in DECODERS or name in ("bloom", "mpt", "gptj", "falcon")
        inputs = pair() if name in PAIRS else tokens("left" if left else "right")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # with the default initialisation, attention is almost uniform
            torch.nn.init.normal_(parameter, std=0.15)
    for sinks in (p for key, p in model.named_parameters() if key.endswith("sinks")):
        torch.nn.init.normal_(sinks)
    return model, inputs
