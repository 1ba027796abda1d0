"""Boxes, and how predicted ones are matched to true ones: what DETR is trained by."""

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
    """The parts of the loss, each before its weight: scalars."""

    label: Tensor
    box: Tensor
    giou: Tensor


def to_corners(boxes: Tensor) -> Tensor:
    """Boxes (..., 4) as centre and size to left, top, right, bottom.

    >>> import torch
    >>> from regard.models.boxes import corners
    >>> to_corners(torch.tensor([0.5, 0.5, 0.25, 0.5]))
    tensor([0.3750, 0.2500, 0.6250, 0.7500])
    """
    centre, size = boxes.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def giou(boxes: Tensor, others: Tensor) -> Tensor:
    """Generalised intersection over union of boxes (..., 4) given by their corners; leading axes broadcast.

        intersection / union - (hull - union) / hull        in (-1, 1]; boxes without area have 0 / 0 = 0

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
    """The loss of a set of predictions: each object is matched to the prediction that suits it best, one to one.

        cost  = -class_weight * p(label) + box_weight * |boxes|_1 - giou_weight * giou            (matching)
        total =  class_weight * cross-entropy + box_weight * L1 + giou_weight * (1 - giou)

    Predictions without an object have the last class as their label, which counts `no_object` in the cross-entropy.
    Box losses are divided by the number of objects in the batch. `matched` needs scipy, of the extra `detect`.

    >>> import torch
    >>> from regard.models.boxes import Objects, SetLoss
    >>> logits, boxes = torch.zeros(1, 3, 5), torch.rand(1, 3, 4)
    >>> found = SetLoss()(logits, boxes, [Objects(torch.tensor([2]), torch.rand(1, 4))])
    >>> torch.allclose(found.label, torch.tensor(5.0).log())
    True
    """

    class_weight: float = 1.0
    box_weight: float = 5.0
    giou_weight: float = 2.0
    no_object: float = 0.1

    def __call__(self, logits: Tensor, boxes: Tensor, objects: Sequence[Objects]) -> Losses:
        """logits (B, Q, classes + 1), boxes (B, Q, 4), and the objects of each of the B images."""
        if len(objects) != len(logits):
            raise ValueError(f"objects must be one for each of the {len(logits)} images, but {len(objects)} came")
        logits, boxes = upcast(logits), upcast(boxes)
        pairs = self.match(logits, boxes, objects)
        image = torch.cat([torch.full_like(query, n) for n, (query, _) in enumerate(pairs)])
        query = torch.cat([query for query, _ in pairs])
        classes = logits.shape[-1] - 1
        labels = torch.full(logits.shape[:2], classes, device=logits.device)
        labels[image, query] = torch.cat([one.labels[which] for one, (_, which) in zip(objects, pairs, strict=True)])
        weight = logits.new_ones(classes + 1)
        weight[classes] = self.no_object
        label = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)
        found = boxes[image, query]
        true = torch.cat([one.boxes[which] for one, (_, which) in zip(objects, pairs, strict=True)]).to(found)
        count = max(sum(len(one.labels) for one in objects), 1)
        return Losses(
            label, (found - true).abs().sum() / count, (1 - giou(to_corners(found), to_corners(true))).sum() / count
        )

    def total(self, losses: Losses) -> Tensor:
        """The weighted sum, a scalar."""
        return self.class_weight * losses.label + self.box_weight * losses.box + self.giou_weight * losses.giou

    @torch.no_grad()
    def match(self, logits: Tensor, boxes: Tensor, objects: Sequence[Objects]) -> list[tuple[Tensor, Tensor]]:
        """For each image, which predictions are matched to which objects: two index tensors of min(Q, n)."""
        try:
            from scipy.optimize import linear_sum_assignment
        except ImportError as error:
            raise ImportError("matching needs scipy; try pip install 'regard[detect]'") from error
        # The cost of every prediction for every object of its image, all images at once: (objects of all, Q).
        counts = [len(one.labels) for one in objects]
        image = torch.arange(len(counts), device=logits.device).repeat_interleave(
            torch.tensor(counts, device=logits.device)
        )
        labels, true = torch.cat([one.labels for one in objects]), torch.cat([one.boxes for one in objects])
        found, true = upcast(boxes)[image], true.to(logits.device, upcast(boxes).dtype)[:, None]
        chance = upcast(logits).softmax(-1)[image, :, labels.to(logits.device, torch.int64)]
        cost = -self.class_weight * chance
        cost += self.box_weight * (found - true).abs().sum(-1)
        cost -= self.giou_weight * giou(to_corners(found), to_corners(true))
        # What has diverged is matched last rather than refused: the loss then shows it.
        cost = cost.nan_to_num(nan=1e9, posinf=1e9, neginf=-1e9).cpu()
        pairs = []
        for part in cost.split(counts):
            query, which = linear_sum_assignment(part.T.numpy())
            pairs.append((torch.as_tensor(query, device=logits.device), torch.as_tensor(which, device=logits.device)))
        return pairs
