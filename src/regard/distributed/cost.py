"""What a step of training costs each of many ranks: memory, FLOPs, bytes moved and seconds.

R ranks are d · s: d groups share the sequences of a step, and the s ranks of a group share each sequence of N tokens,
so that a rank has T = N / s tokens at a time. All numbers are float32, P of them are weights, and a step is forward,
backward and AdamW. A group takes its sequences one after the other.

    FLOPs      dense      6 T (matrices of the blocks + vocabulary · width)        2 forward, 4 backward
               attention  of `regard.engines.cost`, which `explain` tells too: 2 (D + E) forward, 6 D + 4 E backward
                          a place, over the busiest rank's queries (ring) or heads
    sent by    all-reduce             2 (R - 1) / R · 4 P                          gradients, where models are whole
    a rank     all-gather             (R - 1) / R · 4 · (2 P of blocks + P of the rest)   FSDP: forward, blocks again
               reduce-scatter         2 (R - 1) / R · 4 P       FSDP: gradients; gloo adds them up on every rank, and
                                                                others, such as NCCL, send half of that
               ring, heads            `regard.distributed.bytes_moved`, to the byte, of every layer
               (FSDP counts each weight with its first axis filled up to a multiple of R, and repeats for each sequence)
    seconds    dense / speed + attention / its speed + bytes touched / memory's speed + bytes sent / bandwidth
               + messages · latency; nothing overlaps. All is slower by ranks · threads / cores where a machine has
               fewer cores than its ranks have threads, but for a wire that leads to other machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import nn

from regard.attention import Attention
from regard.cache import CACHE
from regard.distributed.layout import Layout
from regard.distributed.plan import Sizes, bytes_moved, portion
from regard.engines.cost import backward_flops, forward_flops, visited_entries
from regard.geometry import Frame
from regard.masks import Mask
from regard.nn import Block, FeedForward, GatedFeedForward, MultiHeadAttention, Residual, UnitRMSNorm
from regard.scores import Score

FLOAT = 4
LAYOUT = "balanced"  # of a sequence: every rank has as much work under a causal mask
COUNTED = 16  # ranks of a ring up to which its bytes are counted; beyond, they grow by (s - 1) / s
TOUCHED = 8  # times that what is kept for backward is written or read in a step, all elementwise work together
STEPPED = 11  # times that a weight is written or read by clipping, AdamW and the average
ROWS = 512  # tokens whose logits are held at a time


@dataclass(frozen=True, eq=False)
class LayerShape:
    """A block, as far as it costs. `kept` are numbers that backward needs of every token."""

    weights: tuple[tuple[int, ...], ...]
    matrices: int
    kept: int
    working: int
    H: int
    G: int
    D: int
    E: int
    attend: Attention


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A language model, as far as it costs.

    >>> import torch
    >>> from regard.distributed.cost import ModelShape
    >>> from regard.models import LanguageConfig, LanguageModel
    >>> with torch.device("meta"):
    ...     made = LanguageModel(LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64))
    >>> ModelShape.of(made).count == sum(weight.numel() for weight in made.parameters())
    True
    """

    layers: tuple[LayerShape, ...]
    outside: tuple[tuple[int, ...], ...]  # weights that belong to no block
    d_model: int
    vocabulary: int
    kept: int  # of every token, outside the blocks

    @staticmethod
    def of(model: nn.Module) -> ModelShape:
        """The costs of a language model, which may be on the device "meta"."""
        config = getattr(model, "config", None)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        if not blocks or not hasattr(config, "windows") or any(block.cross is not None for block in blocks):
            raise ValueError(f"a {type(model).__name__} cannot be planned; language models can, such as GPT-2 or Llama")
        assert config is not None
        inside = {id(weight) for block in blocks for weight in block.parameters()}
        outside = tuple(tuple(weight.shape) for weight in model.parameters() if id(weight) not in inside)
        within = {id(part) for block in blocks for part in block.modules()}
        kept = sum(_kept_by_norm(part) for part in model.modules() if id(part) not in within)
        # ids have 64 bits, dropout 8
        kept += 2 * config.d_model + (config.d_model // FLOAT if config.dropout else 0) + 2
        layers = tuple(map(_layer, blocks))
        kept += 2 * layers[0].D if getattr(config, "rotary", None) is not None else 2  # tables, or positions
        return ModelShape(layers, outside, config.d_model, config.vocabulary, kept)

    @property
    def count(self) -> int:
        """P, the number of weights."""
        return sum(map(math.prod, self.shapes))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [*self.outside, *(shape for layer in self.layers for shape in layer.weights)]


@dataclass(frozen=True)
class Split:
    """How ranks share the work: `data` groups of `sequence` ranks, which by ring or heads share each sequence."""

    data: int = 1
    sequence: int = 1
    how: str = ""
    fsdp: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.sequence

    def __str__(self) -> str:
        parts = [f"data {self.data}"] if self.data > 1 or self.ranks == 1 else []
        parts += [f"{self.how} {self.sequence}"] if self.sequence > 1 else []
        return " x ".join(parts) + (", fsdp" if self.fsdp else "")

    def cli_options(self) -> str:
        """The options of `regard train` that say it."""
        return (" --shard fsdp" if self.fsdp else "") + (
            f" --sequence-ranks {self.sequence}" if self.sequence > 1 else ""
        )


@dataclass(frozen=True)
class Machine:
    """What a rank has: FLOP/s of products and of attention, bytes/s of its memory and of the wire, bytes of memory.

    Speeds are those of a rank that is alone on its machine; `cores` is for how many ranks of `threads` that holds.
    """

    flops: float = 5e10
    attention: float = 3e10
    touched: float = 5e9
    bandwidth: float = 1e9
    latency: float = 1e-4
    memory: float = math.inf
    cores: int = 1
    ranks: int = 1  # on one machine
    threads: int = 1

    def with_flops(self, flops: float) -> Machine:
        """The machine of which nothing is known but its FLOP/s: attention has half of them, and 10 for a byte."""
        return replace(self, flops=flops, attention=flops / 2, touched=flops / 10)

    @property
    def slowdown(self) -> float:
        """How much slower a rank computes than alone."""
        return max(1.0, self.ranks * self.threads / self.cores)


@dataclass(frozen=True)
class Cost:
    """Of one rank, the busiest: bytes held at the peak, FLOPs, bytes sent and seconds, each by its parts."""

    split: Split
    memory: dict[str, int]
    flops: dict[str, int]
    sent: dict[str, int]
    seconds: dict[str, float]

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def time(self) -> float:
        return sum(self.seconds.values())


def splits(model: ModelShape, ranks: int, *, sequence: int, batch: int) -> Iterator[Split]:
    """Every way to share the work among the ranks."""
    for shared in (n for n in range(1, ranks + 1) if ranks % n == 0):
        data = ranks // shared
        if data > batch or shared * 2 > sequence:
            continue
        hows = [""] if shared == 1 else ["ring"]
        if shared > 1 and all(layer.G % shared == 0 and layer.H % shared == 0 for layer in model.layers):
            hows.append("heads")
        for how in hows:
            yield Split(data, shared, how)
            if ranks > 1:
                yield Split(data, shared, how, fsdp=True)


def cost(model: ModelShape, split: Split, machine: Machine, *, sequence: int, batch: int, average: bool = True) -> Cost:
    """What a step of `batch` sequences of `sequence` tokens costs the busiest rank; `average` is one of the weights."""
    tokens, turns = -(-sequence // split.sequence), -(-batch // split.data)
    held = _memory(model, split, tokens, turns, average)
    flops = {name: turns * count for name, count in _flops(model, split, sequence).items()}
    sent, messages = _bytes_sent(model, split, sequence, turns)
    touched = turns * TOUCHED * held["activations"] + STEPPED * held["weights"]
    here = split.ranks <= machine.ranks  # then the wire is work for the cores, too
    seconds = {
        "dense": machine.slowdown * flops["dense"] / machine.flops,
        "attention": machine.slowdown * flops["attention"] / machine.attention,
        "memory": machine.slowdown * touched / machine.touched,
        "communication": (machine.slowdown if here else 1)
        * (sum(sent.values()) / machine.bandwidth + messages * machine.latency),
    }
    return Cost(split, held, flops, sent, seconds)


def _memory(model: ModelShape, split: Split, tokens: int, turns: int, average: bool) -> dict[str, int]:
    """Bytes at the peak, between forward and backward; `working` are what is there for a moment only.

    Gradients come while activations go. So they count where those of sequences before are held already.
    """
    share = split.ranks if split.fsdp else 1
    own = FLOAT * sum(_padded_size(shape, share) // share for shape in model.shapes)
    largest = max(FLOAT * sum(map(math.prod, layer.weights)) for layer in model.layers)
    outside = FLOAT * sum(map(math.prod, model.outside))
    kept = FLOAT * tokens * (model.kept + sum(layer.kept for layer in model.layers))
    table = FLOAT * model.vocabulary * model.d_model  # the gradient of the logits' weight, from the loss on
    working = max(
        FLOAT * min(ROWS, tokens) * model.vocabulary,
        table + FLOAT * tokens * model.d_model,
        FLOAT * tokens * max(layer.working for layer in model.layers),
    )
    if split.fsdp:
        gathered = outside + 2 * largest  # one is computed with while the next is on its way
        working += gathered + 2 * largest  # and gradients of one, before and after they are laid out to be sent
    elif split.ranks > 1:
        working += own  # the buckets that gradients are sent in
    held = {
        "weights": own,
        "gradients": own if turns > 1 else max(0, own - kept),
        "optimizer": 2 * own + (own if average else 0),
        "activations": kept + table,
        "working": working,
    }
    if split.sequence > 1:  # shards of two other ranks, and their gradients; or all tokens of some heads, and outputs
        held["keys"] = max(
            4 * FLOAT * tokens * _portion(layer, tokens) * (layer.D + layer.E)
            if split.how == "ring"
            else FLOAT * tokens * (2 * layer.H * (layer.D + layer.E) + 2 * layer.G * (layer.D + layer.E))
            for layer in model.layers
        )
    return held


def _flops(model: ModelShape, split: Split, sequence: int) -> dict[str, int]:
    """Of one sequence."""
    tokens = -(-sequence // split.sequence)
    matrices = sum(layer.matrices for layer in model.layers) + model.vocabulary * model.d_model
    return {
        "dense": 6 * tokens * matrices,
        "attention": sum(_attention(layer.attend, layer, split, sequence) for layer in model.layers),
    }


def _attention(attend: Attention, layer: LayerShape, split: Split, sequence: int) -> int:
    """FLOPs of the busiest rank, forward and backward."""
    heads = layer.H
    if split.how == "heads":
        heads //= split.sequence
    assert isinstance(attend.score, Score)
    assert attend.mask is None or isinstance(attend.mask, Mask)
    count = heads * _places(attend.mask, sequence, 1 if split.how == "heads" else split.sequence)
    return forward_flops(count, attend.score, layer.D, layer.E) + backward_flops(count, attend.score, layer.D, layer.E)


def _places(mask: Mask | None, sequence: int, ranks: int) -> int:
    """Of one head: the most that the first, the middle or the last of the ranks has."""
    content = "all" if mask is None else mask.snapshot().content()
    known = None if content is None else ("places", content, sequence, ranks)
    return CACHE.get_or_build(known, lambda: _count_places(mask, sequence, ranks))


def _count_places(mask: Mask | None, sequence: int, ranks: int) -> int:
    spans = Layout.even(sequence, ranks, LAYOUT).spans
    some = {0, ranks // 2, ranks - 1}
    return max(
        sum(visited_entries(mask, Frame(1, 1, b - a, sequence, a)) for a, b in spans[rank] if b > a) for rank in some
    )


def _bytes_sent(model: ModelShape, split: Split, sequence: int, turns: int) -> tuple[dict[str, int], int]:
    """Bytes that a rank sends in a step, and messages."""
    ranks, sent, messages = split.ranks, {}, 0
    if split.fsdp:
        blocks = sum(_padded_size(shape, ranks) for layer in model.layers for shape in layer.weights)
        outside = sum(_padded_size(shape, ranks) for shape in model.outside)
        sent["all-gather"] = turns * FLOAT * (2 * blocks + outside) * (ranks - 1) // ranks
        sent["reduce-scatter"] = 2 * turns * FLOAT * (blocks + outside) * (ranks - 1) // ranks
        messages += turns * (ranks - 1) * 3 * (len(model.layers) + 1)
    elif ranks > 1:
        sent["all-reduce"] = 2 * FLOAT * model.count * (ranks - 1) // ranks
        messages += 2 * (ranks - 1) * max(1, FLOAT * model.count // (25 << 20))  # buckets of 25 MiB
    if split.sequence > 1:
        sent[split.how] = turns * sum(_attention_bytes(layer, split, sequence) for layer in model.layers)
        tokens, around = -(-sequence // split.sequence), 3 * (split.sequence - 1)
        messages += turns * sum(
            around * -(-layer.G // _portion(layer, tokens)) if split.how == "ring" else 8 for layer in model.layers
        )
    return sent, messages


def _portion(layer: LayerShape, tokens: int) -> int:
    """How many heads of its keys and values go round at a time."""
    return portion(Sizes(1, layer.H, layer.G, layer.D, layer.E, FLOAT), tokens)


def _attention_bytes(layer: LayerShape, split: Split, sequence: int) -> int:
    """What the busiest rank sends for the attention of one sequence, forward and backward."""
    asked = layer.H, layer.G, layer.D, layer.E, sequence, split.sequence, split.how
    mask = layer.attend.mask
    content = mask.snapshot().content() if isinstance(mask, Mask) else None
    known = _COUNTED.setdefault(layer.attend, {})
    if (content, asked) not in known:
        known[content, asked] = _count_bytes(layer.attend, *asked)
    return known[content, asked]


_COUNTED: WeakKeyDictionary[Attention, dict[tuple, int]] = WeakKeyDictionary()


def _count_bytes(attend: Attention, H: int, G: int, D: int, E: int, sequence: int, ranks: int, how: str) -> int:
    counted = min(ranks, COUNTED) if how == "ring" else ranks
    moved = bytes_moved(attend, ranks=counted, B=1, H=H, G=G, Q=sequence, D=D, E=E, layout=LAYOUT, how=how)
    most = max(moved.sent)
    return most if counted == ranks else most * counted * (ranks - 1) // ((counted - 1) * ranks)


def _padded_size(shape: tuple[int, ...], ranks: int) -> int:
    """Numbers in a weight whose first axis is filled up to a multiple of the ranks."""
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:]) if shape else ranks


def _layer(block: Block) -> LayerShape:
    attention, feedforward = block.attention, block.feedforward
    assert isinstance(attention, MultiHeadAttention)
    assert isinstance(feedforward, FeedForward | GatedFeedForward)
    H, G, D, E = attention.heads, attention.kv_heads, attention.d_head, attention.d_value
    d_model, d_hidden = feedforward.output.weight.shape
    kept = 2 * d_model + H * (D + E + 1) + G * (D + E)  # what is projected, q, k, v, output and its log-sum-exp
    kept += (H + G) * D if attention.rotary is not None else 0  # q and k before they are turned
    kept += (H + G) * (D + 1) if attention.query_norm is not None else 0
    if isinstance(feedforward, GatedFeedForward):
        kept += 4 * d_hidden
    else:
        kept += d_hidden if feedforward.activation is F.relu else 2 * d_hidden  # whose gradient is told by its output
    for part in (
        part for residual in block.children() if isinstance(residual, Residual) for part in residual.modules()
    ):
        kept += _kept_by_norm(part)
        kept += d_model // FLOAT if isinstance(part, Residual) and part.dropout else 0  # one byte for each number
    return LayerShape(
        tuple(tuple(weight.shape) for weight in block.parameters()),
        sum(part.weight.numel() for part in block.modules() if isinstance(part, nn.Linear)),
        kept, 2 * d_model + 3 * d_hidden, H, G, D, E, attention.attend,
    )  # fmt: skip


def _kept_by_norm(part: nn.Module) -> int:
    """Numbers that a norm keeps of every token: what it was given, its statistics, and what it makes of it (RMS)."""
    if isinstance(part, nn.LayerNorm):
        return math.prod(part.normalized_shape) + 2
    if isinstance(part, nn.RMSNorm | UnitRMSNorm):
        return 2 * part.weight.numel() + 1
    return 0
