"""SmolLM3."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA, rope

CASES = {
    "smollm3": Case("SmolLM3ForCausalLM", LLAMA | {"no_rope_layer_interval": 2}),
    "smollm3-window": Case(
        "SmolLM3ForCausalLM",
        LLAMA
        | rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=16)
        | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 4, "attention_bias": True},
    ),
}
