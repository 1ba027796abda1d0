"""Bugs planted in the attention of `clean_attention.py`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.check import Target

from .clean_attention import (
    Steps,
    attention,
    dropout_factors,
    hide,
    products,
    shared,
    visible,
)


@dataclass(frozen=True)
class Bug:
    """A planted bug, and the property that must catch it first."""

    property: str
    attend: Callable[..., Tensor]
    about: str

    def target(self, name: str) -> Target:
        setup = f"from tests.check.broken_attentions import BUGS\n\nattend = BUGS[{name!r}].attend"
        return Target(name, self.attend, growth=1, setup=setup)


BUGS: dict[str, Bug] = {}
CLEAN = Target("clean", attention, growth=1)


def plant(name: str, property: str, **steps: Any) -> None:
    """Register a bug in some of the steps."""
    own = replace(Steps(), **steps)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attention(q, k, v, steps=own, **options)

    BUGS[name] = Bug(property, attend, name.replace("_", " "))


def bug(property: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a bug in a whole attention function."""

    def register(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        BUGS[attend.__name__] = Bug(property, attend, attend.__name__.replace("_", " "))
        return attend

    return register


def strictly_below(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] - 1)
    return visible(mask, False, q, k) if not causal else below if mask is None else mask & below


def top_left(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return visible(mask, False, q, k) if not causal else below if mask is None else mask & below


def beyond_the_diagonal(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """Off by one, but only with more than one tile of 128 keys."""
    if not causal or k.shape[2] <= 128:
        return visible(mask, causal, q, k)
    below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] + 1)
    return below if mask is None else mask & below


