"""Properties of any call, however hostile: every engine is within the rounding bound of the exact result.

Absurd inputs (NaN, infinities, huge numbers) may affect the rows that see them, and no others. So the exact result is
that of the call without them, and all that they cannot reach is compared. The expected results do not use the library:
see `tests.definition` and `tests.bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.engines import native
from regard.engines.select import ENGINES, select
from tests.bounds import Judged, Rounding, judge
from tests.definition import Places, as_score, score_kind, visible
from tests.strategies import ABSURD, Hostile

REFUSED = "refused"


@dataclass
class Computed:
    """One computation of a case: output, log-sum-exp, and gradients of query, key, value and parameters."""

    output: Tensor
    lse: Tensor
    gradients: list[Tensor | None]


def cotangents(case: Hostile) -> tuple[Tensor, Tensor]:
    """Return the factors of output and log-sum-exp in the loss whose gradients are compared."""
    B, H, Q, _ = case.call.query.shape
    shape, generator = (B, H, Q, case.call.value.shape[-1]), torch.Generator().manual_seed(1)
    d_output = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
    d_lse = torch.randn(shape[:3], generator=generator, dtype=torch.float64).to(case.dtype)
    if case.spread:
        d_output = d_output.new_ones(()).expand(shape)
    return d_output, d_lse.to(torch.float64 if case.dtype == torch.float64 else torch.float32)


def dropout_seed(case: Hostile) -> int | None:
    """Return the seed that a call draws from torch's generator."""
    torch.manual_seed(5)
    return int(torch.randint(2**62, (), dtype=torch.int64)) if case.call.description.get("dropout") else None


def compute(case: Hostile, tensors: list[Tensor], engine: str | None) -> Computed:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.manual_seed(5)
    output, lse = rg.attention(*inputs, engine=engine, return_lse=True, **case.call.description)
    d_output, d_lse = cotangents(case)
    d_lse = d_lse.masked_fill(lse.isneginf(), 0.0)  # rows without visible keys have no gradient
    pairs = [(y, d) for y, d in ((output, d_output), (lse, d_lse)) if y.requires_grad]
    learned = [*inputs, *case.call.learned]
    if not pairs:
        return Computed(output, lse, [None] * len(learned))
    gradients = torch.autograd.grad([y for y, _ in pairs], learned, [d for _, d in pairs], allow_unused=True)
    return Computed(output.detach(), lse.detach(), list(gradients))


@dataclass
class Reach:
    """The results that absurd inputs cannot affect: rows (B, H, Q) and keys (B, G, K)."""

    rows: Tensor
    keys: Tensor

    @classmethod
    def of(cls, case: Hostile) -> Reach:
        query, key, value = (~(t.double().abs() <= ABSURD) for t in case.tensors())
        (B, H, Q, _), (_, G, K, _) = query.shape, key.shape
        seen = visible(case.call.description.get("mask"), Places.of((B, H, Q, K), case.call.description.get("offset")))
        absurd = key.any(-1) | value.any(-1)  # (B, G, K)
        repeats = H // max(G, 1)
        spoiled = query.any(-1) | (seen & absurd.repeat_interleave(repeats, 1).unsqueeze(-2)).any(-1)
        met = (seen & spoiled.unsqueeze(-1)).any(-2)  # (B, H, K)
        met = met.view(B, G, repeats, K).any(2) if met.numel() else absurd
        return cls(~spoiled, ~(met | absurd))


def check(case: Hostile) -> str:
    """The engine that computed, or `REFUSED`; an AssertionError where it is wrong."""
    torch.set_num_threads(case.threads)
    tensors = case.tensors()
    try:
        problem = rg.Attention(**case.call.description).problem(*tensors, return_lse=True)
    except (ValueError, TypeError):  # a description that does not fit the call: then it fits no engine
        refuses(case)
        return REFUSED
    engine = case.engine if case.engine and not ENGINES[case.engine].why_not(problem) else None
    ours, again = compute(case, tensors, engine), compute(case, tensors, engine)
    same_bits(ours, again)
    d_output, d_lse = (d.double() for d in cotangents(case))
    exact_inputs = case.tensors(torch.float64, clean=True)
    chosen = select(problem, engine).name
    judged = judge(
        exact_inputs, case.call.description, case.call.learned, case.dtype, d_output, d_lse, dropout_seed(case),
        takes_pairs(case, chosen),
    )  # fmt: skip
    reach = Reach.of(case)
    if chosen not in ("native", "triton") and absurd(case, reach):
        ours.gradients = []
    compare(case, reach, ours, judged)
    if not case.call.description.get("dropout"):
        looks(case, reach, judged)
    return chosen


def takes_pairs(case: Hostile, engine: str) -> bool:
    """Whether weights are rounded to 16 bits before products, as by the CPU's bfloat16 instructions."""
    if engine == "triton":
        return case.dtype in (torch.bfloat16, torch.float16)
    additive = score_kind(as_score(case.call.description.get("score"))) == "Additive"
    return engine == "native" and case.dtype == torch.bfloat16 and native.multiplies_bfloat16() and not additive


def absurd(case: Hostile, reach: Reach) -> bool:
    """Whether dense products take something absurd to gradients of what does not see it: zero times it is no zero."""
    finite = any(ABSURD < abs(number) < float("inf") for _, _, number in case.planted)
    return finite or not reach.rows.all()


def refuses(case: Hostile) -> None:
    try:
        compute(case, case.tensors(), case.engine)
    except (ValueError, TypeError):
        return
    raise AssertionError("the description does not fit the call, and an engine computes it")


