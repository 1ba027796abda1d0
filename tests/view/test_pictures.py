"""Pictures show the exact numbers, draw into given axes, and support all scripts."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import regard as rg
from regard.view import capture, capture_image, pictures, token_labels
from regard.view.token_labels import font_families, label
from tests.view.models import attended, translated

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_a_heat_map_shows_weights_and_tokens() -> None:
    record = translated().set_tokens(list("abcdefghi"), target=["<s>", " to", "$x$", "\n", *"def"])
    _, axes = plt.subplots()
    ax = pictures.heatmap(record, 1, 2, kind="cross", ax=axes)
    assert ax is axes
    np.testing.assert_allclose(ax.images[0].get_array(), record.weights(1, 2, kind="cross"), atol=1e-6)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["to", "$x$", "⏎", *"def", "?"]
    assert not ax.get_yticklabels()[1].get_parse_math()
    part = pictures.heatmap(record, 0, kind="encoder", rows=slice(2, 5), columns=[0, 8])
    expected = record.weights(0, rows=slice(2, 5), columns=[0, 8], kind="encoder").mean(0)
    np.testing.assert_allclose(part.images[0].get_array(), expected, atol=1e-6)


def test_every_picture_draws_into_given_axes() -> None:
    record = translated().set_spectrogram(torch.randn(30, 8), 1.5)
    for draw in (
        lambda ax: pictures.alignment(record, ax=ax),
        lambda ax: pictures.head_grid(record, "encoder", ax=ax),
        lambda ax: pictures.profile(record, "distance", ax=ax),
        lambda ax: pictures.spectrogram(record, ax=ax),
        lambda ax: pictures.mask(rg.causal(), 8, ax=ax),
    ):
        _, axes = plt.subplots()
        assert draw(axes) is axes
        assert axes.images


def test_coverage_shades_the_source_by_total_cross_attention() -> None:
    record = translated().set_tokens(["One", " long", "\n", " $x$", *"efghi"])
    ax = pictures.coverage(record, letters=10)
    assert [text.get_text() for text in ax.texts] == ["One", " long", "⏎", " $x$", *"efghi"]
    looked = torch.stack([record.weights(n, kind="cross").sum(1).mean(0) for n in (0, 1)]).mean(0)
    shades = [-sum(patch.get_facecolor()[:3]) for patch in ax.patches]
    assert np.argsort(shades).tolist() == looked.argsort().tolist()
    assert all(patch.get_x() + patch.get_width() <= 10 for patch in ax.patches)
    with pytest.raises(ValueError, match="there is no cross-attention"):
        pictures.coverage(rg.view.Record("nothing"))


@pytest.mark.parametrize("stream", ["source", "target"])
def test_time_is_horizontal_for_recognition_and_synthesis(stream: str) -> None:
    record = translated().set_spectrogram(torch.randn(30, 8), 1.5, stream=stream)
    result = pictures.spectrogram(record, 1).images[0].get_array()
    weights = record.weights(1, kind="cross").mean(0)
    np.testing.assert_allclose(result, weights if stream == "source" else weights.mT, atol=1e-6)


def test_a_profile_shows_means() -> None:
    record = translated()
    actual = pictures.profile(record, "first", kind="cross").images[0].get_array()
    expected = [record.weights(n, kind="cross")[:, :, 0].mean(-1) for n in (0, 1)]
    np.testing.assert_allclose(actual, torch.stack(expected), atol=1e-6)
    with pytest.raises(ValueError, match="measure must be one of entropy, distance, max_logit, first, but is 'x'"):
        pictures.profile(record, "x")


def test_a_profile_shows_the_batch_row_that_is_selected() -> None:
    torch.manual_seed(0)
    model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    with torch.no_grad(), capture(model) as record:
        model(torch.randint(100, (2, 9)))
    actual = pictures.profile(record.select(1), "first").images[0].get_array()
    expected = [record.weights(n, batch=1)[:, :, 0].mean(-1) for n in (0, 1)]
    np.testing.assert_allclose(actual, torch.stack(expected), atol=1e-6)


def test_an_alignment_frames_the_largest_weights() -> None:
    record = translated()
    for head in (1, 3):
        ax = pictures.alignment(record, 0, head)
        best = record.weights(0, head, kind="cross").argmax(-1).tolist()
        assert [patch.get_x() + 0.5 for patch in ax.patches] == best


def test_patches_cover_the_image(tmp_path) -> None:
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)).save(tmp_path / "in.jpg")
    config = rg.models.VisionConfig(d_model=16, layers=1, heads=2, d_hidden=16, image=(16, 24), patch=8, classes=3)
    record = capture_image(rg.models.ImageClassifier(config).eval(), tmp_path / "in.jpg")
    assert record.image["grid"] == [2, 3]
    assert record.streams["source"].tokens == ("[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2")
    assert record.note.startswith("class ")
    assert pictures.patches(record, 0, 1, query=4).images[0].get_array().shape == (16, 24, 3)
    with pytest.raises(ValueError, match="has no image"):
        pictures.patches(translated(), "0")


@pytest.mark.parametrize("size", [20, 1100])
def test_a_mask_is_drawn(size: int) -> None:
    mask = rg.causal() & rg.window(3, 0)
    shares = pictures.mask(mask, size).images[0].get_array()
    if size == 20:
        expected = [[float(0 <= i - j <= 3) for j in range(size)] for i in range(size)]
        np.testing.assert_array_equal(shares, expected)
    else:
        assert shares.shape == (512, 512)
        assert (shares * (size / 512) ** 2).sum() == pytest.approx(4 * size - 6, rel=0.02)
    with pytest.raises(TypeError, match=r"pattern must be a mask.*try dense"):
        pictures.mask(torch.ones(2, 2, dtype=torch.bool))


def test_a_kind_that_was_not_captured_raises() -> None:
    model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=16, layers=1, heads=2, d_hidden=16)).eval()
    with rg.view.capture(model) as record:
        model(torch.tensor([[5, 6, 7]]))
    for draw in (pictures.profile, pictures.head_grid):
        with pytest.raises(ValueError, match="no attention of kind 'cross' was captured; the record has encoder"):
            draw(record, kind="cross")


@pytest.mark.parametrize("text", ["注意力", "日本語", "שלום", "مرحبا", "Привет"])
def test_letters_of_every_script_have_a_font(text: str, tmp_path) -> None:
    if text in ("注意力", "日本語") and not has_chinese():
        pytest.skip("no font with these letters is installed")
    record = translated().set_tokens([text] * 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns about letters without a font
        pictures.heatmap(record, 0, 0, kind="encoder").figure.savefig(tmp_path / "out.png")


def test_labels_are_short_and_never_empty() -> None:
    assert label(" cat") == "cat"
    assert label("   ") == "␣"
    assert label("a" * 40) == "a" * 13 + "…"


def has_chinese() -> bool:
    """Return whether fontconfig, which the code under test does not use, lists a font with Chinese letters."""
    listed = subprocess.run(["fc-list", ":lang=zh", "family"], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip())


@pytest.mark.skipif(shutil.which("fc-list") is None, reason="no fontconfig")
def test_coverage_has_letters_of_every_script(tmp_path) -> None:
    tokens = ["注意力", "机制", *"cdefghi"]
    record = translated().set_tokens(tokens)
    record.note = "注意力 costs $5 or $6"
    if not has_chinese():
        with pytest.warns(UserWarning, match="no installed font has"):
            pictures.coverage(record, letters=10)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns about letters without a font
        ax = pictures.coverage(record, letters=10)
        ax.figure.savefig(tmp_path / "out.png")
    assert ax.texts[0].get_fontfamily() == ["monospace", *font_families(frozenset("".join(tokens)))]
    assert [patch.get_width() for patch in ax.patches[:3]] == [6, 4, 1]  # letters that are twice as wide
    assert ax.get_title() == record.note


def test_a_letter_without_a_font_is_a_box_and_one_warning(tmp_path) -> None:
    record = translated().set_tokens(["\ufdd0", "\ufdd1x", *"cdefghi"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ax, texts in (
            (pictures.coverage(record), lambda ax: [text.get_text() for text in ax.texts]),
            (pictures.heatmap(record, 0, 0, kind="encoder"), lambda ax: [t.get_text() for t in ax.get_xticklabels()]),
        ):
            ax.figure.savefig(tmp_path / "out.png")
            assert texts(ax)[:3] == ["□", "□x", "c"]
    messages = {str(each.message) for each in caught}
    assert len(messages) == 1
    assert "fonts-noto-cjk" in messages.pop()


def test_a_family_without_a_regular_font_is_used(monkeypatch) -> None:
    """For example, WenQuanYi Zen Hei has only weight 500."""
    from matplotlib.font_manager import FontEntry, fontManager

    monkeypatch.setattr(
        token_labels, "_letters", lambda path: frozenset([0xE000]) if path == "medium.ttf" else frozenset()
    )
    monkeypatch.setattr(token_labels, "_add_new_fonts", lambda: None)
    entries = [FontEntry(fname="black.ttf", name="A", weight=900), FontEntry(fname="medium.ttf", name="A", weight=500)]
    monkeypatch.setattr(fontManager, "ttflist", entries)
    token_labels._cover.cache_clear()
    assert token_labels._cover(frozenset("\ue000")) == (["A"], frozenset())
    token_labels._cover.cache_clear()


def drawn_pictures() -> dict[str, Any]:
    record = translated().set_tokens(list("abcdefghi"), ["<s>", "t", "u", "v", "w", "x", "a long last word"])
    record.note = "A note that is much longer than the picture is wide, which happens to every summary of a text. " * 2
    record.title = "A model with a title that is longer than its picture is wide, and then some"
    sound = translated().set_spectrogram(torch.randn(30, 8), 1.5)
    image = attended(rg.Attention(), torch.randn(1, 2, 13, 8)).set_image(torch.rand(3, 30, 40), (3, 4), first=1)
    long = attended(rg.Attention(mask=rg.causal()), torch.randn(1, 2, 600, 8))
    return {
        "heatmap": lambda: pictures.heatmap(record, 0, 0, kind="decoder"),
        "pooled heatmap": lambda: pictures.heatmap(long, 0),
        "alignment": lambda: pictures.alignment(record),
        "coverage": lambda: pictures.coverage(record),
        "head grid": lambda: pictures.head_grid(record),
        "profile": lambda: pictures.profile(record, "max_logit"),
        "patches": lambda: pictures.patches(image, 0, 1, query=4),
        "spectrogram": lambda: pictures.spectrogram(sound),
        "pooled mask": lambda: pictures.mask(rg.causal() & rg.window(300, 0), 1100),
    }


@pytest.mark.parametrize("name", drawn_pictures())
def test_pictures_have_a_colour_bar_and_nothing_is_cut_off(name: str) -> None:
    figure = drawn_pictures()[name]().figure
    figure.canvas.draw()
    axes = [each for ax in figure.axes for each in (ax, *ax.child_axes)]
    labels = [ax.get_ylabel() or ax.get_xlabel() for ax in axes if ax.get_label() == "<colorbar>"]
    assert len(labels) == 1
    assert labels[0] or name == "profile"  # its title describes the numbers
    for ax in axes:
        box, page = ax.get_tightbbox(figure.canvas.get_renderer()), figure.bbox
        assert box.x0 >= page.x0 - 1, ax
        assert box.y0 >= page.y0 - 1, ax
        assert box.x1 <= page.x1 + 1, ax
        assert box.y1 <= page.y1 + 1, ax


def test_titles_name_kind_layer_and_head() -> None:
    record = translated()
    assert pictures.heatmap(record, 1, 2, kind="cross").get_title() == "cross-attention, layer 1, head 2"
    assert pictures.heatmap(record, 1, kind="decoder").get_title() == "decoder self-attention, layer 1, mean over heads"


def test_pooled_pictures_start_at_zero_and_have_a_bar() -> None:
    record = attended(rg.Attention(), torch.randn(1, 1, 600, 4))
    ax = pictures.heatmap(record, 0)
    drawn = ax.images[0]
    assert drawn.get_clim()[0] == 0
    assert drawn.colorbar is not None
    means = torch.nn.functional.adaptive_avg_pool2d(record.weights(0), 512)[0]
    np.testing.assert_allclose(drawn.get_array(), means, rtol=1e-4)
    ax = pictures.spectrogram(translated().set_spectrogram(torch.randn(30, 8), 1.5))
    assert ax.images[0].get_clim()[0] == 0
    assert ax.images[0].colorbar is not None


def test_a_profile_shows_the_heads_that_were_chosen() -> None:
    record = translated()
    record.heads = (1, 3)
    ax = pictures.profile(record, kind="encoder")
    expected = [record.statistics[f"encoder.layers.{n}.attention"].entropy[0, [1, 3]].mean(-1) for n in (0, 1)]
    np.testing.assert_allclose(ax.images[0].get_array(), torch.stack(expected), rtol=1e-5)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "3"]
    with pytest.raises(ValueError, match="cross-attention has no distance"):
        pictures.profile(record, "distance", "cross")
