"""DETR: boxes and matching compared with brute force, the network, the loss."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.models import RESNETS, Detr, DetrConfig, Objects, ResNet, ResNetConfig, SetLoss
from regard.models.boxes import giou, to_corners
from regard.models.detection import local_sine_positions, sine_positions
from regard.models.resnet import FrozenBatchNorm

BACKBONE = ResNetConfig(stem=8, widths=(8, 16), depths=(1, 2), bottleneck=False, norm="batch")
CONFIG = DetrConfig(
    classes=4, queries=6, d_model=32, layers=2, heads=4, d_hidden=48, decoder_layers=3, backbone=BACKBONE
)


def model_of(config: DetrConfig = CONFIG) -> Detr:
    torch.manual_seed(0)
    return Detr(config).eval()


def objects_of(*counts: int) -> list[Objects]:
    draw = torch.Generator().manual_seed(2)
    return [
        Objects(torch.randint(0, 4, (n,), generator=draw), torch.rand(n, 4, generator=draw) * 0.4 + 0.3) for n in counts
    ]


def cells(box: list[int]) -> set[tuple[int, int]]:
    left, top, right, bottom = box
    return {(x, y) for x in range(left, right) for y in range(top, bottom)}


def test_giou_matches_counting_cells() -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(0, 6, (40, 2), generator=draw)
    boxes = torch.cat((start, start + torch.randint(1, 5, (40, 2), generator=draw)), 1)
    result = giou(boxes[:, None].double(), boxes.double())
    for i, one in enumerate(boxes.tolist()):
        for j, other in enumerate(boxes.tolist()):
            shared, union = cells(one) & cells(other), cells(one) | cells(other)
            x, y = zip(*union, strict=True)
            hull = (max(x) - min(x) + 1) * (max(y) - min(y) + 1)
            assert result[i, j].item() == pytest.approx(len(shared) / len(union) - (hull - len(union)) / hull)


def test_boxes_without_area_have_finite_giou_and_gradients() -> None:
    boxes = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.1, 0.5, 0.4, 0.5], [0.0, 0.0, 1.0, 1.0]], requires_grad=True)
    result = giou(boxes[:, None], boxes)
    assert result.isfinite().all()
    result.sum().backward()
    assert boxes.grad.isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_matching_has_minimal_cost(count: int) -> None:
    torch.manual_seed(count)
    logits, boxes, loss = torch.randn(2, 4, 5), torch.rand(2, 4, 4), SetLoss()
    objects = objects_of(count, max(count - 1, 0))
    for image, (query, which) in enumerate(loss.match(logits, boxes, objects)):
        labels, true = objects[image]
        cost = torch.zeros(4, len(labels))
        for q, n in itertools.product(range(4), range(len(labels))):
            overlap = giou(to_corners(boxes[image, q]), to_corners(true[n]))
            distance = (boxes[image, q] - true[n]).abs().sum()
            cost[q, n] = 5 * distance - 2 * overlap - logits[image, q].softmax(-1)[labels[n]]
        pairs = min(4, len(labels))
        assert len(query) == len(which) == len(set(query.tolist())) == len(set(which.tolist())) == pairs
        if len(labels) <= 4:
            every = [cost[list(chosen), range(pairs)].sum() for chosen in itertools.permutations(range(4), pairs)]
        else:
            every = [cost[range(4), list(chosen)].sum() for chosen in itertools.permutations(range(len(labels)), 4)]
        torch.testing.assert_close(cost[query, which].sum(), torch.stack(every).min())


def test_the_loss_matches_its_formula() -> None:
    torch.manual_seed(0)
    logits, boxes, loss, objects = (
        torch.randn(3, 4, 5),
        torch.rand(3, 4, 4),
        SetLoss(no_object=0.2),
        objects_of(2, 0, 1),
    )
    label, weights, distance, overlap = 0.0, 0.0, 0.0, 0.0
    for image, (query, which) in enumerate(loss.match(logits, boxes, objects)):
        matched = dict(zip(query.tolist(), which.tolist(), strict=True))
        for q in range(4):
            true, weight = 4, 0.2
            if q in matched:
                true, weight = int(objects[image].labels[matched[q]]), 1.0
                box = objects[image].boxes[matched[q]]
                distance += (boxes[image, q] - box).abs().sum() / 3
                overlap += (1 - giou(to_corners(boxes[image, q]), to_corners(box))) / 3
            label, weights = label - weight * logits[image, q].log_softmax(-1)[true], weights + weight
    actual = loss(logits, boxes, objects)
    torch.testing.assert_close(actual.label, label / weights)
    torch.testing.assert_close(actual.box, distance)
    torch.testing.assert_close(actual.giou, overlap)
    torch.testing.assert_close(loss.total(actual), label / weights + 5 * distance + 2 * overlap)


def test_a_batch_without_objects_has_a_loss() -> None:
    losses = SetLoss()(torch.randn(2, 4, 5), torch.rand(2, 4, 4), objects_of(0, 0))
    assert losses.label > 0
    assert losses.box == losses.giou == 0


def test_diverged_predictions_are_matched_last() -> None:
    logits, boxes = torch.randn(1, 4, 5), torch.rand(1, 4, 4)
    logits[0, 0], boxes[0, 1] = float("nan"), float("inf")
    [(query, _)] = SetLoss().match(logits, boxes, objects_of(2))
    assert sorted(query.tolist()) == [2, 3]


def test_the_loss_counts_every_layer_in_training_and_the_last_otherwise() -> None:
    model, images, objects, by = (
        model_of(replace(CONFIG, dropout=0.0)),
        torch.randn(2, 3, 64, 48),
        objects_of(2, 1),
        SetLoss(),
    )
    model.backbone.eval()
    last = by.total(by(*model(images), objects))
    torch.testing.assert_close(model.loss(images, objects), last)
    model.encoder.train(), model.decoder.train()
    model.training = True
    states = model.hidden(images)
    assert len(states) == 3
    torch.testing.assert_close(by.total(by(*model.heads(states[-1]), objects)), last)
    torch.testing.assert_close(
        model.loss(images, objects), torch.stack([by.total(by(*model.heads(x), objects)) for x in states]).sum()
    )


def test_all_parameters_get_a_gradient() -> None:
    model = model_of().train()
    for weight in model.parameters():
        if weight.dim() == 1:  # parameters that start at 0 block gradients in the first step
            weight.data += 0.1 * torch.randn_like(weight)
    model.loss(torch.randn(2, 3, 64, 48), objects_of(2, 1)).backward()
    without = [name for name, weight in model.named_parameters() if not weight.grad.abs().sum() > 0]
    # The decoder input is zeros, so the first self-attention has equal values and no gradient of queries and keys.
    assert set(without) <= {"decoder.layers.0.attention.qkv.weight"}
    frozen = model_of(replace(CONFIG, backbone=replace(BACKBONE, norm="frozen"))).train()
    assert not [name for name, _ in frozen.backbone.named_parameters() if "norm" in name]


def test_a_few_steps_of_training_find_an_object() -> None:
    config = replace(CONFIG, layers=1, decoder_layers=1, dropout=0.0, backbone=replace(BACKBONE, depths=(1, 1)))
    model = model_of(config).train()
    images, boxes = torch.zeros(4, 3, 32, 32), torch.tensor([[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]])
    for image, (x, y) in zip(images, boxes, strict=True):
        image[:, int(y * 32) - 6 : int(y * 32) + 6, int(x * 32) - 6 : int(x * 32) + 6] = 1
    objects = [Objects(torch.tensor([n]), torch.tensor([[*box, 0.375, 0.375]])) for n, box in enumerate(boxes.tolist())]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(images, objects)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    detected = model.detect(images, threshold=0.0)
    assert [int(labels[0]) for labels, _, _ in detected] == [0, 1, 2, 3]


def test_anchor_queries_start_on_a_grid_and_attend_nearby(tmp_path: Path) -> None:
    model = model_of(replace(CONFIG, queries=4, anchors=True, dropout=0.0, arrangement="pre"))
    with torch.no_grad():
        _, boxes = model(torch.randn(2, 3, 64, 64))
    grid = torch.tensor([[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]])
    torch.testing.assert_close(boxes[..., :2], grid.expand(2, -1, -1))
    cross = model.decoder.layers[0].cross
    position = local_sine_positions(torch.zeros(1, 1, 8, 8), 32)[0]
    query = cross.qkv(position[[9, 54]])[:, :32]  # at (1, 1) and at (6, 6)
    nearest = (query @ cross.qkv(position)[:, 32:64].T).view(2, 8, 8)
    assert nearest[0, :4, :4].mean() > nearest[0, 4:, 4:].mean()
    assert nearest[1, 4:, 4:].mean() > nearest[1, :4, :4].mean()
    regard.save(model, tmp_path)
    assert torch.equal(regard.load(tmp_path).points, model.points)


def test_detections_are_sorted_thresholded_corner_boxes() -> None:
    model, images = model_of(), torch.randn(2, 3, 64, 48)
    logits, boxes = model(images)
    scores, labels = logits.softmax(-1)[..., :-1].max(-1)
    threshold = scores.flatten().sort().values[4:6].mean().item()
    for n, (label, score, box) in enumerate(model.detect(images, threshold=threshold)):
        kept = scores[n] >= threshold
        assert len(score) == kept.sum()
        assert (score.diff() <= 0).all()
        torch.testing.assert_close(score.sort().values, scores[n][kept].sort().values)
        best = scores[n].argmax()
        assert label[0] == labels[n, best]
        torch.testing.assert_close(box[0], to_corners(boxes[n, best]))


def test_masked_pixels_do_not_reach_the_result() -> None:
    model, images = model_of(), torch.randn(2, 3, 64, 128)
    mask = torch.ones(2, 64, 128).bool()
    mask[1, :, 32:] = False
    before, bare = model(images, mask), model(images)
    images[1, :, :, 100:] += 5  # outside of the receptive field
    for one, other in zip(model(images, mask), before, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(model(images)[1][1], bare[1][1], atol=1e-4)
    with pytest.raises(ValueError, match=r"mask must be bool of \(B, height, width\) = \(2, 64, 128\)"):
        model(images, mask[:, ::2])


def test_positions_of_a_masked_map_match_those_of_its_real_part() -> None:
    mask = torch.zeros(2, 5, 7, dtype=torch.bool)
    mask[0, :3, :4] = mask[1] = True
    table = sine_positions(torch.zeros(2, 3, 5, 7), 16, mask).unflatten(1, (5, 7))
    small = sine_positions(torch.zeros(1, 3, 3, 4), 16).unflatten(1, (3, 4))
    torch.testing.assert_close(table[0, :3, :4], small[0])
    assert torch.equal(table[1, 0, :, :8], table[1, 0, :1, :8].expand(7, 8))  # the first half depends on the row only
    assert torch.equal(table[1, :, 0, 8:], table[1, :1, 0, 8:].expand(5, 8))


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 11_176_512), ("resnet34", 21_284_672), ("resnet50", 23_508_032)]
)
def test_a_backbone_has_the_weights_and_the_stride_of_its_name(name: str, count: int) -> None:
    with torch.device("meta"):
        model = ResNet(replace(RESNETS[name], norm="batch"))
        features = model(torch.empty(1, 3, 65, 96))
    assert sum(weight.numel() for weight in model.parameters()) == count
    assert features.shape == (1, RESNETS[name].widths[-1], 3, 3)


def test_frozen_batch_norm_matches_batch_norm_in_eval_mode() -> None:
    learned, frozen = torch.nn.BatchNorm2d(3).eval(), FrozenBatchNorm(3).train()
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            getattr(learned, name).uniform_(0.5, 2.0)
    missing = frozen.load_state_dict(learned.state_dict(), strict=False)
    assert not missing.missing_keys
    images: Tensor = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(frozen(images), learned(images))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_new_backbone_keeps_features_bounded_at_any_depth(norm: str) -> None:
    torch.manual_seed(0)
    config = ResNetConfig(stem=8, widths=(8, 24), depths=(2, 12), bottleneck=False, norm=norm)
    features = ResNet(config)(torch.randn(2, 3, 64, 64))
    assert features.shape == (2, 24, 8, 8)
    assert features.square().mean() < 4


def test_matching_without_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[detect\]'"):
        SetLoss().match(torch.randn(1, 4, 5), torch.rand(1, 4, 4), objects_of(2))


def test_queries_with_anchors_are_computed_in_bfloat16() -> None:
    model = model_of(replace(CONFIG, anchors=True, backbone=replace(BACKBONE, norm="group")))
    image = torch.randn(1, 3, 32, 32)
    expected, _ = model(image)
    actual, _ = model.bfloat16()(image.bfloat16())
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.1 * expected.abs().max()
