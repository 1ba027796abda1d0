"""What the command answers without importing torch: help, usage errors, missing paths, and tasks of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("typer")

from regard.data import readers
from regard.errors import BadRows, UserError
from regard.predictors.resolve import open_model
from regard.tasks import Recipe, Run, tasks
from regard_cli import paths
from regard_cli.declared_tasks import declared_recipe, declared_tasks


def test_declared_tasks_equal_the_tasks() -> None:
    declared = declared_tasks()
    real = {name: task for name, task in tasks().items() if task.__module__.startswith("regard.tasks.")}
    assert list(declared) == list(real)
    pairs = [(declared[name], real[name]) for name in real] + [(declared_recipe(), Recipe)]
    for one, other in pairs:
        both = [[(each.name, each.type, each.default, each.metadata) for each in fields(kind)] for kind in (one, other)]
        assert both[0] == both[1]
    for one, other in pairs[:-1]:
        for name in ("name", "description", "example", "columns", "input_kind", "data", "held_out"):
            assert getattr(one, name) == getattr(other, name)
        assert asdict(one.recipe) == asdict(other.recipe)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["tasks"], ["tasks", "masked"], ["train"], ["train", "masked", "--help"], ["info", "--version"],
        ["trian"], ["train", "translat"], ["train", "classify", "--stpes", "3"], ["evaluate"], ["tasks", "none"],
        ["predict", "caf\udce9"],
    ],
)  # fmt: skip
def test_help_and_usage_errors_do_not_import_torch(words: list[str]) -> None:
    result = run_without_torch(words)
    assert result.returncode in (0, 2)
    assert result.stdout + result.stderr


def run_without_torch(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys\ntry:\n    from regard_cli import main; main()\nfinally:\n    assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=os.environ | environment
    )
    assert "AssertionError" not in result.stderr
    return result


def test_python_m_regard_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "regard", "info", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == version("regard")
    assert "regard_cli" in result.stderr
    assert " torch\n" not in result.stderr


def test_usage_calls_the_command_regard() -> None:
    command = [sys.executable, "-m", "regard", "tasks", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage: regard tasks" in result.stdout


@pytest.mark.parametrize("words", [["resume", "nothing\x1b[1m/here"], ["export", "nothing", "out"]])
def test_a_missing_run_is_reported_without_torch(words: list[str]) -> None:
    result = run_without_torch(words)
    with pytest.raises(UserError) as caught:
        Run.open(words[1])
    assert result.returncode == 1
    assert result.stderr == f"regard: {caught.value}\n".replace("\x1b", "\\x1b")


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "nothing"], ["predict", "no/such/folder"], ["predict", "./org/model"], ["predict", "tests/none"],
        ["predict", "org/model.gguf"], ["evaluate", "nothing"], ["serve", "nothing"], ["view", "nothing", "a text"],
    ],
)  # fmt: skip
def test_a_missing_model_is_reported_without_torch(words: list[str]) -> None:
    result = run_without_torch(words)
    with pytest.raises(UserError) as caught:
        open_model(words[1])
    assert result.returncode == 1
    assert result.stderr == f"regard: {caught.value}\n"


def test_a_missing_file_is_reported_without_torch(tmp_path: Path) -> None:
    result = run_without_torch(["train", "classify", "--data", "no.csv", "--out", str(tmp_path / "run")])
    with pytest.raises(UserError) as caught:
        list(readers.read_rows("no.csv", {"text": ""}, BadRows()))
    assert result.returncode == 1
    assert result.stderr == f"regard: {caught.value}\n"
    assert paths.FORMATS == readers.FORMATS


PLUGIN = """
import torch
from regard.tasks import Task
from regard.training.recipe import option
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class Reverse(Task):
    name: ClassVar[str] = "reverse"
    description: ClassVar[str] = "write a text backwards"
    columns: ClassVar[dict[str, str]] = {}
    example: ClassVar[str] = "abc"
    layers: int = option(2, "number of layers")

    def model(self, processor):
        raise NotImplementedError
"""


def install_plugin(folder: Path, source: str) -> dict[str, str]:
    """Write a package with a task; return the environment in which it is installed."""
    (folder / "backwards").mkdir()
    (folder / "backwards" / "__init__.py").write_text("import torch")
    (folder / "backwards" / "task.py").write_text(source)
    (folder / "backwards-1.dist-info").mkdir()
    (folder / "backwards-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards\nVersion: 1\n")
    (folder / "backwards-1.dist-info" / "entry_points.txt").write_text("[regard.tasks]\nreverse = backwards.task\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_tasks_of_other_packages_are_listed_without_torch(tmp_path: Path) -> None:
    installed = install_plugin(tmp_path, PLUGIN)
    assert "reverse     write a text backwards" in run_without_torch(["tasks"], **installed).stdout
    assert "Number of layers" in run_without_torch(["train", "reverse", "--help"], **installed).stdout
    assert "--layers 2" in run_without_torch(["tasks", "reverse"], **installed).stdout


def test_a_task_that_cannot_be_read_from_its_source_is_imported(tmp_path: Path) -> None:
    source = PLUGIN.replace("(Task)", "(make_base())") + "\n"
    source = source.replace("@dataclass", "def make_base():\n    return Task\n\n@dataclass")
    installed = install_plugin(tmp_path, source)
    result = subprocess.run(
        [sys.executable, "-m", "regard_cli", "tasks"], capture_output=True, text=True, env=os.environ | installed
    )
    assert "reverse     write a text backwards" in result.stdout
