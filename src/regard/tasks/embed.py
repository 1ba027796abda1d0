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

from regard.data.batches import Ragged, in_order
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.splits import split
from regard.data.text import encode_texts
from regard.data.tokenizer import train_tokenizer
from regard.errors import BadRows
from regard.models.components import choose
from regard.models.text import POOLINGS, SentenceEmbedder
from regard.nn import Packed
from regard.progress import track
from regard.training import metrics
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.pretrained import encoder_config, load_encoder, processor_from_pretrained
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task, usable_rows


@dataclass(frozen=True)
class Embed(Task):
    """Of a batch of pairs, each text is to find its own other among all others, and the other way round."""

    name: ClassVar[str] = "embed"
    description: ClassVar[str] = "texts to vectors that tell which belong together"
    example: ClassVar[str] = "How old are you?\tWhat is your age?\nIt rains.\tThe weather is wet."
    columns: ClassVar[tuple[str, ...]] = ("text", "other")
    recipe: ClassVar[Recipe] = Recipe(
        steps=1000,
        tokens=4096,
        learning_rate=1e-3,
        warmup=100,
        ema=0.99,
        evaluate_every=100,
        save_every=100,
        patience=5,
    )

    text: str = option("", "column of the text: a name, or a number from 1 where there is no header")
    other: str = option("", "column of a text that belongs to it")
    pretrained: str = option(
        "", "begin with the encoder and tokenizer of this run (masked, classify) or checkpoint folder"
    )
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most")
    lower: bool = option(True, "the tokenizer makes all letters small")
    d_model: int = option(256, "width of the vectors")
    layers: int = option(3, "of the encoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    longest: int = option(256, "tokens of a text at most")
    cut: bool = option(False, "leave out the middle of texts that are too long")
    pooling: str = option("mean", "mean, max, first or attention")
    similarity_scale: float = option(20.0, "what likenesses are multiplied by, to choose among the others of a batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Pairs with a text in common, on either side, belong together; what links most of the rows is trained on."""
        group = dict(
            zip(rows, _group_names([[self.split_key(text) for text in row.values] for row in rows]), strict=True)
        )
        sizes = Counter(group.values())
        _, out = split([row for row in rows if 2 * sizes[group[row]] <= len(rows)], group.__getitem__, held_out, seed)
        chosen = set(out)
        return [row for row in rows if row not in chosen], out

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        if self.pretrained:
            return processor_from_pretrained(self.pretrained)
        return Processor(
            train_tokenizer((text for row in rows for text in row.values), self.vocabulary, lower=self.lower)
        )

    def model(self, processor: Processor) -> nn.Module:
        return SentenceEmbedder(encoder_config(processor, self, pooling=self.pooling))

    def load_pretrained(self, model: nn.Module) -> None:
        if self.pretrained:
            assert isinstance(model, SentenceEmbedder)
            model.encoder.load_state_dict(load_encoder(self.pretrained)[0].state_dict())

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> TextPairs:
        texts, kept = self._encoded(processor, rows, 0, bad)
        others, also = self._encoded(processor, [rows[n] for n in kept], 1, bad)
        places = [rows[kept[n]].place for n in also]
        return TextPairs([texts[n] for n in also], others, places)

    def _encoded(
        self, processor: Processor, rows: Sequence[Row], column: int, bad: BadRows
    ) -> tuple[list[np.ndarray], np.ndarray]:
        longest = self.longest if processor.config is None else min(self.longest, processor.config["positions"])
        return encode_texts(processor.require_tokenizer(), rows, column, bad, longest=longest, cut=self.cut)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        texts, others = model(batch.inputs).chunk(2)
        scores = self.similarity_scale * texts @ others.T
        for same in batch.targets:  # what is equal to one's own is not wrong
            scores = scores.masked_fill(same, -torch.inf)
        own = torch.arange(len(scores), device=scores.device)
        there = F.cross_entropy(scores, own, reduction="sum", label_smoothing=smoothing)
        back = F.cross_entropy(scores.T, own, reduction="sum", label_smoothing=smoothing)
        return (there + back) / 2

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """One row for every text and every other: with several right answers, finding one's own would be chance."""
        rows = usable_rows(self, processor, rows, bad)
        seen: tuple[set[bytes], set[bytes]] = (set(), set())
        found = []
        for row, *pair in zip(rows, *(self._encoded(processor, rows, n, BadRows())[0] for n in (0, 1)), strict=True):
            keys = [ids.tobytes() for ids in pair]
            if not any(key in known for key, known in zip(keys, seen, strict=True)):
                for key, known in zip(keys, seen, strict=True):
                    known.add(key)
                found.append(row)
        return found

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        return metrics.retrieval(embed_texts(model, items.texts), embed_texts(model, items.others))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        found = {}
        for name, analyzer, ngrams in (("words", "word", (1, 1)), ("letters", "char_wb", (2, 5))):
            tfidf = TfidfVectorizer(analyzer=analyzer, ngram_range=ngrams)
            tfidf.fit(text for row in train for text in row.values)
            texts, others = (tfidf.transform([row.values[n] for row in held_out]).astype(np.float32) for n in (0, 1))
            scores = torch.from_numpy((texts @ others.T).toarray())
            found[f"TF-IDF of {name}"] = metrics.retrieval(scores, torch.eye(len(scores)))
        return found

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """For each text, which of the other texts is nearest, and how near. The vectors are in `more`."""
        ids, kept = self._encoded(processor, rows, 0, bad)
        if not ids:
            return
        found = embed_texts(model, Ragged(ids))
        near = found @ found.T
        near.fill_diagonal_(-2)
        for n, row in enumerate(kept):
            best = int(near[n].argmax())
            output, score = (
                (rows[kept[best]].values[0], float(near[n, best])) if len(kept) > 1 else (rows[row].values[0], 1.0)
            )
            more = {"vector": found[n].tolist()}
            yield Prediction(rows[row].values[0], output, score, more, place=rows[row].place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model),)


class TextPairs:
    """Texts and their others; a batch holds all texts, then all others."""

    def __init__(self, texts: Sequence[np.ndarray], others: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.texts, self.others, self.places = Ragged(texts), Ragged(others), places
        self.sizes = self.texts.lengths + self.others.lengths
        self.kinds = [_content_ids(texts), _content_ids(others)]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        sides = self.texts.pack(chosen), self.others.pack(chosen)
        packed = Packed(torch.cat([side.values for side in sides]), sides[0].lengths + sides[1].lengths)
        own = np.eye(len(chosen), dtype=bool)
        same = [torch.from_numpy((kinds[chosen, None] == kinds[chosen]) & ~own) for kinds in self.kinds]
        return Batch(packed, tuple(same), len(packed.values), len(chosen))


def _group_names(pairs: Sequence[Sequence[str]]) -> list[str]:
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


def _content_ids(rows: Sequence[np.ndarray]) -> np.ndarray:
    """A number for each sequence, the same for equal ones."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], np.int64)


@torch.no_grad()
def embed_texts(model: nn.Module, texts: Ragged) -> Tensor:
    """Unit vectors (n, d_model)."""
    found, device = dict[int, Tensor](), next(model.parameters()).device
    for chosen in track(in_order(texts.lengths, budget=8192)):
        packed = texts.pack(chosen)
        embedded = model(packed.with_values(packed.values.to(device))).float().cpu()
        found |= dict(zip(chosen.tolist(), embedded, strict=True))
    return torch.stack([found[n] for n in range(len(texts))])
