"""The contents of a page as plain data: a JSON-serialisable dict and named arrays, small enough to embed in HTML."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.view.alignment import best_head
from regard.view.captured_attention import TOP
from regard.view.digits import encode
from regard.view.heads import find_patterns
from regard.view.page import pack_array
from regard.view.pool import pool
from regard.view.record import GENERATED, NOTHING, Record
from regard.view.rollout import missing_layers, rollout
from regard.view.uncaptured import shorten

FORMAT = "regard.view/2"
WHOLE = 12_000_000  # most bytes of unpooled maps in a page: 12 x 12 heads up to 204 tokens, 24 heads up to 500
SHORT, LONG = 3_000_000, 9_000_000  # bytes of arrays for short sequences, and for 32,768 tokens or more
POINTS = 1024  # most points of a curve over the queries
ROLLED = 512  # most tokens for which the rollout is exact


@dataclass(frozen=True, eq=False)
class Document:
    """The data of a page.

    about: JSON-serialisable. arrays: little-endian, by name; weights are codes of `digits.encode`, curves are float16.
    """

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of both, where an array is a dtype, a shape and base64 of gzip."""
        arrays = {}
        for name, array in self.arrays.items():
            dtype, shape, data = pack_array(array)
            arrays[name] = {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode("ascii")}
        return {"about": self.about, "arrays": arrays}


@dataclass(frozen=True)
class Sizes:
    """How much of an attention a page contains.

    side: rows and columns of a map. keys: strongest keys per query. rows: queries with strongest keys. points: points
    of a curve.
    """

    side: int
    keys: int
    rows: int
    points: int


def choose_sizes(record: Record, budget: int | None = None) -> Sizes:
    """Choose sizes that fit a budget in bytes: a quarter for curves, 45% for maps, the rest for the strongest keys.

    Without a budget, every weight is kept up to a few hundred tokens.
    """
    longest = max(max(captured.Q, captured.K) for captured in record.attentions)
    heads = sum(len(record.displayed_heads(captured)) for captured in record.attentions)
    whole = sum(2 * len(record.displayed_heads(captured)) * captured.Q * captured.K for captured in record.attentions)
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
    """Build the document of a record.

    budget: approximate size of the arrays in bytes. For long sequences, maps are pooled to means and the strongest keys
    are listed for a sample of the queries.

    >>> import regard as rg, regard.view, torch
    >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> with rg.view.capture(model) as record:
    ...     hidden = model(torch.tensor([[5, 6, 7]]))
    >>> from regard.view.document import document
    >>> doc = document(record)
    >>> doc.about["attentions"][0]["maps"], doc.arrays["0-maps"].shape
    ('0-maps', (4, 3, 3))
    """
    if not record.attentions:
        raise ValueError(NOTHING)
    sizes, arrays = choose_sizes(record, budget), dict[str, np.ndarray]()
    about = summary(record) | {
        "opens": _initial_selection(record),
        "image": record.image,
        "spectrogram": record.spectrogram,
        "attentions": [_attention(record, number, sizes, arrays) for number in range(len(record.attentions))],
        "rollout": _rollout(record, sizes, arrays),
    }
    return Document(about, arrays)


def summary(record: Record) -> dict[str, Any]:
    """Return the part of a document that needs no weights: names, tokens, sizes, and what a live page may request."""
    output = record.output
    return {
        "format": FORMAT,
        "title": record.title,
        "text": record.text,
        "note": record.note,
        "uncaptured": shorten(record.uncaptured),
        "streams": {
            name: {"tokens": list(stream.tokens), "special": list(stream.special)}
            for name, stream in record.streams.items()
        },
        "attentions": [_head_names(record, number) for number in range(len(record.attentions))],
        "runs": record.call is not None and not record.call.model.training,
        "edits": [] if record.call is None or record.tokenizer is None else record.call.roles,
        "generates": record.generates,
        "batch": [record.row, record.attentions[0].batch],
        "prompt": record.prompt,
        "output": None if output is None else {"kind": output.kind, "first": output.first, "last": output.last},
    }


def _head_names(record: Record, number: int) -> dict[str, Any]:
    captured = record.attentions[number]
    queries, keys = record.stream_names(captured)
    return {
        "id": str(number), "name": captured.name, "layer": captured.layer, "kind": captured.kind, "queries": queries,
        "keys": keys, "heads": record.displayed_heads(captured), "formula": captured.formula, "Q": captured.Q,
        "K": captured.K,
    }  # fmt: skip


