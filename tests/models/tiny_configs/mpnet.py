"""MPNet."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.text import TEXT

CASES = {
    "mpnet": Case("MPNetModel", TEXT),
    "mpnet-mlm": Case("MPNetForMaskedLM", TEXT | {"hidden_act": "relu"}),
    "mpnet-sequence": Case("MPNetForSequenceClassification", TEXT | {"num_labels": 3}),
    "mpnet-answer": Case("MPNetForQuestionAnswering", TEXT),
}
