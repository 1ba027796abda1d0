"""A translator small enough to be trained while one waits, on sentences whose word order is known in both languages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.lab.complexity import one_thread
from regard.models.translation import Transformer, TransformerConfig

ARTICLES = {"the": "le", "a": "un"}
COLOURS = {"black": "noir", "white": "blanc", "red": "rouge", "green": "vert", "blue": "bleu"}
THINGS = {"cat": "chat", "dog": "chien", "horse": "cheval", "train": "train", "book": "livre"}
VERBS = {"sees": "voit", "likes": "aime", "follows": "suit", "finds": "trouve"}
ENGLISH = [*ARTICLES, *COLOURS, *THINGS, *VERBS]
FRENCH = [*ARTICLES.values(), *COLOURS.values(), *THINGS.values(), *VERBS.values()]
FILLER, START, STOP, FIRST = 0, 1, 2, 3
SENTENCE = "the black cat follows a red train"


@dataclass(frozen=True)
class Pair:
    """A sentence, its translation, and for every word of the translation the place of the word it comes from."""

    source: list[str]
    target: list[str]
    comes_from: list[int]


def pair(source: list[str]) -> Pair:
    """The translation: French puts its colours behind the noun.

    >>> from regard.lab.toy_translator import pair
    >>> " ".join(pair("the black cat".split()).target)
    'le chat noir'
    """
    order = list(range(len(source)))
    for n, word in enumerate(source):
        if word in COLOURS:
            order[n], order[n + 1] = n + 1, n
    words = dict(zip(ENGLISH, FRENCH, strict=True))
    return Pair(source, [words[source[n]] for n in order], order)


def draw_pair(draw: random.Random) -> Pair:
    """A random sentence and its translation."""

    def phrase() -> list[str]:
        colour = [draw.choice(list(COLOURS))] if draw.random() < 0.7 else []
        return [draw.choice(list(ARTICLES)), *colour, draw.choice(list(THINGS))]

    return pair([*phrase(), draw.choice(list(VERBS)), *phrase()])


def ids(words: list[str], language: list[str]) -> list[int]:
    """The tokens of words, with the one that ends a sentence."""
    return [FIRST + language.index(word) for word in words] + [STOP]


def batch(pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Sources (B, K) and targets (B, N), filled up."""

    def filled(rows: list[list[int]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    return filled([ids(p.source, ENGLISH) for p in pairs]), filled([[START, *ids(p.target, FRENCH)] for p in pairs])


@lru_cache(maxsize=4)
def translator(seed: int = 0, steps: int = 200) -> Transformer:
    """A translator of one layer each side, trained for `steps` steps."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        size = FIRST + len(ENGLISH)
        model = Transformer(TransformerConfig(size, 48, 1, 2, 96, target_vocabulary=size, start=START, stop=STOP))
        learn = torch.optim.Adam(model.parameters(), lr=4e-3)
        for step in range(steps):
            for group in learn.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            source, target = batch([draw_pair(draw) for _ in range(64)])
            logits = model(source, target[:, :-1], source != FILLER)
            assert isinstance(logits, Tensor)
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=FILLER)
            learn.zero_grad()
            loss.backward()
            learn.step()
    return model.eval()


def cross_attention_weights(model: Transformer, source: Tensor, target: Tensor) -> Tensor:
    """The weights (B, H, N, K) with which the first layer of the decoder looks at the source."""
    kept: list[Tensor] = []
    cross: Any = model.decoder.layers[0].cross
    taken = cross.register_forward_pre_hook(lambda module, args: kept.extend(args[:2]))
    try:
        with torch.no_grad():
            model(source, target, source != FILLER)
    finally:
        taken.remove()
    x, encoded = kept
    q, k, _ = project_heads(cross, x, encoded)
    return cross.attend.weights(q, k)


def project_heads(layer: Any, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, N, D) that an attention layer makes of hidden states."""
    parts = layer.qkv.weight.split(layer.widths), layer.qkv.bias.split(layer.widths)
    made = [F.linear(hidden, weight, bias) for hidden, weight, bias in zip((x, source, source), *parts, strict=True)]
    q, k, v = (part.unflatten(-1, (-1, layer.d_head)).transpose(-3, -2) for part in made)
    return q, k, v