def _attention(record: Record, number: int, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    captured = record.attentions[number]
    heads = record.displayed_heads(captured)

    def put(name: str, tensor: Tensor, dtype: type | None = None) -> str:
        array = tensor.detach().cpu().numpy()
        if dtype is np.float16:
            array = array.astype(np.float32).clip(-65504, 65504)
        arrays[f"{number}-{name}"] = encode(array) if dtype is None else array.astype(np.dtype(dtype).newbyteorder("<"))
        return f"{number}-{name}"

    statistics = captured.statistics
    maps = captured.map((sizes.side, sizes.side))[heads]
    exact = tuple(maps.shape[1:]) == (captured.Q, captured.K)
    rows = torch.arange(captured.Q)
    if sizes.rows < captured.Q:
        rows = ((torch.arange(sizes.rows) + 0.5) * captured.Q / sizes.rows).long()
    count = min(sizes.keys, captured.K)
    top_keys = statistics.top_keys[captured.row, heads][:, rows, :count].clamp(min=0)
    top_weights = statistics.top_weights[captured.row, heads][:, rows, :count]
    assert statistics.mass is not None
    curves = {
        "entropy": statistics.entropy,
        "distance": statistics.distance,
        "max_logit": statistics.max_logit,
        "first": statistics.mass,
    }
    if captured.kind == "cross":  # queries and keys come from two sequences: there is no distance
        del curves["distance"]
    has_keys = statistics.max_logit[captured.row, heads].isfinite()  # queries with at least one visible key
    curves = {
        name: curve[captured.row, heads].float().masked_fill(~has_keys, torch.nan) for name, curve in curves.items()
    }
    names = {"first": "sink"}
    tops: dict[str, str | None] = {"top_keys": None, "top_weights": None, "top_rows": None}
    if not exact:  # exact maps contain the strongest keys
        tops["top_keys"] = put("top_keys", top_keys, np.uint16 if captured.K <= 1 << 16 else np.int32)
        tops["top_weights"] = put("top_weights", top_weights)
        tops["top_rows"] = None if len(rows) == captured.Q else put("top_rows", rows, np.int32)
    return _head_names(record, number) | {
        "offset": captured.offset,
        "maps": put("maps", maps),
        "exact": exact,
        **tops,
        "statistics": {name: put(name, _curve(curve, sizes.points), np.float16) for name, curve in curves.items()},
        "means": {
            names.get(name, name): [mean if math.isfinite(mean) else None for mean in curve.nanmean(-1).tolist()]
            for name, curve in curves.items()
        },
        "found": [
            {"head": each.head, "name": each.name, "score": each.score}
            | ({} if each.offset is None else {"offset": each.offset})
            for each in find_patterns(record, number)
        ],
    }


def _initial_selection(record: Record) -> dict[str, Any] | None:
    """Return the attention and head to open first: the best alignment, if the model generates from a source."""
    if GENERATED not in record.streams:
        return None
    number, head = best_head(record)
    return {"attention": str(number), "head": head}


def _curve(curve: Tensor, points: int) -> Tensor:
    """Pool (heads, Q) to at most `points`: means over the queries that are not NaN, NaN where there are none."""
    valid = (~curve.isnan()).float()
    sums, counts = (pool(x[:, None], (1, points))[:, 0] for x in (curve.nan_to_num(), valid))
    return sums / counts


def _rollout(record: Record, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, Any] | None:
    stack = [captured for captured in record.attentions if captured.kind != "cross" and captured.Q == captured.K]
    if not stack:
        return None
    kind = max(("encoder", "decoder"), key=lambda kind: sum(captured.kind == kind for captured in stack))
    first = next(captured for captured in stack if captured.kind == kind)
    if missing_layers(record, first.name):
        return None
    side, exact = min(sizes.side, first.K), first.K <= ROLLED
    layers = rollout(record, kind, ROLLED if exact else side)  # type: ignore[arg-type]
    if not exact:  # from the mass of a band of keys to the mean per key
        layers = layers / (torch.arange(side + 1) * first.K // side).diff()
    small = encode(pool(layers, (side, side)).numpy())
    arrays["rollout"], arrays["rollout-layers"] = small[-1], small
    return {
        "stream": record.stream_names(first)[1], "kind": kind, "map": "rollout", "layers": "rollout-layers",
        "exact": exact,
    }  # fmt: skip
