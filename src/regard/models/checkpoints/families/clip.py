"""CLIP and SigLIP: an encoder of images and an encoder of texts."""

from __future__ import annotations

from typing import Any

import torch

from regard.models.checkpoints.families.vision import sides
from regard.models.checkpoints.family import (
    Architecture,
    Family,
    Field,
    Values,
    activation,
    check_types,
    rule_table,
)
from regard.models.checkpoints.tensor_names import Extras
from regard.models.dual_encoder import DualEncoder, DualEncoderConfig
from regard.models.text import TextConfig
from regard.models.vision import VisionConfig

LAYERS = """
    {side}.stack.layers.*.attention_residual.norm    {side_}_model.encoder.layers.*.layer_norm1
    {side}.stack.layers.*.attention.qkv              {side_}_model.encoder.layers.*.self_attn.{{q_proj,k_proj,v_proj}}
    {side}.stack.layers.*.attention.output           {side_}_model.encoder.layers.*.self_attn.out_proj
    {side}.stack.layers.*.feedforward_residual.norm  {side_}_model.encoder.layers.*.layer_norm2
    {side}.stack.layers.*.feedforward.up             {side_}_model.encoder.layers.*.mlp.fc1
    {side}.stack.layers.*.feedforward.output         {side_}_model.encoder.layers.*.mlp.fc2
"""
TOWERS = f"""
    image.patches     vision_model.embeddings.patch_embedding
    image.position    vision_model.embeddings.position_embedding.weight
    image.stack.norm  vision_model.post_layernorm
    text.embedding    text_model.embeddings.token_embedding
    text.position     text_model.embeddings.position_embedding
    text.stack.norm   text_model.final_layer_norm
    {LAYERS.format(side="image", side_="vision")}
    {LAYERS.format(side="text", side_="text")}
"""
CLIP_NAMES = f"""
    {TOWERS}
    image.first           vision_model.embeddings.class_embedding^row
    image.embedding_norm  vision_model.pre_layrnorm
    image_projection      visual_projection
    text_projection       text_projection
    scale                 logit_scale
"""
SIGLIP_NAMES = f"""
    {TOWERS}
    image_pooling.probe                 vision_model.head.probe^1
    image_pooling.attention.qkv.weight  vision_model.head.attention.in_proj_weight
    image_pooling.attention.qkv.bias    vision_model.head.attention.in_proj_bias
    image_pooling.attention.output      vision_model.head.attention.out_proj
    image_pooling.residual.norm         vision_model.head.layernorm
    image_pooling.feedforward.up        vision_model.head.mlp.fc1
    image_pooling.feedforward.output    vision_model.head.mlp.fc2
    text_projection                     text_model.head
    scale                               logit_scale^1
    bias                                logit_bias^1
"""
POSITIONS = dict.fromkeys(
    ("vision_model.embeddings.position_ids", "text_model.embeddings.position_ids"),
    lambda _, stored: stored - torch.arange(stored.shape[-1]),
)
"""Buffers stored by older releases."""


def tower(model_type: str, kind: type, defaults: Values, fixed: Values, **options: Any) -> Family:
    """One side of a pair. defaults: by their names, of the values that a configuration may leave out."""
    names = {"d_model": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"d_hidden": "intermediate_size", "eps": "layer_norm_eps", "attention_dropout": "attention_dropout"}
    names |= {"vocabulary": "vocab_size", "positions": "max_position_embeddings", "channels": "num_channels"}
    fields = [Field(ours, name, defaults[name]) for ours, name in names.items() if name in defaults]
    act = activation("activation", "hidden_act", defaults["hidden_act"])
    return Family(model_type, model_type, kind, {}, (*fields, act), fixed, **options)


def read_images(defaults: Values) -> Any:
    def read(theirs: Values) -> Values:
        height, width = sides(theirs.get("patch_size") or defaults["patch_size"])
        if height != width:
            raise ValueError(f"patch_size = {theirs['patch_size']} is not supported; patches must be square")
        rows, columns = sides(theirs.get("image_size") or defaults["image_size"])
        if rows != columns:
            raise ValueError(f"image_size = {theirs['image_size']} is not supported; images must be square")
        return {"image": (rows, columns), "patch": height}

    return read


def write_images(config: VisionConfig) -> Values:
    if config.image[0] != config.image[1]:
        raise ValueError(f"image = {config.image} must be square")
    return {"image_size": config.image[0], "patch_size": config.patch}


