"""Inference through a frozen stack of blocks in one call of the kernels, without a call from Python per operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from regard.attention import INTERVENTION, OBSERVERS, Attention
from regard.engines.native.stack import (
    BlockTensors,
    Scratch,
    StackSizes,
    pack_attention,
    pack_blocks,
    pack_caches,
    run_stack,
    with_keys,
)
from regard.engines.packed_linear import PackedWeight, is_eager, is_plain
from regard.masks import causal
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, PostNorm, PreNorm
from regard.nn.cache import Cache, FixedCache
from regard.nn.cached_attention import shift_to_cache
from regard.nn.context import LayerContext
from regard.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from regard.nn.rotary import Rotary
from regard.sharding import current_sharding

_ATTRIBUTES = (
    "forward", "training", "dropout", "activation", "eps", "rotary", "attend", "query_norm", "key_norm", "source",
    "gate", "readers",
)  # fmt: skip
_ABSENT = object()  # an attribute that is None moves elsewhere when it becomes a module
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


class _Unsupported(Exception):
    """A stack that the kernel does not compute."""


class StackPlan:
    """The addresses of all tensors of a stack, for as long as its modules hold them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._panels: list[tuple[PackedWeight, Tensor]] = []
        self._addresses: list[tuple[Tensor, int]] = []
        modules = {id(module): module for layer in layers for module in layer.modules()}.values()
        if any("forward" in module.__dict__ or (module.training and _drops(module)) for module in modules):
            raise _Unsupported
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)] + [*_GLOBAL_HOOKS]
        # What a module computes with: a replacement is noticed by the next call.
        self._entries: list[tuple[dict[str, Any], str, object]] = [
            (place, name, place.get(name, _ABSENT))
            for module in modules
            for place in (module.__dict__, module._parameters, module._modules)
            for name in (_ATTRIBUTES if place is module.__dict__ else place)
        ]
        self._without_mask: dict[Attention, Attention] = {}
        self._decoding: tuple[tuple, list[bytes]] | None = None
        attentions: dict[Attention, int] = {}
        blocks, self.sizes, self.rotary = [], None, None
        for layer in layers:
            sizes, rotary, block = self._read(layer, attentions)
            if self.sizes is not None and (sizes, rotary) != (self.sizes, self.rotary):
                raise _Unsupported
            self.sizes, self.rotary = sizes, rotary
            blocks.append(block)
        if self.sizes is None:
            raise _Unsupported
        self.layers, self.attends, self.blocks = list(layers), list(attentions), pack_blocks(blocks)
        self.index = [block.attention for block in blocks]

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are the blocks, with the same tensors and no hook or replacement of a forward."""
        return (
            len(layers) == len(self.layers)
            and all(map(operator.is_, layers, self.layers))
            and all(place.get(name, _ABSENT) is value for place, name, value in self._entries)
            and all(getattr(weight, "panels", None) is panels for weight, panels in self._panels)
            and all(tensor.data_ptr() == address for tensor, address in self._addresses)
            and not any(self._hooks)
        )

    def _read(
        self, layer: nn.Module, attentions: dict[Attention, int]
    ) -> tuple[StackSizes, Rotary | None, BlockTensors]:
        if type(layer) is not Block or layer.cross is not None:
            raise _Unsupported
        attention: Any = layer.attention
        feedforward: Any = layer.feedforward
        residuals = (layer.attention_residual, layer.feedforward_residual)
        kinds = {type(residual) for residual in residuals}
        if type(attention) is not MultiHeadAttention or type(feedforward) not in (FeedForward, GatedFeedForward):
            raise _Unsupported
        if len(kinds) != 1 or not kinds <= {PreNorm, PostNorm}:
            raise _Unsupported
        products = attention.qkv, attention.output, feedforward.up, feedforward.output
        if any(type(module) is not nn.Linear for module in products):
            raise _Unsupported
        separate = (attention.source, attention.query_norm, attention.key_norm, attention.gate)
        if any(part is not None for part in separate) or attention.readers or attention.d_value != attention.d_head:
            raise _Unsupported
        norms: list[Any] = [residual.norm for residual in residuals]
        if len({(type(norm), getattr(norm, "eps", None)) for norm in norms}) != 1 or type(norms[0]) not in (
            nn.LayerNorm,
            nn.RMSNorm,
        ):
            raise _Unsupported
        d_model, rms = attention.output.out_features, type(norms[0]) is nn.RMSNorm
        if any(norm.normalized_shape != (d_model,) or norm.weight is None for norm in norms):
            raise _Unsupported
        if not rms and any(norm.bias is None for norm in norms):
            raise _Unsupported
        names = [name for name, function in ACTIVATIONS.items() if _is_same(function, feedforward.activation)]
        if not names:
            raise _Unsupported
        gated = type(feedforward) is GatedFeedForward
        sizes = StackSizes(
            d_model, attention.heads, attention.kv_heads, attention.d_head, feedforward.output.in_features,
            kinds == {PostNorm}, rms, torch.finfo(torch.float32).eps if norms[0].eps is None else norms[0].eps, gated,
            names[0],
        )  # fmt: skip
        weights = tuple(
            (weight := self._weight(module), None if module.bias is None else self._tensor(module, "bias", len(weight)))
            for module in products
        )
        gains = self._tensor(norms[0], "weight", d_model), self._tensor(norms[1], "weight", d_model)
        shifts = None if rms else (self._tensor(norms[0], "bias", d_model), self._tensor(norms[1], "bias", d_model))
        number = attentions.setdefault(attention.attend, len(attentions))
        return sizes, attention.rotary, BlockTensors(weights, gains, shifts, number)

    def _weight(self, module: nn.Module) -> PackedWeight:
        weight = module._parameters.get("weight")
        if type(weight) is not PackedWeight:
            raise _Unsupported
        self._panels.append((weight, weight.panels))
        return weight

    def _tensor(self, module: nn.Module, name: str, size: int) -> Tensor:
        tensor = module._parameters.get(name)
        if tensor is None or not is_plain(tensor) or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise _Unsupported
        if tensor.shape != (size,):
            raise _Unsupported
        self._addresses.append((tensor, tensor.data_ptr()))
        return tensor

    def run(self, x: Tensor, context: LayerContext, caches: Sequence[Any] | None) -> Tensor | None:
        """Map x (B, N, d_model) to the output of the last block, or return None if the kernel cannot."""
        assert self.sizes is not None
        B, N, _ = x.shape
        H, G = self.sizes.heads, self.sizes.kv_heads
        scratch = Scratch.allocate(self.sizes, B, N)
        q, k, v = (part.transpose(1, 2) for part in scratch.qkv.split((H, G, G), 2))
        start, keys_values = 0, []
        if caches is not None:
            if any(type(cache) not in (Cache, FixedCache) for cache in caches):
                return None
            start = caches[0].length
            if any(cache.length != start or cache.dropped for cache in caches):
                return None
            if not all(cache.holds_like(k, v) for cache in caches):
                return None
        table = None
        if self.rotary is not None:
            cos, sin = context.table(self.rotary, self.sizes.d_head, scratch.qkv, start=start)
            table = cos.squeeze(-2).contiguous(), sin.squeeze(-2).contiguous()
        if caches is None:
            results = self._attentions(context, None, (q, k, v))
        else:
            # Caches grow only once the call is sure to happen; the first one shows the strides of all.
            keys_values = [cache.extend(k, v) for cache in caches]
            results = self._attentions(context, caches[0], (q, *(t[:, :, : start + N] for t in keys_values[0])))
            if results is None or any(
                one[0].stride() != keys_values[0][0].stride() or one[1].stride() != keys_values[0][1].stride()
                for one in keys_values
            ):
                for cache in caches:
                    cache.length -= N
                return None
        if results is None:
            return None
        attentions, _held = results
        out = x.clone(memory_format=torch.contiguous_format)
        packed: tuple[Tensor, Tensor] | None = None
        if keys_values:
            packed = pack_caches([keys for keys, _ in keys_values]), pack_caches([values for _, values in keys_values])
        run_stack(
            self.sizes, self.blocks, len(self.layers), out, scratch, attentions, table,
            self.rotary is not None and self.rotary.interleaved, packed,
        )  # fmt: skip
        return out

    def _attentions(
        self, context: LayerContext, cache: Cache | None, tensors: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[list[bytes], object] | None:
        """Pack the problems of all descriptions, and return what they point to as well."""
        query, key, value = tensors
        simple = cache is not None and query.shape[2] == 1 and context.mask is None and context.bias is None
        simple = simple and context.left_padding is None and all(map(self._sees_all, self.attends))
        layout = query.shape, query.stride(), key.stride(), value.stride(), torch.get_num_threads()
        if simple and self._decoding is not None and self._decoding[0] == layout:
            return [with_keys(packed, key.shape[2]) for packed in self._decoding[1]], None
        packed, held = [], []
        for attend in self.attends:
            if cache is None:
                combined = context.combine(attend)
            elif simple:
                combined = self._without_mask.setdefault(attend, attend.replace(mask=None))
            else:
                combined = shift_to_cache(context.combine(attend, cache), cache, query, value.shape[-1])
            result = pack_attention(combined.problem(query, key, value, return_lse=False), query, key, value)
            if result is None:
                return None
            packed.append(result[0])
            held.append(result[1])
        if simple:
            self._decoding = layout, packed
        return packed, held

    @staticmethod
    def _sees_all(attend: Attention) -> bool:
        """Whether the last token attends to all tokens, and the packed problem points to no other tensor."""
        plain = attend.offset is None and attend.bias is None and attend.sink is None and not attend.tensors()
        return plain and attend.mask is causal()


def _drops(module: nn.Module) -> bool:
    return bool(module.__dict__.get("dropout"))


def _is_packed(stack: nn.Module) -> bool:
    """Whether the first weight of a stack is packed: a quick check before the others."""
    first = next(iter(stack.children()), None)
    while isinstance(first, nn.Module) and not isinstance(first, nn.Linear):
        first = next(iter(first.children()), None)
    return first is not None and type(first._parameters.get("weight")) is PackedWeight


_PLANS: WeakKeyDictionary[nn.Module, StackPlan | None] = WeakKeyDictionary()


def _is_same(function: Any, other: Any) -> bool:
    """Whether two functions are the same, also if one of them is an unpickled copy of a partial."""
    if isinstance(function, partial) and isinstance(other, partial):
        return (function.func, function.args, function.keywords) == (other.func, other.args, other.keywords)
    return function == other


def run_fused(
    stack: nn.Module, layers: Callable[[], Sequence[nn.Module]], x: Tensor, context: LayerContext,
    caches: Sequence[Any] | None,
) -> Tensor | None:  # fmt: skip
    """Return the output of the last block of a frozen stack for x (B, N, d_model), or None if Python has to compute it.

    layers: returns the blocks in the order of execution.
    """
    if (
        not _is_packed(stack)
        or stack.training
        or torch.is_grad_enabled()
        or not is_eager()
        or torch._C._is_any_autocast_enabled()
    ):
        return None
    if x.dim() != 3 or not x.numel() or x.dtype != torch.float32 or not is_plain(x):
        return None
    if OBSERVERS.get() or INTERVENTION.get() is not None or current_sharding() is not None:
        return None
    if any(part is not None for part in (context.query_position, context.key_position, context.relative)):
        return None
    plan, blocks = _PLANS.get(stack), layers()
    if plan is None or not plan.is_current(blocks):
        plan = None
        with suppress(_Unsupported):
            plan = StackPlan(blocks)
        if plan is None or not plan.is_current(blocks):
            _PLANS.pop(stack, None)
            return None
        _PLANS[stack] = plan
    return None if x.shape[2] != plan.sizes.d_model else plan.run(x, context, caches)  # type: ignore[union-attr]
