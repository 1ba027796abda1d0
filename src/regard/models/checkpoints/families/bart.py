"""BART, mBART, and M2M100 with NLLB: encoder-decoders of fairseq."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.models.checkpoints.families.translation import (
    GENERATION_TYPES,
    PAIR,
    PAIR_ALIASES,
    first_tokens,
    generation_values,
    start_token,
    stop_token,
    suppressed_tokens,
)
from regard.models.checkpoints.family import (
    TENSORS,
    Architecture,
    Family,
    Field,
    Values,
    activation,
    common_value,
    rule_table,
)
from regard.models.checkpoints.tensor_names import Extras
from regard.models.position_embeddings import SinusoidalPositions
from regard.models.translation import Transformer, TransformerConfig

EMBEDDING_NORMS = """
    embedding_norm         model.encoder.layernorm_embedding
    target_embedding_norm  model.decoder.layernorm_embedding
"""
FINAL_NORMS = """
    encoder.norm  model.encoder.layer_norm
    decoder.norm  model.decoder.layer_norm
"""
TABLES = """
    position.embedding         model.encoder.embed_positions
    target_position.embedding  model.decoder.embed_positions
"""
COPIES = dict.fromkeys(
    ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"),
    ("model.shared.weight",),
)


def read_bart(theirs: Values) -> Values:
    return {
        "heads": common_value(theirs, "encoder_attention_heads", "decoder_attention_heads"),
        "d_hidden": common_value(theirs, "encoder_ffn_dim", "decoder_ffn_dim"),
        "embedding_scale": math.sqrt(theirs["d_model"]) if theirs.get("scale_embedding") else 1.0,
        "logits_bias": "final_logits_bias" in theirs.get(TENSORS, ()),
        "start": start_token(theirs),
        "prompt": first_tokens(theirs),
        "suppress_tokens": suppressed_tokens(theirs),
    }


def write_bart(config: TransformerConfig) -> Values:
    scale = 1.0 if config.embedding_scale == 1 else math.sqrt(config.d_model)
    if config.embedding_scale not in (None, scale):
        raise ValueError(f"embedding_scale = {config.embedding_scale} must be 1 or sqrt(d_model)")
    return {
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_hidden,
        "decoder_ffn_dim": config.d_hidden,
        "scale_embedding": scale != 1,
        "decoder_start_token_id": config.start,
        "is_encoder_decoder": True,
    }


def fairseq_positions(_: TransformerConfig, stored: Tensor) -> Tensor:
    """Difference to the position table of M2M100, in which the row of the padding token is zero."""
    table = SinusoidalPositions(stored.shape[1], halves=True, inclusive=True).table(stored, len(stored))
    return torch.where(stored.any(1, keepdim=True), stored - table[: len(stored)], 0.0)


def bart(model_type: str, title: str, name: str, names: str, *, fixed: Values, start: int, act: str) -> Family:
    """A family of fairseq's encoder-decoders. start: the default of decoder_start_token_id. act: of the activation."""
    learned = fixed["position"] == "learned"
    computed = {} if learned else dict.fromkeys(
        (f"model.{side}.embed_positions.weights" for side in ("encoder", "decoder")), fairseq_positions
    )  # fmt: skip

    def read(theirs: Values) -> Values:
        return read_bart({"decoder_start_token_id": start, "scale_embedding": not learned} | theirs)

    positions = Field("positions", "max_position_embeddings", 1024)
    return Family(
        model_type,
        title,
        TransformerConfig,
        {
            name: Architecture(
                Transformer,
                rule_table(f"embedding model.shared \n logits_bias final_logits_bias^1 \n {names} \n {PAIR}"),
                Extras(computed=computed, copies=COPIES),
                unused=("buckets", "max_distance", "logits_bias"),
            )
        },
        (
            Field("vocabulary", "vocab_size"),
            Field("d_model", "d_model"),
            Field("layers", "encoder_layers"),
            Field("decoder_layers", "decoder_layers"),
            # a learned table has two rows more
            Field("positions", "max_position_embeddings", 1024, lambda n: n + 2, lambda n: n - 2)
            if learned else positions,
            Field("dropout", "dropout", 0.1),
            Field("attention_dropout", "attention_dropout", 0.0),
            Field("stop", "eos_token_id", 2, stop_token),
            activation("activation", "activation_function", act),
        ),
        fixed={"norm": "layer", "eps": 1e-5, "first_position": 2} | fixed,
        only={"tie_word_embeddings": (True,), "normalize_before": (fixed["arrangement"] == "pre",)}
        | ({} if learned else {"pad_token_id": (1,)}),  # its positions start after the padding token
        read=read,
        types={"scale_embedding": bool},
        generation_types=GENERATION_TYPES,
        write=write_bart,
        aliases=PAIR_ALIASES,
        dropped=("bad_words_ids", "forced_bos_token_id"),
        generation=generation_values,
        absent=lambda config: {"pad_token_id": 1, "bos_token_id": 0, "forced_eos_token_id": None},
    )  # fmt: skip


FAMILIES = (
    bart(
        "bart", "BART", "BartForConditionalGeneration", EMBEDDING_NORMS + TABLES, start=2, act="gelu",
        fixed={"arrangement": "post", "position": "learned", "embedding_norm": True},
    ),
    bart(
        "mbart", "mBART", "MBartForConditionalGeneration", EMBEDDING_NORMS + FINAL_NORMS + TABLES, start=2, act="gelu",
        fixed={"arrangement": "pre", "position": "learned", "embedding_norm": True},
    ),
    bart(
        "m2m_100", "M2M100 and NLLB", "M2M100ForConditionalGeneration", FINAL_NORMS, start=2, act="relu",
        fixed={"arrangement": "pre", "position": "fairseq"},
    ),
)  # fmt: skip
