"""Gemma 3 (text): local and global layers have rotary embeddings with different bases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from regard.field_types import short_repr
from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import (
    ATTENTION_BIAS,
    LLAMA_PARTS,
    QK_NORMS,
    SANDWICH_NORMS,
    WINDOW_TYPES,
    causal,
    read_windows,
    scalar,
    sizes,
    write_windows,
)
from regard.models.checkpoints.family import Family, Field, Values, activation, check_types
from regard.models.config_fields import effective_value
from regard.models.language import LanguageConfig

LOCAL, GLOBAL = "sliding_attention", "full_attention"
BASES = {LOCAL: 10000.0, GLOBAL: 1000000.0}


def read_rotaries(theirs: Values, kinds: Sequence[str], bases: dict[str, float], local_base: str) -> Values:
    """Return the rotary embeddings of layers of these types, one for all if they are equal.

    They are nested in rope_parameters by type; values that are not there have the names of older releases, which scale
    global layers only. bases: the defaults. local_base: the older name of the base of local layers.
    """
    parameters, scaling = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling") or {}
    if set(parameters) - {LOCAL, GLOBAL}:
        raise ValueError(f"rope_parameters = {short_repr(parameters)} must have only the keys {LOCAL} and {GLOBAL}")
    if parameters and scaling:
        raise ValueError("rope_parameters and rope_scaling are both given; remove one from config.json")
    if scaling.get("rope_type") is None and scaling.get("type") not in (None, "default"):
        raise ValueError("rope_scaling needs rope_type: transformers does not read its type in models of this family")
    values = {
        LOCAL: {"rope_theta": theirs.get(local_base), "rope_parameters": parameters.get(LOCAL)},
        GLOBAL: {name: theirs.get(name) for name in rope.NAMES} | {"rope_parameters": parameters.get(GLOBAL)},
    }
    for kind, value in values.items():
        check_types(value, rope.TYPES, f"{kind}.")
        if (value.get("rope_parameters") or {}).get("truncate") is False:  # transformers ignores it
            raise ValueError(f"truncate = False of {kind} is not supported; remove it from rope_parameters")
    more = {"max_position_embeddings": theirs.get("max_position_embeddings")}
    by_type = {kind: rope.read(value | more, base=bases[kind]) for kind, value in values.items()}
    rotaries = tuple(by_type[kind] for kind in kinds)
    return {"rotary": rotaries[0]} if len({*rotaries}) == 1 else {"layer_rotary": rotaries}


def read_gemma3(theirs: Values) -> Values:
    layers, every = theirs["num_hidden_layers"], theirs.get("sliding_window_pattern") or 6
    if theirs.get("attn_logit_softcapping") is not None:
        raise ValueError("attn_logit_softcapping is not supported for gemma3_text; expected null")
    kinds = theirs.get("layer_types") or [LOCAL if (n + 1) % every else GLOBAL for n in range(layers)]
    windows = read_windows({"sliding_window": 4096} | theirs, kinds)
    rotaries = read_rotaries(theirs, kinds, BASES, "rope_local_base_freq")
    return rotaries | windows | {"embedding_scale": math.sqrt(theirs["hidden_size"])}


def write_rotaries(rotaries: Any, windows: Any, d_head: int, local_base: str) -> Values:
    """Write the rotary embeddings of local and global layers under the names of older releases."""
    values: Values = {}
    for kind in (GLOBAL, LOCAL):
        of_kind = {rotary for rotary, size in zip(rotaries, windows, strict=True) if (size is None) == (kind == GLOBAL)}
        if len(of_kind) > 1:
            raise ValueError("all layers with a window, and all without one, must have the same rotary embedding")
        if of_kind:
            written = rope.write(of_kind.pop(), d_head)
            if kind == LOCAL and written["rope_scaling"] is not None:
                raise ValueError("the rotary embedding of layers with a window must not be scaled")
            values |= written if kind == GLOBAL else {local_base: written["rope_theta"]}
    return values


def write_gemma3(config: LanguageConfig) -> Values:
    windows = effective_value(config, "windows") or (None,) * config.layers
    d_head = effective_value(config, "d_head")
    return write_rotaries(config.rotaries, windows, d_head, "rope_local_base_freq") | write_windows(config, 4096)


GEMMA3 = Family(
    "gemma3_text",
    "Gemma 3 (text)",
    LanguageConfig,
    {"Gemma3ForCausalLM": causal(SANDWICH_NORMS, QK_NORMS)},
    (
        *sizes(d_head=256, positions=131072),
        *ATTENTION_BIAS,
        Field("kv_heads", "num_key_value_heads", 4),
        Field("tied", "tie_word_embeddings", True),
        Field("scale", "query_pre_attn_scalar", 256, lambda d_model: d_model**-0.5, scalar),
        Field("final_softcap", "final_logit_softcapping", None),
        activation("activation", "hidden_activation", "gelu_pytorch_tanh"),
    ),
    fixed=LLAMA_PARTS | {"arrangement": "sandwich", "norm": "unit_rms", "bias": False, "qk_norm": True},
    only={"use_bidirectional_attention": (False,)},
    read=read_gemma3,
    types=WINDOW_TYPES
    | {"rope_parameters": dict[str, Any], "rope_local_base_freq": float, "sliding_window_pattern": int}
    | {"attn_logit_softcapping": float, "query_pre_attn_scalar": float},
    write=write_gemma3,
    dropped=(*rope.NAMES, "hidden_act", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
)

FAMILIES = (GEMMA3,)
