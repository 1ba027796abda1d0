"""All that a page shows, as plain data: a JSON-able dict and named arrays of a size that a page can carry."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.view.alignment import best_head
from regard.view.digits import encode
from regard.view.heads import find
from regard.view.page import packed
from regard.view.pool import pooled
from regard.view.record import GENERATED, NOTHING, Record
from regard.view.rollout import rollout
from regard.view.seen import TOP

FORMAT = "regard.view/2"
WHOLE = 12_000_000  # bytes of maps up to which every weight is in a page: 12 x 12 heads up to 204 tokens, 24 up to 500
SHORT, LONG = 3_000_000, 9_000_000  # bytes of arrays: of short sequences, and of those of 32,768 tokens or more
POINTS = 1024  # of a curve over the queries
ROLLED = 512  # tokens up to which the rollout is exact


@dataclass(frozen=True, eq=False)
class Document:
    """about: JSON. arrays: by name, little-endian. Weights are codes of `digits.encode`, curves are float16."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def json(self) -> dict[str, Any]:
        """Both as JSON: an array is its dtype, shape, and base64 of gzip."""
        arrays = {}
        for name, array in self.arrays.items():
            dtype, shape, data = packed(array)
            arrays[name] = {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode("ascii")}
        return {"about": self.about, "arrays": arrays}


@dataclass(frozen=True)
class Sizes:
    """How much of an attention a page carries: side of the maps, strongest keys, of how many queries, points."""

    side: int
    keys: int
    rows: int
    points: int


