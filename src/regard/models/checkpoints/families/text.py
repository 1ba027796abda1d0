"""BERT, RoBERTa, DistilBERT and ALBERT."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from regard.models.checkpoints.family import (
    Architecture,
    Family,
    Field,
    activation,
    classes,
    labels,
    rule_table,
)
from regard.models.checkpoints.tensor_names import Difference, Extras
from regard.models.config_fields import effective_value
from regard.models.text import (
    MaskedLanguageModel,
    QuestionAnswering,
    SequenceClassifier,
    TextConfig,
    TextEncoder,
    TokenClassifier,
)

PRETRAINING = ("pooling", "head_activation", "classes", "unit")  # fields that models without a classifier do not use


def architectures(
    start: str,
    base: str,
    heads: Mapping[str, str],
    *,
    prefix: str,
    computed: Mapping[str, Difference] = MappingProxyType({}),
    reported: tuple[str, ...] = (),
    copies: Mapping[str, tuple[str, ...]],
    renamed: tuple[tuple[str, str], ...] = (),
) -> dict[str, Architecture]:
    """Return the architectures of one family: the base model and its heads, by the suffix of their names."""
    kinds: dict[str, tuple[Any, tuple[str, ...]]] = {
        "Model": (TextEncoder, (*PRETRAINING, "mask_activation")),
        "ForMaskedLM": (MaskedLanguageModel, PRETRAINING),
        "ForPreTraining": (MaskedLanguageModel, PRETRAINING),
        "ForSequenceClassification": (SequenceClassifier, ("unit", "mask_activation")),
        "ForTokenClassification": (TokenClassifier, ("pooling", "head_activation", "unit", "mask_activation")),
        "ForQuestionAnswering": (QuestionAnswering, (*PRETRAINING, "mask_activation")),
    }
    result = {}
    for kind, (model, unused) in kinds.items():
        if kind not in heads:
            continue
        bare = model is TextEncoder
        rules = rule_table(base, ours="" if bare else "encoder.", theirs="" if bare else prefix, head=heads[kind])
        extras = Extras(copies=copies, renamed=renamed, computed=computed, reported=reported)
        result[start + kind] = Architecture(model, rules, extras, prefix, unused, written=kind != "ForPreTraining")
    return result


BASE = """
    embedding                               embeddings.word_embeddings
    position                                embeddings.position_embeddings
    segment                                 embeddings.token_type_embeddings
    embedding_norm                          embeddings.LayerNorm
    stack.layers.*.attention.qkv            encoder.layer.*.attention.self.{query,key,value}
    stack.layers.*.attention.output         encoder.layer.*.attention.output.dense
    stack.layers.*.attention_residual.norm  encoder.layer.*.attention.output.LayerNorm
    stack.layers.*.feedforward.up           encoder.layer.*.intermediate.dense
    stack.layers.*.feedforward.output       encoder.layer.*.output.dense
    stack.layers.*.feedforward_residual.norm  encoder.layer.*.output.LayerNorm
"""
NUMBERS: dict[str, Difference] = {
    "embeddings.position_ids": lambda _, stored: stored - torch.arange(stored.shape[-1]),
    "embeddings.token_type_ids": lambda _, stored: stored,
}
"""Buffers stored by older releases: positions 0, 1, ... and segments 0."""
LEGACY = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
PREDICTIONS = """
    transform   cls.predictions.transform.dense
    norm        cls.predictions.transform.LayerNorm
    bias        cls.predictions.bias
"""


def some_segments(count: int) -> int:
    if count < 1:
        raise ValueError("segments must be at least 1")
    return count


SIZES = (
    Field("vocabulary", "vocab_size"),
    Field("d_model", "hidden_size"),
    Field("layers", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
    Field("d_hidden", "intermediate_size"),
    Field("positions", "max_position_embeddings", 512),
    Field("segments", "type_vocab_size", 2, write=some_segments),
    Field("eps", "layer_norm_eps", 1e-12),
    Field("dropout", "hidden_dropout_prob", 0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
)
ONLY = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}

BERT = Family(
    "bert",
    "BERT",
    TextConfig,
    architectures(
        "Bert",
        BASE,
        {
            "Model": "",
            "ForMaskedLM": PREDICTIONS,
            "ForPreTraining": PREDICTIONS,
            "ForSequenceClassification": "transform bert.pooler.dense \n classifier classifier",
            "ForTokenClassification": "classifier classifier",
            "ForQuestionAnswering": "ends qa_outputs",
        },
        prefix="bert.",
        computed=NUMBERS,
        reported=("pooler", "cls.seq_relationship"),
        copies={
            "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
            "cls.predictions.decoder.bias": ("cls.predictions.bias",),
        },
        renamed=LEGACY,
    ),
    (*SIZES, activation("activation", "hidden_act", "gelu")),
    only=ONLY,
    read=lambda theirs: {"classes": classes(theirs)},
    write=labels,
)

LM_HEAD = """
    transform   lm_head.dense
    norm        lm_head.layer_norm
    bias        lm_head.bias
