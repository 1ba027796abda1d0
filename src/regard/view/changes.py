"""Changes of a model's attention: heads switched off, another temperature, forbidden and forced pairs of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention import INTERVENTION, Attention
from regard.geometry import CallSlice, Frame, Indices, pad_leading
from regard.masks import Mask
from regard.masks.algebra import EMPTY, PARTIAL, Boxes, Kinds
from regard.nn.cache import CrossCache
from regard.view.captured_attention import Kind
from regard.view.captured_call import query_position
from regard.view.module_calls import ModuleCalls, RunningModule, track_modules

Pair = tuple[int, int]
MAX_PAIRS = 4096  # per change


@dataclass(frozen=True)
class Change:
    """A change of some attentions of a model.

    layer: index of the layer, or name of the attention as in a `Record`: that of its module, with " (2)" for a second
    call in a forward pass; all layers by default. kind: "encoder", "decoder" or "cross"; all by default. head: a head
    or several; all by default.
    factor: multiplies the output of the heads; 0 switches them off.
    temperature: divides the logits, besides the temperature of the model; applies to all heads of a layer.
    forbid: (query, key) pairs that get no weight. force: (query, key) pairs; such a query attends to its forced keys
    only, also to those that the mask of the model hides.

    >>> from regard.view import Change
    >>> Change(layer=1, head=3, factor=0.0)
    Change(layer=1, head=(3,), kind=None, factor=0.0, temperature=1.0, forbid=(), force=())
    """

    layer: int | str | None = None
    head: int | Sequence[int] | None = None
    kind: Kind | None = None
    factor: float = 1.0
    temperature: float = 1.0
    forbid: Sequence[Pair] = ()
    force: Sequence[Pair] = ()

    def __post_init__(self) -> None:
        if self.layer is not None and not isinstance(self.layer, str):
            _check_index("layer", self.layer)
        if self.head is not None:
            heads = (self.head,) if isinstance(self.head, int) else tuple(self.head)
            for head in heads:
                _check_index("head", head)
            if not heads:
                raise ValueError("head must be a head or several, but is an empty list; omit it for all heads")
            object.__setattr__(self, "head", heads)
        if self.kind is not None and self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, but is {self.kind!r}")
        for name, least in (("factor", -1e30), ("temperature", 1e-30)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, but is {type(value).__name__}")
            if not least <= value <= 1e30:  # also true of NaN and of huge integers
                expected = "finite" if least < 0 else "positive"
                raise ValueError(f"{name} must be a {expected} number in {least:g} ... 1e+30, but is {value}")
        for name in ("forbid", "force"):
            object.__setattr__(self, name, _check_pairs(name, getattr(self, name)))
        if self.temperature != 1 and self.head is not None:
            raise ValueError("temperature applies to all heads of a layer; omit head, or use two changes")
        if both := set(self.forbid) & set(self.force):
            raise ValueError(f"the pair {min(both)} is both forbidden and forced")
        if self.factor == self.temperature == 1 and not self.forbid and not self.force:
            raise ValueError("a change needs factor, temperature, forbid or force; for one head off, factor=0.0")

    def applies_to(self, name: str, layer: int, kind: Kind) -> bool:
        """Whether an attention, by module name, layer and kind, is one that this changes."""
        return self.layer in (None, layer, name) and self.kind in (None, kind)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain data."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {
            name: list(map(list, value)) if name in ("forbid", "force") else value for name, value in given.items()
        }
        plain["head"] = None if self.head is None else list(self.head)  # type: ignore[arg-type]
        defaults = {"factor": 1.0, "temperature": 1.0, "forbid": [], "force": []}
        return {name: value for name, value in plain.items() if value != defaults.get(name)}


@contextmanager
def ablate(model: nn.Module, *changes: Change) -> Iterator[None]:
    """Change the attention of a model inside the `with` block.

    The model must compute its attention with regard, as for `capture`; compiled parts run eagerly, and only calls from
    the current thread change. Layers are numbered as in a `Record`. Raises at the end if a change applied to nothing.
    If parts of the model are recomputed in backward (`torch.utils.checkpoint`), call `backward` inside the block.

    >>> import regard as rg, regard.view, torch
    >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> before = model(ids)
    >>> with rg.view.ablate(model, rg.view.Change(layer=1, head=[0, 2], factor=0.0)):
    ...     after = model(ids)
    >>> torch.equal(before, after)
    False
    """
    for change in changes:
        if not isinstance(change, Change):
            raise TypeError(f"changes must be Change objects, but one is {type(change).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is {type(model).__name__}")
    if INTERVENTION.get() is not None:
        raise ValueError("ablate cannot be nested; pass all changes to one call")
    for name, part in model.named_modules():
        if part.training and getattr(part, "gradient_checkpointing", False):
            raise ValueError(
                f"{name or type(model).__name__} recomputes its layers in backward, without the changes; turn "
                "off its gradient checkpointing, or call model.eval()"
            )
    ablation = Ablation(changes)
    with track_modules(model, ablation.modules, lambda: INTERVENTION.get() is ablation, ablation.enter_module):
        token = INTERVENTION.set(ablation)
        try:
            yield
        finally:
            INTERVENTION.reset(token)
    unused = [change for change in changes if change not in ablation.used]
    if unused:
        ran = ", ".join(f"{kind} {layer}" for layer, kind in ablation.known.values()) or "none"
        raise ValueError(f"{unused[0]} applied to no attention; inside the block, these were computed: {ran}")


class Ablation:
    """State of an ablation while the model runs.

    chosen, factors: the changes of the last call, and the factors (H,) of its heads or None.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes, self.modules = changes, ModuleCalls()
        self.counts: Counter[Kind] = Counter()
        self.known: dict[tuple[str, int], tuple[int, Kind]] = {}
        self.used: set[Change] = set()
        self.place: tuple[str, int] | None = None  # of the last call
        self.chosen: list[Change] = []
        self.factors: Tensor | None = None
        self.target: tuple[int | None, int] | None = None  # position of the first query, and number, of the decoder

    def enter_module(self, running: RunningModule) -> None:
        if len(self.modules.stack) == 1:
            self.target = None

    def __call__(self, attend: Attention, query: Tensor, key: Tensor, again: bool) -> tuple[Attention, Tensor | None]:
        from regard.view.capture import attention_kind

        if not self.modules.stack:  # a call outside this model
            self.chosen, self.factors = [], None
            return attend, None
        if self.place is None or not again:
            self.place = self.modules.count_call()
        _, module, args, kwargs = self.modules.stack[-1]
        query, key = pad_leading(query), pad_leading(key)
        kind = attention_kind(module, args, kwargs, attend, query, key)
        if self.place not in self.known:
            self.known[self.place] = self.counts[kind], kind
            self.counts[kind] += 1
        layer, name = self.known[self.place][0], self.modules.display_name(*self.place)
        self.chosen = [change for change in self.changes if change.applies_to(name, layer, kind)]
        self.used.update(self.chosen)
        if any(change.forbid or change.force for change in self.chosen):
            self._check_positions(kind, module, [*args, *kwargs.values()], query, key)
        if kind == "decoder":
            self.target = query_position(attend, query, key), query.shape[2]
        attend, self.factors = change_attention(attend, query.shape[1], self.chosen, by_position=kind != "cross")
        return attend, self.factors

    def _check_positions(self, kind: Kind, module: nn.Module, given: list[Any], query: Tensor, key: Tensor) -> None:
        """Raise if a cache makes the rows or columns of a call other tokens than those that pairs name."""
        caches = [each for each in given if isinstance(each, CrossCache) or "Cache" in type(each).__name__]
        if kind == "cross" and caches and self.target != (0, query.shape[2]):
            raise NotImplementedError(
                "pairs of cross-attention cannot be changed while tokens are generated with a cache; change one "
                "forward pass over the tokens, or use record.generate"
            )
        if kind != "cross" and any(_has_dropped(cache, module, key.shape[2]) for cache in caches):
            raise NotImplementedError(
                "pairs cannot be changed while tokens are generated with a cache that drops tokens outside of a "
                "sliding window; change one forward pass over the tokens, or use record.generate"
            )


