"""Whisper-base on real speech says what transformers says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.models.audio import whisper_features

WEIGHTS = Path(os.environ.get("REGARD_WEIGHTS", "weights")) / "whisper-base"
CLIPS = sorted(Path(os.environ.get("REGARD_CLIPS", "/usr/share/pocketsphinx/test/data/librivox")).glob("*.wav"))
pytestmark = pytest.mark.skipif(not WEIGHTS.exists() or not CLIPS, reason=f"needs {WEIGHTS} and clips of speech")


def wave(path: Path) -> torch.Tensor:
    soundfile = pytest.importorskip("soundfile")
    return torch.from_numpy(soundfile.read(path, dtype="float32")[0])


@pytest.fixture(scope="module")
def others() -> tuple:
    transformers = pytest.importorskip("transformers")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(WEIGHTS).eval()
    return model, transformers.WhisperFeatureExtractor.from_pretrained(WEIGHTS)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda path: path.stem)
def test_a_clip_is_transcribed_as_by_transformers(clip: Path, others: tuple) -> None:
    model, words = rg.load(WEIGHTS), rg.models.tokenizer(WEIGHTS)
    actual = words.decode(model.generate(whisper_features(wave(clip))[None])[0].tolist())
    features = others[1](wave(clip).numpy(), sampling_rate=16000, return_tensors="pt").input_features
    expected = words.decode(others[0].generate(features)[0].tolist(), skip_special_tokens=True)
    assert actual == expected
    assert model.detect_language(whisper_features(wave(clip))[None]) == ["en"]


def test_a_long_sound_is_transcribed_as_by_transformers(others: tuple) -> None:
    model, words = rg.load(WEIGHTS), rg.models.tokenizer(WEIGHTS)
    long = torch.cat([wave(clip) for clip in CLIPS] * 2)
    assert len(long) > 30 * 16000
    actual = model.transcribe(long)
    inputs = others[1](
        long.numpy(), sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    expected = others[0].generate(inputs.input_features, attention_mask=inputs.attention_mask, return_timestamps=True)
    spoken = re.sub(r"<\|[\d.]+\|>", "", words.decode(expected[0].tolist(), skip_special_tokens=True))
    assert words.decode(actual.tokens) == spoken
