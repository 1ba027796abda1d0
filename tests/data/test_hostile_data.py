"""Malformed and malicious data files: each is read, or raises one clear error, in little time and memory."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard.data.audio import load_waveform
from regard.data.coco import coco_images, coco_rows
from regard.data.images import decode_image, idx_images, image_header
from regard.data.readers import Row, read_rows
from regard.data.squad import read_squad, read_table
from regard.errors import BadRows
from regard.tasks import tasks
from regard.tasks.recommend import Recommend
from tests.damaged_files import attempt

DEEP = "[" * 100_000
DIGITS = "9" * 5000
LABELLED = {"text": "", "label": ""}


def checked(job: Callable[[BadRows], Any]) -> None:
    """Read with and without --skip-bad: it succeeds, or raises one `UserError`."""
    for skip in (False, True):

        def once(skip: bool = skip) -> None:
            result = job(BadRows(skip=skip))
            if isinstance(result, Iterable) and not isinstance(result, np.ndarray):
                list(result)

        assert attempt("read", once) is None


TABLES = {
    "nested.jsonl": f'{{"text": {DEEP}',
    "digits.jsonl": f'{{"text": "a", "label": {DIGITS}}}\n',
    "twice.jsonl": '{"text": "a", "text": "b", "label": "x"}\n',
    "no objects.jsonl": '1\n"a"\n[]\nnull\n',
    "infinite.jsonl": '{"text": NaN, "label": Infinity}\n',
    "surrogate.jsonl": '{"text": "\\ud800", "label": "x"}\n',
    "nul.csv": "text,label\na\0b,x\n",
    "nul.tsv": "text\tlabel\na\0b\tx\n",
    "quotes.csv": 'text,label\n"a,x\n' * 3,
    "empty.csv": "",
    "spaces.tsv": "\t\t\n \t \n",
    "returns.csv": "text,label\ra,x\rb,y\r",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(TABLES[name], newline="")
    checked(lambda bad: read_rows(str(path), LABELLED, bad))


def test_a_key_that_comes_twice_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x", "label": "y"}\n{"text": "b", "label": "z"}\n')
    bad = BadRows(skip=True)
    assert [row.values for row in read_rows(str(tmp_path / "a.jsonl"), LABELLED, bad)] == [("b", "z")]
    assert "duplicate key" in bad.first[0]


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2"])
def test_archives_with_changed_bytes(suffix: str, tmp_path: Path) -> None:
    content = "".join(f"text {n}\tlabel {n % 7}\n" for n in range(5000)).encode()
    packed = {"gz": gzip, "xz": lzma, "bz2": bz2}[suffix].compress(content)
    path = tmp_path / f"a.tsv.{suffix}"
    for at in range(0, len(packed), max(1, len(packed) // 40)):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :])
        checked(lambda bad: read_rows(str(path), LABELLED, bad))
        checked(lambda bad: read_squad(path.rename(path.with_name(f"a.json.{suffix}")), bad))
        path.with_name(f"a.json.{suffix}").rename(path)


def sparse(path: Path, size: int = 1 << 40) -> Path:
    """Create a sparse file of zeros."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


READERS: dict[str, Callable[[Path, BadRows], Any]] = {
    "a.csv": lambda path, bad: read_rows(str(path), LABELLED, bad),
    "a.tsv": lambda path, bad: read_rows(str(path), LABELLED, bad),
    "a.jsonl": lambda path, bad: read_rows(str(path), LABELLED, bad),
    "a.txt": lambda path, bad: read_rows(str(path), {"text": ""}, bad),
    "squad.json": read_squad,
    "coco.json": lambda path, bad: coco_rows(str(path), "", bad),
    "images-idx3-ubyte": lambda path, bad: idx_images(str(path)),
    "a.png": lambda path, bad: decode_image(Row(str(path), (str(path),)), bad),
    "b.png": lambda path, bad: image_header(Row(str(path), (str(path),))),
    "a.wav": lambda path, bad: load_waveform(Row(str(path), (str(path),)), bad),
}


@pytest.mark.parametrize("name", READERS)
def test_special_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    checked(lambda bad: READERS[name](path, bad))
    path.unlink()
    path.symlink_to("/dev/zero")
    checked(lambda bad: READERS[name](path, bad))
    path.unlink()
    path.mkdir()
    checked(lambda bad: READERS[name](path, bad))


@pytest.mark.parametrize("name", READERS)
def test_huge_files_are_refused_before_they_are_read(name: str, tmp_path: Path) -> None:
    path = sparse(tmp_path / name)
    checked(lambda bad: READERS[name](path, bad))


def test_huge_lines_within_small_archives_are_refused(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, wbits=31)
    with (tmp_path / "a.tsv.gz").open("wb") as file:
        for _ in range(400):
            file.write(packer.compress(bytes(1 << 20)))
        file.write(packer.flush())
    checked(lambda bad: read_rows(str(tmp_path / "a.tsv.gz"), LABELLED, bad))


COCO: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "1.png", "width": 8, "height": 8}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 1, 3, 3]}],
    "categories": [{"id": 3, "name": "cat"}],
}
ODD: list[Any] = [None, [], {}, "", "\0", "a" * 5000, 10**400, float("inf"), float("nan"), -1, True, [[1]], {"a": [1]}]


@pytest.mark.parametrize(
    ("part", "field"),
    [(part, field) for part, entries in COCO.items() for field in (None, *entries[0])],
)
def test_coco(part: str, field: str | None, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "1.png")
    path = tmp_path / "coco.json"
    for value in ODD:
        held = json.loads(json.dumps(COCO))
        held[part] = [*held[part], value] if field is None else [{**held[part][0], field: value}]
        path.write_text(json.dumps(held))
        checked(lambda bad: coco_rows(str(path), "", bad))
        checked(lambda bad: coco_images(str(path), "", bad))


