"""BERT, RoBERTa, DistilBERT and ALBERT."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case

TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 0.02,
}  # fmt: skip
DISTIL = {"vocab_size": 99, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40}
ALBERT = TEXT | {"embedding_size": 16}

CASES = {
    "bert": Case("BertModel", TEXT),
    "bert-mlm": Case("BertForMaskedLM", TEXT | {"hidden_act": "relu"}),
    "bert-pretraining": Case("BertForPreTraining", TEXT),
    "bert-sequence": Case("BertForSequenceClassification", TEXT | {"num_labels": 5}),
    "bert-token": Case("BertForTokenClassification", TEXT | {"num_labels": 3, "hidden_act": "gelu_new"}),
    "bert-answer": Case("BertForQuestionAnswering", TEXT),
    "roberta": Case("RobertaModel", TEXT),
    "roberta-mlm": Case("RobertaForMaskedLM", TEXT | {"layer_norm_eps": 1e-5}),
    "roberta-sequence": Case("RobertaForSequenceClassification", TEXT | {"num_labels": 3}),
    "roberta-token": Case("RobertaForTokenClassification", TEXT | {"type_vocab_size": 1}),
    "xlm-roberta": Case("XLMRobertaForMaskedLM", TEXT),
    "distilbert": Case("DistilBertModel", DISTIL),
    "distilbert-mlm": Case("DistilBertForMaskedLM", DISTIL | {"activation": "relu"}),
    "distilbert-sequence": Case("DistilBertForSequenceClassification", DISTIL),
    "distilbert-answer": Case("DistilBertForQuestionAnswering", DISTIL),
    "albert": Case("AlbertModel", ALBERT),
    "albert-mlm": Case(
        "AlbertForMaskedLM",
        ALBERT | {"num_hidden_layers": 4, "num_hidden_groups": 2, "hidden_act": "relu"},
    ),
    "albert-sequence": Case("AlbertForSequenceClassification", ALBERT | {"num_labels": 4}),
}  # fmt: skip
