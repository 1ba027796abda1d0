"""Paths that cannot be written, ports in use and undecodable arguments are reported in one line before long work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from regard.files import check_writable
from regard.tasks import Run, train
from regard.training import loop
from tests.conftest import Command
from tests.tasks.tiny_runs import classes, new_run


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("reviews"), "classify", steps=2)
    train(run)
    return run


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user cannot write to."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o555)
    yield Path("/proc") if os.access(folder, os.W_OK) else folder  # root may write anywhere but there
    folder.chmod(0o755)


def too_late(*args: Any, **more: Any) -> Any:
    raise AssertionError("the work began")


@pytest.mark.parametrize(
    ("words", "work"),
    [
        (["train", "classify", "--data", "DATA", "--out", "CLOSED/run"], (loop, "read_examples")),
        (["predict", "RUN", "the cat", "--out", "CLOSED/predictions.json"], (Run, "model")),
        (["export", "RUN", "CLOSED/out"], (Run, "model")),
        (["view", "RUN", "the cat", "-o", "CLOSED/page.html"], (Run, "model")),
        (["lab", "equivariance", "-o", "CLOSED/lab.html"], ("regard.cli.lab_report", "run")),
        (["lab", "equivariance", "--notebook", "CLOSED/lab.ipynb"], ("regard.cli.lab_report", "run")),
        (["check", "--junit", "CLOSED/a.xml"], ("regard.cli.check_report", "check")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_folder_without_permission_is_reported_before_the_work(
    words: list[str], work: tuple[Any, str], reviews: Run, closed: Path, tmp_path: Path,
    regard: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    owner, name = work
    monkeypatch.setattr(*((f"{owner}.{name}",) if isinstance(owner, str) else (owner, name)), too_late)
    places = {"RUN": str(reviews.folder), "DATA": classes(tmp_path)}
    result = regard(*(places.get(word, word.replace("CLOSED", str(closed))) for word in words))
    assert result.code == (2 if words[0] == "check" else 1)
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert f"regard: {closed}" in result.err
    assert "Errno" not in result.err


def test_figures_of_a_run_that_cannot_be_written_are_reported(
    reviews: Run, regard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: Any) -> None:
        raise PermissionError(13, "Permission denied", "run.lock")

    monkeypatch.setattr("regard.training.runs.lock_run", denied)
    result = regard("evaluate", reviews.folder)
    assert result.code == 0
    assert "accuracy" in result.out
    assert "the metrics are not stored in run.json: " in result.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("here", "is a folder; pass the name of a file"),
        ("none/page.html", "there is no folder"),
        ("pipe", "is not a regular file"),
    ],
)
def test_a_path_that_is_not_a_file_is_reported(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=f"{name}: {words}"):
        check_writable(tmp_path / name)


def test_a_writable_path_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("before")
    check_writable(tmp_path / "page.html")
    check_writable(tmp_path / "a" / "b" / "new.html", parents=True)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"


def test_a_port_in_use_is_reported_before_a_model_is_loaded(
    reviews: Run, regard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette")
    monkeypatch.setattr(Run, "model", too_late)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = regard("serve", reviews.folder, "--port", port)
    assert result.code == 1
    assert result.err == f"regard: port {port} at 127.0.0.1: Address already in use; choose another with --port\n"


@pytest.mark.parametrize("words", [[b"predict", b"RUN", b"caf\xe9"], [b"resume", b"caf\xe9"], [b"caf\xe9"]])
def test_arguments_that_are_not_utf8_are_usage_errors(words: list[bytes], reviews: Run) -> None:
    words = [str(reviews.folder).encode() if word == b"RUN" else word for word in words]
    code = "from regard.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, timeout=120, env=os.environ | {"LC_ALL": "C.UTF-8"}
    )
    assert ended.returncode == 2
    assert ended.stdout == b""
    expected = rb"regard: expected UTF-8 on the command line, got caf\xe9; convert the text, or rename the file"
    assert ended.stderr.strip() == expected
