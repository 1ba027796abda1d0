"""DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.language import LLAMA, rope

LATENT = LLAMA | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=10, mscale=0.7, mscale_all_dim=0.9)


def correct_scores(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))


CASES = {
    "deepseek-v2": Case("DeepseekV2ForCausalLM", LATENT, experts_by_name=True),
    "deepseek-v2-groups": Case(
        "DeepseekV2ForCausalLM",
        LATENT | YARN | {"topk_method": "group_limited_greedy", "q_lora_rank": None, "first_k_dense_replace": 0},
    ),
    "deepseek-v3": Case("DeepseekV3ForCausalLM", LATENT | YARN, after=correct_scores, experts_by_name=True),
    "deepseek-v3-plain": Case(
        "DeepseekV3ForCausalLM",
        LATENT
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False, "attention_bias": True},
        after=correct_scores,
    ),
    "deepseek-v3-dense": Case("DeepseekV3ForCausalLM", LATENT | {"first_k_dense_replace": 3}),
}
