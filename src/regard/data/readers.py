"""Readers: TSV, CSV, JSONL and text files, compressed or not, or a dataset of the Hugging Face hub, to rows."""

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
TABS = (".data", ".inter")  # tables with tabs by other names: MovieLens's, RecBole's
EMBEDDED = Path(__file__).with_name("embedded")  # data and a trained run that come with the package
TATOEBA = "tatoeba-en-fr"
NO_COLUMNS = frozenset[str]()
LONGEST_LINE = 1 << 27  # bytes; articles and sets are shorter, and what is not text may have no line at all
LARGEST_JSON = 2 << 30  # bytes of a file that is read at once; COCO's largest has a fifth of that
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


class Row(NamedTuple):
    """One example, and where it stands: `file:line`."""

    place: str
    values: tuple[Any, ...]

    @property
    def at(self) -> str:
        """Its place, and the file that its first value names, where that is another."""
        return self.place if self.place == str(self.values[0]) else f"{self.place}: {self.values[0]}"


def read_rows(
    source: str,
    columns: Mapping[str, str],
    bad: BadRows,
    *,
    empty: frozenset[str] = NO_COLUMNS,
    only: Sequence[str] | None = None,
) -> Iterator[Row]:
    """The rows of a file, of a dataset `name` or `name:split` of the hub, or of the embedded `tatoeba-en-fr`.

    columns: what is wanted, by name, in order; the value is the name of the column in the file, its number from 1 where
        there is no header line, or empty. Empty is the wanted name itself; a TSV whose first line does not hold it has
        no header, and its columns come in the order of `columns`.
    empty: which of them may have nothing in it.
    only: which of them a row is to have, where the others are not needed: they may be missing, but where there is no
        header, columns are counted as if they were there.

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
            raise UserError(f"{source}: there is no such file; give a file, or the name of a dataset of the hub")
        return _read_hub(source, _Columns(columns, empty, only), bad)
    if path.is_dir():
        raise UserError(f"{source}: is a folder; expected a file {', '.join(FORMATS)}")
    if suffix not in FORMATS:
        raise UserError(
            f"{source}: what {path.suffix or 'no suffix'} holds is not known; name it {', '.join(FORMATS)} "
            "(and .gz, .xz or .bz2 behind that)"
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
    """Rows of a table whose first value is a path next to it."""
    return (Row(row.place, (str(table.parent / row.values[0]), *row.values[1:])) for row in rows)


def with_placeholders(rows: Iterable[Row], bad: BadRows) -> Iterator[Row]:
    """Rows as they are read, and a row without values for each that was bad: so outputs can be matched with inputs."""
    count = bad.count
    for row in rows:
        yield from (Row("", ()) for _ in range(bad.count - count))
        count = bad.count
        yield row
    yield from (Row("", ()) for _ in range(bad.count - count))


def _path(source: str) -> Path:
    return EMBEDDED / f"{TATOEBA}.tsv.xz" if source == TATOEBA and not Path(source).exists() else Path(source)


def file_format(path: Path) -> str:
    """The suffix that tells the format: that before .gz, .xz or .bz2."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return ".tsv" if last in TABS else last


def first_cells(source: str, bad: BadRows) -> list[str]:
    """The cells of the first line of a TSV or CSV that is there, which may name the columns; none of other sources."""
    path = _path(source)
    delimiter = {".tsv": "\t", ".csv": ","}.get(file_format(path))
    if delimiter is None or not path.is_file():
        return []
    line = next((line for _, line in read_lines(path, bad) if line.strip()), "")
    return split_cells(line, delimiter)


def split_cells(line: str, delimiter: str) -> list[str]:
    """The cells of a line of a table, spaces around them taken off."""
    return [cell.strip() for cell in next(csv.reader([line.strip("\r\n")], delimiter=delimiter), [])]


def fingerprint(source: str) -> dict[str, Any]:
    """What tells that a source is the same as before: where, how large, and a digest of its bytes.

    Of a folder, which may be large, the digest is of names and sizes.
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
    """The text of a file that is read at once, such as JSON."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file")
    with opened(path) as file:
        small = path.suffix.lower() in OPENERS or path.stat().st_size <= LARGEST_JSON
        data = file.read(LARGEST_JSON + 1) if small else b""
    if not small or len(data) > LARGEST_JSON:
        raise UserError(f"{path}: expected at most {LARGEST_JSON} bytes, but has more; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        came = f"byte 0x{data[error.start]:02x} at {error.start + 1}"
        raise UserError(
            f"{path}:{line}: expected UTF-8, but {came} is not; iconv -f latin1 -t utf-8 converts a file"
        ) from error


def decode_line(source: str, number: int, line: bytes, bad: BadRows) -> str | None:
    """A line as text, numbered from 1; one that is no UTF-8 is bad."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        came = f"byte 0x{line[error.start]:02x} at {error.start + 1}"
        bad.add(f"{source}:{number}: expected UTF-8, but {came} is not; iconv -f latin1 -t utf-8 converts a file")
        return None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a regular file, unpacked if it is an archive; a damaged archive is an error that names it."""
    try:
        with OPENERS.get(path.suffix.lower(), open)(require_file(path), "rb") as file:
            yield file
    except DAMAGED as error:
        raise UserError(f"{path}: the archive is damaged ({first_line(error)}); fetch it again") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"{path}: the archive is damaged ({first_line(error)}); fetch it again") from error  # bz2


def read_lines(path: Path, bad: BadRows) -> Iterator[tuple[str, str]]:
    """The lines of a file, compressed or not, with their places."""
    with opened(path) as file:
        for number, line in enumerate(track(_bounded_lines(path, file)), 1):
            text = decode_line(str(path), number, line, bad)
            if text is not None:
                yield f"{path}:{number}", text


