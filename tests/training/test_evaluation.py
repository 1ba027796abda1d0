"""Evaluation: reported rows are the evaluated ones, and the same for the model and its baselines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.data.readers import Row
from regard.errors import BadRows
from regard.tasks import Recipe, Task, UserError, tasks
from regard.training.baselines import Trigrams
from tests.tasks import test_graph, test_match, test_sets, tiny_audio, tiny_images
from tests.tasks.tiny_runs import classes, pairs, small

TINY = ["--d-model", "16", "--layers", "1", "--heads", "2", "--vocabulary", "300", "--tokens", "300", "--steps", "2"]
Case = tuple[Task, list[Row], list[Row]]  # a task, training rows, and rows that the model cannot process


def regard(*words: Any) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return json.loads(result.stdout) if result.exit_code == 0 else f"{result.stderr}{result.exception}"


def classify_rows(folder: Path) -> Case:
    task = small("classify", longest=24)
    rows = task.read(classes(folder), BadRows())
    return task, rows, [Row("t:1", ("a cat", "strange")), Row("t:2", ("cat sees " * 30, "cat"))]


def image_rows(folder: Path) -> Case:
    task = tasks()["images"](**tiny_images.SMALL["images"])
    rows = task.read(str(tiny_images.folder_of(folder, tiny_images.stripes(12))), BadRows())
    return task, rows, [Row("t:1", (rows[0].values[0], "strange")), Row("t:2", (str(folder / "gone.png"), "lies"))]


def detect_rows(folder: Path) -> Case:
    task = tasks()["detect"](**tiny_images.SMALL["detect"])
    rows = task.read(str(tiny_images.scenes(folder, 12)), BadRows())
    path, (thing,), size = rows[0].values
    rows[0] = Row(rows[0].place, (path, (thing,) * 3, size))
    strange = (path, (thing._replace(label="strange"),), size)
    return task, rows, [Row("t:1", strange), Row("t:2", (path, (thing,) * 9, size))]


def graph_rows(folder: Path) -> Case:
    task = tasks()["graph"](d_model=16, heads=2)
    rows = task.read(str(test_graph.folder_of(folder / "graph")), BadRows())
    web = rows[0].values[2]
    return task, rows, [Row("t:1", ("n0", "strange", web)), Row("t:2", ("nowhere", "left", web))]


def match_rows(folder: Path) -> Case:
    task = tasks()["match"](**test_match.SMALL, longest=16)
    rows = task.read(str(test_match.table(folder, 8)), BadRows())
    path = rows[0].values[0]
    return task, rows, [Row("t:1", (path, "it lies", "perhaps")), Row("t:2", (path, "it lies " * 20, "yes"))]


def set_rows(folder: Path) -> Case:
    task = tasks()["sets"](**test_sets.SMALL, longest=9)
    rows = task.read(str(test_sets.table(folder, count=30)), BadRows())
    return task, rows, [Row("t:1", ("1 2; 3 4", "strange")), Row("t:2", ("; ".join(["1 2"] * 10), "odd"))]


def speak_rows(folder: Path) -> Case:
    task = tasks()["speak"](features=20, d_model=16, layers=1, heads=2, longest=2.0)
    rows = task.read(str(tiny_audio.folder_of(folder, tiny_audio.words(6))), BadRows())
    return task, rows, [Row("t:1", (rows[0].values[0], "xyz")), Row("t:2", (str(folder / "gone.wav"), "ab"))]


def transcribe_rows(folder: Path) -> Case:
    task = tasks()["transcribe"](features=20, d_model=16, layers=1, heads=2, beam=1)
    rows = task.read(str(tiny_audio.folder_of(folder, tiny_audio.words(6))), BadRows())
    return task, rows, [Row("t:1", (rows[0].values[0], "!?")), Row("t:2", (str(folder / "gone.wav"), "ab"))]


def pair_rows(name: str) -> Callable[[Path], Case]:
    def build(folder: Path) -> Case:
        task = small(name, longest=24)
        return task, task.read(pairs(folder, 30), BadRows()), [Row("t:1", ("cat sees " * 30, "tac"))]

    return build


CASES: dict[str, Callable[[Path], Case]] = {
    "classify": classify_rows,
    "detect": detect_rows,
    "embed": pair_rows("embed"),
    "graph": graph_rows,
    "images": image_rows,
    "match": match_rows,
    "sets": set_rows,
    "speak": speak_rows,
    "summarise": pair_rows("summarise"),
    "transcribe": transcribe_rows,
    "translate": pair_rows("translate"),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return CASES[request.param](tmp_path)


def model_of(task: Task, rows: Sequence[Row]) -> tuple[Any, Any]:
    torch.manual_seed(1)
    processor = task.fit_processor(rows)
    return task.model(processor).eval(), processor


def test_no_task_measures_itself_on_fewer_rows_than_it_is_given(case: Case) -> None:
    task, rows, wrong = case
    model, processor = model_of(task, rows)
    for row in wrong:
        with pytest.raises(UserError, match=row.place):
            task.evaluate(model, processor, [*rows[:4], row])


def test_model_and_baselines_are_measured_on_the_same_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.training.evaluation import evaluate_with_baselines

    task, rows, wrong = case
    model, processor = model_of(task, rows)
    with pytest.raises(UserError, match=r"t:1: .*--skip-bad"):
        evaluate_with_baselines(task, model, processor, rows, [*rows[:4], *wrong], BadRows())
    measured: list[list[str]] = []

    def record(name: str, at: int) -> None:
        whole = getattr(type(task), name)

        def wrapper(self: Any, *args: Any) -> Any:
            measured.append([row.place for row in args[at]])
            return whole(self, *args)

        monkeypatch.setattr(type(task), name, wrapper)

    record("evaluate", 2)
    record("baselines", 2)
    metrics = evaluate_with_baselines(task, model, processor, rows, [*rows[:4], *wrong], bad := BadRows(skip=True))
    assert bad.count == len(wrong)
    assert measured[0] == measured[1]
    assert set(measured[0]) <= {row.place for row in rows[:4]}
    assert metrics.test == len(measured[0])
    assert metrics.left_out == 4 + len(wrong) - metrics.test
    assert metrics.train == len(rows)


def test_a_test_file_with_rows_that_cannot_be_taken_stops_before_training(tmp_path: Path) -> None:
    good = Path(classes(tmp_path)).read_text().splitlines()[1:21]
    (tmp_path / "test.csv").write_text("\n".join(["text,label", *good, "a cat,strange", f"{'cat ' * 40},cat"]) + "\n")
    words = (
        "train", "classify", "--data", tmp_path / "classes.csv", "--test", tmp_path / "test.csv", "--held-out", 20,
        "--longest", 30, "--json", *TINY,
    )  # fmt: skip
    message = regard(*words, "--out", tmp_path / "run")
    assert "test.csv:22: the label 'strange' was not seen in training" in message
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    report = regard(*words, "--skip-bad", "--out", tmp_path / "other")
    assert report["rows"] == {"train": 103, "validation": 17, "test": 20, "left_out": 2}
    assert regard("evaluate", tmp_path / "other", "--json")["rows"] == report["rows"]


def test_rows_left_out_of_training_are_not_counted_as_training_rows(tmp_path: Path) -> None:
    good = Path(classes(tmp_path)).read_text()
    (tmp_path / "classes.csv").write_text(good + "".join(f"{'cat sees ' * 20}{n},cat\n" for n in range(7)))
    (tmp_path / "test.csv").write_text("text,label\na cat sees,cat\none dog hears,none\n")
    report = regard(
        "train", "classify", "--data", tmp_path / "classes.csv", "--validation", tmp_path / "test.csv", "--longest", 30,
        "--skip-bad", "--json", "--out", tmp_path / "run", *TINY,
    )  # fmt: skip
    assert report["rows"]["train"] == 120
    assert report["chose_weights"]  # --validation is all that is held out


def test_the_table_says_that_the_rows_also_chose_the_weights(tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("text,label\na cat sees,cat\none dog hears,none\n")
    run = ["train", "classify", "--data", classes(tmp_path), "--validation", str(tmp_path / "valid.csv")]
    result = CliRunner().invoke(app, [*run, "--out", str(tmp_path / "run"), *TINY])
    assert "test rows also chose the weights" in " ".join(result.stdout.split())
    report = regard("evaluate", tmp_path / "run", "--data", tmp_path / "classes.csv", "--json")
    assert not report["chose_weights"]


def test_other_data_is_measured_with_baselines_of_what_the_run_trained_on(tmp_path: Path) -> None:
    """Held-out texts passed as a separate file: the same rows, so the same metrics."""
    from regard.tasks import Run, Sources
    from regard.training.sources import read_examples

    out = tmp_path / "run"
    own = regard("train", "classify", "--data", classes(tmp_path), "--held-out", 20, "--out", out, "--json", *TINY)
    examples = read_examples(Run.open(out).task, Sources.from_json(Run.open(out).about["sources"]), 1)
    lines = [",".join(row.values) for row in examples.test]
    (tmp_path / "again.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    report = regard("evaluate", out, "--data", tmp_path / "again.csv", "--json")
    assert report["rows"] == own["rows"] == examples.rows() | {"left_out": 0}
    assert report["baselines"] == own["baselines"]
    assert report["metrics"] == own["metrics"]


def test_a_run_of_a_folder_with_its_own_split_is_measured_on_other_data(tmp_path: Path) -> None:
    for part, count, seed in (("train", 40, 1), ("test", 8, 2), ("more", 6, 3)):
        tiny_images.folder_of(tmp_path / "data" / part, tiny_images.stripes(count, seed=seed))
    shutil.move(tmp_path / "data" / "more", tmp_path / "more")
    options = ["--d-model", 16, "--layers", 1, "--heads", 2, "--patch", 4, "--stem", 1, "--steps", 2, "--tokens", 64]
    own = regard("train", "images", "--data", tmp_path / "data", "--out", tmp_path / "run", "--json", *options)
    assert own["rows"]["test"] == 8
    report = regard("evaluate", tmp_path / "run", "--data", tmp_path / "more", "--json")
    assert report["rows"] == own["rows"] | {"test": 6}


def test_a_history_of_nothing_known_is_reported_and_not_dropped(tmp_path: Path) -> None:
    from regard.training.evaluation import evaluate_with_baselines

    task = tasks()["recommend"](d_model=16, layers=1, heads=2)
    lines = [f"u{n},i{(n + at) % 5},{at}" for n in range(8) for at in range(4)]
    (tmp_path / "a.csv").write_text("user,item,time\n" + "\n".join(lines) + "\n")
    rows = task.read(str(tmp_path / "a.csv"), BadRows())
    model, processor = model_of(task, rows)
    strange = [Row("t:1", ("v", ("x", "i1"), 1)), Row("t:2", ("w", ("i1",), 1))]
    for row in strange:
        with pytest.raises(UserError, match=f"{row.place}: .* before the last"):
            evaluate_with_baselines(task, model, processor, rows, [*rows, row], BadRows())
    metrics = evaluate_with_baselines(task, model, processor, rows, [*rows, *strange], BadRows(skip=True))
    assert (metrics.test, metrics.left_out) == (8, 2)


def test_trigrams_are_measured_on_every_token_that_the_model_is() -> None:
    task = small("language")
    rows = [Row(f"a:{n}", ("cat dog",)) for n in range(4)]
    processor = task.fit_processor(rows)
    (end,) = {processor.require_tokenizer().token_to_id("</s>")}
    line = [*processor.require_tokenizer().encode("cat dog", add_special_tokens=False).ids, end]
    trigrams = Trigrams(np.array([end] + line * 4), processor.require_tokenizer().get_vocab_size())
    chances = [
        1 / trigrams.perplexity(np.array(each)) for each in zip([end, end, *line], [end, *line], line, strict=False)
    ]
    baseline = task.baselines(processor, rows, rows[:1])["Kneser-Ney trigrams"]
    assert len(chances) == len(line)
    assert baseline["loss"] == pytest.approx(-np.log(chances).mean())


def test_the_help_names_the_tasks_whose_objective_depends_on_the_parts_of_a_step(case: Case) -> None:
    task, rows, _ = case
    model, processor = model_of(task, rows)
    items, random = task.dataset(processor, rows[:6], BadRows()), np.random.default_rng(0)
    with torch.no_grad():
        whole, *parts = (
            float(task.loss(model, items.batch(np.array(part), random), 0.0)) for part in ([0, 1, 2, 3], [0, 1], [2, 3])
        )
    same = whole == pytest.approx(sum(parts), rel=1e-4)
    (report,) = (each.metadata["help"] for each in fields(Recipe) if each.name == "accumulate")
    assert same != (task.name in report.replace(",", " ").split())
