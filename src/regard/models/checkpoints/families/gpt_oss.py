"""gpt-oss: a learned sink per head, alternating windows, and a mixture of experts with clamped gates."""

from __future__ import annotations

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import (
    LLAMA_PARTS,
    PRE_NORMS,
    WINDOW_TYPES,
    causal,
    read_windows,
    sizes,
    write_rotary,
    write_windows,
)
from regard.models.checkpoints.family import Family, Field, Values
from regard.models.language import LanguageConfig

SINKS = """
    stack.layers.*.attention.attend.sink  model.layers.*.self_attn.sinks
"""
EXPERTS = """
    stack.layers.*.feedforward.router       model.layers.*.mlp.router
    stack.layers.*.feedforward.up           model.layers.*.mlp.experts.gate_up_proj^pairs
    stack.layers.*.feedforward.up_bias      model.layers.*.mlp.experts.gate_up_proj_bias^pairs
    stack.layers.*.feedforward.output       model.layers.*.mlp.experts.down_proj^mT
    stack.layers.*.feedforward.output_bias  model.layers.*.mlp.experts.down_proj_bias
"""
DEFAULT_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, rope.ORIGINAL: 4096,
}  # fmt: skip


def read_gpt_oss(theirs: Values) -> Values:
    given = theirs.get("rope_parameters") or theirs.get("rope_scaling")
    rotary = rope.read(theirs if given else theirs | {"rope_parameters": DEFAULT_SCALING}, base=150000.0)
    layers = theirs["num_hidden_layers"]
    kinds = ["sliding_attention", "full_attention"] * layers
    windows = read_windows({"sliding_window": 128} | theirs, kinds[:layers])
    return {"rotary": rotary, "d_head": theirs.get("head_dim", 64)} | windows


def write_gpt_oss(config: LanguageConfig) -> Values:
    values = write_rotary(config) | write_windows(config, 128)
    if values["rope_scaling"] is None:
        values["rope_scaling"] = {"rope_type": "default"}
    return values


GPT_OSS = Family(
    "gpt_oss",
    "gpt-oss",
    LanguageConfig,
    {"GptOssForCausalLM": causal(PRE_NORMS, SINKS, feedforward=EXPERTS)},
    (
        *sizes(positions=131072, eps=1e-5),
        Field("qkv_bias", "attention_bias", True),
        Field("output_bias", "attention_bias", True),
        Field("kv_heads", "num_key_value_heads", 8),
        Field("tied", "tie_word_embeddings", False),
        Field("experts", "num_local_experts", 128),
        Field("experts_per_token", "num_experts_per_tok", 4),
        Field("gate_limit", "swiglu_limit", 7.0),
    ),
    fixed=LLAMA_PARTS | {"bias": True, "sinks": True, "activation": "quick_gelu"},
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},  # x sigmoid(1.702 x) is the activation
    read=read_gpt_oss,
    types=rope.TYPES | WINDOW_TYPES,
    write=write_gpt_oss,
    aliases={"num_experts": "num_local_experts"},
    dropped=rope.NAMES,
)

FAMILIES = (GPT_OSS,)
