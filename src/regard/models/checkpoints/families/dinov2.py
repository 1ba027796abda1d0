"""DINOv2: ViT with scaled residuals, and with gated feed-forward layers in the largest model."""

from __future__ import annotations

from regard.models.checkpoints.families.vision import VIT, VIT_BASE, read_vit, write_vit
from regard.models.checkpoints.family import Architecture, Family, Field, Values
from regard.models.checkpoints.tensor_names import Extras, Rule, table
from regard.models.vision import ImageClassifier, VisionConfig, VisionTransformer

SCALES = """
    stack.layers.*.attention_residual.scale    encoder.layer.*.layer_scale1.lambda1
    stack.layers.*.feedforward_residual.scale  encoder.layer.*.layer_scale2.lambda1
"""
PLAIN, GATED = ("mlp.fc1", "mlp.fc2"), ("mlp.weights_in", "mlp.weights_out")


def base_names(config: VisionConfig, ours: str = "", theirs: str = "") -> tuple[Rule, ...]:
    up, output = GATED if config.gated else PLAIN
    names = VIT_BASE.replace("layernorm_before", "norm1").replace("layernorm_after", "norm2")
    names = names.replace("*.intermediate.dense", f"*.{up}").replace("*.output.dense", f"*.{output}")
    return table(names + SCALES, ours=ours, theirs=theirs)


def classifier_names(config: VisionConfig) -> tuple[Rule, ...]:
    return base_names(config, "encoder.", "dinov2.") + table("classifier classifier")


def gated_width(d_hidden: int) -> int:
    """Two thirds of a width, rounded up to a multiple of 8."""
    return (int(d_hidden * 2 / 3) + 7) // 8 * 8


def read_dinov2(theirs: Values) -> Values:
    d_hidden, gated = theirs["hidden_size"] * (theirs.get("mlp_ratio") or 4), bool(theirs.get("use_swiglu_ffn"))
    values = {"d_hidden": gated_width(d_hidden) if gated else d_hidden, "gated": gated}
    return read_vit({"patch_size": 14} | theirs) | values | ({"activation": "silu"} if gated else {})


def write_dinov2(config: VisionConfig) -> Values:
    ratios = [n for n in range(1, 65) if config.d_hidden in (n * config.d_model, gated_width(n * config.d_model))]
    ratios = [n for n in ratios if config.gated or config.d_hidden == n * config.d_model]
    if not ratios:
        raise ValueError(f"d_hidden = {config.d_hidden} must be a multiple of d_model = {config.d_model}")
    # the token of masked patches is not part of our models
    return write_vit(config) | {"mlp_ratio": ratios[-1], "use_swiglu_ffn": config.gated, "use_mask_token": False}


DINOV2 = Family(
    "dinov2",
    "DINOv2",
    VisionConfig,
    {
        "Dinov2Model": Architecture(
            VisionTransformer,
            base_names,
            Extras(reported=("embeddings.mask_token",)),
            prefix="dinov2.",
            unused=("classes", "pooling"),
        ),
        "Dinov2ForImageClassification": Architecture(
            ImageClassifier, classifier_names, Extras(reported=("dinov2.embeddings.mask_token",)), prefix="dinov2."
        ),
    },
    (
        *(entry for entry in VIT.fields if entry.ours not in ("d_hidden", "eps")),
        Field("eps", "layer_norm_eps", 1e-6),
    ),
    fixed={"arrangement": "layer_scale", "norm": "layer", "stem": (), "pooling": "first_mean"},
    read=read_dinov2,
    types={"image_size": int | list[int], "patch_size": int | list[int], "mlp_ratio": int, "use_swiglu_ffn": bool},
    write=write_dinov2,
)

FAMILIES = (DINOV2,)
