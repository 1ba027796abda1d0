"""Whisper and Wav2Vec2."""

from __future__ import annotations

from typing import Any

from regard.models.checkpoints.families.translation import CROSS, LAYERS, PAIR_ALIASES, start_token, stop_token
from regard.models.checkpoints.family import (
    Architecture,
    Family,
    Field,
    Values,
    activation,
    common_value,
    mapped_field,
    rule_table,
)
from regard.models.checkpoints.tensor_names import Extras
from regard.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from regard.models.whisper import Whisper, WhisperConfig

WHISPER_NAMES = f"""
    embedding                          model.decoder.embed_tokens
    front.convs.0                      model.encoder.conv1
    front.convs.1                      model.encoder.conv2
    position.embedding                 model.encoder.embed_positions
    target_position.embedding          model.decoder.embed_positions
    encoder.norm                       model.encoder.layer_norm
    decoder.norm                       model.decoder.layer_norm
    encoder.layers.*.attention.qkv.bias  model.encoder.layers.*.self_attn.{{q_proj,0,v_proj}}.bias
    decoder.layers.*.attention.qkv.bias  model.decoder.layers.*.self_attn.{{q_proj,0,v_proj}}.bias
    decoder.layers.*.cross.qkv.bias      model.decoder.layers.*.encoder_attn.{{q_proj,0,v_proj}}.bias
    {LAYERS.format(side="encoder")}
    {LAYERS.format(side="decoder")}
    {CROSS}
"""


def prompt(theirs: Values) -> tuple[int, ...]:
    """Return the forced first tokens of a target, if all of them are given."""
    forced = sorted(theirs.get("forced_decoder_ids") or [])
    is_complete = all(isinstance(token, int) for _, token in forced) and [position for position, _ in forced] == list(
        range(1, len(forced) + 1)
    )
    return tuple(token for _, token in forced) if is_complete else ()


def read_whisper(theirs: Values) -> Values:
    return {
        "heads": common_value(theirs, "encoder_attention_heads", "decoder_attention_heads"),
        "d_hidden": common_value(theirs, "encoder_ffn_dim", "decoder_ffn_dim"),
        "start": start_token(theirs),
        "suppress_tokens": tuple(theirs.get("suppress_tokens") or ()),
        "begin_suppress_tokens": tuple(theirs.get("begin_suppress_tokens") or ()),
        "prompt": prompt(theirs) if not theirs.get("lang_to_id") else (),
        "languages": tuple(sorted((name.strip("<|>"), int(n)) for name, n in (theirs.get("lang_to_id") or {}).items())),
        "tasks": tuple(sorted((str(name), int(n)) for name, n in (theirs.get("task_to_id") or {}).items())),
        "no_timestamps": theirs.get("no_timestamps_token_id"),
        "max_first_timestamp": theirs.get("max_initial_timestamp_index"),
    }


def write_whisper(config: WhisperConfig) -> Values:
    return {
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_hidden,
        "decoder_ffn_dim": config.d_hidden,
        "decoder_start_token_id": config.start,
        "is_encoder_decoder": True,
    }


def generation_values(config: WhisperConfig) -> Values:
    """Return the values of generation_config.json: start, stop and suppressed tokens, languages and tasks."""
    return {
        "decoder_start_token_id": config.start,
        "eos_token_id": config.stop,
        "suppress_tokens": list(config.suppress_tokens),
        "begin_suppress_tokens": list(config.begin_suppress_tokens),
    } | {name: value for name, value in {
        "forced_decoder_ids": [list(pair) for pair in enumerate(config.prompt, 1)],
        "lang_to_id": {f"<|{name}|>": n for name, n in config.languages},
        "task_to_id": dict(config.tasks),
        "is_multilingual": True if config.languages else None,
        "no_timestamps_token_id": config.no_timestamps,
        "max_initial_timestamp_index": config.max_first_timestamp,
    }.items() if value not in (None, [], {})}  # fmt: skip


WHISPER_TYPES: dict[str, Any] = {
    "decoder_start_token_id": int, "eos_token_id": int | list[int], "suppress_tokens": list[int],
    "begin_suppress_tokens": list[int], "forced_decoder_ids": list[list[int | None]], "lang_to_id": dict[str, int],
    "task_to_id": dict[str, int], "no_timestamps_token_id": int, "max_initial_timestamp_index": int,
}  # fmt: skip

