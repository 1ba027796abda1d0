"""Speech recognition: formats, bad data, and a toy problem of tones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.data.audio import (
    AudioFormat,
    fit_audio_format,
    load_waveform,
    log_mel_features,
    nearest_clips,
    normalize_transcript,
)
from regard.data.readers import Row
from regard.errors import BadRows
from regard.tasks import Run, Sources, UserError, create_run, tasks, train
from regard.tasks.transcribe import spec_augment_mask
from regard.training.export import export
from regard.training.runs import load
from regard.training.sources import Examples, read_examples
from tests.tasks.tiny_audio import folder_of, tones, words
from tests.tasks.tiny_images import DieAtStep

SMALL = {
    "features": 40,
    "d_model": 32,
    "layers": 1,
    "heads": 2,
    "before": 8,
    "after": 4,
    "dropout": 0.0,
    "mask_ratio": 0.1,
}


def started(folder: Path, source: Path, **recipe: Any) -> tuple[Run, Examples]:
    task = tasks()["transcribe"](**SMALL)
    known = {"steps": 8, "tokens": 100, "warmup": 2, "evaluate_every": 4, "save_every": 3, "ema": 0.9} | recipe
    return create_run(folder / "run", task, replace(task.recipe, **known), Sources((str(source),), held_out=10))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Examples]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tones")
    run, examples = started(
        folder, folder_of(folder / "data", words(100)), steps=180, learning_rate=5e-3, warmup=20, tokens=300,
        evaluate_every=90,
        save_every=500,
    )  # fmt: skip
    assert train(run, examples).done
    return run, examples


@pytest.mark.parametrize(("form", "suffix"), [("tsv", ".wav"), ("csv", ".flac"), ("jsonl", ".ogg"), ("folder", ".wav")])
def test_the_same_clips_come_from_every_table_and_format(form: str, suffix: str, tmp_path: Path) -> None:
    table = folder_of(tmp_path, ["ab", "cad"], form="tsv" if form == "folder" else form, suffix=suffix)
    rows = tasks()["transcribe"]().read(str(tmp_path if form == "folder" else table), BadRows())
    assert [row.values[1] for row in rows] == ["ab", "cad"]
    plainly = tones("ab", np.random.default_rng(7))
    wave = load_waveform(rows[0], BadRows())
    assert wave is not None
    assert wave.shape == plainly.shape
    assert float(np.abs(wave - plainly).mean()) < (0.01 if suffix == ".ogg" else 1e-4)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (44100, 2), (16000, 2), (22050, 1)])
def test_other_rates_and_channels_sound_the_same(rate: int, channels: int, tmp_path: Path) -> None:
    samples = tones("abca", np.random.default_rng(1), rate)
    soundfile.write(tmp_path / "a.wav", np.stack([samples] * channels, 1), rate)
    wave = load_waveform(Row("here", (str(tmp_path / "a.wav"),)), BadRows())
    assert wave is not None
    expected = log_mel_features(tones("abca", np.random.default_rng(1)), 40).astype(np.float32)
    actual = log_mel_features(wave, 40).astype(np.float32)
    assert abs(len(actual) - len(expected)) <= 1
    both = min(len(actual), len(expected))
    loud = expected[:both] > 0
    assert float(np.abs(actual[:both] - expected[:both])[loud].mean()) < 0.1


def spoilt(folder: Path, how: str) -> str:
    """Damage the second clip or its line, and return the expected message."""
    table, clip = folder / "transcripts.tsv", folder / "clips" / "001.wav"
    lines = table.read_text().splitlines()
    place = r"transcripts\.tsv:3: "
    if how == "missing":
        clip.unlink()
        return place + r".*001\.wav: no such file"
    if how == "no sound":
        clip.write_text("hello")
        return place + r".*001\.wav: cannot be read as audio \(.*\); save it again as WAV or FLAC"
    if how == "cut":
        clip.write_bytes(clip.read_bytes()[:20])
        return place + r".*001\.wav: cannot be read as audio"
    if how == "empty":
        soundfile.write(clip, np.zeros(0), 16000)
        return place + r".*001\.wav: has no samples"
    if how == "no numbers":
        soundfile.write(clip, np.full(8000, np.nan), 16000, subtype="FLOAT")
        return place + "has samples that are not finite".join((".*001\\.wav: ", ""))
    if how == "too long a text":
        lines[2] = "clips/001.wav\t" + "ab" * 40
        message = r"80 letters need 3\.20 s, but the clip has 0\.\d\d s; is it the right text\?"
    elif how == "no letter":
        lines[2] = "clips/001.wav\t?!"
        message = "'\\?!' has no letter"
    elif how == "too long a clip":
        soundfile.write(clip, np.zeros(16000 * 31, np.float32), 16000)
        return place + r"31\.0 s is longer than --longest 30 s"
    else:
        table.write_bytes("\n".join(lines[:2]).encode() + b"\nclips/001.wav\t\xff\xfe\n" + lines[3].encode() + b"\n")
        return place + "not valid UTF-8 .byte 0xff"
    table.write_text("\n".join(lines) + "\n")
    return place + message


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "no sound",
        "cut",
        "empty",
        "no numbers",
        "too long a text",
        "no letter",
        "too long a clip",
        "no UTF-8",
    ],
)
def test_a_bad_clip_stops_with_file_and_line_or_is_left_out(how: str, tmp_path: Path) -> None:
    folder_of(tmp_path, ["ab", "abc", "dba"])
    task = tasks()["transcribe"](**SMALL)
    processor = task.fit_processor(task.read(str(tmp_path), BadRows()))
    message, skipped = spoilt(tmp_path, how), BadRows(skip=True)
    with pytest.raises(UserError, match=message):
        task.dataset(processor, task.read(str(tmp_path), BadRows()), BadRows())
    items = task.dataset(processor, task.read(str(tmp_path), skipped), skipped)
    assert (len(items.places), skipped.count) == (2, 1)


def test_a_letter_that_was_never_seen_is_reported(tmp_path: Path) -> None:
    task = tasks()["transcribe"](**SMALL)
    processor = task.fit_processor(task.read(str(folder_of(tmp_path / "one", ["ab"])), BadRows()))
    other = task.read(str(folder_of(tmp_path / "two", ["ac"])), BadRows())
    with pytest.raises(UserError, match=r"transcripts\.tsv:2: 'c' in 'ac' was not seen in training"):
        task.dataset(processor, other, BadRows())


def test_a_folder_with_both_splits_determines_the_held_out_data(tmp_path: Path) -> None:
    folder_of(tmp_path, words(20))
    lines = (tmp_path / "transcripts.tsv").read_text().splitlines()
    (tmp_path / "transcripts.tsv").unlink()
    (tmp_path / "train.tsv").write_text("\n".join(lines[:16]) + "\n")
    (tmp_path / "valid.tsv").write_text("\n".join([lines[0], *lines[16:]]) + "\n")
    examples = read_examples(tasks()["transcribe"](), Sources((str(tmp_path),)), 1)
    assert (len(examples.train), len(examples.validation), len(examples.test)) == (14, 1, 5)
    with pytest.raises(UserError, match=r"contains train\.tsv and valid\.tsv; pass one of them"):
        tasks()["transcribe"]().read(str(tmp_path), BadRows())
    (tmp_path / "clips" / "x").mkdir()
    with pytest.raises(UserError, match=r"expected a table of the clips \(transcripts\.tsv"):
        tasks()["transcribe"]().read(str(tmp_path / "clips"), BadRows())


def test_the_same_words_are_never_on_two_sides(tmp_path: Path) -> None:
    rows = [Row(f"t:{n}", (f"{n}.wav", text)) for n, text in enumerate(["Ano.", "ano", "Ne!", "ne", "tak"] * 3)]
    train, held = tasks()["transcribe"]().hold_out(rows, 2, 1)
    assert not {normalize_transcript(row.values[1]) for row in train} & {
        normalize_transcript(row.values[1]) for row in held
    }
    assert len(train) + len(held) == 15


@pytest.mark.parametrize(
    "wrong", [{"d_model": 30, "heads": 4}, {"d_model": 12, "heads": 4}, {"before": -1}, {"mask_ratio": 1.0}]
)
def test_invalid_options_are_reported(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        tasks()["transcribe"](**wrong)


def test_tones_are_learned_and_beat_the_baselines(trained: tuple[Run, Examples]) -> None:
    run, examples = trained
    model, _ = run.model()
    figures = run.task.evaluate(model, run.processor, examples.test)
    baselines = run.task.baselines(run.processor, examples.train, examples.test)
    assert figures["cer"] <= 0.1 < baselines["nearest training clip"]["cer"]
    assert figures["cer"] < baselines["most frequent transcript"]["cer"]
    assert figures["real_time_factor"] > 0


def test_a_letter_that_training_never_had_counts_as_an_error(trained: tuple[Run, Examples]) -> None:
    """The clip is readable, so that model and baselines are evaluated on its whole text."""
    run, examples = trained
    model, _ = run.model()
    row = examples.test[0]
    strange = Row("t:1", (row.values[0], "x" * 9))
    assert run.task.evaluable_rows(run.processor, [row, strange], BadRows()) == [row, strange]
    assert run.task.evaluate(model, run.processor, [strange])["cer"] == 1
    baselines = run.task.baselines(run.processor, examples.train, [strange])
    assert [figures["cer"] for figures in baselines.values()] == [1, 1]


def test_the_command_prints_text_score_and_real_time_factor(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    run, examples = trained
    path, text = examples.test[0].values
    result = CliRunner().invoke(app, ["predict", str(run.folder), path])
    assert result.exit_code == 0, result.output
    transcript, score, where, speed = result.output.strip().split("\t")
    assert (transcript, where) == (text, path)
    assert 0 < float(score) <= 1
    assert speed.endswith(" x real time")
    message = json.loads(CliRunner().invoke(app, ["predict", str(run.folder), path, "--json"]).output)
    assert message["seconds"] == pytest.approx(len(soundfile.read(path)[0]) / 16000)
    (tmp_path / "no.wav").write_text("hello")
    mixed = CliRunner().invoke(app, ["predict", str(run.folder), str(tmp_path / "no.wav"), path, "--skip-bad"])
    assert mixed.output.count("x real time") == 1
    assert "1 bad lines left out" in mixed.output
    assert CliRunner().invoke(app, ["predict", str(run.folder), path, "--out", "x.wav"]).exit_code != 0


def test_the_viewer_shows_attention_over_the_spectrogram(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    run, examples = trained
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["view", str(run.folder), examples.test[0].values[0], "-o", str(page), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["note"].startswith(examples.test[0].values[1])
    assert '"spectrogram":{"stream":"source"' in page.read_text().replace(": ", ":")


def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    table = folder_of(tmp_path / "data", words(40))
    whole, examples = started(tmp_path / "whole", table)
    assert train(whole, examples).done
    broken, examples = started(tmp_path / "broken", table)
    with pytest.raises(KeyboardInterrupt):
        train(broken, examples, DieAtStep(5))
    assert train(Run.open(broken.folder)).done
    ours, theirs = (load(run.folder / "best.safetensors")[0] for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_exported_model_is_read_by_regard(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    run, _ = trained
    onnxruntime = pytest.importorskip("onnxruntime")
    export(run, tmp_path / "out")
    again, (model, _) = regard.load(tmp_path / "out"), run.model()
    features, mask = torch.randn(2, 57, 40), torch.arange(57) < torch.tensor([[57], [30]])
    expected = model(features, mask).detach()
    assert torch.equal(again(features, mask), expected)
    graph = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    (actual,) = graph.run(None, {"features": features.numpy(), "mask": mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual)[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(actual)[1, :8], expected[1, :8], rtol=1e-4, atol=1e-5)


def test_masks_do_not_exceed_the_ratio() -> None:
    features = regard.pack([torch.zeros(100, 40), torch.zeros(30, 40)])
    for seed in range(20):
        shown = spec_augment_mask(features, 0.4, np.random.default_rng(seed))
        for clip in (shown[:100], shown[100:]):
            assert clip.any(1).mean() >= 0.6
            assert clip.any(0).mean() >= 0.6
    assert spec_augment_mask(features, 0.0, np.random.default_rng(0)).all()


def test_the_nearest_clip_of_a_clip_is_itself() -> None:
    chance = np.random.default_rng(0)
    clips = [chance.normal(size=(n, 40)) for n in (30, 7, 50, 3)]
    assert nearest_clips(clips, clips) == [0, 1, 2, 3]


def test_a_band_that_is_silent_in_training_is_not_all_that_counts_later(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    soundfile.write(tmp_path / "a.wav", chance.normal(0, 0.1, 8000), 8000)  # nothing above 4 kHz
    form = AudioFormat(**fit_audio_format([Row("here", (str(tmp_path / "a.wav"),))], 80))
    hiss = log_mel_features(chance.normal(0, 0.003, 16000).astype(np.float32), 80)
    assert float(form.normalize(torch.from_numpy(hiss).float())[:, 70:].abs().max()) < 10