def sizes(record: Record, budget: int | None = None) -> Sizes:
    """What fits into a number of bytes: a quarter for curves, 45% for maps, the rest for the strongest keys.

    Without a number, every weight is kept up to a few hundred tokens.
    """
    longest = max(max(seen.Q, seen.K) for seen in record.attentions)
    heads = sum(len(record.shown_heads(seen)) for seen in record.attentions)
    whole = sum(2 * len(record.shown_heads(seen)) * seen.Q * seen.K for seen in record.attentions)
    if budget is None and whole <= WHOLE:
        return Sizes(longest, 1, longest, min(longest, POINTS))
    if budget is None:
        budget = SHORT + int((LONG - SHORT) * min(1.0, longest / 32768))
    points = min(longest, POINTS, max(16, budget // 4 // (8 * heads)))
    side = min(longest, math.isqrt(int(0.45 * budget) // (2 * heads)))
    if 16 < side < longest:
        side = side // 16 * 16
    side = max(side, min(longest, 16))
    left = budget - heads * (8 * points + 2 * side * side)
    wide = 4 if longest < 1 << 16 else 6
    keys = max(2, min(TOP, longest, left // (heads * min(longest, 2048) * wide)))
    rows = max(16, min(longest, left // (heads * keys * wide)))
    return Sizes(side, int(keys), int(rows), int(points))


def document(record: Record, budget: int | None = None) -> Document:
    """What a page shows of a record. Maps of long sequences are pooled to means, and the strongest keys are those of
    some queries; budget: about how many bytes the arrays may take.

    >>> import regard as rg, regard.view, torch
    >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> with rg.view.capture(model) as record:
    ...     hidden = model(torch.tensor([[5, 6, 7]]))
    >>> from regard.view.document import document
    >>> made = document(record)
    >>> made.about["attentions"][0]["maps"], made.arrays["0-maps"].shape
    ('0-maps', (4, 3, 3))
    """
    if not record.attentions:
        raise ValueError(NOTHING)
    fitting, arrays = sizes(record, budget), dict[str, np.ndarray]()
    about = {
        "format": FORMAT,
        "title": record.title,
        "text": record.text,
        "note": record.note,
        "opens": _opens(record),
        "streams": {
            name: {"tokens": list(stream.tokens), "special": list(stream.special)}
            for name, stream in record.streams.items()
        },
        "image": record.image,
        "spectrogram": record.spectrogram,
        "attentions": [_attention(record, number, fitting, arrays) for number in range(len(record.attentions))],
        "rollout": _rollout(record, fitting, arrays),
    }
    return Document(about, arrays)


def _attention(record: Record, number: int, fitting: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    seen = record.attentions[number]
    heads = record.shown_heads(seen)
    queries, keys = record.ends(seen)

    def put(name: str, tensor: Tensor, dtype: type | None = None) -> str:
        array = tensor.detach().cpu().numpy()
        if dtype is np.float16:
            array = array.astype(np.float32).clip(-65504, 65504)
        arrays[f"{number}-{name}"] = encode(array) if dtype is None else array.astype(np.dtype(dtype).newbyteorder("<"))
        return f"{number}-{name}"

    statistics = seen.statistics
    maps = seen.map((fitting.side, fitting.side))[heads]
    exact = tuple(maps.shape[1:]) == (seen.Q, seen.K)
    rows = torch.arange(seen.Q)
    if fitting.rows < seen.Q:
        rows = ((torch.arange(fitting.rows) + 0.5) * seen.Q / fitting.rows).long()
    count = min(fitting.keys, seen.K)
    top_keys = statistics.top_keys[0, heads][:, rows, :count].clamp(min=0)
    top_weights = statistics.top_weights[0, heads][:, rows, :count]
    assert statistics.mass is not None
    curves = {
        "entropy": statistics.entropy,
        "distance": statistics.distance,
        "max_logit": statistics.max_logit,
        "first": statistics.mass,
    }
    if seen.kind == "cross":  # queries and keys are of two texts: there is no distance
        del curves["distance"]
    sees = statistics.max_logit[0, heads].isfinite()  # rows that see a key
    curves = {name: curve[0, heads].float().masked_fill(~sees, torch.nan) for name, curve in curves.items()}
    names = {"first": "sink"}
    tops: dict[str, str | None] = {"top_keys": None, "top_weights": None, "top_rows": None}
    if not exact:  # else the maps say it
        tops["top_keys"] = put("top_keys", top_keys, np.uint16 if seen.K <= 1 << 16 else np.int32)
        tops["top_weights"] = put("top_weights", top_weights)
        tops["top_rows"] = None if len(rows) == seen.Q else put("top_rows", rows, np.int32)
    return {
        "id": str(number),
        "name": seen.name,
        "layer": seen.layer,
        "kind": seen.kind,
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "formula": seen.formula,
        "Q": seen.Q,
        "K": seen.K,
        "offset": seen.offset,
        "maps": put("maps", maps),
        "exact": exact,
        **tops,
        "statistics": {name: put(name, _curve(curve, fitting.points), np.float16) for name, curve in curves.items()},
        "means": {
            names.get(name, name): [mean if math.isfinite(mean) else None for mean in curve.nanmean(-1).tolist()]
            for name, curve in curves.items()
        },
        "found": [
            {"head": each.head, "name": each.name, "score": each.score}
            | ({} if each.offset is None else {"offset": each.offset})
            for each in find(record, number)
        ],
    }


def _opens(record: Record) -> dict[str, Any] | None:
    """The attention and head that a page shows first: of what generates a text, the best alignment with its source."""
    if GENERATED not in record.streams:
        return None
    number, head = best_head(record)
    return {"attention": str(number), "head": head}


def _curve(curve: Tensor, points: int) -> Tensor:
    """(heads, Q) to at most so many points: means over the queries that see a key, NaN where there are none."""
    sees = (~curve.isnan()).float()
    sums, counts = (pooled(x[:, None], (1, points))[:, 0] for x in (curve.nan_to_num(), sees))
    return sums / counts


def _rollout(record: Record, fitting: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, Any] | None:
    stack = [seen for seen in record.attentions if seen.kind != "cross" and seen.Q == seen.K]
    if not stack:
        return None
    kind = max(("encoder", "decoder"), key=lambda kind: sum(seen.kind == kind for seen in stack))
    first = next(seen for seen in stack if seen.kind == kind)
    side, exact = min(fitting.side, first.K), first.K <= ROLLED
    layers = rollout(record, kind, ROLLED if exact else side)  # type: ignore[arg-type]
    if not exact:  # mass of a band of keys, to the mean of them
        layers = layers / (torch.arange(side + 1) * first.K // side).diff()
    small = encode(pooled(layers, (side, side)).numpy())
    arrays["rollout"], arrays["rollout-layers"] = small[-1], small
    return {
        "stream": record.ends(first)[1], "kind": kind, "map": "rollout", "layers": "rollout-layers", "exact": exact,
    }  # fmt: skip
