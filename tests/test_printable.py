"""Untrusted text is escaped before it reaches a terminal: labels, texts, file names, messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.printable import UNSAFE, printable, printable_json
from regard.tasks import train
from tests.conftest import Command
from tests.tasks import tiny_runs

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202egnp\u2066\u2028[red]x[/red]\x7f"


def safe(output: str) -> bool:
    """Whether no control characters except line ends are left."""
    return not UNSAFE.search(output.replace("\n", "").replace("\t", ""))


def test_ordinary_text_is_unchanged() -> None:
    for text in (
        "naïve café",
        "日本語",
        "مرحبا\u200f!",
        "می\u200cخواهم",
        "👩\u200d👩\u200d👧",
        "soft\u00adhyphen",
        "\\n",
    ):
        assert printable(text) == text


def test_control_characters_are_escaped_in_one_line() -> None:
    assert safe(printable(HOSTILE))
    assert "\n" not in printable(HOSTILE)
    assert printable("a\nb\ud800") == "a\\nb\\ud800"


@pytest.mark.parametrize("indent", [None, 1])
def test_json_can_be_printed_and_read_back(indent: int | None) -> None:
    value = {HOSTILE: [HOSTILE, "é\U000e0041\ud800", {"a": "\n\t"}]}
    text = printable_json(value, indent=indent)
    assert safe(text)
    assert json.loads(text) == value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with hostile labels in a folder with a hostile name."""
    created = tiny_runs.new_run(tmp_path_factory.mktemp("printable"), "classify")
    train(created)
    path = created.folder / "processor.json"
    processor = json.loads(path.read_text())
    path.write_text(json.dumps(processor | {"labels": [HOSTILE, HOSTILE + "2"]}))
    folder = created.folder.with_name(f"run {HOSTILE.replace('/', '')}")
    shutil.copytree(created.folder, folder)
    return folder


def run_command(*arguments: Any) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_labels_and_texts_of_predictions(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "the cat"}) + "\n" + json.dumps({"text": f"the {HOSTILE} cat"}) + "\n")
    result = run_command("predict", run, path)
    assert safe(result)
    assert len(result.splitlines()) == 2
    assert "\\x1b]0;owned\\x07" in result
    lines = run_command("predict", run, path, "--json").splitlines()
    assert safe("".join(lines))
    assert [json.loads(line)["input"] for line in lines] == ["the cat", f"the {HOSTILE} cat".strip()]
    assert json.loads(lines[0])["output"] in (HOSTILE, HOSTILE + "2")


def test_the_table_of_an_evaluation(run: Path) -> None:
    processor = json.loads((run / "processor.json").read_text())
    (run / "processor.json").write_text(json.dumps(processor | {"labels": ["cat", "none"]}))  # those of its data
    try:
        result = run_command("evaluate", run)
    finally:
        (run / "processor.json").write_text(json.dumps(processor))
    assert "accuracy" in result
    assert "\\x1b" in result
    assert safe(result)


def test_errors_are_one_line(run: Path, tmp_path: Path, regard: Command) -> None:
    name = tmp_path / f"{HOSTILE.replace('/', '')}.csv"
    name.write_text(f'text,label\n"{HOSTILE}\n')
    for arguments in (
        ("predict", run, name),
        ("predict", run, f"{name}.gz".replace("\n", "")),
        ("predict", run / "no", "a"),
        ("evaluate", run),
        ("train", "classify", "--data", name, "--out", tmp_path / "out"),
        ("check", "--target", HOSTILE),
    ):
        done = regard(*arguments)
        assert done.code in (1, 2), done
        assert "Traceback" not in done.err
        assert done.err.startswith("regard:"), done.err
        assert safe(done.err)
        assert len(done.err.splitlines()) == 1, done.err


def test_bad_lines_and_exports(run: Path, tmp_path: Path, regard: Command) -> None:
    path = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl"
    path.write_text('{"text": "the cat"}\n{"text": 1, "text": 2}\n')
    done = regard("predict", run, path, "--skip-bad")
    assert done.code == 0, done.err
    assert "1 bad lines" in done.err
    assert safe(done.err + done.out)
    out = tmp_path / f"out {HOSTILE.replace('/', '')}"
    done = regard("export", run, out, "--no-onnx")
    assert done.code == 0, done.err
    assert safe(done.out)
    assert "config.json" in done.out
