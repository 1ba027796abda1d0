"""GPT-2, Llama, Mistral, Qwen2 and Gemma 2."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.field_types import short_repr
from regard.models.checkpoints.families import rope
from regard.models.checkpoints.family import (
    Architecture,
    Family,
    Field,
    Values,
    activation,
    rule_table,
)
from regard.models.checkpoints.tensor_names import Extras
from regard.models.config_fields import effective_value
from regard.models.language import LanguageConfig, LanguageModel
from regard.nn import Rotary


def gpt2_hidden(theirs: Values) -> Values:
    return {"d_hidden": theirs.get("n_inner") or 4 * theirs["n_embd"]}


def gpt2_mask(_: LanguageConfig, stored: Tensor) -> Tensor:
    """Difference to the causal mask (1, 1, positions, positions), which older releases store."""
    return stored - torch.ones(stored.shape[-2:]).tril()


GPT2_NAMES = """
    embedding                                 transformer.wte
    position                                  transformer.wpe
    stack.layers.*.attention_residual.norm    transformer.h.*.ln_1
    stack.layers.*.attention.qkv              transformer.h.*.attn.c_attn^T
    stack.layers.*.attention.output           transformer.h.*.attn.c_proj^T
    stack.layers.*.feedforward_residual.norm  transformer.h.*.ln_2
    stack.layers.*.feedforward.up             transformer.h.*.mlp.c_fc^T
    stack.layers.*.feedforward.output         transformer.h.*.mlp.c_proj^T
    stack.norm                                transformer.ln_f
    head                                      lm_head
"""

GPT2 = Family(
    "gpt2",
    "GPT-2",
    LanguageConfig,
    {
        "GPT2LMHeadModel": Architecture(
            LanguageModel,
            rule_table(GPT2_NAMES),
            Extras(
                ignored=("transformer.h.*.attn.masked_bias",),  # the score of a masked key in older releases
                computed={"transformer.h.*.attn.bias": gpt2_mask},
                copies={"lm_head.weight": ("transformer.wte.weight",)},
            ),
            prefix="transformer.",
        )
    },
    (
        Field("vocabulary", "vocab_size"),
        Field("d_model", "n_embd"),
        Field("layers", "n_layer"),
        Field("heads", "n_head"),
        Field("positions", "n_positions", 1024),
        Field("eps", "layer_norm_epsilon", 1e-5),
        Field("dropout", "resid_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
        Field("tied", "tie_word_embeddings", True),
        activation("activation", "activation_function", "gelu_new"),
    ),
    fixed={"arrangement": "pre", "norm": "layer", "bias": True},
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    read=gpt2_hidden,
    types={"n_inner": int},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    write=lambda config: {"n_inner": config.d_hidden, "embd_pdrop": config.dropout},
)


def rotary_frequencies(config: LanguageConfig, stored: Tensor) -> Tensor:
    """Relative difference to the unscaled rotary frequencies, which older releases store."""
    rotary = next((each for each in config.rotaries if each is not None), Rotary())
    d_rotary = rotary.d_rotary or effective_value(config, "d_head")
    return stored / rotary.base ** (-torch.arange(0, d_rotary, 2).double() / d_rotary) - 1


QKV, GATED = (
    "{q_proj,k_proj,v_proj}",
    """
    stack.layers.*.feedforward.up      model.layers.*.mlp.{gate_proj,up_proj}
    stack.layers.*.feedforward.output  model.layers.*.mlp.down_proj
""",
)


def causal(*layers: str, qkv: str = QKV, feedforward: str = GATED) -> Architecture:
    """The architecture of models like Llama. layers: tables of the norms and of other parts of a layer."""
    names = f"""
        embedding                          model.embed_tokens
        stack.layers.*.attention.qkv       model.layers.*.self_attn.{qkv}
        stack.layers.*.attention.output    model.layers.*.self_attn.o_proj
        {feedforward}
        {"".join(layers)}
        stack.norm                         model.norm
        head                               lm_head
    """
    extras = Extras(
        computed={"model.layers.*.self_attn.rotary_emb.inv_freq": rotary_frequencies},
        copies={"lm_head.weight": ("model.embed_tokens.weight",)},
    )
    return Architecture(LanguageModel, rule_table(names), extras, prefix="model.")


PRE_NORMS = """
    stack.layers.*.attention_residual.norm    model.layers.*.input_layernorm
    stack.layers.*.feedforward_residual.norm  model.layers.*.post_attention_layernorm
