"""torch's scaled_dot_product_attention: what its fused kernel really can do is lowered to it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines import tiled
from regard.engines.derivatives import Tensors, differentiable_twice
from regard.engines.problem import Engine, Problem, exceeds
from regard.engines.reference import replace_nonfinite
from regard.geometry import pad_leading
from regard.masks.patterns import Causal
from regard.positions.biases import Shaw, is_built_in
from regard.scores import Bilinear, Cosine, Dot

DENSE_BYTES = 1 << 27  # a mask or bias, which torch must be given densely, may take this much


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Tensor, None]:
    if not problem.grad or problem.in_transform or torch.compiler.is_compiling():
        return _attend(problem, query, key, value), None

    def kernel(tensors: Tensors) -> tuple[Tensor]:
        given = tiled.with_tensors(problem, tensors[3:])
        return (_attend(given, *tensors[:3]),)

    (output,) = differentiable_twice(kernel, tiled.TiledOperator(problem, None), query, key, value, *problem.tensors)
    return output, None


def _attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias, nothing = _dense_mask(problem, query)
    if not _may_read(problem):
        output = _spoiled(problem, query, key, value, bias)
        return output if nothing is None else output.masked_fill(nothing, 0.0)
    output = _kernel(problem, *as_dot(problem, query, key), value, bias)
    if nothing is not None:
        output = output.masked_fill(nothing, 0.0)
    return tiled.run(problem, query, key, value, None)[0] if _is_doubtful(output, nothing) else output


def _kernel(problem: Problem, query: Tensor, key: Tensor, scale: float, value: Tensor, bias: Tensor | None) -> Tensor:
    if (repeats := problem.frame.H // problem.G) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale /= problem.temperature
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=_plain_causal(problem), scale=scale
    )


def _may_read(problem: Problem) -> bool:
    """Whether the output may decide what to do next: not in a graph, nor on a device that would have to be awaited."""
    return problem.device.type == "cpu" and not problem.in_transform and not torch.compiler.is_compiling()


def _is_doubtful(output: Tensor, nothing: Tensor | None) -> bool:
    """Whether torch's CPU kernel may have gone wrong.

    It adds -inf to the logits that are masked, so that one that is not finite becomes NaN, and multiplies the values
    that are masked by 0: both show as NaN. Where a row's largest logit is -inf, it takes the row for empty and gives
    exactly 0; since NaN may be passed over in the search for the largest, a row of NaN can end there too. Every other
    NaN shows. So a row is good if it is finite and not all 0.
    """
    largest = torch.linalg.vector_norm(output.detach(), math.inf, -1, keepdim=True)
    good = (largest > 0) & (largest < math.inf)
    return not bool((good if nothing is None else good | nothing).all())


def _spoiled(problem: Problem, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """The output without reading a number: what is masked is made finite first, rows of NaN are made NaN behind.

    A key that is so large that its product with some query may overflow counts as one that is not finite.
    """
    bad = None
    if problem.mask is not None:
        key, value, bad = replace_nonfinite(key, value)
    query, key, scale = as_dot(problem, query, key)
    spoiled = query.isnan().any(-1, keepdim=True)
    if bad is None:
        seen = key.isnan().any(-1).any(-1)
        spoiled = spoiled | seen.repeat_interleave(problem.frame.H // problem.G, 1)[..., None, None]
    else:
        bound = query.abs().flatten().amax(0).double() * problem.D * abs(scale / problem.temperature)
        fits = key.abs().amax(-1, keepdim=True) * bound < torch.finfo(problem.compute_dtype).max
        fits = fits | bound.isnan()  # which is the queries' own
        key = torch.where(fits, key, 0.0)
        spoiled = spoiled | _rows_with_bad_keys(problem, bad | ~fits.squeeze(-1))
    if bias is not None and bias.is_floating_point():
        spoiled = spoiled | bias.isnan().any(-1, keepdim=True)
    output = _kernel(problem, query, key, scale, value, bias)
    return output * torch.where(spoiled, float("nan"), 1.0).to(output)  # not filled: gradients become NaN as well


def as_dot(problem: Problem, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
    """Query, key and a number whose scaled dot product is the score."""
    score, at, scale = problem.score, problem.frame.indices(device=query.device), problem.scale
    if isinstance(score, Cosine):
        good = key.isfinite().all(-1, keepdim=True)  # a bad key stays bad, but without a gradient that would spread
        key = torch.where(good, _unit(problem, torch.where(good, key, 0.0)), float("nan"))
        query = _unit(problem, query)
    elif isinstance(score, Bilinear):
        query = score.project(query.to(problem.compute_dtype), at).to(query.dtype)  # a matrix of more digits keeps them
    if isinstance(scale, Tensor):
        query, scale = (query * at.per_head(scale.reshape(-1))).to(query.dtype), 1.0
    return query, key, scale


def _unit(problem: Problem, vectors: Tensor) -> Tensor:
    """Unit vectors, rounded once: float16 has no number as small as the least length that they are divided by."""
    return F.normalize(vectors.to(problem.compute_dtype), dim=-1).to(vectors.dtype)


def _plain_causal(problem: Problem) -> bool:
    """torch's causal mask stands at the top left; and it takes no bias beside it."""
    offset = problem.frame.offset
    if isinstance(offset, Tensor) or offset != 0:  # a branch: of symbolic sizes torch takes no SymBool for `is_causal`
        return False
    return isinstance(problem.mask, Causal) and problem.bias is None


