"""Vision Transformers: sizes, positions, masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard
from regard.models import ImageClassifier, VisionConfig, VisionTransformer

CONFIG = VisionConfig(d_model=32, layers=2, heads=4, d_hidden=48, image=(24, 40), patch=8, classes=7)


def model_of(config: VisionConfig = CONFIG) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(config).eval()


@pytest.mark.parametrize(("size", "patches"), [((24, 40), 15), ((40, 24), 15), ((8, 8), 1), ((31, 47), 15)])
def test_the_output_has_one_state_per_patch_and_the_class_token(size: tuple[int, int], patches: int) -> None:
    hidden = model_of()(torch.randn(2, 3, *size))
    assert hidden.shape == (2, 1 + patches, 32)
    assert hidden.isfinite().all()


def test_patches_are_embedded_in_row_major_order() -> None:
    model = model_of(replace(CONFIG, layers=0))
    images = torch.randn(1, 3, 24, 40)
    before = model(images)
    images[:, :, 8:16, 24:32] += 1  # row 1, column 3 of a grid of 3 x 5
    changed = (model(images) != before).any(-1)[0].nonzero()[:, 0]
    assert changed.tolist() == [1 + 1 * 5 + 3]


def test_positions_are_interpolated_for_other_sizes() -> None:
    model = model_of()
    rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij")
    with torch.no_grad():
        model.position[1:, 0], model.position[1:, 1] = rows.flatten(), columns.flatten()
    table = model.positions((6, 5))[1:, :2].unflatten(0, (6, 5))
    assert (table[..., 0].diff(dim=0) > 0).all()
    torch.testing.assert_close(table[..., 0], table[:, :1, 0].expand(6, 5))
    torch.testing.assert_close(table[..., 1], columns[:1].expand(6, 5))
    torch.testing.assert_close(model.positions((6, 5))[0], model.position[0])
    assert model.positions((3, 5)) is model.position


def test_masked_patches_do_not_reach_the_class_token() -> None:
    torch.manual_seed(0)
    model, images, mask = ImageClassifier(CONFIG).eval(), torch.randn(2, 3, 24, 40), torch.ones(2, 15).bool()
    torch.testing.assert_close(model(images, mask), model(images))  # the class token is never masked
    mask[:, 12:] = mask[1, 3] = False
    before = model(images, mask)
    assert before.shape == (2, 7)
    assert not torch.allclose(before, model(images), atol=1e-4)
    images[:, :, 16:, 16:] += 1
    images[1, :, :8, 24:32] = 100
    torch.testing.assert_close(model(images, mask), before)


def test_all_parameters_get_a_gradient() -> None:
    torch.manual_seed(0)
    model = ImageClassifier(replace(CONFIG, dropout=0.1)).train()
    model(torch.randn(2, 3, 40, 40)).square().sum().backward()
    assert [name for name, weight in model.named_parameters() if not weight.grad.abs().sum() > 0] == []


def test_invalid_images_raise() -> None:
    with pytest.raises(ValueError, match=r"images must be \(B, 3, height, width\) of at least 8 x 8 pixels, got"):
        model_of()(torch.randn(2, 1, 24, 40))
    with pytest.raises(ValueError, match=r"at least 8 x 8 pixels, got \(2, 3, 7, 40\)"):
        model_of()(torch.randn(2, 3, 7, 40))
    with pytest.raises(ValueError, match=r"multiple of the patch size 8 in each direction, got \(20, 40\)"):
        VisionTransformer(replace(CONFIG, image=(20, 40)))


def test_a_stem_does_not_change_the_number_of_patches(tmp_path: Path) -> None:
    config = replace(CONFIG, stem=(8, 16), channels=1)
    torch.manual_seed(0)
    model = ImageClassifier(config).eval()
    assert model.encoder.patches.kernel_size == (2, 2)
    images = torch.randn(2, 1, 24, 40)
    assert model.encoder(images).shape == (2, 1 + 15, 32)
    regard.save(model, tmp_path)
    torch.testing.assert_close(regard.load(tmp_path)(images), model(images))
    with pytest.raises(ValueError, match="patch must be a multiple of 16 for a stem of 4 convolutions, got 8"):
        VisionTransformer(replace(CONFIG, stem=(8, 8, 8, 8)))
