"""Masked language modelling, to pretrain the encoder of other tasks (`--pretrained`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batches import in_order
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.text import TextDataset, too_long_message
from regard.data.tokenizer import BEGIN, END, MASK, SPECIAL, encode, special_id, train_tokenizer
from regard.errors import BadRows
from regard.models.text import MaskedLanguageModel
from regard.progress import track
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.pretrained import encoder_config
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task, to_device


@dataclass(frozen=True)
class Masked(Task):
    """BERT's objective: predict chosen tokens, 80% masked, 10% replaced at random and 10% unchanged."""

    name: ClassVar[str] = "masked"
    description: ClassVar[str] = "masked language modelling: pretrain an encoder for other tasks"
    example: ClassVar[str] = "Any text, one paragraph per line.\nThe next one."
    columns: ClassVar[tuple[str, ...]] = ("text",)
    viewer_text: ClassVar[str] = "The cat sat on the <mask>."
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, learning_rate=1e-3, warmup=200, ema=0.995, evaluate_every=250, save_every=250
    )

    text: str = option("", "column of the text, for files with columns")
    vocabulary: int = option(8000, "maximum size of the vocabulary")
    lower: bool = option(True, "lowercase the text")
    d_model: int = option(256, "width of the hidden states")
    layers: int = option(4, "encoder layers")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.1, "dropout probability")
    longest: int = option(512, "maximum number of tokens per input; longer texts are split")
    mask_ratio: float = option(0.15, "fraction of the tokens to predict")

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        return Processor(train_tokenizer((row.values[0] for row in rows), self.vocabulary, lower=self.lower))

    def model(self, processor: Processor) -> nn.Module:
        return MaskedLanguageModel(encoder_config(processor, self))

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> MaskedTexts:
        begin, end = special_id(processor.require_tokenizer(), BEGIN), special_id(processor.require_tokenizer(), END)
        pieces, places, room = [], [], self.longest - 2
        for row, ids in zip(rows, encode(processor.require_tokenizer(), [row.values[0] for row in rows]), strict=True):
            for start in range(0, len(ids), room):
                pieces.append(np.concatenate([[begin], ids[start : start + room], [end]]))
                places.append(row.place)
        return MaskedTexts(pieces, places, processor, self.mask_ratio)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        return F.cross_entropy(_masked_logits(model, batch), batch.targets, reduction="sum", label_smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items, right, total, count = self.dataset(processor, rows, BadRows()), 0, 0.0, 0
        device = next(model.parameters()).device
        for batch in items.all():
            batch = to_device(batch, device)
            logits = _masked_logits(model, batch).float()
            right += int((logits.argmax(-1) == batch.targets).sum())
            total, count = total + float(F.cross_entropy(logits, batch.targets, reduction="sum")), count + batch.count
        return {"accuracy": right / count, "perplexity": float(np.exp(total / count)), "loss": total / count}

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """Predict tokens by their frequency in training."""
        size = processor.require_tokenizer().get_vocab_size()
        frequency = np.bincount(self.dataset(processor, train, BadRows()).ids.values, minlength=size) + 1.0
        frequency[: len(SPECIAL)] = 1e-9
        log_probabilities, right, total, count = np.log(frequency / frequency.sum()), 0, 0.0, 0
        for batch in self.dataset(processor, held_out, BadRows()).all():
            targets = batch.targets.numpy()
            right += int((targets == log_probabilities.argmax()).sum())
            total, count = total - float(log_probabilities[targets].sum()), count + batch.count
        figures = {"accuracy": right / count, "perplexity": float(np.exp(total / count)), "loss": total / count}
        return {"most frequent token": figures}

    @torch.no_grad()
    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        tokenizer, device = processor.require_tokenizer(), next(model.parameters()).device
        begin, end, mask = (special_id(tokenizer, name) for name in (BEGIN, END, MASK))
        for row, ids in zip(track(rows), encode(tokenizer, [row.values[0] for row in rows], special=True), strict=True):
            at = np.flatnonzero(ids == mask)
            if not len(at):
                bad.add(f"{row.place}: expected {MASK} in place of the words to predict, found none")
                continue
            if len(ids) + 2 > self.longest:
                bad.add(too_long_message(row.place, len(ids) + 2, self.longest))
                continue
            inputs = torch.from_numpy(np.concatenate([[begin], ids, [end]])).to(device)
            chances = model(inputs[None])[0, at + 1].float().softmax(-1)
            best, tokens = chances.topk(5)
            filled = ids.copy()
            filled[at] = tokens[:, 0].cpu().numpy()
            words = [[tokenizer.decode([token]) for token in each] for each in tokens.tolist()]
            # pairs instead of a dict: several tokens may have the same spelling
            more = [list(zip(word, chance, strict=True)) for word, chance in zip(words, best.tolist(), strict=True)]
            output = tokenizer.decode(filled.tolist())
            score = float(best[:, 0].log().mean().exp())
            yield Prediction(row.values[0], output, score, {"words": more}, place=row.place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model),)


class MaskedTexts(TextDataset):
    """Pieces of text; `batch` masks some of their tokens."""

    def __init__(
        self, ids: Sequence[np.ndarray], places: Sequence[str], processor: Processor, mask_ratio: float
    ) -> None:
        super().__init__(ids, places)
        self.mask_ratio, self.size, self.mask = (
            mask_ratio,
            processor.require_tokenizer().get_vocab_size(),
            special_id(processor.require_tokenizer(), MASK),
        )

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed = self.ids.pack(chosen)
        ids = packed.values.numpy()
        words = np.flatnonzero(ids >= len(SPECIAL))
        count = max(1, round(self.mask_ratio * len(words)))
        at = np.sort(random.choice(words, count, replace=False)) if len(words) else np.zeros(0, np.int64)
        targets, lot = ids[at].copy(), random.random(len(at))
        ids[at[lot < 0.8]] = self.mask
        other = at[(lot >= 0.8) & (lot < 0.9)]
        ids[other] = random.integers(len(SPECIAL), self.size, len(other))
        return Batch((packed, torch.from_numpy(at)), torch.from_numpy(targets), len(ids), len(at))

    def all(self) -> Iterator[Batch]:
        """Yield every piece once, always with the same tokens masked."""
        for n, chosen in enumerate(track(in_order(self.sizes, budget=8192))):
            yield self.batch(chosen, np.random.default_rng(n))


def _masked_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the chosen tokens only, to save memory: the vocabulary is large."""
    assert isinstance(model, MaskedLanguageModel)
    packed, at = batch.inputs
    return model.logits(model.encoder(packed).values[at])
