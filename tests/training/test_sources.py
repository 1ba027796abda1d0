"""Splits: held-out rows are not in the training data as the model sees it, and are always the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data.tokenizer import encode
from regard.tasks import Run, Sources, UserError, tasks, train
from regard.tasks.sets import Sets
from regard.training.sources import Examples, read_examples, reread_examples, split_digest
from tests.tasks.tiny_runs import new_run, sentences, small


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def variants(text: str) -> list[str]:
    return [text, text.upper(), f" {text}", f"{text} ", text.title()]


def ids(processor: Any, texts: list[str]) -> set[bytes]:
    return {each.tobytes() for each in encode(processor.require_tokenizer(), texts)}


def sides(examples: Examples) -> tuple[list[Any], list[Any]]:
    return [row.values for row in examples.train], [row.values for row in (*examples.validation, *examples.test)]


@pytest.mark.parametrize("name", ["classify", "masked", "answer"])
def test_texts_that_the_model_sees_alike_are_on_one_side(name: str, tmp_path: Path) -> None:
    texts = list(dict.fromkeys(sentences(80)))
    rows = [
        {"text": each, "label": "ab"[n % 2], "context": each, "question": "who?", "answer": each.split()[0]}
        for n, text in enumerate(texts)
        for each in variants(text)
    ]
    random.Random(1).shuffle(rows)
    task = small(name)
    train, held = sides(read_examples(task, Sources((jsonl(tmp_path, rows),), held_out=10), 1))
    processor = task.fit_processor(read_examples(task, Sources((jsonl(tmp_path, rows),), held_out=10), 1).train)
    assert len(train) + len(held) == len(rows)
    assert held
    assert not ids(processor, [row[0] for row in train]) & ids(processor, [row[0] for row in held])


@pytest.mark.parametrize("name", ["translate", "summarise"])
def test_spaces_around_a_text_and_composed_letters_make_no_other_text(name: str, tmp_path: Path) -> None:
    texts = [f"caf\u00e9 {text}" for text in dict.fromkeys(sentences(60))]
    column, other = tasks()[name].columns
    rows = [
        {column: each, other: "x"}
        for text in texts
        for each in (text, f" {text}", text.replace("\u00e9", "e\u0301"))
    ]  # fmt: skip
    train, held = sides(read_examples(small(name), Sources((jsonl(tmp_path, rows),), held_out=9), 1))
    processor = small(name).fit_processor(
        read_examples(small(name), Sources((jsonl(tmp_path, rows),), held_out=9), 1).train
    )
    assert not ids(processor, [row[0] for row in train]) & ids(processor, [row[0] for row in held])


def test_an_encoder_with_a_tokenizer_of_its_own_may_see_less_of_a_text(tmp_path: Path) -> None:
    """Tokenizers of checkpoints may remove accents, or split words from punctuation."""
    rows = [
        {"text": each, "label": "ab"[n % 2]}
        for n in range(40)
        for each in (f"un caf\u00e9 noir, {n}", f"un cafe noir , {n}", f"UN CAFE NOIR,\u00a0{n}")
    ]
    task = small("classify", pretrained="runs/words")
    train, held = sides(read_examples(task, Sources((jsonl(tmp_path, rows),), held_out=8), 1))
    assert {row[0].split()[-1] for row in held} & {row[0].split()[-1] for row in train} == set()


def test_pairs_are_kept_apart_in_both_directions(tmp_path: Path) -> None:
    texts = list(dict.fromkeys(sentences(120)))
    pairs = [(one, f"{one} indeed") for one in texts]
    rows = [
        {"text": a, "other": b} for one, two in pairs for a, b in ((one, two), (two.upper(), one), (f" {one}", two))
    ]
    random.Random(1).shuffle(rows)
    task = small("embed")
    examples = read_examples(task, Sources((jsonl(tmp_path, rows),), held_out=10), 1)
    train, held = sides(examples)
    processor = task.fit_processor(examples.train)
    assert len(train) + len(held) == len(rows)
    assert not ids(processor, [text for row in train for text in row]) & ids(
        processor, [text for row in held for text in row]
    )


def test_pairs_that_all_are_connected_are_trained_on(tmp_path: Path) -> None:
    """One text in most of the rows links them to one group, which would otherwise be held out as a whole."""
    rows = [{"text": "hub", "other": f"spoke {n}"} for n in range(80)]
    rows += [{"text": f"one {n}", "other": f"two {n}"} for n in range(20)]
    for seed in range(5):
        examples = read_examples(small("embed"), Sources((jsonl(tmp_path, rows),), held_out=4), seed)
        assert {row.values[0] for row in (*examples.test, *examples.validation)} & {"hub"} == set()
        assert len(examples.test) == 4


def test_sets_of_the_same_elements_are_on_one_side(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    rows = []
    for n in range(30):
        points = chance.normal(size=(4, 2)).round(2)
        texts = [points.tolist(), points[::-1].tolist(), "; ".join(" ".join(map(str, point)) for point in points)]
        rows += [{"set": text, "label": "ab"[n % 2]} for text in texts]
    examples = read_examples(Sets(), Sources((jsonl(tmp_path, rows),), held_out=6), 1)
    assert len(examples.test) == 18
    assert len(examples.train) % 3 == 0


def test_a_run_that_held_out_other_rows_is_reported(tmp_path: Path) -> None:
    run = new_run(tmp_path, "classify", steps=2)
    examples = reread_examples(run)
    assert split_digest(examples) == run.about["split"]
    for split in ("0" * 64, None):
        run.about["split"] = split
        run.write_about()
        with pytest.raises(UserError, match=r"run: this version of regard holds out other rows .*; start another run"):
            train(Run.open(run.folder))
    valid = str(tmp_path / "classes.csv")
    run.about["sources"] |= {"validation": [valid], "test": [valid]}  # nothing is drawn: both are given
    assert reread_examples(run).test


def test_the_shipped_run_holds_out_what_it_always_did() -> None:
    run = Run.open("en-fr")
    examples = reread_examples(run)
    assert (len(examples.train), len(examples.test)) == (169439, 2828)
