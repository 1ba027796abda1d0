"""Why one weight is what it is: every step from query and key to the contribution to the output, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines.reference import sink_logit, softmax
from regard.geometry import Indices
from regard.scores import Additive, Bilinear, Cosine, Dot, Modified, Score
from regard.view.captured_attention import CapturedAttention

TERMS = 8  # largest terms of the product that are listed


@dataclass(frozen=True)
class WeightSteps:
    """The steps from a query and a key to their weight, and to what the key contributes to the output.

        product        = sum of `terms` over the D dimensions       q · k for a dot product
        score          = score(q, k)                                product * scale, then softcap or a function, if any
        logit          = (score + bias) / temperature               -inf if the mask hides the key
        weight         = exp(logit - lse)                           lse over all keys of the query, and the sink;
                                                                    for a softmax, otherwise see `normalization`
        contribution   = |factor| * weight * value_length           the length of what is added to the output; a value
                                                                    includes its relative part (Shaw), if any
        share          = the part of the output of the head that points in its direction; over all keys they sum to 1

    terms: the largest terms of the product, as (dimension, query component, key component, term). A query or key is as
    the attention received it, after rotary positions and normalisation. share is None where the output is 0.
    """

    query: int
    key: int
    head: int
    terms: tuple[tuple[int, float, float, float], ...]
    dimensions: int
    score_name: str
    product: float
    scale: float | None
    softcap: float | None
    score: float
    bias: float | None
    allowed: bool
    temperature: float
    logit: float
    lse: float
    normalization: str
    sink: float | None
    rank: int
    visible: int
    weight: float
    factor: float
    value_length: float
    contribution: float
    share: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a logit of -inf becomes None."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        terms = "  ".join(f"[{n}] {q:.4g}·{k:.4g} = {term:.4g}" for n, q, k, term in self.terms[:4])
        lines = [
            f"query {self.query}, key {self.key}, head {self.head}",
            f"product      {self.product:.6g}    largest of {self.dimensions} terms: {terms}",
            f"score        {self.score:.6g}    scale {'-' if self.scale is None else f'{self.scale:.6g}'}",
            f"logit        {self.logit:.6g}    bias {0 if self.bias is None else self.bias:.6g}, temperature "
            f"{self.temperature:g}, {'visible' if self.allowed else 'hidden by the mask'}",
            f"weight       {self.weight:.6g}    "
            + (f"exp(logit - {self.lse:.6g})" if self.normalization == "Softmax()" else self.normalization)
            + f", rank {self.rank} of {self.visible}",
            f"contribution {self.contribution:.6g}    weight x value length {self.value_length:.6g}"
            + ("" if self.share is None else f", {self.share:.4g} of the output"),
        ]
        return "\n".join(lines)


@torch.no_grad()
def weight_steps(captured: CapturedAttention, head: int, query: int, key: int) -> WeightSteps:
    """Compute the steps of one weight of the inspected batch row; costs O(K · D)."""
    for name, index, size in (("head", head, captured.heads), ("query", query, captured.Q), ("key", key, captured.K)):
        if not 0 <= index < size:
            raise ValueError(f"{name} must be in 0 ... {size - 1}, but is {index}")
    call, own, _ = next(captured._calls_with_rows(torch.tensor([query])))
    row, i, j = captured.row, int(own[0]), key - call.first
    if not 0 <= j < call.stop - call.first:
        raise ValueError(
            f"key {key} is outside of the cache of query {query}: the model had dropped it, or added it later"
        )
    problem, keys, values = captured._problem(call), captured.key(call), captured.value(call)
    group = head * keys.shape[1] // captured.heads
    q = call.query[row, head, i].double()  # (D,)
    k, v = keys[row, group].double(), values[row, group].double()  # (K, D), (K, E)
    at = Indices(
        problem.frame, torch.full((1, 1, 1, 1), row), torch.full((1, 1, 1), head), torch.full((1, 1), i),
        torch.arange(len(k)),
    )  # fmt: skip
    allowed = torch.ones(len(k), dtype=torch.bool)
    if problem.mask is not None:
        allowed = torch.broadcast_to(problem.mask.allows(at), (1, 1, 1, len(k)))[0, 0, 0]
    k = torch.where(allowed[:, None], k, torch.nan_to_num(k))  # what the mask hides cannot reach the result
    score_fn = problem.score
    scores = score_fn.tile(q[None, None, None], k[None, None], at)[0, 0, 0]  # (K,)
    biases = None
    if problem.bias is not None:
        bias = problem.bias.tile(at, q[None, None, None], problem.scale)
        biases = torch.broadcast_to(bias.double(), (1, 1, 1, len(k)))[0, 0, 0]
    logits = scores if biases is None else scores + biases
    logits = (logits / problem.temperature).masked_fill(~allowed, -torch.inf)
    sink = sink_logit(problem, at, logits)
    sink = None if sink is None else sink.reshape(-1)[:1].double()
    if problem.softmax:
        weights, lse = softmax(logits[None], None if sink is None else sink[None])
    else:
        weights, lse = problem.normalization.weights(logits[None, None, None], at)[0, 0], logits.logsumexp(-1)
    v = torch.where((allowed & (weights[0] > 0))[:, None], v, torch.nan_to_num(v))

    def relative_value(shares: Tensor) -> Tensor | float:
        """Return the sum (E,) of the relative parts of the values, by weights (K,)."""
        part = None if problem.bias is None else problem.bias.aggregate(at, shares[None, None, None])
        return 0.0 if part is None else part[0, 0, 0]

    output = weights[0] @ v + relative_value(weights[0])
    value = values[row, group, j].double() + relative_value(F.one_hot(torch.tensor(j), len(k)).double())
    weight = float(captured.weights(heads=[head], rows=[query], columns=[key])[0, 0, 0])
    factor = 1.0 if captured.factors is None else float(captured.factors[head])
    length = float(value.norm())
    pieces, components = _terms(score_fn, q, k[j], head)
    order = pieces.abs().argsort(descending=True)[:TERMS].tolist()
    norm = float(output.square().sum())
    base = score_fn.score if isinstance(score_fn, Modified) else score_fn
    scale = base.scale_for(len(q)) if isinstance(base, Dot | Cosine) else None
    if isinstance(scale, Tensor):
        scale = float(scale.reshape(-1)[head if scale.numel() > 1 else 0])
    return WeightSteps(
        query=query, key=key, head=head,
        terms=tuple((n, float(components[0][n]), float(components[1][n]), float(pieces[n])) for n in order),
        dimensions=len(pieces), score_name=type(score_fn).__name__, product=float(pieces.sum()), scale=scale,
        softcap=base.softcap if isinstance(base, Dot) else None, score=float(scores[j]),
        bias=None if biases is None else float(biases[j]), allowed=bool(allowed[j]), temperature=problem.temperature,
        logit=float(logits[j]), lse=float(lse),
        normalization=repr(problem.normalization), sink=None if sink is None else float(sink),
        rank=int((logits > logits[j]).sum()) + 1, visible=int(allowed.sum()), weight=weight, factor=factor,
        value_length=length, contribution=abs(factor) * weight * length if weight else 0.0,  # 0 for hidden NaN
        share=(float(weights[0, j] * (value @ output)) / norm if weights[0, j] else 0.0) if norm else None,
    )  # fmt: skip


def _terms(score: Score, query: Tensor, key: Tensor, head: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the terms (D,) whose sum a score is made of, and the two vectors that they come from."""
    if isinstance(score, Modified):
        return _terms(score.score, query, key, head)
    if isinstance(score, Cosine):
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    elif isinstance(score, Bilinear):
        matrix = score.matrix.double()
        query = query @ (matrix[head] if matrix.dim() == 3 else matrix)
    elif isinstance(score, Additive):
        weight = score.weight.double()
        weight = weight[head if len(weight) > 1 else 0] if weight.dim() == 2 else weight
        return weight * (query + key).tanh(), (query, key)
    elif not isinstance(score, Dot):
        raise ValueError(f"the terms of a score of type {type(score).__name__} are not known")
    return query * key, (query, key)
