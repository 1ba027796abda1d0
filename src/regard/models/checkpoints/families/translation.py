"""T5 and Marian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.field_types import short_repr
from regard.models.checkpoints.family import (
    ACTIVATIONS,
    TENSORS,
    Architecture,
    Family,
    Field,
    Values,
    activation,
    common_value,
)
from regard.models.checkpoints.tensor_names import Extras, Rule, table
from regard.models.translation import Transformer, TransformerConfig
from regard.positions import sinusoidal


def stop_token(value: Any) -> int:
    """Return the single token that ends a target."""
    if isinstance(value, list) and len(value) == 1:
        return stop_token(value[0])
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"eos_token_id = {short_repr(value)} is not supported; it must be one token")
    return value


def suppressed_tokens(theirs: Values) -> tuple[int, ...]:
    """Return the tokens of bad_words_ids, each of which must be a single token."""
    words = theirs.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise ValueError(f"bad_words_ids = {short_repr(words)} is not supported; each must be one token")
    stop = theirs.get("eos_token_id")  # which is not suppressed
    return tuple(word[0] for word in words if word[0] not in (stop if isinstance(stop, list) else [stop]))


def start_token(theirs: Values) -> int:
    start = theirs.get("decoder_start_token_id")
    return theirs.get("pad_token_id") or 0 if start is None else start


def first_tokens(theirs: Values) -> tuple[int, ...]:
    """Return the forced first token of every target, such as its language."""
    first = theirs.get("forced_bos_token_id")
    return () if first is None else (first,)


GENERATION_TYPES: dict[str, Any] = {
    "decoder_start_token_id": int, "eos_token_id": int | list[int], "bad_words_ids": list[list[int]],
    "forced_bos_token_id": int,
}  # fmt: skip


def generation_values(config: TransformerConfig) -> Values:
    """Return the values of generation_config.json: start, stop, first and suppressed tokens."""
    if len(config.prompt) > 1:
        raise ValueError("prompt must have at most one token")
    forced = {"forced_bos_token_id": config.prompt[0]} if config.prompt else {}
    suppressed = {"bad_words_ids": [[word] for word in config.suppress_tokens]} if config.suppress_tokens else {}
    return {"decoder_start_token_id": config.start, "eos_token_id": config.stop} | forced | suppressed


def t5_names(config: TransformerConfig) -> tuple[Rule, ...]:
    inner = "{wi_0,wi_1}" if config.gated else "wi"
    return table(
        f"""
        embedding                                shared
        encoder.bias.table                       encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight
        encoder.layers.*.attention_residual.norm encoder.block.*.layer.0.layer_norm
        encoder.layers.*.attention.qkv           encoder.block.*.layer.0.SelfAttention.{{q,k,v}}
        encoder.layers.*.attention.output        encoder.block.*.layer.0.SelfAttention.o
        encoder.layers.*.feedforward_residual.norm  encoder.block.*.layer.1.layer_norm
        encoder.layers.*.feedforward.up          encoder.block.*.layer.1.DenseReluDense.{inner}
        encoder.layers.*.feedforward.output      encoder.block.*.layer.1.DenseReluDense.wo
        encoder.norm                             encoder.final_layer_norm
        decoder.bias.table                       decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight
        decoder.layers.*.attention_residual.norm decoder.block.*.layer.0.layer_norm
        decoder.layers.*.attention.qkv           decoder.block.*.layer.0.SelfAttention.{{q,k,v}}
        decoder.layers.*.attention.output        decoder.block.*.layer.0.SelfAttention.o
        decoder.layers.*.cross_residual.norm     decoder.block.*.layer.1.layer_norm
        decoder.layers.*.cross.qkv               decoder.block.*.layer.1.EncDecAttention.{{q,k,v}}
        decoder.layers.*.cross.output            decoder.block.*.layer.1.EncDecAttention.o
        decoder.layers.*.feedforward_residual.norm  decoder.block.*.layer.2.layer_norm
        decoder.layers.*.feedforward.up          decoder.block.*.layer.2.DenseReluDense.{inner}
        decoder.layers.*.feedforward.output      decoder.block.*.layer.2.DenseReluDense.wo
        decoder.norm                             decoder.final_layer_norm
        head                                     lm_head
        """
    )


T5_FORWARD = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
    "gelu": ("gelu", False),
    "silu": ("silu", False),
}


def t5(model_type: str, title: str, name: str, *, forward: str, scales: bool) -> Family:
    """A T5 family. Version 1.0 scales outputs by 1 / sqrt(d_model) and ties them to the embedding; 1.1 does neither.

    The meaning of `tie_word_embeddings` in 1.1 depends on the release that wrote it, so the tensors decide.
    """

    def read(theirs: Values) -> Values:
        projection = theirs.get("feed_forward_proj") or forward
        if projection not in T5_FORWARD:
            raise ValueError(
                f"feed_forward_proj = {projection!r} is not supported; supported are {', '.join(T5_FORWARD)}"
            )
        act, gated = T5_FORWARD[projection]
        given, is_gated = theirs.get("dense_act_fn"), theirs.get("is_gated_act")  # they take precedence
        if given is not None and ACTIVATIONS.get(given) != act:
            raise ValueError(f"dense_act_fn = {given!r} must be that of feed_forward_proj = {projection!r}")
        if is_gated is not None and is_gated != gated:
            raise ValueError(f"is_gated_act = {is_gated} must be that of feed_forward_proj = {projection!r}")
        scaled = scales and theirs.get("scale_decoder_outputs", theirs.get("tie_word_embeddings", True))
        return {
            "activation": act,
            "gated": gated,
            "output_scale": theirs["d_model"] ** -0.5 if scaled else 1.0,
            "tied": bool(scaled) or "lm_head.weight" not in theirs.get(TENSORS, ()),
            "start": start_token(theirs),
            "suppress_tokens": suppressed_tokens(theirs),
            "prompt": first_tokens(theirs),
        }

    def write(config: TransformerConfig) -> Values:
        projection = [name for name, parts in T5_FORWARD.items() if parts == (config.activation, config.gated)]
        if not projection:
            raise ValueError(f"activation = {config.activation!r} has no counterpart in feed_forward_proj")
        scaled = config.output_scale != 1
        if scaled and not config.tied:  # some releases always tie scaled outputs
            raise ValueError("scaled outputs must be tied")
        return {
            "feed_forward_proj": projection[0],
            "tie_word_embeddings": scaled,
            "scale_decoder_outputs": scaled,
            "is_encoder_decoder": True,
            "decoder_start_token_id": config.start,
        }

    return Family(
        model_type,
        title,
        TransformerConfig,
        {
            name: Architecture(
                Transformer,
                t5_names,
                Extras(
                    reported=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias",),
                    copies=dict.fromkeys(
                        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
                        ("shared.weight",),
                    ),
                ),
                unused=("positions", "tied"),
            )
        },
        (
            Field("vocabulary", "vocab_size"),
            Field("d_model", "d_model"),
            Field("d_head", "d_kv", 64),
            Field("d_hidden", "d_ff"),
            Field("layers", "num_layers"),
            Field("decoder_layers", "num_decoder_layers", None),
            Field("heads", "num_heads"),
            Field("buckets", "relative_attention_num_buckets", 32),
            Field("max_distance", "relative_attention_max_distance", 128),
            Field("eps", "layer_norm_epsilon", 1e-6),
            Field("dropout", "dropout_rate", 0.1),
            Field("stop", "eos_token_id", 1, stop_token),
        ),
        fixed={
            "position": "relative",
            "arrangement": "pre",
            "norm": "rms",
            "bias": False,
            "scale": 1.0,
            "embedding_scale": 1.0,
        },
        read=read,
        types={"feed_forward_proj": str, "scale_decoder_outputs": bool, "dense_act_fn": str, "is_gated_act": bool},
        generation_types=GENERATION_TYPES,
        write=write,
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        dropped=("dense_act_fn", "is_gated_act", "bad_words_ids", "forced_bos_token_id"),
        generation=generation_values,
    )


LAYERS = """
    {side}.layers.*.attention.qkv              model.{side}.layers.*.self_attn.{{q_proj,k_proj,v_proj}}
    {side}.layers.*.attention.output           model.{side}.layers.*.self_attn.out_proj
    {side}.layers.*.attention_residual.norm    model.{side}.layers.*.self_attn_layer_norm
    {side}.layers.*.feedforward.up             model.{side}.layers.*.fc1
    {side}.layers.*.feedforward.output         model.{side}.layers.*.fc2
    {side}.layers.*.feedforward_residual.norm  model.{side}.layers.*.final_layer_norm
