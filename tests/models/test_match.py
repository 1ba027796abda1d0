"""Image-text matcher: padding, dependence on both inputs, cross-attention in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard as rg
import regard.view
from regard.models import ImageTextMatcher, MatchConfig, TextConfig, VisionConfig

TEXT = TextConfig(vocabulary=50, d_model=16, layers=1, heads=2, d_hidden=24, segments=0, arrangement="pre", eps=1e-5)
VISION = VisionConfig(d_model=16, layers=1, heads=2, d_hidden=24, image=(16, 24), patch=8, channels=1, eps=1e-6)
CONFIG = MatchConfig(TEXT, VISION, layers=2)


def model_of(layers: int = 2) -> ImageTextMatcher:
    torch.manual_seed(0)
    return ImageTextMatcher(replace(CONFIG, layers=layers)).double().eval()


@pytest.mark.parametrize("layers", [0, 2])
def test_padding_of_a_text_has_no_effect(layers: int) -> None:
    model, images = model_of(layers), torch.randn(2, 1, 16, 24).double()
    text = torch.tensor([[4, 5, 6, 1, 1], [7, 8, 9, 3, 2]])
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    output = model(images, text, mask)
    assert output.shape == (2,)
    text[0, 3:] = 40
    torch.testing.assert_close(model(images, text, mask), output, rtol=0, atol=0)
    torch.testing.assert_close(model(images[:1], text[:1, :3])[0], output[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [0, 2])
def test_the_result_depends_on_image_and_text(layers: int) -> None:
    model, images, text = model_of(layers), torch.randn(1, 1, 16, 24).double(), torch.tensor([[4, 5, 6]])
    output = model(images, text)
    assert not torch.allclose(output, model(-images, text), atol=1e-6)
    assert not torch.allclose(output, model(images, text.flip(1)), atol=1e-6)


def test_words_and_patches_attend_to_each_other_in_every_layer() -> None:
    model = model_of()
    with rg.view.capture(model) as record:
        model(torch.randn(1, 1, 16, 24).double(), torch.tensor([[4, 5, 6]]))
    across = [(seen.Q, seen.K) for seen in record.attentions if seen.kind == "cross"]
    assert across == [(3, 7), (7, 3)] * 2
    assert record.inputs["source"].shape == (1, 16, 24)
    assert record.inputs["target"].tolist() == [4, 5, 6]


def test_without_layers_image_and_text_are_encoded_independently() -> None:
    model = model_of(0)
    with rg.view.capture(model) as record:
        model(torch.randn(1, 1, 16, 24).double(), torch.tensor([[4, 5, 6]]))
    assert [seen.kind for seen in record.attentions] == ["encoder", "encoder"]


def test_attention_of_a_word_is_smooth_over_the_image() -> None:
    model = model_of()
    with rg.view.capture(model) as record:
        model(torch.randn(1, 1, 16, 24).double(), torch.tensor([[4, 5, 6]]))
    record.set_image(record.inputs["source"], model.config.grid, first=1)
    cross = next(seen.name for seen in record.attentions if seen.kind == "cross")
    assert not rg.view.pictures.patches(record, cross, query=2).patches
    assert rg.view.pictures.patches(record, record.attentions[0].name, query=2).patches


def test_mismatched_inputs_raise() -> None:
    with pytest.raises(ValueError, match="equal d_model, got 16 and 32"):
        ImageTextMatcher(MatchConfig(TEXT, replace(VISION, d_model=32)))
    with pytest.raises(ValueError, match="equally many, got 2 and 1"):
        model_of()(torch.randn(2, 1, 16, 24).double(), torch.tensor([[4, 5]]))


@pytest.mark.parametrize("layers", [0, 2])
def test_saved_matcher_loads_unchanged(tmp_path: Path, layers: int) -> None:
    model, images, text = model_of(layers), torch.randn(1, 1, 16, 24).double(), torch.tensor([[4, 5, 6]])
    rg.save(model, tmp_path)
    again = rg.load(tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(images, text), model(images, text), rtol=0, atol=0)
