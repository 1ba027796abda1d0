"""ViT and DETR."""

from __future__ import annotations

from typing import Any

from regard.models.checkpoints.families.translation import PAIR, PAIR_ALIASES
from regard.models.checkpoints.family import (
    Architecture,
    Family,
    Field,
    Values,
    activation,
    classes,
    common_value,
    labels,
    rule_table,
)
from regard.models.checkpoints.tensor_names import Extras
from regard.models.detection import Detr, DetrConfig
from regard.models.resnet import RESNETS, ResNetConfig
from regard.models.vision import ImageClassifier, VisionConfig, VisionTransformer

VIT_BASE = """
    first                                     embeddings.cls_token^1
    position                                  embeddings.position_embeddings^1
    patches                                   embeddings.patch_embeddings.projection
    stack.layers.*.attention_residual.norm    encoder.layer.*.layernorm_before
    stack.layers.*.attention.qkv              encoder.layer.*.attention.attention.{query,key,value}
    stack.layers.*.attention.output           encoder.layer.*.attention.output.dense
    stack.layers.*.feedforward_residual.norm  encoder.layer.*.layernorm_after
    stack.layers.*.feedforward.up             encoder.layer.*.intermediate.dense
    stack.layers.*.feedforward.output         encoder.layer.*.output.dense
    stack.norm                                layernorm
"""