WHISPER = Family(
    "whisper",
    "Whisper",
    WhisperConfig,
    {
        "WhisperForConditionalGeneration": Architecture(
            Whisper,
            rule_table(WHISPER_NAMES),
            Extras(copies={"proj_out.weight": ("model.decoder.embed_tokens.weight",)}),
            unused=("buckets", "max_distance"),
        )
    },
    (
        Field("vocabulary", "vocab_size"),
        Field("d_model", "d_model"),
        Field("layers", "encoder_layers"),
        Field("decoder_layers", "decoder_layers"),
        Field("features", "num_mel_bins", 80),
        Field("frames", "max_source_positions", 1500),
        Field("positions", "max_target_positions", 448),
        Field("dropout", "dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("stop", "eos_token_id", 50256, stop_token),
        activation("activation", "activation_function", "gelu"),
    ),
    fixed={"position": "learned", "arrangement": "pre", "norm": "layer", "eps": 1e-5, "embedding_scale": 1.0},
    only={"tie_word_embeddings": (True,), "scale_embedding": (False,)},
    read=read_whisper,
    generation_types=WHISPER_TYPES,
    write=write_whisper,
    aliases=PAIR_ALIASES | {"num_key_value_heads": "encoder_attention_heads"},
    dropped=("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"),
    generation=generation_values,
    absent=lambda config: {"pad_token_id": config.stop, "bos_token_id": config.stop},
)

WAV2VEC2_NAMES = """
    front.*.conv                              wav2vec2.feature_extractor.conv_layers.*.conv
    front.*.norm                              wav2vec2.feature_extractor.conv_layers.*.layer_norm
    front_norm                                wav2vec2.feature_projection.layer_norm
    project                                   wav2vec2.feature_projection.projection
    position                                  wav2vec2.encoder.pos_conv_embed.conv
    first_norm                                wav2vec2.encoder.layer_norm
    stack.norm                                wav2vec2.encoder.layer_norm
    stack.layers.*.attention.qkv              wav2vec2.encoder.layers.*.attention.{q_proj,k_proj,v_proj}
    stack.layers.*.attention.output           wav2vec2.encoder.layers.*.attention.out_proj
    stack.layers.*.attention_residual.norm    wav2vec2.encoder.layers.*.layer_norm
    stack.layers.*.feedforward.up             wav2vec2.encoder.layers.*.feed_forward.intermediate_dense
    stack.layers.*.feedforward.output         wav2vec2.encoder.layers.*.feed_forward.output_dense
    stack.layers.*.feedforward_residual.norm  wav2vec2.encoder.layers.*.final_layer_norm
    head                                      lm_head
"""


def numbers(value: Any) -> tuple[int, ...]:
    return tuple(value)


WAV2VEC2 = Family(
    "wav2vec2",
    "Wav2Vec2 with CTC",
    Wav2Vec2Config,
    {
        "Wav2Vec2ForCTC": Architecture(
            Wav2Vec2,
            rule_table(WAV2VEC2_NAMES),
            Extras(
                reported=("wav2vec2.masked_spec_embed",),  # used in training only, for masked frames
                renamed=((r"(pos_conv_embed\.conv\.)weight_g$", r"\1parametrizations.weight.original0"),
                         (r"(pos_conv_embed\.conv\.)weight_v$", r"\1parametrizations.weight.original1")),
            ),
        )
    },
    (
        Field("labels", "vocab_size", 32),
        Field("d_model", "hidden_size"),
        Field("layers", "num_hidden_layers"),
        Field("heads", "num_attention_heads"),
        Field("d_hidden", "intermediate_size"),
        Field("channels", "conv_dim", (512,) * 7, numbers, list),
        Field("kernels", "conv_kernel", (10, 3, 3, 3, 3, 2, 2), numbers, list),
        Field("strides", "conv_stride", (5, 2, 2, 2, 2, 2, 2), numbers, list),
        Field("conv_bias", "conv_bias", False),
        Field("conv_norm", "feat_extract_norm", "group"),
        activation("conv_activation", "feat_extract_activation", "gelu"),
        Field("position_kernel", "num_conv_pos_embeddings", 128),
        Field("position_groups", "num_conv_pos_embedding_groups", 16),
        mapped_field("arrangement", "do_stable_layer_norm", False, {False: "post", True: "pre"}),
        Field("eps", "layer_norm_eps", 1e-5),
        Field("dropout", "hidden_dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        activation("activation", "hidden_act", "gelu"),
    ),
    only={"add_adapter": (False,), "adapter_attn_dim": (None,), "pad_token_id": (0,)},
    types={
        "conv_dim": list[int], "conv_kernel": list[int], "conv_stride": list[int], "do_stable_layer_norm": bool,
    },
)  # fmt: skip

FAMILIES = (WHISPER, WAV2VEC2)
