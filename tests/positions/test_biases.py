"""Relative positions as biases: each against loops written from its paper."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard as rg
from regard.engines import native
from regard.geometry import Frame, Indices
from regard.positions.biases import T5, Alibi, Bias

B, H, Q, K, D, E = 2, 3, 5, 7, 4, 3
OFFSETS = {"default": K - Q, "0": 0, "negative": -4, "per row": torch.tensor([3, -2])}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tile(bias: Bias, offset: int | Tensor, query: Tensor | None = None, scale: float | Tensor = 1.0) -> Tensor:
    """Return the bias of a whole call."""
    query = normal(B, H, Q, D) if query is None else query
    return bias.tile(Frame(B, H, Q, K, offset).indices(), query, scale).expand(B, H, Q, K)


def looped(function, offset: int | Tensor) -> Tensor:
    """Evaluate `function(b, h, i, distance)` at every entry, distance = j - p."""
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * B
    table = torch.zeros(B, H, Q, K, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(Q):
                for j in range(K):
                    table[b, h, i, j] = function(b, h, i, j - (offsets[b] + i))
    return table


def paper_slopes(heads: int) -> list[float]:
    """A power of two n: the geometric sequence that starts at 2^(-8/n) and has that ratio. Otherwise the slopes of the
    power of two below, and then every other slope, from the first on, of the power of two above."""
    if heads & (heads - 1) == 0:
        ratio = 2.0 ** (-8.0 / heads)
        return [ratio**n for n in range(1, heads + 1)]
    below = 1 << (heads.bit_length() - 1)
    return paper_slopes(below) + paper_slopes(2 * below)[0::2][: heads - below]


class TestAlibi:
    def test_eight_heads_have_the_slopes_that_the_paper_prints(self) -> None:
        assert Alibi(8).slopes(torch.device("cpu")).tolist() == [2.0**-n for n in range(1, 9)]

    @pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 12, 16, 20, 31, 32, 33, 40, 63, 64, 71, 112, 128])
    def test_slopes_follow_the_paper_for_any_number_of_heads(self, heads: int) -> None:
        slopes = Alibi(heads).slopes(torch.device("cpu"))
        torch.testing.assert_close(slopes, torch.tensor(paper_slopes(heads), dtype=torch.float64), rtol=1e-14, atol=0)

    @pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
    def test_it_falls_with_the_distance_on_both_sides(self, offset: int | Tensor) -> None:
        slopes = paper_slopes(H)
        expected = looped(lambda b, h, i, distance: -slopes[h] * abs(distance), offset)
        torch.testing.assert_close(tile(rg.alibi(H), offset), expected, rtol=1e-14, atol=1e-14)


def t5_bucket(distance: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """T5's rule for one distance (key minus query), in exact arithmetic: half of the buckets are for exact distances,
    the others grow logarithmically up to max_distance, beyond which all share the last one."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        if distance > 0:
            bucket += buckets
        distance = abs(distance)
    else:
        distance = -min(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    # the largest n with n <= log(distance / exact) / log(max_distance / exact) * (buckets - exact)
    wide = buckets - exact
    n = 0
    while n < wide and Fraction(distance, exact) ** wide >= Fraction(max_distance, exact) ** (n + 1):
        n += 1
    return bucket + min(exact + n, buckets - 1)


class TestT5:
    DISTANCES = range(-300, 301)

    @pytest.mark.parametrize("bidirectional", [True, False])
    @pytest.mark.parametrize(
        ("buckets", "max_distance"), [(32, 128), (32, 20), (16, 64), (64, 256), (8, 100), (32, 1000)]
    )
    def test_buckets_follow_the_rule(self, bidirectional: bool, buckets: int, max_distance: int) -> None:
        bias = rg.t5(torch.zeros(buckets, 1), bidirectional, max_distance)
        assert isinstance(bias, T5)
        ours = bias.bucket(torch.tensor(self.DISTANCES)).tolist()
        expected = [t5_bucket(d, bidirectional, buckets, max_distance) for d in self.DISTANCES]
        wrong = [(d, a, b) for d, a, b in zip(self.DISTANCES, ours, expected, strict=True) if a != b]
        assert wrong == [], "(distance, ours, the rule's)"

    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_buckets_use_every_row_of_the_table(self, bidirectional: bool) -> None:
        bias = rg.t5(torch.zeros(32, 1), bidirectional)
        assert isinstance(bias, T5)
        used = set(bias.bucket(torch.tensor(self.DISTANCES)).tolist())
        assert used == set(range(32)) - ({16} if bidirectional else set())  # distance 0 is not above 0

    @pytest.mark.parametrize("bidirectional", [True, False])
    @pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
    def test_it_reads_the_table_by_bucket_and_head(self, bidirectional: bool, offset: int | Tensor) -> None:
        table = normal(8, H)
        expected = looped(lambda b, h, i, d: table[t5_bucket(d, bidirectional, 8, 6), h], offset)
        torch.testing.assert_close(tile(rg.t5(table, bidirectional, 6), offset), expected)

    def test_a_table_with_one_column_serves_all_heads(self) -> None:
        table = normal(8, 1)
        torch.testing.assert_close(
            tile(rg.t5(table, True, 6), 0), tile(rg.t5(table.expand(8, H).contiguous(), True, 6), 0)
        )


def clipped(distance: int, reach: int) -> int:
    return max(-reach, min(reach, distance)) + reach


@pytest.mark.parametrize("reach", [0, 1, 2, 9])
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
def test_relative_reads_its_table_at_the_clipped_distance(offset: int | Tensor, reach: int) -> None:
    table = normal(2 * reach + 1, H)
    expected = looped(lambda b, h, i, distance: table[clipped(distance, reach), h], offset)
    torch.testing.assert_close(tile(rg.relative(table), offset), expected)


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
def test_a_relative_table_with_one_column_serves_all_heads(offset: int | Tensor) -> None:
    table = normal(5, 1)
    torch.testing.assert_close(tile(rg.relative(table), offset), tile(rg.relative(table.repeat(1, H)), offset))


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
@pytest.mark.parametrize(
    "bias",
    [rg.alibi(H), rg.relative(normal(5, H)), rg.t5(normal(8, H), True, 6), rg.shaw(normal(5, D)),
     rg.dense_bias(normal(B, H, Q, K)), rg.alibi(H) + rg.relative(normal(3, H))],
    ids=repr,
)  # fmt: skip
def test_a_bias_is_the_same_in_a_part_and_at_single_places(bias: Bias, offset: int | Tensor) -> None:
    frame, query = Frame(B, H, Q, K, offset), normal(B, H, Q, D)
    whole = tile(bias, offset, query)
    box = (slice(1, 2), slice(1, 3), slice(2, 5), slice(3, 6))
    part = bias.tile(frame.indices(*box), query[box[:3]], 1.0)
    torch.testing.assert_close(part.expand(1, 2, 3, 3), whole[box])
    b, h, i, j = (torch.arange(n) for n in (B, H, Q, K))
    scattered = Indices(frame, b[:, None, None, None], h[:, None, None], i[:, None], j)
    torch.testing.assert_close(bias.tile(scattered, query, 1.0).expand(whole.shape), whole)


@pytest.mark.parametrize("engine", ["reference", "tiled"])
@pytest.mark.parametrize(
    "scale", [None, 0.7, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)], ids=["none", "number", "per head"]
)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
def test_shaw_equals_explicit_loops(
    offset: int | Tensor, per_head: bool, scale: float | Tensor | None, engine: str
) -> None:
    reach = 2
    query, key, value = normal(B, H, Q, D, seed=1), normal(B, H, K, D, seed=2), normal(B, H, K, E, seed=3)
    keys, values = normal(H, 2 * reach + 1, D, seed=4), normal(H, 2 * reach + 1, E, seed=5)
    if not per_head:
        keys, values = keys[0], values[0]
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * B
    expected = torch.zeros(B, H, Q, E, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            own_keys, own_values = (keys[h], values[h]) if per_head else (keys, values)
            factor = D**-0.5 if scale is None else scale[h] if isinstance(scale, Tensor) else scale
            for i in range(Q):
                places = [clipped(j - (offsets[b] + i), reach) for j in range(K)]
                logits = torch.stack(
                    [factor * (query[b, h, i] @ (key[b, h, j] + own_keys[places[j]])) for j in range(K)]
                )
                weights = logits.softmax(0)
                for j in range(K):
                    expected[b, h, i] += weights[j] * (value[b, h, j] + own_values[places[j]])
    ours = rg.attention(
        query, key, value, score=rg.Dot(scale=scale), bias=rg.shaw(keys, values), offset=offset, engine=engine
    )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_shaw_without_values_changes_only_the_weights() -> None:
    query, key, value = normal(B, H, Q, D, seed=1), normal(B, H, K, D, seed=2), normal(B, H, K, E, seed=3)
    attend = rg.Attention(bias=rg.shaw(normal(5, D)))
    torch.testing.assert_close(attend(query, key, value), attend.weights(query, key) @ value)


def test_dense_bias_is_added_before_the_temperature_divides() -> None:
    query, key, value, bias = (
        normal(B, H, Q, D),
        normal(B, H, K, D, seed=2),
        normal(B, H, K, E, seed=3),
        normal(H, Q, K),
    )
    logits = (query @ key.mT / math.sqrt(D) + bias) / 0.5
    ours = rg.attention(query, key, value, bias=bias, temperature=0.5)
    torch.testing.assert_close(ours, logits.softmax(-1) @ value)


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=list(OFFSETS))
def test_a_sum_of_biases_adds_what_each_adds(offset: int | Tensor) -> None:
    parts = [rg.alibi(H), rg.relative(normal(5, H)), rg.dense_bias(normal(Q, K)), rg.shaw(normal(3, D), normal(3, E))]
    whole = parts[0] + parts[1] + (parts[2] + parts[3])
    torch.testing.assert_close(tile(whole, offset), sum(tile(part, offset) for part in parts))
    assert len(whole.parts()) == 4
    assert repr(whole) == " + ".join(map(repr, parts))


