"""StarCoder2."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA, rope

STARCODER2 = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"} | {"norm_epsilon": 0.03}

CASES = {
    "starcoder2": Case("Starcoder2ForCausalLM", STARCODER2),
    "starcoder2-window": Case(
        "Starcoder2ForCausalLM",
        STARCODER2 | rope(rope_type="linear", factor=2.0)
        | {"sliding_window": 4, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu"},
    ),
}  # fmt: skip
