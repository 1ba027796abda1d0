"""DeBERTa-v2 and v3."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.text import TEXT

DEBERTA: dict[str, Any] = TEXT | {
    "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False, "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "position_buckets": 4, "max_relative_positions": 8,
}  # fmt: skip

CASES = {
    "deberta": Case("DebertaV2Model", DEBERTA),
    "deberta-mlm": Case("DebertaV2ForMaskedLM", DEBERTA | {"position_buckets": -1, "hidden_act": "relu"}),
    "deberta-sequence": Case(
        "DebertaV2ForSequenceClassification",
        DEBERTA | {"num_labels": 3, "type_vocab_size": 2, "pos_att_type": "p2c|c2p"},
    ),
    "deberta-answer": Case("DebertaV2ForQuestionAnswering", DEBERTA | {"max_relative_positions": -1}),
}
