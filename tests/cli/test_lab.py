"""`regard lab`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from regard.lab import CLAIMS
from tests.conftest import Command


def test_claims_are_listed_in_both_languages(regard: Command) -> None:
    result = regard("lab", "--list")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()] == list(CLAIMS)
    assert "点积的方差等于维度 d" in regard("lab", "--list", "--lang", "zh").out
    assert [each["claim"] for each in json.loads(regard("lab", "--list", "--json").out)] == list(CLAIMS)


def test_one_claim_is_measured_and_printed(regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = regard("lab", "example-softmax-3")
    assert result.code == 0
    assert "false as printed" in result.out
    assert "[0.9975, 0.0025]" in result.out
    assert list(tmp_path.iterdir()) == []


def test_results_are_printed_as_json_and_depend_on_the_seed(regard: Command) -> None:
    (first,), (second,), (third,) = (
        json.loads(regard("lab", "equivariance", "--json", "--seed", seed).out) for seed in (1, 1, 2)
    )
    assert (first["claim"], first["verdict"]) == ("equivariance", "holds")
    assert first["findings"] == second["findings"]
    assert first["findings"] != third["findings"]
    assert first["verdict"] == third["verdict"]


def test_a_page_and_a_notebook_are_written(regard: Command, tmp_path: Path) -> None:
    path, book = tmp_path / "lab.html", tmp_path / "lab.ipynb"
    result = regard("lab", "equivariance", "-o", path, "--notebook", book, "--lang", "zh")
    assert result.code == 0
    assert "注意力具有置换等变性" in path.read_text(encoding="utf-8")
    assert json.loads(book.read_text(encoding="utf-8"))["nbformat"] == 4
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lab.html", "lab.ipynb"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["varianz"], "there is no claim 'varianz'; did you mean variance?"),
        (["variance", "--lang", "fr"], "--lang must be en or zh, but is 'fr'"),
        (["variance", "-o", "none/lab.html"], "none/lab.html: there is no folder"),
        (["variance", "-o", "."], "is a folder"),
        (["variance", "-o", "lab.pdf"], "name the file lab.html"),
        (["variance", "--notebook", "lab.py"], "name the file lab.ipynb"),
        (["--calculator", "-o", "calculator.png"], "name the file calculator.html"),
    ],
)
def test_a_user_error_is_raised_before_measuring(
    words: list[str], message: str, regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = regard("lab", *words)
    assert result.code == 1
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert result.out == ""


def test_a_missing_package_is_an_error_before_measuring(
    regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.cli import lab_report

    monkeypatch.setattr(lab_report, "find_spec", lambda name: None if name == "latex2mathml" else True)
    result = regard("lab", "variance", "-o", tmp_path / "lab.html")
    assert result.code == 1
    assert "needs latex2mathml: pip install 'regard[lab]'" in result.err


def test_the_page_is_written_after_the_pipe_is_closed(tmp_path: Path) -> None:
    page = tmp_path / "lab.html"
    words = [sys.executable, "-m", "regard", "lab", "variance", "temperature", "-o", str(page)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert page.exists()
