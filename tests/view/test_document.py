"""A document holds what the contract says, exactly, and no more bytes than a page can carry."""

from __future__ import annotations

import base64
import gzip
import json

import numpy as np
import pytest
import torch

import regard as rg
from regard.view.document import Document, document, sizes
from regard.view.page import page
from regard.view.record import Record
from tests.view.models import attended, translated


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def test_small_attentions_are_whole() -> None:
    record = translated()
    made = document(record)
    assert json.loads(json.dumps(made.about)) == made.about
    assert [each["kind"] for each in made.about["attentions"]] == [seen.kind for seen in record.attentions]
    for number, (about, seen) in enumerate(zip(made.about["attentions"], record.attentions, strict=True)):
        weights = seen.weights().numpy()
        assert about["id"] == str(number)
        assert about["exact"]
        np.testing.assert_allclose(made.arrays[about["maps"]], weights, atol=5e-4)
        keys, tops = made.arrays[about["top_keys"]].astype(int), made.arrays[about["top_weights"]]
        np.testing.assert_allclose(np.where(tops > 0, np.take_along_axis(weights, keys, 2), 0), tops, atol=5e-4)
        np.testing.assert_allclose(tops, -np.sort(-weights, -1)[:, :, : tops.shape[-1]], atol=5e-4)
        entropy = -(weights * np.log(weights.clip(1e-30))).sum(-1)
        np.testing.assert_allclose(made.arrays[about["statistics"]["entropy"]], entropy, atol=2e-3)
        np.testing.assert_allclose(about["means"]["entropy"], entropy.mean(-1), atol=1e-4)
        np.testing.assert_allclose(about["means"]["sink"], weights[:, :, 0].mean(-1), atol=1e-4)
    assert made.about["streams"]["target"]["tokens"] == [str(n) for n in range(7)]
    np.testing.assert_allclose(made.arrays["rollout"], record.rollout("encoder"), atol=5e-4)


def test_large_attentions_are_pooled_and_rows_still_sum_to_one() -> None:
    query = torch.randn(1, 3, 700, 8)
    record = attended(rg.Attention(mask=rg.causal()), query)
    made = document(record, budget=20_000)
    about = made.about["attentions"][0]
    assert not about["exact"]
    maps, rows = made.arrays[about["maps"]].astype(np.float32), made.arrays[about["top_rows"]]
    np.testing.assert_allclose(maps.sum(-1), 1, atol=2e-3)
    weights = record.weights(0).numpy()
    side = maps.shape[-1]
    band = weights[:, : -(-700 // side)].mean(1)
    np.testing.assert_allclose(maps[:, 0, 0], band[:, : 700 // side].sum(-1), atol=1e-3)
    keys = made.arrays[about["top_keys"]].astype(int)
    expected = np.take_along_axis(weights[:, rows], keys, 2)
    tops = made.arrays[about["top_weights"]]
    np.testing.assert_allclose(tops, np.where(tops > 0, expected, 0), atol=5e-4)
    assert sum(array.nbytes for array in made.arrays.values()) < 30_000


def test_heads_that_were_chosen() -> None:
    record = attended(rg.Attention(), torch.randn(1, 4, 6, 8))
    record.heads = (1, 3)
    made = document(record)
    assert made.about["attentions"][0]["heads"] == [1, 3]
    np.testing.assert_allclose(made.arrays["0-maps"], record.weights(0)[[1, 3]], atol=5e-4)


def test_rows_that_see_nothing_are_finite() -> None:
    made = document(attended(rg.Attention(mask=rg.padding([0])), torch.randn(1, 2, 5, 8)))
    assert all(np.isfinite(array.astype(np.float64)).all() for array in made.arrays.values())
    json.dumps(made.about, allow_nan=False)


def test_json_holds_the_arrays() -> None:
    made = document(translated())
    for name, packed in made.json()["arrays"].items():
        data = np.frombuffer(gzip.decompress(base64.b64decode(packed["data"])), packed["dtype"])
        np.testing.assert_array_equal(data.reshape(packed["shape"]), made.arrays[name])


class Sized:
    """As much of an attention as its size needs."""

    def __init__(self, heads: int, length: int) -> None:
        self.heads, self.Q, self.K = heads, length, length


@pytest.mark.parametrize(("layers", "heads", "length", "megabytes"), [(12, 12, 512, 4), (6, 12, 32768, 15)])
def test_pages_are_small_enough(layers: int, heads: int, length: int, megabytes: int) -> None:
    """Random numbers of the sizes that are chosen: real ones compress better."""
    record = Record("a")
    record.attentions = [Sized(heads, length) for _ in range(layers)]  # type: ignore[misc]
    chosen, random = sizes(record), np.random.default_rng(0)
    assert chosen.side >= 64
    assert chosen.keys >= 4
    assert chosen.rows == min(length, chosen.rows) >= 512
    shapes = {
        "maps": (chosen.side, chosen.side), "top_weights": (chosen.rows, chosen.keys),
        **dict.fromkeys(("entropy", "distance", "max_logit", "first"), (chosen.points,)),
    }  # fmt: skip
    arrays = {"top_keys": random.integers(0, length, (heads, chosen.rows, chosen.keys), np.uint16)}
    arrays |= {name: random.random((heads, *shape), np.float32).astype(np.float16) for name, shape in shapes.items()}

    stream = {"tokens": [f"token{n}" for n in range(length)], "special": []}
    about = {"title": "", "streams": {"source": stream}}
    one, empty = (len(page(Document(about, held)).encode()) for held in (arrays, {}))
    assert empty + layers * (one - empty) < megabytes * 1e6
