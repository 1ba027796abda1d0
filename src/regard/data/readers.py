"""Readers of rows: TSV, CSV, JSONL and text files, compressed or not, and datasets of the Hugging Face hub."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from regard.errors import BadRows, UserError, first_line
from regard.files import require_file, unique_keys
from regard.progress import track

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
TEXT = (".txt", ".text", ".raw", ".md")
FORMATS = (".tsv", ".csv", ".jsonl", *TEXT)
TABS = (".data", ".inter")  # other suffixes of tab-separated tables: MovieLens, RecBole
EMBEDDED = Path(__file__).with_name("embedded")  # data and a trained run included in the package
TATOEBA = "tatoeba-en-fr"
NO_COLUMNS = frozenset[str]()
MAX_LINE = 1 << 27  # bytes; a longer line is not a row, and binary files may have no lines at all
MAX_JSON = 2 << 30  # bytes of a file that is read as a whole; five times the largest file of COCO
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


class Row(NamedTuple):
    """One example and its place, `file:line`."""

    place: str
    values: tuple[Any, ...]

    @property
    def at(self) -> str:
        """The place, followed by the first value (a path) if that differs."""
        return self.place if self.place == str(self.values[0]) else f"{self.place}: {self.values[0]}"


def read_rows(
    source: str,
    columns: Mapping[str, str],
    bad: BadRows,
    *,
    empty: frozenset[str] = NO_COLUMNS,
    only: Sequence[str] | None = None,
) -> Iterator[Row]:
    """Read the rows of a file, of a hub dataset `name` or `name:split`, or of the included `tatoeba-en-fr`.

    columns: the columns to read, in order. The value is the name of the column in the file, its number (from 1) in a
        file without a header, or empty if it has the name of the key. A TSV file whose first line has none of these
        names has no header, and its columns are in the order of `columns`.
    empty: columns whose cells may be empty.
    only: columns to return. The others may be missing from a file with a header; without a header they count in the
        numbering.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_text('text,label\\n"good, really",1\\n')
    ...     [row.values for row in read_rows(f"{folder}/a.csv", {"label": "", "text": ""}, BadRows())]
    [('1', 'good, really')]
    """
    path = _path(source)
    suffix = file_format(path)
    if not path.exists():
        if suffix in FORMATS or path.is_absolute() or source.startswith("."):
            raise UserError(f"{source}: no such file; pass a file, or the name of a dataset of the Hugging Face hub")
        return _read_hub(source, _Columns(columns, empty, only), bad)
    if path.is_dir():
        raise UserError(f"{source}: is a directory; expected a file {', '.join(FORMATS)}")
    if suffix not in FORMATS:
        raise UserError(
            f"{source}: unknown format {path.suffix or '(no suffix)'}; expected {', '.join(FORMATS)}, "
            "optionally followed by .gz, .xz or .bz2"
        )
    if suffix in TEXT:
        if len(columns) > 1:
            raise UserError(f"{source}: is plain text, but {' and '.join(columns)} are needed; try TSV, CSV or JSONL")
        return _require_rows(
            source, (Row(place, (line.strip(),)) for place, line in read_lines(path, bad) if line.strip())
        )
    reader = {".tsv": _read_tsv, ".csv": _read_csv, ".jsonl": _read_jsonl}[suffix]
    return _require_rows(source, reader(path, _Columns(columns, empty, only), bad))


def resolve_paths(table: Path, rows: Iterable[Row]) -> Iterator[Row]:
    """Resolve the first value of each row as a path relative to the table."""
    return (Row(row.place, (str(table.parent / row.values[0]), *row.values[1:])) for row in rows)


def with_placeholders(rows: Iterable[Row], bad: BadRows) -> Iterator[Row]:
    """Yield the rows, and an empty row in place of each bad one, so that outputs stay aligned with inputs."""
    count = bad.count
    for row in rows:
        yield from (Row("", ()) for _ in range(bad.count - count))
        count = bad.count
        yield row
    yield from (Row("", ()) for _ in range(bad.count - count))


def _path(source: str) -> Path:
    return EMBEDDED / f"{TATOEBA}.tsv.xz" if source == TATOEBA and not Path(source).exists() else Path(source)


def file_format(path: Path) -> str:
    """The suffix that determines the format, without .gz, .xz or .bz2."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return ".tsv" if last in TABS else last


def first_cells(source: str, bad: BadRows) -> list[str]:
    """Cells of the first line of an existing TSV or CSV file, possibly its header; empty for other sources."""
    path = _path(source)
    delimiter = {".tsv": "\t", ".csv": ","}.get(file_format(path))
    if delimiter is None or not path.is_file():
        return []
    line = next((line for _, line in read_lines(path, bad) if line.strip()), "")
    return split_cells(line, delimiter)


