"""Qwen3-Next: gated DeltaNet layers, gated attention in every fourth layer, and experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.field_types import short_repr
from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.experts import expert_rules
from regard.models.checkpoints.families.language import (
    ATTENTION_BIAS,
    LLAMA_PARTS,
    PRE_NORMS,
    QK_NORMS,
    causal,
    sizes,
    write_rotary,
)
from regard.models.checkpoints.family import Family, Field, Values
from regard.models.checkpoints.tensor_names import PLAIN, Rule, selected_rows, table
from regard.models.config_fields import cycle, effective_value
from regard.models.language import DeltaSizes, LanguageConfig
from regard.nn import Routing

DELTA = """
    convolution  conv1d^channels
    norm         norm
    dt_bias      dt_bias
    A_log        A_log
    output       out_proj
"""
BASE = causal(PRE_NORMS, QK_NORMS)
EXTRAS = replace(
    BASE.extras,
    computed={},
    reported=("mtp.fc", "mtp.layers.*", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
)


def grouped_rows(groups: int, *widths: int) -> list[Tensor]:
    """Return the rows of each part of a tensor that has, for every group, the rows of each part in turn."""
    rows = torch.arange(groups * sum(widths)).view(groups, -1).split(widths, 1)
    return [part.flatten() for part in rows]


def delta_rules(sizes: DeltaSizes, n: int) -> tuple[Rule, ...]:
    """Return the rules of a gated DeltaNet, whose projections are stored by key head."""
    ours, theirs = f"stack.layers.{n}.attention.", f"model.layers.{n}.linear_attn."
    share = sizes.value_heads // sizes.heads
    query, key, value, gate = grouped_rows(
        sizes.heads, sizes.d_head, sizes.d_head, share * sizes.d_value, share * sizes.d_value
    )
    beta, decay = grouped_rows(sizes.heads, share, share)
    parts = (
        ("qkv", "in_proj_qkvz", torch.cat((query, key, value)), query.numel() * 2 + value.numel() * 2),
        ("gate", "in_proj_qkvz", gate, query.numel() * 2 + value.numel() * 2),
        ("beta", "in_proj_ba", beta, 2 * sizes.value_heads),
        ("decay", "in_proj_ba", decay, 2 * sizes.value_heads),
    )
    rules = (Rule(ours + mine, (theirs + name,), (selected_rows(rows, total),)) for mine, name, rows, total in parts)
    return (*rules, *table(DELTA, ours=ours, theirs=theirs))


def attention_rules(config: LanguageConfig, n: int) -> tuple[Rule, ...]:
    """Return the rules of gated attention, whose projections of queries and gates are stored by head."""
    ours, theirs = f"stack.layers.{n}.attention.", f"model.layers.{n}.self_attn."
    d_head = effective_value(config, "d_head")
    query, gate = grouped_rows(config.heads, d_head, d_head)
    total = 2 * config.heads * d_head
    names = tuple(theirs + name for name in ("q_proj", "k_proj", "v_proj"))
    return (
        Rule(ours + "qkv", names, (selected_rows(query, total), PLAIN, PLAIN)),
        Rule(ours + "gate.projection", (names[0],), (selected_rows(gate, total),)),
    )


def rules(config: LanguageConfig) -> tuple[Rule, ...]:
    delta = cycle(config.delta_layers or (False,), config.layers)
    own = expert_rules(config, shared="shared_expert", shared_gate="shared_expert_gate")
    for n in range(config.layers):
        if not delta[n]:
            own += attention_rules(config, n)
        elif config.delta is not None:
            own += delta_rules(config.delta, n)
    return own + BASE.rules(config)


def read(theirs: Values) -> Values:
    layers, every = theirs["num_hidden_layers"], theirs.get("full_attention_interval") or 4
    kinds = theirs.get("layer_types") or [
        "full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(layers)
    ]
    if set(kinds) - {"full_attention", "linear_attention"} or len(kinds) != layers:
        raise ValueError(
            f"layer_types = {short_repr(kinds)} is not supported; expected full or linear attention per layer"
        )
    delta = tuple(kind == "linear_attention" for kind in kinds)
    given = {key: value for key, value in theirs.items() if value is not None}
    step, plain = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers", [])
    experts = given.get("num_experts", 512)
    dense = tuple(n in plain or not experts or (n + 1) % step != 0 for n in range(layers))
    values: Values = {
        "rotary": rope.read({"partial_rotary_factor": 0.25} | theirs, base=10000.0, d_head=given.get("head_dim", 256))
    }
    if any(delta):
        values["delta_layers"] = delta
        values["delta"] = DeltaSizes(
            given.get("linear_num_key_heads", 16), given.get("linear_num_value_heads", 32),
            given.get("linear_key_head_dim", 128), given.get("linear_value_head_dim", 128),
            given.get("linear_conv_kernel_dim", 4),
        )  # fmt: skip
    if not all(dense):
        values |= {
            "experts": experts, "dense_layers": dense if any(dense) else (), "shared_gate": True,
            "d_expert": given.get("moe_intermediate_size", 512),
            "d_shared": given.get("shared_expert_intermediate_size", 512),
            "routing": Routing("softmax", normalize=given.get("norm_topk_prob", True)),
        }  # fmt: skip
    return values


def write(config: LanguageConfig) -> Values:
    delta = cycle(config.delta_layers or (False,), config.layers)
    dense = cycle(config.dense_layers or (not config.experts,), config.layers)
    values: Values = write_rotary(config) | {
        "layer_types": ["linear_attention" if each else "full_attention" for each in delta],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(config.layers) if dense[n]],
    }
    if (sizes := config.delta) is not None:
        values |= {
            "linear_num_key_heads": sizes.heads, "linear_num_value_heads": sizes.value_heads,
            "linear_key_head_dim": sizes.d_head, "linear_value_head_dim": sizes.d_value,
            "linear_conv_kernel_dim": sizes.kernel_size,
        }  # fmt: skip
    return values | {
        "num_experts": config.experts, "moe_intermediate_size": effective_value(config, "d_expert"),
        "shared_expert_intermediate_size": config.d_shared, "norm_topk_prob": config.routing.normalize,
    }  # fmt: skip


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3-Next",
    LanguageConfig,
    {"Qwen3NextForCausalLM": replace(BASE, rules=rules, extras=EXTRAS)},
    (
        *sizes(d_head=256, positions=32768),
        *ATTENTION_BIAS,
        Field("kv_heads", "num_key_value_heads", 2),
        Field("tied", "tie_word_embeddings", False),
        Field("experts_per_token", "num_experts_per_tok", 10),
    ),
    fixed=LLAMA_PARTS
    | {"norm": "unit_rms", "bias": False, "qk_norm": True, "output_gate": True, "activation": "silu"},
    only={"hidden_act": ("silu",)},  # of the feed-forward layers, and of the convolutions of linear attention
    read=read,
    types=rope.TYPES
    | {"layer_types": list[str], "mlp_only_layers": list[int], "norm_topk_prob": bool}
    | dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
         "linear_conv_kernel_dim", "decoder_sparse_step", "num_experts", "moe_intermediate_size",
         "shared_expert_intermediate_size", "full_attention_interval"), int),
    write=write,
    dropped=(*rope.NAMES, "full_attention_interval"),
)  # fmt: skip

FAMILIES = (QWEN3_NEXT,)