"""
SANDWICH_NORMS = """
    stack.layers.*.attention_residual.norm     model.layers.*.input_layernorm
    stack.layers.*.attention_residual.after    model.layers.*.post_attention_layernorm
    stack.layers.*.feedforward_residual.norm   model.layers.*.pre_feedforward_layernorm
    stack.layers.*.feedforward_residual.after  model.layers.*.post_feedforward_layernorm
"""
OUTPUT_NORMS = """
    stack.layers.*.attention_residual.norm    model.layers.*.post_attention_layernorm
    stack.layers.*.feedforward_residual.norm  model.layers.*.post_feedforward_layernorm
"""
QK_NORMS = """
    stack.layers.*.attention.query_norm  model.layers.*.self_attn.q_norm
    stack.layers.*.attention.key_norm    model.layers.*.self_attn.k_norm
"""
SIZES = (
    Field("vocabulary", "vocab_size"),
    Field("d_model", "hidden_size"),
    Field("layers", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
    Field("d_hidden", "intermediate_size"),
    Field("d_head", "head_dim", None),
    Field("positions", "max_position_embeddings", 2048),
    Field("eps", "rms_norm_eps", 1e-6),
    Field("attention_dropout", "attention_dropout", 0.0),
)


def sizes(**defaults: Any) -> tuple[Field, ...]:
    """Return `SIZES` with other defaults, by our names."""
    return tuple(replace(entry, default=defaults.get(entry.ours, entry.default)) for entry in SIZES)


ATTENTION_BIAS = (Field("qkv_bias", "attention_bias", False), Field("output_bias", "attention_bias", False))
WINDOW_TYPES: dict[str, Any] = {"layer_types": list[str], "sliding_window": int}
LLAMA_PARTS = {"arrangement": "pre", "norm": "rms", "gated": True, "dropout": 0.0}


def read_rotary(theirs: Values, base: float = 10000.0) -> Values:
    return {"rotary": rope.read(theirs, base=base)}


def write_rotary(config: LanguageConfig) -> Values:
    if config.layer_rotary:
        raise ValueError("all layers must have the same rotary embedding")
    return rope.write(config.rotary, effective_value(config, "d_head"))


def read_windows(theirs: Values, kinds: list[str]) -> Values:
    """Read the window of every layer from its type, `kinds` by default."""
    kinds, size = theirs.get("layer_types") or kinds, theirs.get("sliding_window")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != theirs["num_hidden_layers"]:
        raise ValueError(
            f"layer_types = {short_repr(kinds)} is not supported; expected full or sliding attention per layer"
        )
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return {"windows": windows if any(width is not None for width in windows) else ()}


def write_windows(config: Any, unused: int | None = None) -> Values:
    """Write the type of every layer. unused: the window if no layer has one; some models do not accept null."""
    windows = effective_value(config, "windows") or (None,) * config.layers
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1:
        raise ValueError(f"all windows must have the same size, got {sorted(sizes)}")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    return {"layer_types": kinds, "sliding_window": sizes.pop() if sizes else unused}


LLAMA = Family(
    "llama",
    "Llama",
    LanguageConfig,
    {"LlamaForCausalLM": causal(PRE_NORMS)},
    (
        *SIZES,
        *ATTENTION_BIAS,
        Field("bias", "mlp_bias", False),
        Field("kv_heads", "num_key_value_heads", None),
        Field("tied", "tie_word_embeddings", False),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed=LLAMA_PARTS,
    only={"pretraining_tp": (1,)},
    read=read_rotary,
    types=rope.TYPES,
    write=write_rotary,
    dropped=rope.NAMES,
)


def read_mistral(theirs: Values) -> Values:
    size = theirs.get("sliding_window", 4096)
    return read_rotary(theirs) | {"windows": () if size is None else (size,)}


def write_mistral(config: LanguageConfig) -> Values:
    values = write_windows(config)
    if len(set(values["layer_types"])) > 1:
        raise ValueError("all layers must have the same window")
    return write_rotary(config) | {"sliding_window": values["sliding_window"]}


MISTRAL = Family(
    "mistral",
    "Mistral",
    LanguageConfig,
    {"MistralForCausalLM": causal(PRE_NORMS)},
    (
        *SIZES,
        Field("kv_heads", "num_key_value_heads", 8),
        Field("tied", "tie_word_embeddings", False),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed=LLAMA_PARTS | {"bias": False},
    read=read_mistral,
    types=rope.TYPES | WINDOW_TYPES,
    write=write_mistral,
    dropped=rope.NAMES,
)


def read_qwen2(theirs: Values) -> Values:
    values = theirs.get("max_window_layers")
    first = (28 if values is None else values) if theirs.get("use_sliding_window") else math.inf
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(theirs["num_hidden_layers"])]
    return read_rotary(theirs) | read_windows(theirs, kinds)


def write_qwen2(config: LanguageConfig) -> Values:
    values = write_windows(config)
    return write_rotary(config) | values | {"use_sliding_window": values["sliding_window"] is not None}


QWEN2 = Family(
    "qwen2",
    "Qwen2",
    LanguageConfig,
    {"Qwen2ForCausalLM": causal(PRE_NORMS)},
    (
        *SIZES,
        Field("kv_heads", "num_key_value_heads", 32),
        Field("tied", "tie_word_embeddings", False),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed=LLAMA_PARTS | {"bias": False, "qkv_bias": True},
    read=read_qwen2,
    types=rope.TYPES | WINDOW_TYPES | {"max_window_layers": int, "use_sliding_window": bool},
    write=write_qwen2,
    dropped=(*rope.NAMES, "max_window_layers"),
)


def read_gemma2(theirs: Values) -> Values:
    kinds = ["sliding_attention", "full_attention"] * theirs["num_hidden_layers"]
    windows = read_windows({"sliding_window": 4096} | theirs, kinds[: theirs["num_hidden_layers"]])
    caps = {
        "softcap": theirs.get("attn_logit_softcapping", 50.0),  # null means none, absent means the default
        "final_softcap": theirs.get("final_logit_softcapping", 30.0),
    }
    return read_rotary(theirs) | windows | caps | {"embedding_scale": math.sqrt(theirs["hidden_size"])}


def scalar(scale: float | None) -> float:
    """Return the width d with scale = 1 / sqrt(d), as an integer if it is one."""
    if scale is None:
        raise ValueError("scale must be set")
    width = scale**-2
    return round(width) if math.isclose(width, round(width), rel_tol=1e-9) else width


GEMMA2 = Family(
    "gemma2",
    "Gemma 2",
    LanguageConfig,
    {"Gemma2ForCausalLM": causal(SANDWICH_NORMS)},
    (
        *SIZES,
        Field("kv_heads", "num_key_value_heads", 4),
        Field("tied", "tie_word_embeddings", True),
        Field("scale", "query_pre_attn_scalar", 256, lambda d_model: d_model**-0.5, scalar),
        Field("softcap", "attn_logit_softcapping", None),
        Field("final_softcap", "final_logit_softcapping", None),
        activation("activation", "hidden_activation", "gelu_pytorch_tanh"),
    ),
    fixed=LLAMA_PARTS | {"arrangement": "sandwich", "norm": "unit_rms", "bias": False},
    only={"attention_bias": (False,), "use_bidirectional_attention": (False,)},
    read=read_gemma2,
    types=rope.TYPES
    | WINDOW_TYPES
    | {"attn_logit_softcapping": float, "final_logit_softcapping": float, "query_pre_attn_scalar": float},
    write=lambda config: write_rotary(config) | write_windows(config, 4096),
    dropped=(*rope.NAMES, "hidden_act"),
)

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, MISTRAL, QWEN2, GEMMA2)
