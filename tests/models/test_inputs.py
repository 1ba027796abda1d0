"""Ids and positions out of range raise in every model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.models import LanguageConfig, LanguageModel, TextConfig, TextEncoder, Transformer, TransformerConfig

SMALL = {"vocabulary": 100, "d_model": 32, "layers": 1, "heads": 2, "d_hidden": 64}
TEXT = TextEncoder(TextConfig(**SMALL, positions=16)).eval()
LANGUAGE = LanguageModel(LanguageConfig(**SMALL, positions=16)).eval()
PAIRS = Transformer(TransformerConfig(**SMALL)).eval()


@pytest.mark.parametrize("model", [TEXT, LANGUAGE, PAIRS], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("wrong", [100, -1])
def test_an_id_outside_of_the_vocabulary_raises(model: nn.Module, wrong: int) -> None:
    ids = torch.tensor([[5, wrong, 7]])
    with pytest.raises(ValueError, match=rf"token ids must be in 0 \.\.\. 99, got {wrong}; check that the tokenizer"):
        model(*((ids, ids) if model is PAIRS else (ids,)))


@pytest.mark.parametrize("model", [TEXT, LANGUAGE], ids=lambda model: type(model).__name__)
def test_a_sequence_that_is_too_long_raises(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="has 16 positions"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_many_short_sequences_do_not_count_as_a_long_one() -> None:
    packed = LANGUAGE([torch.zeros(12, dtype=torch.long)] * 4)
    assert [len(each) for each in packed] == [12] * 4


def test_floating_point_ids_raise() -> None:
    with pytest.raises(TypeError, match=r"token ids must be int64 or int32, got torch\.float32"):
        LANGUAGE(torch.zeros(1, 4))