def _has_dropped(cache: Any, module: nn.Module, keys: int) -> bool:
    """Whether the cache of regard or Transformers from which a module gets this number of keys has dropped others."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        layers = layers[index : index + 1]
    sliding = [layer for layer in layers if getattr(layer, "is_sliding", False)]
    return bool(getattr(cache, "dropped", 0)) or any(int(layer.get_seq_length()) > keys for layer in sliding)


def change_attention(
    attend: Attention, heads: int, changes: Sequence[Change], *, by_position: bool = True
) -> tuple[Attention, Tensor | None]:
    """Return a changed description, and the factors (H,) of the heads' outputs, or None if all are 1.

    by_position: pairs name the positions of queries among the keys, as in self-attention, not their rows.
    """
    factors = torch.ones(heads)
    mask, temperature = attend.mask, attend.temperature
    assert not isinstance(mask, Tensor)
    forbidden: list[Mask] = []
    forced: list[tuple[_Pairs, _Pairs]] = []
    for change in changes:
        chosen = change.head
        assert not isinstance(chosen, int)
        if chosen is not None and max(chosen) >= heads:
            raise ValueError(f"{change} names head {max(chosen)}, but the layer has {heads} heads")
        factors[slice(None) if chosen is None else list(chosen)] *= change.factor
        temperature *= change.temperature
        only = None if chosen is None else tuple(sorted(set(chosen)))
        if change.forbid:
            forbidden.append(~_Pairs(tuple(change.forbid), only, by_position))
        if change.force:
            rows = tuple((query, -1) for query in sorted({query for query, _ in change.force}))
            forced.append((_Pairs(rows, only, by_position), _Pairs(tuple(change.force), only, by_position)))
    for limit in (*forbidden, *(~rows for rows, _ in forced)):
        mask = limit if mask is None else mask & limit
    for _, pairs in forced:
        assert mask is not None
        mask = mask | pairs
    if mask is not attend.mask or temperature != attend.temperature:
        attend = attend.replace(mask=mask, temperature=temperature)
    return attend, None if bool((factors == 1).all()) else factors


@dataclass(frozen=True, eq=False, repr=False)
class _Pairs(Mask):
    """Allows the given pairs of queries and keys in some heads, or all; key -1 means every key."""

    pairs: tuple[Pair, ...]
    heads: tuple[int, ...] | None
    by_position: bool

    def allows(self, at: Indices) -> Tensor:
        queries = at.p if self.by_position else at.i
        allowed = torch.zeros((), dtype=torch.bool, device=at.j.device)
        for query, key in self.pairs:
            allowed = allowed | ((queries == query) & ((at.j == key) if key >= 0 else (at.j >= 0)))
        if self.heads is not None:
            allowed = allowed & torch.isin(at.h, torch.tensor(self.heads, device=at.h.device))
        return allowed

    def kinds(self, boxes: Boxes) -> Kinds:
        first, stop = (boxes.p0, boxes.p1) if self.by_position else (boxes.i0, boxes.i1)
        contains = np.zeros(len(boxes.i0), bool)
        for query, key in self.pairs:
            contains |= (first <= query) & (query < stop) & ((key < 0) | ((boxes.j0 <= key) & (key < boxes.j1)))
        if self.heads is not None:
            contains &= np.isin(boxes.h, self.heads)
        return np.where(contains, PARTIAL, EMPTY).astype(np.int8)

    def extent(self, frame: Frame) -> tuple[int, int]:
        return 1, 1 if self.heads is None else frame.H

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        if not self.by_position:
            raise NotImplementedError("pairs of cross-attention cannot be changed in a slice of a call")
        return super().narrow(frame, part)

    def __repr__(self) -> str:
        shown = ", ".join(f"{query}→{key}" if key >= 0 else f"{query}→all" for query, key in self.pairs[:4])
        heads = "" if self.heads is None else f", heads {list(self.heads)}"
        return f"pairs({shown}{', …' if len(self.pairs) > 4 else ''}{heads})"


def _check_index(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, but is {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, but is {value}")


def _check_pairs(name: str, pairs: Any) -> tuple[Pair, ...]:
    try:
        checked = tuple((query, key) for query, key in pairs)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be (query, key) pairs, but is {pairs!r}") from None
    if len(checked) > MAX_PAIRS:
        raise ValueError(f"{name} must have at most {MAX_PAIRS} pairs, but has {len(checked)}")
    for pair in checked:
        for index in pair:
            _check_index(f"a pair of {name}", index)
    return checked
