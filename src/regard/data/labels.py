"""Classes of examples: which there are, and what is said of one that training never saw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.data.readers import Row
from regard.errors import BadRows, UserError


def collect_classes(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the second values of rows are, in order; at least two."""
    labels = tuple(sorted({row.values[1] for row in rows}))
    if len(labels) < 2:
        raise UserError(
            f"{rows[0].place}: expected at least 2 classes, but all are {labels[0]!r}; check the data, or --label"
        )
    return labels


def encode_labels(labels: Sequence[str], rows: Sequence[Row], bad: BadRows) -> tuple[list[Row], np.ndarray]:
    """The rows whose second value is one of the labels, and its number (n,)."""
    number = {label: n for n, label in enumerate(labels)}
    good = []
    for row in rows:
        if row.values[1] in number:
            good.append(row)
        else:
            bad.add(unseen_message(row.place, "label", row.values[1], labels))
    return good, np.array([number[row.values[1]] for row in good], np.int64)


def unseen_message(place: str, kind: str, value: str, labels: Sequence[str]) -> str:
    """What is said of a value that training did not have."""
    few = ", ".join(labels[:6]) + (", ..." if len(labels) > 6 else "")
    return f"{place}: the {kind} {value!r} was never seen in training, which has {few}"
