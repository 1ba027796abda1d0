"""The cost of a training step per rank: memory, FLOPs, bytes sent and seconds.

R = d · s ranks: d groups split the sequences of a step, and the s ranks of a group split each sequence of N tokens, so
that a rank has T = N / s tokens of a sequence. All numbers are float32, P is the number of weights, and a step is
forward, backward and AdamW. A group processes its sequences one after the other.

    FLOPs      dense      6 T (matrices of the blocks + vocabulary · width)        2 forward, 4 backward
               attention  by `regard.engines.cost`, as in `explain`: 2 (D + E) forward and 6 D + 4 E backward per entry,
                          over the queries (ring) or heads of the busiest rank
    sent by    all-reduce             2 (R - 1) / R · 4 P                          gradients, if models are replicated
    a rank     all-gather             (R - 1) / R · 4 · (2 P of blocks + P of the rest)   FSDP: forward, blocks again
               reduce-scatter         2 (R - 1) / R · 4 P       FSDP: gradients; gloo sums them on every rank,
                                                                other backends, such as NCCL, send half of that
               ring, heads            `regard.distributed.bytes_moved` of every layer, exact
               (FSDP pads the first axis of each weight to a multiple of R, and repeats this for each sequence)
    seconds    dense / flops + attention / attention flops + bytes touched / memory bandwidth + bytes sent /
               bandwidth + messages · latency; nothing overlaps. If the ranks of a machine have more threads than it
               has cores, all of it is slower by ranks · threads / cores, except for traffic between machines.
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

FLOAT = 4
LAYOUT = "balanced"  # equal work on every rank with a causal mask
COUNTED = 16  # ranks of a ring up to which bytes are counted exactly; beyond, they scale with (s - 1) / s
TOUCHED = 8  # reads and writes per saved activation in a step, for all elementwise work
STEPPED = 11  # reads and writes per weight for clipping, AdamW and the moving average
ROWS = 512  # tokens per chunk of logits


@dataclass(frozen=True, eq=False)
class LayerShape:
    """The sizes of a block that determine its cost. kept: numbers per token saved for backward."""

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
    """The sizes of a language model that determine its cost.

    >>> import torch
    >>> from regard.distributed.cost import ModelShape
    >>> from regard.models import LanguageConfig, LanguageModel
    >>> with torch.device("meta"):
    ...     model = LanguageModel(LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64))
    >>> ModelShape.of(model).count == sum(weight.numel() for weight in model.parameters())
    True
    """

    layers: tuple[LayerShape, ...]
    outside: tuple[tuple[int, ...], ...]  # weights outside the blocks
    d_model: int
    vocabulary: int
    kept: int  # numbers per token saved outside the blocks

    @staticmethod
    def of(model: nn.Module) -> ModelShape:
        """The sizes of a language model, which may be on the meta device."""
        config = getattr(model, "config", None)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        if not blocks or not hasattr(model, "generate") or any(block.cross is not None for block in blocks):
            raise ValueError(
                f"expected a decoder-only language model, such as GPT-2 or Llama, got {type(model).__name__}"
            )
        assert config is not None
        inside = {id(weight) for block in blocks for weight in block.parameters()}
        outside = tuple(tuple(weight.shape) for weight in model.parameters() if id(weight) not in inside)
        within = {id(part) for block in blocks for part in block.modules()}
        kept = sum(_kept_by_norm(part) for part in model.modules() if id(part) not in within)
        # ids take 8 bytes, dropout masks 1 byte
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
    """How ranks split the work: `data` groups of `sequence` ranks, which split each sequence by ring or by heads."""

    data: int = 1
    sequence: int = 1
    method: str = ""
    fsdp: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.sequence

    def __str__(self) -> str:
        parts = [f"data {self.data}"] if self.data > 1 or self.ranks == 1 else []
        parts += [f"{self.method} {self.sequence}"] if self.sequence > 1 else []
        return " x ".join(parts) + (", fsdp" if self.fsdp else "")

    def cli_options(self) -> str:
        """The options of `regard train` for this split."""
        return (" --shard fsdp" if self.fsdp else "") + (
            f" --sequence-ranks {self.sequence}" if self.sequence > 1 else ""
        )


@dataclass(frozen=True)
class Machine:
    """The resources of a rank.

    flops, attention: FLOP/s of matrix products and of attention. touched, bandwidth: bytes/s of memory and network.
    latency: seconds per message. memory: bytes per rank. Speeds are those of a rank that is alone on its machine; with
    more than `cores` threads on one machine, all ranks are slower.
    """

    flops: float = 5e10
    attention: float = 3e10
    touched: float = 5e9
    bandwidth: float = 1e9
    latency: float = 1e-4
    memory: float = math.inf
    cores: int = 1
    ranks: int = 1  # per machine
    threads: int = 1

    def with_flops(self, flops: float) -> Machine:
        """Set FLOP/s and estimate the rest: half of it for attention, and one byte of memory per 10 FLOPs."""
        return replace(self, flops=flops, attention=flops / 2, touched=flops / 10)

    @property
    def slowdown(self) -> float:
        """The factor by which a rank is slower than alone on its machine."""
        return max(1.0, self.ranks * self.threads / self.cores)


@dataclass(frozen=True)
class Cost:
    """The cost of the busiest rank: peak bytes, FLOPs, bytes sent and seconds, each by component."""

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
    """Yield every way to split the work over the ranks."""
    for sequence_ranks in (n for n in range(1, ranks + 1) if ranks % n == 0):
        data = ranks // sequence_ranks
        if data > batch or sequence_ranks * 2 > sequence:
            continue
        methods = [""] if sequence_ranks == 1 else ["ring"]
        if sequence_ranks > 1 and all(
            layer.G % sequence_ranks == layer.H % sequence_ranks == 0 for layer in model.layers
        ):
            methods.append("heads")
        for method in methods:
            yield Split(data, sequence_ranks, method)
            if ranks > 1:
                yield Split(data, sequence_ranks, method, fsdp=True)


def cost(model: ModelShape, split: Split, machine: Machine, *, sequence: int, batch: int, average: bool = True) -> Cost:
    """The cost of a step of `batch` sequences of `sequence` tokens for the busiest rank.

    average: whether a moving average of the weights is kept.
    """
    tokens, passes = -(-sequence // split.sequence), -(-batch // split.data)
    memory = _memory(model, split, tokens, passes, average)
    flops = {name: passes * count for name, count in _flops(model, split, sequence).items()}
    sent, messages = _bytes_sent(model, split, sequence, passes)
    touched = passes * TOUCHED * memory["activations"] + STEPPED * memory["weights"]
    local = split.ranks <= machine.ranks  # communication within a machine takes time of its cores
    seconds = {
        "dense": machine.slowdown * flops["dense"] / machine.flops,
        "attention": machine.slowdown * flops["attention"] / machine.attention,
        "memory": machine.slowdown * touched / machine.touched,
        "communication": (machine.slowdown if local else 1)
        * (sum(sent.values()) / machine.bandwidth + messages * machine.latency),
    }
    return Cost(split, memory, flops, sent, seconds)


def _memory(model: ModelShape, split: Split, tokens: int, passes: int, average: bool) -> dict[str, int]:
    """Bytes at the peak, between forward and backward, by component; `working` is temporary memory.

    During backward, gradients replace activations, so they add to the peak only if gradients of earlier sequences are
    already there.
    """
    share = split.ranks if split.fsdp else 1
    weights = FLOAT * sum(_padded_size(shape, share) // share for shape in model.shapes)
    largest = max(FLOAT * sum(map(math.prod, layer.weights)) for layer in model.layers)
    outside = FLOAT * sum(map(math.prod, model.outside))
    kept = FLOAT * tokens * (model.kept + sum(layer.kept for layer in model.layers))
    table = FLOAT * model.vocabulary * model.d_model  # the gradient of the output matrix, which the loss computes first
    working = max(
        FLOAT * min(ROWS, tokens) * model.vocabulary,
        table + FLOAT * tokens * model.d_model,
        FLOAT * tokens * max(layer.working for layer in model.layers),
    )
    if split.fsdp:
        gathered = outside + 2 * largest  # the current block, and the next one in transfer
        working += gathered + 2 * largest  # gradients of one block, and their send buffer
    elif split.ranks > 1:
        working += weights  # buckets of the gradient all-reduce
    memory = {
        "weights": weights,
        "gradients": weights if passes > 1 else max(0, weights - kept),
        "optimizer": 2 * weights + (weights if average else 0),
        "activations": kept + table,
        "working": working,
    }
    if split.sequence > 1:  # ring: two shards and their gradients; heads: all tokens of some heads, and outputs
        memory["keys"] = max(
            4 * FLOAT * tokens * _portion(layer, tokens) * (layer.D + layer.E)
            if split.method == "ring"
            else FLOAT * tokens * (2 * layer.H * (layer.D + layer.E) + 2 * layer.G * (layer.D + layer.E))
            for layer in model.layers
        )
    return memory


def _flops(model: ModelShape, split: Split, sequence: int) -> dict[str, int]:
    """FLOPs of one sequence."""
    tokens = -(-sequence // split.sequence)
    matrices = sum(layer.matrices for layer in model.layers) + model.vocabulary * model.d_model
    return {
        "dense": 6 * tokens * matrices,
        "attention": sum(_attention(layer.attend, layer, split, sequence) for layer in model.layers),
    }


def _attention(attend: Attention, layer: LayerShape, split: Split, sequence: int) -> int:
    """Attention FLOPs of the busiest rank, forward and backward."""
    heads = layer.H
    if split.method == "heads":
        heads //= split.sequence
    count = heads * _visited_entries(attend.mask, sequence, 1 if split.method == "heads" else split.sequence)
    return forward_flops(count, attend.score, layer.D, layer.E) + backward_flops(count, attend.score, layer.D, layer.E)


def _visited_entries(mask: Mask | None, sequence: int, ranks: int) -> int:
    """The largest number of entries per head on the first, the middle and the last rank."""
    content = "all" if mask is None else mask.snapshot().content()
    cache_key = None if content is None else ("entries", content, sequence, ranks)
    return CACHE.get_or_build(cache_key, lambda: _count_entries(mask, sequence, ranks))


def _count_entries(mask: Mask | None, sequence: int, ranks: int) -> int:
    spans = Layout.even(sequence, ranks, LAYOUT).spans
    sample = {0, ranks // 2, ranks - 1}
    return max(
        sum(visited_entries(mask, Frame(1, 1, b - a, sequence, a)) for a, b in spans[rank] if b > a) for rank in sample
    )


def _bytes_sent(model: ModelShape, split: Split, sequence: int, passes: int) -> tuple[dict[str, int], int]:
    """Bytes by kind, and the number of messages, that a rank sends in a step."""
    ranks, sent, messages = split.ranks, {}, 0
    if split.fsdp:
        blocks = sum(_padded_size(shape, ranks) for layer in model.layers for shape in layer.weights)
        outside = sum(_padded_size(shape, ranks) for shape in model.outside)
        sent["all-gather"] = passes * FLOAT * (2 * blocks + outside) * (ranks - 1) // ranks
        sent["reduce-scatter"] = 2 * passes * FLOAT * (blocks + outside) * (ranks - 1) // ranks
        messages += passes * (ranks - 1) * 3 * (len(model.layers) + 1)
    elif ranks > 1:
        sent["all-reduce"] = 2 * FLOAT * model.count * (ranks - 1) // ranks
        messages += 2 * (ranks - 1) * max(1, FLOAT * model.count // (25 << 20))  # buckets of 25 MiB
    if split.sequence > 1:
        sent[split.method] = passes * sum(_attention_bytes(layer, split, sequence) for layer in model.layers)
        tokens, around = -(-sequence // split.sequence), 3 * (split.sequence - 1)
        messages += passes * sum(
            around * -(-layer.G // _portion(layer, tokens)) if split.method == "ring" else 8 for layer in model.layers
        )
    return sent, messages


def _portion(layer: LayerShape, tokens: int) -> int:
    """The number of key/value heads per ring transfer."""
    return portion(Sizes(1, layer.H, layer.G, layer.D, layer.E, FLOAT), tokens)


def _attention_bytes(layer: LayerShape, split: Split, sequence: int) -> int:
    """Bytes that the busiest rank sends for the attention of one sequence, forward and backward."""
    arguments = layer.H, layer.G, layer.D, layer.E, sequence, split.sequence, split.method
    mask = layer.attend.mask
    content = mask.snapshot().content() if isinstance(mask, Mask) else None
    known = _COUNTED.setdefault(layer.attend, {})
    if (content, arguments) not in known:
        known[content, arguments] = _count_bytes(layer.attend, *arguments)
    return known[content, arguments]


_COUNTED: WeakKeyDictionary[Attention, dict[tuple, int]] = WeakKeyDictionary()


def _count_bytes(attend: Attention, H: int, G: int, D: int, E: int, sequence: int, ranks: int, method: str) -> int:
    counted = min(ranks, COUNTED) if method == "ring" else ranks
    moved = bytes_moved(attend, ranks=counted, B=1, H=H, G=G, Q=sequence, D=D, E=E, layout=LAYOUT, method=method)
    most = max(moved.sent)
    return most if counted == ranks else most * counted * (ranks - 1) // ((counted - 1) * ranks)


def _padded_size(shape: tuple[int, ...], ranks: int) -> int:
    """The size of a weight with its first axis padded to a multiple of the ranks."""
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:]) if shape else ranks


def _layer(block: Block) -> LayerShape:
    attention, feedforward = block.attention, block.feedforward
    assert isinstance(attention, MultiHeadAttention)
    if not isinstance(feedforward, FeedForward | GatedFeedForward):
        raise ValueError(f"the cost of {type(feedforward).__name__} is not known; expected a feed-forward layer")
    H, G, D, E = attention.heads, attention.kv_heads, attention.d_head, attention.d_value
    d_model, d_hidden = feedforward.output.weight.shape
    kept = 2 * d_model + H * (D + E + 1) + G * (D + E)  # the inputs of projections, q, k, v, output and log-sum-exp
    kept += (H + G) * D if attention.rotary is not None else 0  # q and k before rotation
    kept += (H + G) * (D + 1) if attention.query_norm is not None else 0
    if isinstance(feedforward, GatedFeedForward):
        kept += 4 * d_hidden
    else:
        kept += d_hidden if feedforward.activation is F.relu else 2 * d_hidden  # ReLU needs only its output
    for part in (
        part for residual in block.children() if isinstance(residual, Residual) for part in residual.modules()
    ):
        kept += _kept_by_norm(part)
        kept += d_model // FLOAT if isinstance(part, Residual) and part.dropout else 0  # one byte per number
    return LayerShape(
        tuple(tuple(weight.shape) for weight in block.parameters()),
        sum(part.weight.numel() for part in block.modules() if isinstance(part, nn.Linear)),
        kept, 2 * d_model + 3 * d_hidden, H, G, D, E, attention.attend,
    )  # fmt: skip


def _kept_by_norm(part: nn.Module) -> int:
    """Numbers per token that a norm saves: its input, its statistics, and the normalised input (RMS)."""
    if isinstance(part, nn.LayerNorm):
        return math.prod(part.normalized_shape) + 2
    if isinstance(part, nn.RMSNorm | UnitRMSNorm):
        return 2 * part.weight.numel() + 1
    return 0
