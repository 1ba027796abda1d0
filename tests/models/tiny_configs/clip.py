"""CLIP and SigLIP."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case

TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "layer_norm_eps": 0.02, "eos_token_id": 98, "bos_token_id": 97,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40, "image_size": 32,
    "patch_size": 8, "layer_norm_eps": 0.03,
}  # fmt: skip

CASES = {
    "clip": Case("CLIPModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 20}),
    "clip-largest": Case(
        "CLIPModel",
        {"text_config": TEXT | {"eos_token_id": 2, "hidden_act": "gelu"}, "vision_config": VISION,
         "projection_dim": 20},
    ),
    "siglip": Case("SiglipModel", {"text_config": TEXT | {"projection_size": 24}, "vision_config": VISION}),
}  # fmt: skip
