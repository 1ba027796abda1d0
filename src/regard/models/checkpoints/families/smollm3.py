"""SmolLM3: some layers have no positions (NoPE), and only those may have a window."""

from __future__ import annotations

from dataclasses import replace

from regard.field_types import short_repr
from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import (
    ATTENTION_BIAS,
    LLAMA_PARTS,
    PRE_NORMS,
    WINDOW_TYPES,
    causal,
    read_windows,
    sizes,
    write_rotary,
    write_windows,
)
from regard.models.checkpoints.family import Family, Field, Values, activation
from regard.models.language import LanguageConfig


def read_smollm3(theirs: Values) -> Values:
    layers, every = theirs["num_hidden_layers"], theirs.get("no_rope_layer_interval") or 4
    rotated = theirs.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(layers)]  # 0 means none
    if len(rotated) < layers:
        raise ValueError(f"no_rope_layers = {short_repr(rotated)} must have a value for each of the {layers} layers")
    sliding = theirs.get("use_sliding_window") and theirs.get("sliding_window") is not None
    kinds = ["sliding_attention" if sliding and not rotated[n] else "full_attention" for n in range(layers)]
    rotary = rope.read(theirs, base=2000000.0)
    rotaries = tuple(rotary if rotated[n] else None for n in range(layers))
    same = {"rotary": rotary} if all(rotaries) else {"layer_rotary": rotaries}
    return same | read_windows(theirs, kinds)


def write_smollm3(config: LanguageConfig) -> Values:
    rotaries = {rotary for rotary in config.rotaries if rotary is not None}
    if len(rotaries) != 1:
        raise ValueError("all layers with positions must have the same rotary embedding")
    values = write_windows(config)
    rotary = write_rotary(replace(config, rotary=rotaries.pop(), layer_rotary=()))
    layers = [int(rotary is not None) for rotary in config.rotaries]
    return rotary | values | {"no_rope_layers": layers, "use_sliding_window": values["sliding_window"] is not None}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3",
    LanguageConfig,
    {"SmolLM3ForCausalLM": causal(PRE_NORMS)},
    (
        *sizes(positions=32768),
        *ATTENTION_BIAS,
        Field("bias", "mlp_bias", False),
        Field("kv_heads", "num_key_value_heads", 4),
        Field("tied", "tie_word_embeddings", True),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed=LLAMA_PARTS,
    read=read_smollm3,
    types=rope.TYPES
    | WINDOW_TYPES
    | {"no_rope_layers": list[int], "no_rope_layer_interval": int, "use_sliding_window": bool},
    write=write_smollm3,
    dropped=(*rope.NAMES, "no_rope_layer_interval"),
)

FAMILIES = (SMOLLM3,)
