"""Class labels of examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.data.readers import Row
from regard.errors import BadRows, UserError


def collect_classes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the distinct second values of rows, sorted; at least two."""
    labels = tuple(sorted({row.values[1] for row in rows}))
    if len(labels) < 2:
        raise UserError(
            f"{rows[0].place}: expected at least 2 classes, but all are {labels[0]!r}; check the data, or --label"
        )
    return labels


def encode_labels(labels: Sequence[str], rows: Sequence[Row], bad: BadRows) -> tuple[list[Row], np.ndarray]:
    """Return the rows whose second value is a known label, and the indices of their labels (n,)."""
    number = {label: n for n, label in enumerate(labels)}
    good = []
    for row in rows:
        if row.values[1] in number:
            good.append(row)
        else:
            bad.add(unseen_message(row.place, "label", row.values[1], labels))
    return good, np.array([number[row.values[1]] for row in good], np.int64)


def unseen_message(place: str, kind: str, value: str, labels: Sequence[str]) -> str:
    """Error message for a value that was not seen in training."""
    few = ", ".join(labels[:6]) + (", ..." if len(labels) > 6 else "")
    return f"{place}: the {kind} {value!r} was not seen in training; known are {few}"
