"""The page as text: what is in it, and what cannot get out of it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest

from regard.view.page import bundle, pack_array, page
from tests.view.documents import HOSTILE, Sample, long, translation

STATIC = files("regard.view").joinpath("static")


@pytest.fixture(scope="module")
def document() -> Sample:
    return translation()


def test_the_arrays_of_a_page_are_those_of_the_document(document: Sample) -> None:
    text = page(document)
    for name, array in document.arrays.items():
        match = re.search(rf'id="array-{name}" data-dtype="(\w+)" data-shape="([\d,]*)">([\w+/=]*)</script>', text)
        data = np.frombuffer(gzip.decompress(base64.b64decode(match[3])), match[1])
        assert match[2] == ",".join(map(str, array.shape))
        np.testing.assert_array_equal(data.reshape(array.shape), array)


def test_the_document_is_read_back_from_the_page(document: Sample) -> None:
    match = re.search(r'<script type="application/json" id="about">(.*?)</script>', page(document), re.S)
    assert json.loads(match[1]) == document.about


@pytest.mark.parametrize("text", [*HOSTILE, "<!--", "]]>", "\u2028", "\ud800", "\x00"])
def test_document_text_never_becomes_markup(text: str) -> None:
    about = {"title": text, "note": text, "streams": {"s": {"tokens": [text], "special": []}}, "attentions": []}
    written = page(SimpleNamespace(about=about, arrays={}))
    written.encode()
    plain = page(SimpleNamespace(about=about | {"title": "", "note": "", "streams": {}}, arrays={}))
    assert written.count("<") == plain.count("<")
    match = re.search(r'id="about">(.*?)</script>', written, re.S)
    assert json.loads(match[1])["streams"]["s"]["tokens"] == [text]


def test_nan_and_infinity_are_null() -> None:
    written = page(SimpleNamespace(about={"title": "", "means": [float("nan"), np.float32("inf"), 1.5]}, arrays={}))
    assert '"means": [null, null, 1.5]' in written


def test_a_page_contains_no_network_url(document: Sample) -> None:
    encoded = r">[\w+/=]{40,}<|'sha256-[\w+/=]+'"  # in which any letters may come
    links = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(encoded, "><", page(document))))
    assert links <= {"http://www.w3.org"}  # the namespace of SVG, which is not fetched


def test_the_policy_allows_the_one_script_and_nothing_from_outside(document: Sample) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page(document))[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "connect-src 'none'" in policy
    assert "connect-src 'self'" in page(document, live=True)


def test_the_same_document_gives_the_same_page(document: Sample) -> None:
    assert page(document) == page(document)


def test_an_unknown_language_is_refused(document: Sample) -> None:
    with pytest.raises(ValueError, match="lang must be one of en, zh, but is 'fr'"):
        page(document, lang="fr")
    assert '<html lang="zh-CN">' in page(document, lang="zh")


@pytest.mark.parametrize("name", ["words.json", "live_words.json"])
def test_both_languages_have_the_same_words(name: str) -> None:
    words = json.loads(STATIC.joinpath(name).read_text("utf-8"))
    assert list(words["en"]) == list(words["zh"])
    for key, text in words["en"].items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", words["zh"][key])), key
        assert all(words[lang][key].strip() for lang in words), key


def test_the_scripts_use_only_existing_words() -> None:
    words = {
        key
        for name in ("words.json", "live_words.json")
        for key in json.loads(STATIC.joinpath(name).read_text("utf-8"))["en"]
    }
    asked = set()
    for file in STATIC.iterdir():
        if file.name.endswith(".js"):
            text = file.read_text("utf-8")
            assert not any(line.count("`") % 2 for line in text.splitlines()), file.name  # no text over several lines
            asked |= set(re.findall(r'\bt\("([^"]+)"', text))
    assert len(asked) > 40
    assert sorted(name for name in asked if name not in words and not any(w.startswith(name) for w in words)) == []


@pytest.mark.parametrize("entry", ["page", "live", "widget"])
def test_modules_are_bundled_without_imports(entry: str) -> None:
    text = bundle(entry)
    assert not re.search(r"^import\b", text, re.M)
    assert ("export default" in text) == (entry == "widget")
    assert "innerHTML" not in text
    assert "eval(" not in text


def test_script_files_are_small() -> None:
    for file in STATIC.iterdir():
        assert len(file.read_text("utf-8").splitlines()) <= 420, file.name


def test_arrays_are_little_endian() -> None:
    dtype, shape, data = pack_array(np.array([[1.5, -2]], ">f4"))
    assert (dtype, shape) == ("float32", [1, 2])
    assert gzip.decompress(data) == np.array([1.5, -2], "<f4").tobytes()


def test_a_page_of_many_heads_stays_small() -> None:
    sample = long(512, 2, 12, side=64, tops=6)
    assert len(page(sample)) < 4_000_000 / 6 + 150_000  # two layers of twelve, and the scripts once
