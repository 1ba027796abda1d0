"""`regard predict` of files: read as in training, labels are never inputs, one output per input."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli.inputs import looks_like_path
from regard.data.readers import read_rows
from regard.errors import BadRows
from regard.tasks import Run, Sources, UserError, tasks
from regard.training.runs import Progress
from regard.training.sources import Examples
from tests.conftest import Command
from tests.tasks.tiny_audio import folder_of, words
from tests.tasks.tiny_images import scenes, stripes
from tests.tasks.tiny_runs import sentences

SMALL = {"d_model": 16, "layers": 1, "heads": 2}
TEXT = SMALL | {"vocabulary": 300}
PICTURES = SMALL | {"patch": 4, "stem": 1}


def table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]], *, header: bool = True) -> Path:
    """A CSV, TSV or JSONL of rows."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    elif path.suffix == ".tsv":
        path.write_text("".join("\t".join(row) + "\n" for row in ([columns] if header else []) + list(rows)))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(([columns] if header else []) + list(rows))
    return path


def untrained(folder: Path, name: str, source: Path, options: dict[str, Any]) -> Run:
    """A run with its initial weights; the predictions do not matter here."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = tasks()[name](**options)
    processor = task.fit_processor(task.read(str(source), BadRows()))
    run = Run.create(
        folder / "run", task, task.recipe, Sources((str(source),)), processor, Examples([], [], [], BadRows())
    )
    run.keep_best(task.model(processor).state_dict(), Progress(step=1))
    return run


def pictures(folder: Path, count: int = 6) -> list[tuple[str, str]]:
    """Paths next to a table, and labels."""
    (folder / "seen").mkdir(exist_ok=True)
    results = []
    for n, (label, image) in enumerate(stripes(count)):
        Image.fromarray(image).save(folder / "seen" / f"{n}.png")
        results.append((f"seen/{n}.png", label))
    return results


LINES = sentences(40)
LABELLED = [("cat" if n % 2 else "no", line) for n, line in enumerate(LINES)]
BACK = [" ".join(word[::-1] for word in line.split()) for line in LINES]
ROUND = [("1 2; 3 4", "round"), ("5 6", "flat"), ("0 1; 1 0", "round"), ("7 7", "flat")]
ASKED = [(f"{line} .", "who sees ?", line.split()[1]) for line in LINES]

# name: options, columns, those of them that are inputs, rows by folder
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], Callable[[Path], list[Any]]]] = {
    "classify": (TEXT, ("label", "text"), ("text",), lambda _: LABELLED),
    "translate": (TEXT, ("source", "target"), ("source",), lambda _: list(zip(LINES, BACK, strict=True))),
    "summarise": (TEXT, ("text", "summary"), ("text",), lambda _: list(zip(LINES, BACK, strict=True))),
    "embed": (TEXT, ("text", "other"), ("text",), lambda _: list(zip(LINES, BACK, strict=True))),
    "language": (TEXT, ("text",), ("text",), lambda _: [(line,) for line in LINES]),
    "masked": (TEXT, ("text",), ("text",), lambda _: [(f"{line} <mask>",) for line in LINES]),
    "answer": (TEXT, ("context", "question", "answer"), ("context", "question"), lambda _: ASKED),
    "sets": (SMALL, ("set", "label"), ("set",), lambda _: ROUND),
    "images": (PICTURES, ("image", "label"), ("image",), pictures),
    "match": (PICTURES | {"fusion": 1, "vocabulary": 300}, ("image", "text", "label"), ("image", "text"),
              lambda folder: [(path, f"it {label}", "yes") for path, label in pictures(folder)]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("name", CASES)
def test_tables_are_read_as_in_training_without_labels(name: str, form: str, regard: Command, tmp_path: Path) -> None:
    options, columns, inputs, rows_in = CASES[name]
    rows = rows_in(tmp_path)
    source = table(tmp_path / f"data.{form}", columns, rows)
    run = untrained(tmp_path, name, source, options)
    result = regard("predict", run.folder, source, "--json")
    assert result.code == 0, result.err
    results = [json.loads(line) for line in result.out.splitlines()]
    assert len(results) == len(rows)
    shown = columns.index("question" if name == "answer" else inputs[0])
    given = [row[shown] for row in rows]
    if name in ("images", "match"):
        given = [str(tmp_path / path) for path in given]
    if name == "match":
        given = [f"{path} {row[1]}" for path, row in zip(given, rows, strict=True)]
    assert [each["input"] for each in results] == given
    kept = [columns.index(column) for column in inputs]
    bare = table(tmp_path / f"bare.{form}", inputs, [[row[n] for n in kept] for row in rows])
    without = regard("predict", run.folder, bare, "--json")
    assert without.code == 0, without.err
    assert [json.loads(line) | {"id": 0} for line in without.out.splitlines()] == [each | {"id": 0} for each in results]


def test_columns_by_number_are_those_of_the_run(regard: Command, tmp_path: Path) -> None:
    source = table(tmp_path / "data.csv", ("a", "b"), LABELLED, header=False)
    run = untrained(tmp_path, "classify", source, TEXT | {"text": "2", "label": "1"})
    inputs_read = [
        json.loads(line)["input"] for line in regard("predict", run.folder, source, "--json").out.splitlines()
    ]
    assert inputs_read == LINES


def test_a_tsv_without_a_header_does_not_leak_the_answer(regard: Command, tmp_path: Path) -> None:
    source = table(tmp_path / "pairs.tsv", (), list(zip(LINES, BACK, strict=True)), header=False)
    run = untrained(tmp_path, "translate", source, TEXT)
    inputs_read = [
        json.loads(line)["input"] for line in regard("predict", run.folder, source, "--json").out.splitlines()
    ]
    assert inputs_read == LINES
    (tmp_path / "source.tsv").write_text("source\tune source\nthe cat\tle chat\n")
    result = regard("predict", run.folder, tmp_path / "source.tsv")
    assert result.code == 1
    assert "source.tsv:1: ambiguous first line" in result.err


def test_a_missing_column_is_an_error_with_its_name(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("review,label\nthe cat sees,cat\n")
    result = regard("predict", reviews.folder, tmp_path / "other.csv")
    assert result.code == 1
    assert "other.csv:1: no column 'text' among 'review', 'label'; rename the column to 'text'" in result.err


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("reviews")
    rows = [(line, "cat" if n % 2 else "no") for n, line in enumerate(LINES)]
    return untrained(folder, "classify", table(folder / "data.csv", ("text", "label"), rows), TEXT | {"longest": 16})


LONG = "the cat sees " * 20


def test_line_n_of_the_output_belongs_to_line_n_of_the_input(regard: Command, reviews: Run, tmp_path: Path) -> None:
    text = f"the cat sees\n\n  \na dog hears\n{LONG}\n".encode() + b"caf\xe9\n" + b"one bird\n"
    (tmp_path / "in.txt").write_bytes(text)
    with gzip.open(tmp_path / "in.txt.gz", "wb") as file:
        file.write(text)
    piped = regard("predict", reviews.folder, "--json", "--skip-bad", given=text)
    inputs = ["the cat sees", "", "", "a dog hears", LONG.strip(), "", "one bird"]
    results = [json.loads(line) for line in piped.out.splitlines()]
    assert [each["input"] for each in results] == inputs
    assert [each["output"] is None for each in results] == [False, True, True, False, True, True, False]
    assert [each["score"] is None for each in results] == [False, True, True, False, True, True, False]
    for path in ("in.txt", "in.txt.gz"):
        assert regard("predict", reviews.folder, tmp_path / path, "--json", "--skip-bad").out == piped.out
    plain = regard("predict", reviews.folder, tmp_path / "in.txt", "--skip-bad").out.splitlines()
    assert [line.split("\t")[0] for line in plain] == [each["output"] or "" for each in results]


def test_bad_rows_of_a_table_have_an_empty_output(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(
        b"text,label\nthe cat sees,cat\n\n,cat\n" + f"{LONG},no\n".encode() + b"x,y,z\na dog,no\ncaf\xe9,no\n"
    )
    result = regard("predict", reviews.folder, tmp_path / "in.csv", "--skip-bad", "--json")
    outputs = [json.loads(line)["output"] for line in result.out.splitlines()]
    assert [output is None for output in outputs] == [False, True, True, True, False, True]
    assert "4 bad lines left out, the first: " in result.err
    result = regard("predict", reviews.folder, tmp_path / "in.csv")
    assert result.code == 1
    assert "in.csv:4: column 1 (text) is empty" in result.err


@pytest.mark.parametrize("given", ["gone.csv", "my reviews.tsv.gz", "data/reviews", "./all of them", "~/x", "a.png"])
def test_a_path_that_does_not_exist_is_an_error(given: str, regard: Command, reviews: Run) -> None:
    result = regard("predict", reviews.folder, given)
    assert result.code == 1
    assert f"{given}: no such file" in result.err
    assert result.out == ""


@pytest.mark.parametrize("given", ["the cat and/or the dog", "50 km/h.", "the cat sees.", "e.g.", "a" * 300, "1/2 cat"])
def test_a_text_with_a_slash_is_a_text(given: str) -> None:
    assert not looks_like_path(given)


@pytest.mark.parametrize("given", ["", "  \n"])
def test_an_empty_text_is_refused(given: str, regard: Command, reviews: Run) -> None:
    result = regard("predict", reviews.folder, "the cat", given)
    assert result.code == 1
    assert "input 2 is empty" in result.err
    assert result.out == ""
    assert regard("predict", reviews.folder, given=b"\n\n").code == 1


def test_a_piped_table_needs_a_format(regard: Command, reviews: Run, tmp_path: Path) -> None:
    rows = [("the cat, all of it", "cat"), ("a dog", "no")]
    for form in ("csv", "tsv", "jsonl"):
        given = table(tmp_path / f"in.{form}", ("text", "label"), rows).read_bytes()
        result = regard("predict", reviews.folder, given=given)
        assert result.code == 1
        assert f"begins a table; use --format {form}" in result.err
        result = regard("predict", reviews.folder, "--format", form, "--json", given=given)
        assert [json.loads(line)["input"] for line in result.out.splitlines()] == [text for text, _ in rows]
    (tmp_path / "in.txt").write_bytes((tmp_path / "in.csv").read_bytes())
    assert "begins a table; name it .csv" in regard("predict", reviews.folder, tmp_path / "in.txt").err
    result = regard("predict", reviews.folder, given=b"the cat\tcat\n")
    assert "standard input:1: expected a text, but it has a tab, as tables do; use --format tsv" in result.err
    assert len(regard("predict", reviews.folder, "--format", "txt", given=b"text,label\na\tb\n").out.splitlines()) == 2
    assert "applies to standard input only" in regard("predict", reviews.folder, "the cat", "--format", "csv").err
    assert "must be txt, csv, tsv or jsonl" in regard("predict", reviews.folder, "--format", "xml", given=b"x\n").err


def test_an_output_of_several_lines_is_one_line(regard: Command, tmp_path: Path) -> None:
    rows = [(line, "two\nlines" if n % 2 else "a\ttab") for n, line in enumerate(LINES)]
    run = untrained(tmp_path, "classify", table(tmp_path / "data.csv", ("text", "label"), rows), TEXT)
    lines = regard("predict", run.folder, tmp_path / "data.csv").out.splitlines()
    assert len(lines) == len(rows)
    assert {line.split("\t")[0] for line in lines} <= {"two\\nlines", "a\\ttab"}


def test_folders_and_idx_files_of_images(regard: Command, tmp_path: Path) -> None:
    for n, (label, image) in enumerate(stripes(6)):
        (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / label / f"{n}.png")
    run = untrained(tmp_path, "images", tmp_path / "photos", PICTURES)
    paths = sorted(map(str, (tmp_path / "photos").rglob("*.png")))
    for given in ([tmp_path / "photos"], paths):
        lines = regard("predict", run.folder, *given).out.splitlines()
        assert [line.split("\t")[2] for line in lines] == paths
    piped = regard("predict", run.folder, "--json", given=f"{paths[0]}\n\n{paths[1]}\n".encode()).out.splitlines()
    assert [json.loads(line)["input"] for line in piped] == [paths[0], "", paths[1]]
    shape = np.array([3, 8, 8], ">u4").tobytes()
    pixels = np.stack([image for _, image in stripes(3)]).tobytes()
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + shape + pixels)
    result = regard("predict", run.folder, tmp_path / "t10k-images-idx3-ubyte", "--json")
    assert [json.loads(line)["input"] for line in result.out.splitlines()] == [
        f"{tmp_path}/t10k-images-idx3-ubyte:{n}" for n in (1, 2, 3)
    ]
    result = regard("predict", run.folder, paths[0], tmp_path / "gone.png", paths[1], "--skip-bad", "--json")
    assert [json.loads(line)["output"] is None for line in result.out.splitlines()] == [False, True, False]


def test_images_of_a_coco_file(regard: Command, tmp_path: Path) -> None:
    source = scenes(tmp_path / "data", 4)
    options = {"d_model": 32, "layers": 1, "decoder_layers": 1, "heads": 2, "queries": 4, "channels": 8}
    run = untrained(tmp_path, "detect", source, options)
    paths = [str(tmp_path / "data" / "images" / f"{n}.png") for n in range(4)]
    held = json.loads(source.read_text())
    (tmp_path / "data" / "images.json").write_text(json.dumps({"images": held["images"]}))
    for given in (source, tmp_path / "data" / "images.json"):
        result = regard("predict", run.folder, given, "--json")
        assert [json.loads(line)["input"] for line in result.out.splitlines()] == paths


def test_nodes_of_a_graph(regard: Command, tmp_path: Path) -> None:
    nodes = [("ann", "chess"), ("bob", "go"), ("cid", "chess")]
    table(tmp_path / "nodes.csv", ("node", "label"), nodes)
    table(tmp_path / "edges.csv", ("source", "target"), [("ann", "bob"), ("bob", "cid")])
    run = untrained(tmp_path, "graph", tmp_path, {"d_model": 16, "heads": 2})
    (tmp_path / "asked.csv").write_text("node\ncid\nann\nann\n")
    for given, names in ((tmp_path, ["ann", "bob", "cid"]), (tmp_path / "asked.csv", ["cid", "ann", "ann"])):
        result = regard("predict", run.folder, given, "--json")
        assert [json.loads(line)["input"] for line in result.out.splitlines()] == names


def test_histories_of_all_users(regard: Command, tmp_path: Path) -> None:
    rows = [("7", "Alien", "2"), ("9", "Up", "1"), ("7", "Aliens", "1"), ("9", "Alien", "3")]
    source = table(tmp_path / "data.csv", ("user", "item", "time"), rows)
    run = untrained(tmp_path, "recommend", source, SMALL)
    of_table = regard("predict", run.folder, source, "--json").out.splitlines()
    assert [json.loads(line)["input"] for line in of_table] == ["7", "9"]
    of_text = regard("predict", run.folder, "Aliens | Alien", "Up | Alien", "--json").out.splitlines()
    assert [json.loads(line)["items"] for line in of_table] == [json.loads(line)["items"] for line in of_text]


def test_clips_and_texts_to_speak(regard: Command, tmp_path: Path) -> None:
    result = words(4)
    source = folder_of(tmp_path, result)
    run = untrained(tmp_path / "heard", "transcribe", source, SMALL | {"features": 20})
    clips = [str(tmp_path / "clips" / f"{n:03}.wav") for n in range(4)]
    for given in (source, tmp_path):
        completed = regard("predict", run.folder, given, "--json")
        assert [json.loads(line)["input"] for line in completed.out.splitlines()] == clips
    run = untrained(tmp_path / "voice", "speak", source, SMALL | {"features": 20, "longest": 0.2})
    completed = regard("predict", run.folder, source, "--json", "--out", tmp_path / "out")
    assert [json.loads(line)["input"] for line in completed.out.splitlines()] == result
    (tmp_path / "in.txt").write_text(f"{result[0]}\n\n{result[1]}\n")
    assert regard("predict", run.folder, tmp_path / "in.txt", "--out", tmp_path / "more").code == 0
    assert sorted(path.name for path in (tmp_path / "more").iterdir()) == ["0001.wav", "0003.wav"]


def test_inputs_are_read_as_in_training(tmp_path: Path) -> None:
    columns = {"text": "2", "label": "mood"}  # with one name among numbers, all are names
    path = table(tmp_path / "a.csv", ("2", "mood"), [("x", "y")])
    assert [row.values for row in read_rows(str(path), columns, BadRows(), only=("text",))] == [("x",)]
    (tmp_path / "list.txt").write_text("1.png\n")
    with pytest.raises(UserError, match="is plain text, but image and label are needed"):
        list(tasks()["images"]().read_inputs(str(tmp_path / "list.txt"), BadRows()))
