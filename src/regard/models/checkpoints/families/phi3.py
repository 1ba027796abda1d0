"""Phi-3 and Phi-4-mini: fused projections, LongRoPE, and rotary embeddings of a part of each head."""

from __future__ import annotations

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import (
    LLAMA_PARTS,
    PRE_NORMS,
    causal,
    sizes,
    write_mistral,
)
from regard.models.checkpoints.family import Family, Field, Values, activation
from regard.models.language import LanguageConfig
from regard.positions import LongRope

FUSED = """
    stack.layers.*.feedforward.up      model.layers.*.mlp.gate_up_proj
    stack.layers.*.feedforward.output  model.layers.*.mlp.down_proj
"""


def read_phi3(theirs: Values) -> Values:
    values: Values = {rope.ORIGINAL: 4096} | theirs
    for name in ("rope_parameters", "rope_scaling"):
        parameters = dict(theirs.get(name) or {})
        kind = parameters.get("rope_type") or parameters.get("type")
        if kind in ("su", "yarn"):  # names of longrope in the first releases
            values[name] = parameters | {"rope_type": "longrope"}
        elif kind not in (None, "default", "longrope"):
            raise ValueError(f"rope_type = {kind!r} is not supported for phi3; supported are default, longrope")
    d_head = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    size = theirs.get("sliding_window")  # of all layers: transformers does not read layer_types
    windows = () if size is None else (size,) * theirs["num_hidden_layers"]
    return {"rotary": rope.read(values, base=10000.0, d_head=d_head), "windows": windows}


def write_phi3(config: LanguageConfig) -> Values:
    values = write_mistral(config)
    scaling = None if config.rotary is None else config.rotary.scaling
    if scaling is None:
        return values
    if not isinstance(scaling, LongRope):
        raise ValueError(f"the scaling {scaling!r} has no counterpart in Phi-3")
    return values | {rope.ORIGINAL: scaling.original}


PHI3 = Family(
    "phi3",
    "Phi-3",
    LanguageConfig,
    {"Phi3ForCausalLM": causal(PRE_NORMS, qkv="qkv_proj", feedforward=FUSED)},
    (
        *sizes(positions=4096, eps=1e-5),
        Field("kv_heads", "num_key_value_heads", None),
        Field("tied", "tie_word_embeddings", False),
        Field("dropout", "resid_pdrop", 0.0),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed={name: value for name, value in LLAMA_PARTS.items() if name != "dropout"} | {"bias": False},
    only={"attention_bias": (False,)},
    read=read_phi3,
    types=rope.TYPES | {"sliding_window": int, rope.ORIGINAL: int},
    write=write_phi3,
    dropped=(*rope.NAMES, "layer_types"),
)

FAMILIES = (PHI3,)
