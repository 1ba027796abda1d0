"""OLMo 2: norms on the outputs of sublayers, and on the queries and keys of all heads together."""

from __future__ import annotations

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import (
    ATTENTION_BIAS,
    LLAMA_PARTS,
    OUTPUT_NORMS,
    causal,
    read_rotary,
    sizes,
    write_rotary,
)
from regard.models.checkpoints.family import Family, Field, activation
from regard.models.language import LanguageConfig

QK_NORMS = """
    stack.layers.*.attention.query_norm.norm  model.layers.*.self_attn.q_norm
    stack.layers.*.attention.key_norm.norm    model.layers.*.self_attn.k_norm
"""

OLMO2 = Family(
    "olmo2",
    "OLMo 2",
    LanguageConfig,
    {"Olmo2ForCausalLM": causal(OUTPUT_NORMS, QK_NORMS)},
    (
        *sizes(eps=1e-5),
        *ATTENTION_BIAS,
        Field("kv_heads", "num_key_value_heads", None),
        Field("tied", "tie_word_embeddings", False),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed=LLAMA_PARTS | {"arrangement": "output", "bias": False, "qk_norm": True, "qk_norm_span": "token"},
    read=read_rotary,
    types=rope.TYPES,
    write=write_rotary,
    dropped=rope.NAMES,
)

FAMILIES = (OLMO2,)
