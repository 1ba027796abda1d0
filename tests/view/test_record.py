"""Every way to read a record returns the numbers of attend.weights."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.view import Record, captured_attention
from regard.view.pool import bands
from regard.view.rollout import rollout
from tests.view.models import attended, of_logits, translated

DESCRIPTIONS = {
    "plain": rg.Attention(),
    "causal, alibi": rg.Attention(mask=rg.causal(), bias=rg.alibi(heads=4)),
    "softcap, sink, window": rg.Attention(
        score=rg.Dot(softcap=5.0), mask=rg.window(9, 3), sink=torch.tensor([0.5, 1.0, 0.0, 2.0]), temperature=0.7
    ),
    "additive": rg.Attention(score=rg.Additive(torch.linspace(-1, 1, 8))),
    "scattered": rg.Attention(mask=rg.random_blocks(2, 4, seed=1) & rg.causal()),
    "nothing to see": rg.Attention(mask=rg.padding([0])),
    "entmax": rg.Attention(mask=rg.causal(), normalization=rg.Entmax(1.5)),
    "sigmoid": rg.Attention(mask=rg.window(20, 20), normalization=rg.Sigmoid(-1.0)),
}


@pytest.fixture(scope="module", params=DESCRIPTIONS, ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Record, torch.Tensor]:
    """A record of 45 queries and keys, G = 2 of 4 heads, and its weights (H, Q, K)."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    attend = DESCRIPTIONS[request.param]
    query, key = 2 * torch.randn(1, 4, 45, 8), torch.randn(1, 2, 45, 8)
    return attended(attend, query, key), attend.weights(query, key)[0]


def close(one: object, other: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(one), other.float(), atol=2e-6, rtol=1e-5)


def test_weights_and_their_parts(pair: tuple[Record, torch.Tensor]) -> None:
    record, weights = pair
    close(record.weights(0), weights)
    close(record.weights(0, head=2), weights[2])
    close(record.weights(0, head=1, rows=[3, 40], columns=slice(5, 9)), weights[1][[3, 40], 5:9])


@pytest.mark.parametrize("size", [(45, 45), (9, 5), (7, 11), (45, 4), (1, 1), (64, 64)])
def test_a_map_has_the_means_of_bands(pair: tuple[Record, torch.Tensor], size: tuple[int, int]) -> None:
    record, weights = pair
    rows, columns = min(45, size[0]), min(45, size[1])
    pooled_map = record.attentions[0].map(size)
    assert pooled_map.shape[1:] == (rows, columns)
    for n, (top, bottom) in enumerate(bands(45, rows).tolist()):
        for m, (left, right) in enumerate(bands(45, columns).tolist()):
            close(pooled_map[:, n, m], weights[:, top:bottom, left:right].mean((1, 2)))


def test_weights_at_separate_keys_per_query(pair: tuple[Record, torch.Tensor]) -> None:
    record, weights = pair
    keys = torch.randint(-3, 48, (45, 6))
    there = (keys >= 0) & (keys < 45)
    expected = weights.gather(2, keys.clamp(0, 44).expand(4, -1, -1)) * there
    close(record.attentions[0].weights_at(keys), expected)
    close(record.attentions[0].weights_at(keys[[7, 30]], rows=[7, 30]), expected[:, [7, 30]])


