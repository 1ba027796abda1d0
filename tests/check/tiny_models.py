"""Tiny random models of 20 architectures, for checks of whole models."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.integrations.families import DECODERS, ENCODERS, GROUPED, OTHERS, PAIRS

_SHORT = {"sliding_window": 4, "head_dim": 8}
_MORE: dict[str, tuple[Any, Any]] = {
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(**GROUPED, **_SHORT, layer_types=["sliding_attention", "full_attention"]),
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=8)),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED, sliding_window=4)),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**GROUPED)),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config(**GROUPED, no_rope_layer_interval=2)),
}
_NAMES = ("bert", "roberta", "distilbert", "modernbert", "gpt2", "llama", "mistral", "qwen2", "gemma2", "gpt_neox")
_NAMES += ("gpt_oss", "t5", "bart", "marian", "whisper", "llama4")
_FOUND: dict[str, Any] = DECODERS | ENCODERS | PAIRS | OTHERS
MODELS = {name: _FOUND[name][:2] for name in _NAMES} | _MORE


def build(name: str) -> Any:
    """The model in eval mode, with weights large enough that attention is not uniform."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind._from_config(type(config)(**config.to_dict()), attn_implementation="eager").eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 or key.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 1.0)
    return model
