"""Phi-3 and Phi-4-mini."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA

FACTORS: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1000.0,
                           "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}  # fmt: skip


def long_rope(original: int) -> dict[str, Any]:
    return {"rope_parameters": dict(FACTORS), "original_max_position_embeddings": original}


CASES = {
    "phi3": Case("Phi3ForCausalLM", LLAMA | {"sliding_window": 4}),
    "phi3-partial": Case(
        "Phi3ForCausalLM",
        LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}, "head_dim": 8,
                 "tie_word_embeddings": True},
    ),
    "phi3-short": Case("Phi3ForCausalLM", LLAMA | long_rope(36)),
    "phi3-long": Case("Phi3ForCausalLM", LLAMA | long_rope(6), padded=False),
}  # fmt: skip
