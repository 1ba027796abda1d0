"""Bytes moved, errors, dropout, shards and dtypes of distributed attention."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import behaviour
from tests.distributed.world import all_well, run

RANKS = 4


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return all_well(run(behaviour.everything, RANKS))


def test_moved_bytes_equal_the_prediction(results: list[dict]) -> None:
    for key in results[0]["moved"]:
        for rank in range(RANKS):
            sent, _, predicted = results[rank]["moved"][key]
            assert sent.total() == predicted.sent[rank], (key, rank)
            assert key[1] in (None, predicted.method)


def test_sent_bytes_equal_received_bytes(results: list[dict]) -> None:
    for key in results[0]["moved"]:
        for a in range(RANKS):
            for b in range(RANKS):
                assert results[a]["moved"][key][0][b] == results[b]["moved"][key][1][a]


def test_a_window_sends_to_neighbours_only(results: list[dict]) -> None:
    for rank in range(RANKS):
        sent, received, _ = results[rank]["moved"]["window", "ring", "contiguous", False]
        assert set(sent) == ({rank + 1} if rank < 3 else set())
        assert set(received) == ({rank - 1} if rank else set())
        both, _, _ = results[rank]["moved"]["window", "ring", "contiguous", True]
        assert set(both) == {other for other in (rank - 1, rank + 1) if 0 <= other < RANKS}  # gradients are sent back


def test_a_mask_reduces_the_bytes(results: list[dict]) -> None:
    for rank in range(RANKS):
        sent = {name: results[rank]["moved"][name, "ring", "contiguous", True][0].total() for name in behaviour.MASKS}
        assert sent["causal"] < sent["none"]
        assert sent["scattered"] < sent["none"] / 2


def test_different_calls_raise_on_all_ranks(results: list[dict]) -> None:
    words = {
        "mask": "all 4 ranks must make the same call, each with its tokens, but description differs",
        "method": "but method differs",
        "heads": "but H is [8, 8, 4, 8]",
        "grad": "but requires_grad is [7, 0, 7, 7]",
        "layout": "balanced shards of 29 tokens hold [7, 7, 7, 8], but the ranks hold [8, 8, 8, 5]",
        "sizes": "documents: ids must have one id for each of the 32 keys",
    }
    for rank in range(RANKS):
        for name, word in words.items():
            assert word in results[rank]["refused"][name]


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_dropout_has_the_right_rate_and_is_reproducible(results: list[dict], method: str) -> None:
    for rank in range(RANKS):
        drawn = results[rank]["dropped"]
        assert abs(drawn[f"{method} mean"] - 1) < 0.1
        assert drawn[f"{method} again"] == 0
        assert drawn[f"{method} without"] > 0.05
        assert drawn[f"{method} heads alike"] > 0.05
        assert drawn[f"{method} slope"] < 1e-6


def test_shards_are_joined_and_differentiated(results: list[dict]) -> None:
    for rank in range(RANKS):
        joined = results[rank]["joined"]
        for layout in ("contiguous", "balanced"):
            same, shape, positions = joined[layout]
            assert same
            assert shape == (1, len(positions), 2)
            assert joined[f"{layout} grad"] == [1 + 2 + 3 + 4]
        assert joined["uneven"] == [1, 2, 2, 3, 3, 3]
        assert joined["bfloat16"] == [0, 1, 2, 3]
    assert results[0]["joined"]["balanced"][2] == [0, 1, 10]


def test_other_dtypes_and_axes(results: list[dict]) -> None:
    for rank in range(RANKS):
        low = results[rank]["low"]
        for dtype in ("torch.bfloat16", "torch.float16"):
            for method in ("ring", "heads"):
                kept, ratio = low[f"{dtype} {method}"]
                assert kept
                assert ratio <= 2
        assert low["autocast"] == torch.bfloat16
        assert low["three axes"][0] == (8, 24, 4)
        assert low["three axes"][1] < 1e-5
        assert low["two axes"][:2] == ((24, 4), (24,))
        assert low["two axes"][2] < 1e-5
        assert low["table alone"] == (True, RANKS - 1)  # keys are sent twice, and no gradients
        assert low["engine"] < 1e-5


def test_second_derivatives_raise(results: list[dict]) -> None:
    for rank in range(RANKS):
        for message in results[rank]["twice"]:
            assert "once_differentiable" in message or "has no second derivatives" in message


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_a_result_does_not_keep_a_process_group_open(method: str) -> None:
    """A group that is closed at process exit aborts if another rank is gone."""
    for gone, message in all_well(run(behaviour.destroyed, 3, method)):
        assert gone
        assert message == "the process group was destroyed; call backward before destroy_process_group()"
