"""ModernBERT."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case

MODERN: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "norm_eps": 0.02, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "local_attention": 6,
}  # fmt: skip

CASES = {
    "modernbert": Case("ModernBertModel", MODERN),
    "modernbert-mlm": Case(
        "ModernBertForMaskedLM",
        MODERN | {"hidden_activation": "silu", "norm_bias": True, "mlp_bias": True, "attention_bias": True},
    ),
    "modernbert-sequence": Case(
        "ModernBertForSequenceClassification",
        MODERN | {"num_labels": 3, "classifier_pooling": "mean", "classifier_bias": True,
                  "global_attn_every_n_layers": 2},
    ),
    "modernbert-token": Case("ModernBertForTokenClassification", MODERN | {"num_labels": 3}),
    "modernbert-answer": Case(
        "ModernBertForQuestionAnswering",
        MODERN | {"layer_types": ["full_attention"] * 3,
                  "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 70.0}}},
    ),
}  # fmt: skip
