"""Tile tables against the dense mask: no visible entry is left out, no tile with a hidden entry counts as full."""

from __future__ import annotations

import importlib
import itertools
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.geometry import Frame
from regard.masks import tiles as cached_tiles
from regard.masks.tiles import Tiles
from tests.strategies import masks

module = importlib.import_module("regard.masks.tiles")  # regard.masks.tiles is the function
fresh_tiles = module.build_tiles
SIZES = st.sampled_from([(1, 1), (2, 3), (4, 4), (8, 4), (3, 16), (16, 16), (64, 64)])


def test_a_rule_is_evaluated_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        bits = (p * p + 3 * j + 5 * h) % 101 < p // 2 - j // 3
        asked.append(bits.numel())
        return bits

    frame, tables = Frame(1, 2, 300, 250, 0), []
    for places in (1, 1000, module.CHUNK_ENTRIES):
        monkeypatch.setattr(module, "CHUNK_ENTRIES", places)
        asked.clear()
        tables.append(build(rg.where(rule), frame, (8, 8)))
        assert max(asked) <= max(64, places)
    assert len(asked) < 10
    for name in ("pointer", "start", "stop", "full"):
        assert all(np.array_equal(getattr(tables[0], name), getattr(table, name)) for table in tables[1:])
    some, every = truth(rg.where(rule), frame, (8, 8))
    assert tables[0].visited == some.sum() < tables[0].total
    assert tables[0].partial == (some & ~every).sum() < tables[0].visited


@st.composite
def cases(draw: st.DrawFn) -> tuple[rg.Mask, Frame, tuple[int, int]]:
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    Q, K = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    offset = draw(st.integers(-8, K + 3) | st.lists(st.integers(-8, K + 3), min_size=B, max_size=B))
    frame = Frame(B, H, Q, K, offset if isinstance(offset, int) else torch.tensor(offset))
    return draw(masks(B, H, Q, K)), frame, draw(SIZES)


def build(mask: rg.Mask | None, frame: Frame, size: tuple[int, int]) -> Tiles:
    return fresh_tiles(None if mask is None else mask.snapshot(), frame.cache_key(), size)


def bits_of(mask: rg.Mask, frame: Frame) -> Tensor:
    return mask.allows(frame.indices()).expand(frame.B, frame.H, frame.Q, frame.K)


def visit_counts(table: Tiles) -> np.ndarray:
    """Count how often each tile is visited as partial and as full: (B, H, tile rows, tile columns, 2)."""
    frame, (down, across) = table.frame, table.grid
    counts = np.zeros((frame.B, frame.H, down, across, 2), int)
    for b in range(frame.B):
        for h in range(frame.H):
            for r in range(down):
                for start, stop, full in table.runs(b, h, r):
                    assert 0 <= start < stop <= across
                    counts[b, h, r, start:stop, int(full)] += 1
    return counts


