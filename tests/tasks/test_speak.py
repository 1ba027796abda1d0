"""Speech synthesis: a toy problem of tones, metrics, output files, and bad texts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.data.audio import log_mel_features
from regard.data.readers import Row
from regard.errors import BadRows
from regard.tasks import Run, Sources, UserError, create_run, tasks, train
from regard.training.metrics import cepstral_distortion, dtw_path
from regard.training.sources import Examples
from tests.tasks.tiny_audio import folder_of, tones, words

SMALL = {"features": 40, "d_model": 32, "layers": 1, "heads": 2, "dropout": 0.0, "longest": 2.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Examples]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("voice")
    task = tasks()["speak"](**SMALL)
    recipe = replace(
        task.recipe, steps=160, tokens=300, learning_rate=5e-3, warmup=20, evaluate_every=80, save_every=500, ema=0.9
    )
    table = folder_of(folder / "data", words(60))
    run, examples = create_run(folder / "run", task, recipe, Sources((str(table),), held_out=8))
    assert train(run, examples).done
    return run, examples


def test_tones_are_synthesized_and_beat_the_mean_of_all_frames(trained: tuple[Run, Examples]) -> None:
    run, examples = trained
    model, _ = run.model()
    figures = run.task.evaluate(model, run.processor, examples.test)
    baselines = run.task.baselines(run.processor, examples.train, examples.test)
    assert figures["mcd"] < 0.8 * baselines["mean of all frames"]["mcd"]
    assert baselines["recording by Griffin-Lim"]["mcd"] < figures["mcd"]
    assert baselines["recording"]["mcd"] == 0
    assert "cer" not in figures  # no transcriber was given


def test_the_command_writes_a_file_that_can_be_heard(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    run, _ = trained
    path = tmp_path / "said.wav"
    result = CliRunner().invoke(app, ["predict", str(run.folder), "Ab c?", "--out", str(path), "--json"])
    assert result.exit_code != 0  # no training clip had a space
    result = CliRunner().invoke(app, ["predict", str(run.folder), "Abca!", "--out", str(path), "--json"])
    assert result.exit_code == 0, result.output
    wave, rate = soundfile.read(path)
    message = json.loads(result.output)
    assert (rate, message["file"], message["input"]) == (16000, str(path), "abca")
    assert message["seconds"] == pytest.approx(len(wave) / 16000)
    assert 0.3 < message["seconds"] <= 2.0
    assert 0.05 < np.abs(wave).max() <= 0.96
    several = CliRunner().invoke(app, ["predict", str(run.folder), "ab", "cd", "--out", str(tmp_path / "many")])
    assert several.exit_code == 0, several.output
    assert sorted(each.name for each in (tmp_path / "many").iterdir()) == ["0001.wav", "0002.wav"]
    nowhere = CliRunner().invoke(app, ["predict", str(run.folder), "ab"])
    assert "writes files; give a path, such as --out speech.wav" in str(nowhere.exception)


def test_the_viewer_shows_letters_against_the_sound(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    run, _ = trained
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["view", str(run.folder), "abca", "-o", str(page)])
    assert result.exit_code == 0, result.output
    held = page.read_text().replace(": ", ":").replace(", ", ",")
    assert '"spectrogram":{"stream":"target"' in held
    assert '"source":{"tokens":["a","b","c","a"]' in held


@pytest.mark.parametrize(("text", "message"), [("axb", "'x' in 'axb' was not seen"), ("?!", "'\\?!' has no letter")])
def test_texts_that_cannot_be_spoken_are_reported(text: str, message: str, trained: tuple[Run, Examples]) -> None:
    run, _ = trained
    model, _ = run.model()
    with pytest.raises(UserError, match=f"input 1: {message}"):
        list(run.task.predict(model, run.processor, [Row("input 1", (text,))], BadRows()))
    skipped = BadRows(skip=True)
    prediction = list(
        run.task.predict(model, run.processor, [Row("input 1", (text,)), Row("input 2", ("ab",))], skipped)
    )
    assert (len(prediction), skipped.count) == (1, 1)


def test_a_transcriber_evaluates_speech(
    trained: tuple[Run, Examples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, examples = trained
    options = {"features": 40, "d_model": 16, "layers": 1, "heads": 2}
    listener = tasks()["transcribe"](**options)
    recipe = replace(listener.recipe, steps=2, tokens=100, warmup=1, evaluate_every=2)
    table = folder_of(tmp_path / "data", words(20))
    judge, listener_examples = create_run(tmp_path / "judge", listener, recipe, Sources((str(table),), held_out=2))
    train(judge, listener_examples)
    task = replace(run.task, transcriber=str(judge.folder))  # type: ignore[type-var]
    monkeypatch.setattr(type(judge.task), "transcribe", lambda self, model, processor, wave: ("ab", 1.0))
    model, _ = run.model()
    rows = examples.test[:2]
    error_rate = task.evaluate(model, run.processor, rows)["cer"]
    assert error_rate > 0
    assert error_rate == task.baselines(run.processor, examples.train, rows)["recording"]["cer"]
    with pytest.raises(ValueError, match=r"transcriber must be a run directory of transcribe, but .* has no run\.json"):
        replace(run.task, transcriber=str(tmp_path))  # type: ignore[type-var]
    with pytest.raises(UserError, match="--transcriber must be a run of transcribe, but is one of speak"):
        replace(run.task, transcriber=str(run.folder)).evaluate(model, run.processor, rows)  # type: ignore[type-var]


@pytest.mark.parametrize("wrong", [{"d_model": 30, "heads": 4}, {"guidance_weight": -1.0}, {"reduction": 0}])
def test_invalid_options_are_reported(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        tasks()["speak"](**wrong)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (6, 4), (5, 7)])
def test_warping_takes_the_cheapest_way(shape: tuple[int, int]) -> None:
    far = np.random.default_rng(sum(shape)).random(shape)

    def least(i: int, j: int) -> float:
        if (i, j) == (0, 0):
            return far[0, 0]
        before = [(a, b) for a, b in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if a >= 0 and b >= 0]
        return far[i, j] + min(least(a, b) for a, b in before)

    pairs = dtw_path(far)
    assert (pairs[0], pairs[-1]) == ((0, 0), (shape[0] - 1, shape[1] - 1))
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(pairs)}
    assert steps <= {(0, 1), (1, 0), (1, 1)}
    assert sum(far[pair] for pair in pairs) == pytest.approx(least(shape[0] - 1, shape[1] - 1))


def test_distortion_is_in_decibels_of_the_spectrum() -> None:
    """A ripple of the log spectrum, A cos(pi d (m + 1/2) / M) in dB, has the rms A / sqrt(2), and so the distortion."""
    flat = np.zeros((6, 80))
    ripple = flat + 0.3 * np.cos(np.pi * 4 * (np.arange(80) + 0.5) / 80)  # 3 dB
    assert cepstral_distortion([ripple], [flat]) == pytest.approx(3 / np.sqrt(2))
    chance = np.random.default_rng(0)
    same, other = (log_mel_features(tones(word, chance), 40) for word in ("ab", "dc"))
    assert cepstral_distortion([same], [same]) == 0 < cepstral_distortion([same], [other])


def test_a_file_contains_the_speech(trained: tuple[Run, Examples]) -> None:
    run, _ = trained
    model, _ = run.model()
    (prediction,) = run.task.predict(model, run.processor, [Row("input 1", ("ab",))], BadRows())
    wave, rate = soundfile.read(io.BytesIO(prediction.file))
    assert (prediction.output, rate) == (f"{len(wave) / 16000:.2f} s", 16000)
