"""Readers: formats and bad data."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from pathlib import Path
from types import ModuleType

import pytest

from regard.data.readers import EMBEDDED, TATOEBA, Row, fingerprint, read_rows
from regard.data.splits import split
from regard.errors import BadRows
from regard.tasks import Sources, UserError, tasks
from regard.training.sources import read_examples

PAIR = {"source": "", "target": ""}
LABELLED = {"text": "", "label": ""}
EXPECTED = [("a b", "x"), ("c, d", "y")]


def values(path: Path, columns: dict[str, str], *, skip: bool = False) -> list[tuple[str, ...]]:
    return [row.values for row in read_rows(str(path), columns, BadRows(skip=skip))]


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.tsv", "a b\tx\nc, d\ty\n", LABELLED),
        ("a.tsv", "a b\tx\tCC-BY\r\n\r\nc, d\ty\tCC-BY\r\n", LABELLED),
        ("a.tsv", "label\ttext\nx\ta b\ny\tc, d\n", LABELLED),
        ("a.tsv", "x\ta b\ny\tc, d\n", {"text": "2", "label": "1"}),
        ("a.csv", 'text,label\na b,x\n"c, d",y\n', LABELLED),
        ("a.csv", '\ufeffid,kind,words\n1,x,a b\n2,y,"c, d"\n', {"text": "words", "label": "kind"}),
        ("a.csv", 'a b,x\n"c, d",y\n', {"text": "1", "label": "2"}),
        ("a.jsonl", '{"text": "a b", "label": "x"}\n\n{"label": "y", "text": "c, d"}\n', LABELLED),
        (
            "a.jsonl",
            '{"r": {"t": "a b"}, "label": "x"}\n{"r": {"t": "c, d"}, "label": "y"}\n',
            {"text": "r.t", "label": ""},
        ),
    ],
)
def test_the_same_rows_come_from_every_format(name: str, content: str, columns: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert values(tmp_path / name, columns) == EXPECTED


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_archives_are_read_as_what_is_in_them(suffix: str, compress: object, tmp_path: Path) -> None:
    path = tmp_path / f"a.tsv{suffix}"
    path.write_bytes(compress(b"a b\tx\nc, d\ty\n"))  # type: ignore[operator]
    assert values(path, LABELLED) == EXPECTED
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged archive"):
        values(path, LABELLED)


def test_text_is_read_line_by_line_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" one \n\n  \ntwo\n")
    assert [
        (Path(row.place).name, row.values) for row in read_rows(str(tmp_path / "a.txt"), {"text": ""}, BadRows())
    ] == [
        ("a.txt:1", ("one",)),
        ("a.txt:4", ("two",)),
    ]


def test_a_quoted_cell_may_take_many_lines_and_places_are_those_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label\n"one\ntwo\nthree",x\nfour,\n')
    rows = read_rows(str(tmp_path / "a.csv"), LABELLED, bad := BadRows(skip=True))
    assert [row.values[0] for row in rows] == ["one\ntwo\nthree"]
    assert bad.first[0].endswith("a.csv:5: column 2 (label) is empty")


BAD_LINES = [
    ("a.tsv", b"a b\tx\nonly one\nc, d\ty\n", 2, "expected at least 2 columns .* got 1"),
    ("a.tsv", b"a b\tx\ncaf\xe9\tz\nc, d\ty\n", 2, r"not valid UTF-8 \(byte 0xe9 at 4\)"),
    ("a.tsv", b"a b\tx\n\tz\nc, d\ty\n", 2, r"column 1 \(text\) is empty"),
    ("a.csv", b'text,label\na b,x\none, two,z\n"c, d",y\n', 3, "expected 2 columns, got 3; quote"),
    ("a.csv", b'text,label\na b,x\nc,\n"c, d",y\n', 3, r"column 2 \(label\) is empty"),
    ("a.csv", b'text,label\na b,x\ncaf\xe9,z\n"c, d",y\n', 3, "not valid UTF-8"),
    ("a.jsonl", b'{"text": "a b", "label": "x"}\n{"text": \n{"text": "c, d", "label": "y"}\n', 2, "not valid JSON"),
    (
        "a.jsonl",
        b'{"text": "a b", "label": "x"}\n{"text": "z"}\n{"text": "c, d", "label": "y"}\n',
        2,
        "a value for 'label'",
    ),
]


@pytest.mark.parametrize(("name", "content", "line", "message"), BAD_LINES)
def test_a_bad_line_is_reported_with_its_place_or_counted(
    name: str, content: bytes, line: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}:{line}: .*{message}.*--skip-bad") as caught:
        values(tmp_path / name, LABELLED)
    assert "\n" not in str(caught.value)
    bad = BadRows(skip=True)
    assert [row.values for row in read_rows(str(tmp_path / name), LABELLED, bad)] == EXPECTED
    assert bad.count == 1


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.tsv", "", PAIR, "a.tsv:1: no line can be used"),
        ("a.csv", "text,label\n", LABELLED, "a.csv:1: no line can be used"),
        (
            "a.csv",
            "sentence,sentiment\nx,y\n",
            LABELLED,
            "a.csv:1: no column 'text'.*'sentence', 'sentiment'.*--text NAME",
        ),
        ("a.csv", "text,label\nx,y\n", {"text": "words", "label": ""}, "no column 'words'"),
        ("a.tsv", "x\ty\n", {"text": "0", "label": "1"}, "numbered from 1"),
        ("a.txt", "x\n", PAIR, "plain text, but source and target are needed"),
        ("a.parquet", "x", PAIR, "unknown format .parquet"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_to_do(
    name: str, content: str, columns: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        values(tmp_path / name, columns)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.tsv: no such file"):
        values(tmp_path / "none.tsv", PAIR)
    with pytest.raises(UserError, match="is a directory"):
        values(tmp_path, PAIR)


def test_a_name_that_is_no_file_is_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, split: str) -> list[dict[str, object]]:
        calls.append((name, split))
        return [{"translation": {"en": "a b", "fr": "x"}}, {"translation": {"en": "c, d", "fr": "y"}}]

    datasets = ModuleType("datasets")
    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    columns = {"source": "translation.en", "target": "translation.fr"}
    rows = list(read_rows("some/books:validation", columns, BadRows()))
    assert [row.values for row in rows] == EXPECTED
    assert rows[1].place == "some/books[validation]:2"
    assert calls == [("some/books", "validation")]


def test_without_the_datasets_library_the_name_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        list(read_rows("some/books", PAIR, BadRows()))


def test_rows_of_a_group_are_held_out_together_in_any_order() -> None:
    rows = [Row(str(n), (f"text {n % 50}", str(n))) for n in range(200)]
    train, held_out = split(rows, lambda row: row.values[0], 10, seed=1)
    assert len({row.values[0] for row in held_out}) == 10
    assert len(held_out) == 40
    assert not {row.values[0] for row in train} & {row.values[0] for row in held_out}
    assert set(split(rows[::-1], lambda row: row.values[0], 10, seed=1)[1]) == set(held_out)
    assert set(split(rows, lambda row: row.values[0], 10, seed=2)[1]) != set(held_out)
    with pytest.raises(UserError, match="cannot hold out 50 of 50 distinct examples"):
        split(rows, lambda row: row.values[0], 50, seed=1)


def test_a_fingerprint_detects_changes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = fingerprint(str(path))
    path.write_text("two")
    assert fingerprint(str(path)) != before


def test_validation_and_test_rows_differ(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(60)))
    task = tasks()["classify"]()
    train, valid, test, _ = read_examples(task, Sources((str(path),), held_out=10), 1)
    assert [len(part) for part in (train, valid, test)] == [45, 5, 10]
    assert len({row.place for row in (*train, *valid, *test)}) == 60


def test_separate_files_are_used_as_given(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"{name} {n},{n % 2}\n" for n in range(9)))
    a, b, c = (str(tmp_path / f"{name}.csv") for name in ("a", "b", "c"))
    task = tasks()["classify"]()

    def kinds(sources: Sources) -> list[str]:
        return ["".join(sorted({row.values[0][0] for row in part})) for part in read_examples(task, sources, 1)[:3]]

    assert kinds(Sources((a,), (b,), (c,))) == ["a", "b", "c"]
    assert kinds(Sources((a,), (b,))) == ["a", "b", "b"]
    assert kinds(Sources((a,), (), (c,), held_out=3)) == ["a", "a", "c"]


def test_the_embedded_sentences_have_attributions() -> None:
    with lzma.open(EMBEDDED / f"{TATOEBA}.tsv.xz", "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file]
    assert all(len(line) == 3 and line[2].startswith("CC-BY 2.0 (France) Attribution: tatoeba.org") for line in lines)
    assert len({line[0] for line in lines}) > 120_000
    assert next(read_rows(TATOEBA, {"source": "", "target": ""}, BadRows())).values == ("Go.", "Va !")
    assert fingerprint(TATOEBA)["source"] == TATOEBA
    assert (EMBEDDED / f"{TATOEBA}.tsv.xz").stat().st_size < 4e6


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "text\tlabel\na\tx\nb\tmore\ty\n"),
        ("a.tsv", "a\tx\nb\tmore\ty\n"),
        ("a.csv", "text,label\na,x\nb,more,y\n"),
    ],
)
def test_a_row_with_more_cells_than_the_first_is_bad(name: str, content: str, tmp_path: Path) -> None:
    """Its cells would be assigned to the wrong columns."""
    (tmp_path / name).write_text(content)
    line = len(content.splitlines())
    with pytest.raises(UserError, match=rf"{name}:{line}: expected 2 columns, got 3"):
        values(tmp_path / name, LABELLED)
    assert values(tmp_path / name, LABELLED, skip=True) == [("a", "x")]


def test_a_row_with_more_cells_is_bad_where_columns_are_numbers_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,a\ny,b,more\n")
    with pytest.raises(UserError, match=r"a.csv:2: expected 2 columns, got 3"):
        values(tmp_path / "a.csv", {"text": "2", "label": "1"})
