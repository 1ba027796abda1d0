"""What the configuration of a model promises about one attention module, and how that reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.check.model.layout import Row

UNREADABLE = ("attention_window", "block_size", "local_attn_chunk_length", "num_hashes", "index_topk", "dilation")
"""Fields of configurations with patterns that are not read here (Longformer, BigBird, Reformer, DeepSeek 3.2)."""


@dataclass(frozen=True)
class Promise:
    """Which keys a query may see: at most `behind` tokens back and `ahead` tokens on; None is no limit.

    chunk: length of the chunks that tokens do not see across. cross: keys are the tokens of an encoder.
    padding, documents: whether padding, and tokens of other documents, are hidden. sink: whether the module has sinks.

    >>> from regard.check.model.promise import Promise
    >>> print(Promise(behind=3, ahead=0))
    causal, window 4, hides padding
    """

    behind: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    cross: bool = False
    padding: bool = True
    documents: bool = False
    sink: bool = False

    def visible(self, queries: Row, keys: Row) -> Tensor:
        """Which keys (K) each query (Q) sees in a row, as bools (Q, K); queries of padding see nothing."""
        hidden = ~keys.real if self.padding else torch.zeros(len(keys.texts), dtype=torch.bool)
        allowed = queries.real[:, None] & ~hidden
        if self.cross:
            return allowed
        places = torch.arange(len(keys.texts))
        distance = places[:, None] - places  # the same in every text, since a text is contiguous
        if self.behind is not None:
            allowed &= distance <= self.behind
        if self.ahead is not None:
            allowed &= distance >= -self.ahead
        if self.chunk is not None:
            part = keys.positions // self.chunk  # counted from the first token of a text
            allowed &= part[:, None] == part
        if self.documents and len(keys.first) > 1:
            texts = torch.tensor(keys.texts)
            allowed &= texts[:, None] == texts
        return allowed

    def __str__(self) -> str:
        parts = ["every token of the encoder" if self.cross else _direction(self.behind, self.ahead)]
        if self.chunk is not None:
            parts.append(f"chunks of {self.chunk}")
        hidden = [name for name, on in (("padding", self.padding), ("other documents", self.documents)) if on]
        if hidden:
            parts.append(f"hides {' and '.join(hidden)}")
        return ", ".join(parts + (["sink"] if self.sink else []))


def _direction(behind: int | None, ahead: int | None) -> str:
    if ahead == 0:
        return "causal" if behind is None else f"causal, window {behind + 1}"
    if ahead == -1:
        return "only earlier tokens, not itself" + ("" if behind is None else f", {behind} back")
    if ahead is not None and behind != ahead:
        return f"{'all' if behind is None else behind} tokens back and {ahead} ahead"
    if behind is None:
        return "every token"
    return f"window of {behind} to each side" if behind == ahead else f"{behind} tokens back and all ahead"


def read_promise(config: Any, role: str, layer: int | None, given: bool | None = None) -> Promise | str:
    """Read the promise of a layer from its configuration; a string is the reason why there is none.

    role: "encoder", "decoder", "cross" or "self" (of a model without an encoder). given: whether a "self" is causal,
    if that is known otherwise.
    """
    if role == "cross":
        return Promise(cross=True)
    config = config.get_text_config()
    causal = given if given is not None and role == "self" else _is_causal(config, role)
    if isinstance(causal, str):
        return causal
    for name in UNREADABLE:
        if getattr(config, name, None) and not getattr(config, "layer_types", None):
            return f"the pattern of {name} is not read from the configuration"
    window, chunk = None, None
    kinds = getattr(config, "layer_types", None)
    if kinds and layer is not None and layer < len(kinds):
        kind = kinds[layer]
        if kind == "sliding_attention":
            window = config.sliding_window
        elif kind == "chunked_attention":
            chunk = config.attention_chunk_size
        elif kind != "full_attention":
            return f"layer type {kind!r} is not an attention that is read from the configuration"
    elif getattr(config, "attention_layers", None) and layer is not None:  # GPT-Neo
        window = config.window_size if config.attention_layers[layer] == "local" else None
    elif getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    if causal:
        return Promise(behind=window - 1 if window else None, ahead=0, chunk=chunk)
    if window and str(config.model_type).startswith("gemma3"):
        window -= 1  # the only family whose window to each side excludes its end
    return Promise(behind=window or None, ahead=window or None, chunk=chunk)


def _is_causal(config: Any, role: str) -> bool | str:
    from transformers.models.auto import modeling_auto as auto

    if role in ("encoder", "decoder"):
        return role == "decoder"
    for name in ("is_causal", "use_bidirectional_attention"):
        if (value := getattr(config, name, None)) is not None and (value is True) == (name != "is_causal"):
            return False
    kind = config.model_type
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return bool(getattr(config, "is_decoder", False))
    if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return False  # the encoder of such a model alone
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    return f"model_type {kind!r} does not say whether it is causal; give --causal or --bidirectional"


def variants(promise: Promise, length: int) -> Iterator[Promise]:
    """Promises that differ from this one by one or two parts, the most similar first."""
    windows = [None, *range(length)] if length <= 32 else [None, *_near(promise.behind)]
    behind = [replace(promise, behind=n) for n in windows]
    ahead = [replace(promise, ahead=n) for n in (0, None, 1, 2, 3, -1)]
    both = [replace(promise, behind=n, ahead=n) for n in windows]
    parts = [
        replace(promise, chunk=None),
        *(replace(promise, chunk=n) for n in range(2, min(length, 33))),
        replace(promise, padding=False),
        replace(promise, documents=False),
        replace(promise, padding=False, documents=False),
    ]
    yield from (each for each in (*parts, *behind, *both, *ahead) if each != promise)
    for one in (*behind, *both):
        yield from (replace(one, padding=False), replace(one, documents=False), replace(one, ahead=None))
    for one in ahead:
        yield from (replace(one, padding=False), replace(one, documents=False))
    yield replace(promise, behind=None, ahead=None, chunk=None, padding=False, documents=False)


def _near(behind: int | None) -> list[int]:
    return [] if behind is None else [n for n in range(behind - 3, behind + 4) if n >= 0]
