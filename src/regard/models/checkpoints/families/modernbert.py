"""ModernBERT: rotary embeddings, local and global layers, gated feed-forward layers, norms without bias."""

from __future__ import annotations

from typing import Any

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.gemma3 import GLOBAL, LOCAL, read_rotaries, write_rotaries
from regard.models.checkpoints.families.language import WINDOW_TYPES, read_windows, write_windows
from regard.models.checkpoints.families.text import architectures
from regard.models.checkpoints.family import Family, Field, Values, activation, classes, labels, mapped_field
from regard.models.config_fields import effective_value
from regard.models.text import TextConfig

BASE = """
    embedding                                 embeddings.tok_embeddings
    embedding_norm                            embeddings.norm
    stack.layers.*.attention.qkv              layers.*.attn.Wqkv
    stack.layers.*.attention.output           layers.*.attn.Wo
    stack.layers.*.attention_residual.norm    layers.*.attn_norm
    stack.layers.*.feedforward.up             layers.*.mlp.Wi
    stack.layers.*.feedforward.output         layers.*.mlp.Wo
    stack.layers.*.feedforward_residual.norm  layers.*.mlp_norm
    stack.norm                                final_norm
"""
HEAD = """
    transform  head.dense
    norm       head.norm
"""
BASES = {LOCAL: 10000.0, GLOBAL: 160000.0}


def read_modernbert(theirs: Values) -> Values:
    layers, every = theirs["num_hidden_layers"], theirs.get("global_attn_every_n_layers") or 3
    kinds = theirs.get("layer_types") or [LOCAL if n % every else GLOBAL for n in range(layers)]
    size = theirs.get("local_attention")
    windows = read_windows({"sliding_window": (128 if size is None else size) // 2} | theirs, kinds)
    if theirs.get("rope_scaling") is not None:
        raise ValueError("rope_scaling is not supported for modernbert; give rope_parameters for each layer type")
    older = theirs | {"rope_theta": theirs.get("global_rope_theta")}
    return read_rotaries(older, kinds, BASES, "local_rope_theta") | windows | {"classes": classes(theirs)}


def write_modernbert(config: TextConfig) -> Values:
    sizes = effective_value(config, "windows") or (None,) * config.layers
    values = write_rotaries(config.rotaries, sizes, config.d_model // config.heads, "local_rope_theta")
    if values.get("rope_scaling") is not None:
        raise ValueError("scaled rotary embeddings have no counterpart in ModernBERT")
    rotary = {"global_rope_theta": values.get("rope_theta"), "local_rope_theta": values.get("local_rope_theta")}
    windows = write_windows(config, 64)
    kinds = {"layer_types": windows["layer_types"], "local_attention": 2 * windows["sliding_window"]}
    return {name: value for name, value in rotary.items() if value is not None} | kinds | labels(config)


MODERNBERT = Family(
    "modernbert",
    "ModernBERT",
    TextConfig,
    architectures(
        "ModernBert",
        BASE,
        {
            "Model": "",
            "ForMaskedLM": f"{HEAD} \n bias decoder.bias",
            "ForSequenceClassification": f"{HEAD} \n classifier classifier",
            "ForTokenClassification": f"{HEAD} \n classifier classifier",
            "ForQuestionAnswering": f"{HEAD} \n ends classifier",
        },
        prefix="model.",
        copies={"decoder.weight": ("model.embeddings.tok_embeddings.weight",)},
    ),
    (
        Field("vocabulary", "vocab_size"),
        Field("d_model", "hidden_size"),
        Field("layers", "num_hidden_layers"),
        Field("heads", "num_attention_heads"),
        Field("d_hidden", "intermediate_size"),
        Field("positions", "max_position_embeddings", 8192),
        Field("eps", "norm_eps", 1e-5),
        Field("qkv_bias", "attention_bias", False),
        Field("output_bias", "attention_bias", False),
        Field("bias", "mlp_bias", False),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("head_bias", "classifier_bias", False),
        activation("activation", "hidden_activation", "gelu"),
        activation("mask_activation", "classifier_activation", "gelu"),
        activation("head_activation", "classifier_activation", "gelu"),
        mapped_field("norm", "norm_bias", False, {False: "layer_no_bias", True: "layer"}),
        mapped_field("pooling", "classifier_pooling", "cls", {"cls": "first", "mean": "mean"}),
    ),
    fixed={"segments": 0, "arrangement": "pre", "gated": True, "dropout": 0.0, "first_norm": False}
    | {"head_norm": True, "token_head": True},
    only={"decoder_bias": (True,), "tie_word_embeddings": (True,)},
    read=read_modernbert,
    types=WINDOW_TYPES
    | {"rope_parameters": dict[str, Any], "global_attn_every_n_layers": int, "local_attention": int}
    | {"global_rope_theta": float, "local_rope_theta": float},
    write=write_modernbert,
    dropped=(*rope.NAMES, "global_attn_every_n_layers", "sliding_window", "global_rope_theta", "local_rope_theta"),
)

FAMILIES = (MODERNBERT,)