def test_a_sum_of_two_shaws_adds_both_value_halves() -> None:
    frame, weights = Frame(B, H, Q, K, 0), normal(B, H, Q, K).softmax(-1)
    one, other = rg.shaw(normal(3, D), normal(3, E)), rg.shaw(normal(5, D), normal(5, E, seed=1))
    both = (one + rg.alibi(H) + other).aggregate(frame.indices(), weights)
    torch.testing.assert_close(
        both, one.aggregate(frame.indices(), weights) + other.aggregate(frame.indices(), weights)
    )


@pytest.mark.parametrize("engine", ["reference", "tiled"])
def test_an_offset_per_batch_row_is_each_row_with_its_own_offset(engine: str) -> None:
    query, key, value = normal(B, H, Q, D, seed=1), normal(B, H, K, D, seed=2), normal(B, H, K, E, seed=3)
    bias = rg.alibi(H) + rg.relative(normal(5, H)) + rg.t5(normal(8, H), True, 6) + rg.shaw(normal(5, D), normal(5, E))
    together = rg.attention(query, key, value, bias=bias, offset=[3, -2], engine=engine)
    for b, offset in enumerate((3, -2)):
        one = slice(b, b + 1)
        alone = rg.attention(query[one], key[one], value[one], bias=bias, offset=offset, engine=engine)
        torch.testing.assert_close(together[one], alone)


