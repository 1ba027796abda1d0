"""A slice of a mask (contiguous heads, queries and keys) equals the mask of a separate call."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import regard as rg
from regard.geometry import CallSlice, Frame
from tests.masks.test_tiles import bits_of, build, cases, truth, visit_counts


@st.composite
def parts(draw: st.DrawFn) -> tuple[rg.Mask, Frame, CallSlice, tuple[int, int]]:
    mask, frame, size = draw(cases())

    def some(n: int) -> slice:
        start = draw(st.integers(0, n - 1))
        return slice(start, draw(st.integers(start + 1, n)))

    return mask, frame, CallSlice(some(frame.H), some(frame.Q), some(frame.K)), size


def frame_of(frame: Frame, part: CallSlice) -> Frame:
    heads, rows, columns = (edge.stop - edge.start for edge in (part.heads, part.rows, part.columns))
    return Frame(frame.B, heads, rows, columns, frame.offset + part.rows.start - part.columns.start)


@settings(max_examples=100)
@given(case=parts())
def test_a_part_has_the_bits_of_the_whole(case: tuple) -> None:
    mask, frame, part, _ = case
    own, here = mask.narrow(frame, part), frame_of(frame, part)
    own.check(here)
    whole = bits_of(mask, frame)[:, part.heads, part.rows, part.columns]
    assert bool((bits_of(own, here) == whole).all())


@settings(max_examples=100)
@given(case=parts())
def test_the_tiles_of_a_part_are_right(case: tuple) -> None:
    mask, frame, part, size = case
    own, here = mask.narrow(frame, part), frame_of(frame, part)
    partial, full = np.moveaxis(visit_counts(build(own, here, size)), -1, 0)
    has_some, has_all = truth(own, here, size)
    assert not (has_some & (partial + full == 0)).any(), "a tile with bits is left out"
    assert not (~has_all & (full > 0)).any(), "a tile is called full that is not"


@settings(max_examples=50)
@given(case=parts())
def test_a_part_of_rows_that_are_intervals_has_such_rows(case: tuple) -> None:
    mask, frame, part, _ = case
    own, here = mask.narrow(frame, part), frame_of(frame, part)
    rows = own.intervals(here)
    if rows is None:
        assert mask.intervals(frame) is None or "~" in repr(mask)
    assume(rows is not None)
    start, stop = (np.broadcast_to(edge, (here.B, here.H, here.Q))[..., None] for edge in rows)
    keys = np.arange(here.K)
    assert ((start <= keys) & (keys < stop) == bits_of(own, here).numpy()).all()


def test_distance_masks_are_unchanged_by_slicing() -> None:
    frame, part = Frame(1, 2, 8, 8, 0), CallSlice(slice(0, 2), slice(2, 4), slice(1, 8))
    for mask in (rg.causal(), rg.window(2, 1), rg.dilated(2, 3)):
        assert mask.narrow(frame, part) is mask


def test_parts_are_values() -> None:
    frame, part = Frame(1, 1, 8, 8, 0), CallSlice(slice(0, 1), slice(2, 4), slice(1, 8))
    one, other = (rg.documents([0] * 4 + [1] * 4).narrow(frame, part) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == "(documents([0, 0, 0, 0, 1, 1, 1, 1]) from head 0, key 1 on)"