def later_key(visible_keys: bool) -> Callable[..., Tensor | None]:
    """Key 700 is always visible, or never, under any mask: one tile does not show the bug."""

    def wrong(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
        if mask is None or k.shape[2] <= 700:
            return visible(mask, causal, q, k)
        at = torch.arange(k.shape[2]) == 700
        return visible(mask | at if visible_keys else mask & ~at, causal, q, k)

    return wrong


def first_row_only(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is not None and mask.shape[0] > 1:
        mask = torch.cat([mask[:1], torch.ones_like(mask[1:])])
    return visible(mask, causal, q, k)


def one_factor_for_all_heads(dropout: float, shape: tuple[int, ...]) -> Tensor:
    return dropout_factors(dropout, (shape[0], 1, *shape[2:])).expand(shape)


def summed_in_half(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Weights are float32, but their sums are kept in the dtype of the inputs."""
    out = attention(q, k, v, **options)
    if q.dtype not in (torch.float16, torch.bfloat16) or options:
        return out
    weights = products(q.float(), shared(k, q.shape[1]).float(), q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    output = torch.zeros_like(out)
    for j in range(k.shape[2]):
        output = output + weights[..., j : j + 1] * shared(v, q.shape[1])[:, :, j : j + 1]
    return output


plant(
    "scale_of_one_over_the_width", "default-scale", scale_of=lambda width, scale: 1 / width if scale is None else scale
)
plant("scale_times_the_default", "scale", scale_of=lambda width, scale: width**-0.5 * (1.0 if scale is None else scale))
plant("causal_off_by_one", "causal", visible=strictly_below)
plant("causal_off_by_one_beyond_128_keys", "causal", visible=beyond_the_diagonal)
plant("a_key_of_a_later_tile_unmasked", "masked-rows", visible=later_key(True))
plant("a_key_of_a_later_tile_hidden", "mask-definition", visible=later_key(False))
plant("causal_at_the_top_left", "alignment", visible=top_left)
plant("inverted_mask", "mask-polarity", hide=lambda logits, visible_keys: logits.masked_fill(visible_keys, -math.inf))
plant("mask_added_as_0_and_1", "mask-excludes", hide=lambda logits, visible_keys: logits + visible_keys.to(logits))
plant("mask_of_minus_ten", "mask-excludes", hide=lambda logits, visible_keys: logits - 10.0 * ~visible_keys)
plant("mask_for_the_first_batch_row_only", "mask-per-head", visible=first_row_only)
plant("mask_replaces_causal", "causal-and-mask", visible=lambda m, c, q, k: visible(m, c and m is None, q, k))
plant("nan_of_a_masked_row", "masked-rows", least=-math.inf)
plant("nan_leaks_from_values", "nan-leaks", clean_keys=lambda x, visible_keys: x)
plant("output_not_rescaled_when_the_peak_rises", "row-sums", shrink_output=False)
plant("nothing_rescaled_when_the_peak_rises", "permutation", shrink_output=False, shrink_total=False)
plant("heads_interleaved", "grouped-heads", shared=lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1))
plant("dropout_not_rescaled", "dropout-rescaling", dropout_factors=lambda p, shape: (torch.rand(shape) >= p).float())
plant("dropout_of_one_minus_p", "dropout-rate", dropout_factors=lambda p, shape: (torch.rand(shape) < p) / (1 - p))
plant("one_dropout_for_all_heads", "dropout-independence", dropout_factors=one_factor_for_all_heads)
plant(
    "dropout_from_a_generator_of_its_own", "dropout-seed",
    dropout_factors=lambda p, shape: (torch.rand(shape, generator=GENERATOR) >= p) / (1 - p),
)  # fmt: skip
plant("peak_not_taken_off", "large-logits", peak_of=lambda logits: torch.zeros_like(logits[..., :1]))
plant("weights_laid_out", "memory", tile=1 << 30)
GENERATOR = torch.Generator()
BUGS["sums_in_half"] = Bug("half-accumulation", summed_in_half, "sums in half")


@bug("query-independence")
def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = attention(q, k, v, **options)
    return (
        out if options else products(q, shared(k, q.shape[1]), q.shape[-1] ** -0.5).softmax(-2) @ shared(v, q.shape[1])
    )


@bug("batch-and-heads")
def keys_of_the_first_batch_row(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k[:1].expand_as(k), v, **options)


@bug("permutation")
def keys_weighted_by_their_place(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k * (1 + 1e-5 * torch.arange(k.shape[2]).unsqueeze(-1)).to(k), v, **options)


@bug("odd-lengths")
def last_keys_left_out(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    whole = k.shape[2] // 8 * 8
    if options or whole == 0:
        return attention(q, k, v, **options)
    return attention(q, k[:, :, :whole], v[:, :, :whole])


@bug("strides")
def memory_read_as_if_contiguous(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    def read(x: Tensor) -> Tensor:
        shape = x.shape
        steps = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        return x if 0 in x.stride() else torch.as_strided(x, shape, steps)

    return attention(q, read(k), v, **options)


@bug("negative-bit")
def sign_of_a_view_ignored(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, -k if k.is_neg() else k, v, **options)


@bug("edited-mask")
def mask_cached_by_address(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    if mask is not None:
        mask = CACHED_MASKS.setdefault((mask.data_ptr(), mask.shape, mask.stride()), (mask, mask.clone()))[1]
    return attention(q, k, v, mask=mask, **options)


@bug("edited-mask")
def mask_cached_by_version(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    if mask is not None:
        key = mask.data_ptr(), mask.shape, mask.stride(), mask._version
        mask = CACHED_MASKS.setdefault(key, (mask, mask.clone()))[1]
    return attention(q, k, v, mask=mask, **options)


CACHED_MASKS: dict[Any, tuple[Tensor, Tensor]] = {}  # holds the masks, so that no other tensor gets their address


@bug("inputs-untouched")
def query_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if not options and not q.requires_grad:
        q.mul_(1.01)
    return attention(q, k, v, **options)


@bug("own-output")
def one_buffer_for_all_outputs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = attention(q, k, v, **options)
    if out.requires_grad:
        return out
    return BUFFERS.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)


BUFFERS: dict[Any, Tensor] = {}


@bug("threads")
def inputs_kept_in_a_global(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    SHARED["q"] = q
    time.sleep(1e-4)
    return attention(SHARED["q"] if SHARED["q"].shape == q.shape else q, k, v, **options)


SHARED: dict[str, Tensor] = {}


ORDERS = itertools.cycle((1.0, 1 + 1e-6))  # consecutive calls always differ


@bug("determinism")
def sums_in_any_order(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options) * next(ORDERS)


@bug("dropout-off")
def dropout_without_request(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if q.shape[2] < 2 or q.requires_grad:
        return attention(q, k, v, **options)
    return attention(q, k, v, **options) + 1e-7 * torch.rand(())


@bug("output-dtype")
def output_in_float64(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options).double()


@bug("global-state")
def settings_changed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.use_deterministic_algorithms(True)
    return attention(q, k, v, **options)


@bug("empty-axes")
def no_keys_is_an_error(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    k.amax(2)
    return attention(q, k, v, **options)


@bug("half-range")
def products_stored_in_float16(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if q.dtype != torch.float16 or options:
        return attention(q, k, v, **options)
    logits = (q.float() @ k.float().transpose(-2, -1)).half() * q.shape[-1] ** -0.5
    return (logits.float().softmax(-1) @ v.float()).half()


@bug("gradient")
def peak_detached_in_one_place_only(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if options or not q.requires_grad:
        return attention(q, k, v, **options)
    k, v = shared(k, q.shape[1]), shared(v, q.shape[1])
    logits = products(q, k, q.shape[-1] ** -0.5)
    peak = logits.amax(-1, keepdim=True)
    return (logits - peak).exp() @ v / (logits - peak.detach()).exp().sum(-1, keepdim=True)


class Backward(torch.autograd.Function):
    """A custom backward, with the bug that `how` names."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = how
        return attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            grads = torch.autograd.grad(attention(q, k, v), (q, k, v), grad.detach())
        if ctx.how == "scale":
            factor = q.shape[-1] ** 0.5
            return grads[0] * factor, grads[1] * factor, grads[2], None
        if ctx.how == "noise":
            return grads[0] * next(ORDERS), *grads[1:], None
        if ctx.how == "grouped":
            return grads[0], grads[1] / (q.shape[1] // k.shape[1]), grads[2], None
        return *grads, None


@bug("gradient")
def scale_missing_in_the_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options) if options else Backward.apply(q, k, v, "scale")


@bug("grouped-gradients")
def mean_over_a_group_in_the_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options) if options else Backward.apply(q, k, v, "grouped")


@bug("gradient-determinism")
def gradients_summed_in_any_order(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options) if options else Backward.apply(q, k, v, "noise")


@bug("mask-gradients")
def mask_forgotten_in_the_gradient(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    out = attention(q, k, v, mask=mask, **options)
    if mask is None or not q.requires_grad or not bool(k.isfinite().all() & v.isfinite().all()):
        return out
    free = attention(q, k, v, **options)
    return out.detach() + free - free.detach()


@bug("double-backward")
def gradient_cut_off(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options) if options else Backward.apply(q, k, v, "")


@bug("second-derivatives")
def gradient_of_a_single_query_cut_off(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options) if options or q.shape[2] > 1 else Backward.apply(q, k, v, "")


def constant(x: Tensor) -> Tensor:
    """Drop the tangent, if there is one."""
    return x if forward_ad.unpack_dual(x).tangent is None else x.detach()


def in_a_transform(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


@bug("tangents")
def tangent_of_the_keys_dropped(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, constant(k) if forward_ad._current_level >= 0 else k, v, **options)


@bug("mask-tangents")
def mask_forgotten_in_the_tangent(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    out = attention(q, k, v, mask=mask, **options)
    if mask is None or forward_ad._current_level < 0:
        return out
    return forward_ad.make_dual(out.detach(), forward_ad.unpack_dual(attention(q, k, v, **options)).tangent)


@bug("jvp")
def tangent_of_the_values_dropped_in_a_transform(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v.detach() if in_a_transform(v) else v, **options)


@bug("reverse-over-forward")
def tangent_without_a_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = attention(q, k, v, **options)
    if forward_ad._current_level < 0 or in_a_transform(q):
        return out
    value, along = forward_ad.unpack_dual(out)
    return out if along is None or not along.requires_grad else forward_ad.make_dual(value, along.detach() + 0 * value)


@bug("masked-row-gradients")
def nan_removed_after_the_softmax(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    if mask is None or options or mask.any(-1).all():
        return attention(q, k, v, mask=mask, **options)
    weights = (products(q, k, q.shape[-1] ** -0.5) + torch.where(mask, 0.0, -math.inf)).softmax(-1)
    return weights.nan_to_num(0.0) @ v


@bug("nan-gradients")
def nan_hidden_in_the_output_only(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    if mask is None or options or not q.requires_grad or k.isfinite().all() & v.isfinite().all():
        return attention(q, k, v, mask=mask, **options)
    weights = hide(products(q, k, q.shape[-1] ** -0.5), mask).softmax(-1)
    return weights @ v.nan_to_num(0.0, 0.0, 0.0)


@bug("dropout-gradients")
def dropout_redrawn_in_backward(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, **options: Any) -> Tensor:
    out = attention(q, k, v, dropout=dropout, **options)
    if not dropout or not v.requires_grad:
        return out
    other = attention(q, k, v, dropout=dropout, **options)
    return other + (out - other).detach()


@bug("causal-nan-leaks")
def future_multiplied_by_zero(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **options: Any) -> Tensor:
    if not causal or options or k.isfinite().all() & v.isfinite().all():
        return attention(q, k, v, causal=causal, **options)
    return hide(products(q, k, q.shape[-1] ** -0.5), visible(None, True, q, k)).softmax(-1) @ v


@bug("causal-empty-rows")
def mean_for_rows_before_the_first_key(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **options: Any
) -> Tensor:
    out = attention(q, k, v, causal=causal, **options)
    nothing = (torch.arange(q.shape[2]) < q.shape[2] - k.shape[2]).unsqueeze(-1)
    return torch.where(nothing, v.mean(2, keepdim=True), out) if causal and not options else out


@bug("mask-broadcast")
def mask_row_for_the_first_query_only(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
    if mask is not None and mask.shape[2] < q.shape[2]:
        rest = torch.ones(*mask.shape[:2], q.shape[2] - 1, mask.shape[3], dtype=torch.bool)
        mask = torch.cat([mask, rest], 2)
    return attention(q, k, v, mask=mask, **options)


@bug("output-shape")
def heads_after_positions(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, **options).transpose(1, 2)


@bug("value-width")
def values_cut_to_the_width_of_keys(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v[..., : k.shape[-1]], **options)


@bug("definition")
def weights_rounded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q.bfloat16().to(q) if q.dtype == torch.float32 else q, k, v, **options)
