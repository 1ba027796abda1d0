"""A translator that trains in seconds, on generated sentences whose word alignment is known."""

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
    """A sentence, its translation, and for every word of the translation the position of its source word."""

    source: list[str]
    target: list[str]
    comes_from: list[int]


def pair(source: list[str]) -> Pair:
    """Translate a sentence; in French, colours follow the noun.

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
    """Draw a random sentence and its translation."""

    def phrase() -> list[str]:
        colour = [draw.choice(list(COLOURS))] if draw.random() < 0.7 else []
        return [draw.choice(list(ARTICLES)), *colour, draw.choice(list(THINGS))]

    return pair([*phrase(), draw.choice(list(VERBS)), *phrase()])


def ids(words: list[str], language: list[str]) -> list[int]:
    """Return the token ids of words, followed by the stop token."""
    return [FIRST + language.index(word) for word in words] + [STOP]


def batch(pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Return padded sources (B, K) and targets (B, N)."""

    def pad(rows: list[list[int]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    return pad([ids(p.source, ENGLISH) for p in pairs]), pad([[START, *ids(p.target, FRENCH)] for p in pairs])


@lru_cache(maxsize=4)
def translator(seed: int = 0, steps: int = 200) -> Transformer:
    """Train a translator with one encoder and one decoder layer for `steps` steps."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        size = FIRST + len(ENGLISH)
        model = Transformer(TransformerConfig(size, 48, 1, 2, 96, target_vocabulary=size, start=START, stop=STOP))
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            source, target = batch([draw_pair(draw) for _ in range(64)])
            logits = model(source, target[:, :-1], source != FILLER)
            assert isinstance(logits, Tensor)
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=FILLER)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def cross_attention_weights(model: Transformer, source: Tensor, target: Tensor) -> Tensor:
    """Return the cross-attention weights (B, H, N, K) of the first decoder layer."""
    inputs: list[Tensor] = []
    cross: Any = model.decoder.layers[0].cross
    hook = cross.register_forward_pre_hook(lambda module, args: inputs.extend(args[:2]))
    try:
        with torch.no_grad():
            model(source, target, source != FILLER)
    finally:
        hook.remove()
    x, encoded = inputs
    q, k, _ = project_heads(cross, x, encoded)
    return cross.attend.weights(q, k)


def project_heads(layer: Any, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values (B, H, N, D) that an attention layer computes from hidden states."""
    parts = layer.qkv.weight.split(layer.widths), layer.qkv.bias.split(layer.widths)
    projected = [
        F.linear(hidden, weight, bias) for hidden, weight, bias in zip((x, source, source), *parts, strict=True)
    ]
    q, k, v = (part.unflatten(-1, (-1, layer.d_head)).transpose(-3, -2) for part in projected)
    return q, k, v
