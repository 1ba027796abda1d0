"""The commands' predictors on real weights: chats as in transformers, subtitles of a long sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard.data.readers import Row
from regard.errors import BadRows
from regard.predictors import PredictOptions, open_model
from regard.predictors.language import LanguagePredictor
from tests.real import test_smollm2 as smollm2
from tests.real import test_whisper as whisper


@smollm2.pytestmark
def test_a_chat_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    predictor = open_model(smollm2.FILES[0])
    assert isinstance(predictor, LanguagePredictor)
    predictor.configure(PredictOptions(max_new_tokens=24))
    words = transformers.AutoTokenizer.from_pretrained(smollm2.FOLDER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2.FOLDER).eval()
    messages = predictor.messages("What is gravity? Answer in one sentence.")
    text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = words(text, add_special_tokens=False, return_tensors="pt").input_ids
    assert predictor.prompt(messages) == ids[0].tolist()
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    reply = words.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(predictor.pieces(predictor.prompt(messages))) == reply


@smollm2.pytestmark
@pytest.mark.parametrize("prompt", smollm2.PROMPTS)
def test_texts_continue_as_in_transformers(prompt: str) -> None:
    transformers = pytest.importorskip("transformers")
    predictor = open_model(smollm2.FILES[0])
    assert isinstance(predictor, LanguagePredictor)
    predictor.configure(PredictOptions(max_new_tokens=24, chat=False))
    words = transformers.AutoTokenizer.from_pretrained(smollm2.FOLDER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2.FOLDER).eval()
    ids = words(prompt, return_tensors="pt").input_ids
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    reply = words.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(predictor.pieces(predictor.prompt(prompt))) == reply


@whisper.pytestmark
def test_a_clip_becomes_subtitles(tmp_path: Path) -> None:
    predictor = open_model(whisper.WEIGHTS)
    (prediction,) = predictor.predict([Row("clip", (str(whisper.CLIPS[1]),))], BadRows())
    assert prediction.more["language"] == "en"
    assert prediction.output == "He was not an ill-disposed young man."
    written = predictor.write_file(prediction, ".srt").decode().splitlines()
    assert written[0] == "1"
    assert written[2] == prediction.output
