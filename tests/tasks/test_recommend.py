"""Sequential recommendation: reading, splits, bad data, and a toy problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.cli.view import make_capture
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.errors import BadRows
from regard.predictors import open_model
from regard.tasks import Run, Sources, UserError, create_run, tasks, train
from regard.tasks.recommend import HeldOutItems, Recommend
from regard.training.baselines import Neighbours
from regard.training.metrics import ranking
from regard.training.sources import read_examples

ITEMS = [f"film {n}" for n in range(12)]


def table(folder: Path, users: int = 60) -> Path:
    """Write users that watch the films in order, from a random start; lines are shuffled."""
    chance, rows = np.random.default_rng(1), []
    for user in range(users):
        start = int(chance.integers(12))
        rows += [(user, ITEMS[(start + n) % 12], 1000 + n) for n in range(int(chance.integers(5, 9)))]
    lines = [f"{user},{item},{time}\n" for user, item, time in (rows[n] for n in chance.permutation(len(rows)))]
    path = folder / "views.csv"
    path.write_text("user,item,time\n" + "".join(lines))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("recommend")
    task = Recommend(d_model=16, layers=1, heads=2, dropout=0.0, longest=5)
    recipe = replace(task.recipe, steps=120, tokens=200, learning_rate=1e-2, warmup=5, evaluate_every=40, ema=0.9)
    run, examples = create_run(folder / "run", task, recipe, Sources((str(table(folder)),), held_out=1000))
    assert train(run, examples).done
    return run


def test_the_last_item_is_for_testing_and_the_one_before_it_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,time\nx,a,5\nx,c,7\nx,b,6\nx,d,8\ny,a,1\ny,b,2\n")
    examples = read_examples(Recommend(), Sources((str(tmp_path / "a.csv"),), held_out=10), 1)
    assert [row.values for row in examples.test] == [("x", ("a", "b", "c", "d"), 3)]
    assert [row.values for row in examples.validation] == [("x", ("a", "b", "c"), 2)]
    assert [row.values for row in examples.train] == [("x", ("a", "b"), 1), ("y", ("a", "b"), 1)]


FORMS: dict[str, str] = {
    "ratings.csv": "userId,movieId,rating,timestamp\n7,12,4.0,100\n7,9,3.5,50\n",
    "u.data": "7\t12\t4\t100\n7\t9\t3\t50\n",
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t12\t4\t100\n7\t9\t3\t50\n",
    "plain.tsv": "7\t12\t2024-01-31T12:00\n7\t9\t2024-01-30\n",
    "lines.jsonl": '{"user": 7, "item": "12", "time": 100}\n{"user": 7, "item": "9", "time": 50.5}\n',
}


@pytest.mark.parametrize("name", list(FORMS))
def test_the_same_history_comes_from_every_format(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FORMS[name])
    (row,) = Recommend().read(str(tmp_path / name), BadRows())
    assert row.values == ("7", ("9", "12"), 1)
    assert row.place.endswith(f"{name}:{1 if name in ('u.data', 'plain.tsv', 'lines.jsonl') else 2}")


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"views.csv:1: no line can be used"),
    "no time": (b"user,item\na,b\n", r"views.csv:1: no column 'time' among 'user', 'item'"),
    "no number": (b"user,item,time\na,b,noon\n", r"views.csv:2: expected a time, .* got 'noon'.*--skip-bad"),
    "no finite number": (b"user,item,time\na,b,nan\n", r"views.csv:2: expected a time"),
    "an empty cell": (b"user,item,time\na,,3\n", r"views.csv:2: column 2 \(item\) is empty"),
    "no UTF-8": (b"user,item,time\na,\xff,3\n", r"views.csv:2: not valid UTF-8"),
}


@pytest.mark.parametrize("how", list(BAD))
def test_defects_of_a_table_are_reported_with_file_and_line(how: str, tmp_path: Path) -> None:
    path = tmp_path / "views.csv"
    path.write_bytes(BAD[how][0])
    with pytest.raises(UserError, match=BAD[how][1]):
        Recommend().read(str(path), BadRows())


def test_bad_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "views.csv"
    path.write_bytes(b"user,item,time\na,b,noon\na,c,1\na,\xff,3\na,d,2\n")
    (row,) = Recommend().read(str(path), bad := BadRows(skip=True))
    assert (row.values[1], bad.count) == (("c", "d"), 2)


def test_too_few_items_to_hold_any_out_are_reported(tmp_path: Path) -> None:
    (tmp_path / "views.csv").write_text("user,item,time\na,b,1\na,c,2\n")
    with pytest.raises(UserError, match=r"views.csv:2: expected users with at least 3 items"):
        read_examples(Recommend(), Sources((str(tmp_path / "views.csv"),)), 1)


def test_long_histories_are_learned_from_in_windows_that_ask_every_item_once() -> None:
    task, processor = Recommend(longest=4), Processor(labels=tuple("abcdefghijk"))
    items = task.dataset(processor, [Row("here", ("u", tuple("abcdefghijk"), 1))], BadRows())
    targets = [n for at in range(len(items.sizes)) for n in items.after[at].tolist()]
    assert sorted(targets) == list(range(1, 11))
    assert items.sizes.max() == 4
    for at in range(len(items.sizes)):
        assert (items.after[at] - items.ids[at]).tolist() == [1] * len(items.ids[at])


def test_items_that_training_has_never_seen_are_left_out_of_histories_and_count_as_misses() -> None:
    processor = Processor(labels=("a", "b", "c"))
    rows = [Row("one", ("u", ("a", "new", "b"), 2)), Row("two", ("v", ("c", "new"), 1))]
    targets = HeldOutItems(processor, rows)
    assert [before.tolist() for before in targets.before] == [[0], [2]]
    ranks = targets.ranks(lambda chosen: torch.tensor([[9.0, 1.0, 2.0], [9.0, 1.0, 0.0]])[chosen], allow_repeats=False)
    assert ranks.tolist() == [2, 4]  # a is in the history; an unknown item ranks last
    items = Recommend().dataset(processor, rows, BadRows())
    assert [items.after[n].tolist() for n in range(len(items.sizes))] == [[1]]


@pytest.mark.parametrize(("allow_repeats", "expected"), [(False, [1, 2]), (True, [2, 3])])
def test_ranks_are_among_all_items_and_ties_go_to_the_first_named(allow_repeats: bool, expected: list[int]) -> None:
    targets = HeldOutItems(
        Processor(labels=("a", "b", "c", "d")), [Row("", ("u", ("a", "c"), 1)), Row("", ("v", ("a", "d"), 1))]
    )
    scores = torch.tensor([[5.0, 1.0, 2.0, 2.0], [5.0, 1.0, 3.0, 3.0]])
    assert targets.ranks(lambda chosen: scores[chosen], allow_repeats=allow_repeats).tolist() == expected


def test_the_figures_are_those_of_torchmetrics() -> None:
    from torchmetrics.functional.retrieval import (
        retrieval_hit_rate,
        retrieval_normalized_dcg,
        retrieval_reciprocal_rank,
    )

    torch.manual_seed(0)
    scores, right = torch.rand(40, 25), torch.randint(25, (40,))
    own = scores.gather(1, right[:, None])
    result = ranking(1 + (scores > own).sum(1))
    measures: dict[str, Callable[..., Any]] = {
        "ndcg@10": lambda *x: retrieval_normalized_dcg(*x, top_k=10),
        "hit@10": lambda *x: retrieval_hit_rate(*x, top_k=10),
        "mrr": retrieval_reciprocal_rank,
    }
    for name, measure in measures.items():
        each = [float(measure(row, torch.arange(25) == n)) for row, n in zip(scores, right, strict=True)]
        assert result[name] == pytest.approx(np.mean(each), abs=1e-6)


def test_nearest_items_are_by_the_cosine_of_their_users() -> None:
    chance = np.random.default_rng(0)
    histories = [chance.choice(9, int(chance.integers(1, 6))) for _ in range(30)]
    seen = np.zeros((30, 9))
    for row, items in zip(seen, histories, strict=True):
        row[items] = 1
    cosine = seen.T @ seen / np.sqrt(np.outer(seen.sum(0), seen.sum(0)))
    np.fill_diagonal(cosine, 0)
    scores = Neighbours(histories, 9, nearest=9).scores([np.array([2, 5, 5])])
    np.testing.assert_allclose(scores[0], cosine[2] + cosine[5], atol=1e-6)
    kept = np.where(cosine >= np.sort(cosine, 1)[:, -3:-2], cosine, 0)  # of each item its three nearest
    scores = Neighbours(histories, 9, nearest=3).scores([np.array([2, 5])])
    np.testing.assert_allclose(scores[0], kept[:, 2] + kept[:, 5], atol=1e-6)


def test_an_order_is_learned_better_than_by_popularity_or_neighbours(trained: Run) -> None:
    examples = read_examples(trained.task, Sources.from_json(trained.about["sources"]), 1)
    model, _ = trained.model()
    metrics = trained.task.evaluate(model, trained.processor, examples.test)
    assert metrics["ndcg@10"] > 0.95
    rivals = trained.task.baselines(trained.processor, examples.train, examples.test)
    assert list(rivals) == ["most popular", "nearest items", "nearest to the last 10"]
    assert all(each["ndcg@10"] < 0.9 for each in rivals.values())


@pytest.mark.parametrize("given", ["film 3 | film 4 | film 5", "film 3\tfilm 4\tfilm 5"])
def test_next_items_are_predicted_with_probabilities(trained: Run, given: str) -> None:
    model, _ = trained.model()
    (prediction,) = trained.task.predict(model, trained.processor, [Row("input 1", (given,))], BadRows())
    assert prediction.output.startswith("film 6 0.")
    assert next(iter(prediction.more["items"])) == "film 6"
    assert not {"film 3", "film 4", "film 5"} & set(prediction.more["items"])
    assert sum(prediction.more["items"].values()) <= 1.0001


def test_a_history_longer_than_the_model_sees_is_asked_by_its_end(trained: Run) -> None:
    model, _ = trained.model()
    given = " | ".join(ITEMS[(3 + n) % 12] for n in range(9))
    (prediction,) = trained.task.predict(model, trained.processor, [Row("input 1", (given,))], BadRows())
    assert prediction.output.startswith("film 0 ")


def test_an_item_that_was_never_seen_is_reported(trained: Run) -> None:
    model, _ = trained.model()
    rows = [Row("input 1", ("film 3 | film 99",)), Row("input 2", ("film 3",)), Row("input 3", (" | ",))]
    with pytest.raises(UserError, match=r"input 1: the item 'film 99' was not seen in training; known are film 0"):
        list(trained.task.predict(model, trained.processor, rows, BadRows()))
    assert len(list(trained.task.predict(model, trained.processor, rows, bad := BadRows(skip=True)))) == 1
    assert bad.count == 2


def test_drawn_items_to_tell_apart_are_the_same_for_the_same_chance() -> None:
    task = Recommend(negatives=7)
    items = task.dataset(Processor(labels=tuple("abcd")), [Row("here", ("u", tuple("abcd"), 1))], BadRows())
    one, other = (items.batch(np.array([0]), np.random.default_rng(3)).targets[1] for _ in range(2))
    assert one.shape == (7,)
    assert torch.equal(one, other)


def test_items_are_the_tokens_of_a_view(trained: Run) -> None:
    record = make_capture(open_model(str(trained.folder)))("film 3 | film 4")
    assert record.streams["source"].tokens == ("film 3", "film 4")
    assert record.note.startswith("film 5")


def test_run_json_names_the_task(trained: Run) -> None:
    about = json.loads((trained.folder / "run.json").read_text())
    assert about["task"] == "recommend"
    assert tasks()["recommend"] is Recommend
