"""Random calls: shapes, heads, offsets and compositions of masks, biases and scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import regard as rg


@dataclass
class Call:
    """One drawn call, its tensors in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    description: dict[str, Any]
    learned: list[Tensor] = field(default_factory=list)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(t.shape)) for t in (self.query, self.key, self.value))
        return f"Call({shapes}, offset={self.description.get('offset')}, {rg.Attention(**self.description)})"


def leaves(B: int, H: int, Q: int, K: int) -> st.SearchStrategy:
    small = st.integers(0, K + 2)
    rows = st.lists(st.integers(0, K), min_size=B, max_size=B)
    seeds = st.integers(0, 99)

    def random(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def documents(seed: int, torn: bool) -> rg.Mask:
        ids = torch.randint(0, 4, (B, K), generator=random(seed))
        return rg.documents(ids if torn else ids.sort(-1).values)

    def blocks(seed: int, size: int, shape: int) -> rg.Mask:
        n = -(-4 * (Q + K) // size)
        return rg.blocks(torch.rand(((n, n), (H, n, n), (B, 1, n, n))[shape], generator=random(seed)) < 0.5, size)

    def dense(seed: int, shape: int) -> rg.Mask:
        sizes = ((Q, K), (B, 1, 1, K), (1, H, Q, K), (B, H, Q, K), (Q, 1))[shape]
        return rg.dense(torch.rand(sizes, generator=random(seed)) < 0.5)

    return st.one_of(
        st.builds(rg.causal),
        st.builds(rg.window, small, small),
        st.builds(rg.dilated, st.integers(0, 4), st.integers(1, 4)),
        st.builds(rg.prefix, small | rows),
        st.builds(rg.padding, rows),
        st.builds(documents, seeds, st.booleans()),
        st.builds(lambda s: rg.ranges(*torch.randint(0, K + 2, (2, B, K), generator=random(s)).sort(0).values), seeds),
        st.builds(rg.global_tokens, st.lists(st.integers(0, K - 1), max_size=3)),
        st.builds(blocks, seeds, st.integers(1, 9), st.integers(0, 2)),
        st.builds(rg.random_blocks, st.integers(1, 3), st.integers(1, 9), seeds),
        st.builds(lambda s, n: rg.edges(torch.randint(0, K, (2, n), generator=random(s))), seeds, st.integers(0, 20)),
        st.builds(dense, seeds, st.integers(0, 4)),
        st.just(rg.where(lambda b, h, p, j: (p + j + h) % 3 != b % 2)),
    )


def masks(B: int, H: int, Q: int, K: int) -> st.SearchStrategy:
    def extend(inner: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        )

    return st.recursive(leaves(B, H, Q, K), extend, max_leaves=3)


@st.composite
def calls(draw: st.DrawFn, longest: int = 40, plain: bool = False) -> Call:
    """`plain` draws neither score nor bias."""
    B, G, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    H, Q, K = G * repeats, draw(st.integers(1, longest)), draw(st.integers(1, longest))
    D, E = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    learned: list[Tensor] = []

    def table(*shape: int) -> Tensor:
        learned.append(normal(*shape).requires_grad_())
        return learned[-1]

    R = draw(st.integers(0, 5))

    def scores() -> Any:
        kind = draw(st.integers(0, 8))
        if kind == 0:
            return rg.Cosine(scale=table(H))
        if kind == 1:
            return rg.Additive(table(H, D) if draw(st.booleans()) else table(D))
        if kind == 2:
            return rg.Bilinear(table(H, D, D) if draw(st.booleans()) else table(D, D))
        if kind == 3:
            return rg.Dot(softcap=2.0)
        if kind == 4:
            return rg.Dot(scale=table(H))
        if kind == 8:
            steepness = table(H)
            return lambda s, b, h, p, j: s.sin() - steepness[h] * (p - j).abs()
        return rg.Dot()

    def biases() -> Any:
        kind = draw(st.integers(0, 8))
        if kind == 0:
            return rg.alibi(H)
        if kind == 1:
            return rg.relative(table(H, 2 * R + 1))
        if kind == 2:
            return rg.t5(table(8, H), bidirectional=draw(st.booleans()), max_distance=draw(st.integers(5, 30)))
        if kind == 3:
            return rg.shaw(table(2 * R + 1, D), table(2 * R + 1, E) if draw(st.booleans()) else None)
        if kind == 4:
            return rg.shaw(table(H, 2 * R + 1, D), table(H, 2 * R + 1, E))
        if kind == 5:
            return rg.dense_bias(table(*draw(st.sampled_from([(Q, K), (B, 1, 1, K), (H, Q, 1), (B, H, Q, K)]))))
        if kind == 6:
            return rg.alibi(H) + rg.dense_bias(table(Q, K)) + rg.relative(table(H, 2 * R + 1))
        return None

    offset = draw(st.one_of(st.none(), st.integers(-5, K), st.lists(st.integers(-5, K), min_size=B, max_size=B)))
    description = {
        "mask": draw(st.none() | masks(B, H, Q, K)),
        "offset": offset,
        "temperature": draw(st.sampled_from([1.0, 0.7, 3.0])),
    }
    if not plain:
        description |= {"score": scores(), "bias": biases()}
        if draw(st.booleans()):
            description["sink"] = table(H) if draw(st.booleans()) else 0.5
    return Call(normal(B, H, Q, D), normal(B, G, K, D), normal(B, G, K, E), description, learned)
