"""Summarisation: a toy problem, coverage, long texts, and errors."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.data.readers import Row
from regard.errors import BadRows
from regard.models import PointerTransformer
from regard.tasks import Run, Sources, UserError, create_run, train
from regard.tasks.summarise import Summarise, lead
from regard.training import metrics
from regard.training.export import export

WORDS = [f"{one}{two}" for one in ("ka", "mo", "ri", "su") for two in ("bel", "dan", "fim", "got", "hux")]


def articles(folder: Path, count: int = 200) -> str:
    """Texts of three sentences, one of which contains the summary."""
    chance, lines = random.Random(1), []
    for _ in range(count):
        topic, *others = chance.sample(WORDS, 4)
        parts = [f"It is of {topic}.", *(f"Then comes {word}." for word in others[:2])]
        chance.shuffle(parts)
        lines.append(f"{' '.join(parts)}\tAll of {topic}\n")
    path = folder / "articles.tsv"
    path.write_text("text\tsummary\n" + "".join(lines))
    return str(path)


def small(**options: Any) -> Summarise:
    known = {"d_model": 32, "layers": 1, "heads": 2, "vocabulary": 400, "dropout": 0.0, "beam": 2, "max_new_tokens": 12}
    return Summarise(**(known | options))


def new_run(folder: Path, data: str, *, options: dict[str, Any] | None = None, **recipe: Any) -> Run:
    task = small(**(options or {}))
    known = {
        "steps": 2,
        "tokens": 700,
        "warmup": 20,
        "evaluate_every": 50,
        "save_every": 500,
        "learning_rate": 1e-2,
    } | recipe
    return create_run(folder / "run", task, replace(task.recipe, **known), Sources((data,), held_out=20))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("summarise")
    run = new_run(folder, articles(folder), steps=200)
    assert train(run).done
    return run


def predict(run: Run, *texts: str, skip: bool = False, **options: Any) -> list[Any]:
    rows = [Row(f"input {n}", (text,)) for n, text in enumerate(texts, 1)]
    return list(replace(run.task, **options).predict(run.model()[0], run.processor, rows, BadRows(skip=skip)))


def test_a_summary_beats_the_beginning_of_the_text(trained: Run) -> None:
    rows = trained.task.read(trained.about["sources"]["data"][0], BadRows())[:40]
    ours = trained.task.evaluate(trained.model()[0], trained.processor, rows)
    assert ours["rougeL"] > 90
    means = trained.task.baselines(trained.processor, rows, rows)
    assert list(means) == ["lead-1", "lead-3", "first 3 words"]
    for theirs in means.values():
        assert all(ours[name] > theirs[name] for name in ("rouge1", "rouge2", "rougeL"))


def test_coverage_is_reported_for_every_token_of_the_text(trained: Run) -> None:
    text = "Then comes karen. It is of mogot. Then comes  rifim."
    (prediction,) = predict(trained, text)
    tokens, coverage = zip(*prediction.more["coverage"], strict=True)
    assert "".join(tokens[:-1]).split() == text.split()
    assert all(token in text for token in tokens[:-1])
    count = len(trained.processor.require_tokenizer().encode(prediction.output, add_special_tokens=False).ids) + 1
    assert sum(coverage) == pytest.approx(count, abs=1e-3)
    assert min(coverage) >= 0
    assert 0 < prediction.score <= 1
    json.dumps(prediction.more["coverage"])


def test_the_summary_is_of_the_relevant_sentence_at_any_position(trained: Run) -> None:
    parts = ["Then comes kabel.", "It is of modan.", "Then comes rifim."]
    texts = [" ".join(parts[n:] + parts[:n]) for n in range(3)]
    assert [prediction.output for prediction in predict(trained, *texts)] == ["All of modan"] * 3


def test_beam_search_finds_what_is_at_least_as_likely(trained: Run) -> None:
    text = "Then comes xyzzy. It is of zork. Then comes plugh."
    (one,), (four,) = predict(trained, text, beam=1), predict(trained, text, beam=4)
    assert four.score >= one.score - 1e-6


def test_texts_longer_than_the_window_are_read_whole(tmp_path: Path) -> None:
    run = new_run(tmp_path, articles(tmp_path), options={"window": 4, "longest": 2000})
    assert train(run).done
    assert isinstance(run.model()[0], PointerTransformer)
    (prediction,) = predict(run, "It is of kabel. " * 200)
    assert len(prediction.more["coverage"]) > 800


def test_an_exported_run_loads_to_the_same_model(trained: Run, tmp_path: Path) -> None:
    export(trained, tmp_path / "out")
    again = regard.load(tmp_path / "out")
    assert type(again) is PointerTransformer
    for actual, other in zip(trained.model()[0].parameters(), again.parameters(), strict=True):
        assert torch.equal(actual, other)


def test_the_command_prints_summaries_and_shows_their_attention(trained: Run, tmp_path: Path) -> None:
    text = "Then comes kabel. It is of modan. Then comes rifim."
    (tmp_path / "a.txt").write_text(f"{text}\n{text}\n")
    prediction = CliRunner().invoke(app, ["predict", str(trained.folder), str(tmp_path / "a.txt"), "--json"])
    assert [json.loads(line)["output"] for line in prediction.stdout.splitlines()] == ["All of modan"] * 2
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["view", str(trained.folder), text, "-o", str(page)]).exit_code == 0
    assert "modan" in page.read_text()


@pytest.mark.parametrize(
    ("text", "count", "want"),
    [
        ("One. Two. Three.", 1, "One."),
        ("One. Two. Three.", 5, "One. Two. Three."),
        ("It costs 3.5 e.g. here! Yes? No", 2, "It costs 3.5 e.g. here! Yes?"),
        ("no end", 3, "no end"),
        ('He said. "So it is." Then went.', 2, 'He said. "So it is." Then went.'),
    ],
)
def test_the_first_sentences_are_the_baseline(text: str, count: int, want: str) -> None:
    assert lead(text, count) == want


def test_rouge_is_that_of_its_library() -> None:
    same, other = (metrics.summaries([text], ["the cats sat on mats"]) for text in ("The cat sat on mats!", "a dog"))
    assert same == {"rouge1": 100, "rouge2": 100, "rougeL": 100}
    assert other == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    swapped = metrics.summaries(["b a"], ["a b"])
    assert swapped == {"rouge1": 100, "rouge2": 0, "rougeL": 50}
    assert metrics.summaries([""], ["a b"])["rouge1"] == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "", "a.tsv:1: no line can be used"),
        ("a.csv", "text,title\nx,y\n", r"a.csv:1: no column 'summary' .*set its name \(--summary NAME\)"),
        ("a.tsv", "one text\n", r"a.tsv:1: expected at least 2 columns"),
        ("a.tsv", "one text\t\n", r"a.tsv:1: column 2 \(summary\) is empty"),
        ("a.tsv", b"caf\xe9\tx\n", "a.tsv:1: not valid UTF-8 .byte 0xe9"),
        ("a.jsonl", '{"text": "x", \n', "a.jsonl:1: not valid JSON"),
        ("a.jsonl", '{"text": "x"}\n', "a.jsonl:1: expected a value for 'summary'"),
        ("a.txt", "one text\n", "a.txt: is plain text, but text and summary are needed"),
    ],
)
def test_a_bad_file_is_reported_with_its_place(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        small().read(str(tmp_path / name), BadRows())


def test_bad_lines_are_counted_when_asked_to(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"caf\xe9\tx\none\ta\nonly\ntwo\tb\n")
    rows = small().read(str(tmp_path / "a.tsv"), bad := BadRows(skip=True))
    assert ([row.values for row in rows], bad.count) == ([("one", "a"), ("two", "b")], 2)


def test_a_text_or_a_summary_that_is_too_long_is_reported_or_cut_or_left_out(trained: Run) -> None:
    long = "It is of kabel. " * 400
    with pytest.raises(
        UserError,
        match=r"input 2: has \d+ tokens, but the model takes at most 1024; .* truncate long texts with --cut, or",
    ):
        predict(trained, "It is.", long)
    assert len(predict(trained, "It is.", long, skip=True)) == 1
    assert len(predict(trained, "It is.", long, cut=True)) == 2
    rows = [Row("file:7", ("It is.", "kabel " * 40)), Row("file:8", ("It is.", "kabel"))]
    with pytest.raises(
        UserError, match=r"file:7: has \d+ tokens, but the model takes at most 12; train with --max-new-tokens \d+"
    ):
        trained.task.dataset(trained.processor, rows, BadRows())
    assert len(trained.task.dataset(trained.processor, rows, BadRows(skip=True)).sizes) == 1


def test_a_truncated_checkpoint_and_a_run_of_another_task_are_reported(trained: Run, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained.folder, folder)
    held = (folder / "best.safetensors").read_bytes()
    (folder / "best.safetensors").write_bytes(held[: len(held) // 2])
    with pytest.raises(UserError, match=r"best.safetensors: cannot be read .*; regard resume .* rewrites it"):
        Run.open(folder).model()
    with pytest.raises(UserError, match="contains a run of summarise"):
        new_run(trained.folder.parent, trained.about["sources"]["data"][0])
