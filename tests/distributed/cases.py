"""Descriptions of every kind, for KEYS tokens, 2 batch rows and `heads` heads, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import regard as rg
import regard.distributed as rd
from regard.distributed import plan

B, KEYS, D, E = 2, 61, 4, 6
LENGTHS = {2: (40, 21), 3: (25, 0, 36), 4: (7, 30, 0, 24)}  # lengths of the shards; some are empty
CROSS = {2: (3, 26), 3: (10, 10, 9), 4: (0, 15, 2, 12)}  # lengths of the queries in cross-attention


@dataclass
class Case:
    """A description, its learned tensors, and special sizes."""

    description: dict[str, Any] = field(default_factory=dict)
    learned: tuple[Tensor, ...] = ()
    groups: str = "half"  # key/value heads: "half", "one" or "all"
    cross: bool = False
    spoiled: bool = False  # the last keys are NaN


Make = Callable[[int, Callable[..., Tensor]], Case]
CASES: dict[str, Make] = {}


def case(make: Make) -> Make:
    CASES[make.__name__] = make
    return make


def ids(*rows: list[int]) -> Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


@case
def dense(heads, random):
    return Case()


@case
def gqa(heads, random):
    return Case({"mask": rg.causal()}, groups="one")


@case
def plain_heads(heads, random):
    return Case({"mask": rg.causal()}, groups="all")


@case
def causal(heads, random):
    return Case({"mask": rg.causal()})


@case
def window(heads, random):
    return Case({"mask": rg.causal() & rg.window(5, 0)})


@case
def documents(heads, random):
    return Case({"mask": rg.causal() & rg.documents(ids([20, 30, 11], [3, 50, 8]))})


@case
def torn_documents(heads, random):
    return Case({"mask": rg.documents(torch.arange(KEYS) % 3)})


@case
def padding(heads, random):
    return Case({"mask": rg.padding([50, 17])}, spoiled=True)


@case
def left_padding(heads, random):
    return Case({"mask": rg.causal() & ~rg.padding([40, 0])})


@case
def prefix(heads, random):
    return Case({"mask": rg.prefix([30, 4])})


@case
def ranges(heads, random):
    start = torch.arange(KEYS) // 2
    return Case({"mask": rg.ranges(start, start + 7)})


@case
def patterns(heads, random):
    return Case({"mask": rg.dilated(3, 4) | rg.global_tokens([[0], [5, 40]])})


@case
def bigbird(heads, random):
    return Case({"mask": rg.bigbird(4, random=1, seed=3)})


@case
def blocks(heads, random):
    return Case({"mask": rg.blocks(random(heads, 8, 8) > 0.3, 8)})


@case
def edges(heads, random):
    return Case({"mask": rg.edges(torch.randint(0, KEYS, (2, 150), generator=torch.Generator().manual_seed(1)))})


@case
def function_mask(heads, random):
    return Case({"mask": rg.where(lambda b, h, p, j: (p + j + h + b) % 3 == 0)})


@case
def bits(heads, random):
    return Case({"mask": random(B, 1, KEYS, KEYS) > 0.5})


@case
def alibi(heads, random):
    return Case({"mask": rg.causal(), "bias": rg.alibi(heads)})


@case
def t5(heads, random):
    table = random(8, heads).requires_grad_()
    return Case({"bias": rg.t5(table, max_distance=20)}, (table,))


@case
def relative(heads, random):
    table = random(11, heads).requires_grad_()
    return Case({"mask": rg.causal(), "bias": rg.relative(table) + rg.alibi(heads)}, (table,))


@case
def shaw(heads, random):
    keys, values = random(heads, 9, D).requires_grad_(), random(9, E).requires_grad_()
    return Case({"mask": rg.window(20, 8), "bias": rg.shaw(keys, values)}, (keys, values))


@case
def dense_bias(heads, random):
    whole, row = random(heads, KEYS, KEYS).requires_grad_(), random(B, 1, 1, KEYS).requires_grad_()
    return Case({"bias": rg.dense_bias(whole) + rg.dense_bias(row)}, (whole, row))


@case
def sink(heads, random):
    logit = random(heads).requires_grad_()
    return Case({"mask": rg.causal() & rg.padding([61, 10]), "sink": logit, "temperature": 0.7}, (logit,))


@case
def one_sink(heads, random):
    logit = random().requires_grad_()
    return Case({"mask": rg.window(2, 0), "sink": logit, "score": rg.Dot(softcap=2.0)}, (logit,))


@case
def scale(heads, random):
    number = random(heads).requires_grad_()
    return Case({"score": rg.Dot(number), "mask": rg.causal()}, (number,))


@case
def cosine(heads, random):
    number = random(heads).requires_grad_()
    return Case({"score": rg.Cosine(number)}, (number,))


@case
def additive(heads, random):
    weight = random(heads, D).requires_grad_()
    return Case({"score": rg.Additive(weight), "mask": rg.causal()}, (weight,))


@case
def bilinear(heads, random):
    matrix = random(heads, D, D).requires_grad_()
    return Case({"score": rg.Bilinear(matrix)}, (matrix,))


@case
def function_score(heads, random):
    table, bend = random(heads, KEYS).requires_grad_(), random().requires_grad_()

    def moved(score: Tensor, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        return score * bend.exp().to(score) + (table * 2)[h, j].to(score) + 0.01 * p * b

    return Case({"score": moved, "mask": rg.causal()}, (table, bend))


@case
def a_table_of_a_table(heads, random):
    table = random(11, heads).requires_grad_()
    doubled = table * 2
    return Case({"bias": rg.relative(doubled) + rg.relative(table), "score": rg.Dot(doubled[0].tanh())}, (table,))


@case
def offsets(heads, random):
    return Case({"mask": rg.causal() & rg.window(9, 0), "bias": rg.alibi(heads), "offset": [3, -20]})


@case
def cross(heads, random):
    table = random(11, heads).requires_grad_()
    return Case({"mask": rg.causal(), "bias": rg.relative(table)}, (table,), cross=True)


@case
def cross_from_the_front(heads, random):
    return Case({"mask": rg.padding([61, 20]), "offset": 0}, cross=True)


@case
def all_hidden(heads, random):
    return Case({"mask": rg.padding([0, 0])})


NEEDED = ("dense", "causal", "window", "documents", "alibi", "gqa", "additive")
WAYS = (("ring", "contiguous"), ("ring", "balanced"), ("heads", "contiguous"), ("heads", "balanced"))


def ways(name: str, ranks: int) -> list[tuple[str, str, torch.dtype]]:
    """The methods, layouts and dtypes of a case: almost all for two processes, one in turn for more."""
    if name in NEEDED:
        variants = [(*way, dtype) for way in WAYS for dtype in (torch.float32, torch.float64)]
    else:
        turn = list(CASES).index(name) + ranks
        variants = [(*way, torch.float64) for way in (WAYS[:3] if ranks == 2 else [WAYS[turn % 4]])]
    return [way for way in variants if not (way[0] == "heads" and name == "gqa")]


def all_cases(rank: int) -> dict[tuple, dict[str, float]]:
    """The differences of every case from the results of one process, for groups of 2, 3 and 4."""
    results = {}
    for ranks in LENGTHS:
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            for name in CASES:
                for way in ways(name, ranks):
                    results[name, ranks, *way] = differences(name, rank, ranks, group, *way)
    dist.barrier()
    return results


def differences(name: str, rank: int, ranks: int, group: Any, method: str, layout: str, dtype: Any) -> dict[str, float]:
    generator = torch.Generator().manual_seed(len(name))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    heads = 2 * ranks
    case = CASES[name](heads, random)
    groups = {"half": ranks, "one": 1, "all": heads}[case.groups]
    lengths = CROSS[ranks] if case.cross else LENGTHS[ranks]
    whole = random(B, heads, sum(lengths), D), random(B, groups, KEYS, D), random(B, groups, KEYS, E)
    if case.spoiled:
        whole[1][:, :, -3:], whole[2][:, :, -4:] = float("nan"), float("inf")
    by = random(B, heads, sum(lengths), E), random(B, heads, sum(lengths))
    layouts = [
        rd.Layout.of(n, layout) if layout == "contiguous" else rd.Layout.even(sum(n), ranks, layout)
        for n in (lengths, LENGTHS[ranks], LENGTHS[ranks])
    ]
    expected = results(case, [x.double() for x in whole], [x.double() for x in by], rg.attention, engine="reference")
    own = [held.own(x, 2, rank) for x, held in zip(whole, layouts, strict=True)]
    own_by = [layouts[0].own(x, 2, rank) for x in by]
    head = B * max(LENGTHS[ranks]) * (D + E) * whole[0].element_size()
    portion = {"contiguous": ranks - 1, "balanced": 1}[layout] * head if dtype == torch.float64 else plan.PORTION
    with mock.patch.object(plan, "PORTION", portion):  # all heads at once, an uneven portion, one by one
        actual = results(case, own, own_by, rd.attention, group=group, layout=layout, method=method)
    names = ("output", "lse", "query", "key", "value")
    held = [layouts[0], layouts[0], *layouts]
    errors = {
        part: error(ours, here.own(all_of_it, 2, rank))
        for part, ours, all_of_it, here in zip(names, actual, expected, held, strict=False)
    }
    for n, (ours, all_of_it) in enumerate(zip(actual[5:], expected[5:], strict=True)):
        total = ours.clone()
        dist.all_reduce(total, group=group)
        errors[f"learned {n}"] = error(total, all_of_it)
    return errors


def results(case: Case, whole: list[Tensor], by: list[Tensor], attend: Callable, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of query, key, value and learned tensors."""
    inputs = [x.detach().clone().requires_grad_() for x in whole]
    output, lse = attend(*inputs, return_lse=True, **options, **case.description)
    visible = lse != float("-inf")
    loss = (output * by[0]).sum() + (lse.masked_fill(~visible, 0.0) * by[1]).sum()
    grads = torch.autograd.grad(loss, [*inputs, *case.learned], retain_graph=True)  # the case runs twice
    return [output.detach(), lse.detach(), *grads]


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite if shapes or non-finite entries differ."""
    if actual.shape != expected.shape or not torch.equal(actual.isfinite(), expected.isfinite()):
        return float("inf")
    apart = (actual - expected).masked_fill(~expected.isfinite(), 0.0)
    return float(apart.abs().max()) if apart.numel() else 0.0
