"""T5 and Marian."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models.tiny_configs.case import Case

T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "layer_norm_epsilon": 0.02,
      "decoder_start_token_id": 0}  # fmt: skip
MARIAN = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
          "pad_token_id": 98, "decoder_start_token_id": 98, "eos_token_id": 0, "forced_eos_token_id": None,
          "activation_function": "swish", "scale_embedding": True}  # fmt: skip


def untie(model: Any) -> None:
    """Transformers ties new models, but keeps loaded weights untied."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


CASES = {
    "t5": Case("T5ForConditionalGeneration", T5),
    "t5-1.1": Case(
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        after=untie,
    ),
    "t5-tied": Case("T5ForConditionalGeneration", T5 | {"tie_word_embeddings": False}),
    "mt5": Case("MT5ForConditionalGeneration", T5 | {"tie_word_embeddings": False}, after=untie),
    "marian": Case("MarianMTModel", MARIAN),
    "marian-apart": Case(
        "MarianMTModel",
        MARIAN | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 99},
    ),
}  # fmt: skip
