"""Qwen3."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA

CASES = {
    "qwen3": Case("Qwen3ForCausalLM", LLAMA | {"head_dim": 12}),
    "qwen3-window": Case(
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
                 "attention_bias": True, "tie_word_embeddings": True},
    ),
}  # fmt: skip