def same_bits(ours: Computed, again: Computed) -> None:
    pairs = zip([ours.output, ours.lse, *ours.gradients], [again.output, again.lse, *again.gradients], strict=True)
    for one, other in pairs:
        if one is not None and other is not None:
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), "a second call gives other bits"


def within(name: str, ours: Tensor, exact: Tensor, bound: Tensor, where: Tensor | None = None) -> None:
    """Raise unless every number is within its bound; those too large for the dtype may be infinite."""
    largest = torch.finfo(ours.dtype).max
    ours, exact, bound = (t.detach().double() for t in (ours, exact, bound))
    assert ours.shape == exact.shape == bound.shape, f"{name} has the shape {tuple(ours.shape)}"
    if where is not None:
        ours, exact, bound = ours[where], exact[where], bound[where]
    fits = (exact.abs() + bound < largest) & exact.isfinite()
    error, bound = (ours - exact)[fits].abs(), bound[fits]
    if not error.numel():
        return
    assert error.isfinite().all(), f"{name} is not finite where nothing absurd is seen"
    worst = int((error / bound.clamp(min=1e-300)).argmax())
    assert bool((error <= bound).all()), (
        f"{name} is off by {error[worst]:.3g}, where rounding allows {bound[worst]:.3g}"
    )


def compare(case: Hostile, reach: Reach, ours: Computed, judged: Judged) -> None:
    assert torch.equal(ours.lse.isneginf()[reach.rows], judged.lse.isneginf()[reach.rows]), "lse is -inf elsewhere"
    within("output", ours.output, judged.output, judged.output_bound, reach.rows)
    within("lse", ours.lse, judged.lse, judged.lse_bound, reach.rows)
    names = ("the gradient of query", "the gradient of key", "the gradient of value")
    wheres = (reach.rows, reach.keys, reach.keys)
    for n, actual in enumerate(ours.gradients):
        exact, bound = judged.gradients[n], judged.gradient_bounds[n]
        actual = torch.zeros_like(exact, dtype=case.dtype) if actual is None else actual
        if n < 3:
            within(names[n], actual, exact, bound, wheres[n])
        elif reach.rows.all():
            within(f"the gradient of learned tensor {n - 3}", actual, exact, bound)


def looks(case: Hostile, reach: Reach, judged: Judged) -> None:
    """Check statistics, weights and pooled maps against the exact weights."""
    attend = rg.Attention(**case.call.description)
    query, key = (t.detach() for t in case.tensors()[:2])
    with torch.no_grad():
        statistics = attend.statistics(query, key, top=3)
        expect_statistics(case, reach, judged, statistics)
        x, unit = judged.exact, Rounding(case.dtype)
        Q, K = x.at.shape[2:]
        part = slice(None), slice(-1, None), slice(0, None, 2), slice(1, None, 3)
        weights = attend.weights(query, key, **dict(zip(("heads", "rows", "columns"), part[1:], strict=True)))
        exact, bound = judged.weights[part], unit.store(judged.weights, judged.weights_bound)[part]
        within("weights", weights, exact, bound, reach.rows[part[:3]])
        if bool(reach.rows.all()) and Q and K:
            size = (min(Q, 5), min(K, 3))
            pooled, bound = (F.adaptive_avg_pool2d(t, size) for t in (judged.weights, judged.weights_bound))
            cell = (Q // size[0] + 2) * (K // size[1] + 2)
            bound = unit.store(pooled, bound + (cell + 8) * unit.u * pooled)
            within("map", attend.map(query, key, size=size), pooled, bound)


def expect_statistics(case: Hostile, reach: Reach, judged: Judged, statistics: rg.Statistics) -> None:
    x, u = judged.exact, Rounding(case.dtype).u
    K = x.at.shape[3]
    if not K:
        return
    weights, off = judged.weights, judged.weights_bound
    lse = judged.lse.masked_fill(judged.lse.isneginf(), 0.0)
    logits = torch.where(x.visible, x.logits, 0.0).detach()
    below = torch.where(x.visible, logits - lse.unsqueeze(-1), 0.0)
    n = (x.visible.sum(-1) + 16) * u
    entropy = -(weights * below).sum(-1)
    rough = (off * (below.abs() + 1) + weights * judged.logit_bound).sum(-1) + judged.lse_bound
    size = (weights * (logits.abs() + below.abs())).sum(-1) + lse.abs()
    if x.sink is not None:
        sink = x.sink.detach().squeeze(-1).expand_as(lse)
        share = (sink - lse).exp()
        entropy = entropy + share * (lse - sink)
        rough = rough + share.clamp(max=1) * ((lse - sink).abs() + 1) * (judged.lse_bound + 2 * u * sink.abs() + 8 * u)
        size = size + share * (sink.abs() + (lse - sink).abs())
    within("lse of statistics", statistics.lse, judged.lse, judged.lse_bound + 4 * u * lse.abs(), reach.rows)
    within("entropy", statistics.entropy, entropy, rough + n * size, reach.rows)

    total, distance = weights.sum(-1), (x.at.p - x.at.j).abs().double()
    shown = reach.rows & (total > 1e-6)
    away = (weights * distance).sum(-1) / total
    rough = ((off * distance).sum(-1) + away * off.sum(-1)) / total
    within("distance", statistics.distance, away, rough + 4 * n * (away + distance.amax(-1)), shown)

    best = F.pad(weights.topk(min(3, K), -1).values, (0, 3 - min(3, K)))
    kept = torch.where(statistics.top_keys < 0, 0.0, weights.gather(-1, statistics.top_keys.clamp(min=0)))
    most = off.amax(-1, keepdim=True).expand_as(best)
    within("top_weights", statistics.top_weights, best, most, reach.rows)
    within("the weight of top_keys", kept, best, 2 * most, reach.rows)
