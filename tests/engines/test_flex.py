"""FlexAttention, uncompiled on a CPU, and one description compiled."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.engines import flex

N, H, D = 33, 4, 8
DESCRIPTIONS = {
    "plain": {},
    "causal window": {"mask": rg.causal() & rg.window(7, 0)},
    "offset": {"mask": rg.causal(), "offset": 3},
    "an offset per batch row": {"mask": rg.causal(), "offset": [3, -2]},
    "padding": {"mask": rg.padding([5, 30])},
    "documents": {"mask": rg.documents(torch.arange(N) // 7)},
    "bigbird": {"mask": rg.bigbird(4)},
    "edges": {"mask": rg.edges(torch.tensor([[0, 1, 5, 9], [3, 1, 8, 9]]))},
    "blocks per head": {"mask": rg.blocks(torch.rand(H, 9, 9) < 0.5, 4)},
    "dense": {"mask": torch.rand(N, N) < 0.5},
    "where": {"mask": rg.where(lambda b, h, p, j: (p + j + h) % 2 == 0)},
    "varlen": {"mask": rg.varlen([0, 5, 5, 21, N], [0, 8, 20, 20, N], mask=rg.causal())},
    "tree": {"mask": rg.tree([-1, 0, 0, 1, 1, 2, 4])},
    "neighborhood": {"mask": rg.neighborhood((3, 11), (2, 3), (1, 2)), "offset": 0},
    "selected": {"mask": rg.selected(torch.randint(-1, 7, (1, H, N, 2)), 5)},
    "ranges": {"mask": rg.ranges([[0] * N, [4] * N], [[9] * N, [2] * N])},
    "not": {"mask": ~(rg.dilated(3, 4) | rg.prefix([2, 9]))},
    "random blocks": {"mask": rg.random_blocks(2, 7)},
    "alibi": {"bias": rg.alibi(H)},
    "t5 and a dense bias": {"bias": rg.t5(torch.randn(8, H)) + rg.dense_bias(torch.randn(N, N))},
    "relative": {"bias": rg.relative(torch.randn(9, H)), "temperature": 0.7},
    "shaw": {"bias": rg.shaw(torch.randn(9, D))},
    "softcap": {"score": rg.Dot(softcap=2.0)},
    "cosine with a scale a head": {"score": rg.Cosine(scale=torch.rand(H) + 1)},
    "bilinear": {"score": rg.Bilinear(torch.randn(D, D))},
    "modifier": {"score": lambda s, b, h, p, j: s - 0.1 * (p - j).abs()},
    "sink": {"sink": torch.randn(H), "mask": rg.causal()},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_flex_equals_the_reference(name: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, H, N, D, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, N, D, dtype=torch.float64)
    ours = rg.attention(q, k, v, engine="flex", return_lse=True, **DESCRIPTIONS[name])
    theirs = rg.attention(q, k, v, engine="reference", return_lse=True, **DESCRIPTIONS[name])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
def test_views_with_the_negative_bit_are_read_with_their_sign(name: str) -> None:
    def view(x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, -x).conj().imag

    tensors = {key: torch.randn(1, H, N, N if key == "bias" else D) for key in ("query", "key", "value", "bias")}
    expected = rg.attention(**tensors, engine="flex")
    assert view(tensors[name]).is_neg()
    torch.testing.assert_close(rg.attention(**{**tensors, name: view(tensors[name])}, engine="flex"), expected)


def test_flex_reports_why_it_cannot_compute() -> None:
    q, k, v = (torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3))
    with pytest.raises(ValueError, match="cannot train on a CPU"):
        rg.attention(q, k, v, engine="flex")


OF_ONE_LENGTH = ("documents", "blocks per head", "dense", "varlen", "neighborhood", "selected", "ranges")
MASKED = [name for name, description in DESCRIPTIONS.items() if "mask" in description]


@pytest.mark.parametrize("length", [N, 300])
@pytest.mark.parametrize("name", MASKED)
def test_the_block_mask_is_that_of_torch(name: str, length: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    if length != N and name in OF_ONE_LENGTH:
        pytest.skip("made for one length")
    description = {key: value for key, value in DESCRIPTIONS[name].items() if key in ("mask", "offset")}
    problem = rg.Attention(**description).problem(*torch.randn(3, 2, H, length, D))
    ours = flex.block_mask(problem, torch.device("cpu"))
    assert flex.block_mask(problem, torch.device("cpu")) is ours
    theirs = create_block_mask(ours.mask_mod, *ours.kv_num_blocks.shape[:2], length, length, device="cpu")
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    b, h, i, j = (torch.arange(n) for n in (2, H, length, length))
    seen = ours.mask_mod(b[:, None, None, None], h[:, None, None], i[:, None], j)
    assert problem.mask is not None
    exact = problem.mask.allows(problem.frame.indices())
    assert torch.equal(seen.expand(2, H, length, length), exact.expand(2, H, length, length))


def test_it_compiles_once_for_a_description_and_at_most_twice_more_for_other_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(flex_attention, backend=counter)
    monkeypatch.setattr(flex, "_kernel", lambda device: compiled)
    counts = []
    for length in (150, 150, 200, 333):
        query, key, value = torch.randn(3, 1, H, length, 16)
        attend = rg.Attention(mask=rg.causal() & rg.window(70, 0), bias=rg.alibi(H))
        with torch.no_grad():
            ours = attend(query, key, value, engine="flex")
            torch.testing.assert_close(ours, attend(query, key, value, engine="reference"), rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 3]  # for the first other length, and the first other number of blocks
