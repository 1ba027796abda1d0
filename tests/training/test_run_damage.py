"""Run directories with damaged files: each works, or raises one clear error, in little time and memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from regard.tasks import Run, UserError, train
from tests import damaged_files
from tests.tasks import tiny_images, tiny_runs


def trained(folder: Path, name: str) -> Path:
    """Train a small run of a task."""
    folder.mkdir()
    if name in tiny_images.SMALL:
        source = (
            tiny_images.folder_of(folder / "data", tiny_images.stripes(40))
            if name == "images"
            else tiny_images.scenes(folder / "data", 40)
        )
        run, examples = tiny_images.new_run(folder, name, source)
        train(run, examples)
    else:
        run = tiny_runs.new_run(folder, name)
        train(run)
    return run.folder


@pytest.mark.parametrize("job", ["run", "resume"])
def test_every_change_to_a_run_works_or_is_one_error(job: str, tmp_path: Path) -> None:
    folders = [trained(tmp_path / name, name) for name in ("classify", "translate", "images")]
    assert damaged_files.run(job, folders, every=400) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole") / "classify", "classify")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_sizes_that_the_tensors_do_not_have_are_refused_before_anything_is_allocated(folder: Path) -> None:
    edit(folder / "run.json", lambda about: about | {"options": about["options"] | {"d_model": 3_000_000}})
    for job in (damaged_files.use_run, damaged_files.resume_run):
        with pytest.raises(UserError, match=r"safetensors: its tensors are not those of the model .*3000000"):
            job(folder)


def test_a_number_of_layers_that_the_file_does_not_have_is_refused(folder: Path) -> None:
    edit(folder / "run.json", lambda about: about | {"options": about["options"] | {"layers": 2_000_000_000}})
    with pytest.raises(
        UserError, match=r"run\.json or processor\.json: the configuration describes a model of more than"
    ):
        Run.open(folder).model()


@pytest.mark.parametrize("strategy", [{"Fixed": 10**10}, {"Fixed": 64}, "BatchLongest"])
def test_a_tokenizer_that_pads_is_refused(strategy: Any, folder: Path) -> None:
    padding = {"strategy": strategy, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
               "pad_token": "<pad>"}  # fmt: skip
    edit(folder / "tokenizer.json", lambda held: held | {"padding": padding})
    with pytest.raises(UserError, match=r"tokenizer\.json: .*pad"):
        Run.open(folder)


def test_a_tokenizer_that_cuts_is_refused(folder: Path) -> None:
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 10}
    edit(folder / "tokenizer.json", lambda held: held | {"truncation": cut})
    with pytest.raises(UserError, match=r"tokenizer\.json: .*stride"):
        Run.open(folder)
    edit(folder / "tokenizer.json", lambda held: held | {"truncation": cut | {"stride": 0, "max_length": 5}})
    with pytest.raises(UserError, match=r"tokenizer\.json: .*truncates"):
        Run.open(folder)


def test_a_token_without_a_row_in_the_table_of_embeddings_is_refused(folder: Path) -> None:
    def moved(held: Any) -> Any:
        last = max(held["model"]["vocab"], key=held["model"]["vocab"].get)
        held["model"]["vocab"][last] = 1_000_000
        return held

    edit(folder / "tokenizer.json", moved)
    with pytest.raises(UserError, match=r"tokenizer\.json: has token id 1000000"):
        Run.open(folder)


FILES = ("run.json", "processor.json", "tokenizer.json", "best.safetensors", "log.jsonl", "run.lock",
         "checkpoints/step-00000008.safetensors")  # fmt: skip


def special_id(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["fifo", "folder", "sparse", "device"])
@pytest.mark.parametrize("name", FILES)
def test_special_files_are_refused_or_not_needed(name: str, kind: str, folder: Path) -> None:
    special_id(folder / name, kind)
    for job in (damaged_files.use_run, damaged_files.resume_run):
        assert damaged_files.attempt(f"{name}: {kind}", lambda job=job: job(folder)) is None


def test_the_target_of_a_link_in_place_of_the_lock_is_not_changed(folder: Path) -> None:
    target = folder.parent / "precious.txt"
    target.write_text("precious")
    (folder / "run.lock").unlink()
    (folder / "run.lock").symlink_to(target)
    with pytest.raises(UserError, match=r"run\.lock: is not a regular file"):
        damaged_files.resume_run(folder)
    assert target.read_text() == "precious"


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    path = folder / "best.safetensors"
    held = load_file(path)
    for changed in (
        {name: x for name, x in held.items() if "norm" not in name},
        held | {"odd\x1b": held["classifier.bias"] + 1},
    ):
        save_file(changed, path, {"progress": "{}"})
        with pytest.raises(UserError, match=r"best\.safetensors: its tensors are not those of the model") as raised:
            Run.open(folder).model()
        assert str(raised.value).isprintable()


@pytest.mark.parametrize("line", ["1", '{"step": "a"}', '{"step": 1, "seconds": "b"}', "[" * 100_000, '{"a": 1}', "x"])
def test_a_log_with_a_line_that_is_no_step_is_an_error_that_names_it(line: str, folder: Path) -> None:
    held = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(f"{line}\n{held}")
    with pytest.raises(UserError, match=r"log\.jsonl: .*line 1"):
        Run.open(folder).minutes()
