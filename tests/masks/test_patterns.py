"""Every pattern against its formula, entry by entry; and comparison, printing and drawing of masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.geometry import Frame, Indices

B, H = 2, 2
Predicate = Callable[[int, int, int, int], bool]

LENGTHS = [3, 6]
IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 3, 3], [4, 4, 4, 1, 0, 0, 4, 4, 9]])  # one document is torn
STARTS = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 0, 8], [3, 1, 0, 7, 4, 4, 4, 2, 0]])
STOPS = torch.tensor([[2, 2, 5, 5, 5, 9, 9, 0, 30], [3, 6, 9, 8, 5, 4, 9, 1, 1]])
GLOBAL_ROWS = [[0, 5], [2]]
LAYOUT = torch.rand(B, H, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
PAIRS = torch.tensor([[0, 0, 3, 7, 2, 3, 20], [0, 4, 3, 1, 8, 3, 2]])
BITS = torch.rand(B, H, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.5


def block(layout: Tensor, size: int) -> Predicate:
    """`layout[..., p // size, j // size]`; entries outside the layout are hidden."""

    def allowed(b: int, h: int, p: int, j: int) -> bool:
        return 0 <= p // size < layout.shape[2] and bool(
            layout[b % layout.shape[0], h % layout.shape[1], p // size, j // size]
        )

    return allowed


PATTERNS: dict[str, tuple[Callable[[int], rg.Mask], Callable[[int], Predicate]]] = {
    # the mask for K keys, and its predicate
    "causal": (lambda K: rg.causal(), lambda K: lambda b, h, p, j: j <= p),
    "window": (lambda K: rg.window(2, 1), lambda K: lambda b, h, p, j: p - 2 <= j <= p + 1),
    "window of itself": (lambda K: rg.window(0, 0), lambda K: lambda b, h, p, j: j == p),
    "dilated": (lambda K: rg.dilated(2, 3), lambda K: lambda b, h, p, j: abs(p - j) <= 6 and (p - j) % 3 == 0),
    "prefix": (lambda K: rg.prefix(4), lambda K: lambda b, h, p, j: j < 4 or j <= p),
    "prefix per row": (lambda K: rg.prefix(LENGTHS), lambda K: lambda b, h, p, j: j < LENGTHS[b] or j <= p),
    "padding": (lambda K: rg.padding(3), lambda K: lambda b, h, p, j: j < 3),
    "padding per row": (
        lambda K: rg.padding(torch.tensor([K, 2])),
        lambda K: lambda b, h, p, j: j < (K, 2)[b],
    ),
    "documents": (
        lambda K: rg.documents(IDS[0, :K]),
        lambda K: lambda b, h, p, j: 0 <= p < K and bool(IDS[0, p] == IDS[0, j]),
    ),
    "documents per row, torn": (
        lambda K: rg.documents(IDS[:, :K]),
        lambda K: lambda b, h, p, j: 0 <= p < K and bool(IDS[b, p] == IDS[b, j]),
    ),
    "padding the other way": (lambda K: ~rg.padding([1, 4]), lambda K: lambda b, h, p, j: j >= (1, 4)[b]),
    "ranges": (
        lambda K: rg.ranges(STARTS[0], STOPS[0]),
        lambda K: lambda b, h, p, j: 0 <= p < 9 and bool(STARTS[0, p] <= j < STOPS[0, p]),
    ),
    "ranges per row": (
        lambda K: rg.ranges(STARTS, STOPS),
        lambda K: lambda b, h, p, j: 0 <= p < 9 and bool(STARTS[b, p] <= j < STOPS[b, p]),
    ),
    "global_tokens": (lambda K: rg.global_tokens([1, 4]), lambda K: lambda b, h, p, j: p in (1, 4) or j in (1, 4)),
    "global_tokens per row": (
        lambda K: rg.global_tokens(GLOBAL_ROWS),
        lambda K: lambda b, h, p, j: p in GLOBAL_ROWS[b] or j in GLOBAL_ROWS[b],
    ),
    "no global_tokens": (lambda K: rg.global_tokens([]), lambda K: lambda b, h, p, j: False),
    "blocks": (lambda K: rg.blocks(LAYOUT[0, 0], 3), lambda K: block(LAYOUT[:1, :1], 3)),
    "blocks per head": (lambda K: rg.blocks(LAYOUT[0], 4), lambda K: block(LAYOUT[:1], 4)),
    "blocks per row and head": (lambda K: rg.blocks(LAYOUT, 3), lambda K: block(LAYOUT, 3)),
    "edges": (
        lambda K: rg.edges(PAIRS[:, PAIRS[1] < K]),
        lambda K: lambda b, h, p, j: (p, j) in set(map(tuple, PAIRS.T.tolist())),
    ),
    "where": (
        lambda K: rg.where(lambda b, h, p, j: (p * 3 + j + h + 2 * b) % 4 == 0),
        lambda K: lambda b, h, p, j: (p * 3 + j + h + 2 * b) % 4 == 0,
    ),
    "and": (
        lambda K: rg.causal() & rg.window(2, 2) & rg.padding([K, 3]),
        lambda K: lambda b, h, p, j: j <= p and abs(p - j) <= 2 and j < (K, 3)[b],
    ),
    "or": (
        lambda K: rg.window(1, 0) | rg.global_tokens([2]),
        lambda K: lambda b, h, p, j: p - 1 <= j <= p or p == 2 or j == 2,
    ),
    "not": (lambda K: ~rg.causal(), lambda K: lambda b, h, p, j: j > p),
    "not of several": (
        lambda K: ~(rg.causal() & rg.window(3, 0) | rg.padding([2, 1])),
        lambda K: lambda b, h, p, j: not ((j <= p and p - 3 <= j <= p) or j < (2, 1)[b]),
    ),
    "longformer": (
        lambda K: rg.longformer(2, [0]),
        lambda K: lambda b, h, p, j: abs(p - j) <= 2 or p == 0 or j == 0,
    ),
    "longformer dilated": (
        lambda K: rg.longformer(1, torch.tensor([3]), step=2),
        lambda K: lambda b, h, p, j: (abs(p - j) <= 2 and (p - j) % 2 == 0) or p == 3 or j == 3,
    ),
    "longformer without global tokens": (lambda K: rg.longformer(1), lambda K: lambda b, h, p, j: abs(p - j) <= 1),
    "bigbird without chance": (
        lambda K: rg.bigbird(2, blocks=3, random=0, ends=1),
        lambda K: lambda b, h, p, j: abs(p - j) <= 2 or p in (0, 1) or j in (0, 1),
    ),
}
FRAMES = {
    "square": Frame(B, H, 7, 7, 0),
    "last at last": Frame(B, H, 4, 9, 5),
    "top left": Frame(B, H, 9, 6, 0),
    "before the keys": Frame(B, H, 8, 7, -3),
    "beyond the keys": Frame(B, H, 5, 6, 4),
    "per row": Frame(B, H, 6, 8, torch.tensor([2, -4])),
}


def bits(mask: rg.Mask, frame: Frame) -> Tensor:
    return mask.allows(frame.indices()).expand(frame.B, frame.H, frame.Q, frame.K)


def expected(predicate: Predicate, frame: Frame) -> Tensor:
    offsets = frame.offsets() * (frame.B if isinstance(frame.offset, int) else 1)
    table = torch.zeros(frame.B, frame.H, frame.Q, frame.K, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(frame.B), range(frame.H), range(frame.Q), range(frame.K)):
        table[b, h, i, j] = predicate(b, h, offsets[b] + i, j)
    return table


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_allows_what_its_formula_says(name: str, frame: Frame) -> None:
    make, predicate = PATTERNS[name]
    mask = make(frame.K)
    mask.check(frame)
    torch.testing.assert_close(bits(mask, frame), expected(predicate(frame.K), frame))


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_the_same_for_single_entries_and_for_a_box(name: str, frame: Frame) -> None:
    mask = PATTERNS[name][0](frame.K)
    sizes = (frame.B, frame.H, frame.Q, frame.K)
    b, h, i, j = (torch.arange(n) for n in sizes)
    scattered = Indices(frame, b[:, None, None, None], h[:, None, None], i[:, None], j)
    torch.testing.assert_close(mask.allows(scattered).expand(sizes), bits(mask, frame))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_part_of_a_pattern_is_that_part_of_the_whole(name: str) -> None:
    frame = FRAMES["per row"]
    mask = PATTERNS[name][0](frame.K)
    part = mask.allows(frame.indices(slice(1, 2), slice(1, 2), slice(2, 5), slice(3, 8)))
    torch.testing.assert_close(part.expand(1, 1, 3, 5), bits(mask, frame)[1:, 1:, 2:5, 3:8])


@pytest.mark.parametrize("shape", [(9, 9), (H, 9, 9), (B, H, 9, 9), (B, 1, 1, 9), (1, H, 9, 1), (9,), ()])
@pytest.mark.parametrize("offset", [0, -4, torch.tensor([1, 5])], ids=["0", "-4", "per row"])
def test_dense_does_not_depend_on_the_offset(shape: tuple[int, ...], offset: int | Tensor) -> None:
    tensor = BITS[tuple(slice(n) if n > 1 else slice(1) for n in (1,) * (4 - len(shape)) + shape)].reshape(shape)
    torch.testing.assert_close(bits(rg.dense(tensor), Frame(B, H, 9, 9, offset)), tensor.expand(B, H, 9, 9))


def test_a_bool_tensor_as_a_mask_means_dense() -> None:
    assert rg.Attention(mask=BITS).mask == rg.dense(BITS)


class TestRandomBlocks:
    def test_every_block_draws_per_row_blocks_up_to_its_own(self) -> None:
        frame = Frame(1, 1, 40, 40, 0)
        table = bits(rg.random_blocks(3, 4, seed=5), frame)[0, 0].reshape(10, 4, 10, 4)
        blocks = table.all(3).all(1)
        assert torch.equal(blocks, table.any(3).any(1)), "blocks are whole"
        assert blocks.tril().sum(1).tolist() == [1, 2, *[3] * 8]
        assert torch.equal(blocks, blocks.mT), "who is drawn sees who drew it"

    @pytest.mark.parametrize("K", [1, 4, 5, 17, 39])
    def test_visible_keys_do_not_depend_on_the_number_of_keys(self, K: int) -> None:
        for mask in (rg.random_blocks(3, 4, seed=5), rg.bigbird(3, random=2)):
            whole = bits(mask, Frame(1, 1, 40, 40, 0))
            assert torch.equal(bits(mask, Frame(1, 1, K, K, 0)), whole[:, :, :K, :K])

    def test_all_blocks_are_drawn_if_there_are_too_few(self) -> None:
        assert bits(rg.random_blocks(9, 4), Frame(1, 1, 8, 8, 0)).all()

    def test_the_same_seed_gives_the_same_blocks_and_another_seed_others(self) -> None:
        frame = Frame(1, 1, 64, 64, 0)
        drawn = [bits(rg.random_blocks(2, 4, seed), frame) for seed in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])

    def test_a_query_sees_the_same_keys_wherever_the_call_begins(self) -> None:
        mask, K = rg.random_blocks(2, 4, seed=3), 32
        whole = bits(mask, Frame(1, 1, K, K, 0))
        last = bits(mask, Frame(1, 1, 5, K, K - 5))
        assert torch.equal(last, whole[:, :, -5:])

    def test_queries_beyond_the_keys_see_what_they_drew_and_those_before_them_nothing(self) -> None:
        mask = rg.random_blocks(2, 4)
        assert torch.equal(bits(mask, Frame(1, 1, 8, 8, 8)), bits(mask, Frame(1, 1, 16, 16, 0))[:, :, 8:, :8])
        assert not bits(mask, Frame(1, 1, 8, 8, -8)).any()

    def test_every_block_is_drawn_about_equally_often(self) -> None:
        frame = Frame(1, 1, 8, 8, 0)
        counts = sum(bits(rg.random_blocks(2, 1, seed), frame).double() for seed in range(400))[0, 0]
        for row in range(1, 8):
            expected = 400 * 2 / (row + 1)
            assert (counts[row, : row + 1].mean() - expected).abs() < 1e-9
            assert (counts[row, : row + 1] - expected).abs().max() < 51  # five standard deviations of 400 draws at most

    def test_bigbird_is_its_three_parts(self) -> None:
        assert rg.bigbird(4, blocks=5, random=2, ends=1, seed=7) == (
            rg.window(8, 8) | rg.random_blocks(2, 4, seed=7) | rg.global_tokens(range(4))
        )


def diagonal(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
    return p == j


def different_masks() -> list[rg.Mask]:
    return [
        rg.causal(),
        rg.window(2, 0),
        rg.window(0, 2),
        rg.dilated(2, 1),
        rg.dilated(1, 2),
        rg.prefix(3),
        rg.prefix([3, 3]),
        rg.padding(3),
        rg.padding([3, 3]),
        rg.padding([3, 2]),
        rg.documents([0, 0, 1]),
        rg.documents([0, 1, 1]),
        rg.documents([[0, 1, 1]]),
        rg.global_tokens([0]),
        rg.global_tokens([0, 1]),
        rg.global_tokens([[0], [1]]),
        rg.blocks(torch.ones(2, 2, dtype=torch.bool), 2),
        rg.blocks(torch.ones(2, 2, dtype=torch.bool), 3),
        rg.blocks(torch.eye(2, dtype=torch.bool), 2),
        rg.random_blocks(1, 2),
        rg.random_blocks(1, 2, seed=1),
        rg.random_blocks(2, 1),
        rg.edges([(0, 0), (1, 1)]),
        rg.edges([(0, 1), (1, 0)]),
        rg.dense(torch.eye(2, dtype=torch.bool)),
        rg.dense(torch.ones(2, 2, dtype=torch.bool)),
        rg.where(diagonal),
        rg.causal() & rg.window(2, 0),
        rg.causal() | rg.window(2, 0),
        ~rg.causal(),
        ~rg.window(2, 0),
        ~(rg.causal() & rg.window(2, 0)),
    ]


def test_masks_compare_and_hash_by_value() -> None:
    first, second = different_masks(), different_masks()
    for (m, a), (n, b) in itertools.product(enumerate(first), enumerate(second)):
        assert (a == b) is (m == n), f"{a!r} and {b!r}"
        assert m != n or hash(a) == hash(b), f"{a!r}"
    assert len({*first, *second}) == len(first)


def test_a_mask_is_not_equal_to_other_objects() -> None:
    assert rg.causal() != "causal()"
    assert rg.causal() != None  # noqa: E711
    assert rg.padding(3) != 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rg.edges(torch.tensor([[1, 0, 1], [1, 0, 1]])), rg.edges([(0, 0), (1, 1)])),
        (rg.global_tokens([3, 0, 3]), rg.global_tokens((0, 3))),
        (rg.global_tokens(torch.tensor([0, 3])), rg.global_tokens(range(0, 4, 3))),
        (rg.padding([2, 3]), rg.padding(torch.tensor([2, 3], dtype=torch.int32))),
        ((rg.causal() & rg.window(1, 0)) & rg.padding(2), rg.causal() & (rg.window(1, 0) & rg.padding(2))),
        ((rg.causal() | rg.window(1, 0)) | rg.padding(2), rg.causal() | (rg.window(1, 0) | rg.padding(2))),
    ],
)
def test_equivalent_constructions_are_equal(one: rg.Mask, other: rg.Mask) -> None:
    assert one == other
    assert hash(one) == hash(other)


def test_not_not_a_is_a() -> None:
    a = rg.causal() & rg.window(3, 0)
    assert ~~a is a
    assert ~~~a == ~a


NAMES = {name: getattr(rg, name) for name in ("causal", "window", "dilated", "prefix", "padding", "documents",
                                              "global_tokens", "random_blocks", "edges")}  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "formula"),
    [
        (rg.causal(), "causal()"),
        (rg.window(255, 0), "window(255, 0)"),
        (rg.dilated(4, 2), "dilated(4, 2)"),
        (rg.prefix(7), "prefix(7)"),
        (rg.prefix([7, 8]), "prefix([7, 8])"),
        (rg.padding([5, 3]), "padding([5, 3])"),
        (rg.documents([0, 0, 1]), "documents([0, 0, 1])"),
        (rg.global_tokens([0, 9]), "global_tokens([0, 9])"),
        (rg.global_tokens([[0], [1, 2]]), "global_tokens([[0], [1, 2]])"),
        (rg.random_blocks(2, 64, seed=3), "random_blocks(2, 64, seed=3)"),
        (rg.edges([(0, 3), (1, 0)]), "edges([(0, 3), (1, 0)])"),
        (rg.causal() & rg.window(2, 0) & rg.padding(3), "causal() & window(2, 0) & padding(3)"),
        (rg.causal() & rg.window(2, 0) | rg.padding(3), "causal() & window(2, 0) | padding(3)"),
        (rg.causal() & (rg.window(2, 0) | rg.padding(3)), "causal() & (window(2, 0) | padding(3))"),
        (rg.causal() | rg.window(2, 0) & rg.padding(3), "causal() | window(2, 0) & padding(3)"),
        (~rg.causal(), "~causal()"),
        (~rg.causal() & rg.padding(3), "~causal() & padding(3)"),
        (~(rg.causal() & rg.padding(3)), "~(causal() & padding(3))"),
        (~(rg.causal() | rg.padding(3)) | rg.window(1, 1), "~(causal() | padding(3)) | window(1, 1)"),
        (rg.longformer(8, [0], step=2), "dilated(8, 2) | global_tokens([0])"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mask_prints_its_formula_and_the_formula_makes_the_mask(mask: rg.Mask, formula: str) -> None:
    assert repr(mask) == formula
    assert eval(formula, dict(NAMES)) == mask


@pytest.mark.parametrize(
    ("mask", "formula"),
    [
        (rg.blocks(torch.ones(4, 4, dtype=torch.bool), 8), "blocks((1, 1, 4, 4), 8)"),
        (rg.dense(torch.ones(5, 7, dtype=torch.bool)), "dense((1, 1, 5, 7))"),
        (rg.padding(torch.arange(9)), "padding((9,))"),
        (rg.documents(torch.zeros(3, 50, dtype=torch.int64)), "documents((3, 50))"),
        (rg.where(diagonal), "where(diagonal)"),
    ],
)
def test_a_mask_that_holds_a_large_tensor_prints_its_shape(mask: rg.Mask, formula: str) -> None:
    assert repr(mask) == formula


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (rg.causal(), "█··· ██·· ███· ████"),
        (rg.window(1, 0), "█··· ██·· ·██· ··██"),
        (rg.dilated(1, 2), "█·█· ·█·█ █·█· ·█·█"),
        (rg.prefix(2), "██·· ██·· ███· ████"),
        (rg.padding(2), "██·· ██·· ██·· ██··"),
        (rg.padding([1, 4]), "█··· █··· █··· █···"),
        (rg.documents([5, 5, 5, 1]), "███· ███· ███· ···█"),
        (rg.global_tokens([1]), "·█·· ████ ·█·· ·█··"),
        (rg.blocks(torch.tensor([[True, False], [False, True]]), 2), "██·· ██·· ··██ ··██"),
        (rg.edges(torch.tensor([[0, 1], [3, 2]])), "···█ ··█· ···· ····"),
        (rg.edges(np.array([[0, 1], [3, 2]])), "···█ ··█· ···· ····"),
        (rg.edges([(0, 1), (2, 3)]), "·█·· ···· ···█ ····"),
        (rg.edges(((0, 1), (2, 3))), "·█·· ···· ···█ ····"),
        (rg.edges(zip((0, 2), (1, 3), strict=True)), "·█·· ···· ···█ ····"),
        (rg.edges([[0, 1], [2, 3], [3, 3]]), "·█·· ···· ···█ ···█"),
        (rg.edges([(2, 1)]), "···· ···· ·█·· ····"),
        (rg.edges([]), "···· ···· ···· ····"),
        (rg.dense(torch.eye(4, dtype=torch.bool)), "█··· ·█·· ··█· ···█"),
        (rg.where(lambda b, h, p, j: p == j), "█··· ·█·· ··█· ···█"),
        (rg.causal() & ~rg.window(0, 0), "···· █··· ██·· ███·"),
        (rg.longformer(0, [0]), "████ ██·· █·█· █··█"),
        (rg.bigbird(1, blocks=1, random=0), "████ ██·· █·█· █··█"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value),
)
def test_a_mask_draws_itself(mask: rg.Mask, picture: str) -> None:
    assert mask.draw(4) == picture.replace(" ", "\n")


def test_a_drawing_has_one_character_a_tile_and_shows_partial_tiles() -> None:
    assert rg.causal().draw(8, width=4) == "▒···\n█▒··\n██▒·\n███▒"


def test_a_drawing_of_fewer_queries_than_keys_ends_at_the_last_key() -> None:
    assert rg.causal().draw(2, 4) == "███·\n████"


@pytest.mark.parametrize("mask", different_masks(), ids=repr)
def test_str_is_the_formula_and_a_drawing(mask: rg.Mask) -> None:
    formula, *lines = str(mask).splitlines()
    assert formula == repr(mask)
    assert "\n".join(lines) == mask.draw()
    assert lines
    assert len({len(line) for line in lines}) == 1
    assert set("".join(lines)) <= set("█▒·")
    assert len(lines) <= 32


@pytest.mark.parametrize("mask", [rg.padding([3, 0, 7]), rg.causal(), rg.prefix(2), ~rg.padding([3, 0, 7])])
def test_the_complement_of_first_keys_is_an_interval(mask: rg.Mask) -> None:
    frame = Frame(3, 1, 5, 7, 1)
    edges = (~mask).intervals(frame)
    assert edges is not None
    start, stop = (torch.tensor(edge)[..., None] for edge in edges)
    j = torch.arange(7)
    assert torch.equal(
        ((j >= start) & (j < stop)).expand(3, 1, 5, 7), (~mask).allows(frame.indices()).expand(3, 1, 5, 7)
    )


def test_the_complement_of_a_window_is_no_interval() -> None:
    assert (~rg.window(1, 1)).intervals(Frame(1, 1, 5, 5, 0)) is None


def test_ranges_may_end_far_past_the_last_key() -> None:
    far = rg.ranges([0] * 70, [2**40] * 70)
    q = torch.randn(1, 1, 70, 4, dtype=torch.float64)
    assert torch.allclose(rg.attention(q, q, q, mask=far & rg.dilated(100, 1)), rg.attention(q, q, q))
