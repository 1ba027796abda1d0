"""Record the attention that each module of a model computes, by module name, without changing the model."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.arguments import read_offset
from regard.attention import INTERVENTION, OBSERVERS, Attention
from regard.geometry import Frame, Indices, pad_leading
from regard.masks import Mask
from regard.masks.algebra import And
from regard.masks.patterns import Causal
from regard.nn.cache import CrossCache
from regard.view.captured_attention import CapturedAttention, Kind
from regard.view.changes import Ablation, Change
from regard.view.inputs import model_inputs, next_token
from regard.view.model_call import ModelCall
from regard.view.model_output import ModelOutput
from regard.view.module_calls import ModuleCalls, RunningModule, track_modules
from regard.view.record import Record
from regard.view.uncaptured import Uncaptured, shorten

BEAMS = (
    "beam search was captured: the record holds the beam ranked first at the last step, which need not be the one "
    "that was returned; for the weights of the returned tokens, capture one forward pass over them"
)
UNCAPTURED = (
    "recurrent layers and linear attention have no weights, and other attention is captured if regard computes it; not "
    "in the record: {}"
)
CROSS_ARGUMENTS = ("source", "key_value_states", "encoder_hidden_states")


@contextmanager
def capture(
    model: nn.Module, *, layers: int | slice | Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Iterator[Record]:
    """Record every attention that a model computes inside the `with` block.

    The record keeps descriptions, queries, keys and values, which needs O(n) memory; weights are computed on request,
    from the current parameters of the model, so inspect them before the next training step.

    model: any model that computes attention with regard: one of `regard.models`, a model after
    `regard.integrations.torch.replace`, or a Transformers model with `attn_implementation="regard"`. Its outputs do
    not change. Compiled parts run eagerly inside the block, and only calls from the current thread are recorded.
    layers: indices of the layers to keep, all by default. heads: heads that pages and pictures show, all by default.

    Tokens generated one by one with a cache become rows of one attention. If a module is called again without
    continuing from its earlier keys, the last call replaces the earlier ones. After beam search the record holds the
    beam ranked first at the last step, which need not be the one that is returned, and a warning is issued; for the
    weights of the returned tokens, capture one forward pass over them. A warning names the modules that ran and are
    not in the record: recurrent layers, which have no weights, and attention that is computed without regard.

    >>> import regard as rg, regard.view, torch
    >>> config = rg.models.TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)
    >>> model = rg.models.TextEncoder(config).eval()
    >>> with rg.view.capture(model) as record:
    ...     hidden = model(torch.tensor([[5, 6, 7]]))
    >>> record.attentions[1]
    <encoder 1: stack.layers.1.attention, 4 heads, 3 x 3, Attention(dropout=0.1)>
    >>> record.weights(1, head=0).shape
    torch.Size([3, 3])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is {type(model).__name__}")
    record = Record(type(model).__name__, heads=heads)
    recorder = _Recorder(record, layers)
    modules = track_modules(
        model, recorder.modules, lambda: recorder in OBSERVERS.get(), recorder.enter_module, recorder.leave_module
    )
    with modules, _Embeddings(recorder):
        token = OBSERVERS.set((*OBSERVERS.get(), recorder))
        try:
            yield record
        finally:
            OBSERVERS.reset(token)
            recorder.end()


