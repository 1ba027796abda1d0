"""Texts to vectors, so that texts which belong together are near each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.parts import choose
from regard.models.text import POOLINGS, SentenceEmbedder
from regard.nn import Packed
from regard.tasks import metrics
from regard.tasks.batches import Ragged, in_order
from regard.tasks.data import Row, split
from regard.tasks.graphs import Graph, text_graph
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option, usable
from regard.tasks.texts import encoded, encoder_config, pretrained, started
from regard.tasks.tokens import learn
from regard.tasks.trouble import Bad


@dataclass(frozen=True)
class Embed(Task):
    """Of a batch of pairs, each text is to find its own other among all others, and the other way round."""

    name: ClassVar[str] = "embed"
    does: ClassVar[str] = "texts to vectors that tell which belong together"
    example: ClassVar[str] = "How old are you?\tWhat is your age?\nIt rains.\tThe weather is wet."
    columns: ClassVar[tuple[str, ...]] = ("text", "other")
    recipe: ClassVar[Recipe] = Recipe(
        steps=1000, tokens=4096, rate=1e-3, warmup=100, ema=0.99, evaluate_every=100, save_every=100, patience=5
    )

    text: str = option("", "column of the text: a name, or a number from 1 where there is no header")
    other: str = option("", "column of a text that belongs to it")
    start: str = option("", "begin with the encoder and tokenizer of this run (masked, classify) or checkpoint folder")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most")
    lower: bool = option(True, "the tokenizer makes all letters small")
    width: int = option(256, "of the vectors")
    layers: int = option(3, "of the encoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    longest: int = option(256, "tokens of a text at most")
    cut: bool = option(False, "leave out the middle of texts that are too long")
    pooling: str = option("mean", "mean, max, first or attention")
    sharpness: float = option(20.0, "what likenesses are multiplied by, to choose among the others of a batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Pairs with a text in common, on either side, belong together; what links most of the rows is trained on."""
        group = dict(zip(rows, _linked([[self.seen(text) for text in row.values] for row in rows]), strict=True))
        sizes = Counter(group.values())
        _, out = split([row for row in rows if 2 * sizes[group[row]] <= len(rows)], group.__getitem__, held, seed)
        chosen = set(out)
        return [row for row in rows if row not in chosen], out

    def learn(self, rows: Sequence[Row]) -> Kit:
        if self.start:
            return started(self.start)
        return Kit(learn((text for row in rows for text in row.values), self.vocabulary, lower=self.lower))

    def model(self, kit: Kit) -> nn.Module:
        return SentenceEmbedder(encoder_config(kit, self, pooling=self.pooling))

    def begin(self, model: nn.Module) -> None:
        if self.start:
            assert isinstance(model, SentenceEmbedder)
            model.encoder.load_state_dict(pretrained(self.start)[0].state_dict())

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> TextPairs:
        texts, kept = self._encoded(kit, rows, 0, bad)
        others, also = self._encoded(kit, [rows[n] for n in kept], 1, bad)
        places = [rows[kept[n]].place for n in also]
        return TextPairs([texts[n] for n in also], others, places)

    def _encoded(self, kit: Kit, rows: Sequence[Row], column: int, bad: Bad) -> tuple[list[np.ndarray], np.ndarray]:
        longest = self.longest if kit.config is None else min(self.longest, kit.config["positions"])
        return encoded(kit.texts(), rows, column, bad, longest=longest, cut=self.cut)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        texts, others = model(batch.inputs).chunk(2)
        scores = self.sharpness * texts @ others.T
        for same in batch.targets:  # what is equal to one's own is not wrong
            scores = scores.masked_fill(same, -torch.inf)
        own = torch.arange(len(scores), device=scores.device)
        there = F.cross_entropy(scores, own, reduction="sum", label_smoothing=smoothing)
        back = F.cross_entropy(scores.T, own, reduction="sum", label_smoothing=smoothing)
        return (there + back) / 2

    def measured(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
        """One row for every text and every other: with several right answers, finding one's own would be chance."""
        rows = usable(self, kit, rows, bad)
        seen: tuple[set[bytes], set[bytes]] = (set(), set())
        found = []
        for row, *pair in zip(rows, *(self._encoded(kit, rows, n, Bad())[0] for n in (0, 1)), strict=True):
            keys = [ids.tobytes() for ids in pair]
            if not any(key in known for key, known in zip(keys, seen, strict=True)):
                for key, known in zip(keys, seen, strict=True):
                    known.add(key)
                found.append(row)
        return found

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        items = self.items(kit, rows, Bad())
        return metrics.retrieval(vectors(model, items.texts), vectors(model, items.others))

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        found = {}
        for name, analyzer, ngrams in (("words", "word", (1, 1)), ("letters", "char_wb", (2, 5))):
            tfidf = TfidfVectorizer(analyzer=analyzer, ngram_range=ngrams)
            tfidf.fit(text for row in train for text in row.values)
            texts, others = (tfidf.transform([row.values[n] for row in held]).astype(np.float32) for n in (0, 1))
            scores = torch.from_numpy((texts @ others.T).toarray())
            found[f"TF-IDF of {name}"] = metrics.retrieval(scores, torch.eye(len(scores)))
        return found

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        """For each text, which of the other texts is nearest, and how near. The vectors are in `more`."""
        ids, kept = self._encoded(kit, rows, 0, bad)
        if not ids:
            return
        found = vectors(model, Ragged(ids))
        near = found @ found.T
        near.fill_diagonal_(-2)
        for n, row in enumerate(kept):
            best = int(near[n].argmax())
            output, score = (
                (rows[kept[best]].values[0], float(near[n, best])) if len(kept) > 1 else (rows[row].values[0], 1.0)
            )
            more = {"vector": found[n].tolist()}
            yield Prediction(rows[row].values[0], output, score, more, place=rows[row].place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        return (text_graph(model),)


class TextPairs:
    """Texts and their others; a batch holds all texts, then all others."""

    def __init__(self, texts: Sequence[np.ndarray], others: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.texts, self.others, self.places = Ragged(texts), Ragged(others), places
        self.sizes = self.texts.lengths + self.others.lengths
        self.kinds = [_kinds(texts), _kinds(others)]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        sides = self.texts.pack(chosen), self.others.pack(chosen)
        packed = Packed(torch.cat([side.values for side in sides]), sides[0].lengths + sides[1].lengths)
        own = np.eye(len(chosen), dtype=bool)
        same = [torch.from_numpy((kinds[chosen, None] == kinds[chosen]) & ~own) for kinds in self.kinds]
        return Batch(packed, tuple(same), len(packed.values), len(chosen))


def _linked(pairs: Sequence[Sequence[str]]) -> list[str]:
    """A name for each pair, the same for pairs that share a text, or that others link: the first of all their texts."""
    above: dict[str, str] = {}

    def top(text: str) -> str:
        while above.setdefault(text, text) != text:
            above[text] = text = above[above[text]]  # halve the way for those who come after
        return text

    for one, other in pairs:
        first, last = sorted((top(one), top(other)))
        above[last] = first
    return [top(one) for one, _ in pairs]


def _kinds(rows: Sequence[np.ndarray]) -> np.ndarray:
    """A number for each sequence, the same for equal ones."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], np.int64)


@torch.no_grad()
def vectors(model: nn.Module, texts: Ragged) -> Tensor:
    """Unit vectors (n, width)."""
    found, device = dict[int, Tensor](), next(model.parameters()).device
    for chosen in track(in_order(texts.lengths, budget=8192)):
        packed = texts.pack(chosen)
        made = model(packed.holding(packed.values.to(device))).float().cpu()
        found |= dict(zip(chosen.tolist(), made, strict=True))
    return torch.stack([found[n] for n in range(len(texts))])
