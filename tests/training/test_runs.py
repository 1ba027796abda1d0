"""Run directories: nothing is overwritten or lost."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.tasks import Run, Sources, UserError, create_run, train
from regard.training.runs import Progress
from tests.tasks.tiny_runs import classes, new_run, small


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 64 KB, to simulate a full disk for all writers, including safetensors."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(tmp_path: Path, small_files: None) -> None:
    run = new_run(tmp_path)
    run.save({"model.a": torch.ones(3)}, Progress(step=1))
    with pytest.raises(UserError, match=f"the disk is full .* regard resume {run.folder}$"):
        run.save({"model.a": torch.zeros(1 << 16)}, Progress(step=2))
    latest = run.latest()
    assert latest is not None
    assert latest[1].step == 1
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000001.safetensors"]


def test_a_disk_that_fills_up_at_the_last_moment_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)

    def no_room(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(UserError, match="the disk is full"):
        run.save({"model.a": torch.zeros(3)}, Progress(step=2))
    assert list((run.folder / "checkpoints").iterdir()) == []


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for step in (1, 2, 3):
        run.save({"model.a": torch.ones(3)}, Progress(step=step))
    assert [path.name for path in run.checkpoints()] == ["step-00000003.safetensors", "step-00000002.safetensors"]


def test_a_folder_with_a_run_of_another_task_is_left_alone(tmp_path: Path) -> None:
    run = new_run(tmp_path, "masked")
    before = (run.folder / "run.json").read_bytes()
    task = small("classify")
    with pytest.raises(UserError, match=f"{run.folder}: contains a run of masked; continue with regard resume"):
        create_run(run.folder, task, task.recipe, Sources((classes(tmp_path),), held_out=10))
    assert (run.folder / "run.json").read_bytes() == before


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("dear")
    task = small("classify")
    with pytest.raises(UserError, match="is not empty and not a run directory"):
        create_run(tmp_path / "run", task, task.recipe, Sources((classes(tmp_path),), held_out=10))


def test_a_folder_that_holds_no_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run; create one with regard train TASK"):
        Run.open(tmp_path / "none")
    with pytest.raises(UserError, match=r"not a run directory \(no run.json\)"):
        Run.open(tmp_path)


def test_a_run_of_an_earlier_format_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    about = json.loads((run.folder / "run.json").read_text())
    del about["format"]
    (run.folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"run\.json: expected format 2, got None; train the run again"):
        Run.open(run.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "knit"}, "unknown task 'knit'; known tasks are answer, classify, "),
        ({"options": {"colour": 3}}, "options has .colour., which Masked does not accept.*another version"),
        ({"recipe": {"pace": 3}}, "recipe has 'pace', which Recipe does not accept"),
    ],
)
def test_a_run_of_another_version_is_reported(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run.folder / "run.json").write_text(json.dumps(run.about | change))
    with pytest.raises(UserError, match=message):
        Run.open(run.folder)


def test_a_checkpoint_error_without_a_message_is_skipped_too(tmp_path: Path) -> None:
    run, messages = new_run(tmp_path), list[str]()
    for step in (1, 2):
        run.save({"model.a": torch.ones(3)}, Progress(step=step))

    def read(path: Path) -> Any:
        if "2" in path.name:
            raise EOFError
        return {}, {"progress": '{"step": 1}'}

    latest = run.latest(messages.append, read)
    assert latest is not None
    assert latest[1].step == 1
    assert (
        "step-00000002.safetensors: cannot be read (EOFError); trying step-00000001.safetensors instead" in messages[0]
    )


def test_a_run_that_is_not_trained_cannot_predict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not trained yet"):
        new_run(tmp_path).model()


def test_without_best_weights_the_average_of_the_last_checkpoint_predicts(tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=4, evaluate_every=4)
    train(run)
    best, _ = run.model()
    (run.folder / "best.safetensors").unlink()
    last, step = run.model()
    assert step == 4
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), last.parameters(), strict=True))


def test_damaged_best_weights_are_reported(tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=1)
    train(run)
    (run.folder / "best.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"best.safetensors: cannot be read .*regard resume"):
        run.model()
