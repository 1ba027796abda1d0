"""A run directory has a single writer, and a run without steps can be restarted in place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.tasks import Run, Sources, UserError, create_run, train
from regard.training.loop import NoCallback, Step
from tests.conftest import Command
from tests.tasks.conftest import Start
from tests.tasks.tiny_runs import Signals, classes, new_run, small


class Waits(NoCallback):
    """Pause at the second step until a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, step: Step) -> None:
        if step.step == 2:
            (self.folder / "waits").touch()
            wait_for(self.folder / "go")


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()


def trains(folder: str) -> None:
    torch.set_num_threads(1)
    train(Run.open(folder), callback=Waits(Path(folder).parent))


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines() if "rate" in line]


def test_a_run_that_is_being_trained_is_not_resumed(regard: Command, start: Start, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    process = start(trains, str(run.folder))
    wait_for(tmp_path / "waits")
    result = regard("resume", run.folder)
    (tmp_path / "go").touch()
    process.join(60)
    assert process.exitcode == 0
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert f"{run.folder}: is in use by process {process.pid} on " in result.err
    assert steps(run.folder) == list(range(1, 9))
    assert regard("resume", run.folder).code == 0


def test_the_lock_of_a_process_that_was_killed_is_free(start: Start, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    process = start(trains, str(run.folder))
    wait_for(tmp_path / "waits")
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert train(run).done


def test_a_run_is_not_made_where_another_process_makes_one(tmp_path: Path) -> None:
    from regard.training.lock import lock_run

    (tmp_path / "run").mkdir()
    with lock_run(tmp_path / "run"), pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        new_run(tmp_path)
    new_run(tmp_path)


def test_results_of_a_run_in_training_are_printed_and_not_saved(regard: Command, tmp_path: Path) -> None:
    from regard.training.lock import lock_run

    run = new_run(tmp_path, "classify", steps=4)
    train(run)
    before = (run.folder / "run.json").read_text()
    with lock_run(run.folder):
        result = regard("evaluate", run.folder, "--json")
    assert result.code == 0
    assert json.loads(result.out)["step"] == 4
    assert f"the metrics are not stored in run.json: {run.folder}: is in use by" in result.err
    assert (run.folder / "run.json").read_text() == before
    regard("evaluate", run.folder)
    assert json.loads((run.folder / "run.json").read_text())["results"]["step"] == 4


def test_the_folder_of_checkpoints_is_created_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    shutil.rmtree(run.folder / "checkpoints")
    train(run)
    assert [path.name for path in run.checkpoints()] == ["step-00000008.safetensors", "step-00000006.safetensors"]


def begin_again(folder: Path, **options: Any) -> Run:
    task = small("classify", **options)
    recipe = replace(task.recipe, steps=4, tokens=120)
    return create_run(folder / "run", task, recipe, Sources((classes(folder),), held_out=12))[0]


def test_a_run_that_failed_before_its_first_step_is_started_again_in_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokens"):
        train(begin_again(tmp_path, longest=3))
    assert (tmp_path / "run" / "run.json").exists()
    run = begin_again(tmp_path, vocabulary=290)
    assert run.task.vocabulary == 290  # type: ignore[attr-defined]
    train(run, callback=Signals(1, signal.SIGINT))
    kept = (run.folder / "run.json").read_bytes()
    with pytest.raises(UserError, match="contains a run of classify; continue with regard resume"):
        begin_again(tmp_path)
    assert (run.folder / "run.json").read_bytes() == kept


def test_a_run_that_was_killed_after_steps_without_a_checkpoint_is_left_alone(start: Start, tmp_path: Path) -> None:
    run = begin_again(tmp_path)
    process = start(trains, str(run.folder))
    wait_for(tmp_path / "waits")
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert run.checkpoints() == []
    with pytest.raises(UserError, match="contains a run of classify"):
        begin_again(tmp_path)


def test_a_run_that_was_killed_while_it_was_made_is_created_again(tmp_path: Path) -> None:
    folder = begin_again(tmp_path).folder
    (folder / "run.json").unlink()
    (folder / ".run.json.0.part").write_text("{")
    assert begin_again(tmp_path).folder == folder
    assert not list(folder.glob(".*.part"))


def test_files_that_only_look_like_those_of_a_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match="is not empty and not a run directory"):
        begin_again(tmp_path)
    assert (tmp_path / "run" / "tokenizer.json").read_text() == "mine"


def test_a_run_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    task = small("classify")
    with pytest.raises(UserError, match="no such file"):
        create_run(tmp_path / "a" / "b", task, task.recipe, Sources((str(tmp_path / "none.csv"),)))
    assert not (tmp_path / "a").exists()
