"""torch's scaled_dot_product_attention, for the calls that its fused kernel supports."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines import tiled, triton
from regard.engines.derivatives import Tensors, differentiable_twice
from regard.engines.dot_product import as_dot
from regard.engines.problem import Engine, Problem, exceeds
from regard.engines.reference import replace_nonfinite
from regard.geometry import pad_leading
from regard.masks.patterns import Causal
from regard.positions.biases import Shaw, is_built_in
from regard.scores import Bilinear, Cosine, Dot

DENSE_BYTES = 1 << 27  # limit of a mask or bias, which torch needs as a dense tensor


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Tensor, None]:
    if not _has_double_backward(problem):
        return _attend(problem, query, key, value), None

    def kernel(tensors: Tensors) -> tuple[Tensor]:
        given = tiled.with_tensors(problem, tensors[3:])
        return (_attend(given, *tensors[:3]),)

    (output,) = differentiable_twice(kernel, tiled.TiledOperator(problem, None), query, key, value, *problem.tensors)
    return output, None


def _has_double_backward(problem: Problem) -> bool:
    """Whether `tiled` provides the derivatives that torch's kernel lacks."""
    return problem.grad and not problem.in_transform and not torch.compiler.is_compiling()


def _attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias, empty_rows = _dense_mask(problem, query)
    if not _may_read(problem):
        output = _attend_without_reading(problem, query, key, value, bias)
        return output if empty_rows is None else output.masked_fill(empty_rows, 0.0)
    output = _kernel(problem, *as_dot(problem, query, key), value, bias)
    if empty_rows is not None:
        output = output.masked_fill(empty_rows, 0.0)
    return tiled.run(problem, query, key, value, None)[0] if _is_doubtful(output, empty_rows) else output


def _kernel(problem: Problem, query: Tensor, key: Tensor, scale: float, value: Tensor, bias: Tensor | None) -> Tensor:
    if (repeats := problem.frame.H // problem.G) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale /= problem.temperature
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=_plain_causal(problem), scale=scale
    )


def _may_read(problem: Problem) -> bool:
    """Whether the output may be inspected: not in a graph, nor on a device that would have to synchronise."""
    return problem.device.type == "cpu" and not problem.in_transform and not torch.compiler.is_compiling()


def _is_doubtful(output: Tensor, empty_rows: Tensor | None) -> bool:
    """Whether the output of torch's CPU kernel may be wrong.

    The kernel adds -inf to masked logits and multiplies masked values by 0: non-finite ones become NaN. A row whose
    largest logit is -inf counts as empty and gets exactly 0; since the maximum may skip NaN, a row of NaN can end up
    there too. Every other NaN is visible. So a row is right if it is finite and not all 0.
    """
    largest = torch.linalg.vector_norm(output.detach(), math.inf, -1, keepdim=True)
    good = (largest > 0) & (largest < math.inf)
    return not bool((good if empty_rows is None else good | empty_rows).all())