TABLES = {
    "relative": ((5, H), rg.relative),
    "relative, one column": ((5, 1), rg.relative),
    "t5": ((8, H), lambda table: rg.t5(table, True, 6)),
    "t5 causal": ((8, H), lambda table: rg.t5(table, False, 6)),
    "shaw keys": ((5, D), rg.shaw),
    "shaw keys per head": ((H, 5, D), rg.shaw),
    "shaw values": ((5, E), lambda table: rg.shaw(normal(5, D, seed=7), table)),
    "shaw values per head": ((H, 5, E), lambda table: rg.shaw(normal(5, D, seed=7), table)),
    "dense": ((B, H, Q, K), rg.dense_bias),
    "dense, broadcast": ((H, 1, K), rg.dense_bias),
    "sum": ((3, H), lambda table: rg.alibi(H) + rg.relative(table) + rg.dense_bias(table[0, :, None, None])),
    "the same table twice": ((3, H), lambda table: rg.relative(table) + rg.relative(table)),
    "a table and a function of it": ((3, H), lambda table: rg.relative(table) + rg.relative(table.sin())),
}


@pytest.mark.parametrize("engine", ["reference", "tiled"])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_tables_equal_finite_differences(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.engines.tiled.tile_size", lambda problem: (2, 3))
    shape, make = TABLES[name]
    query, key, value = normal(B, H, Q, D, seed=1), normal(B, H, K, D, seed=2), normal(B, H, K, E, seed=3)

    def outputs(table: Tensor) -> tuple[Tensor, Tensor]:
        return rg.attention(
            query, key, value, mask=rg.window(4, 2), bias=make(table), offset=[2, -1], engine=engine, return_lse=True
        )

    # rows that see nothing have log-sum-exp -inf, of which there is no finite difference
    visible = rg.window(4, 2).allows(Frame(B, H, Q, K, torch.tensor([2, -1])).indices()).any(-1).expand(B, H, Q)

    def finite_outputs(table: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = outputs(table)
        return output, lse[visible]

    assert gradcheck(finite_outputs, (normal(*shape, seed=9).requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("kind", ["alibi", "relative", "t5"])
def test_tables_of_fewer_digits_than_the_call(kind: str, engine: str) -> None:
    if engine == "native" and native.why_missing():
        pytest.skip("not available")
    create = {"alibi": lambda x: rg.alibi(slopes=x[0]), "relative": rg.relative, "t5": rg.t5}[kind]
    inputs = [normal(1, 2, 600, 4, seed=n) for n in range(4)]
    stored = (normal(5, 2).abs() * (0.01 if kind == "alibi" else 1.0)).to(torch.bfloat16)
    stored = torch.cat([stored] * 3)[:9] if kind != "t5" else torch.cat([stored] * 2)[:8]

    def compute(table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        table = table.clone().requires_grad_()
        query, key, value, by = (x.to(dtype) for x in inputs)
        output = rg.attention(query, key, value, bias=create(table), engine=engine)
        return output, torch.autograd.grad(output, table, by)[0]

    (output, gradient), (expected, exact) = compute(stored, torch.float32), compute(stored.double(), torch.float64)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert (gradient.double() - exact).norm() < 6e-3 * exact.norm()  # rounded once per tile, not once per distance