"""
CROSS = """
    decoder.layers.*.cross.qkv                 model.decoder.layers.*.encoder_attn.{q_proj,k_proj,v_proj}
    decoder.layers.*.cross.output              model.decoder.layers.*.encoder_attn.out_proj
    decoder.layers.*.cross_residual.norm       model.decoder.layers.*.encoder_attn_layer_norm
"""
PAIR = LAYERS.format(side="encoder") + LAYERS.format(side="decoder") + CROSS
"""The layers of an encoder and a decoder as named in Marian and DETR."""
PAIR_ALIASES = {
    "hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads", "num_hidden_layers": "encoder_layers",
}  # fmt: skip


def marian_names(config: TransformerConfig) -> tuple[Rule, ...]:
    one = "embedding model.shared"
    two = "embedding model.encoder.embed_tokens \n target_embedding model.decoder.embed_tokens"
    return table(f"{one if config.target_vocabulary is None else two} \n logits_bias final_logits_bias^1 \n {PAIR}")


def read_marian(theirs: Values) -> Values:
    shared = theirs.get("share_encoder_decoder_embeddings", True)
    words = theirs.get("decoder_vocab_size") or theirs["vocab_size"]
    if shared and words != theirs["vocab_size"]:
        raise ValueError(f"decoder_vocab_size = {words} must equal vocab_size if embeddings are shared")
    return {
        "heads": common_value(theirs, "encoder_attention_heads", "decoder_attention_heads"),
        "d_hidden": common_value(theirs, "encoder_ffn_dim", "decoder_ffn_dim"),
        "target_vocabulary": None if shared else words,
        "embedding_scale": math.sqrt(theirs["d_model"]) if theirs.get("scale_embedding") else 1.0,
        "start": start_token(theirs),
        "suppress_tokens": suppressed_tokens(theirs),
        "prompt": first_tokens(theirs),
    }


def write_marian(config: TransformerConfig) -> Values:
    words = config.target_vocabulary
    return {
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_hidden,
        "decoder_ffn_dim": config.d_hidden,
        "share_encoder_decoder_embeddings": words is None,
        "decoder_vocab_size": config.vocabulary if words is None else words,
        "scale_embedding": config.embedding_scale is None or config.embedding_scale == math.sqrt(config.d_model),
        "decoder_start_token_id": config.start,
        "is_encoder_decoder": True,
    }


def marian_positions(_: TransformerConfig, stored: Tensor) -> Tensor:
    """Difference to Marian's position table: sines in the first half of the columns, cosines in the second."""
    table = sinusoidal(*stored.shape)
    return stored - torch.cat((table[:, 0::2], table[:, 1::2]), -1)


