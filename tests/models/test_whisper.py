"""Whisper: languages, tasks, timestamps and long audio, compared with transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.models.audio import HOP, SAMPLE_RATE, whisper_features
from regard.models.whisper import Transcript, Whisper

transformers = pytest.importorskip("transformers")

STOP, START, NO_TIMES, FRAMES = 50, 51, 57, 50
LANGUAGES = {"<|de|>": 54, "<|en|>": 52, "<|zh|>": 53}
TASKS = {"transcribe": 55, "translate": 56}
GENERATION_CONFIG = {
    "is_multilingual": True, "lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": NO_TIMES,
    "max_initial_timestamp_index": 20, "suppress_tokens": [7, 8, *range(51, 57)], "begin_suppress_tokens": [5, STOP],
    "decoder_start_token_id": START, "eos_token_id": STOP, "pad_token_id": STOP, "bos_token_id": STOP,
    "max_length": 32, "prev_sot_token_id": 49,
}  # fmt: skip
SOUNDS = torch.randn(3, 2 * FRAMES, 80, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=range(3))
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Whisper, Any]:
    """A small model with random weights, loaded by both libraries."""
    torch.manual_seed(request.param)
    config = transformers.WhisperConfig(
        vocab_size=NO_TIMES + 1 + FRAMES + 1, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=FRAMES,
        max_target_positions=32, decoder_start_token_id=START, eos_token_id=STOP, pad_token_id=STOP, bos_token_id=STOP,
        init_std=0.5,
    )  # fmt: skip
    other = transformers.WhisperForConditionalGeneration(config).eval()
    other.generation_config = transformers.GenerationConfig(**GENERATION_CONFIG)
    folder = tmp_path_factory.mktemp("whisper")
    other.save_pretrained(folder)
    model = rg.load(folder)
    assert isinstance(model, Whisper)
    return model, other


def text(row: Tensor) -> list[int]:
    tokens = row.tolist()
    return tokens[: tokens.index(STOP)] if STOP in tokens else tokens


@pytest.mark.parametrize(("language", "task"), [(None, "transcribe"), ("zh", "transcribe"), ("de", "translate")])
def test_generation_matches_transformers(pair: tuple[Whisper, Any], language: str | None, task: str) -> None:
    model, other = pair
    times = list(
        range(NO_TIMES + 1, model.config.vocabulary)
    )  # without timestamps transformers decodes a single window
    model.config = replace(model.config, suppress_tokens=(*model.config.suppress_tokens, *times))
    other.generation_config.suppress_tokens = [*GENERATION_CONFIG["suppress_tokens"], *times]  # type: ignore[misc]
    try:
        for sound in SOUNDS:
            expected = other.generate(sound.T[None], language=language, task=task)[0]
            assert model.generate(sound[None], language=language, task=task)[0].tolist() == text(expected)
    finally:
        model.config = replace(model.config, suppress_tokens=tuple(GENERATION_CONFIG["suppress_tokens"]))  # type: ignore[arg-type]
        other.generation_config.suppress_tokens = GENERATION_CONFIG["suppress_tokens"]


def test_languages_are_detected_per_row(pair: tuple[Whisper, Any]) -> None:
    model, other = pair
    languages = model.detect_language(SOUNDS)
    tokens = other.detect_language(SOUNDS.mT)
    assert languages == [name.strip("<|>") for token in tokens.tolist() for name, n in LANGUAGES.items() if n == token]
    together = [row.tolist() for row in model.generate(SOUNDS)]
    assert together == [model.generate(sound[None])[0].tolist() for sound in SOUNDS]


@pytest.mark.parametrize("windows", [0.4, 1.0, 3.3])
def test_transcriptions_of_any_length_match_transformers(pair: tuple[Whisper, Any], windows: float) -> None:
    model, other = pair
    wave = torch.randn(int(windows * 2 * FRAMES * HOP), generator=torch.Generator().manual_seed(5))
    features = whisper_features(wave, seconds=None if windows > 1 else 2 * FRAMES * HOP / SAMPLE_RATE)
    mask = torch.arange(len(features))[None] < len(wave) // HOP
    expected = other.generate(
        features.T[None], attention_mask=mask.long(), task="transcribe", return_timestamps=True, return_segments=True
    )
    segments: list[Any] = []
    actual = model.transcribe(wave, on_segment=segments.append)
    assert isinstance(actual, Transcript)
    assert segments == actual.segments
    theirs = expected["segments"][0]
    if windows < 1:  # transformers also transcribes the padding of the window
        theirs = theirs[: len(actual.segments)]
    assert [segment.tokens for segment in actual.segments] == [
        [token for token in segment["tokens"].tolist() if token <= NO_TIMES and token != STOP] for segment in theirs
    ]
    times = [(float(segment["start"]), float(segment["end"])) for segment in theirs]
    for segment, (start, end) in zip(actual.segments, times, strict=True):
        assert (segment.start, segment.end) == pytest.approx((start, end), abs=1e-4)


def test_saving_keeps_languages_and_timestamps(pair: tuple[Whisper, Any], tmp_path: Path) -> None:
    model, _ = pair
    rg.save(model, tmp_path)
    again = rg.load(tmp_path)
    assert again.config == model.config
    other = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert other.generation_config.lang_to_id == LANGUAGES
    assert other.generate(SOUNDS[:1].mT)[0].tolist()[:1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "fr"}, "one of de, en, zh"),
        ({"task": "sing"}, "one of transcribe, translate"),
        ({"timestamps": True, "strategy": rg.nn.Beam(2)}, "Greedy"),
    ],
)
def test_unsupported_languages_and_tasks_raise(pair: tuple[Whisper, Any], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair[0].generate(SOUNDS[:1], **options)


def test_generation_with_a_mask_matches_the_unpadded_audio() -> None:
    torch.manual_seed(0)
    config = rg.models.WhisperConfig(
        vocabulary=20, d_model=16, layers=1, heads=2, d_hidden=32, features=80, frames=FRAMES
    )
    model = Whisper(config).eval()
    mask = torch.arange(2 * FRAMES) < torch.tensor([[2 * FRAMES], [31]])
    with torch.no_grad():
        state, first = model.start_generation(SOUNDS[:2], mask)
        together = state.step(first)
        for row, length in enumerate((2 * FRAMES, 31)):
            alone = model(SOUNDS[row : row + 1, :length], first[row : row + 1])[:, -1]
            torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)
