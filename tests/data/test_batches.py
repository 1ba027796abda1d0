"""Batches: every example once, similar lengths, reproducible from seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.batches import Ragged, in_order, plan, shards

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=80).map(lambda sizes: np.array(sizes, np.int64))


@given(SIZES, st.integers(1, 200), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_takes_every_example_once(sizes: np.ndarray, budget: int, seed: int, epoch: int) -> None:
    batches = plan(sizes, budget=budget, seed=seed, epoch=epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
    again = plan(sizes, budget=budget, seed=seed, epoch=epoch)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


@given(SIZES, st.integers(1, 9))
def test_shards_are_the_batch(sizes: np.ndarray, count: int) -> None:
    chosen = np.arange(len(sizes))[::-1]
    parts = shards(chosen, sizes, count)
    assert len(parts) == count
    assert np.array_equal(np.concatenate(parts), chosen)
    assert all(sizes[part].sum() <= sizes.sum() / count + sizes.max() for part in parts)


@given(SIZES, st.integers(1, 200))
def test_evaluation_takes_every_example_once_the_longest_first(sizes: np.ndarray, budget: int) -> None:
    order = np.concatenate(in_order(sizes, budget=budget))
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert (np.diff(sizes[order]) <= 0).all()


def test_batches_have_about_the_budget_and_like_lengths() -> None:
    sizes = np.random.default_rng(0).integers(2, 60, 3000)
    batches = plan(sizes, budget=600, seed=1, epoch=0)
    totals = np.array([sizes[batch].sum() for batch in batches])
    assert abs(totals - 600).max() <= 90
    assert np.mean([np.ptp(sizes[batch]) for batch in batches]) < 8


def test_epochs_and_seeds_differ() -> None:
    sizes = np.arange(1, 200)
    first = np.concatenate(plan(sizes, budget=600, seed=1, epoch=0))
    assert not np.array_equal(first, np.concatenate(plan(sizes, budget=600, seed=1, epoch=1)))
    assert not np.array_equal(first, np.concatenate(plan(sizes, budget=600, seed=2, epoch=0)))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=9), st.randoms())
def test_packing_chosen_rows_is_putting_them_end_to_end(rows: list[list[int]], chance: object) -> None:
    chosen = np.array(chance.sample(range(len(rows)), chance.randint(1, len(rows))))  # type: ignore[attr-defined]
    packed = Ragged([np.array(row) for row in rows]).pack(chosen)
    assert packed.values.tolist() == [value for n in chosen for value in rows[n]]
    assert packed.lengths == tuple(len(rows[n]) for n in chosen)


def test_rows_keep_their_values() -> None:
    rows = Ragged([np.array([1, 2]), np.array([3])])
    assert len(rows) == 2
    assert rows[1].tolist() == [3]
    assert rows.lengths.tolist() == pytest.approx([2, 1])
