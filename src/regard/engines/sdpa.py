"""torch's scaled_dot_product_attention: what its fused kernel really can do is lowered to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines import tiled
from regard.engines.derivatives import Tensors, differentiable_twice
from regard.engines.problem import Engine, Problem
from regard.engines.reference import finite
from regard.geometry import lead
from regard.masks.patterns import Causal
from regard.positions.biases import Shaw, built_in
from regard.scores import Bilinear, Cosine, Dot

DENSE_BYTES = 1 << 27  # a mask or bias, which torch must be given densely, may take this much


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Tensor, None]:
    if not problem.grad or problem.functional or torch.compiler.is_compiling():
        return _attend(problem, query, key, value), None

    def kernel(tensors: Tensors) -> tuple[Tensor]:
        given = tiled.with_tensors(problem, tensors[3:])
        return (_attend(given, *tensors[:3]),)

    (output,) = differentiable_twice(kernel, tiled.Tiled(problem, None), query, key, value, *problem.tensors)
    return output, None


def _attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    given, spoiled = (query, key, value), None
    traced = problem.functional or torch.compiler.is_compiling()
    if traced:
        spoiled = query.isnan().any(-1, keepdim=True)
        if problem.mask is not None:
            key, value, bad = finite(key, value)
            spoiled = spoiled | _reached(problem, bad)
    bias, nothing = _dense(problem, query)
    query, key, scale = as_dot(problem, query, key)
    scale /= problem.temperature
    if not traced and _is_risky(problem, query, key, value, bias, scale):
        return tiled.run(problem, *given, None)[0]
    if (repeats := problem.frame.H // problem.G) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=_plain_causal(problem), scale=scale
    )
    if nothing is not None:
        output = output.masked_fill(nothing, 0.0)
    if spoiled is not None:
        output = output * torch.where(spoiled, float("nan"), 1.0).to(output)
    return output


def _is_risky(problem: Problem, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> bool:
    """Whether torch's kernel may be wrong: a row of NaN is an empty one to it, and -inf is added to what is masked."""
    largest = [tensor.detach().abs().amax().double() for tensor in (query, key)]  # NaN and inf stay what they are
    bound = largest[0] * largest[1] * (problem.D * abs(scale))
    risky = ~(bound < torch.finfo(problem.arithmetic).max)
    if problem.mask is not None:
        risky = risky | ~value.detach().isfinite().all()
    if bias is not None and bias.is_floating_point():
        risky = risky | bias.detach().isnan().any()
    return bool(risky)


