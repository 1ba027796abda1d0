"""Gemma 3 (text)."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA

GEMMA3 = LLAMA | {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 10}

CASES = {
    "gemma3": Case(
        "Gemma3ForCausalLM",
        GEMMA3 | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                  "final_logit_softcapping": 3.0},
    ),
    "gemma3-scaled": Case(
        "Gemma3ForCausalLM",
        GEMMA3 | {"attention_bias": True, "sliding_window_pattern": 2, "tie_word_embeddings": False,
                  "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                                      "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
    ),
}  # fmt: skip
