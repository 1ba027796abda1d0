"""What must hold of any call, however hostile: every engine gives what the reference gives in float64.

What should not be there (NaN, infinities, absurd numbers) may spoil the rows that see it, and no others. So the
reference computes the call without it, and what it cannot reach is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.engines.problem import Problem
from regard.engines.select import ENGINES, select
from tests.strategies import ABSURD, Hostile

REFUSED = "refused"


@dataclass
class Found:
    """One computation of a case: output, log-sum-exp, and gradients of query, key, value and what is learned."""

    output: Tensor
    lse: Tensor
    gradients: list[Tensor | None]


def compute(case: Hostile, tensors: list[Tensor], engine: str | None) -> Found:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.manual_seed(5)
    output, lse = rg.attention(*inputs, engine=engine, return_lse=True, **case.call.description)
    generator = torch.Generator().manual_seed(1)
    shape = (1,) * 4 if case.spread else output.shape
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(output.dtype)
    loss = (output * weight).sum() if not case.spread else output.sum()
    if lse.requires_grad:
        loss = loss + lse.masked_fill(lse == float("-inf"), 0.0).sin().sum().to(loss)
    learned = [*inputs, *case.call.learned]
    gradients = torch.autograd.grad(loss, learned, allow_unused=True) if loss.requires_grad else [None] * len(learned)
    return Found(output.detach(), lse.detach(), list(gradients))


@dataclass
class Reach:
    """What the absurd numbers of a case cannot spoil: rows (B, H, Q) and keys (B, G, K)."""

    rows: Tensor
    keys: Tensor

    @classmethod
    def of(cls, case: Hostile, problem: Problem) -> Reach:
        query, key, value = (~(t.double().abs() <= ABSURD) for t in case.tensors())
        frame, G = problem.frame, key.shape[1]
        at = frame.at()
        shape = (frame.B, frame.H, frame.Q, frame.K)
        visible = torch.ones(shape, dtype=torch.bool) if problem.mask is None else problem.mask.allows(at).expand(shape)
        absurd = key.any(-1) | value.any(-1)  # (B, G, K)
        repeats = frame.H // max(G, 1)
        spoiled = query.any(-1) | (visible & absurd.repeat_interleave(repeats, 1).unsqueeze(-2)).any(-1)
        met = (visible & spoiled.unsqueeze(-1)).any(-2)  # (B, H, K)
        met = met.view(frame.B, G, repeats, frame.K).any(2) if met.numel() else absurd
        return cls(~spoiled, ~(met | absurd))


def check(case: Hostile) -> str:
    """The engine that computed, or `REFUSED`; an AssertionError where it is wrong."""
    torch.set_num_threads(case.threads)
    exact_inputs = case.tensors(torch.float64, clean=True)
    try:
        exact = compute(case, exact_inputs, "reference")
    except (ValueError, TypeError):  # a description that does not fit the call: then it fits no engine
        refuses(case)
        return REFUSED
    tensors = case.tensors()
    problem = rg.Attention(**case.call.description)._problem(*tensors, True)
    engine = case.engine if case.engine and not ENGINES[case.engine].why_not(problem) else None
    ours, again = compute(case, tensors, engine), compute(case, tensors, engine)
    same_bits(ours, again)
    plain = compute(case, case.tensors(clean=True), "reference")
    reach = Reach.of(case, problem)
    chosen = select(problem, engine).name
    if chosen != "native" and absurd(case, problem, reach):
        ours.gradients = exact.gradients = plain.gradients = []
    compare(case, problem, reach, ours, exact, plain)
    if not case.call.description.get("dropout"):
        looks(case, problem, reach, exact_inputs, exact.lse)
    return chosen


def absurd(case: Hostile, problem: Problem, reach: Reach) -> bool:
    """Whether dense products take something absurd to gradients of what does not see it: zero times it is no zero."""
    finite = any(ABSURD < abs(number) < float("inf") for _, _, number in case.planted)
    return finite or not reach.rows.all()


def refuses(case: Hostile) -> None:
    try:
        compute(case, case.tensors(), case.engine)
    except (ValueError, TypeError):
        return
    raise AssertionError("the reference refuses this call, and another engine does not")


def same_bits(ours: Found, again: Found) -> None:
    pairs = zip([ours.output, ours.lse, *ours.gradients], [again.output, again.lse, *again.gradients], strict=True)
    for one, other in pairs:
        if one is not None and other is not None:
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), "a second call gives other bits"


def resolution(problem: Problem) -> float:
    """Of logits. Unit vectors, and queries times a learned scale, are kept in the dtype of the call."""
    lowered = not isinstance(problem.score, rg.Dot) or isinstance(problem.scale, Tensor)
    return torch.finfo(problem.dtype if lowered else problem.arithmetic).eps


def largest_logit(case: Hostile, exact: Found) -> float:
    """How far from zero logits lie where weights count: also under a sink that takes nearly all, where the log-sum-exp
    tells of the sink alone."""
    lse = [exact.lse]
    if case.call.description.get("sink") is not None:
        bare = rg.Attention(**{**case.call.description, "sink": None, "dropout": 0.0})
        lse.append(bare(*case.tensors(torch.float64, clean=True), engine="reference", return_lse=True)[1])
    return max([1.0, *(float(x.abs().max()) for each in lse if len(x := each[each.isfinite()]))])


def compare(case: Hostile, problem: Problem, reach: Reach, ours: Found, exact: Found, plain: Found) -> None:
    logit = largest_logit(case, exact)
    eps, single = torch.finfo(case.dtype).eps, resolution(problem)
    double = case.dtype == torch.float64
    assert torch.equal(ours.lse.isneginf()[reach.rows], exact.lse.isneginf()[reach.rows]), "lse is -inf elsewhere"

    def close(name: str, mine: Tensor, best: Tensor, other: Tensor, where: Tensor, floor: float) -> None:
        mine, best, other = mine.double()[where], best.double()[where], other.double()[where]
        mine, best, other = (t.masked_fill(t.isneginf(), 0.0) for t in (mine, best, other))
        if not mine.numel():
            return
        assert mine.isfinite().all(), f"{name} is not finite where nothing absurd is seen"
        error, allowed = float((mine - best).abs().max()), 2 * float((other - best).abs().max()) + floor
        assert error <= allowed, f"{name} is off by {error:.3g}, where {allowed:.3g} is allowed"

    size = float(exact.output.abs().max()) if exact.output.numel() else 0.0
    floor = 1e-12 * logit * max(1.0, size) if double else 4 * single * logit * max(size, 1e-30)
    close("output", ours.output, exact.output, plain.output, reach.rows, floor + (not double) * eps * size)
    close("lse", ours.lse, exact.lse, plain.lse, reach.rows, (1e-12 if double else 4 * single) * logit)

    # An error of a weight's gradient is one of what it is the difference of, however small the difference.
    numbers = [float(t.abs().max()) if t.numel() else 0.0 for t in case.tensors(torch.float64, clean=True)]
    natural = (1 + 4 * numbers[2] * max(1, problem.E) ** 0.5) * max(1.0, *numbers) * logit
    natural *= max(1, problem.frame.B * problem.frame.Q) ** 0.5 / min(1.0, problem.temperature)
    wheres = [reach.rows, reach.keys, reach.keys]
    for n, (mine, best, other) in enumerate(zip(ours.gradients, exact.gradients, plain.gradients, strict=True)):
        if best is None:
            continue
        mine, other = (torch.zeros_like(best) if t is None else t for t in (mine, other))
        name = f"the gradient of {('query', 'key', 'value', 'what is learned')[min(n, 3)]}"
        everywhere = torch.full(best.shape, bool(reach.rows.all()))
        largest = float(best.abs().max()) if best.numel() else 0.0
        floor = (1e-12 if double else 8 * eps) * (natural + largest)
        close(name, mine, best, other, wheres[n] if n < 3 else everywhere, floor)


def looks(case: Hostile, problem: Problem, reach: Reach, exact_inputs: list[Tensor], lse: Tensor) -> None:
    """Statistics and pooled maps, against the weights laid out in float64."""
    attend = rg.Attention(**case.call.description)
    query, key = (t.detach() for t in case.tensors()[:2])
    with torch.no_grad():
        weights = attend.weights(*exact_inputs[:2])  # (B, H, Q, K)
        found = attend.statistics(query, key, top=3)
    frame = problem.frame
    if not reach.rows.any() or not frame.K:
        return
    unit = 1e-10 if case.dtype == torch.float64 else 200 * resolution(problem)
    unit *= max(1.0, float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 1.0)
    total = weights.sum(-1)
    taken = torch.zeros_like(total) if problem.sink is None else (1 - total).clamp(min=0)
    entropy = -torch.special.xlogy(weights, weights).sum(-1) - torch.special.xlogy(taken, taken)
    at = frame.at()
    away = (weights * (at.p - at.j).abs()).sum(-1) / total
    kept = torch.where(found.top_keys < 0, 0.0, weights.gather(-1, found.top_keys.clamp(min=0)))
    best = weights.topk(min(3, frame.K), -1).values
    best = F.pad(best, (0, 3 - best.shape[-1]))

    def close(name: str, mine: Tensor, wanted: Tensor, where: Tensor, reach: float = 1.0) -> None:
        error = (mine.double() - wanted)[where]
        assert bool((error.abs() <= unit * reach).all()), f"{name} is off by {float(error.abs().max()):.3g}"

    shown = reach.rows & (total > 1e-6)
    close("entropy", found.entropy, entropy, reach.rows, 1 + frame.K**0.5)
    close("distance", found.distance, away, shown, 1 + float((at.p - at.j).abs().max()))
    close("top_weights", found.top_weights, best, reach.rows)
    close("the weight of top_keys", kept, best, reach.rows)
    if bool(reach.rows.all()) and frame.Q:
        size = (min(frame.Q, 5), min(frame.K, 3))
        pooled = F.adaptive_avg_pool2d(weights, size)
        rounded = 1 + torch.finfo(case.dtype).eps / unit
        close("map", attend.map(query, key, size=size), pooled, torch.full(pooled.shape, True), rounded)