def _attend_without_reading(problem: Problem, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the output without inspecting values: make masked inputs finite first, and set rows to NaN afterwards.

    A key so large that its product with a query may overflow counts as not finite.
    """
    bad = None
    if problem.mask is not None:
        key, value, bad = replace_nonfinite(key, value)
    query, key, scale = as_dot(problem, query, key)
    is_nan = query.isnan().any(-1, keepdim=True)
    if bad is None:
        has_nan_key = key.isnan().any(-1).any(-1)
        is_nan = is_nan | has_nan_key.repeat_interleave(problem.frame.H // problem.G, 1)[..., None, None]
    else:
        bound = query.abs().flatten().amax(0).double() * problem.D * abs(scale / problem.temperature)
        fits = key.abs().amax(-1, keepdim=True) * bound < torch.finfo(problem.compute_dtype).max
        fits = fits | bound.isnan()  # a NaN bound is due to the queries
        key = torch.where(fits, key, 0.0)
        is_nan = is_nan | _rows_with_bad_keys(problem, bad | ~fits.squeeze(-1))
    if bias is not None and bias.is_floating_point():
        is_nan = is_nan | bias.isnan().any(-1, keepdim=True)
    output = _kernel(problem, query, key, scale, value, bias)
    return output * torch.where(is_nan, float("nan"), 1.0).to(output)  # a product, so that gradients become NaN as well


def _plain_causal(problem: Problem) -> bool:
    """Whether torch's causal mask applies: it is aligned at the top left and excludes a bias."""
    offset = problem.frame.offset
    if isinstance(offset, Tensor) or offset != 0:  # a branch: torch takes no SymBool for `is_causal`
        return False
    return isinstance(problem.mask, Causal) and problem.bias is None


def _dense_mask(problem: Problem, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask or bias for torch, and the empty rows, which see all keys here and are set to 0 afterwards."""
    if (problem.mask is None and problem.bias is None) or _plain_causal(problem):
        return None, None
    at = problem.frame.indices(device=query.device)
    allowed = empty_rows = bias = None
    if problem.mask is not None:
        allowed = pad_leading(problem.mask.allows(at))
        empty_rows = ~allowed.expand(*allowed.shape[:2], -1, problem.frame.K).any(-1, keepdim=True)
        allowed = allowed | empty_rows
    if problem.bias is not None:
        like = query.to(problem.compute_dtype)
        bias = pad_leading(problem.bias.tile(at, like, problem.scale)) / problem.temperature
        if allowed is not None:
            bias = bias.masked_fill(~allowed, float("-inf"))
    mask = allowed if bias is None else bias
    assert mask is not None
    return mask.expand(*mask.shape[:2], problem.frame.Q, problem.frame.K), empty_rows


def _rows_with_bad_keys(problem: Problem, bad: Tensor) -> Tensor:
    """Return which rows see a bad key: (B, H, Q, 1)."""
    assert problem.mask is not None
    bad = bad.repeat_interleave(problem.frame.H // problem.G, 1).unsqueeze(-2)
    return (problem.mask.allows(problem.frame.indices(device=bad.device)) & bad).any(-1, keepdim=True)


def why_not(problem: Problem) -> list[str]:
    score, reasons = problem.score, []
    if problem.empty:
        reasons.append("an axis is empty")
    if not problem.softmax:
        reasons.append(f"its kernel computes a softmax, not {problem.normalization!r}")
    if problem.max_logit:
        reasons.append("its kernel does not return the largest logits")
    if problem.device.type == "meta":
        reasons.append("it reads values, and meta tensors have none")
    if type(score) not in (Dot, Cosine, Bilinear):
        reasons.append(f"its kernel supports dot products, not {score!r}")
    elif isinstance(score, Dot) and score.softcap is not None:
        reasons.append("its kernel has no softcap")
    if problem.sink is not None:
        reasons.append("its kernel has no sink")
    if problem.lse:
        reasons.append("it returns no log-sum-exp")
    if problem.tangent:
        reasons.append("its kernel has no forward mode")
    if problem.dropout:
        reasons.append("its dropout takes a dense path, and cannot be reproduced in backward")
    if problem.bias is not None and not is_built_in(problem.bias):
        reasons.append(f"it is unknown whether {problem.bias!r} has a value part")
    elif problem.bias is not None and any(isinstance(part, Shaw) for part in problem.bias.parts()):
        reasons.append("shaw needs a dense bias and has a value part")
    return reasons


def why_avoid(problem: Problem) -> list[str]:
    reasons = []
    if problem.D != problem.E:
        reasons.append(f"widths differ, D = {problem.D} and E = {problem.E}: it takes its dense path")
    if problem.bias is not None and torch.is_grad_enabled() and any(t.requires_grad for t in problem.bias.tensors()):
        reasons.append("a bias that requires grad takes its dense path")
    if exceeds(needed := peak_bytes(problem), DENSE_BYTES):
        reasons.append(f"the dense mask or bias takes {needed / 1e6:,.0f} MB")
    if problem.in_transform:
        reasons.append("vmap runs its kernel slice by slice")
    if problem.device.type != "cpu" and not triton.why_not(problem):
        reasons += _what_triton_saves(problem)
    return reasons


def _what_triton_saves(problem: Problem) -> list[str]:
    """Return what this engine does to a call in the memory of a GPU, which the kernels in Triton do not."""
    reasons = []
    if (problem.mask is not None or problem.bias is not None) and not _plain_causal(problem):
        reasons.append("it reads a dense mask or bias and computes what the mask hides")
    if problem.G != problem.frame.H:
        reasons.append("it repeats the keys and values of grouped heads")
    if type(problem.score) is not Dot or isinstance(problem.scale, Tensor):
        reasons.append("it scales queries and keys beforehand")
    return reasons


def fallback(problem: Problem) -> list[str]:
    uses = []
    if _may_read(problem):
        uses.append("tiled computes the call again if a row of the output is not finite or all 0")
    if _has_double_backward(problem):
        uses.append("tiled computes second derivatives")
        if problem.device.type == "cpu":
            uses.append("tiled computes gradients again that are not finite")
    return uses


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


ENGINE = Engine("sdpa", why_not, why_avoid, run, peak_bytes, lambda problem: not _plain_causal(problem), fallback)
