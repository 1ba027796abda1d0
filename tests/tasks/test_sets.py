"""Sets of points: parsing, bad data, and toy problems of classification and regression."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.cli.view import make_capture
from regard.data.readers import Row
from regard.errors import BadRows
from regard.predictors import open_model
from regard.tasks import Run, Sources, UserError, create_run, train
from regard.tasks.sets import Sets, parse_set
from regard.training.sources import read_examples

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "points": 4}


def sets(count: int, seed: int = 1) -> list[tuple[list[list[float]], str, float]]:
    """Random points; a set with an outlier is `odd`. The number is the largest first coordinate."""
    chance, rows = np.random.default_rng(seed), []
    for n in range(count):
        points = chance.normal(0, 1, (int(chance.integers(3, 9)), 2)).round(3)
        if n % 2:
            points[int(chance.integers(len(points)))] = (0, 6)
        rows.append((points.tolist(), "odd" if n % 2 else "even", float(points[:, 0].max())))
    return rows


def table(folder: Path, *, number: bool = False, count: int = 160) -> Path:
    path = folder / "sets.jsonl"
    lines = [{"set": points, "label": largest if number else label} for points, label, largest in sets(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def trained_on(folder: Path, source: Path, *, steps: int, number: bool = False) -> Run:
    torch.set_num_threads(1)
    task = Sets(**SMALL, number=number)  # type: ignore[arg-type]
    recipe = replace(task.recipe, steps=steps, tokens=300, learning_rate=1e-2, warmup=5, evaluate_every=20, ema=0.9)
    run, examples = create_run(folder / "run", task, recipe, Sources((str(source),), held_out=30))
    assert train(run, examples).done
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("sets")
    return trained_on(folder, table(folder), steps=60)


@pytest.mark.parametrize("text", ["1 2; 3 4.5", "[[1, 2], [3, 4.5]]", " 1 2 ;3 4.5; "])
def test_a_set_is_written_in_two_ways(text: str) -> None:
    assert parse_set(text).tolist() == [[1.0, 2.0], [3.0, 4.5]]


BAD = {
    "1 2; 3": "expected a set such as",
    "1 x": "expected a set such as .* got '1 x'",
    "[[1, 2], 3": "expected a set such as",
    '[["a"]]': "expected a set such as",
    "[]": "expected a set of at least one element",
    "[[]]": "expected a set of at least one element",
    "1 nan": "expected finite numbers",
    "1 2 3; 4 5 6": "expected elements of 2 numbers, got 3",
    "; ".join(["1 2"] * 9): "has 9 elements, but the model takes at most 8; train with --longest 9",
}


@pytest.mark.parametrize("text", list(BAD))
def test_invalid_sets_are_reported_with_file_and_line_or_left_out(text: str, tmp_path: Path) -> None:
    path, task = tmp_path / "sets.tsv", Sets(longest=8)
    path.write_text(f"1 2; 3 4\ta\n{text}\tb\n5 6\tb\n")
    rows = task.read(str(path), BadRows())
    processor = task.fit_processor([rows[0], rows[2]])
    with pytest.raises(UserError, match=rf"sets.tsv:2: {BAD[text]}.*--skip-bad"):
        task.dataset(processor, rows, BadRows())
    items = task.dataset(processor, rows, bad := BadRows(skip=True))
    assert (len(items.sizes), bad.count) == (2, 1)
    assert [place[-1] for place in items.places] == ["1", "3"]


def test_labels_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    rows = [Row("a:1", ("1 2", "x")), Row("a:2", ("3 4", "y")), Row("a:3", ("3 4", "x"))]
    with pytest.raises(UserError, match=r"b:1: the label 'z' was not seen in training; known are x, y"):
        Sets().dataset(Sets().fit_processor(rows), [Row("b:1", ("1 2", "z"))], BadRows())
    with pytest.raises(UserError, match=r"a:1: expected at least 2 classes, but all are 'x'"):
        Sets().fit_processor([rows[0], rows[2]])
    with pytest.raises(UserError, match=r"a:1: expected a number, got 'x'"):
        Sets(number=True).fit_processor(rows)
    known = Sets(number=True).fit_processor([Row("a:1", ("1 2", "5"))])
    with pytest.raises(UserError, match=r"a:1: expected a number, got 'x'"):
        Sets(number=True).dataset(known, rows, BadRows())
    many = [Row(f"a:{n}", ("1 2", str(n))) for n in range(9)]
    with pytest.raises(UserError, match=r"9 classes in 9 rows; are they numbers \(use --number\)"):
        Sets().fit_processor(many)


def test_an_empty_file_and_one_without_the_column_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(UserError, match=r"a.csv:1: no line can be used"):
        Sets().read(str(tmp_path / "a.csv"), BadRows())
    (tmp_path / "b.csv").write_text("set,kind\n1 2,a\n")
    with pytest.raises(UserError, match=r"b.csv:1: no column 'label'"):
        Sets().read(str(tmp_path / "b.csv"), BadRows())


def test_an_odd_one_out_is_found(trained: Run) -> None:
    examples = read_examples(trained.task, Sources.from_json(trained.about["sources"]), 1)
    model, _ = trained.model()
    assert trained.task.evaluate(model, trained.processor, examples.test)["accuracy"] > 0.9
    rivals = trained.task.baselines(trained.processor, examples.train, examples.test)
    assert rivals["most frequent class"]["accuracy"] < 0.7


def test_the_order_of_the_elements_changes_no_prediction(trained: Run) -> None:
    model, _ = trained.model()
    rows = [Row("one", ("0 6; 1 0; 0 1",)), Row("other", ("0 1; 0 6; 1 0",))]
    one, other = trained.task.predict(model, trained.processor, rows, BadRows())
    assert one.output == other.output == "odd"
    assert one.score == pytest.approx(other.score, abs=1e-5)


def test_the_largest_number_is_predicted_better_than_by_the_mean(tmp_path: Path) -> None:
    run = trained_on(tmp_path, table(tmp_path, number=True), steps=80, number=True)
    examples = read_examples(run.task, Sources.from_json(run.about["sources"]), 1)
    model, _ = run.model()
    metrics = run.task.evaluate(model, run.processor, examples.test)
    rivals = run.task.baselines(run.processor, examples.train, examples.test)
    assert metrics["mae"] < 0.6 * rivals["always the mean"]["mae"]
    assert rivals["linear on count, mean, deviation, least and most"]["r2"] > 0.99  # the most is among them
    (prediction,) = run.task.predict(model, run.processor, [Row("input 1", ("0 0; 1.5 2; -1 0",))], BadRows())
    assert float(prediction.output) == pytest.approx(prediction.score, rel=1e-4)


def test_elements_are_the_tokens_of_a_view(trained: Run) -> None:
    record = make_capture(open_model(str(trained.folder)))("0 6; 1 0; 0 1")
    assert [seen.kind for seen in record.attentions] == ["cross"] * 3
    names = record.streams[record.stream_names(record.attentions[0])[1]].tokens
    assert names == ("0 6", "1 0", "0 1") or [name.split()[1] for name in names] == ["6", "0", "1"]
    assert record.weights(record.attentions[0].name).shape == (2, 4, 3)
