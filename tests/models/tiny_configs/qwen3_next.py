"""Qwen3-Next."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA

QWEN3_NEXT = LLAMA | {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

DENSE = QWEN3_NEXT | {
    "attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [1], "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "full_attention", "linear_attention"],
}  # fmt: skip

CASES = {
    "qwen3-next": Case("Qwen3NextForCausalLM", QWEN3_NEXT, experts_by_name=True, repeats=False),
    "qwen3-next-dense": Case("Qwen3NextForCausalLM", DENSE),
}
