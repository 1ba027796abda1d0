"""regard as an attention implementation of Hugging Face Transformers: `attn_implementation="regard"`.

>>> from transformers import BertConfig, BertModel
>>> from regard.integrations.transformers import enable
>>> enable()
>>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
>>> BertModel._from_config(config, attn_implementation="regard").config._attn_implementation
'regard'
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.masking_utils import eager_mask, prepare_padding_mask, sdpa_mask
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import _active_collector

from regard.integrations.coverage import NAME, Coverage, coverage, missing_parts, unreached_configs
from regard.integrations.dense_masks import key_masks, read_keep_mask
from regard.integrations.mask_functions import UnknownMaskFunction, combine, to_masks
from regard.integrations.mask_tensor import MaskTensor
from regard.integrations.pattern import NO_MASK, Pattern, build_attention
from regard.masks import causal, dense, documents, selected, varlen, window

__all__ = ["Coverage", "attend", "coverage", "enable", "build_mask"]

_log = logging.get_logger(__name__)
_TOP_LEFT = Pattern(causal(), offset=0)
_REQUESTED: WeakSet[PreTrainedModel] = WeakSet()  # models for which regard was requested
_RETURNED_WEIGHTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # of the last forward call of each module


def enable() -> None:
    """Register `attn_implementation="regard"` with Transformers: the attention function and its masks.

    Attention modules that do not get their attention function from Transformers (all of Longformer, Bloom or GPT-J, the
    vision encoder of SAM) cannot run regard. A model with such modules names them in one warning; its other modules run
    regard. `coverage` lists them all.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, build_mask)
    if not hasattr(PreTrainedModel.post_init, "_regard"):
        _wrap("get_correct_attn_implementation", _choose_implementation)
        _wrap("post_init", _warn_after_building)
        _wrap("set_attn_implementation", _set_everywhere)
        _wrap("switch_to_cb_friendly_attn", _keep_in_continuous_batching, ContinuousBatchingManager)


def _wrap(name: str, around: Callable[..., Any], owner: type = PreTrainedModel) -> None:
    """Replace a method of a class of Transformers by `around(method, object, ...)`."""
    method = getattr(owner, name)

    @wraps(method)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, model, *args, **kwargs)

    wrapper._regard = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _choose_implementation(method: Callable, model: Any, requested_attention: str | None, *args: Any, **kw: Any) -> str:
    """Choose "regard" if the model supports attention implementations, else "eager", which every model has."""
    if requested_attention != NAME:
        return method(model, requested_attention, *args, **kw)
    _REQUESTED.add(model)
    for name, classes in vars(sys.modules[type(model).__module__]).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(classes, dict) and "eager" in classes:
            classes.setdefault(NAME, classes.get("sdpa", classes["eager"]))  # the model looks it up when it is built
    return method(model, NAME if model._can_set_attn_implementation() else "eager", *args, **kw)


def _warn_after_building(method: Callable, model: Any) -> None:
    method(model)
    if not _is_being_built_inside(model) and any(part in _REQUESTED for part in model.modules()):
        _warn(model)


def _is_being_built_inside(model: Any) -> bool:
    """Whether the model is built in the constructor of another one, which will warn about all parts."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "__init__":
            around = frame.f_locals.get("self")
            if isinstance(around, PreTrainedModel) and around is not model:
                return True
    return False


def _set_everywhere(method: Callable, model: Any, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
    method(model, attn_implementation, *args, **kwargs)
    for config, around in unreached_configs(model):
        if NAME in (config._attn_implementation, around._attn_implementation):
            config._attn_implementation_internal = around._attn_implementation
    if NAME in torch.utils._pytree.tree_leaves(attn_implementation):
        _warn(model)


def _keep_in_continuous_batching(method: Callable, manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Let continuous batching run regard, although Transformers only knows its own attentions to be able to.

    Its batches have the edges of the requests, from which `attend` builds a mask; no mask tensor is needed.
    """
    if model.config._attn_implementation != NAME:
        method(manager, model, *args, **kwargs)


