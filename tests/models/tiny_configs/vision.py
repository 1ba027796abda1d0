"""ViT and DETR."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.tiny_configs.case import Case

VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
       "patch_size": 8, "layer_norm_eps": 0.02}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "layer_type": "bottleneck"}
DETR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 5,
        "use_timm_backbone": False, "use_pretrained_backbone": False, "num_labels": 4}  # fmt: skip


def with_backbone(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"backbone_config": transformers.ResNetConfig(**RESNET, out_features=["stage4"])}


CASES = {
    "vit": Case("ViTModel", VIT),
    "vit-classifier": Case(
        "ViTForImageClassification",
        VIT | {"qkv_bias": False, "hidden_act": "relu", "num_labels": 7, "image_size": (32, 48)},
    ),
    "detr": Case("DetrForObjectDetection", DETR, before=with_backbone),
}  # fmt: skip
