"""OLMo 2."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA, rope

CASES = {
    "olmo2": Case("Olmo2ForCausalLM", LLAMA),
    "olmo2-bias": Case(
        "Olmo2ForCausalLM", LLAMA | rope(rope_type="linear", factor=2.0) | {"attention_bias": True, "head_dim": 12}
    ),
}