"""


def roberta_architectures(start: str, names: str, prefix: str) -> dict[str, Architecture]:
    """Architectures with the heads of RoBERTa."""
    return architectures(
        start,
        names,
        {
            "Model": "",
            "ForMaskedLM": LM_HEAD,
            "ForSequenceClassification": "transform classifier.dense \n classifier classifier.out_proj",
            "ForTokenClassification": "classifier classifier",
            "ForQuestionAnswering": "ends qa_outputs",
        },
        prefix=prefix,
        computed=NUMBERS,
        reported=("pooler",),
        copies={
            "lm_head.decoder.weight": (f"{prefix}embeddings.word_embeddings.weight",),
            "lm_head.decoder.bias": ("lm_head.bias",),
        },
    )


def roberta(model_type: str, title: str, start: str) -> Family:
    """A RoBERTa family; its positions start after the id of the padding token."""
    return Family(
        model_type,
        title,
        TextConfig,
        roberta_architectures(start, BASE, "roberta."),
        (
            *SIZES,
            activation("activation", "hidden_act", "gelu"),
            Field("first_position", "pad_token_id", 1, lambda pad: pad + 1, lambda first: first - 1),
        ),
        fixed={"mask_activation": "gelu"},
        only=ONLY,
        read=lambda theirs: {"classes": classes(theirs)},
        write=labels,
    )


ROBERTA, XLM_ROBERTA = roberta("roberta", "RoBERTa", "Roberta"), roberta("xlm-roberta", "XLM-RoBERTa", "XLMRoberta")

DISTILBERT = Family(
    "distilbert",
    "DistilBERT",
    TextConfig,
    architectures(
        "DistilBert",
        """
        embedding                               embeddings.word_embeddings
        position                                embeddings.position_embeddings
        embedding_norm                          embeddings.LayerNorm
        stack.layers.*.attention.qkv            transformer.layer.*.attention.{q_lin,k_lin,v_lin}
        stack.layers.*.attention.output         transformer.layer.*.attention.out_lin
        stack.layers.*.attention_residual.norm  transformer.layer.*.sa_layer_norm
        stack.layers.*.feedforward.up           transformer.layer.*.ffn.lin1
        stack.layers.*.feedforward.output       transformer.layer.*.ffn.lin2
        stack.layers.*.feedforward_residual.norm  transformer.layer.*.output_layer_norm
        """,
        {
            "Model": "",
            "ForMaskedLM": "transform vocab_transform \n norm vocab_layer_norm \n bias vocab_projector.bias",
            "ForSequenceClassification": "transform pre_classifier \n classifier classifier",
            "ForTokenClassification": "classifier classifier",
            "ForQuestionAnswering": "ends qa_outputs",
        },
        prefix="distilbert.",
        computed=NUMBERS,
        copies={"vocab_projector.weight": ("distilbert.embeddings.word_embeddings.weight",)},
    ),
    (
        Field("vocabulary", "vocab_size"),
        Field("d_model", "dim"),
        Field("layers", "n_layers"),
        Field("heads", "n_heads"),
        Field("d_hidden", "hidden_dim"),
        Field("positions", "max_position_embeddings", 512),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        activation("activation", "activation", "gelu"),
    ),
    fixed={"segments": 0, "head_activation": "relu", "eps": 1e-12},
    only={"tie_word_embeddings": (True,)},
    read=lambda theirs: {"classes": classes(theirs)},
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    write=labels,
)


def albert_values(config: TextConfig) -> dict[str, Any]:
    if effective_value(config, "d_embedding") == config.d_model:
        raise ValueError("d_embedding must differ from d_model")
    return labels(config)


ALBERT = Family(
    "albert",
    "ALBERT",
    TextConfig,
    architectures(
        "Albert",
        """
        embedding                         embeddings.word_embeddings
        position                          embeddings.position_embeddings
        segment                           embeddings.token_type_embeddings
        embedding_norm                    embeddings.LayerNorm
        project                           encoder.embedding_hidden_mapping_in
        stack.layers.*.attention.qkv      encoder.albert_layer_groups.*.albert_layers.0.attention.{query,key,value}
        stack.layers.*.attention.output   encoder.albert_layer_groups.*.albert_layers.0.attention.dense
        stack.layers.*.attention_residual.norm  encoder.albert_layer_groups.*.albert_layers.0.attention.LayerNorm
        stack.layers.*.feedforward.up     encoder.albert_layer_groups.*.albert_layers.0.ffn
        stack.layers.*.feedforward.output encoder.albert_layer_groups.*.albert_layers.0.ffn_output
        stack.layers.*.feedforward_residual.norm  encoder.albert_layer_groups.*.albert_layers.0.full_layer_layer_norm
        """,
        {
            "Model": "",
            "ForMaskedLM": "transform predictions.dense \n norm predictions.LayerNorm \n bias predictions.bias",
            "ForPreTraining": "transform predictions.dense \n norm predictions.LayerNorm \n bias predictions.bias",
            "ForSequenceClassification": "transform albert.pooler \n classifier classifier",
            "ForTokenClassification": "classifier classifier",
            "ForQuestionAnswering": "ends qa_outputs",
        },
        prefix="albert.",
        computed=NUMBERS,
        reported=("pooler", "sop_classifier"),
        copies={
            "predictions.decoder.weight": ("albert.embeddings.word_embeddings.weight",),
            "predictions.decoder.bias": ("predictions.bias",),
        },
    ),
    (
        *SIZES,
        activation("activation", "hidden_act", "gelu_new"),
        Field("d_embedding", "embedding_size", 128),
        Field("distinct", "num_hidden_groups", 1),
    ),
    only=ONLY | {"inner_group_num": (1,)},
    read=lambda theirs: {"classes": classes(theirs)},
    write=albert_values,
)

FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, ALBERT)
