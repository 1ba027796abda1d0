"""DeepSeek-V2 and V3: multi-head latent attention, and experts in all but the first layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.experts import expert_rules
from regard.models.checkpoints.families.language import LLAMA_PARTS, PRE_NORMS, causal, sizes
from regard.models.checkpoints.family import REQUIRED, Architecture, Family, Field, Values, activation, common_value
from regard.models.checkpoints.tensor_names import Rule, table
from regard.models.config_fields import cycle, effective_value
from regard.models.language import LanguageConfig, LatentSizes
from regard.nn import Rotary, Routing
from regard.positions import Yarn

LATENT = """
    stack.layers.*.attention.query_down  model.layers.*.self_attn.q_a_proj
    stack.layers.*.attention.query_norm  model.layers.*.self_attn.q_a_layernorm
    stack.layers.*.attention.query       model.layers.*.self_attn.{query}
    stack.layers.*.attention.down        model.layers.*.self_attn.kv_a_proj_with_mqa
    stack.layers.*.attention.norm        model.layers.*.self_attn.kv_a_layernorm
    stack.layers.*.attention.up          model.layers.*.self_attn.kv_b_proj.weight
"""
BASE = causal(PRE_NORMS)


def rules(config: LanguageConfig) -> tuple[Rule, ...]:
    compressed = config.latent is not None and config.latent.d_query_latent is not None
    names = table(LATENT.replace("{query}", "q_b_proj" if compressed else "q_proj"))
    return (*expert_rules(config, shared="shared_experts"), *names, *BASE.rules(config))


def architecture(**extras: Any) -> Architecture:
    return replace(BASE, rules=rules, extras=replace(BASE.extras, computed={}, **extras))


def fields(per_token: Any) -> tuple[Field, ...]:
    return (
        *(entry for entry in sizes() if entry.ours != "d_head"),
        Field("d_head", "qk_nope_head_dim", 128),
        Field("qkv_bias", "attention_bias", False),
        Field("output_bias", "attention_bias", False),
        Field("tied", "tie_word_embeddings", False),
        Field("experts_per_token", "num_experts_per_tok", per_token),
        activation("activation", "hidden_act", "silu"),
    )


TYPES: dict[str, Any] = rope.TYPES | {
    "q_lora_rank": int, "kv_lora_rank": int, "qk_rope_head_dim": int, "v_head_dim": int, "n_routed_experts": int,
    "n_shared_experts": int, "moe_intermediate_size": int, "first_k_dense_replace": int, "n_group": int,
    "topk_group": int, "routed_scaling_factor": float, "norm_topk_prob": bool, "rope_interleave": bool,
    "num_key_value_heads": int, "topk_method": str,
}  # fmt: skip
V2: Values = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy", "rope_interleave": True,
}  # fmt: skip
V3: Values = V2 | {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip


def read(theirs: Values, defaults: Values) -> tuple[Values, Values]:
    """Return their values with defaults, and ours, apart from the routing."""
    if theirs.get("num_key_value_heads") is not None:
        common_value(theirs, "num_attention_heads", "num_key_value_heads")
    null = ("q_lora_rank", "norm_topk_prob", "rope_interleave")  # not replaced by the default
    theirs = defaults | {key: value for key, value in theirs.items() if value is not None or key in null}
    rotary = replace(rope.read(theirs, base=10000.0), interleaved=bool(theirs["rope_interleave"]))
    if not isinstance(rotary.scaling, Yarn | None):
        raise ValueError(f"the scaling {rotary.scaling!r} of positions is not supported; supported are default, yarn")
    d_rotary, d_expert = theirs["qk_rope_head_dim"], theirs["moe_intermediate_size"]
    values: Values = {
        "rotary": rotary,
        "scale": scale_of(rotary, theirs["qk_nope_head_dim"] + d_rotary),
        "latent": LatentSizes(theirs["kv_lora_rank"], d_rotary, theirs["v_head_dim"], theirs["q_lora_rank"]),
    }
    dense = tuple(n < theirs["first_k_dense_replace"] for n in range(theirs["num_hidden_layers"]))
    if not all(dense):
        values |= {
            "experts": theirs["n_routed_experts"], "dense_layers": dense if any(dense) else (),
            "d_expert": d_expert, "d_shared": d_expert * theirs["n_shared_experts"],
        }  # fmt: skip
    return theirs, values


def scale_of(rotary: Rotary, width: int) -> float | None:
    """Return the scale of scores, which YaRN changes with `mscale_all_dim`, or None for the default."""
    scaling = rotary.scaling
    if not isinstance(scaling, Yarn) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2 / math.sqrt(width)


def groups(theirs: Values) -> Values:
    limited = theirs["n_group"] > 1
    return {"groups": theirs["n_group"], "groups_per_token": theirs["topk_group"]} if limited else {}


def read_v2(theirs: Values) -> Values:
    theirs, values = read(theirs, V2)
    kept = groups(theirs) if theirs["topk_method"] == "group_limited_greedy" else {}
    routing = Routing("softmax", scale=theirs["routed_scaling_factor"], **kept)
    return values | ({"routing": routing} if "experts" in values else {})


def read_v3(theirs: Values) -> Values:
    theirs, values = read(theirs, V3)
    routing = Routing(
        "sigmoid", bool(theirs["norm_topk_prob"]), theirs["routed_scaling_factor"], **groups(theirs),
        group_score="top2" if theirs["n_group"] > 1 else "max", corrected=True,
    )  # fmt: skip
    return values | ({"routing": routing} if "experts" in values else {})


def write(config: LanguageConfig) -> Values:
    if config.latent is None or config.rotary is None:
        raise ValueError("latent and rotary must be set")
    if config.d_shared % (d_expert := effective_value(config, "d_expert")):
        raise ValueError(f"d_shared = {config.d_shared} must be a multiple of d_expert = {d_expert}")
    dense = cycle(config.dense_layers or (not config.experts,), config.layers)
    first = sum(dense)
    if dense != (True,) * first + (False,) * (config.layers - first):
        raise ValueError("layers without experts must come first")
    latent, routing = config.latent, config.routing
    mixture: Values = {
        "n_routed_experts": config.experts, "n_shared_experts": config.d_shared // d_expert,
        "moe_intermediate_size": d_expert, "n_group": routing.groups, "topk_group": routing.groups_per_token,
        "routed_scaling_factor": routing.scale, "norm_topk_prob": routing.normalize,
    }  # fmt: skip
    return rope.write(replace(config.rotary, interleaved=False), latent.d_rotary) | {
        "num_key_value_heads": config.heads, "first_k_dense_replace": first, "q_lora_rank": latent.d_query_latent,
        "kv_lora_rank": latent.d_latent, "qk_rope_head_dim": latent.d_rotary, "v_head_dim": latent.d_value,
    } | (mixture if config.experts else {})  # fmt: skip


def write_v2(config: LanguageConfig) -> Values:
    return write(config) | {"topk_method": "group_limited_greedy" if config.routing.groups > 1 else "greedy"}


def write_v3(config: LanguageConfig) -> Values:
    return write(config) | {"rope_interleave": config.rotary is not None and config.rotary.interleaved}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepSeek-V2",
    LanguageConfig,
    {"DeepseekV2ForCausalLM": architecture()},
    fields(REQUIRED),
    fixed=LLAMA_PARTS | {"bias": False},
    only={"mlp_bias": (False,), "norm_topk_prob": (False,), "topk_method": ("greedy", "group_limited_greedy"),
          "pretraining_tp": (1,), "rope_interleave": (True,)},
    read=read_v2,
    types=TYPES,
    write=write_v2,
    aliases={"num_experts": "n_routed_experts"},
    dropped=(*rope.NAMES, "head_dim", "qk_head_dim"),
)  # fmt: skip
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepSeek-V3",
    LanguageConfig,
    {"DeepseekV3ForCausalLM": architecture(reported=("model.layers.61",))},  # a layer that predicts further tokens
    fields(8),
    fixed=LLAMA_PARTS | {"bias": False},
    only={"pretraining_tp": (1,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    read=read_v3,
    types=TYPES,
    write=write_v3,
    aliases={"num_local_experts": "n_routed_experts"},
    dropped=(*rope.NAMES, "head_dim", "qk_head_dim"),
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
