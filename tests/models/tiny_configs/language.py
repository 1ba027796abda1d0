"""GPT-2, Llama, Mistral, Qwen2 and Gemma 2."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.text import TEXT

GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "n_inner": 56,
        "layer_norm_epsilon": 0.02, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA = TEXT | {
    "rms_norm_eps": 0.03,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, **scaling}}


CASES = {
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "gpt2-untied": Case(
        "GPT2LMHeadModel",
        GPT2 | {"tie_word_embeddings": False, "n_inner": None, "activation_function": "silu"},
    ),
    "llama": Case("LlamaForCausalLM", LLAMA),
    "llama-tied": Case("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "head_dim": 12}),
    "llama-bias": Case("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": Case("LlamaForCausalLM", LLAMA | {"attention_bias": True}),
    "llama-linear": Case("LlamaForCausalLM", LLAMA | rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": Case(
        "LlamaForCausalLM",
        LLAMA | rope(rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 6},
        padded=False,
    ),
    "llama-yarn": Case(
        "LlamaForCausalLM",
        LLAMA | rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=10),
    ),
    "llama-llama3": Case(
        "LlamaForCausalLM",
        LLAMA | rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=16),
    ),
    "mistral": Case("MistralForCausalLM", LLAMA | {"sliding_window": 4}),
    "mistral-full": Case("MistralForCausalLM", LLAMA | {"sliding_window": None}),
    "qwen2": Case("Qwen2ForCausalLM", LLAMA),
    "qwen2-window": Case(
        "Qwen2ForCausalLM",
        LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        LLAMA | {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0,
                 "final_logit_softcapping": 3.0},
    ),
}  # fmt: skip