QA: dict[str, Any] = {"id": "q", "question": "who?", "answers": [{"text": "cat", "answer_start": 4}]}


@pytest.mark.parametrize(
    "field", ["id", "question", "answers", "is_impossible", "text", "answer_start", "context", "qas"]
)
def test_squad(field: str, tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    for value in ODD:
        question: dict[str, Any] = json.loads(json.dumps(QA))
        paragraph: dict[str, Any] = {"context": "the cat sat", "qas": [question]}
        place = question["answers"][0] if field in ("text", "answer_start") else question
        (paragraph if field in paragraph else place)[field] = value
        path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
        checked(lambda bad: read_squad(path, bad))


@pytest.mark.parametrize("text", [DEEP, f'{{"data": {DIGITS}}}', '{"data": 1}', '{"data": [{"paragraphs": 1}]}', "1"])
def test_json_that_is_no_squad_and_no_coco(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    checked(lambda bad: read_squad(path, bad))
    checked(lambda bad: coco_rows(str(path), "", bad))


@pytest.mark.parametrize("answer", [DEEP, '{"text": ["a"], "answer_start": [1e999]}', '{"text": 1, "answer_start": 2}'])
def test_answers_of_tables(answer: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"context\tquestion\tanswer\nthe cat\twho\t{answer}\n")
    checked(lambda bad: read_table(str(path), dict.fromkeys(("context", "question", "answer"), ""), bad))


@pytest.mark.parametrize(
    "time", ["0001-01-01", "9999-12-31T23:59:59", "1e999", "nan", DIGITS, "2024-01-31T12:00+99:99"]
)
def test_times_of_histories(time: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"user,item,time\n1,a,{time}\n1,b,2\n1,c,3\n")
    checked(lambda bad: Recommend().read(str(path), bad))


def image_bytes(form: str) -> bytes:
    held = io.BytesIO()
    Image.fromarray((np.arange(32 * 32 * 3) % 251).astype(np.uint8).reshape(32, 32, 3)).save(held, form)
    return held.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_images_with_changed_bytes(form: str, tmp_path: Path) -> None:
    held, path, chance = image_bytes(form), tmp_path / f"a.{form.lower()}", np.random.default_rng(1)
    for n in range(60):
        changed = bytearray(held)
        if n % 3 == 0:
            changed = changed[: int(chance.integers(len(held)))]
        else:
            for at in chance.integers(0, min(len(held), 200 if n % 3 == 1 else len(held)), 4):
                changed[at] = int(chance.integers(256))
        path.write_bytes(changed)
        checked(lambda bad: decode_image(Row(str(path), (str(path),)), bad))
        checked(lambda bad: image_header(Row(str(path), (str(path),))))


def test_images_that_claim_to_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    part = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + part + struct.pack(">I", zlib.crc32(part)))
    checked(lambda bad: decode_image(Row(str(path), (str(path),)), bad))


@pytest.mark.parametrize("shape", [(2**31, 2**31, 2**31), (0, 5, 5), (1, 0, 0), (2, 3, 4), (3,), (2,) * 200])
def test_idx_files(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "images-idx3-ubyte"
    content = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(24)
    for held in (
        content,
        gzip.compress(content),
        gzip.compress(content)[:-9],
        gzip.compress(content)[:12] + b"\xff" * 9,
    ):
        path.write_bytes(held)
        checked(lambda bad: idx_images(str(path)))


def wav(rate: int = 16000, channels: int = 1, length: int | None = None, samples: int = 400) -> bytes:
    content = (np.sin(np.arange(samples)) * 20000).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, channels, rate, (rate * channels * 2) % 2**32, (channels * 2) % 2**16, 16)
    data = struct.pack("<4sI", b"data", len(content) if length is None else length) + content
    return b"RIFF" + struct.pack("<I", 36 + len(content)) + b"WAVEfmt " + struct.pack("<I", 16) + form + data


@pytest.mark.parametrize(
    "content",
    [
        wav(rate=0), wav(rate=1), wav(rate=2**31 - 1), wav(rate=999_983), wav(channels=0),
        wav(channels=65535),
        wav(length=2**32 - 1), wav(samples=0), b"RIFF", b"", b"fLaC" + b"\xff" * 60, b"OggS" + bytes(60),
    ],
)  # fmt: skip
def test_sounds(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    checked(lambda bad: load_waveform(Row(str(path), (str(path),)), bad))


@pytest.mark.parametrize("form", ["FLAC", "OGG", "WAV", "AIFF", "MP3"])
def test_sounds_with_changed_bytes(form: str, tmp_path: Path) -> None:
    import soundfile

    path, chance = tmp_path / f"a.{form.lower()}", np.random.default_rng(1)
    soundfile.write(path, np.sin(np.arange(4000) / 9).astype(np.float32), 16000, format=form)
    held = path.read_bytes()
    for n in range(40):
        changed = bytearray(held)
        if n % 3 == 0:
            changed = changed[: int(chance.integers(len(held)))]
        else:
            for at in chance.integers(0, min(len(held), 60 if n % 3 == 1 else len(held)), 4):
                changed[at] = int(chance.integers(256))
        path.write_bytes(changed)
        checked(lambda bad: load_waveform(Row(str(path), (str(path),)), bad))


def test_names_of_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,label\nx\0y.png,a\n" + "x" * 5000 + ".png,b\n/dev/zero,c\n")
    rows = list(tasks()["images"]().read(str(tmp_path / "a.csv"), BadRows()))
    for row in rows:
        checked(lambda bad, row=row: decode_image(row, bad))
        checked(lambda bad, row=row: load_waveform(row, bad))
