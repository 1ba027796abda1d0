"""DeBERTa-v2 and v3: disentangled attention to content and to relative positions."""

from __future__ import annotations

from regard.models.checkpoints.families.text import BASE, NUMBERS, PREDICTIONS, SIZES, architectures
from regard.models.checkpoints.family import Family, Field, Values, activation, classes, labels
from regard.models.text import TextConfig

POSITIONS = """
    stack.relative.table  encoder.rel_embeddings.weight
    stack.relative.norm   encoder.LayerNorm
"""
NAMES = BASE.replace("self.{query,key,value}", "self.{query_proj,key_proj,value_proj}") + POSITIONS
NEWER_HEAD = (
    (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
)
"""Names of the head for masked tokens if `legacy` is false; it computes the same."""


def read_deberta(theirs: Values) -> Values:
    kinds = theirs.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    d_model, heads = theirs["hidden_size"], theirs["num_attention_heads"]
    required = {
        "embedding_size = hidden_size": (theirs.get("embedding_size") or d_model) == d_model,
        "attention_head_size = hidden_size / heads": (theirs.get("attention_head_size") or d_model // heads) * heads
        == d_model,
        "relative_attention": bool(theirs.get("relative_attention")),
        "position_biased_input = false": not theirs.get("position_biased_input", True),
        "share_att_key": bool(theirs.get("share_att_key")),
        "pos_att_type = c2p|p2c": {kind.strip() for kind in kinds} == {"c2p", "p2c"},
        "norm_rel_ebd = layer_norm": (theirs.get("norm_rel_ebd") or "none").strip().lower() == "layer_norm",
    }
    if not all(required.values()):
        missing = [name for name, present in required.items() if not present]
        raise ValueError(f"DeBERTa without {', '.join(missing)} is not supported")
    distance, buckets = theirs.get("max_relative_positions") or -1, theirs.get("position_buckets") or -1
    distance = theirs.get("max_position_embeddings") or 512 if distance < 1 else distance
    if buckets >= distance:
        raise ValueError(f"position_buckets = {buckets} must be below the {distance} relative positions")
    return {"disentangled": distance if buckets < 1 else buckets, "max_distance": distance, "classes": classes(theirs)}


def write_deberta(config: TextConfig) -> Values:
    if not config.disentangled or config.max_distance < config.disentangled:
        raise ValueError("attention must be disentangled, with max_distance of at least its span")
    return labels(config) | {
        "relative_attention": True,
        "position_biased_input": False,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "max_relative_positions": config.max_distance,
        "position_buckets": config.disentangled if config.disentangled < config.max_distance else -1,
        "legacy": True,
    }


DEBERTA = Family(
    "deberta-v2",
    "DeBERTa-v2 and v3",
    TextConfig,
    architectures(
        "DebertaV2",
        NAMES,
        {
            "Model": "",
            "ForMaskedLM": PREDICTIONS,
            "ForSequenceClassification": "transform pooler.dense \n classifier classifier",
            "ForTokenClassification": "classifier classifier",
            "ForQuestionAnswering": "ends qa_outputs",
        },
        prefix="deberta.",
        computed=NUMBERS,
        reported=("mask_predictions",),
        copies={
            "cls.predictions.decoder.weight": ("deberta.embeddings.word_embeddings.weight",),
            "cls.predictions.decoder.bias": ("cls.predictions.bias",),
        },
        renamed=NEWER_HEAD,
    ),
    (
        *(entry for entry in SIZES if entry.ours not in ("segments", "eps")),
        Field("segments", "type_vocab_size", 0),
        Field("eps", "layer_norm_eps", 1e-7),
        activation("activation", "hidden_act", "gelu"),
        activation("head_activation", "pooler_hidden_act", "gelu"),
    ),
    only={"tie_word_embeddings": (True,), "conv_kernel_size": (0,)},
    read=read_deberta,
    types={"relative_attention": bool, "position_biased_input": bool, "share_att_key": bool, "norm_rel_ebd": str}
    | {"pos_att_type": str | list[str], "max_relative_positions": int, "position_buckets": int}
    | {"embedding_size": int, "attention_head_size": int},
    write=write_deberta,
)

FAMILIES = (DEBERTA,)
