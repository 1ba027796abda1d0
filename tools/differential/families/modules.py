"""Subjects of `regard.nn`: every module, with descriptions of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from regard.nn import LayerContext
from tools.differential.draw import Draw
from tools.differential.families.components import (
    NORMS,
    Described,
    Sizes,
    attention,
    described,
    feedforward,
    residual,
    rotary,
    sizes,
)
from tools.differential.subject import (
    Form,
    Item,
    Subject,
    alone,
    as_batch_of_one,
    forward,
    fresh,
    lengths_of,
    noise,
    pad_left,
    padded_forms,
    right,
    sequence_forms,
    stepwise_names,
    tokens,
)

Family = Callable[[Draw], Subject]
MODULES: dict[str, Family] = {}


def family(function: Family) -> Family:
    MODULES[function.__name__.replace("_", "-")] = function
    return function


def hidden(draw: Draw, lengths: Sequence[int], width: int, name: str = "x") -> list[Tensor]:
    return [noise(draw, n, width, name=f"{name}{b}") for b, n in enumerate(lengths)]


def chunks(draw: Draw, length: int) -> list[int]:
    """Sizes of the pieces of a cached sequence."""
    largest, random, sizes = draw.pick("largest chunk", [1, 3, 7]), draw.random("chunks"), list[int]()
    while sum(sizes) < length:
        sizes.append(min(random.randint(1, largest), length - sum(sizes)))
    return sizes


def stack_forms(
    draw: Draw, lengths: Sequence[int], call: Callable[..., Tensor], caches: Any, about: Described
) -> dict[str, Form]:
    """Forms of what takes (B, N, d_model) with a mask and positions, and perhaps a cache.

    call: (module, x, shared=..., cache=...) to the result; caches: (module) to an empty cache, or None without one.
    """
    filler = draw.pick("filler", ["zeros", "noise", "nan"])
    kinds = ["right", "left"] if about.shifts else ["right"]

    def padded(layout: Any, module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        # NaN in filler must not reach a gradient either, but 0 * NaN of the projections' own products does
        blank = "noise" if filler == "nan" and torch.is_grad_enabled() else filler
        x, mask = layout.fill([item[0] for item in items], blank), layout.mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        given = draw.pick("form of the mask", ["key_mask", "dense", "tensor"])
        wide = mask[:, None, None]
        keys = rg.nn.key_mask(mask) if given == "key_mask" else rg.dense(wide) if given == "dense" else wide
        return layout.rows(call(module, x, context=LayerContext(keys, positions=positions)))

    def packed(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        batch = rg.pack([item[0] for item in items])
        out = call(module, batch.values[None], context=LayerContext(batch.mask, positions=batch.positions))
        return rg.unpack(batch.with_values(out[0]))

    def stepwise(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        outputs = []
        for (x,) in items:
            cache = caches(module)
            pieces = x.split(chunks(draw, len(x)))
            outputs.append(torch.cat([call(module, piece[None], cache=cache)[0] for piece in pieces]))
        return outputs

    def stepwise_left(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        """The sequences together, padded on the left, in pieces."""
        layout, cache, outputs = pad_left(lengths), caches(module), []
        batch, padding = layout.fill([x for (x,) in items]), layout.width - torch.tensor(lengths)
        context = LayerContext(left_padding=padding)
        for columns in torch.arange(layout.width).split(chunks(draw, layout.width)):
            positions = (columns - padding[:, None]).clamp(min=0)
            outputs.append(call(module, batch[:, columns], context=context.with_positions(positions), cache=cache))
        return layout.rows(torch.cat(outputs, 1))

    forms = padded_forms(draw, lengths, kinds, padded)
    if about.shifts:
        forms["packed"] = packed
    if about.causal and caches is not None:
        forms["stepwise"] = stepwise
        if about.shifts:
            forms["stepwise, left"] = stepwise_left
    return forms


@family
def self_attention(draw: Draw) -> Subject:
    size, lengths = sizes(draw), lengths_of(draw)
    about = described(draw, 1, size.d_head, size.d_value)
    plain = as_batch_of_one(forward)

    def call(module: nn.Module, x: Tensor, context: LayerContext) -> Tensor:
        return module(x, mask=context.mask)

    def build() -> nn.Module:
        return rg.nn.SelfAttention(size.d_model, size.d_head, size.d_value, attend=about.make())

    forms = {"alone": alone(plain)} | stack_forms(draw, lengths, call, None, about)
    return Subject(fresh(build, draw), [(x,) for x in hidden(draw, lengths, size.d_model)], plain, forms)


@family
def multi_head_attention(draw: Draw) -> Subject:
    size, lengths = sizes(draw), lengths_of(draw)
    about = described(draw, size.heads, size.d_head, size.d_value)

    def call(module: nn.Module, x: Tensor, *, context: LayerContext | None = None, cache: Any = None) -> Tensor:
        return module(x, context=context, cache=cache)

    plain = as_batch_of_one(forward)
    caches = {
        "own": lambda module: module.cache(), "Cache": lambda module: rg.nn.Cache(2),
        "FixedCache": lambda module: rg.nn.FixedCache(200),
    }[draw.pick("cache", ["own", "Cache", "FixedCache"])]  # fmt: skip
    forms = stack_forms(draw, lengths, call, caches, about)
    return Subject(
        fresh(lambda: attention(draw, size, about.make()), draw),
        [(x,) for x in hidden(draw, lengths, size.d_model)],
        plain,
        {"alone": alone(plain)} | forms,
        stepwise_names(forms),
        compiles=frozenset({"alone"}),
    )


def pair_forms(draw: Draw, items: Sequence[Item], call: Callable[..., Tensor]) -> dict[str, Form]:
    """Forms of what takes x (B, N, ...) and a source (B, K, ...) that has a mask."""
    filler = draw.pick("filler", ["zeros", "noise", "nan"])
    sources = [len(item[1]) for item in items]

    def padded(layout: Any, module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        blank = "noise" if filler == "nan" and torch.is_grad_enabled() else filler
        own = right([len(item[0]) for item in items])
        x, source = own.fill([item[0] for item in items]), layout.fill([item[1] for item in items], blank)
        return own.rows(call(module, x, source, cross_context=LayerContext(rg.nn.key_mask(layout.mask))))

    def packed(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        x, source = (rg.pack(list(parts)) for parts in zip(*items, strict=True))
        context = LayerContext(x.mask, positions=x.positions)
        out = call(
            module,
            x.values[None],
            source.values[None],
            context=context,
            cross_context=LayerContext(x.cross_mask(source)),
        )
        return rg.unpack(x.with_values(out[0]))

    forms = padded_forms(draw, sources, ("right", "left", "holes"), padded)
    return {f"source {kind}": form for kind, form in forms.items()} | {"packed": packed}


@family
def cross_attention(draw: Draw) -> Subject:
    size, lengths = sizes(draw), lengths_of(draw)
    sources = [draw.random(f"source {n}").randint(1, 20) for n in range(len(lengths))]
    d_source = draw.pick("d_source", [size.d_model, 20])
    about = described(draw, size.heads, size.d_head, size.d_value, masks=["none"])
    kind = draw.pick("kind", ["attention", "cross block"])

    def build() -> nn.Module:
        attend = about.make()
        attend = attend.replace(mask=None, bias=None, offset=0)
        cross = attention(draw, size, attend, d_source=d_source)
        if kind == "attention":
            return cross
        return rg.nn.CrossBlock(cross, feedforward(draw, size.d_model), residual=residual(draw, size.d_model))

    def call(
        module: Any, x: Tensor, source: Tensor, *, context: Any = None, cross_context: LayerContext | None = None
    ) -> Tensor:
        return (
            module(x, source, context=cross_context)
            if kind == "attention"
            else module(x, source, cross_context=cross_context)
        )

    def stepwise(module: Any, items: Sequence[Item]) -> list[Tensor]:
        outputs = []
        for x, source in items:
            memory, pieces = rg.nn.CrossCache(), x.split(chunks(draw, len(x)))
            outputs.append(torch.cat([module(piece[None], source[None], cache=memory)[0] for piece in pieces]))
        return outputs

    plain = as_batch_of_one(call)
    items = list(zip(hidden(draw, lengths, size.d_model), hidden(draw, sources, d_source, "source"), strict=True))
    forms = {"alone": alone(plain)} | pair_forms(draw, items, call)
    if rotary(draw, size.d_head) is not None:  # a source has no positions of its own: its keys are at 0, 1, 2, ...
        forms = {name: form for name, form in forms.items() if name in ("alone", "source right")}
    if kind == "attention":
        forms["stepwise"] = stepwise
    return Subject(fresh(build, draw), items, plain, forms, stepwise_names(forms))


@family
def additive_attention(draw: Draw) -> Subject:
    lengths = lengths_of(draw)
    sources = [draw.random(f"source {n}").randint(1, 20) for n in range(len(lengths))]
    items = list(zip(hidden(draw, lengths, 6), hidden(draw, sources, 10, "source"), strict=True))

    def call(
        module: Any, x: Tensor, source: Tensor, *, context: Any = None, cross_context: LayerContext | None = None
    ) -> Tensor:
        return module(x, source, mask=None if cross_context is None else cross_context.mask)

    plain = as_batch_of_one(call)
    build = partial(rg.nn.AdditiveAttention, 6, 10, draw.pick("d_hidden", [4, 8, 24]))
    return Subject(fresh(build, draw), items, plain, {"alone": alone(plain)} | pair_forms(draw, items, call))


def drawn_edges(draw: Draw, count: int) -> Tensor:
    """Pairs of nodes (2, edges), each node with itself among them."""
    random = draw.random("edges")
    others = {(random.randrange(count), random.randrange(count)) for _ in range(2 * count)}
    return torch.tensor(sorted({(i, i) for i in range(count)} | others)).T


def adjacency(edges: Tensor, count: int) -> Tensor:
    seen = torch.zeros(count, count, dtype=torch.bool)
    seen[edges[0], edges[1]] = True
    return seen


@family
def graph_attention(draw: Draw) -> Subject:
    heads, count = draw.pick("heads", [1, 2, 3]), draw.pick("nodes", [1, 4, 9, 70])
    graphs = draw.pick("graphs", [1, 2, 3])
    edges = drawn_edges(draw, count)
    pairs = [tuple(pair) for pair in edges.T.tolist()]

    def one(module: nn.Module, item: Item) -> Tensor:
        return module(item[0][None], mask=adjacency(edges, count))[0]

    def joined(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        every = torch.cat([edges + n * count for n in range(len(items))], 1)
        return list(module(torch.cat([x for (x,) in items])[None], mask=rg.edges(every))[0].split(count))

    forms: dict[str, Form] = {
        "alone": alone(one),
        "batch": lambda module, items: list(module(torch.stack([x for (x,) in items]), mask=rg.edges(edges))),
        "joined": joined,
        "list of edges": lambda module, items: [module(x[None], mask=rg.edges(pairs))[0] for (x,) in items],
    }
    items = [(x,) for x in hidden(draw, [count] * graphs, 4 * heads)]
    return Subject(fresh(partial(rg.nn.GraphAttention, 4 * heads, heads), draw), items, one, forms)


@family
def feed_forward(draw: Draw) -> Subject:
    lengths, d_model = lengths_of(draw), draw.pick("d_model", [8, 12, 32])
    plain = as_batch_of_one(forward)

    def build() -> nn.Module:
        return nn.Sequential(NORMS[draw.pick("norm", list(NORMS))](d_model), feedforward(draw, d_model))

    def packed(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        return list(module(torch.cat([x for (x,) in items])).split([len(x) for (x,) in items]))

    items = [(x,) for x in hidden(draw, lengths, d_model)]
    return Subject(
        fresh(build, draw), items, plain, {"alone": alone(plain), "packed": packed}, compiles=frozenset({"packed"})
    )


def block(draw: Draw, size: Sizes, attend: rg.Attention, cross: nn.Module | None = None) -> rg.nn.Block:
    return rg.nn.Block(
        attention(draw, size, attend),
        feedforward(draw, size.d_model),
        residual=residual(draw, size.d_model),
        cross=cross,
    )


@family
def encoder(draw: Draw) -> Subject:
    size, lengths = sizes(draw), lengths_of(draw)
    about = described(draw, size.heads, size.d_head, size.d_value)
    layers, repeat = draw.pick("layers", [1, 2, 3]), draw.pick("repeat", [1, 1, 2])
    shared_description = draw.pick("layers share a description", [True, False])
    relative = draw.pick("relative bias", [False, False, True])
    # of several words per position, an even and an odd span, distances on a logarithmic scale or clipped
    span, most = draw.pick("span, max_distance", [(4, 11), (5, 5), (2, 2), (7, 40)])
    fits = size.heads == size.kv_heads and type(about.make().score) is rg.Dot and about.make().score.softcap is None
    disentangled = fits and draw.pick("disentangled", [False, False, True])

    def build() -> nn.Module:
        one = about.make()
        blocks = [block(draw, size, one if shared_description else about.make()) for _ in range(layers)]
        bias = (
            rg.nn.RelativeBias(size.heads, buckets=8, max_distance=16, bidirectional=not about.causal)
            if relative
            else None
        )
        vectors = rg.nn.RelativeEmbedding(size.d_model, span=span, max_distance=most) if disentangled else None
        return rg.nn.Encoder(blocks, norm=nn.LayerNorm(size.d_model), bias=bias, relative=vectors, repeat=repeat)

    def call(module: nn.Module, x: Tensor, *, context: LayerContext | None = None, cache: Any = None) -> Tensor:
        return module(x, context=context, cache=cache)

    plain = as_batch_of_one(forward)
    forms = {"alone": alone(plain)} | stack_forms(draw, lengths, call, lambda module: module.cache(), about)
    if disentangled:  # self-attention of one padded batch
        forms = {name: form for name, form in forms.items() if not name.startswith(("packed", "stepwise"))}
    items = [(x,) for x in hidden(draw, lengths, size.d_model)]
    return Subject(fresh(build, draw), items, plain, forms, stepwise_names(forms), compiles=frozenset({"alone"}))


@family
def decoder(draw: Draw) -> Subject:
    size, lengths = sizes(draw), lengths_of(draw)
    sources = [draw.random(f"source {n}").randint(1, 20) for n in range(len(lengths))]
    about = described(draw, size.heads, size.d_head, size.d_value, masks=["causal", "causal window", "causal dilated"])
    layers = draw.pick("layers", [1, 2])

    def build() -> nn.Module:
        cross_context = rg.Attention(offset=0)
        blocks = []
        for _ in range(layers):
            cross = rg.nn.MultiHeadAttention(size.d_model, size.heads, d_head=size.d_head, attend=cross_context)
            blocks.append(block(draw, size, about.make(), cross))
        return rg.nn.Decoder(blocks, norm=nn.LayerNorm(size.d_model))

    def call(module: Any, x: Tensor, source: Tensor, *, context: Any = None, cross_context: Any = None) -> Tensor:
        return module(x, source, context=context, cross_context=cross_context)

    def stepwise(module: Any, items: Sequence[Item]) -> list[Tensor]:
        outputs = []
        for x, source in items:
            cache = module.cache()
            outputs.append(
                torch.cat([module(p[None], source[None], cache=cache)[0] for p in x.split(chunks(draw, len(x)))])
            )
        return outputs

    plain = as_batch_of_one(forward)
    items = list(zip(hidden(draw, lengths, size.d_model), hidden(draw, sources, size.d_model, "source"), strict=True))
    forms = {"alone": alone(plain), "stepwise": stepwise} | pair_forms(draw, items, call)
    return Subject(fresh(build, draw), items, plain, forms, stepwise_names(forms))


POOLINGS: dict[str, Callable[[int], nn.Module]] = {
    "mean": lambda width: rg.nn.Mean(), "max": lambda width: rg.nn.Max(), "first": lambda width: rg.nn.First(),
    "last": lambda width: rg.nn.Last(), "attention": rg.nn.AttentionPooling,
}  # fmt: skip
EXPECTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda module, x: x.sum(0) / len(x), "max": lambda module, x: x.max(0).values,
    "first": lambda module, x: x[0], "last": lambda module, x: x[-1],
    "attention": lambda module, x: (x @ module.query / x.shape[-1] ** 0.5).softmax(0) @ x,
}  # fmt: skip


@family
def pooling(draw: Draw) -> Subject:
    kind, width = draw.pick("pooling", list(POOLINGS)), draw.pick("width", [1, 4, 16])
    lengths = lengths_of(draw)
    if draw.pick("very long", [False, False, False, True]):
        lengths[0] = 3000
    filler = draw.pick("filler", ["zeros", "noise"])

    def plain(module: nn.Module, item: Item) -> Tensor:
        return EXPECTED[kind](module, item[0])

    forms = sequence_forms(draw, forward, lengths, pooled=True, filler=filler)
    forms.pop("list")
    offset = draw.pick("offset of the values", [0.0, 5.0])
    items = [(x + offset,) for x in hidden(draw, lengths, width)]
    return Subject(fresh(partial(POOLINGS[kind], width), draw), items, plain, forms)


def cross_block(draw: Draw, width: int, heads: int) -> rg.nn.CrossBlock:
    cross = rg.nn.MultiHeadAttention(width, heads, attend=rg.Attention(offset=0))
    return rg.nn.CrossBlock(cross, feedforward(draw, width), residual=residual(draw, width))


@family
def sets(draw: Draw) -> Subject:
    heads, lengths = draw.pick("heads", [1, 2]), lengths_of(draw)
    width, points, kind = 8 * heads, draw.pick("points", [1, 2, 5]), draw.pick("kind", ["seeds", "induced", "probe"])

    def build() -> nn.Module:
        if kind == "seeds":
            return rg.nn.SeedPooling(width, points, cross_block(draw, width, heads))
        if kind == "probe":
            own = rg.nn.MultiHeadAttention(width, heads, attend=rg.Attention(offset=0))
            return rg.nn.ProbePooling(width, own, feedforward(draw, width), residual(draw, width)())
        return rg.nn.InducedBlock(width, points, cross_block(draw, width, heads), cross_block(draw, width, heads))

    plain = as_batch_of_one(forward)
    forms = sequence_forms(
        draw, forward, lengths, packs=kind != "probe", pooled=kind != "induced",
        filler=draw.pick("filler", ["zeros", "noise"]),
    )  # fmt: skip
    forms.pop("list", None)
    items = [(x,) for x in hidden(draw, lengths, width)]
    return Subject(fresh(build, draw), items, plain, {"alone": alone(plain)} | forms)


class Head(nn.Module):
    """A table of tokens, for `token_loss`."""

    def __init__(self, vocabulary: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width))
        self.bias = nn.Parameter(torch.randn(vocabulary)) if bias else None


@family
def token_loss(draw: Draw) -> Subject:
    lengths, vocabulary, width = lengths_of(draw), draw.pick("vocabulary", [2, 7, 300]), draw.pick("width", [3, 8])
    smoothing = draw.pick("smoothing", [0.0, 0.1])
    if draw.pick("very long", [False, False, True]):
        lengths[0] = 1200

    def plain(module: Any, item: Item) -> Tensor:
        logits = F.linear(item[0], module.weight, module.bias).log_softmax(-1)
        chosen = logits.gather(1, item[1][:, None])[:, 0]
        return -((1 - smoothing) * chosen + smoothing * logits.mean(-1)).sum()

    def fused(module: Any, items: Sequence[Item]) -> list[Tensor]:
        x, targets = (torch.cat(parts) for parts in zip(*items, strict=True))
        return [rg.nn.token_loss(x, module.weight, targets, bias=module.bias, smoothing=smoothing)]

    targets = [tokens(draw, n, vocabulary, name=f"targets {b}") for b, n in enumerate(lengths)]
    items = list(zip(hidden(draw, lengths, width), targets, strict=True))
    build = partial(Head, vocabulary, width, draw.pick("bias", [True, False]))
    return Subject(fresh(build, draw), items, plain, {"fused": fused}, total=True)
