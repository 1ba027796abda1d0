"""Bugs planted in tiny models of Transformers: masks that are lost, wrong by one, or right only without a cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.check.tiny_models import build

HIDDEN = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Plant:
    """A bug: the model, how it is planted, and what the check must find: the layers, scenarios, and words in a row."""

    model: str
    plant: Callable[[Any], None]
    layers: tuple[str, ...]
    scenario: str
    words: str
    implementation: str = "eager"

    def build(self) -> Any:
        model = build(self.model)
        self.plant(model)
        return model


def edit_mask(
    model: Any, layers: tuple[str, ...], edit: Callable[..., Tensor | None], name: str = "attention_mask"
) -> None:
    """Replace the mask of some layers by `edit(mask, state)`: the additive mask (B, 1, Q, K) that a layer is given."""

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {
            name: edit(kwargs.get(name), kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        }

    for layer in layers:
        model.get_submodule(layer).register_forward_pre_hook(before, with_kwargs=True)


def _mask(mask: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, HIDDEN).expand(mask.shape).contiguous()


def _distance(mask: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def window(size: int | None, mask: Tensor, states: Tensor) -> Tensor:
    """Another window, with the padding that the mask has."""
    real = (mask == 0).any(-2, keepdim=True)
    distance = _distance(mask)
    return _mask(mask, real & (distance >= 0) & (distance < (size or 10**6)))


def padding_ignored(mask: Tensor, states: Tensor) -> Tensor:
    return _mask(mask, _distance(mask) >= 0)


def lost(mask: Tensor | None, states: Tensor) -> None:
    return None


def causal_lost_in_chunks(mask: Tensor, states: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    if queries == keys or queries == 1:
        return mask
    return _mask(mask, (mask == 0).any(-2, keepdim=True))


def top_left(mask: Tensor, states: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    return _mask(mask, torch.arange(queries)[:, None] >= torch.arange(keys)) if queries > 1 else mask


def first_row(mask: Tensor, states: Tensor) -> Tensor:
    return mask[-1:].expand(mask.shape)


def without_self(mask: Tensor, states: Tensor) -> Tensor:
    return torch.where(_distance(mask) == 0, HIDDEN, mask)


def one_ahead(mask: Tensor, states: Tensor) -> Tensor:
    real = (mask == 0).any(-2, keepdim=True)
    return _mask(mask, real & (_distance(mask) >= -1))


def causal(mask: Tensor | None, states: Tensor) -> Tensor:
    mask = torch.zeros(states.shape[0], 1, states.shape[1], states.shape[1]) if mask is None else mask
    return torch.where(_distance(mask) >= 0, mask, HIDDEN)


def inverted(mask: Tensor | None, states: Tensor) -> Tensor | None:
    return None if mask is None else torch.where(mask == 0, HIDDEN, 0.0)


def soft(mask: Tensor, states: Tensor) -> Tensor:
    return mask.clamp_min(-9.0)


def minus_infinity(mask: Tensor, states: Tensor) -> Tensor:
    """Rows of padding, which see nothing, become NaN."""
    return torch.where(mask == 0, 0.0, -torch.inf)


def oldest_key_hidden(mask: Tensor, states: Tensor) -> Tensor:
    """In single steps, the oldest key that the window allows is hidden."""
    if mask.shape[-2] > 1:
        return mask
    oldest = (mask == 0).int().argmax(-1, keepdim=True)
    return torch.where(torch.arange(mask.shape[-1]) == oldest, HIDDEN, mask)


def last_key_hidden(mask: Tensor | None, states: Tensor) -> Tensor:
    keys = 20
    mask = torch.zeros(states.shape[0], 1, states.shape[1], keys) if mask is None else mask
    return torch.where(torch.arange(keys) == keys - 1, HIDDEN, mask)


def swap_masks(model: Any) -> None:
    """The layers of an alternating pattern get each other's masks."""
    model.model.config = copy.deepcopy(model.config)  # the attention modules keep the original
    model.model.config.layer_types = model.config.layer_types[::-1]


def cache_position(model: Any) -> None:
    """Rotary positions are one too large once there is a cache."""

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs["position_ids"]
        shift = (positions[:, :1] > 0).long()
        return args, kwargs | {"position_ids": positions + shift}

    model.model.rotary_emb.register_forward_pre_hook(before, with_kwargs=True)


def positions_ignored(model: Any) -> None:
    """Positions are counted from the start of the row; those that the caller passes are ignored."""

    def before(module: nn.Module, args: tuple) -> tuple:
        return (torch.arange(args[0].shape[1]).expand(args[0].shape),)

    model.transformer.wpe.register_forward_pre_hook(before)


