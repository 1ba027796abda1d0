"""Subjects of `regard.models` for text: encoders, language models and encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from regard import models
from regard.nn import ACTIVATIONS
from tools.differential.draw import Draw
from tools.differential.families.components import routing
from tools.differential.families.modules import Family, chunks, hidden
from tools.differential.subject import (
    Form,
    Item,
    Rows,
    Subject,
    alone,
    as_batch_of_one,
    forward,
    fresh,
    lengths_of,
    padded_forms,
    right,
    sequence_forms,
    stepwise_names,
    tokens,
)

MODELS: dict[str, Family] = {}
VOCABULARY = 23
LLAMA3 = rg.positions.Llama3(4.0, 1.0, 4.0, 16)


def family(function: Family) -> Family:
    MODELS[function.__name__.replace("_", "-")] = function
    return function


def common(draw: Draw, *, layers: bool = True) -> dict[str, Any]:
    """Sizes that all configurations have."""
    heads = draw.pick("heads", [1, 2, 4])
    return {
        "d_model": heads * draw.pick("width of a head", [4, 8, 12]), "heads": heads,
        "d_hidden": draw.pick("hidden", [8, 24]), "layers": draw.pick("layers", [1, 2, 3]) if layers else 2,
        "activation": draw.pick("activation", sorted(ACTIVATIONS)),
    }  # fmt: skip


def ids(draw: Draw, lengths: Sequence[int], vocabulary: int = VOCABULARY, name: str = "ids") -> list[Tensor]:
    return [tokens(draw, n, vocabulary, name=f"{name}{b}") for b, n in enumerate(lengths)]


def text_config(draw: Draw) -> models.TextConfig:
    sizes = common(draw)
    turn = rg.nn.Rotary(100.0, draw.pick("rotary width", [None, 4]))
    positions: list[dict[str, Any]] = [{}, {"rotary": turn}, {"layer_rotary": (turn, None)}, {"disentangled": 6}]
    return models.TextConfig(
        VOCABULARY, **sizes, positions=160, first_position=draw.pick("first position", [0, 2]),
        segments=draw.pick("segments", [2, 0]), d_embedding=draw.pick("embedding width", [None, 6]),
        distinct=draw.pick("distinct layers", [None, 1]), norm=draw.pick("norm", ["layer", "rms", "unit_rms"]),
        arrangement=draw.pick("arrangement", ["post", "pre", "sandwich", "output"]),
        **draw.pick("rotary", positions), buckets=draw.pick("buckets", [0, 8]), max_distance=12,
        windows=draw.pick("windows", [(), (4,), (3, None)]), causal=draw.pick("causal", [False, True]),
        gated=draw.pick("gated", [False, True]), bias=draw.pick("bias", [True, False]),
        head_bias=draw.pick("head bias", [True, False]), head_norm=draw.pick("head norm", [False, True]),
        token_head=draw.pick("token head", [False, True]),
        embedding_norm=draw.pick("embedding norm", [True, False]),
        pooling=draw.pick("pooling", ["first", "mean", "max", "attention"]),
        eps=1e-6, unit=draw.pick("unit", [True, False]), classes=3, dropout=0.0,
    )  # fmt: skip


@family
def text(draw: Draw) -> Subject:
    config, lengths = text_config(draw), lengths_of(draw)
    kind = draw.pick("model", [
        models.TextEncoder, models.MaskedLanguageModel, models.SequenceClassifier, models.TokenClassifier,
        models.QuestionAnswering, models.SentenceEmbedder,
    ])  # fmt: skip
    pooled = kind in (models.SequenceClassifier, models.SentenceEmbedder)
    parts = [ids(draw, lengths)]
    if config.segments and draw.pick("segments given", [False, True]):
        parts.append(ids(draw, lengths, 2, "segments"))

    def call(module: nn.Module, x: Any, segments: Any = None, mask: Tensor | None = None) -> Any:
        return module(x, mask, segments=segments)

    plain = as_batch_of_one(call)
    forms = {"alone": alone(plain)} | sequence_forms(draw, call, lengths, pooled=pooled, gaps=True)
    compiles = frozenset({"alone", "right", "left", "holes"})
    return Subject(
        fresh(lambda: kind(config), draw), list(zip(*parts, strict=True)), plain, forms, compiles=compiles, saves=True
    )


def experts(draw: Draw) -> dict[str, Any]:
    d_shared = draw.pick("shared expert", [0, 8])
    return {
        "gated": True, "experts": 4, "experts_per_token": draw.pick("per token", [2, 1]),
        "gate_limit": draw.pick("gate limit", [1.0, None]), "routing": routing(draw, 4), "d_shared": d_shared,
        "shared_gate": bool(d_shared) and draw.pick("shared gate", [False, True]),
        "d_expert": draw.pick("width of an expert", [None, 6]), "dense_layers": draw.pick("dense", [(), (True, False)]),
    }  # fmt: skip


def language_config(draw: Draw) -> models.LanguageConfig:
    """A configuration. Layers are attention, latent attention, or layers with a state among those of attention."""
    sizes = common(draw)
    kind = draw.pick("kind of layers", ["attention", "attention", "latent", "delta"])
    width = 4 if kind == "latent" else draw.pick("rotary width", [None, 4])
    turn = rg.nn.Rotary(100.0, width, draw.pick("interleaved", [False, True]))
    scalings: list[rg.positions.Scaling] = [rg.positions.Linear(2.0), rg.positions.Yarn(4.0, 16), LLAMA3]
    scaled = rg.nn.Rotary(scaling=draw.pick("scaling", scalings))
    rotaries: list[dict[str, Any]] = [
        {}, {"rotary": turn}, {"rotary": scaled}, {"layer_rotary": (turn, None)}, {"layer_rotary": (turn, scaled)},
    ]  # fmt: skip
    bias = draw.pick("bias", [True, False])
    own: dict[str, Any] = {
        "kv_heads": draw.pick("kv_heads", [None, 1]),
        "qkv_bias": draw.pick("qkv bias", [None, True]), "output_bias": draw.pick("output bias", [None, True]),
        "qk_norm": draw.pick("qk norm", [False, True]), "qk_norm_span": draw.pick("qk norm span", ["head", "token"]),
        "output_gate": draw.pick("output gate", [False, False, True]),
    }  # fmt: skip
    if kind == "latent":
        own = {
            "latent": models.LatentSizes(6, 4, draw.pick("value width", [8, 4]), draw.pick("query latent", [None, 6]))
        }
    elif kind == "delta":
        delta = models.DeltaSizes(1, draw.pick("value heads", [2, 1]), 6, 4, draw.pick("convolution width", [4, 2]))
        own |= {"delta": delta, "delta_layers": draw.pick("delta layers", [(True, False), (False, True), (True,)])}
    return models.LanguageConfig(
        VOCABULARY, **sizes, **own, d_head=draw.pick("head width", [None, 8]),
        positions=160, **draw.pick("rotary", rotaries),
        arrangement=draw.pick("arrangement", ["pre", "post", "sandwich", "output"]),
        norm=draw.pick("norm", ["layer", "rms", "unit_rms"]),
        **draw.pick("feed-forward", [{}, {"gated": True}, experts(draw)]),
        bias=bias, sinks=draw.pick("sinks", [False, True]),
        windows=draw.pick("windows", [(), (4,), (3, None)]), scale=draw.pick("scale", [None, 0.3]),
        softcap=draw.pick("softcap", [None, 5.0]), final_softcap=draw.pick("final softcap", [None, 10.0]),
        embedding_scale=draw.pick("embedding scale", [1.0, 2.5]), tied=draw.pick("tied", [True, False]),
    )  # fmt: skip


def generation(draw: Draw, module: Any, items: Sequence[Item]) -> list[Rows]:
    """Logits by a cache: prompts of different lengths together, then token after token, rows in another order."""
    random = draw.random("prompts")
    prompts = [random.randint(1, len(x)) for (x,) in items]
    steps = min(len(x) - n for (x,), n in zip(items, prompts, strict=True))
    state, first = module.start_generation([x[:n] for (x,), n in zip(items, prompts, strict=True)])
    outputs = [[row] for row in state.step(first)]
    order = list(range(len(items)))
    if draw.pick("rows change order", [False, True]):
        random.shuffle(order)
        state.reorder(torch.tensor(order))
    for step in range(steps):
        token = torch.stack([items[row][0][prompts[row] + step] for row in order])[:, None]
        for row, logits in zip(order, state.step(token), strict=True):
            outputs[row].append(logits)
    return [Rows(list(range(n - 1, n + steps)), torch.stack(rows)) for n, rows in zip(prompts, outputs, strict=True)]


def pieces(draw: Draw, module: Any, items: Sequence[Item]) -> list[Rows]:
    """Logits by a cache, each sequence in pieces of several tokens: of the last token of each piece."""
    outputs = []
    for (x,) in items:
        state, _ = module.start_generation([x])
        counts = chunks(draw, len(x))
        ends = torch.tensor(counts).cumsum(0) - 1
        outputs.append(Rows(ends.tolist(), torch.cat([state.step(part[None]) for part in x.split(counts)])))
    return outputs


@family
def language(draw: Draw) -> Subject:
    config, lengths = language_config(draw), lengths_of(draw)
    plain = as_batch_of_one(forward)
    forms = {"alone": alone(plain)} | sequence_forms(draw, forward, lengths, gaps=True)
    forms |= {"generation": partial(generation, draw), "pieces": partial(pieces, draw)}
    return Subject(
        fresh(lambda: models.LanguageModel(config), draw), [(x,) for x in ids(draw, lengths)], plain, forms,
        frozenset({"generation", "pieces"}), compiles=frozenset({"alone", "right", "left", "holes"}), saves=True,
    )  # fmt: skip


@family
def recommender(draw: Draw) -> Subject:
    config, lengths = language_config(draw), lengths_of(draw)

    def call(module: Any, x: Any, mask: Tensor | None = None) -> Tensor:
        return module.next_item_logits(x, mask)

    def plain(module: Any, item: Item) -> Tensor:
        return module(item[0][None])[0, -1]

    forms = sequence_forms(draw, call, lengths, pooled=True, gaps=True)
    return Subject(
        fresh(lambda: models.Recommender(config), draw), [(x,) for x in ids(draw, lengths)], plain, forms, saves=True
    )


@family
def language_loss(draw: Draw) -> Subject:
    config, lengths = language_config(draw), lengths_of(draw)
    smoothing = draw.pick("smoothing", [0.0, 0.1])
    kind = draw.pick("model", [models.LanguageModel, models.Recommender])
    sampled = kind is models.Recommender and draw.pick("others", [False, True])
    others = tokens(draw, 9, VOCABULARY, name="others")

    def plain(module: Any, item: Item) -> Tensor:
        logits, after = module(item[0][None])[0], item[1]
        if sampled:  # of the item that follows and of the others, without the former among the latter
            own = logits.gather(1, after[:, None])
            theirs = logits[:, others].masked_fill(after[:, None] == others, -torch.inf)
            logits, after = torch.cat((own, theirs), 1), torch.zeros_like(after)
        logits = logits.log_softmax(-1)
        chosen, real = logits.gather(1, after[:, None])[:, 0], logits.isfinite()
        mean = logits.masked_fill(~real, 0).sum(-1) / real.sum(-1)
        return -((1 - smoothing) * chosen + smoothing * mean).sum()

    def packed(module: Any, items: Sequence[Item]) -> list[Tensor]:
        x, after = rg.pack([x for x, _ in items]), torch.cat([after for _, after in items])
        return [module.loss(x, after, smoothing=smoothing, **({"negatives": others} if sampled else {}))]

    items = list(zip(ids(draw, lengths), ids(draw, lengths, name="after"), strict=True))
    return Subject(fresh(lambda: kind(config), draw), items, plain, {"packed": packed}, total=True)


def pair_config(draw: Draw, kind: type = models.TransformerConfig, **others: Any) -> Any:
    sizes = common(draw)
    return kind(
        VOCABULARY, **sizes, decoder_layers=draw.pick("decoder layers", [None, 1]),
        d_head=draw.pick("head width", [None, 8]), scale=draw.pick("scale", [None, 1.0]),
        arrangement=draw.pick("arrangement", ["pre", "post"]), norm=draw.pick("norm", ["layer", "rms"]),
        gated=draw.pick("gated", [False, True]), bias=draw.pick("bias", [True, False]),
        output_scale=draw.pick("output scale", [1.0, 0.3]), tied=draw.pick("tied", [True, False]),
        logits_bias=draw.pick("logits bias", [False, True]), **others,
    )  # fmt: skip


def start_with(start: int, rows: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat((torch.tensor([start]), row[1:])) for row in rows]


def pair_forms(draw: Draw, items: Sequence[Item], kinds: Sequence[str], filler: str = "noise") -> dict[str, Form]:
    lengths, sources = [len(item[1]) for item in items], [len(item[0]) for item in items]

    def padded(layout: Any, module: Any, items: Sequence[Item]) -> list[Tensor]:
        own = right([len(target) for _, target in items])
        source, target = layout.fill([s for s, _ in items], filler), own.fill([t for _, t in items])
        return own.rows(module(source, target, layout.mask))

    def packed(module: Any, items: Sequence[Item]) -> list[Tensor]:
        return rg.unpack(module(rg.pack([s for s, _ in items]), rg.pack([t for _, t in items])))

    def listed(module: Any, items: Sequence[Item]) -> list[Tensor]:
        return list(module([s for s, _ in items], [t for _, t in items]))

    def stepwise(layout: Any, module: Any, items: Sequence[Item]) -> list[Rows]:
        if layout is None:
            state, first = module.start_generation([s for s, _ in items])
        else:
            state, first = module.start_generation(layout.fill([s for s, _ in items], filler), layout.mask)
        steps, outputs = min(lengths), []
        for step in range(steps):
            outputs.append(state.step(first if not step else torch.stack([t[step] for _, t in items])[:, None]))
        return [Rows(list(range(steps)), rows) for rows in torch.stack(outputs, 1)]

    at_once = padded_forms(draw, sources, kinds, padded, gaps=True)
    by_step = padded_forms(draw, sources, kinds, stepwise, gaps=True, simple=padded)
    forms = {f"source {kind}": form for kind, form in at_once.items()}
    forms |= {f"stepwise, source {kind}": form for kind, form in by_step.items()}
    return forms | {"packed": packed, "list": listed, "stepwise": partial(stepwise, None)}


@family
def translation(draw: Draw) -> Subject:
    kind = draw.pick("model", [models.Transformer, models.PointerTransformer])
    targets = draw.pick("target vocabulary", [None, 11]) if kind is models.Transformer else None
    position = draw.pick("position", ["sinusoidal", "halves", "learned", "relative"])
    window = draw.pick("window", [0, 0, 3])
    config = pair_config(
        draw, target_vocabulary=targets, position=position, positions=160, buckets=8, max_distance=16, window=window,
        embedding_scale=draw.pick("embedding scale", [None, 1.0]),
    )  # fmt: skip
    lengths = lengths_of(draw, name="targets")
    sources = [draw.random(f"source {n}").randint(1, 20) for n in range(len(lengths))]
    target = start_with(config.start, ids(draw, lengths, targets or VOCABULARY, "target"))
    items = list(zip(ids(draw, sources, name="source"), target, strict=True))
    plain = as_batch_of_one(forward)
    forms = {"alone": alone(plain)} | pair_forms(draw, items, ("right", "left", "holes"))
    return Subject(fresh(lambda: kind(config), draw), items, plain, forms, stepwise_names(forms), saves=True)


@family
def translation_loss(draw: Draw) -> Subject:
    kind = draw.pick("model", [models.Transformer, models.PointerTransformer])
    config, smoothing = pair_config(draw), draw.pick("smoothing", [0.0, 0.1])
    lengths = lengths_of(draw, name="targets")
    sources = [draw.random(f"source {n}").randint(1, 20) for n in range(len(lengths))]
    if kind is models.PointerTransformer:
        smoothing = 0.0  # it smooths what the vocabulary says, which the log-probabilities do not show

    def plain(module: Any, item: Item) -> Tensor:
        logits = module(item[0][None], item[1][None])[0].log_softmax(-1)
        chosen = logits.gather(1, item[2][:, None])[:, 0]
        return -((1 - smoothing) * chosen + smoothing * logits.mean(-1)).sum()

    def packed(module: Any, items: Sequence[Item]) -> list[Tensor]:
        source, target = rg.pack([item[0] for item in items]), rg.pack([item[1] for item in items])
        return [module.loss(source, target, torch.cat([item[2] for item in items]), smoothing=smoothing)]

    parts = ids(draw, sources, name="source"), start_with(1, ids(draw, lengths)), ids(draw, lengths, name="after")
    return Subject(
        fresh(lambda: kind(config), draw), list(zip(*parts, strict=True)), plain, {"packed": packed}, total=True
    )


@family
def whisper(draw: Draw) -> Subject:
    config = pair_config(draw, models.WhisperConfig, features=5, frames=90, positions=160)
    lengths = lengths_of(draw, name="targets")
    sources = [draw.random(f"source {n}").randint(1, 40) for n in range(len(lengths))]
    items = list(zip(hidden(draw, sources, 5, "source"), start_with(config.start, ids(draw, lengths)), strict=True))
    plain = as_batch_of_one(forward)
    forms = {"alone": alone(plain)} | pair_forms(
        draw, items, ("right",), draw.pick("filler", ["zeros", "noise", "nan"])
    )
    return Subject(fresh(lambda: models.Whisper(config), draw), items, plain, forms, stepwise_names(forms), saves=True)
