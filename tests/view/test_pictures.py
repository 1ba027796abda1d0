"""Pictures show the numbers, take axes, and have the letters of every script."""

from __future__ import annotations

import warnings

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import regard as rg
from regard.view import look_at_image, pictures
from regard.view.lettering import families, label
from tests.view.models import attended, translated

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_a_heat_map_shows_weights_and_tokens() -> None:
    record = translated().tokens(list("abcdefghi"), target=["<s>", " to", "$x$", "\n", *"def"])
    _, mine = plt.subplots()
    ax = pictures.heatmap(record, 1, 2, kind="cross", ax=mine)
    assert ax is mine
    np.testing.assert_allclose(ax.images[0].get_array(), record.weights(1, 2, kind="cross"), atol=1e-6)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["to", "$x$", "⏎", *"def", "?"]
    assert not ax.get_yticklabels()[1].get_parse_math()
    part = pictures.heatmap(record, 0, kind="encoder", rows=slice(2, 5), columns=[0, 8])
    expected = record.weights(0, rows=slice(2, 5), columns=[0, 8], kind="encoder").mean(0)
    np.testing.assert_allclose(part.images[0].get_array(), expected, atol=1e-6)


def test_every_picture_draws_into_the_axes_that_it_is_given() -> None:
    record = translated().over_spectrogram(torch.randn(30, 8), 1.5)
    for draw in (
        lambda ax: pictures.alignment(record, ax=ax),
        lambda ax: pictures.head_grid(record, "encoder", ax=ax),
        lambda ax: pictures.profile(record, "distance", ax=ax),
        lambda ax: pictures.spectrogram(record, ax=ax),
        lambda ax: pictures.mask(rg.causal(), 8, ax=ax),
    ):
        _, mine = plt.subplots()
        assert draw(mine) is mine
        assert mine.images


def test_coverage_is_the_text_with_what_all_of_the_target_looked_at() -> None:
    record = translated().tokens(["One", " long", "\n", " $x$", *"efghi"])
    ax = pictures.coverage(record, letters=10)
    assert [text.get_text() for text in ax.texts] == ["One", " long", "⏎", " $x$", *"efghi"]
    looked = torch.stack([record.weights(n, kind="cross").sum(1).mean(0) for n in (0, 1)]).mean(0)
    shades = [-sum(patch.get_facecolor()[:3]) for patch in ax.patches]
    assert np.argsort(shades).tolist() == looked.argsort().tolist()
    assert all(patch.get_x() + patch.get_width() <= 10 for patch in ax.patches)
    with pytest.raises(ValueError, match="there is no cross-attention"):
        pictures.coverage(rg.view.Record("nothing"))


@pytest.mark.parametrize("stream", ["source", "target"])
def test_time_goes_across_whether_it_is_heard_or_said(stream: str) -> None:
    record = translated().over_spectrogram(torch.randn(30, 8), 1.5, stream=stream)
    found = pictures.spectrogram(record, 1).images[0].get_array()
    weights = record.weights(1, kind="cross").mean(0)
    np.testing.assert_allclose(found, weights if stream == "source" else weights.mT, atol=1e-6)


def test_a_profile_shows_means() -> None:
    record = translated()
    found = pictures.profile(record, "first", kind="cross").images[0].get_array()
    expected = [record.weights(n, kind="cross")[:, :, 0].mean(-1) for n in (0, 1)]
    np.testing.assert_allclose(found, torch.stack(expected), atol=1e-6)
    with pytest.raises(ValueError, match="measure must be one of entropy, distance, max_logit, first, but is 'x'"):
        pictures.profile(record, "x")


def test_an_alignment_frames_the_strongest() -> None:
    record = translated()
    for head in (1, 3):
        ax = pictures.alignment(record, 0, head)
        best = record.weights(0, head, kind="cross").argmax(-1).tolist()
        assert [patch.get_x() + 0.5 for patch in ax.patches] == best


def test_patches_lie_over_the_image(tmp_path) -> None:
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)).save(tmp_path / "in.jpg")
    config = rg.models.VisionConfig(width=16, layers=1, heads=2, hidden=16, image=(16, 24), patch=8, classes=3)
    record = look_at_image(rg.models.ImageClassifier(config).eval(), tmp_path / "in.jpg")
    assert record.image["grid"] == [2, 3]
    assert record.streams["source"].tokens == ("[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2")
    assert record.note.startswith("class ")
    assert pictures.patches(record, 0, 1, query=4).images[0].get_array().shape == (16, 24, 3)
    with pytest.raises(ValueError, match="not of an image"):
        pictures.patches(translated(), "0")


@pytest.mark.parametrize("size", [20, 1100])
def test_the_mask_itself(size: int) -> None:
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


def test_a_kind_that_was_not_captured_is_told() -> None:
    model = rg.models.TextEncoder(rg.models.TextConfig(100, width=16, layers=1, heads=2, hidden=16)).eval()
    with rg.view.capture(model) as record:
        model(torch.tensor([[5, 6, 7]]))
    for draw in (pictures.profile, pictures.head_grid):
        with pytest.raises(ValueError, match="nothing of kind 'cross' was captured; there is encoder"):
            draw(record, kind="cross")


@pytest.mark.parametrize("text", ["注意力", "日本語", "שלום", "مرحبا", "Привет"])
def test_letters_of_every_script_have_a_font(text: str, tmp_path) -> None:
    from matplotlib.font_manager import fontManager

    families(frozenset(text))
    if text in ("注意力", "日本語") and not any("CJK" in font.name for font in fontManager.ttflist):
        pytest.skip("no font with these letters is installed")
    record = translated().tokens([text] * 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of a letter that no font has
        pictures.heatmap(record, 0, 0, kind="encoder").figure.savefig(tmp_path / "out.png")


def test_labels_are_short_and_never_nothing() -> None:
    assert label(" cat") == "cat"
    assert label("   ") == "␣"
    assert label("a" * 40) == "a" * 13 + "…"


def test_coverage_has_letters_of_every_script(tmp_path) -> None:
    from matplotlib.font_manager import fontManager

    tokens = ["注意力", "机制", *"cdefghi"]
    ax = pictures.coverage(translated().tokens(tokens), letters=10)
    assert ax.texts[0].get_fontfamily() == ["monospace", *families(frozenset("".join(tokens)))]
    assert [patch.get_width() for patch in ax.patches[:3]] == [6, 4, 1]  # letters that are twice as wide
    if any("CJK" in font.name for font in fontManager.ttflist):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # matplotlib warns of a letter that no font has
            ax.figure.savefig(tmp_path / "out.png")


def test_pooled_pictures_start_at_zero_and_have_a_bar() -> None:
    record = attended(rg.Attention(), torch.randn(1, 1, 600, 4))
    ax = pictures.heatmap(record, 0)
    drawn = ax.images[0]
    assert drawn.get_clim()[0] == 0
    assert drawn.colorbar is not None
    means = torch.nn.functional.adaptive_avg_pool2d(record.weights(0), 512)[0]
    np.testing.assert_allclose(drawn.get_array(), means, rtol=1e-4)
    ax = pictures.spectrogram(translated().over_spectrogram(torch.randn(30, 8), 1.5))
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