def _warn(model: Any) -> None:
    if (missing := missing_parts(model)) is not None:
        _log.warning_once(missing)


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass as a tensor that holds its description; None if nothing is hidden.

    While torch is tracing, values cannot be read, and the mask is the tensor that eager attention takes.
    """
    given = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "device": device} | kwargs
    given |= {} if mask_function is None else {"mask_function": mask_function}
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    if is_tracing(attention_mask) or (isinstance(q_offset, Tensor) and is_tracing(q_offset)):
        return eager_mask(**sizes, **given, dtype=dtype, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    offset = int(q_offset) - kv_offset
    try:
        parts = (causal(),) if mask_function is None else to_masks(mask_function, kv_length, kv_offset)
        if (keys := prepare_padding_mask(attention_mask, kv_length, kv_offset)) is not None:
            parts += key_masks(keys[:, kv_offset : kv_offset + kv_length].bool())
        mask = combine(parts, q_length, kv_length, offset)
    except UnknownMaskFunction:
        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = dense(sdpa_mask(**sizes, **given))
    if mask is None and allow_is_bidirectional_skip:
        return None
    shape = batch_size, 1, q_length, kv_length
    # no mask: drop the offset so that plans are shared
    pattern = Pattern(mask, None if mask is None else offset, transient=True)
    return MaskTensor(pattern, shape, dtype, torch.device(device))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for Transformers: query (B, H, Q, D), key and value (B, G, K, D) to (B, Q, H, D).

    The second result is None, or with `output_attentions=True` the weights before dropout (B, H, Q, K).
    """
    if kwargs.get("sinks") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} passes 'sinks' to its attention, which attn_implementation={NAME!r} does "
            'not support; use model.set_attn_implementation("eager")'
        )
    if (paged := kwargs.pop("cache", None)) is not None:
        key, value = paged.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        pattern, bias = _paged_pattern(kwargs, attention_mask), None
    elif attention_mask is None:
        pattern, bias = _without_mask(module, is_causal, query.shape[2], key.shape[2]), None
    elif isinstance(attention_mask, MaskTensor) and attention_mask.intact:
        pattern, bias = attention_mask.pattern, None
    else:
        pattern, bias = _read(attention_mask, query)
    if paged is None and (edges := kwargs.get("cu_seq_lens_q")) is not None:
        pattern = _restrict_to_sequences(pattern, edges, kwargs.get("cu_seq_lens_k"), query.shape[2], key.shape[2])
    if (indices := kwargs.get("indices")) is not None:  # (B, Q, n): the keys that an indexer chose for each query
        chosen = selected(indices.unsqueeze(1))
        pattern = Pattern(chosen if pattern.mask is None else pattern.mask & chosen, pattern.offset)
    if (indices := kwargs.get("block_indices")) is not None:  # (B, heads of the indexer, Q, n)
        chosen = selected(indices.repeat_interleave(query.shape[1] // indices.shape[1], 1), module.indexer.block_size)
        pattern = Pattern(chosen if pattern.mask is None else pattern.mask & chosen, pattern.offset)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    description = build_attention(pattern, scale=scaling, softcap=softcap, dropout=dropout, bias=bias, sink=s_aux)
    output = description(query, key, value).transpose(1, 2).contiguous()
    if not _wants_weights(module, kwargs):
        return output, None
    if s_aux is not None and _returns_weights_without_sink(type(module).__module__):
        description = build_attention(pattern, scale=scaling, softcap=softcap, dropout=dropout, bias=bias)
    return output, description.intervene(query, key, again=True)[0].weights(query, key)


def _without_mask(module: nn.Module, is_causal: bool | None, queries: int, keys: int) -> Pattern:
    """The pattern of a call without a mask.

    `build_mask` returns None only if nothing is hidden, and no model of Transformers builds masks for eager attention
    only. So None hides nothing, as in eager attention, even if `module.is_causal` is True (the image stream of
    BridgeTower). For modules of other packages this is ambiguous: sdpa would use a causal mask, eager attention not.
    """
    if queries == 1 or is_causal is False:
        return NO_MASK
    if is_causal:
        if queries != keys:
            raise ValueError(
                f"{type(module).__name__} passes is_causal=True and no mask for {queries} queries and {keys} keys, "
                "which does not determine the positions of the queries; pass a mask, as create_causal_mask builds it"
            )
        return _TOP_LEFT
    if getattr(module, "is_causal", False) and not type(module).__module__.startswith("transformers."):
        raise ValueError(
            f"{type(module).__name__} has is_causal=True and passes no mask, which is causal with sdpa and not with "
            "eager attention; pass is_causal=True or is_causal=False, or a mask, as create_causal_mask builds it"
        )
    return NO_MASK


def _read(mask: Tensor, query: Tensor) -> tuple[Pattern, Tensor | None]:
    """Read a mask tensor: its pattern, and the bias to add to the scores, or None."""
    mask = mask.dense if isinstance(mask, MaskTensor) else mask
    return read_keep_mask(mask if mask.dtype == torch.bool or mask.is_floating_point() else mask.to(query.dtype))


def _restrict_to_sequences(
    pattern: Pattern, edges: Tensor, key_edges: Tensor | None, queries: int, keys: int
) -> Pattern:
    """Restrict the pattern to packed sequences, from `edges[n]` to `edges[n + 1]`."""
    if queries != keys or (key_edges is not None and not torch.equal(edges, key_edges)):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must be the same edges of {queries} queries and as many keys, got "
            f"{keys} keys; pack without a cache, or pass position_ids that restart with every sequence"
        )
    sequences = documents(torch.searchsorted(edges.long(), torch.arange(keys, device=edges.device), right=True))
    return Pattern(sequences if pattern.mask is None else pattern.mask & sequences, pattern.offset)


def _paged_pattern(kwargs: dict[str, Any], attention_mask: Any) -> Pattern:
    """The pattern of continuous batching: requests one after another, with the keys that the paged cache returned.

    A mask of `build_mask` knows the tokens of the batch only, not the edges of its requests, and is replaced.
    """
    foreign = attention_mask is not None and not isinstance(attention_mask, MaskTensor)
    if foreign or kwargs.get("block_table") is not None:
        raise NotImplementedError(
            f"a paged cache with {'a mask tensor' if foreign else 'a block table'} is not supported by "
            f'attn_implementation={NAME!r}; use model.set_attn_implementation("paged|eager")'
        )
    width = kwargs.get("sliding_window")
    inside = causal() if width is None else causal() & window(width - 1, 0)
    return Pattern(varlen(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], mask=inside))


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the model returns the weights; if backward computes the module again, whether it did in forward.

    Checkpointed layers are computed again outside of the collector, and must do the same.
    """
    if torch.compiler.is_compiling():
        return _returns_weights(module, kwargs)
    if torch._C._current_graph_task_id() < 0:
        _RETURNED_WEIGHTS[module] = _returns_weights(module, kwargs)
    return _RETURNED_WEIGHTS.get(module, False)


def _returns_weights(module: Any, kwargs: dict[str, Any]) -> bool:
    requested, collected = kwargs.get("output_attentions"), _active_collector.get()
    if requested or (collected is not None and any("attentions" in name for name in collected)):
        return True
    return requested is None and collected is None and _collects_weights(type(module).__module__)


@cache
def _collects_weights(module: str) -> bool:
    """Whether the layers of a model file collect weights without passing `output_attentions` to their attention."""
    pattern = r"attentions\.append\(|attentions \+=? \(|output_attentions=output_attentions"
    return bool(re.search(pattern, _file_source(module)))


@cache
def _returns_weights_without_sink(module: str) -> bool:
    """Whether the eager attention of a model file returns weights that sum to 1 and applies the sink to the output."""
    return bool(re.search(r"sink_scale\b.*\bsigmoid\(", _file_source(module)))


def _file_source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return ""
