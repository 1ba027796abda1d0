"""A document contains exact numbers and is small enough for a page."""

from __future__ import annotations

import base64
import gzip
import json

import numpy as np
import pytest
import torch

import regard as rg
from regard.view.digits import encode
from regard.view.document import Document, choose_sizes, document
from regard.view.page import page
from regard.view.record import Record
from tests.view.models import attended, translated


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def numbers(codes: np.ndarray) -> np.ndarray:
    """Decode the codes of `digits.encode` as its docstring specifies."""
    codes = codes.astype(np.int64)
    power = np.maximum(0, (codes - 1000) // 9000)
    return np.where(codes == 64_000, 0.0, (codes - 9000 * power) * 10.0 ** (power - 9))


def test_codes_are_decimal_digits() -> None:
    x = 10.0 ** np.random.default_rng(0).uniform(-10, 0.9, 5000)
    result = numbers(encode(x))
    assert [f"{value:.3e}" for value in x[x >= 1e-6]] == [f"{value:.3e}" for value in result[x >= 1e-6]]
    np.testing.assert_allclose(result[x < 1e-6], x[x < 1e-6], rtol=0, atol=0.5e-9)
    assert encode(np.array([0.0, 1e-15, 1.0, 0.99996])).tolist() == [0, 64_000, 55_000, 55_000]
    assert encode(np.array([0.5, 20.0])).dtype == np.float32  # too large for a code


@pytest.mark.parametrize(("layers", "tokens"), [(12, 100), (12, 204), (2, 500)])
def test_every_weight_is_kept_up_to_a_few_hundred_tokens(layers: int, tokens: int) -> None:
    record = Record("a")
    record.attentions = [Sized(12, tokens) for _ in range(layers)]  # type: ignore[misc]
    assert choose_sizes(record).side == tokens


def test_small_attentions_are_exact() -> None:
    record = translated()
    contents = document(record)
    assert json.loads(json.dumps(contents.about)) == contents.about
    assert [each["kind"] for each in contents.about["attentions"]] == [captured.kind for captured in record.attentions]
    for number, (about, captured) in enumerate(zip(contents.about["attentions"], record.attentions, strict=True)):
        weights = captured.weights().numpy()
        assert about["id"] == str(number)
        assert about["exact"]
        np.testing.assert_allclose(numbers(contents.arrays[about["maps"]]), weights, rtol=5.1e-4)
        assert about["top_keys"] is None  # contained in the map
        entropy = -(weights * np.log(weights.clip(1e-30))).sum(-1)
        np.testing.assert_allclose(contents.arrays[about["statistics"]["entropy"]], entropy, atol=2e-3)
        np.testing.assert_allclose(about["means"]["entropy"], entropy.mean(-1), atol=1e-4)
        np.testing.assert_allclose(about["means"]["sink"], weights[:, :, 0].mean(-1), atol=1e-4)
    assert contents.about["streams"]["target"]["tokens"] == [str(n) for n in range(7)]
    np.testing.assert_allclose(numbers(contents.arrays["rollout"]), record.rollout("encoder"), rtol=5.1e-4)


def test_large_attentions_are_pooled() -> None:
    query = torch.randn(1, 3, 700, 8)
    record = attended(rg.Attention(mask=rg.causal()), query)
    contents = document(record, budget=20_000)
    about = contents.about["attentions"][0]
    assert not about["exact"]
    maps, rows = numbers(contents.arrays[about["maps"]]), contents.arrays[about["top_rows"]]
    weights, side = record.weights(0), maps.shape[-1]
    means = torch.nn.functional.adaptive_avg_pool2d(weights, side)
    np.testing.assert_allclose(maps, means, rtol=5.1e-4, atol=1e-9)
    weights = weights.numpy()
    keys = contents.arrays[about["top_keys"]].astype(int)
    expected = np.take_along_axis(weights[:, rows], keys, 2)
    tops = numbers(contents.arrays[about["top_weights"]])
    np.testing.assert_allclose(tops, np.where(tops > 0, expected, 0), rtol=5.1e-4)
    assert sum(array.nbytes for array in contents.arrays.values()) < 30_000


def test_only_selected_heads_are_included() -> None:
    record = attended(rg.Attention(), torch.randn(1, 4, 6, 8))
    record.heads = (1, 3)
    contents = document(record)
    assert contents.about["attentions"][0]["heads"] == [1, 3]
    np.testing.assert_allclose(numbers(contents.arrays["0-maps"]), record.weights(0)[[1, 3]], rtol=5.1e-4)


def test_rows_without_visible_keys_have_no_statistics() -> None:
    contents = document(attended(rg.Attention(mask=rg.padding([0])), torch.randn(1, 2, 5, 8)))
    assert np.isnan(contents.arrays["0-entropy"]).all()
    assert not contents.arrays["0-maps"].any()
    assert contents.about["attentions"][0]["means"]["entropy"] == [None, None]
    json.dumps(contents.about, allow_nan=False)


def test_means_are_over_rows_with_visible_keys() -> None:
    sees = torch.arange(6) % 3 != 0
    mask = rg.dense(sees[:, None].expand(6, 6).clone())
    record = attended(rg.Attention(mask=mask), torch.randn(1, 2, 6, 8))
    contents, weights = document(record), record.weights(0)
    means = contents.about["attentions"][0]["means"]
    entropy = torch.special.entr(weights[:, sees]).sum(-1)
    np.testing.assert_allclose(means["entropy"], entropy.mean(-1), rtol=1e-5)
    np.testing.assert_allclose(means["sink"], weights[:, sees, 0].mean(-1), rtol=1e-5)
    assert np.isnan(contents.arrays["0-entropy"][:, 0]).all()


def test_cross_attention_has_no_distance() -> None:
    """Queries and keys come from two sequences."""
    about = document(translated()).about["attentions"]
    assert [("distance" in each["means"]) for each in about] == [each["kind"] != "cross" for each in about]


def test_json_contains_the_arrays() -> None:
    contents = document(translated())
    for name, pack_array in contents.json()["arrays"].items():
        data = np.frombuffer(gzip.decompress(base64.b64decode(pack_array["data"])), pack_array["dtype"])
        np.testing.assert_array_equal(data.reshape(pack_array["shape"]), contents.arrays[name])


class Sized:
    """The attributes of an attention that determine its size."""

    def __init__(self, heads: int, length: int) -> None:
        self.heads, self.Q, self.K = heads, length, length


@pytest.mark.parametrize(("layers", "heads", "length", "megabytes"), [(12, 12, 512, 4), (6, 12, 32768, 15)])
def test_pages_are_small_enough(layers: int, heads: int, length: int, megabytes: int) -> None:
    """Random numbers of the chosen sizes; real ones compress better."""
    record = Record("a")
    record.attentions = [Sized(heads, length) for _ in range(layers)]  # type: ignore[misc]
    chosen, random = choose_sizes(record), np.random.default_rng(0)
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
