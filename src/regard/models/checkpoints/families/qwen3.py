"""Qwen3."""

from __future__ import annotations

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import (
    ATTENTION_BIAS,
    LLAMA_PARTS,
    PRE_NORMS,
    QK_NORMS,
    WINDOW_TYPES,
    causal,
    read_qwen2,
    sizes,
    write_qwen2,
)
from regard.models.checkpoints.family import Family, Field, activation
from regard.models.language import LanguageConfig

QWEN3 = Family(
    "qwen3",
    "Qwen3",
    LanguageConfig,
    {"Qwen3ForCausalLM": causal(PRE_NORMS, QK_NORMS)},
    (
        *sizes(d_head=128, positions=32768),
        *ATTENTION_BIAS,
        Field("kv_heads", "num_key_value_heads", 32),
        Field("tied", "tie_word_embeddings", False),
        activation("activation", "hidden_act", "silu"),
    ),
    fixed=LLAMA_PARTS | {"bias": False, "qk_norm": True},
    read=read_qwen2,
    types=rope.TYPES | WINDOW_TYPES | {"max_window_layers": int, "use_sliding_window": bool},
    write=write_qwen2,
    dropped=(*rope.NAMES, "max_window_layers"),
)

FAMILIES = (QWEN3,)