def truth(mask: rg.Mask, frame: Frame, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each tile has a visible entry, and whether all are: (B, H, tile rows, tile columns)."""
    bits = bits_of(mask, frame).numpy()
    some = np.logical_or.reduceat(bits, np.arange(0, frame.Q, size[0]), 2)
    every = np.logical_and.reduceat(bits, np.arange(0, frame.Q, size[0]), 2)
    cuts = np.arange(0, frame.K, size[1])
    return np.logical_or.reduceat(some, cuts, 3), np.logical_and.reduceat(every, cuts, 3)


def check_kinds(mask: rg.Mask, frame: Frame, size: tuple[int, int]) -> None:
    """Check that no tile is called empty that has a bit, nor full that lacks one."""
    partial, full = np.moveaxis(visit_counts(build(mask, frame, size)), -1, 0)
    has_some, has_all = truth(mask, frame, size)
    assert (partial + full).max() <= 1, "a tile is visited twice"
    assert not (has_some & (partial + full == 0)).any(), "a tile with bits is left out"
    assert not (~has_all & (full > 0)).any(), "a tile is called full that is not"


@settings(max_examples=150)
@given(case=cases())
def test_tiles_of_compositions_have_the_kind_of_their_bits(case: tuple) -> None:
    check_kinds(*case)


def integers(random: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=random)


KINDS: dict[str, Callable[[torch.Generator, int], rg.Mask]] = {  # for rows of n tokens and keys
    "documents": lambda random, n: rg.documents(integers(random, 4, 2, n)),
    "contiguous documents": lambda random, n: rg.documents(integers(random, 4, 2, n).sort(-1).values),
    "ranges": lambda random, n: rg.ranges(*integers(random, n + 2, 2, 2, n).sort(0).values),
    "prefix": lambda random, n: rg.prefix(integers(random, n + 1, 2)),
    "padding": lambda random, n: rg.padding(integers(random, n + 1, 2)),
    "window": lambda random, n: rg.window(*integers(random, n, 2).tolist()),
    "dilated": lambda random, n: rg.dilated(*(integers(random, 4, 2) + 1).tolist()),
    "global_tokens": lambda random, n: rg.global_tokens(integers(random, n, 3).tolist()),
    "blocks": lambda random, n: rg.blocks(integers(random, 2, 9, 9).bool(), 1 + n // 6),
    "random_blocks": lambda random, n: rg.random_blocks(2, 3, int(integers(random, 99, 1))),
    "edges": lambda random, n: rg.edges(integers(random, n, 2, 20)),
    "dense": lambda random, n: rg.dense(integers(random, 4, n, n) > 0),
    "tree": lambda random, n: rg.tree([int(integers(random, node + 1, 1)) - 1 for node in range(n)]),
    "varlen": lambda random, n: rg.varlen([0, *sorted(integers(random, n, 3).tolist()), n]),
    "selected": lambda random, n: rg.selected(integers(random, n, 1, n, 3), 1),
    "neighborhood": lambda random, n: rg.neighborhood(n, int(integers(random, n, 1)) + 1),
}


@pytest.mark.parametrize("name", KINDS)
def test_tiles_of_each_mask_have_the_kind_of_their_bits(name: str) -> None:
    for seed in range(24):
        random = torch.Generator().manual_seed(seed)
        n = int(integers(random, 40, 1)) + 1
        offset = 0 if name in ("varlen", "selected") else int(integers(random, 9, 1)) - 4
        mask = KINDS[name](random, n)
        for size in ((1, 1), (2, 3), (8, 4), (16, 16)):
            check_kinds(mask, Frame(2, 1, n, n, offset), size)


@settings(max_examples=60)
@given(case=cases())
def test_runs_of_a_tile_row_are_sorted_and_maximal(case: tuple) -> None:
    mask, frame, size = case
    table = build(mask, frame, size)
    for b in range(frame.B):
        for h in range(frame.H):
            for r in range(table.grid[0]):
                runs = list(table.runs(b, h, r))
                for (_, stop, full), (start, _, next_full) in itertools.pairwise(runs):
                    assert stop < start or (stop == start and full != next_full)


@settings(max_examples=100)
@given(case=cases())
def test_interval_rows_are_the_bits(case: tuple) -> None:
    mask, frame, _ = case
    rows = mask.intervals(frame)
    assume(rows is not None)
    start, stop = (
        torch.from_numpy(np.broadcast_to(edge, (frame.B, frame.H, frame.Q)).copy())[..., None] for edge in rows
    )
    j = torch.arange(frame.K)
    torch.testing.assert_close((start <= j) & (j < stop), bits_of(mask, frame))


@settings(max_examples=100)
@given(case=cases())
def test_coarse_to_fine_finds_what_fine_alone_finds(case: tuple) -> None:
    mask, frame, size = case
    fine = build(mask, frame, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "START_BOXES", 1)
        coarse = build(mask, frame, size)
    assert coarse.extent == fine.extent
    for name in ("pointer", "start", "stop", "full"):
        np.testing.assert_array_equal(getattr(coarse, name), getattr(fine, name))


def test_the_search_starts_with_large_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = type(rg.global_tokens([0])).kinds
    mask = rg.global_tokens([0])
    monkeypatch.setattr(
        type(mask), "kinds", lambda self, boxes: asked.append(len(boxes.i0)) or original(self, boxes), raising=True
    )
    build(mask, Frame(1, 1, 2**17, 2**17, 0), (64, 64))
    assert max(asked) <= 2**15
    assert sum(asked) < 2048 * 2048 / 20, "all tiles were asked for"


INTERVALS: dict[str, Callable[[], rg.Mask]] = {
    "causal": rg.causal,
    "window": lambda: rg.window(5, 3),
    "window of itself": lambda: rg.window(0, 0),
    "padding": lambda: rg.padding([0, 9, 33]),
    "prefix": lambda: rg.prefix([0, 7, 33]),
    "documents": lambda: rg.documents([0] * 5 + [1] * 11 + [2] + [3] * 16),
    "causal & window": lambda: rg.causal() & rg.window(7, 2),
    "causal & padding": lambda: rg.causal() & rg.padding([0, 9, 33]),
    "prefix & window & padding": lambda: rg.prefix(6) & rg.window(9, 9) & rg.padding([12, 30, 33]),
}
OFFSETS = {"0": 0, "negative": -6, "last at last": 4, "per row": torch.tensor([-3, 4, 30])}


@pytest.mark.parametrize("size", [(1, 1), (4, 4), (8, 5), (5, 8), (16, 16), (40, 40)])
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
@pytest.mark.parametrize("name", INTERVALS)
def test_interval_masks_have_exact_tiles(name: str, offset: int | Tensor, size: tuple[int, int]) -> None:
    mask, frame = INTERVALS[name](), Frame(3, 1, 29, 33, offset)
    assert mask.intervals(frame) is not None
    partial, full = np.moveaxis(visit_counts(build(mask, frame, size)), -1, 0)
    has_some, has_all = truth(mask, frame, size)
    np.testing.assert_array_equal(full.astype(bool), has_all)
    np.testing.assert_array_equal(partial.astype(bool), has_some & ~has_all)


@pytest.mark.parametrize("mask", [rg.causal(), rg.window(5, 3), rg.padding([0, 9, 33]), rg.causal() & rg.window(7, 2)])
def test_boxes_of_the_basic_patterns_are_exact_too(mask: rg.Mask) -> None:
    frame, size = Frame(3, 1, 29, 33, torch.tensor([-3, 4, 30])), (4, 4)
    hidden = mask & rg.dense(torch.ones(1, 1, dtype=torch.bool))  # a dense part has no intervals
    assert hidden.intervals(frame) is None
    partial, full = np.moveaxis(visit_counts(build(hidden, frame, size)), -1, 0)
    has_some, has_all = truth(mask, frame, size)
    np.testing.assert_array_equal(full.astype(bool), has_all)
    if not isinstance(mask, type(rg.causal() & rg.window(1, 1))):  # the intersection of two partial tiles may be empty
        np.testing.assert_array_equal((partial + full).astype(bool), has_some)


@pytest.mark.parametrize(
    "make",
    [
        lambda layout: rg.blocks(layout, 4),
        lambda layout: rg.dense(layout.repeat_interleave(4, 2).repeat_interleave(4, 3)),
    ],
    ids=["blocks", "dense"],
)
@pytest.mark.parametrize("size", [(2, 2), (4, 4), (8, 8)])
def test_every_batch_row_has_separate_tiles(make: Callable, size: tuple[int, int]) -> None:
    layout = torch.zeros(40, 1, 2, 2, dtype=torch.bool)
    layout[[0, 39], 0, 0, 1] = True
    mask, frame = make(layout), Frame(40, 1, 8, 8, 0)
    partial, full = np.moveaxis(visit_counts(build(mask, frame, size)), -1, 0)
    has_some, _ = truth(mask, frame, size)
    np.testing.assert_array_equal((partial + full).astype(bool), has_some)


def test_no_mask_is_one_full_run_a_row() -> None:
    table = build(None, Frame(2, 3, 100, 70, 0), (32, 32))
    assert [list(table.runs(1, 2, r)) for r in range(4)] == [[(0, 3, True)]] * 4
    assert table.visited == table.total == 12
    assert table.entries() == 7000


def test_a_table_counts_its_tiles_and_places() -> None:
    table = build(rg.causal(), Frame(1, 1, 100, 100, 0), (32, 32))
    assert (table.visited, table.partial, table.total) == (10, 4, 16)
    assert table.entries() == 32 * 32 * 6 + 32 * 4 * 3 + 4 * 4
    assert [columns for columns, _ in table.row(0, 0, 3)] == [
        slice(0, 32),
        slice(32, 64),
        slice(64, 96),
        slice(96, 100),
    ]


@pytest.mark.parametrize("frame", [Frame(1, 1, 0, 5, 5), Frame(1, 1, 5, 0, -5), Frame(1, 1, 0, 0, 0)])
@pytest.mark.parametrize(
    "make",
    [
        lambda K: None,
        lambda K: rg.causal() & rg.window(1, 1),
        lambda K: rg.dilated(2, 2),
        lambda K: rg.documents(torch.zeros(K, dtype=torch.int64)),
        lambda K: rg.random_blocks(2, 2),
        lambda K: rg.global_tokens([0]) | ~rg.causal(),
    ],
    ids=["none", "intervals", "dilated", "documents", "random_blocks", "composed"],
)
def test_empty_axes_have_no_tiles(make: Callable, frame: Frame) -> None:
    assert build(make(frame.K), frame, (4, 4)).visited == 0


class TestTheCache:
    def test_equal_masks_share_one_table(self) -> None:
        def table() -> Tiles:
            mask = rg.causal() & rg.padding(torch.tensor([3, 60]))
            return cached_tiles(mask, Frame(2, 1, 64, 64, 0), (8, 8))

        assert table() is table()

    def test_equal_offsets_share_one_table_and_others_do_not(self) -> None:
        def table(*offsets: int) -> Tiles:
            return cached_tiles(rg.causal(), Frame(2, 1, 64, 64, torch.tensor(offsets)), (8, 8))

        assert table(1, 2) is table(1, 2)
        assert table(1, 2) is not table(1, 3)

    def test_other_masks_sizes_and_tiles_have_tables_of_their_own(self) -> None:
        frame = Frame(1, 1, 64, 64, 0)
        base = cached_tiles(rg.window(4, 0), frame, (8, 8))
        assert cached_tiles(rg.window(5, 0), frame, (8, 8)) is not base
        assert cached_tiles(rg.window(4, 0), frame, (8, 16)) is not base
        assert cached_tiles(rg.window(4, 0), Frame(1, 1, 64, 65, 0), (8, 8)) is not base


@pytest.mark.parametrize(
    ("make", "tensor", "other"),
    [
        (rg.dense, torch.eye(8, dtype=torch.bool), torch.ones(8, 8, dtype=torch.bool)),
        (rg.padding, torch.tensor([3]), torch.tensor([8])),
        (rg.prefix, torch.tensor([3]), torch.tensor([8])),
        (rg.documents, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.zeros(8, dtype=torch.int64)),
        (rg.edges, torch.tensor([[0, 1], [1, 2]]), torch.tensor([[5, 6], [5, 6]])),
        (lambda layout: rg.blocks(layout, 4), torch.eye(2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)),
        (rg.global_tokens, torch.tensor([1]), torch.tensor([7])),
    ],
    ids=["dense", "padding", "prefix", "documents", "edges", "blocks", "global_tokens"],
)
def test_a_tensor_changed_in_place_changes_the_masks_made_of_it(make: Callable, tensor: Tensor, other: Tensor) -> None:
    frame, before, after = Frame(1, 1, 8, 8, 0), make(tensor.clone()), make(other.clone())
    given_tensor = tensor.clone()
    mask = make(given_tensor)
    hashed, table = hash(mask), cached_tiles(mask, frame, (2, 2))
    assert mask == before
    assert cached_tiles(mask, frame, (2, 2)) is table
    given_tensor.data.copy_(other)  # not seen by a version counter
    assert mask == after
    assert mask != before
    assert hash(mask) == hashed == hash(after)
    assert torch.equal(bits_of(mask, frame), bits_of(after, frame))
    assert np.array_equal(
        visit_counts(cached_tiles(mask, frame, (2, 2))), visit_counts(cached_tiles(after, frame, (2, 2)))
    )
    given_tensor.data.copy_(tensor)
    assert mask == before


def test_a_million_keys_take_neither_long_nor_much_memory() -> None:
    length = 1 << 20
    mask, frame = rg.causal() & rg.window(255, 0), Frame(1, 1, length, length, 0)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        table = build(mask, frame, (128, 128))
        seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table.visited == 3 * length // 128 - 3
    assert peak < 200e6, f"{peak / 1e6:.0f} MB"
    assert seconds < 5, f"{seconds:.1f} s"


def test_a_million_keys_without_intervals_take_neither_long_nor_much_memory() -> None:
    length = 1 << 20
    mask, frame = rg.longformer(256, [0, 1]), Frame(1, 1, length, length, 0)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        table = build(mask, frame, (128, 128))
        seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table.visited < 9 * length // 128
    assert peak < 200e6, f"{peak / 1e6:.0f} MB"
    assert seconds < 10, f"{seconds:.1f} s"


def test_random_blocks_far_from_the_keys_take_no_memory_for_what_lies_between() -> None:
    query = key = torch.zeros(1, 1, 8, 2)
    output = rg.attention(query, key, key, mask=rg.random_blocks(2, 3), offset=2**40, engine="tiled")
    assert output.shape == (1, 1, 8, 2)
