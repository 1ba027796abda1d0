"""A flipped bit in a checkpoint is detected and reported, and the checkpoint is not used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.tasks import Run, UserError, train
from regard.training.runs import Progress, load
from tests.conftest import Command
from tests.tasks.tiny_runs import RecordingCallback, new_run


def flip(path: Path, at: int) -> None:
    """Flip the lowest bit of a byte."""
    held = bytearray(path.read_bytes())
    held[at] ^= 1
    path.write_bytes(held)


def test_every_bit_that_changed_is_found(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    tensors = {"model.a": torch.randn(3, 2), "model.n": torch.tensor(7), "average.h": torch.randn(4).bfloat16()}
    path = run.save(tensors, Progress(step=3))
    whole, kept = path.read_bytes(), load(path)
    detected = 0
    for at in range(len(whole)):
        flip(path, at)
        try:
            values, notes = load(path)
        except Exception:
            detected += 1
            continue
        finally:
            path.write_bytes(whole)
        # The name of the checksum and spaces of the header have no effect on a training.
        assert notes["progress"] == kept[1]["progress"]
        assert all(torch.equal(value, kept[0][name]) for name, value in values.items())
    assert detected > len(whole) - 40


def test_a_checkpoint_with_a_changed_bit_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    train(run)
    whole = {name: value.clone() for name, value in load(run.checkpoints()[0])[0].items()}  # the file is mapped
    flip(run.checkpoints()[0], -100)
    callback = RecordingCallback()
    assert train(run, callback=callback).done
    assert "step-00000008.safetensors: cannot be read (damaged: the checksum does not match" in callback.lines[0]
    assert [step.step for step in callback.steps] == [7, 8]
    again = load(run.checkpoints()[0])[0]
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_where_no_checkpoint_can_be_read_no_other_is_promised(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    path = run.save({"model.a": torch.randn(3, 2)}, Progress(step=3))
    flip(path, -5)
    lines: list[str] = []
    with pytest.raises(UserError, match="no checkpoint can be read; start another run"):
        run.latest(lines.append)
    assert [line.endswith("the checksum does not match the content)") for line in lines] == [True]


def test_checkpoints_of_earlier_versions_have_no_checksum(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    path = run.save({"model.a": torch.ones(3)}, Progress(step=3))
    save_file(load_file(path), path, {"progress": '{"step": 3}'})
    latest = run.latest()
    assert latest is not None
    assert latest[1].step == 3


@pytest.mark.parametrize("part", ["notes.json", "safetensors"])
def test_a_checkpoint_in_parts_with_a_changed_bit_is_skipped(part: str, tmp_path: Path) -> None:
    run, messages = new_run(tmp_path), list[str]()
    for step in (1, 2):
        run.save_shard({"model.a": torch.ones(30)}, Progress(step=step))
    (file,) = run.checkpoints()[0].glob(f"*{part}")
    flip(file, file.read_bytes().index(b'"step') + 9 if part == "notes.json" else -1)
    latest = run.latest(messages.append)
    assert latest is not None
    assert latest[1].step == 1
    assert "step-00000002: cannot be read" in messages[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("trained"), "classify", steps=4)
    train(run)
    return run


@pytest.mark.parametrize("words", [["predict", "the cat"], ["evaluate"], ["view", "the cat", "-o", "page.html"]])
def test_damaged_best_weights_are_reported(
    words: list[str], trained: Run, regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.folder, "run")
    flip(Path("run/best.safetensors"), -100)
    result = regard(words[0], "run", *words[1:])
    assert result.code == 1
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert "best.safetensors: damaged: " in result.err
    assert "regard resume run rewrites it" in result.err


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_best_weights_that_are_lost_are_those_of_the_last_checkpoint(how: str, trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    best = run.folder / "best.safetensors"
    flip(best, -100) if how == "damaged" else best.unlink()
    callback = RecordingCallback()
    train(run, callback=callback)
    assert f"replaced by the weights of step {json.loads(load(best)[1]['progress'])['step']}" in callback.lines[0]
    tensors = load(run.checkpoints()[0])[0]
    weights = load(best)[0]
    assert weights
    assert all(torch.equal(value, tensors[f"average.{name}"]) for name, value in weights.items())
    for path in run.checkpoints():
        flip(path, -100)
    with pytest.raises(UserError, match="no checkpoint can be read"):
        train(run)
