"""Node classification: reading tables, bad data, and communities as a toy problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch

from regard.cli.view import make_capture
from regard.data.readers import Row
from regard.errors import BadRows
from regard.predictors import open_model
from regard.tasks import Run, Sources, UserError, create_run, train
from regard.tasks.graph import Graph, GraphInputs
from regard.training.sources import read_examples


def folder_of(folder: Path, *, features: bool = False, count: int = 24) -> Path:
    """Write two communities with few edges between them; one node has no label, one no edges."""
    chance = np.random.default_rng(1)
    names = [f"n{n}" for n in range(count)]
    pairs = [
        (a, b) for a in range(count) for b in range(a) if chance.random() < (0.5 if a % 2 == b % 2 else 0.05)
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "edges.csv").write_text(
        "source,target\n" + "".join(f"{names[a]},{names[b]}\n" for a, b in pairs) + "quiet,n0\n"
    )
    feature_text = (lambda n: f",w{n % 2} w{n}") if features else (lambda n: "")
    (folder / "nodes.csv").write_text(
        f"node,label{',features' if features else ''}\n"
        + "".join(f"{name},{('left', 'right')[n % 2]}{feature_text(n)}\n" for n, name in enumerate(names))
        + f"alone,left{feature_text(0)}\n"
    )
    return folder


def new_run(folder: Path, source: Path, **options: Any) -> tuple[Run, Any]:
    task = Graph(**({"d_model": 16, "heads": 2, "labelled": 3} | options))
    recipe = replace(task.recipe, steps=40, evaluate_every=20, save_every=100)
    return create_run(folder / "run", task, recipe, Sources((str(source),), held_out=1000))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("graph")
    run, examples = new_run(folder, folder_of(folder / "data"))
    assert train(run, examples).done
    return run, examples


def test_few_of_each_class_are_learned_from_and_all_nodes_are_there(tmp_path: Path) -> None:
    examples = read_examples(Graph(labelled=3), Sources((str(folder_of(tmp_path / "data")),), held_out=1000), 1)
    assert sorted(row.values[1] for row in examples.train) == ["left"] * 3 + ["right"] * 3
    assert examples.validation == examples.train
    assert len(examples.test) == 25 - 6
    assert not {row.values[0] for row in examples.train} & {row.values[0] for row in examples.test}
    graph = GraphInputs(Graph().fit_processor(examples.train), directed=False)
    assert len(graph.number) == 26
    assert {"quiet", "alone"} <= set(graph.number)


def test_nodes_see_their_neighbours_and_themselves_both_ways_unless_directed(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("node,label\na,x\nb,y\nc,x\n")
    (tmp_path / "edges.tsv").write_text("a\tb\na\tb\nc\ta\n")
    rows = Graph().read(str(tmp_path), BadRows())
    processor = Graph().fit_processor(rows)
    both, one = (GraphInputs(processor, directed).mask.draw(3).splitlines() for directed in (False, True))
    assert both == ["███", "██·", "█·█"]
    assert one == ["██·", "·█·", "█·█"]
    torch.testing.assert_close(GraphInputs(processor, True).inputs[0, 2], torch.tensor([0.5, 0.0, 0.5]).sqrt())


def test_features_are_words_or_numbers(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("source,target\na,b\nb,c\n")
    (tmp_path / "nodes.csv").write_text("node,label,features\na,x,red tall\nb,y,red\n")
    words = GraphInputs(Graph().fit_processor(Graph().read(str(tmp_path), BadRows())), False).inputs
    torch.testing.assert_close(words[0], torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]).sqrt())
    (tmp_path / "nodes.csv").write_text("node,label,size\na,x,1 5\nb,y,3 5\nc,y,2 5\n")
    task = Graph(features="size")
    numbers = GraphInputs(task.fit_processor(task.read(str(tmp_path), BadRows())), False).inputs
    torch.testing.assert_close(numbers[0, :, 0], torch.tensor([-1.5, 1.5, 0.0]).sqrt().nan_to_num(-1.2247449))
    assert (numbers[0, :, 1] == 0).all()


BAD = {
    "no edges": (None, "node,label\na,x\n", r"expected a table edges.csv \(or .tsv, .jsonl\) in this directory"),
    "no nodes": ("source,target\na,b\n", None, r"expected a table nodes.csv"),
    "empty": ("source,target\na,b\n", "", r"nodes.csv:1: no line can be used"),
    "a missing column": ("source,to\na,b\n", "node,label\na,x\n", r"edges.csv:1: no column 'target'"),
    "an empty cell": ("source,target\na,\n", "node,label\na,x\n", r"edges.csv:2: column 2 \(target\) is empty"),
    "a node twice": (
        "source,target\na,b\n",
        "node,label\na,x\na,y\n",
        r"nodes.csv:3: duplicate node 'a', first defined in",
    ),
    "no UTF-8": ("source,target\na,b\n", "node,label\n\udcff,x\n", r"nodes.csv:2: not valid UTF-8"),
}


@pytest.mark.parametrize("how", list(BAD))
def test_defects_of_a_folder_are_reported(how: str, tmp_path: Path) -> None:
    for name, text in zip(("edges.csv", "nodes.csv"), BAD[how][:2], strict=True):
        if text is not None:
            (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=BAD[how][2]):
        Graph().read(str(tmp_path), BadRows())


def test_bad_lines_of_both_tables_are_counted_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("source,target\na,b\nb,\n")
    (tmp_path / "nodes.csv").write_text("node,label\na,x\na,y\nb,y\n")
    rows = Graph().read(str(tmp_path), bad := BadRows(skip=True))
    assert [row.values[:2] for row in rows] == [("a", "x"), ("b", "y")]
    assert bad.count == 2


def test_a_class_that_is_too_small_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nodes.csv:2: the class 'left' has 13 nodes, .* try a lower --labelled"):
        read_examples(Graph(labelled=13), Sources((str(folder_of(tmp_path / "data")),)), 1)


def test_nodes_and_labels_that_were_not_there_are_reported(trained: tuple[Run, Any]) -> None:
    run, _ = trained
    with pytest.raises(UserError, match=r"b:1: the node 'zoe' was not seen in training; known are n0, n1"):
        run.task.dataset(run.processor, [Row("b:1", ("zoe", "left", None))], BadRows())
    with pytest.raises(UserError, match=r"b:2: the label 'middle' was not seen in training; known are left, right"):
        run.task.dataset(run.processor, [Row("b:2", ("n0", "middle", None))], BadRows())
    model, _ = run.model()
    with pytest.raises(UserError, match=r"input 1: the node 'zoe' was not seen in training"):
        list(run.task.predict(model, run.processor, [Row("input 1", ("zoe",))], BadRows()))
    predictions = list(
        run.task.predict(model, run.processor, [Row("1", ("zoe",)), Row("2", ("n1",))], bad := BadRows(skip=True))
    )
    assert (predictions[0].input, bad.count) == ("n1", 1)
    assert predictions[0].score == max(predictions[0].more.values())


def test_communities_are_found_from_few_labels(trained: tuple[Run, Any]) -> None:
    run, examples = trained
    model, _ = run.model()
    assert run.task.evaluate(model, run.processor, examples.test)["accuracy"] >= 0.9
    rivals = run.task.baselines(run.processor, examples.train, examples.test)
    assert rivals["most frequent class"]["accuracy"] < 0.6
    assert set(rivals) > {"neighbours' vote", "label propagation", "logistic regression on features"}


def test_labels_spread_as_the_mean_of_neighbours() -> None:
    from regard.training.baselines import propagate_labels

    path = networkx.path_graph(7)
    labels = propagate_labels(np.array(path.edges()).T, np.array([0, 6]), np.array([0, 1]), 7, 2)
    assert labels.argmax(1).tolist()[:3] == [0, 0, 0]
    assert labels.argmax(1).tolist()[4:] == [1, 1, 1]


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(trained: tuple[Run, Any], tmp_path: Path) -> None:
    from tests.tasks.tiny_images import DieAtStep

    run, _ = new_run(tmp_path, folder_of(tmp_path / "data"))
    run.about["recipe"]["save_every"] = 10
    run.write_about()
    run = Run.open(run.folder)
    with pytest.raises(KeyboardInterrupt):
        train(run, callback=DieAtStep(25))
    assert train(Run.open(run.folder)).done
    ours, theirs = (dict(each.model()[0].named_parameters()) for each in (Run.open(run.folder), trained[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_nodes_are_the_tokens_of_a_view(trained: tuple[Run, Any]) -> None:
    run, _ = trained
    record = make_capture(open_model(str(run.folder)))("n3")
    assert record.streams["source"].tokens[:3] == ("n0", "n1", "n2")
    weights = record.weights(0, head=0)
    seen = weights > 0
    assert torch.equal(seen, seen.T)
    assert seen.diagonal().all()
    torch.testing.assert_close(weights.sum(1), torch.ones(26))
