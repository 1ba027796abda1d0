"""Bounding boxes, and the set loss that matches predicted boxes to true ones (DETR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.components import upcast


class Objects(NamedTuple):
    """The objects of one image: labels (n,) and boxes (n, 4) as centre x, centre y, width, height, in [0, 1]."""

    labels: Tensor
    boxes: Tensor


class Losses(NamedTuple):
    """Terms of the loss before weighting: scalars."""

    label: Tensor
    box: Tensor
    giou: Tensor


def to_corners(boxes: Tensor) -> Tensor:
    """Convert boxes (..., 4) from centre and size to left, top, right, bottom.

    >>> import torch
    >>> from regard.models.boxes import to_corners
    >>> to_corners(torch.tensor([0.5, 0.5, 0.25, 0.5]))
    tensor([0.3750, 0.2500, 0.6250, 0.7500])
    """
    centre, size = boxes.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def giou(boxes: Tensor, others: Tensor) -> Tensor:
    """Generalised intersection over union of boxes (..., 4) given as corners; leading axes broadcast.

        intersection / union - (hull - union) / hull        in (-1, 1]; 0 / 0 counts as 0 for boxes without area

    >>> import torch
    >>> from regard.models.boxes import giou
    >>> giou(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([[0.0, 0.0, 1.0, 1.0], [2.0, 0.0, 3.0, 1.0]]))
    tensor([ 1.0000, -0.3333])
    """
    start, stop = boxes.split(2, -1)
    other_start, other_stop = others.split(2, -1)
    shared = _area(torch.maximum(start, other_start), torch.minimum(stop, other_stop))
    hull = _area(torch.minimum(start, other_start), torch.maximum(stop, other_stop))
    union = _area(start, stop) + _area(other_start, other_stop) - shared
    tiny = torch.finfo(union.dtype).tiny
    return shared / union.clamp(min=tiny) - (hull - union) / hull.clamp(min=tiny)


def _area(start: Tensor, stop: Tensor) -> Tensor:
    return (stop - start).clamp(min=0).prod(-1)


@dataclass(frozen=True)
class SetLoss:
    """Set prediction loss: objects are matched one to one to predictions such that the total cost is minimal.

        cost  = -class_weight * p(label) + box_weight * |boxes|_1 - giou_weight * giou            (matching)
        total =  class_weight * cross-entropy + box_weight * L1 + giou_weight * (1 - giou)

    Unmatched predictions are labelled with the last class, which has weight `no_object` in the cross-entropy. Box
    losses are divided by the number of objects in the batch. `match` needs scipy: install the extra `detect`.

    >>> import torch
    >>> from regard.models.boxes import Objects, SetLoss
    >>> logits, boxes = torch.zeros(1, 3, 5), torch.rand(1, 3, 4)
    >>> losses = SetLoss()(logits, boxes, [Objects(torch.tensor([2]), torch.rand(1, 4))])
    >>> torch.allclose(losses.label, torch.tensor(5.0).log())
    True
    """

    class_weight: float = 1.0
    box_weight: float = 5.0
    giou_weight: float = 2.0
    no_object: float = 0.1

    def __call__(self, logits: Tensor, boxes: Tensor, objects: Sequence[Objects]) -> Losses:
        """Compute the losses of logits (B, Q, classes + 1) and boxes (B, Q, 4), given the objects of the B images."""
        if len(objects) != len(logits):
            raise ValueError(f"objects must have one entry for each of the {len(logits)} images, got {len(objects)}")
        logits, boxes = upcast(logits), upcast(boxes)
        pairs = self.match(logits, boxes, objects)
        image = torch.cat([torch.full_like(query, n) for n, (query, _) in enumerate(pairs)])
        query = torch.cat([query for query, _ in pairs])
        classes = logits.shape[-1] - 1
        labels = torch.full(logits.shape[:2], classes, device=logits.device)
        labels[image, query] = torch.cat(
            [image_objects.labels[matched] for image_objects, (_, matched) in zip(objects, pairs, strict=True)]
        )
        weight = logits.new_ones(classes + 1)
        weight[classes] = self.no_object
        label = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)
        predicted = boxes[image, query]
        true = torch.cat(
            [image_objects.boxes[matched] for image_objects, (_, matched) in zip(objects, pairs, strict=True)]
        ).to(predicted)
        count = max(sum(len(image_objects.labels) for image_objects in objects), 1)
        return Losses(
            label,
            (predicted - true).abs().sum() / count,
            (1 - giou(to_corners(predicted), to_corners(true))).sum() / count,
        )

    def total(self, losses: Losses) -> Tensor:
        """The weighted sum, a scalar."""
        return self.class_weight * losses.label + self.box_weight * losses.box + self.giou_weight * losses.giou

    @torch.no_grad()
    def match(self, logits: Tensor, boxes: Tensor, objects: Sequence[Objects]) -> list[tuple[Tensor, Tensor]]:
        """Match predictions to objects; return for each image the indices of both, two tensors of min(Q, n)."""
        try:
            from scipy.optimize import linear_sum_assignment
        except ImportError as error:
            raise ImportError("matching boxes needs scipy: pip install 'regard[detect]'") from error
        # The cost of every prediction for every object of its image, for all images: (objects, Q).
        counts = [len(image_objects.labels) for image_objects in objects]
        image = torch.arange(len(counts), device=logits.device).repeat_interleave(
            torch.tensor(counts, device=logits.device)
        )
        labels, true = (
            torch.cat([image_objects.labels for image_objects in objects]),
            torch.cat([image_objects.boxes for image_objects in objects]),
        )
        predicted, true = upcast(boxes)[image], true.to(logits.device, upcast(boxes).dtype)[:, None]
        probability = upcast(logits).softmax(-1)[image, :, labels.to(logits.device, torch.int64)]
        cost = -self.class_weight * probability
        cost += self.box_weight * (predicted - true).abs().sum(-1)
        cost -= self.giou_weight * giou(to_corners(predicted), to_corners(true))
        # Diverged predictions are matched last instead of raising; they show up in the loss.
        cost = cost.nan_to_num(nan=1e9, posinf=1e9, neginf=-1e9).cpu()
        pairs = []
        for part in cost.split(counts):
            query, matched = linear_sum_assignment(part.T.numpy())
            pairs.append((torch.as_tensor(query, device=logits.device), torch.as_tensor(matched, device=logits.device)))
        return pairs