class _Embeddings(TorchFunctionMode):
    """Pass the ids of every `F.embedding` call to a recorder, whether a module or a function makes the call.

    Also report attention that is computed by torch's function.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.embedding:
            self.recorder.embed(args[0] if args else kwargs["input"])
        elif function is F.scaled_dot_product_attention:
            self.recorder.uncaptured.call_torch(self.recorder.modules.stack)
        return function(*args, **(kwargs or {}))


class _Recorder:
    """State of a capture while the model runs: the stack of active modules and the attentions recorded so far."""

    def __init__(self, record: Record, layers: int | slice | Sequence[int] | None) -> None:
        self.record, self.layers, self.modules = record, layers, ModuleCalls()
        self.known: dict[tuple[str, int], CapturedAttention] = {}
        self.counts: Counter[Kind] = Counter()
        self.ids: Tensor | None = None  # ids of the latest token embedding
        self.attended = True  # whether attention was computed since that embedding
        self.parents: Tensor | None = None  # batch rows that decoder self-attention continues from in this forward pass
        self.restarted = False  # whether decoder self-attention started a new sequence in this forward pass
        self.ablation: Ablation | None = None  # the one inside which the model runs
        self.changes: dict[str, list[Change]] = {}  # by that ablation, of each attention
        self.uncaptured = Uncaptured()

    def embed(self, ids: Tensor) -> None:
        """Keep the ids of the first embedding before an attention: position and segment tables are looked up later."""
        if self.attended and not ids.is_floating_point():
            self.ids, self.attended = ids.detach(), False

    def end(self) -> None:
        """Number the layers within each kind, which is only known after the model has run."""
        counts: Counter[Kind] = Counter()
        for captured in self.known.values():
            captured.layer = counts[captured.kind]
            counts[captured.kind] += 1
        self.record.changes = tuple(change for changes in self.changes.values() for change in changes)
        decoder = [captured for captured in self.record.attentions if captured.kind == "decoder"]
        if any(call.parents is not None for captured in decoder for call in captured.calls):
            warnings.warn(BEAMS, stacklevel=4)
        self.record.uncaptured = self.uncaptured.names
        if self.known and self.record.uncaptured:
            warnings.warn(UNCAPTURED.format(shorten(self.record.uncaptured)), stacklevel=4)
        for captured in self.record.attentions:
            captured.end()
            if len(captured.calls) > 1:  # steps of a generation: the last call does not compute all of them
                self.record.call = None
        if self.record.call is not None:
            self.record.call = self.record.call.with_contents()

    def enter_module(self, running: RunningModule) -> None:
        if len(self.modules.stack) == 1:
            self.parents, self.restarted = None, False
            ablation = INTERVENTION.get()
            self.ablation = ablation if isinstance(ablation, Ablation) else None
        self.uncaptured.enter_module(running)
        if not running.name:
            self.record.inputs = model_inputs(running.module, running.args, running.kwargs)
            self.record.call = ModelCall.copy(*running[1:])

    def leave_module(self, running: RunningModule, output: Any) -> None:
        if not running.name:
            self.record.next_token = next_token(output)
            self.record.output = ModelOutput.read(running.module, output)

    def __call__(self, attend: Attention, query: Tensor, key: Tensor, value: Tensor) -> None:
        if not self.modules.stack:  # a call outside this model
            return
        self.uncaptured.call_regard(self.modules.stack)
        if self.modules.stack[0].name:  # a part of the model was called, as in generation
            self.record.call = None
        _, module, args, kwargs = self.modules.stack[-1]
        value = pad_leading(value.detach())
        query, key = pad_leading(query.detach()), pad_leading(key.detach())
        kind = attention_kind(module, args, kwargs, attend, query, key)
        if kind == "cross":
            query = _separate_beams(query, key, args)
        self.attended = True
        name, call_number = self.modules.count_call()
        captured = self.known.get((name, call_number))
        display_name = self.modules.display_name(name, call_number)
        chosen = [] if self.ablation is None else self.ablation.chosen
        self.changes[display_name] = [replace(change, layer=display_name, kind=None) for change in chosen]
        if captured is None:
            captured = self.known[name, call_number] = CapturedAttention(display_name, self.counts[kind], kind)
            self.counts[kind] += 1
            if not self._captures_layer(captured.layer):
                return
            self.record.attentions.append(captured)
        elif not self._captures_layer(captured.layer):
            return
        captured.factors = None if self.ablation is None else self.ablation.factors
        attend = attend.snapshot()
        ids = _query_ids(self.ids, query)
        if kind == "cross":
            if self.restarted or not captured.extend_cross(attend, query, key, ids, self.parents):
                captured.start(kind, attend, query, key, value, ids)
            return
        parents = captured.extend(attend, query, key, value, ids)
        if parents is None:
            captured.start(kind, attend, query, key, value, ids)
        if captured.kind == "decoder":
            self.parents, self.restarted = parents, parents is None

    def _captures_layer(self, layer: int) -> bool:
        if self.layers is None:
            return True
        if isinstance(self.layers, slice):
            return layer in range(*self.layers.indices(layer + 1))
        return layer == self.layers if isinstance(self.layers, int) else layer in self.layers


def _query_ids(ids: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the ids (B, Q) of queries (B, H, Q, D), or None if the embedded ids have another shape."""
    if ids is None:
        return None
    ids = ids[None] if ids.dim() == 1 else ids
    return ids.clone() if ids.shape == (len(query), query.shape[2]) else None


def _separate_beams(query: Tensor, key: Tensor, args: tuple) -> Tensor:
    """Split queries (B, H, beams * n, D), computed in one call per source, into batch rows (B * beams, H, n, D).

    The input of the module, (B * beams, n, d_model), shows whether there are beams.
    """
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.dim() != 3 or len(x) <= len(key) or len(query) != len(key):
        return query
    beams, rest = divmod(len(x), len(key))
    if rest or query.shape[2] != beams * x.shape[1]:
        return query
    return query.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1)


def attention_kind(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], attend: Attention, query: Tensor, key: Tensor
) -> Kind:
    """Classify an attention call: cross by the module's arguments, decoder if it is causal, encoder otherwise."""
    if _is_cross_attention(module, args, kwargs):
        return "cross"
    Q, K = query.shape[2], key.shape[2]
    offset = K - Q if attend.offset is None else read_offset(attend.offset)
    frame = Frame(len(query), query.shape[1], Q, K, offset)
    if Q == K == 1:  # a single token attends to itself with any mask, so look at the module instead
        return "decoder" if _is_decoder(module, attend.mask) else "encoder"
    if (attend.mask is not None or offset == K - Q) and _is_causal(attend.mask, frame):  # also with a static cache
        return "decoder"
    return "encoder" if Q == K or (isinstance(offset, int) and offset == K - Q) else "cross"


def _is_decoder(module: nn.Module, mask: Mask | None) -> bool:
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return any(isinstance(part, Causal) for part in parts) or any(
        bool(getattr(module, name, False)) for name in ("is_decoder", "is_causal")
    )


def _is_cross_attention(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        given = {}
    given = {**given, **kwargs}
    if any(given.get(name) is not None for name in CROSS_ARGUMENTS) or isinstance(given.get("cache"), CrossCache):
        return True
    if isinstance(given.get("query"), Tensor) and isinstance(given.get("key"), Tensor):
        return given["query"] is not given["key"]
    return bool(getattr(module, "is_cross_attention", False))


def _is_causal(mask: Mask | None, frame: Frame) -> bool:
    if mask is None:
        return frame.Q < frame.K  # a step of generation
    parts = mask.parts if isinstance(mask, And) else (mask,)
    if any(isinstance(part, Causal) for part in parts):
        return True
    offset = frame.offsets()[0]
    i = torch.arange(frame.Q)
    i = i[(i + offset + 1 >= 0) & (i + offset + 1 < frame.K)][:4096]
    if not len(i):
        return frame.Q < frame.K
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    at = Indices(frame, zero, zero, i[:, None], i[:, None] + offset + 1)
    return not bool(mask.allows(at).any())
