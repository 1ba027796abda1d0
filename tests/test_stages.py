"""Progress: long stages are shown on standard error, and standard output has only results."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from rich.console import Console

from regard.cli import stages
from regard.cli.stages import Stages
from regard.progress import report_to, stage, track
from regard.tasks import Run, train
from tests.conftest import Command
from tests.tasks.tiny_runs import classes, new_run


class Immediate:
    """A timer that has expired."""

    daemon = False

    def __init__(self, seconds: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.start = lambda: function(*args)

    def cancel(self) -> None: ...


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def printed(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_a_short_stage_prints_no_line() -> None:
    shown = console(terminal=False)
    with report_to(Stages(shown)), stage("reading data"):
        assert list(track([1, 2, 3])) == [1, 2, 3]
    assert printed(shown) == ""


def test_a_long_stage_prints_a_line_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Timer", Immediate)
    monkeypatch.setattr(stages, "EVERY", 0.0)
    shown = console(terminal=False)
    with report_to(Stages(shown)):
        with stage("evaluating 4 rows"):
            assert printed(shown) == "evaluating 4 rows ...\n"
            list(track("abcd"))
        with stage("reading data"):
            list(track(iter("abc")))
    lines = printed(shown).splitlines()
    assert {"evaluating 4 rows: 50%", "evaluating 4 rows: 100%", "reading data: 3"} <= set(lines)


def test_a_terminal_shows_a_bar_that_is_erased() -> None:
    shown = console(terminal=True)
    with report_to(Stages(shown)), stage("evaluating 4 rows"):
        with stage("training a [tokenizer]"):
            list(track("abcd"))
        assert "evaluating 4 rows" in printed(shown)
    assert "\x1b[2K" in printed(shown)[-20:]  # the line is erased


def test_a_stage_that_fails_ends() -> None:
    reporter = Stages(console(terminal=True))
    with pytest.raises(RuntimeError, match="bad"), report_to(reporter), stage("reading data"):
        raise RuntimeError("bad")
    assert reporter._bar is None


def test_stages_are_silent_without_a_reporter(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("reading data"):
        list(track("abc"))
    assert capsys.readouterr() == ("", "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("run"), "classify")
    train(run)
    return run


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the stages of a command, and those with counted items."""
    results: list[str] = []
    real_start, real_count = Stages.start, Stages.count

    def start(self: Stages, label: str) -> None:
        results.append(label)
        real_start(self, label)

    def count(self: Stages, done: int, total: int | None) -> None:
        results.append(f"{self._stages[-1].label}: counted")
        real_count(self, done, total)

    monkeypatch.setattr(Stages, "start", start)
    monkeypatch.setattr(Stages, "count", count)
    return results


def test_every_long_part_of_a_command_is_a_stage(regard: Command, run: Run, labels: list[str], tmp_path: Path) -> None:
    tiny = [
        "--d-model",
        "16",
        "--layers",
        "1",
        "--heads",
        "2",
        "--vocabulary",
        "300",
        "--tokens",
        "300",
        "--steps",
        "2",
        "--held-out",
        "12",
    ]
    asked: dict[str, tuple[Any, ...]] = {
        "train": ("train", "classify", "--data", classes(tmp_path), "--out", tmp_path / "run", *tiny, "--json"),
        "evaluate": ("evaluate", run.folder, "--json"),
        "predict": ("predict", run.folder, tmp_path / "classes.csv", "--json"),
        "export": ("export", run.folder, tmp_path / "out"),
    }
    expected = {
        "train": [
            "reading data: counted", "training a tokenizer", "preparing examples", "loading the model",
            "evaluating 22 test rows: counted", "evaluating baselines",
        ],
        "evaluate": [
            "checking that the data is the same", "reading data: counted", "loading the model",
            "evaluating 22 test rows: counted", "evaluating baselines",
        ],
        "predict": ["reading inputs: counted", "loading the model", "predicting 120 inputs: counted"],
        "export": ["loading the model", "writing model.onnx"],
    }  # fmt: skip
    for name, words in asked.items():
        labels.clear()
        result = regard(*words)
        assert result.code == 0, result.err
        assert [label for label in expected[name] if label not in labels] == []
        if "--json" in words:
            [json.loads(line) for line in result.out.splitlines()] if name == "predict" else json.loads(result.out)


def test_progress_goes_to_standard_error_alone(regard: Command, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = regard("evaluate", run.folder)
    monkeypatch.setattr(threading, "Timer", Immediate)
    result = regard("evaluate", run.folder)
    assert result.out == quiet.out
    assert "reading data ...\n" in result.err
    assert "evaluating 22 test rows ...\n" in result.err


def test_only_the_first_of_several_processes_reports(
    regard: Command, run: Run, labels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert regard("predict", run.folder, "the cat sees").code == 0
    assert labels == []
