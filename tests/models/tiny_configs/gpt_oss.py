"""gpt-oss."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA, rope

GPT_OSS = LLAMA | {"head_dim": 12, "sliding_window": 4, "num_local_experts": 5, "num_experts_per_tok": 2}

CASES = {
    "gpt-oss": Case("GptOssForCausalLM", GPT_OSS | {"swiglu_limit": 0.7}),
    "gpt-oss-plain": Case(
        "GptOssForCausalLM",
        GPT_OSS | rope(rope_type="default") | {"attention_bias": False, "layer_types": ["full_attention"] * 3},
    ),
}