@pytest.mark.parametrize("direct", [True, False])
def test_a_window_contains_weights_or_means(
    pair: tuple[Record, torch.Tensor], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, weights = pair
    if direct:
        monkeypatch.setattr(captured_attention, "DIRECT", 1600)  # so that windows are computed from the log-sum-exp
    close(record.window("0", 3, (4, 20), (10, 45)).weights, weights[3, 4:20, 10:45])
    window = record.window("0", 1, (0, 40), (5, 45), (8, 10))
    close(window.weights, weights[1, :40, 5:].reshape(8, 5, 10, 4).mean((1, 3)))
    assert window.columns[1].tolist() == [9, 13]
    window = record.window("0", 1, (2, 40), (5, 43), (7, 9))
    for n, (top, bottom) in enumerate(window.rows.tolist()):
        for m, (left, right) in enumerate(window.columns.tolist()):
            close(window.weights[n, m], weights[1, top:bottom, left:right].mean())


@pytest.mark.parametrize("count", [64, 61])
def test_a_window_of_too_many_weights_has_the_cells_of_a_map(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(captured_attention, "DIRECT", 8)
    monkeypatch.setattr(captured_attention, "CELLS", 16)
    query = torch.randn(1, 2, count, 8)
    record, weights = attended(rg.Attention(), query), rg.Attention().weights(query, query)[0]
    window = record.window("0", 1, (9, 50), (0, count), (4, 4))
    assert window.weights.shape[1] == 16
    assert window.rows[0, 0] <= 9 < window.rows[0, 1]
    assert window.rows[-1, 0] < 50 <= window.rows[-1, 1]
    for n, (top, bottom) in enumerate(window.rows.tolist()):
        for m, (left, right) in enumerate(window.columns.tolist()):
            close(window.weights[n, m], weights[1, top:bottom, left:right].mean())


@pytest.mark.parametrize("count", [64, 60, 61])
def test_precompute_builds_the_map_of_windows(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(captured_attention, "DIRECT", 8)
    monkeypatch.setattr(captured_attention, "CELLS", 16)
    query = torch.randn(1, 2, count, 8)
    record, weights = attended(rg.Attention(), query), rg.Attention().weights(query, query)[0]
    one = record.attentions[0]
    small = torch.nn.functional.adaptive_avg_pool2d(weights, 4)
    close(one.map((4, 4)), small)
    assert list(one._maps) == [(4, 4, 0)]
    record.precompute()
    assert (16, 16, 0) in one._maps
    one._maps.pop((4, 4, 0))
    close(one.map((4, 4)), small)  # now from the larger one, where it divides


def test_statistics_are_those_of_the_description(pair: tuple[Record, torch.Tensor]) -> None:
    record, weights = pair
    column = record.statistics["Attends"]
    close(column.mass[0], weights[..., 0])
    close(column.top_weights[0], weights.topk(8, -1).values)


def test_visible_keys_are_counted(pair: tuple[Record, torch.Tensor]) -> None:
    record, weights = pair
    attend = record.attentions[0].calls[0].attend
    if attend.sink is None and not isinstance(attend.normalization, rg.Entmax):
        count = record.attentions[0].visible_counts().expand(4, -1)
        assert torch.equal(count, (weights > 0).sum(-1))


def test_layers_are_found_by_number_kind_and_name() -> None:
    record = translated()
    assert record.attention(1, "cross") is record.attention("decoder.layers.1.cross") is record.attention("5")
    with pytest.raises(ValueError, match=r"layer 0 has several attentions; choose one with kind=, one of cross, dec"):
        record.weights(0)
    with pytest.raises(ValueError, match=r"layer 7 has no encoder; the record has encoder 0, encoder 1, decoder 0"):
        record.weights(7, kind="encoder")
    with pytest.raises(ValueError, match=r"rows must be \(start, stop\) with 0 <= start < stop <= 7, but is \(3, 9\)"):
        record.window("5", 0, (3, 9), (0, 9))


def test_the_number_of_tokens_is_checked() -> None:
    record = translated()
    record.set_tokens(list("abcdefghi"), target=["<s>", *"bcdefg"], special=["<s>"])
    assert record.streams["target"].special == (0,)
    with pytest.raises(ValueError, match="source must have 9 tokens, but has 2"):
        record.set_tokens(["a", "b"])
    with pytest.raises(ValueError, match="there is no stream 'other'; the streams are source, target"):
        record.set_tokens(other=["a"])


def test_rollout_is_the_product_of_layers() -> None:
    record = translated()
    through = torch.eye(9)
    for layer in (0, 1):
        through = (0.5 * record.weights(layer, kind="encoder").mean(0) + 0.5 * torch.eye(9)) @ through
    close(record.rollout(), through)
    assert rollout(record, "decoder").shape == (2, 7, 7)
    close(rollout(record, "encoder", size=3).sum(-1), torch.ones(2, 3, 3).sum(-1) / 3)


def test_rollout_of_long_sequences_is_that_of_pooled_maps() -> None:
    record = of_logits(torch.randn(2, 12, 12))
    mass = 3 * record.attentions[0].map((4, 4)).mean(0)  # of three keys
    close(record.rollout(size=4), 0.5 * mass + 0.5 * torch.eye(4))


def test_the_page_is_written_atomically(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = translated()
    path = tmp_path / "page.html"
    assert record.save(path) == path
    before = path.read_text()
    assert before.startswith("<!doctype html>")
    with pytest.raises(OSError, match=r"name the file page\.html"):
        record.save(tmp_path / "page.png")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        record.save(path)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_notebook_shows_the_page_in_a_sandboxed_frame() -> None:
    bundle = translated()._repr_mimebundle_()
    assert 'sandbox="allow-scripts"' in bundle["text/html"]
    assert Record("m")._repr_mimebundle_() == {"text/plain": "<Record of m: 0 attentions>"}
