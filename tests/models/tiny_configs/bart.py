"""BART, mBART and M2M100."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_configs.case import Case
from tests.models.tiny_configs.translation import MARIAN

SHARED: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {name: value for name, value in MARIAN.items() if name not in ("scale_embedding",)} | SHARED

CASES = {
    "bart": Case("BartForConditionalGeneration", BART | {"activation_function": "gelu"}),
    "mbart": Case("MBartForConditionalGeneration", BART | {"scale_embedding": True, "activation_function": "relu"}),
    "m2m100": Case("M2M100ForConditionalGeneration", BART | {"scale_embedding": False}),
    "m2m100-scaled": Case("M2M100ForConditionalGeneration", BART | {"scale_embedding": True}),
}
