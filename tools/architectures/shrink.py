"""Tiny versions of default configurations.

Sizes are recognised by the names of their fields, which Transformers repeats from model to model; `OVERRIDES` holds
what names do not tell.
"""

from __future__ import annotations

import re
from typing import Any

WIDTH, HEADS, LAYERS, VOCABULARY, IMAGE, PATCH = 32, 4, 2, 99, 32, 8

# (pattern of the field's name, largest value); the first that matches counts
LIMITS: list[tuple[str, int]] = [
    (r"codebook_size", 64),
    (r"vocab|num_token_types|num_embeddings|n_codes", VOCABULARY),
    (r"mrope|rope_theta|_id$|_ids$|_index$|token", 10**9),
    (r"(^|_)(n_|num_)?(topk_)?groups?$|n_group", 1),
    (r"index_topk", 16),
    (r"experts?_per_tok|top_?k|num_selected_experts|moe_k$", 2),
    (r"rotary_dim", WIDTH // HEADS),
    (r"(mamba|ssm|linear)\w*(d_head|head_dim)", WIDTH // 2),
    (r"experts", 4),
    (r"key_value_heads|kv_heads|query_group|head_kv", 2),
    (r"attention_head_dim|head_dim|d_kv|kv_channels|d_head|head_size", WIDTH // HEADS),
    (r"heads?$|num_attention_head", HEADS),
    (r"lora_rank|low_rank", 16),
    (r"(num_|n_)(hidden_)?layers?$|layers$|depth$|num_.*blocks$|n_blocks|layers?_num|_layers_|num_layers", LAYERS),
    (r"max_.*positions?|max_seq|n_positions|n_ctx|max_position_embeddings|seq_length|max_length", 64),
    (r"sliding_window|local_radius|attention_window|window_size|block_size|chunk_size|attention_chunk", 4),
    (r"image_size|img_size|input_size|spec_size|crop_size", IMAGE),
    (r"patch_size|patch_stride", PATCH),
    (r"num_frames|frames", 4),
    (r"num_mel_bins|n_mels|feature_size|mel_dim|num_mel", 16),
    (r"num_queries|num_query_tokens|num_latents|latents|num_object_queries", 8),
    (r"state_size|d_state|ssm_state", 8),
    (r"hidden|d_model|n_embd|embed|intermediate|ffn|d_ff|mlp|inner|dim$|dims$|width|channels?$|_size$|filters", WIDTH),
]
KEEP = re.compile(
    r"^num_channels$|^in_channels$|in_chans|temporal_patch|conv_kernel|kernel|num_labels|merge_size|downsample|feat_extract_layers|expand"
)

_BACKBONE = {
    "model_type": "resnet", "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "embedding_size": 8,
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_NO_TIMM = {"use_timm_backbone": False, "backbone": None, "backbone_kwargs": None, "backbone_config": _BACKBONE}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_WITH_SECTIONS = ("glm4v_text", "glm_image_text", "glm_ocr_text", "glmga_text", "qwen2_vl_text", "qwen2_5_vl_text")

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _NO_TIMM),
    **dict.fromkeys(_WITH_SECTIONS, _SECTIONS),
    "glm4v_moe_text": {"rope_parameters": _SECTIONS["rope_parameters"] | {"mrope_section": [1, 1, 0]}},
    "bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_sinusoid_emb_1d": 4, "dim_bbox_projection": 8},
    "lilt": {"hidden_size": 48},
    "swin": {"image_size": 64, "window_size": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "maskformer": {"fpn_feature_size": 32, "mask_feature_size": 32},
    "mask2former": {"feature_size": 32, "mask_feature_size": 32},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "bridgetower": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": 99},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "sam_prompt_encoder": {"image_embedding_size": 4},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
}
# values for fields whose default is None where a model needs a number
MISSING = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
MISSING |= {"head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS}
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def shrink(values: dict[Any, Any], model_type: str = "") -> dict[Any, Any]:
    """Return the dictionary of a configuration with every size reduced."""
    kept = _kept_layers(values)
    small: dict[Any, Any] = {}
    for key, value in values.items():
        if key in ("transformers_version", "architectures", "stage_names"):
            continue
        if isinstance(value, list) and len(value) == _depth(values) and kept and key != "depths":
            small[key] = [_small(str(key), value[n], len(kept)) for n in kept]
        elif key == "per_layer_config" and isinstance(value, dict):
            small[key] = {new: shrink(value[old]) for new, old in enumerate(kept) if old in value}
        elif value is None and key in MISSING:
            small[key] = MISSING[key]
        else:
            small[key] = _small(str(key), value, len(kept) or LAYERS)
    if isinstance(values.get("out_indices"), list) and "stage_names" in values:
        if "depths" not in values and "embedding_size" not in values:  # a stage is a layer
            stages = len(values["out_indices"])
            small |= {name: max(stages, LAYERS) for name in _COUNTS if name in values}
            small["out_indices"] = list(range(1, stages + 1)) if stages > 1 else [max(stages, LAYERS)]
            small.pop("out_features", None)
        else:
            small |= {"out_indices": values["out_indices"], "out_features": values["out_features"]}
    heads = next((small[key] for key in ("num_attention_heads", "n_head", "num_heads") if key in small), None)
    for key in ("num_key_value_heads", "num_kv_heads", "n_kv_heads"):
        alike = [values.get(name) for name in ("num_attention_heads", "n_head", "num_heads") if name in values]
        if isinstance(small.get(key), int) and isinstance(heads, int) and values[key] in alike:
            small[key] = heads
    return small | OVERRIDES.get(model_type, {})


def _depth(values: dict[Any, Any]) -> int:
    """Return the number of layers, if the configuration has one and it exceeds what is kept."""
    counts = [values[key] for key in _COUNTS if type(values.get(key)) is int]
    return counts[0] if counts and counts[0] > LAYERS else -1


def _kept_layers(values: dict[Any, Any]) -> list[int]:
    """Return the indices of one layer of every kind, according to the fields with one entry per layer."""
    depth = _depth(values)
    if depth < 0:
        return []
    lists = [value for key, value in values.items() if isinstance(value, list) and len(value) == depth]
    special = values.get("per_layer_config") or {}
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(str([*(one[layer] for one in lists), layer in special]), layer)
    kept = sorted(kinds.values())[:4]
    kept += [layer for layer in range(depth) if layer not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def _small(key: str, value: Any, layers: int) -> Any:
    if isinstance(value, dict):
        return shrink(value, value.get("model_type", ""))
    if key == "mrope_section" and isinstance(value, list):
        return [WIDTH // HEADS // 2 - 2, 1, 1][: len(value)]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        if re.search(r"depth|num_blocks|layers$", key) and not re.search("out|index", key):
            return [1] * len(value)
        if re.search(r"index|indic|_ids?$|stage", key):
            return sorted({min(one, layers - 1) for one in value})
        return [_small(key.removesuffix("s"), one, layers) for one in value]
    if type(value) is not int or KEEP.search(key):
        return value
    if re.search(r"(_id|_token_index|_index|_token)$", key):
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        return value if value < VOCABULARY else special.get(key, 50 + sum(map(ord, key)) % 49)
    for pattern, largest in LIMITS:
        if re.search(pattern, key):
            if largest == HEADS and value in (3, 5, 6, 7):
                return 2
            return min(value, layers if pattern.endswith("num_layers") else largest)
    return value
