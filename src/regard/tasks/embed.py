"""Text embeddings."""

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
    """A contrastive encoder of text pairs: each text is matched with its partner among all of the batch, both ways."""

    name: ClassVar[str] = "embed"
    description: ClassVar[str] = "text embeddings: vectors that are close for related texts"
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

    text: str = option("", "column of the text: its name, or its number (from 1) in a file without a header")
    other: str = option("", "column of a related text")
    pretrained: str = option(
        "", "start from the encoder and tokenizer of this run (masked, classify) or checkpoint directory"
    )
    vocabulary: int = option(8000, "maximum size of the vocabulary")
    lower: bool = option(True, "lowercase the text")
    d_model: int = option(256, "width of the embeddings")
    layers: int = option(3, "encoder layers")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.1, "dropout probability")
    longest: int = option(256, "maximum number of tokens per text")
    cut: bool = option(False, "shorten texts that are too long by removing their middle")
    pooling: str = option("mean", "how hidden states are pooled: mean, max, first or attention")
    similarity_scale: float = option(
        20.0, "factor on cosine similarities in the contrastive loss (inverse temperature)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Keep pairs that share a text on one side of the split; a group of over half of the rows is trained on."""
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
        texts, kept = self._encode(processor, rows, 0, bad)
        others, also = self._encode(processor, [rows[n] for n in kept], 1, bad)
        places = [rows[kept[n]].place for n in also]
        return TextPairs([texts[n] for n in also], others, places)

    def _encode(
        self, processor: Processor, rows: Sequence[Row], column: int, bad: BadRows
    ) -> tuple[list[np.ndarray], np.ndarray]:
        longest = self.longest if processor.config is None else min(self.longest, processor.config["positions"])
        return encode_texts(processor.require_tokenizer(), rows, column, bad, longest=longest, cut=self.cut)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        texts, others = model(batch.inputs).chunk(2)
        scores = self.similarity_scale * texts @ others.T
        for same in batch.targets:  # duplicates of the right text are not negatives
            scores = scores.masked_fill(same, -torch.inf)
        own = torch.arange(len(scores), device=scores.device)
        forward = F.cross_entropy(scores, own, reduction="sum", label_smoothing=smoothing)
        backward = F.cross_entropy(scores.T, own, reduction="sum", label_smoothing=smoothing)
        return (forward + backward) / 2

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """Keep one row per text on either side: with duplicates, the right one could not be identified."""
        rows = usable_rows(self, processor, rows, bad)
        seen: tuple[set[bytes], set[bytes]] = (set(), set())
        unique = []
        for row, *pair in zip(rows, *(self._encode(processor, rows, n, BadRows())[0] for n in (0, 1)), strict=True):
            keys = [ids.tobytes() for ids in pair]
            if not any(key in known for key, known in zip(keys, seen, strict=True)):
                for key, known in zip(keys, seen, strict=True):
                    known.add(key)
                unique.append(row)
        return unique

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        return metrics.retrieval(embed_texts(model, items.texts), embed_texts(model, items.others))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        results = {}
        for name, analyzer, ngrams in (("words", "word", (1, 1)), ("letters", "char_wb", (2, 5))):
            tfidf = TfidfVectorizer(analyzer=analyzer, ngram_range=ngrams)
            tfidf.fit(text for row in train for text in row.values)
            texts, others = (tfidf.transform([row.values[n] for row in held_out]).astype(np.float32) for n in (0, 1))
            scores = torch.from_numpy((texts @ others.T).toarray())
            results[f"TF-IDF of {name}"] = metrics.retrieval(scores, torch.eye(len(scores)))
        return results

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield the nearest other text and its similarity for each text; `more` holds the embedding."""
        ids, kept = self._encode(processor, rows, 0, bad)
        if not ids:
            return
        vectors = embed_texts(model, Ragged(ids))
        near = vectors @ vectors.T
        near.fill_diagonal_(-2)
        for n, row in enumerate(kept):
            best = int(near[n].argmax())
            output, score = (
                (rows[kept[best]].values[0], float(near[n, best])) if len(kept) > 1 else (rows[row].values[0], 1.0)
            )
            more = {"vector": vectors[n].tolist()}
            yield Prediction(rows[row].values[0], output, score, more, place=rows[row].place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model),)


class TextPairs:
    """Pairs of texts; a batch holds all first texts, then all second ones."""

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
    """Name the connected component of each pair, where pairs that share a text are connected (union-find)."""
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        while parent.setdefault(text, text) != text:
            parent[text] = text = parent[parent[text]]  # path halving
        return text

    for one, other in pairs:
        first, last = sorted((root(one), root(other)))
        parent[last] = first
    return [root(one) for one, _ in pairs]


def _content_ids(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Number the sequences; equal ones get the same number."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], np.int64)


@torch.no_grad()
def embed_texts(model: nn.Module, texts: Ragged) -> Tensor:
    """Embed texts as unit vectors (n, d_model)."""
    vectors, device = dict[int, Tensor](), next(model.parameters()).device
    for chosen in track(in_order(texts.lengths, budget=8192)):
        packed = texts.pack(chosen)
        embedded = model(packed.with_values(packed.values.to(device))).float().cpu()
        vectors |= dict(zip(chosen.tolist(), embedded, strict=True))
    return torch.stack([vectors[n] for n in range(len(texts))])