def split_cells(line: str, delimiter: str) -> list[str]:
    """Split a line of a table into cells, and strip them."""
    return [cell.strip() for cell in next(csv.reader([line.strip("\r\n")], delimiter=delimiter), [])]


def fingerprint(source: str) -> dict[str, Any]:
    """Path, size and digest of a source, to detect changes.

    The digest of a directory, which may be large, covers only names and sizes.
    """
    path = _path(source)
    if path.is_dir():
        inside = sorted(
            (str(each.relative_to(path)), each.stat().st_size) for each in path.rglob("*") if each.is_file()
        )
        digest = hashlib.sha256(json.dumps(inside).encode()).hexdigest()
        return {"source": str(path.resolve()), "bytes": sum(size for _, size in inside), "sha256": digest}
    if not path.is_file():
        return {"source": source}
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    where = source if path.parent == EMBEDDED else str(path.resolve())
    return {"source": where, "bytes": path.stat().st_size, "sha256": digest}


def read_text(path: Path) -> str:
    """Read a whole text file, such as JSON."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    with open_source(path) as file:
        small = path.suffix.lower() in OPENERS or path.stat().st_size <= MAX_JSON
        data = file.read(MAX_JSON + 1) if small else b""
    if not small or len(data) > MAX_JSON:
        raise UserError(f"{path}: larger than {MAX_JSON} bytes; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = f"byte 0x{data[error.start]:02x} at {error.start + 1}"
        raise UserError(
            f"{path}:{line}: not valid UTF-8 ({byte}); convert the file with iconv -f latin1 -t utf-8"
        ) from error


def decode_line(source: str, number: int, line: bytes, bad: BadRows) -> str | None:
    """Decode line `number` (from 1) as text; invalid UTF-8 is bad."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at {error.start + 1}"
        bad.add(f"{source}:{number}: not valid UTF-8 ({byte}); convert the file with iconv -f latin1 -t utf-8")
        return None


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, decompressed by its suffix; a damaged archive raises `UserError`."""
    try:
        with OPENERS.get(path.suffix.lower(), open)(require_file(path), "rb") as file:
            yield file
    except DAMAGED as error:
        raise UserError(f"{path}: damaged archive ({first_line(error)}); download it again") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"{path}: damaged archive ({first_line(error)}); download it again") from error  # bz2


def read_lines(path: Path, bad: BadRows) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file, compressed or not, with their places."""
    with open_source(path) as file:
        for number, line in enumerate(track(_bounded_lines(path, file)), 1):
            text = decode_line(str(path), number, line, bad)
            if text is not None:
                yield f"{path}:{number}", text


