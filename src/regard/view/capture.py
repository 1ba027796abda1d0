"""Watching a model: which attention each of its modules computes, by name, without changing the model."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.arguments import read_offset
from regard.attention import OBSERVERS, Attention
from regard.description import Description
from regard.geometry import Frame, Indices, pad_leading
from regard.masks import Mask
from regard.masks.algebra import And
from regard.masks.patterns import Causal
from regard.nn.cache import CrossCache
from regard.view.captured_attention import CapturedAttention, Kind
from regard.view.inputs import model_inputs, next_token
from regard.view.record import Record

BEAMS = (
    "beam search was captured: the record holds the beam that is first at the last step, which need not be the one "
    "that was returned; for the weights of the returned tokens, capture one forward pass over them"
)
CROSS_ARGUMENTS = ("source", "key_value_states", "encoder_hidden_states")


@contextmanager
def capture(
    model: nn.Module, *, layers: int | slice | Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Iterator[Record]:
    """Record every attention that a model computes inside the block: descriptions, queries and keys, O(n) memory.

    The model is any that computes its attention by regard: ours, one after `regard.integrations.torch.replace`, or one
    of Transformers with `attn_implementation="regard"`. It gives what it gave before, and compiled parts run eagerly
    meanwhile. Only calls of the thread that captures are seen. Weights are worked out when they are looked at, from
    the parameters of that time: look before the next step of training.

    layers: which layers are kept, as numbers; all unless told otherwise. heads: which heads pages and pictures show.

    Tokens generated one by one, with a cache, are rows of one attention. Where a module computes once more, and does
    not continue from what it had, the last time counts. Of beam search, the record holds the beam that is first at the
    last step, which need not be the one that is returned, and a warning says so; for the weights of the returned
    tokens, capture one forward pass over them.

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
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            if isinstance(module, Description):  # it is named after the module that calls it
                continue
            before = module.register_forward_pre_hook(recorder.entering(name), with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(recorder.leaving, always_call=True)
            stack.callback(after.remove)
        stack.enter_context(_Embeddings(recorder))
        token = OBSERVERS.set((*OBSERVERS.get(), recorder))
        try:
            yield record
        finally:
            OBSERVERS.reset(token)
            recorder.end()


class _Embeddings(TorchFunctionMode):
    """Tells a watch which tokens are embedded, whether by a module or by a function."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.embedding:
            self.recorder.embed(args[0] if args else kwargs["input"])
        return function(*args, **(kwargs or {}))


class _Recorder:
    """What a capture knows while the model runs: which modules are computing, the innermost last."""

    def __init__(self, record: Record, layers: int | slice | Sequence[int] | None) -> None:
        self.record, self.layers = record, layers
        self.inside: list[tuple[str, nn.Module, tuple, dict[str, Any]]] = []
        self.call_counts: Counter[str] = Counter()  # calls by module, since the outermost began
        self.known: dict[tuple[str, int], CapturedAttention] = {}
        self.counts: Counter[Kind] = Counter()
        self.ids: Tensor | None = None  # the tokens that were embedded last
        self.attended = True  # since then
        self.parents: Tensor | None = None  # what the decoder's own attention goes on from, in this pass of the model
        self.restarted = False  # whether it began anew in this pass

    def embed(self, ids: Tensor) -> None:
        """Of several tables, the words' comes first: positions and segments are added to it."""
        if self.attended and not ids.is_floating_point():
            self.ids, self.attended = ids.detach(), False

    def end(self) -> None:
        """The model has run: number the layers by the kinds that they turned out to be."""
        counts: Counter[Kind] = Counter()
        for captured in self.known.values():
            captured.layer = counts[captured.kind]
            counts[captured.kind] += 1
        own = [captured for captured in self.record.attentions if captured.kind == "decoder"]
        if any(call.parents is not None for captured in own for call in captured.calls):
            warnings.warn(BEAMS, stacklevel=4)
        for captured in self.record.attentions:
            captured.end()

    def entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self in OBSERVERS.get():
                if not self.inside:
                    self.call_counts.clear()
                    self.parents, self.restarted = None, False
                if not name:
                    self.record.inputs = model_inputs(module, args, kwargs)
                self.inside.append((name, module, args, kwargs))

        return enter

    def leaving(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self in OBSERVERS.get() and self.inside:
            name = self.inside.pop()[0]
            if not name:
                self.record.next_token = next_token(output)

    def __call__(self, attend: Attention, query: Tensor, key: Tensor) -> None:
        if not self.inside:  # not of this model
            return
        name, module, args, kwargs = self.inside[-1]
        query, key = pad_leading(query.detach()), pad_leading(key.detach())
        kind = attention_kind(module, args, kwargs, attend, query, key)
        if kind == "cross":
            query = _separate_beams(query, key, args)
        self.attended = True
        call_number = self.call_counts[name]
        self.call_counts[name] += 1
        captured = self.known.get((name, call_number))
        if captured is None:
            display_name = (name or type(module).__name__) + (f" ({call_number + 1})" if call_number else "")
            captured = self.known[name, call_number] = CapturedAttention(display_name, self.counts[kind], kind)
            self.counts[kind] += 1
            if not self._wanted(captured.layer):
                return
            self.record.attentions.append(captured)
        elif not self._wanted(captured.layer):
            return
        attend = attend.snapshot()
        ids = _query_ids(self.ids, query)
        if kind == "cross":
            if self.restarted or not captured.extend_cross(attend, query, key, ids, self.parents):
                captured.start(kind, attend, query, key, ids)
            return
        parents = captured.extend(attend, query, key, ids)
        if parents is None:
            captured.start(kind, attend, query, key, ids)
        if captured.kind == "decoder":
            self.parents, self.restarted = parents, parents is None

    def _wanted(self, layer: int) -> bool:
        if self.layers is None:
            return True
        if isinstance(self.layers, slice):
            return layer in range(*self.layers.indices(layer + 1))
        return layer == self.layers if isinstance(self.layers, int) else layer in self.layers


def _query_ids(ids: Tensor | None, query: Tensor) -> Tensor | None:
    """The tokens of queries (B, H, Q, D), (B, Q), if so many were embedded."""
    if ids is None:
        return None
    ids = ids[None] if ids.dim() == 1 else ids
    return ids.clone() if ids.shape == (len(query), query.shape[2]) else None


def _separate_beams(query: Tensor, key: Tensor, args: tuple) -> Tensor:
    """Queries (B, H, beams * n, D) of the beams of each source, which one call computes together, as rows of their own.

    The module's input (B * beams, n, width) shows that they are beams.
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
    """Cross-attention by what the module was given; of the others, those that never look ahead are a decoder's."""
    if _is_cross_attention(module, args, kwargs):
        return "cross"
    Q, K = query.shape[2], key.shape[2]
    offset = K - Q if attend.offset is None else read_offset(attend.offset)
    assert isinstance(offset, int | Tensor)
    assert not isinstance(attend.mask, Tensor)
    frame = Frame(len(query), query.shape[1], Q, K, offset)
    if Q == K == 1:  # the weights do not tell: it sees itself
        return "decoder" if _is_decoder(module, attend.mask) else "encoder"
    if (attend.mask is not None or offset == K - Q) and _is_causal(attend.mask, frame):  # also of a static cache
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
