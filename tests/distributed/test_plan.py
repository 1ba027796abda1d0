"""Communication plans, without processes: all visible entries are computed once, and bytes are predicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import regard as rg
import regard.distributed as rd
from regard.distributed.description import closure_tensors, description_digest, full_frame
from regard.distributed.plan import Plan, plan
from regard.geometry import CallSlice
from tests.strategies import Call, calls


@st.composite
def split(draw: st.DrawFn) -> tuple[Call, rd.Layout, rd.Layout]:
    call, ranks = draw(calls(longest=80)), draw(st.integers(1, 4))

    def layout(n: int) -> rd.Layout:
        if draw(st.booleans()):
            return rd.Layout.even(n, ranks, "balanced")
        cuts = sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1)))
        return rd.Layout.of([b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)])

    return call, layout(call.query.shape[2]), layout(call.key.shape[2])


def planned(attend: rg.Attention, B: int, H: int, queries: rd.Layout, keys: rd.Layout) -> Plan:
    return plan(attend.mask, full_frame(attend, B, H, queries.length, keys.length), queries, keys)


@settings(max_examples=60)
@given(drawn=split())
def test_the_blocks_of_all_ranks_cover_the_call(drawn: tuple[Call, rd.Layout, rd.Layout]) -> None:
    call, queries, keys = drawn
    attend, (B, H, Q, _), E = rg.Attention(**call.description), call.query.shape, call.value.shape[3]
    plan = planned(attend, B, H, queries, keys)
    frame = full_frame(attend, B, H, Q, keys.length)
    output = call.query.new_zeros(B, H, Q, E)
    lse = call.query.new_full((B, H, Q), float("-inf"))
    if attend.sink is not None:
        lse = torch.as_tensor(attend.sink, dtype=torch.float64).detach().reshape(-1, 1).expand(B, H, Q).clone()
    without = rg.Attention(**call.description | {"sink": None})
    for t in range(plan.ranks):
        for r in range(plan.ranks):
            for block in plan.blocks[t][r]:
                assert any(a <= block.columns[0] and block.columns[1] <= b for a, b in plan.pieces[t][r])
                rows, columns = slice(*block.rows), slice(*block.columns)
                own = without.narrow(frame, CallSlice(slice(0, H), rows, columns))
                tensors = call.query[:, :, rows], call.key[:, :, columns], call.value[:, :, columns]
                part, part_lse = own(*tensors, return_lse=True)
                output[:, :, rows], lse[:, :, rows] = (
                    x.detach() for x in rg.merge([output[:, :, rows], part], [lse[:, :, rows], part_lse])
                )
    expected, wanted_lse = attend(call.query, call.key, call.value, engine="reference", return_lse=True)
    torch.testing.assert_close(output, expected.detach(), atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(lse, wanted_lse.detach(), atol=1e-11, rtol=1e-11)


@settings(max_examples=30)
@given(call=calls(longest=40), ranks=st.integers(1, 3))
def test_a_slice_of_heads_equals_those_heads_of_the_full_call(call: Call, ranks: int) -> None:
    attend, (B, H, Q, _) = rg.Attention(**call.description), call.query.shape
    G, K = call.key.shape[1:3]
    assume(G % ranks == 0)
    expected = attend(call.query, call.key, call.value, engine="reference").detach()
    for r in range(ranks):
        heads, shared = (slice(r * n // ranks, (r + 1) * n // ranks) for n in (H, G))
        own = attend.narrow(full_frame(attend, B, H, Q, K), CallSlice(heads, slice(0, Q), slice(0, K)))
        actual = own(call.query[:, heads], call.key[:, shared], call.value[:, shared]).detach()
        torch.testing.assert_close(actual, expected[:, heads], atol=1e-11, rtol=1e-11)


def test_a_window_needs_some_keys_of_neighbours_only() -> None:
    layout = rd.Layout.even(4096, 8)
    plan = planned(rg.Attention(mask=rg.causal() & rg.window(100, 0)), 1, 1, layout, layout)
    for t in range(8):
        for r in range(8):
            assert bool(plan.pieces[t][r]) == (r in (t, t - 1))
    assert plan.count(3, 2) == 112  # of 512: tiles of 16 that hold the last 100


def test_a_balanced_layout_balances_causal_work() -> None:
    def work(layout: str) -> list[int]:
        held = rd.Layout.even(1024, 4, layout)
        plan = planned(rg.Attention(mask=rg.causal()), 1, 1, held, held)
        return [
            sum(
                max(0, min(p + 1, b.columns[1]) - b.columns[0])
                for blocks in row
                for b in blocks
                for p in range(*b.rows)
            )
            for row in plan.blocks
        ]

    even, uneven = work("balanced"), work("contiguous")
    assert sum(even) == sum(uneven) == 1024 * 1025 // 2
    assert max(even) == min(even)
    assert max(uneven) > 6 * min(uneven)


def test_documents_on_one_rank_are_not_sent() -> None:
    moved = rd.bytes_moved(
        rg.Attention(mask=rg.documents([0] * 64 + [1] * 64)), ranks=2, B=1, H=2, Q=128, D=8, method="ring"
    )
    assert moved.sent == (0, 0)


def test_heads_are_exchanged_if_that_sends_fewer_bytes() -> None:
    sizes = {"B": 1, "H": 8, "Q": 1024, "D": 64}
    assert rd.bytes_moved(rg.Attention(), ranks=4, **sizes).method == "heads"
    assert rd.bytes_moved(rg.Attention(), ranks=2, backward=False, **sizes).method == "ring"  # equal bytes
    assert rd.bytes_moved(rg.Attention(), ranks=4, G=2, **sizes).method == "ring"  # 2 heads, 4 ranks
    assert rd.bytes_moved(rg.Attention(mask=rg.window(9, 0)), ranks=4, **sizes).method == "ring"
    with pytest.raises(ValueError, match="method='heads' needs key/value heads G that are a multiple of the 3 ranks"):
        rd.bytes_moved(rg.Attention(), ranks=3, method="heads", **sizes)
    with pytest.raises(ValueError, match="method must be one of ring, heads"):
        rd.bytes_moved(rg.Attention(), ranks=3, method="gather", **sizes)


@given(length=st.integers(0, 50), ranks=st.integers(1, 6), layout=st.sampled_from(rd.LAYOUTS))
def test_join_is_the_inverse_of_split(length: int, ranks: int, layout: str) -> None:
    held, x = rd.Layout.even(length, ranks, layout), torch.randn(2, length, 3)
    parts = [held.own(x, 1, r) for r in range(ranks)]
    assert torch.equal(held.join(parts, 1), x)
    assert [part.shape[1] for part in parts] == list(held.lengths)
    assert max(held.lengths) - min(held.lengths) <= 2
    assert rd.Layout.of(held.lengths, layout) == held
    for r in range(ranks):
        assert torch.equal(x[:, held.positions(r)], parts[r])


def test_invalid_layouts_raise() -> None:
    with pytest.raises(ValueError, match="layout must be one of contiguous, balanced, but is 'zigzag'"):
        rd.Layout.even(8, 2, "zigzag")
    with pytest.raises(ValueError, match=r"balanced shards of 8 tokens hold \[4, 4\], but the ranks hold \[5, 3\]"):
        rd.Layout.of([5, 3], "balanced")
    with pytest.raises(RuntimeError, match="there is no process group: start the program with torchrun"):
        rd.attention(*torch.randn(3, 1, 1, 4, 4))


def test_different_descriptions_have_different_digests() -> None:
    def digest(**change: object) -> int:
        given = {"mask": rg.causal() & rg.documents([0, 0, 1]), "bias": rg.alibi(2), "temperature": 0.5}
        return description_digest(rg.Attention(**given | change))

    others = (
        {"mask": rg.causal() & rg.documents([0, 1, 1])},
        {"mask": rg.causal() | rg.documents([0, 0, 1])},
        {"bias": rg.alibi(4)},
        {"bias": rg.relative(torch.zeros(3, 2))},
        {"temperature": 1.0},
        {"offset": 3},
        {"score": rg.Cosine()},
    )
    assert digest() == digest()
    assert len({digest(), *(digest(**change) for change in others)}) == 1 + len(others)
    assert digest(bias=rg.relative(torch.zeros(3, 2))) == digest(
        bias=rg.relative(torch.ones(3, 2))
    )  # values of learned tensors do not count


def test_tensors_in_closures_of_score_functions_are_found() -> None:
    a, b, fixed = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True), torch.ones(3)
    derived = (a * 2).exp()
    score = rg.Modified(lambda s, *_: s + derived.sum() + fixed.sum(), rg.Modified(lambda s, *_: s * b))
    assert {id(leaf) for leaf in closure_tensors(score, torch.device("cpu"))} == {id(a), id(b)}
    assert list(closure_tensors(rg.Modified(lambda s, *_: s), torch.device("cpu"))) == []
