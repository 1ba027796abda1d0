"""Decoding of connectionist temporal classification (CTC): frame logits to label sequences."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNLIKELY = 1e-5  # labels of a frame that are less probable do not extend prefixes


class Hypothesis(NamedTuple):
    """A label sequence and the total log-probability of its explored paths."""

    labels: list[int]
    score: float


def greedy(logits: Tensor, *, blank: int = 0) -> Hypothesis:
    """Take the best label of every frame of logits (N, labels), then merge repeats and drop blanks.

    >>> import torch
    >>> from regard.models.ctc import greedy
    >>> greedy(torch.eye(3)[[1, 1, 0, 1, 2, 0]]).labels
    [1, 1, 2]
    """
    score, best = logits.float().log_softmax(-1).max(-1)
    labels = torch.unique_consecutive(best)
    return Hypothesis(labels[labels != blank].tolist(), float(score.sum()))


def prefix_beam(logits: Tensor, *, width: int = 8, blank: int = 0) -> Hypothesis:
    """Prefix beam search over logits (N, labels): find the sequence with the highest probability over all its paths.

    A prefix has two sums: over paths that end in a blank, and over paths that end in its last label. Repeating that
    label extends the prefix in the former case only.

    >>> import torch
    >>> from regard.models.ctc import greedy, prefix_beam
    >>> frames = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()  # two blanks have 0.36, all paths to [1] have 0.64
    >>> greedy(frames).labels, prefix_beam(frames).labels
    ([], [1])
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    log_probabilities = logits.detach().double().log_softmax(-1).cpu().numpy()
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    floor = math.log(UNLIKELY)
    for frame in log_probabilities:
        likely = [int(label) for label in np.flatnonzero(frame > floor) if label != blank]
        extended: dict[tuple[int, ...], tuple[float, float]] = {}

        def add(prefix: tuple[int, ...], ends_blank: float, ends_label: float, extended: dict = extended) -> None:
            before = extended.get(prefix, (-math.inf, -math.inf))
            extended[prefix] = _sum(before[0], ends_blank), _sum(before[1], ends_label)

        for prefix, (by_blank, by_label) in beams.items():
            either = _sum(by_blank, by_label)
            last = prefix[-1] if prefix else blank
            add(prefix, either + frame[blank], by_label + frame[last] if prefix else -math.inf)
            for label in likely:
                add((*prefix, label), -math.inf, (by_blank if label == last else either) + frame[label])
        beams = dict(sorted(extended.items(), key=lambda pair: -_sum(*pair[1]))[:width])
    best, sums = max(beams.items(), key=lambda pair: _sum(*pair[1]))
    return Hypothesis(list(best), _sum(*sums))


def min_frames(labels: list[int]) -> int:
    """Minimum number of frames for a label sequence: one per label, plus a blank between equal neighbours.

    >>> from regard.models.ctc import min_frames
    >>> min_frames([5, 5, 7])
    4
    """
    return len(labels) + sum(one == other for one, other in pairwise(labels))


def _sum(one: float, other: float) -> float:
    """log(exp(one) + exp(other))."""
    high, low = (one, other) if one > other else (other, one)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