def _dense_mask(problem: Problem, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What torch adds to the logits, and the rows that see nothing: these see all instead, and are set to 0 behind."""
    if (problem.mask is None and problem.bias is None) or _plain_causal(problem):
        return None, None
    at = problem.frame.indices(device=query.device)
    allowed = nothing = bias = None
    if problem.mask is not None:
        allowed = pad_leading(problem.mask.allows(at))
        nothing = ~allowed.expand(*allowed.shape[:2], -1, problem.frame.K).any(-1, keepdim=True)
        allowed = allowed | nothing
    if problem.bias is not None:
        like = query.to(problem.compute_dtype)
        bias = pad_leading(problem.bias.tile(at, like, problem.scale)) / problem.temperature
        if allowed is not None:
            bias = bias.masked_fill(~allowed, float("-inf"))
    mask = allowed if bias is None else bias
    assert mask is not None
    return mask.expand(*mask.shape[:2], problem.frame.Q, problem.frame.K), nothing


def _rows_with_bad_keys(problem: Problem, bad: Tensor) -> Tensor:
    """The rows that see a bad key: (B, H, Q, 1)."""
    assert problem.mask is not None
    bad = bad.repeat_interleave(problem.frame.H // problem.G, 1).unsqueeze(-2)
    return (problem.mask.allows(problem.frame.indices(device=bad.device)) & bad).any(-1, keepdim=True)


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
    if problem.bias is not None and not is_built_in(problem.bias):
        reasons.append(f"it cannot tell whether {problem.bias!r} has a value half")
    elif problem.bias is not None and any(isinstance(part, Shaw) for part in problem.bias.parts()):
        reasons.append("shaw would have to be laid out densely, and has a value half")
    return reasons


def why_avoid(problem: Problem) -> list[str]:
    reasons = []
    if problem.D != problem.E:
        reasons.append(f"widths differ, D = {problem.D} and E = {problem.E}: it takes its dense path")
    if problem.bias is not None and torch.is_grad_enabled() and any(t.requires_grad for t in problem.bias.tensors()):
        reasons.append("a bias that requires grad takes its dense path")
    if exceeds(needed := peak_bytes(problem), DENSE_BYTES):
        reasons.append(f"the mask or bias, laid out densely, takes {needed / 1e6:,.0f} MB")
    if problem.in_transform:
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
        heads, bytes_each = frame.H, torch.empty((), dtype=problem.compute_dtype).element_size()
    else:
        bytes_each = 1
    return 2 * bytes_each * batch * heads * frame.Q * frame.K


ENGINE = Engine("sdpa", why_not, why_avoid, run, peak_bytes, dense=lambda problem: not _plain_causal(problem))