def _bounded_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one that is too long to be a row is an error."""
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise UserError(f"{path}:{number}: is longer than {LONGEST_LINE} bytes; is it the right file?")
        yield line


def _require_rows(source: str, rows: Iterator[Row]) -> Iterator[Row]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UserError(
            f"{source}:1: expected at least one line that can be used, but there is none; is it the right file?"
        )


class _Columns(NamedTuple):
    """What is asked of a table: see `read`."""

    columns: Mapping[str, str]
    empty: frozenset[str]
    only: Sequence[str] | None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that a row is to have."""
        return tuple(name for name in self.columns if self.only is None or name in self.only)

    def called(self, name: str) -> str:
        """What a column is called in the table, or its number."""
        return self.columns[name] or name


class _Layout(NamedTuple):
    """Where the wanted columns are in a table."""

    names: tuple[str, ...]
    at: tuple[int, ...]
    header: bool  # whether the first line names them
    width: int  # cells of the first line

    def row(self, place: str, cells: Sequence[str], bad: BadRows, empty: frozenset[str]) -> Row | None:
        if len(cells) > self.width:  # some cell holds what parts the others, and all behind it are elsewhere
            bad.add(
                f"{place}: expected {self.width} columns, but {len(cells)} came; quote cells of a CSV that hold commas"
            )
            return None
        if len(cells) <= max(self.at):
            missing = " and ".join(f"{name} is {at + 1}" for name, at in zip(self.names, self.at, strict=True))
            bad.add(f"{place}: expected at least {max(self.at) + 1} columns ({missing}), but {len(cells)} came")
            return None
        values = tuple(cells[at].strip() for at in self.at)
        for name, at, value in zip(self.names, self.at, values, strict=True):
            if not value and name not in empty:
                bad.add(f"{place}: column {at + 1} ({name}) is empty")
                return None
        return Row(place, values)


def _layout(place: str, first: Sequence[str], wanted: _Columns, *, bare: bool) -> _Layout:
    """Find the columns by the first line. bare: without names, and if it is no header, they come in order."""
    every, names, cells = tuple(wanted.columns), wanted.names, [cell.strip() for cell in first]
    chosen, called = [wanted.called(name) for name in every], [wanted.called(name) for name in names]
    bare = bare and not any(wanted.columns.values())
    if all(said.isdigit() for said in chosen):
        if "0" in chosen:
            raise UserError(f"{place}: columns are numbered from 1, but --{every[chosen.index('0')]} is 0")
        return _Layout(names, tuple(int(said) - 1 for said in called), False, len(cells))
    if all(said in cells for said in called):
        absent = next((said for said in chosen if said not in cells), None)
        if bare and absent and len(cells) >= len(every):
            raise UserError(
                f"{place}: may be a header or an example, since it has {called[0]!r} but not {absent!r}; put a line "
                f"{' '.join(map(repr, every))} with tabs before it, or make it a CSV, which always has a header"
            )
        return _Layout(names, tuple(cells.index(said) for said in called), True, len(cells))
    if bare:
        return _Layout(names, tuple(every.index(name) for name in names), False, len(cells))
    lacking = next(said for said in called if said not in cells)
    came = f"expected a column {lacking!r}, but they are {', '.join(map(repr, cells[:8]))}"
    if wanted.only is not None:
        raise UserError(f"{place}: {came}; give it the name that it has in the data of the run")
    options = " ".join(f"--{name} {number}" for number, name in enumerate(names, 1))
    raise UserError(
        f"{place}: {came}; say which it is (--{names[called.index(lacking)]} NAME), or by number where there is no "
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
            bad.add(f"{places[0] if places else start}: is no CSV ({error}); quotes within quotes are doubled")
            places.clear()
            continue
        start = places[0] if places else start  # a quoted cell may take many lines
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
            bad.add(f"{place}: is no JSON ({error.msg} at {error.colno})")
            continue
        except (ValueError, RecursionError) as error:  # a key that comes twice, too many digits, too deep
            bad.add(f"{place}: is no JSON that can be used ({first_line(error)})")
            continue
        if row := _parse_record(place, record, wanted, bad):
            yield row


def _parse_record(place: str, record: Any, wanted: _Columns, bad: BadRows) -> Row | None:
    values = []
    for name in wanted.names:
        value = record
        for key in wanted.called(name).split("."):  # translation.en, as datasets of translations have it
            value = value.get(key) if isinstance(value, dict) else None
        if name in wanted.empty and (value is None or value == ""):
            values.append("")
            continue
        if value is None or value == "":
            keys = ", ".join(map(repr, list(record)[:8])) if isinstance(record, dict) else type(record).__name__
            hint = f"; try --{name} NAME" if wanted.only is None else ""
            bad.add(f"{place}: expected a value for {wanted.called(name)!r}, but it has {keys}{hint}")
            return None
        values.append(value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict) else str(value))
    return Row(place, tuple(values))


def _read_hub(source: str, wanted: _Columns, bad: BadRows) -> Iterator[Row]:
    name, _, part = source.partition(":")
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError(
            f"{source}: there is no such file, and to fetch a dataset of that name needs: pip install datasets"
        ) from None
    try:
        found: Iterable[Any] = load_dataset(name, split=part or "train")
    except Exception as error:  # the library raises many kinds: no connection, no such name, no such split
        raise UserError(f"{source}: could not be fetched ({first_line(error)}); is the name right?") from error
    records = (
        _parse_record(f"{name}[{part or 'train'}]:{n}", record, wanted, bad) for n, record in enumerate(found, 1)
    )
    return _require_rows(source, (row for row in records if row is not None))