def as_dot(problem: Problem, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
    """Query, key and a number whose scaled dot product is the score."""
    score, at, scale = problem.score, problem.frame.at(device=query.device), problem.scale
    if isinstance(score, Cosine):
        good = key.isfinite().all(-1, keepdim=True)  # a bad key stays bad, but without a gradient that would spread
        key = torch.where(good, _unit(problem, torch.where(good, key, 0.0)), float("nan"))
        query = _unit(problem, query)
    elif isinstance(score, Bilinear):
        query = score.project(query.to(problem.arithmetic), at).to(query.dtype)  # a matrix of more digits keeps them
    if isinstance(scale, Tensor):
        query, scale = (query * at.per_head(scale.reshape(-1))).to(query.dtype), 1.0
    return query, key, scale


def _unit(problem: Problem, vectors: Tensor) -> Tensor:
    """Unit vectors, rounded once: float16 has no number as small as the least length that they are divided by."""
    return F.normalize(vectors.to(problem.arithmetic), dim=-1).to(vectors.dtype)


def _plain_causal(problem: Problem) -> bool:
    """torch's causal mask stands at the top left; and it takes no bias beside it."""
    offset = problem.frame.offset
    if isinstance(offset, Tensor) or offset != 0:  # a branch: of symbolic sizes torch takes no SymBool for `is_causal`
        return False
    return isinstance(problem.mask, Causal) and problem.bias is None


def _dense(problem: Problem, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What torch adds to the logits, and the rows that see nothing: these see all instead, and are set to 0 behind."""
    if (problem.mask is None and problem.bias is None) or _plain_causal(problem):
        return None, None
    at = problem.frame.at(device=query.device)
    allowed = nothing = bias = None
    if problem.mask is not None:
        allowed = lead(problem.mask.allows(at))
        nothing = ~allowed.expand(*allowed.shape[:2], -1, problem.frame.K).any(-1, keepdim=True)
        allowed = allowed | nothing
    if problem.bias is not None:
        like = query.to(problem.arithmetic)
        bias = lead(problem.bias.tile(at, like, problem.scale)) / problem.temperature
        if allowed is not None:
            bias = bias.masked_fill(~allowed, float("-inf"))
    mask = allowed if bias is None else bias
    assert mask is not None
    return mask.expand(*mask.shape[:2], problem.frame.Q, problem.frame.K), nothing


def _reached(problem: Problem, bad: Tensor) -> Tensor:
    """The rows that see a bad key: (B, H, Q, 1)."""
    assert problem.mask is not None
    bad = bad.repeat_interleave(problem.frame.H // problem.G, 1).unsqueeze(-2)
    return (problem.mask.allows(problem.frame.at(device=bad.device)) & bad).any(-1, keepdim=True)


def why_not(problem: Problem) -> list[str]:
    score, reasons = problem.score, []
    if problem.empty:
        reasons.append("an axis is empty")
    if problem.device.type == "meta":
        reasons.append("it reads numbers, and tensors on meta have none")
    if type(score) not in (Dot, Cosine, Bilinear):
        reasons.append(f"its kernel knows dot products, not {score!r}")
    elif isinstance(score, Dot) and score.softcap is not None:
        reasons.append("its kernel has no softcap")
    if problem.sink is not None:
        reasons.append("its kernel has no sink")
    if problem.lse:
        reasons.append("it returns no log-sum-exp")
    if problem.tangent:
        reasons.append("its kernel has no forward mode")
    if problem.dropout:
        reasons.append("its dropout takes a dense path, and cannot be made anew in backward")
    if problem.bias is not None and not built_in(problem.bias):
        reasons.append(f"it cannot tell whether {problem.bias!r} has a value half")
    elif problem.bias is not None and any(isinstance(part, Shaw) for part in problem.bias.parts()):
        reasons.append("shaw would have to be laid out densely, and has a value half")
    return reasons


def why_rather_not(problem: Problem) -> list[str]:
    reasons = []
    if problem.D != problem.E:
        reasons.append(f"widths differ, D = {problem.D} and E = {problem.E}: it takes its dense path")
    if problem.bias is not None and torch.is_grad_enabled() and any(t.requires_grad for t in problem.bias.tensors()):
        reasons.append("a bias that requires grad takes its dense path")
    if (needed := peak_bytes(problem)) > DENSE_BYTES:
        reasons.append(f"the mask or bias, laid out densely, takes {needed / 1e6:,.0f} MB")
    if problem.functional:
        reasons.append("vmap runs its kernel one slice at a time")
    return reasons


def peak_bytes(problem: Problem) -> int:
    if (problem.mask is None and problem.bias is None) or _plain_causal(problem):
        return 0
    frame = problem.frame
    batch, heads = problem.mask.extent(frame) if problem.mask is not None else (1, 1)
    if isinstance(frame.offset, Tensor):
        batch = frame.B
    if problem.bias is not None:
        heads, bytes_each = frame.H, torch.empty((), dtype=problem.arithmetic).element_size()
    else:
        bytes_each = 1
    return 2 * bytes_each * batch * heads * frame.Q * frame.K


ENGINE = Engine("sdpa", why_not, why_rather_not, run, peak_bytes, dense=lambda problem: not _plain_causal(problem))