def _bounded_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one that is too long to be a row is an error."""
    for number in count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise UserError(f"{path}:{number}: line of more than {MAX_LINE} bytes; is it the right file?")
        yield line


def _require_rows(source: str, rows: Iterator[Row]) -> Iterator[Row]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UserError(f"{source}:1: no line can be used; is it the right file?")


class _Columns(NamedTuple):
    """The columns to read from a table, see `read_rows`."""

    columns: Mapping[str, str]
    empty: frozenset[str]
    only: Sequence[str] | None

    @property
    def names(self) -> tuple[str, ...]:
        """Columns to return."""
        return tuple(name for name in self.columns if self.only is None or name in self.only)

    def title_of(self, name: str) -> str:
        """Name of a column in the table, or its number."""
        return self.columns[name] or name


class _Layout(NamedTuple):
    """Positions of the requested columns in a table."""

    names: tuple[str, ...]
    at: tuple[int, ...]
    header: bool  # whether the first line is a header
    width: int  # cells of the first line

    def row(self, place: str, cells: Sequence[str], bad: BadRows, empty: frozenset[str]) -> Row | None:
        if len(cells) > self.width:  # an unquoted delimiter shifts all cells after it
            bad.add(
                f"{place}: expected {self.width} columns, got {len(cells)}; quote cells of a CSV that contain commas"
            )
            return None
        if len(cells) <= max(self.at):
            missing = " and ".join(f"{name} is {at + 1}" for name, at in zip(self.names, self.at, strict=True))
            bad.add(f"{place}: expected at least {max(self.at) + 1} columns ({missing}), got {len(cells)}")
            return None
        values = tuple(cells[at].strip() for at in self.at)
        for name, at, value in zip(self.names, self.at, values, strict=True):
            if not value and name not in empty:
                bad.add(f"{place}: column {at + 1} ({name}) is empty")
                return None
        return Row(place, values)


def _layout(place: str, first: Sequence[str], wanted: _Columns, *, bare: bool) -> _Layout:
    """Find the columns from the first line. bare: if it is not a header, take the columns in order."""
    every, names, cells = tuple(wanted.columns), wanted.names, [cell.strip() for cell in first]
    chosen, called = [wanted.title_of(name) for name in every], [wanted.title_of(name) for name in names]
    bare = bare and not any(wanted.columns.values())
    if all(label.isdigit() for label in chosen):
        if "0" in chosen:
            raise UserError(f"{place}: columns are numbered from 1, but --{every[chosen.index('0')]} is 0")
        return _Layout(names, tuple(int(label) - 1 for label in called), False, len(cells))
    if all(label in cells for label in called):
        absent = next((label for label in chosen if label not in cells), None)
        if bare and absent and len(cells) >= len(every):
            raise UserError(
                f"{place}: ambiguous first line with {called[0]!r} but without {absent!r}: header or example? Put a "
                f"tab-separated line {' '.join(map(repr, every))} before it, or use CSV, which always has a header"
            )
        return _Layout(names, tuple(cells.index(label) for label in called), True, len(cells))
    if bare:
        return _Layout(names, tuple(every.index(name) for name in names), False, len(cells))
    missing = next(label for label in called if label not in cells)
    problem = f"no column {missing!r} among {', '.join(map(repr, cells[:8]))}"
    if wanted.only is not None:
        raise UserError(f"{place}: {problem}; rename the column to {missing!r}")
    options = " ".join(f"--{name} {number}" for number, name in enumerate(names, 1))
    raise UserError(
        f"{place}: {problem}; set its name (--{names[called.index(missing)]} NAME), or numbers if there is no "
        f"header ({options})"
    )


def _read_tsv(path: Path, wanted: _Columns, bad: BadRows) -> Iterator[Row]:
    layout = None
    for place, line in read_lines(path, bad):
        if not line.strip():
            continue
        cells = line.rstrip("\r\n").split("\t")
        if layout is None:
            layout = _layout(place, cells, wanted, bare=True)
            if layout.header:
                continue
        if row := layout.row(place, cells, bad, wanted.empty):
            yield row


def _read_csv(path: Path, wanted: _Columns, bad: BadRows) -> Iterator[Row]:
    csv.field_size_limit(1 << 27)  # reviews and articles are longer than the default of 128 KB
    layout, start, places = None, f"{path}:1", list[str]()

    def tracked_lines() -> Iterator[str]:
        for place, line in read_lines(path, bad):
            places.append(place)
            yield line

    reader = csv.reader(tracked_lines(), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.add(f"{places[0] if places else start}: not valid CSV ({error}); double quotes inside quoted cells")
            places.clear()
            continue
        start = places[0] if places else start  # a quoted cell may span lines
        places.clear()
        if not any(cell.strip() for cell in cells):
            continue
        if layout is None:
            layout = _layout(start, cells, wanted, bare=False)
            if layout.header:
                continue
        if row := layout.row(start, cells, bad, wanted.empty):
            yield row


def _read_jsonl(path: Path, wanted: _Columns, bad: BadRows) -> Iterator[Row]:
    for place, line in read_lines(path, bad):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=unique_keys)
        except json.JSONDecodeError as error:
            bad.add(f"{place}: not valid JSON ({error.msg} at column {error.colno})")
            continue
        except (ValueError, RecursionError) as error:  # duplicate key, too many digits, nested too deeply
            bad.add(f"{place}: unusable JSON ({first_line(error)})")
            continue
        if row := _parse_record(place, record, wanted, bad):
            yield row


def _parse_record(place: str, record: Any, wanted: _Columns, bad: BadRows) -> Row | None:
    values = []
    for name in wanted.names:
        value = record
        for key in wanted.title_of(name).split("."):  # nested keys, such as translation.en
            value = value.get(key) if isinstance(value, dict) else None
        if name in wanted.empty and (value is None or value == ""):
            values.append("")
            continue
        if value is None or value == "":
            keys = ", ".join(map(repr, list(record)[:8])) if isinstance(record, dict) else type(record).__name__
            hint = f"; try --{name} NAME" if wanted.only is None else ""
            bad.add(f"{place}: expected a value for {wanted.title_of(name)!r}, got {keys}{hint}")
            return None
        values.append(value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict) else str(value))
    return Row(place, tuple(values))


def _read_hub(source: str, wanted: _Columns, bad: BadRows) -> Iterator[Row]:
    name, _, part = source.partition(":")
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError(f"{source}: no such file; to load a hub dataset of that name: pip install datasets") from None
    try:
        dataset: Iterable[Any] = load_dataset(name, split=part or "train")
    except Exception as error:  # many types: no connection, unknown name, unknown split
        raise UserError(f"{source}: could not be loaded ({first_line(error)}); is the name right?") from error
    records = (
        _parse_record(f"{name}[{part or 'train'}]:{n}", record, wanted, bad) for n, record in enumerate(dataset, 1)
    )
    return _require_rows(source, (row for row in records if row is not None))