def generation_positions(model: Any) -> None:
    """`generate` counts positions from the start of the row, padding included."""
    prepare = model.prepare_inputs_for_generation

    def wrong(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        start = 0 if inputs.get("past_key_values") is None else inputs["past_key_values"].get_seq_length()
        length = inputs["input_ids"].shape[1]
        return inputs | {"position_ids": torch.arange(start, start + length).expand_as(inputs["input_ids"])}

    model.prepare_inputs_for_generation = wrong


def change_sinks(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    layer = model.model.layers[1].self_attn
    forward, sinks = layer.forward, layer.sinks

    def wrong(*args: Any, **kwargs: Any) -> Any:
        layer.sinks = nn.Parameter(change(sinks.data))
        try:
            return forward(*args, **kwargs)
        finally:
            layer.sinks = sinks

    wrong.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    layer.forward = wrong


def scale_of_sdpa(model: Any) -> None:
    """One layer has another scale, but only with sdpa."""
    layer = model.model.layers[0].self_attn
    right = layer.scaling

    def before(module: nn.Module, args: tuple) -> None:
        module.scaling = right * (2.0 if module.config._attn_implementation == "sdpa" else 1.0)

    layer.register_forward_pre_hook(before)


def wrong_cache_layer(model: Any) -> None:
    """The second layer stores its keys and values where the first does, and reads them there."""
    model.model.layers[1].self_attn.layer_idx = 0


def _layers(*numbers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{n}.self_attn" for n in numbers)


def _bug(
    model: str, edit: Callable, layers: tuple[str, ...], scenario: str, words: str, implementation: str = "eager"
) -> Plant:
    return Plant(model, partial(edit_mask, layers=layers, edit=edit), layers, scenario, words, implementation)


H1, BERT, MODERN = ("transformer.h.1.attn",), "bert.encoder.layer.{}.attention.self", "model.layers.{}.attn"
CROSS = "model.decoder.layers.1.encoder_attn"
WHOLE = ("whole model",)

PLANTED: dict[str, Plant] = {
    "window ignored": _bug("mistral", partial(window, None), _layers(0, 1), "plain", "measured causal, hides"),
    "window off by one": _bug("mistral", partial(window, 5), _layers(1), "plain", "measured causal, window 5"),
    "window too small": _bug("phi3", partial(window, 3), _layers(0), "plain", "measured causal, window 3"),
    "padding ignored": _bug("llama", padding_ignored, _layers(1), "left padding", "sees padding"),
    "padding lost with sdpa": _bug("qwen3", lost, _layers(1), "left padding", "sees padding", "sdpa"),
    "mask lost in an encoder": _bug("bert", lost, (BERT.format(0),), "right padding", "sees padding", "sdpa"),
    "mask inverted": _bug("bert", inverted, (BERT.format(1),), "right padding", "token"),
    "causal lost": _bug("gpt2", lost, H1, "plain", "measured every token"),
    "causal lost in chunks": _bug("gpt2", causal_lost_in_chunks, H1, "cache", "token 7 sees token 8"),
    "causal aligned top-left": _bug("olmo2", top_left, _layers(0), "cache", "does not see"),
    "one token ahead": _bug("smollm3", one_ahead, _layers(1), "plain", "1 ahead"),
    "token does not see itself": _bug("qwen2", without_self, _layers(0), "plain", "token 1 does not see token 1"),
    "soft mask": _bug("gpt_neox", soft, ("gpt_neox.layers.1.attention",), "plain", "measured every token"),
    "rows of padding are NaN": Plant(
        "llama", partial(edit_mask, layers=_layers(0), edit=minus_infinity), WHOLE, "left padding",
        "not finite; nor are those of model.layers.0.self_attn at padding",
    ),
    "mask of the last row for all": _bug("qwen2", first_row, _layers(1), "left padding", "does not see"),
    "documents leak": _bug("llama", partial(window, None), _layers(0), "documents", "sees other documents"),
    "oldest key lost in steps": _bug("gemma3", oldest_key_hidden, _layers(0), "cache", "does not see"),
    "window of a global layer": _bug("gemma3", partial(window, 4), _layers(1), "plain", "measured causal, window 4"),
    "encoder is causal": _bug("modernbert", causal, (MODERN.format(0),), "plain", "measured causal"),
    "cross-attention ignores padding": _bug("bart", lost, (CROSS,), "right padding", "sees padding"),
    "cross-attention misses a token": _bug("whisper", last_key_hidden, (CROSS,), "plain", "does not see token 19"),
    "chunks ignored": _bug("llama4", partial(window, None), _layers(0), "plain", "measured causal, hides"),
    "alternating layers swapped": Plant("gemma2", swap_masks, _layers(0, 1), "plain", "window 4"),
    "cache position off by one": Plant("llama", cache_position, _layers(0, 1), "cache", "outputs differ"),
    "cache of another layer": Plant("llama", wrong_cache_layer, _layers(1), "cache", "raises RuntimeError"),
    "left padding positions": Plant("gpt2", positions_ignored, WHOLE, "left padding", "look at positions"),
    "positions in generate": Plant("gpt2", generation_positions, WHOLE, "generate", "logits differ"),
    "sinks ignored": Plant(
        "gpt_oss", partial(change_sinks, change=lambda s: s * 0 - 1e4), _layers(1), "sink", "take no weight"
    ),
    "sinks swapped": Plant(
        "gpt_oss", partial(change_sinks, change=lambda s: s.flip(0)), _layers(1), "sink", "lowers its log-odds"
    ),
    "scale of sdpa": Plant("llama", scale_of_sdpa, _layers(0), "plain", "differ from eager", "sdpa"),
}  # fmt: skip