LAYER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
PRE: Values = {"arrangement": "pre", "norm": "layer", "dropout": 0.0}
TEXT: Values = PRE | {"segments": 0, "embedding_norm": False}
CLIP_LAYER = {"layer_norm_eps": 1e-5, "attention_dropout": 0.0, "hidden_act": "quick_gelu"}
CLIP_TEXT = LAYER | CLIP_LAYER | {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
CLIP_TEXT |= {"vocab_size": 49408, "max_position_embeddings": 77}
CLIP_VISION = LAYER | CLIP_LAYER | {"num_channels": 3, "image_size": 224, "patch_size": 32}
SIGLIP_LAYER = {"layer_norm_eps": 1e-6, "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh"}
SIGLIP_TEXT = LAYER | SIGLIP_LAYER | {"vocab_size": 32000, "max_position_embeddings": 64}
SIGLIP_VISION = LAYER | SIGLIP_LAYER | {"num_channels": 3, "image_size": 224, "patch_size": 16}
IMAGE_TYPES = {"image_size": int | list[int], "patch_size": int | list[int]}


def images(model_type: str, defaults: Values, fixed: Values, **options: Any) -> Family:
    return tower(
        model_type, VisionConfig, defaults, PRE | fixed, read=read_images(defaults), write=write_images,
        types=IMAGE_TYPES, **options,
    )  # fmt: skip


def pair(
    model_type: str, title: str, name: str, names: str, text: Family, vision: Family, *, fixed: Values, read: Any,
    write: Any, fields: tuple[Field, ...] = (),
) -> Family:  # fmt: skip
    """A family of two towers, each with a configuration of its own."""

    def side(theirs: Values, family: Family, key: str) -> tuple[Values, Any]:
        values = theirs.get(f"{key}_dict")  # of older releases; it replaces the other one
        values = (theirs.get(key) or {}) if values is None else values
        try:
            return values, family.config_of(values)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    def read_pair(theirs: Values) -> Values:
        text_values, text_config = side(theirs, text, "text_config")
        _, vision_config = side(theirs, vision, "vision_config")
        towers = {"text": text_config, "vision": vision_config}
        return towers | read(text_values, text_config, vision_config)

    def write_pair(config: DualEncoderConfig) -> Values:
        text_values = text.values_of(config.text) | write(config) | {"model_type": text.model_type}
        vision_values = vision.values_of(config.vision) | {"model_type": vision.model_type}
        return {"text_config": text_values, "vision_config": vision_values}

    return Family(
        model_type,
        title,
        DualEncoderConfig,
        {name: Architecture(DualEncoder, rule_table(names), Extras(computed=POSITIONS))},
        fields,
        fixed,
        read=read_pair,
        types=dict.fromkeys(
            ("text_config", "vision_config", "text_config_dict", "vision_config_dict"), dict[str, Any]
        ),
        write=write_pair,
        dropped=("text_config_dict", "vision_config_dict"),
    )  # fmt: skip


def read_clip(text: Values, _: TextConfig, vision: VisionConfig) -> Values:
    check_types(text, {"eos_token_id": int})
    stop = text.get("eos_token_id", 49407)
    return {"stop": None if stop == 2 else stop}  # 2 was wrong: transformers then takes the largest id


def read_siglip(text: Values, config: TextConfig, vision: VisionConfig) -> Values:
    check_types(text, {"projection_size": int})
    d_output = text.get("projection_size") or config.d_model
    if d_output != vision.d_model:
        raise ValueError(f"projection_size = {d_output} must be the hidden_size of vision_config, {vision.d_model}")
    return {"d_output": d_output}


CLIP = pair(
    "clip",
    "CLIP",
    "CLIPModel",
    CLIP_NAMES,
    tower("clip_text_model", TextConfig, CLIP_TEXT, TEXT | {"causal": True}),
    images("clip_vision_model", CLIP_VISION, {"patch_bias": False, "embedding_norm": True}),
    fixed={},
    fields=(Field("d_output", "projection_dim", 512),),
    read=read_clip,
    write=lambda config: {"eos_token_id": 2 if config.stop is None else config.stop},
)
SIGLIP = pair(
    "siglip",
    "SigLIP",
    "SiglipModel",
    SIGLIP_NAMES,
    tower("siglip_text_model", TextConfig, SIGLIP_TEXT, TEXT),
    images(
        "siglip_vision_model", SIGLIP_VISION, {"class_token": False, "pooling": "probe"},
        only={"vision_use_head": (True,)},
    ),
    fixed={"image_projection": False, "text_bias": True, "text_pooling": "last", "logit_bias": True},
    read=read_siglip,
    write=lambda config: {"projection_size": config.d_output},
)  # fmt: skip

FAMILIES = (CLIP, SIGLIP)
