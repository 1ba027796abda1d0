"""Text classification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batches import in_order
from regard.data.labels import collect_classes, encode_labels
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.text import TextDataset, encode_texts
from regard.data.tokenizer import train_tokenizer
from regard.errors import BadRows, UserError
from regard.models.components import choose
from regard.models.text import POOLINGS, SequenceClassifier
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.pretrained import encoder_config, load_encoder, processor_from_pretrained
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task


@dataclass(frozen=True)
class Classify(Task):
    """A text encoder with a classification head on its pooled hidden states."""

    name: ClassVar[str] = "classify"
    description: ClassVar[str] = "text classification"
    example: ClassVar[str] = "text,label\na gorgeous film,positive\ndull from the first minute,negative"
    columns: ClassVar[tuple[str, ...]] = ("text", "label")
    recipe: ClassVar[Recipe] = Recipe(
        steps=600,
        tokens=4096,
        learning_rate=1e-3,
        warmup=60,
        weight_decay=0.1,
        ema=0.99,
        evaluate_every=50,
        save_every=100,
        patience=5,
    )

    text: str = option("", "column of the text: its name, or its number (from 1) in a file without a header")
    label: str = option("", "column of the class")
    pretrained: str = option(
        "", "start from the encoder and tokenizer of this run (masked, embed) or checkpoint directory"
    )
    vocabulary: int = option(8000, "maximum size of the vocabulary")
    lower: bool = option(True, "lowercase the text")
    d_model: int = option(128, "width of the hidden states")
    layers: int = option(2, "encoder layers")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.3, "dropout probability")
    longest: int = option(512, "maximum number of tokens per text")
    cut: bool = option(False, "shorten texts that are too long by removing their middle")
    pooling: str = option("mean", "how hidden states are pooled: mean, max, first or attention")

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        labels = collect_classes(rows)
        if len(labels) > max(2, len(rows) // 2):
            raise UserError(f"{rows[0].place}: {len(labels)} classes in {len(rows)} rows; is --label the right column?")
        if self.pretrained:
            processor = processor_from_pretrained(self.pretrained)
            return Processor(processor.tokenizer, labels, processor.config)
        return Processor(train_tokenizer((row.values[0] for row in rows), self.vocabulary, lower=self.lower), labels)

    def model(self, processor: Processor) -> nn.Module:
        return SequenceClassifier(encoder_config(processor, self, pooling=self.pooling, classes=len(processor.labels)))

    def load_pretrained(self, model: nn.Module) -> None:
        if self.pretrained:
            assert isinstance(model, SequenceClassifier)
            model.encoder.load_state_dict(load_encoder(self.pretrained)[0].state_dict())

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> ClassifiedTexts:
        good, targets = encode_labels(processor.labels, rows, bad)
        ids, kept = self._encode(processor, good, bad)
        return ClassifiedTexts(ids, [good[n].place for n in kept], targets[kept])

    def _encode(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> tuple[list[np.ndarray], np.ndarray]:
        longest = self.longest if processor.config is None else min(self.longest, processor.config["positions"])
        return encode_texts(processor.require_tokenizer(), rows, 0, bad, longest=longest, cut=self.cut)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        scores = _scores(model, items, len(processor.labels))
        targets = torch.from_numpy(items.targets)
        return {"loss": float(F.cross_entropy(scores.log(), targets))} | metrics.classification(scores, targets)

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        (train, ours), (held_out, theirs) = (
            encode_labels(processor.labels, rows, BadRows()) for rows in (train, held_out)
        )
        texts, held_out_texts = [row.values[0] for row in train], [row.values[0] for row in held_out]
        targets, held_out_targets = ours.tolist(), theirs.tolist()
        return {
            "most frequent class": baselines.most_frequent(targets, held_out_targets, len(processor.labels)),
            "TF-IDF + logistic regression": baselines.tfidf_regression(
                texts, targets, held_out_texts, held_out_targets, len(processor.labels)
            ),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        ids, kept = self._encode(processor, rows, bad)
        scores = _scores(model, ClassifiedTexts(ids, (), np.zeros(len(ids), np.int64)), len(processor.labels))
        for n, row in zip(kept, scores.tolist(), strict=True):
            best = int(np.argmax(row))
            more = dict(zip(processor.labels, row, strict=True))
            yield Prediction(rows[n].values[0], processor.labels[best], row[best], more, place=rows[n].place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model),)


class ClassifiedTexts(TextDataset):
    """Texts with their classes (n,)."""

    def __init__(self, ids: Sequence[np.ndarray], places: Sequence[str], targets: np.ndarray) -> None:
        super().__init__(ids, places)
        self.targets = targets

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed = self.ids.pack(chosen)
        return Batch(packed, torch.from_numpy(self.targets[chosen]), len(packed.values), len(chosen))


@torch.no_grad()
def _scores(model: nn.Module, items: ClassifiedTexts, classes: int) -> Tensor:
    """Probabilities (n, classes)."""
    scores = torch.zeros(len(items.sizes), classes)
    device = next(model.parameters()).device
    for chosen in track(in_order(items.sizes, budget=8192)):
        packed = items.ids.pack(chosen)
        scores[chosen] = model(packed.with_values(packed.values.to(device))).float().softmax(-1).cpu()
    return scores
