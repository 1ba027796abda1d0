"""DINOv2."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.vision import VIT

DINOV2 = {name: value for name, value in VIT.items() if name != "intermediate_size"} | {"mlp_ratio": 2}

CASES = {
    "dinov2": Case("Dinov2Model", DINOV2),
    "dinov2-classifier": Case(
        "Dinov2ForImageClassification",
        DINOV2 | {"use_swiglu_ffn": True, "qkv_bias": False, "num_labels": 7, "mlp_ratio": 3},
    ),
}
