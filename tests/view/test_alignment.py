"""Rows of a decoder are labelled with the generated token, and a translation is aligned with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

import regard as rg
from regard.cli.view import make_capture
from regard.predictors import open_model
from regard.tasks import Run
from regard.view import Record, capture_text, pictures
from regard.view.alignment import best_head
from tests.view.browser import Tab, write
from tests.view.models import attended, translated

matplotlib.use("Agg")
DEMO = "He told me that he would help us tomorrow."
WORDS = {"Il": "He", "m": "me", "dit": "told", "nous": "us", "aider": "help", "demain": "tomorrow", ".": "."}


@pytest.fixture(scope="module")
def demo() -> Record:
    """The record of the last step of `make demo`, with the translator of the package."""
    torch.set_num_threads(1)
    translator = Run.open("en-fr")
    return capture_text(translator.model()[0], translator.processor.tokenizer, DEMO)


def test_cross_attention_rows_are_labelled_with_generated_tokens() -> None:
    record = translated().set_tokens(list("abcdefghi"), ["<s>", *"tuvwxy"], special=["<s>"])
    cross, own = record.attention(0, "cross"), record.attention(0, "decoder")
    queries, keys = (record.streams[name] for name in record.stream_names(cross))
    assert queries.tokens == (*"tuvwxy", "?")
    assert keys.tokens == tuple("abcdefghi")
    queries, keys = (record.streams[name] for name in record.stream_names(own))
    assert queries.tokens == ("<s> → t", "t → u", "u → v", "v → w", "w → x", "x → y", "y → ?")
    assert queries.special == keys.special == (0,)
    assert keys.tokens == ("<s>", *"tuvwxy")
    spaced = translated().set_tokens(target=["<s>", "a", "\u202f", " b", *"cde"])
    assert spaced.streams["target → generated"].tokens[1:3] == ("a → ␣", "␣ → b")
    assert record.set_tokens(generated=list("ABCDEFG")).streams["generated"].tokens == tuple("ABCDEFG")
    with pytest.raises(ValueError, match="generated must have 7 tokens, but has 2"):
        record.set_tokens(generated=["a", "b"])


def test_targets_without_decoder_keep_their_labels() -> None:
    """Queries of a detector or of a pooling layer are not a sequence of tokens."""
    record = attended(rg.Attention(), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8))
    record.set_tokens(list("abcdef"), list("wxyz"))
    assert record.stream_names(record.attentions[0]) == ("target", "source")


def test_the_last_label_is_the_most_likely_next_token() -> None:
    torch.manual_seed(0)
    model = rg.models.Transformer(rg.models.TransformerConfig(100, d_model=32, layers=1, heads=4, d_hidden=64)).eval()
    with rg.view.capture(model) as record:
        logits = model(torch.randint(5, 100, (1, 9)), torch.randint(5, 100, (1, 7)))
    assert record.next_token == int(logits[0, -1].argmax())


def test_content_words_of_the_demo_align_with_their_source_words(demo: Record) -> None:
    ax = pictures.alignment(demo)
    rows = [text.get_text() for text in ax.get_yticklabels()]
    columns = [text.get_text() for text in ax.get_xticklabels()]
    assert rows[-1] == "</s>"
    framed = {row: columns[round(patch.get_x() + 0.5)] for row, patch in zip(rows, ax.patches, strict=True)}
    assert {word: framed[word] for word in WORDS} == WORDS
    assert "head" in ax.get_title()
    assert ax.get_ylabel() == "generated"
    number, head = best_head(demo)
    layer = demo.attentions[number].layer
    assert best_head(demo, layer) == (number, head)
    assert pictures.alignment(demo, layer, head).get_title() == ax.get_title()


def test_the_command_labels_rows_the_same_way() -> None:
    record = make_capture(open_model("en-fr"))(DEMO)
    cross = record.attention(2, "cross")
    assert [token.strip() for token in record.streams[record.stream_names(cross)[0]].tokens][-3:] == [
        "demain",
        ".",
        "</s>",
    ]
    assert record.text == DEMO


def test_a_translator_opens_on_its_alignment_with_its_source_sentence(
    browser: Any, demo: Record, tmp_path: Path
) -> None:
    opened = Tab(browser).open(write(tmp_path / "demo.html", demo.html()))
    assert DEMO in opened.page.inner_text(".note")
    assert demo.note in opened.page.inner_text(".note")
    assert opened.page.get_attribute("[role=radio][data-key=cross]", "aria-checked") == "true"
    number, head = best_head(demo)
    assert opened.page.get_attribute(".thumb[data-chosen]", "data-head") == f"{number}/{head}"
    opened.page.click("[data-view=tokens]")
    opened.page.wait_for_selector(".line-faint", state="attached")
    opened.page.hover(".column-query .row:not([hidden]) >> text=aider")
    opened.page.wait_for_selector(".panel-key")
    assert "help" in opened.texts(".panel-key .panel-row")[0]
    opened.page.click("[role=radio][data-key=decoder]")
    opened.page.wait_for_function("() => document.querySelector('.column-query').textContent.includes('nous → aider')")
    opened.page.hover(".column-query .row >> nth=3")
    opened.page.wait_for_selector(".panel-query")  # self-attention: also the queries that attend to it
    opened.context.close()
    assert opened.errors == []