IN_MEMORY = (
    (r"(^|vit\.)layers\.(\d+)\.attention\.q_proj\.", r"\1encoder.layer.\2.attention.attention.query."),
    (r"(^|vit\.)layers\.(\d+)\.attention\.k_proj\.", r"\1encoder.layer.\2.attention.attention.key."),
    (r"(^|vit\.)layers\.(\d+)\.attention\.v_proj\.", r"\1encoder.layer.\2.attention.attention.value."),
    (r"(^|vit\.)layers\.(\d+)\.attention\.o_proj\.", r"\1encoder.layer.\2.attention.output.dense."),
    (r"(^|vit\.)layers\.(\d+)\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
    (r"(^|vit\.)layers\.(\d+)\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
    (r"(^|vit\.)layers\.(\d+)\.layernorm_", r"\1encoder.layer.\2.layernorm_"),
)
"""Names in a state_dict() of transformers 5, and the names in the files that it writes."""


def sides(value: Any) -> tuple[int, int]:
    """Return height and width, given a number or a pair."""
    height, width = value if isinstance(value, (list, tuple)) else (value, value)
    return height, width


def read_vit(theirs: Values) -> Values:
    height, width = sides(theirs.get("patch_size") or 16)
    if height != width:
        raise ValueError(f"patch_size = {theirs['patch_size']} is not supported; patches must be square")
    return {"image": sides(theirs.get("image_size") or 224), "patch": height, "classes": classes(theirs)}


def write_vit(config: VisionConfig) -> Values:
    height, width = config.image
    return {"image_size": height if height == width else [height, width], "patch_size": config.patch} | labels(config)


VIT = Family(
    "vit",
    "ViT",
    VisionConfig,
    {
        "ViTModel": Architecture(
            VisionTransformer,
            rule_table(VIT_BASE),
            Extras(reported=("pooler",), renamed=IN_MEMORY),
            prefix="vit.",
            unused=("classes",),
        ),
        "ViTForImageClassification": Architecture(
            ImageClassifier,
            rule_table(VIT_BASE, ours="encoder.", theirs="vit.", head="classifier classifier"),
            Extras(reported=("vit.pooler",), renamed=IN_MEMORY),
            prefix="vit.",
        ),
    },
    (
        Field("d_model", "hidden_size"),
        Field("layers", "num_hidden_layers"),
        Field("heads", "num_attention_heads"),
        Field("d_hidden", "intermediate_size"),
        Field("channels", "num_channels", 3),
        Field("eps", "layer_norm_eps", 1e-12),
        Field("qkv_bias", "qkv_bias", True),
        Field("dropout", "hidden_dropout_prob", 0.0),
        Field("attention_dropout", "attention_probs_dropout_prob", 0.0),
        activation("activation", "hidden_act", "gelu"),
    ),
    fixed={"arrangement": "pre", "norm": "layer", "stem": ()},
    read=read_vit,
    types={"image_size": int | list[int], "patch_size": int | list[int]},
    write=write_vit,
)

COUNTERS = tuple(
    f"model.backbone.conv_encoder.model.{norm}.normalization.num_batches_tracked"
    for norm in ("embedder.embedder", "encoder.stages.*.layers.*.layer.*", "encoder.stages.*.layers.*.shortcut")
)
DETR_NAMES = f"""
    backbone.stem.conv                model.backbone.conv_encoder.model.embedder.embedder.convolution
    backbone.stem.norm                model.backbone.conv_encoder.model.embedder.embedder.normalization
    backbone.stages.*.*.parts.*.conv  model.backbone.conv_encoder.model.encoder.stages.*.layers.*.layer.*.convolution
    backbone.stages.*.*.parts.*.norm  model.backbone.conv_encoder.model.encoder.stages.*.layers.*.layer.*.normalization
    backbone.stages.*.*.shortcut.conv model.backbone.conv_encoder.model.encoder.stages.*.layers.*.shortcut.convolution
    backbone.stages.*.*.shortcut.norm model.backbone.conv_encoder.model.encoder.stages.*.layers.*.shortcut.normalization
    project                           model.input_projection^conv
    queries                           model.query_position_embeddings
    decoder.norm                      model.decoder.layernorm
    classifier                        class_labels_classifier
    boxes.0                           bbox_predictor.layers.0
    boxes.2                           bbox_predictor.layers.1
    boxes.4                           bbox_predictor.layers.2
    {PAIR}
"""
RENAMED = (
    (r"^model\.backbone\.model\.", "model.backbone.conv_encoder.model."),  # in memory, in transformers 5
    (r"(coder\.layers\.\d+\.\w+_attn\.)o_proj\.", r"\1out_proj."),
    (r"(coder\.layers\.\d+\.)mlp\.(fc\d\.)", r"\1\2"),
    (r"(conv_encoder\.model\.)conv1\.", r"\1embedder.embedder.convolution."),
    (r"(conv_encoder\.model\.)bn1\.", r"\1embedder.embedder.normalization."),
    *((rf"(conv_encoder\.model\.)layer{n + 1}\.", rf"\1encoder.stages.{n}.layers.") for n in range(4)),
    *((rf"(stages.*)\.conv{n + 1}\.", rf"\1.layer.{n}.convolution.") for n in range(3)),
    *((rf"(stages.*)\.bn{n + 1}\.", rf"\1.layer.{n}.normalization.") for n in range(3)),
    (r"(stages.*)\.downsample\.0\.", r"\1.shortcut.convolution."),
    (r"(stages.*)\.downsample\.1\.", r"\1.shortcut.normalization."),
)
"""Names of timm backbones and names in memory, with the names used in files."""


BACKBONE_TYPES: dict[str, Any] = {
    "model_type": str, "hidden_act": str, "layer_type": str, "embedding_size": int, "num_channels": int,
    "hidden_sizes": list[int], "depths": list[int], "out_features": list[str], "backbone": str,
    "downsample_in_first_stage": bool, "downsample_in_bottleneck": bool,
}  # fmt: skip
BACKBONES = RESNETS | {"resnet101": ResNetConfig(depths=(3, 4, 23, 3))}


def read_backbone(theirs: Values) -> ResNetConfig:
    backbone_config = theirs.get("backbone_config")
    if not backbone_config or theirs.get("use_timm_backbone"):
        name = (backbone_config or {}).get("backbone") or theirs.get("backbone") or "resnet50"
        if name not in BACKBONES:
            raise ValueError(f"backbone = {name!r} is not supported; supported are {', '.join(BACKBONES)}")
        for options in (backbone_config or {}, theirs.get("backbone_kwargs") or {}):
            if (stride := options.get("output_stride")) not in (None, 32):
                raise ValueError(f"output_stride = {stride!r} of the backbone is not supported; supported is 32")
        return BACKBONES[name]
    expected = {"model_type": "resnet", "hidden_act": "relu", "downsample_in_first_stage": False}
    for name, value in (expected | {"downsample_in_bottleneck": False}).items():
        if backbone_config.get(name, value) != value:
            raise ValueError(
                f"{name} = {backbone_config[name]!r} of the backbone is not supported; supported is {value!r}"
            )
    widths, last = (
        tuple(backbone_config.get("hidden_sizes") or (256, 512, 1024, 2048)),
        backbone_config.get("out_features"),
    )
    if last and list(last)[-1] != f"stage{len(widths)}":
        raise ValueError(f"out_features = {last} of the backbone is not supported; the last stage must be among them")
    return ResNetConfig(
        stem=backbone_config.get("embedding_size", 64),
        widths=widths,
        depths=tuple(backbone_config.get("depths") or (3, 4, 6, 3)),
        bottleneck=backbone_config.get("layer_type", "bottleneck") == "bottleneck",
        channels=backbone_config.get("num_channels", 3),
    )


def read_detr(theirs: Values) -> Values:
    return {
        "heads": common_value(theirs, "encoder_attention_heads", "decoder_attention_heads"),
        "d_hidden": common_value(theirs, "encoder_ffn_dim", "decoder_ffn_dim"),
        "backbone": read_backbone(theirs),
        "classes": classes(theirs),
    }


def write_detr(config: DetrConfig) -> Values:
    net = config.backbone
    return {
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_hidden,
        "decoder_ffn_dim": config.d_hidden,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": net.stem,
            "hidden_sizes": list(net.widths),
            "depths": list(net.depths),
            "layer_type": "bottleneck" if net.bottleneck else "basic",
            "num_channels": net.channels,
            "hidden_act": "relu",
            "out_features": [f"stage{len(net.widths)}"],
        },
        "is_encoder_decoder": True,
    } | labels(config)


DETR = Family(
    "detr",
    "DETR",
    DetrConfig,
    {"DetrForObjectDetection": Architecture(Detr, rule_table(DETR_NAMES), Extras(ignored=COUNTERS, renamed=RENAMED))},
    (
        Field("queries", "num_queries", 100),
        Field("d_model", "d_model"),
        Field("layers", "encoder_layers"),
        Field("decoder_layers", "decoder_layers"),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.0),
        activation("activation", "activation_function", "relu"),
    ),
    fixed={"arrangement": "post", "eps": 1e-5, "anchors": False},
    only={"position_embedding_type": ("sine",), "dilation": (False,), "num_channels": (3,), "auxiliary_loss": (False,)},
    read=read_detr,
    types={
        "backbone": str,
        "use_timm_backbone": bool,
        "backbone_config": BACKBONE_TYPES,
        "backbone_kwargs": dict[str, Any],
    },
    write=write_detr,
    aliases=PAIR_ALIASES,
    dropped=("backbone", "backbone_kwargs"),
)

FAMILIES = (VIT, DETR)