MARIAN = Family(
    "marian",
    "Marian",
    TransformerConfig,
    {
        "MarianMTModel": Architecture(
            Transformer,
            marian_names,
            Extras(
                computed=dict.fromkeys(
                    ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"), marian_positions
                ),
                copies={
                    "model.encoder.embed_tokens.weight": ("model.shared.weight",),
                    "model.decoder.embed_tokens.weight": ("model.shared.weight",),
                    "lm_head.weight": ("model.shared.weight", "model.decoder.embed_tokens.weight"),
                },
            ),
            unused=("buckets", "max_distance"),
        )
    },
    (
        Field("vocabulary", "vocab_size"),
        Field("d_model", "d_model"),
        Field("layers", "encoder_layers"),
        Field("decoder_layers", "decoder_layers"),
        Field("positions", "max_position_embeddings", 1024),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("stop", "eos_token_id", 0, stop_token),
        activation("activation", "activation_function", "gelu"),
    ),
    fixed={"position": "halves", "arrangement": "post", "norm": "layer", "eps": 1e-5, "logits_bias": True},
    only={"tie_word_embeddings": (True,), "normalize_before": (False,), "normalize_embedding": (False,)}
    | {"add_final_layer_norm": (False,), "static_position_embeddings": (True,), "add_bias_logits": (False,)},
    read=read_marian,
    types={"scale_embedding": bool, "share_encoder_decoder_embeddings": bool, "decoder_vocab_size": int},
    generation_types=GENERATION_TYPES,
    write=write_marian,
    aliases=PAIR_ALIASES,
    dropped=("bad_words_ids", "forced_bos_token_id"),
    generation=generation_values,
    absent=lambda config: {"pad_token_id": config.start},
)

FAMILIES = (
    t5("t5", "T5", "T5ForConditionalGeneration", forward="relu", scales=True),
    t5("mt5", "mT5", "MT5ForConditionalGeneration", forward="gated-gelu", scales=False),
    MARIAN,
)
