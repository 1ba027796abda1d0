"""varlen, tree, neighborhood and selected: against separate calls and definitions written in loops."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings

import regard as rg
from regard.geometry import Frame
from tests.definition import Places, visible
from tests.masks.test_tiles import bits_of, build, cases, truth


@settings(max_examples=150)
@given(case=cases())
def test_bits_are_those_of_the_definition(case: tuple) -> None:
    mask, frame, _ = case
    places = Places.of((frame.B, frame.H, frame.Q, frame.K), frame.offset)
    assert torch.equal(bits_of(mask, frame), visible(mask, places))


def lengths(draw: Random, most: int) -> tuple[list[int], list[int]]:
    """Cumulative numbers of queries and keys of a few sequences, some of them empty."""
    cuts = ([0], [0])
    for _ in range(draw.randint(1, 5)):
        for cut in cuts:
            cut.append(cut[-1] + draw.choice([0, 1, draw.randint(0, most)]))
    return cuts


@pytest.mark.parametrize("seed", range(60))
def test_varlen_is_one_call_per_sequence(seed: int) -> None:
    draw = Random(seed)
    queries, keys = lengths(draw, draw.choice([5, 90]))
    inside = draw.choice(
        [None, rg.causal(), rg.window(draw.randint(0, 4), 2), rg.dilated(2, 3), rg.window(9, 0) & rg.causal()]
    )
    torch.manual_seed(seed)
    tensors = [
        torch.randn(1, 2, n, 8, dtype=torch.float64, requires_grad=True) for n in (queries[-1], keys[-1], keys[-1])
    ]
    out = rg.attention(*tensors, mask=rg.varlen(queries, keys, mask=inside))
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    parts = [
        rg.attention(query, key, value, mask=inside, engine="reference")
        for query, key, value in (
            (tensors[0][:, :, a:b], tensors[1][:, :, c:d], tensors[2][:, :, c:d])
            for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False)
        )
    ]
    expected = torch.cat(parts, 2)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), tensors), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "mask",
    [
        rg.varlen([0, 70, 70, 200], [0, 130, 150, 260], mask=rg.causal()),
        rg.neighborhood((13, 20), (5, 7)),
        rg.neighborhood((4, 5, 13), (3, 3, 5)),
        rg.neighborhood(260, 9),
        rg.selected(torch.randint(0, 9, (1, 2, 200, 4), generator=torch.Generator().manual_seed(1)), 32),
        rg.selected(torch.arange(260).reshape(1, 260).expand(200, 260), 1),
    ],
    ids=repr,
)
def test_tile_kinds_are_exact(mask: rg.Mask) -> None:
    """No tile is visited that has no visible entry, and every full tile is known to be full."""
    rows = 200 if "neighborhood" not in repr(mask) else 260
    frame = Frame(1, 2, rows, 260, 260 - rows)
    for size in ((16, 16), (64, 64), (8, 32)):
        table, (some, every) = build(mask, frame, size), truth(mask, frame, size)
        some, every = some[:, : table.extent[1]], every[:, : table.extent[1]]
        assert table.visited == some.sum()
        assert table.partial == (some & ~every).sum()


def test_a_mask_of_selected_keys_sees_changes_of_its_indices() -> None:
    indices = torch.tensor([[0], [1]])
    mask, (q, k, v) = rg.selected(indices), torch.randn(3, 1, 1, 2, 4)
    assert torch.allclose(rg.attention(q, k, v, mask=mask), v)
    indices.copy_(indices.flip(0))
    assert torch.allclose(rg.attention(q, k, v, mask=mask), v.flip(2))


def test_new_masks_compile_export_and_decode() -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    for mask in (rg.varlen([0, 5, 12], mask=rg.causal()), rg.neighborhood((3, 4), (3, 3)), rg.tree([-1, 0, 0, 2])):
        attend = rg.Attention(mask=mask)
        expected = attend(q, k, v, engine="reference")
        assert torch.allclose(torch.compile(attend, backend="eager", fullgraph=True)(q, k, v), expected, atol=1e-5)
    nodes = rg.attention(q[:, :, 8:], k, v, mask=rg.tree([-1, 0, 0, 2]), engine="reference")
    assert torch.allclose(nodes, rg.attention(q, k, v, mask=rg.tree([-1, 0, 0, 2]))[:, :, 8:], atol=1e-5)


def test_a_large_neighborhood_needs_no_dense_mask() -> None:
    table = build(rg.neighborhood((512, 512), (7, 7)), Frame(1, 1, 512 * 512, 512 * 512, 0), (64, 64))
    assert table.visited <= 512 * 8 * 7 * 3


@pytest.mark.parametrize(
    ("build_mask", "words"),
    [
        (lambda: rg.varlen([1, 4]), ["cu_seqlens_q", "start with 0"]),
        (lambda: rg.varlen([0, 4, 2]), ["cu_seqlens_q", "not decrease"]),
        (lambda: rg.varlen([0, 4], [0, 1, 2]), ["one entry more", "2 and 3"]),
        (lambda: rg.varlen([0, 4], mask=rg.padding([2])), ["distance", "padding", "&"]),
        (lambda: rg.tree([0, 1]), ["parents", "earlier node", "-1"]),
        (lambda: rg.neighborhood((8, 8), (9, 3)), ["window", "9 x 1 > 8"]),
        (lambda: rg.neighborhood((2, 2, 2, 2), 1), ["one to three"]),
        (lambda: rg.selected(torch.zeros(3, dtype=torch.int64)), ["indices", "(Q, n)", "(3,)"]),
        (lambda: rg.selected(torch.zeros(2, 2, dtype=torch.int64), 0), ["size", "at least 1"]),
    ],
)
def test_wrong_arguments_are_named(build_mask: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build_mask()  # type: ignore[operator]
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (rg.varlen([0, 3]), ["last entries", "5 and 5", "3 and 3"]),
        (rg.neighborhood((2, 3), 1), ["(2, 3)", "6 positions", "5 keys"]),
        (rg.tree([-1] * 6), ["6 nodes", "5 keys"]),
        (rg.selected(torch.zeros(4, 1, dtype=torch.int64)), ["indices", "(1, 1, 4, 1)"]),
        (rg.selected(torch.full((5, 1), 3), 2), ["block 3", "3 blocks of 2"]),
    ],
    ids=repr,
)
def test_a_call_of_another_size_is_refused(mask: rg.Mask, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        rg.attention(*torch.randn(3, 1, 1, 5, 4), mask=mask)
    assert all(word in str(error.value) for word in words), str(error.value)
