"""A text to its summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.models.copying import PointerTransformer
from regard.tasks import metrics
from regard.tasks.data import Row
from regard.tasks.graphs import Graph, pair_graphs
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option
from regard.tasks.tokens import END, learn
from regard.tasks.trouble import Bad
from regard.tasks.writing import Pairs, config_of, paired, sources_of, written

CUT = " or cut long texts with --cut,"


@dataclass(frozen=True)
class Summarise(Task):
    """An encoder-decoder that may copy words of the text, and tells how much it looked at each."""

    name: ClassVar[str] = "summarise"
    does: ClassVar[str] = "a text to its summary"
    example: ClassVar[str] = "A long text, all of it in one line.\tIts summary\nAnother text.\tAnother summary"
    columns: ClassVar[tuple[str, ...]] = ("text", "summary")
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, rate=2e-3, warmup=200, smoothing=0.0, ema=0.995, evaluate_every=250, save_every=250
    )

    text: str = option("", "column of the text: a name, or a number from 1 where there is no header")
    summary: str = option("", "column of its summary")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most, for both")
    width: int = option(192, "of the hidden states")
    layers: int = option(2, "of the encoder, and of the decoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    window: int = option(128, "tokens to each side that the encoder sees, so that long texts cost no more; 0 for all")
    longest: int = option(1024, "tokens of a text at most")
    cut: bool = option(False, "cut texts that are too long")
    limit: int = option(64, "tokens of a summary at most")
    beam: int = option(4, "summaries that are followed at a time when writing")

    def learn(self, rows: Sequence[Row]) -> Kit:
        return Kit(learn((text for row in rows for text in row.values), self.vocabulary))

    def model(self, kit: Kit) -> nn.Module:
        return PointerTransformer(config_of(kit, self, window=self.window))

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Pairs:
        return paired(kit, rows, bad, longest=self.longest, limit=self.limit, cut=self.cut, more=CUT)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, PointerTransformer)
        source, before = batch.inputs
        return model.loss(source, before, batch.targets, smoothing=smoothing)

    def measured(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
        """A summary that is longer than the model's may be is a reference all the same."""
        _, kept = sources_of(kit, rows, bad, longest=self.longest, cut=self.cut, more=CUT)
        return [rows[n] for n in kept]

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        assert isinstance(model, PointerTransformer)
        sources, _ = sources_of(kit, rows, Bad(), longest=self.longest, cut=self.cut, more=CUT)
        outputs = [""] * len(rows)
        for n, ids, _ in written(model, sources, beam=self.beam, limit=self.limit):
            outputs[n] = kit.texts().decode(ids.tolist())
        return metrics.summaries(outputs, [row.values[1] for row in rows])

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        """The beginning of the text: its first sentences, and as many words as summaries have in training."""
        texts, references = [row.values[0] for row in held], [row.values[1] for row in held]
        words = round(np.mean([len(row.values[1].split()) for row in train]))
        return {
            "lead-1": metrics.summaries([lead(text, 1) for text in texts], references),
            "lead-3": metrics.summaries([lead(text, 3) for text in texts], references),
            f"first {words} words": metrics.summaries([" ".join(text.split()[:words]) for text in texts], references),
        }

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        """The summary of each text. `more` has how much it looked at each token of the text, which sums to its own
        tokens: [token, how much] for all."""
        assert isinstance(model, PointerTransformer)
        sources, kept = sources_of(kit, rows, bad, longest=self.longest, cut=self.cut, more=CUT)
        made = {each.number: each for each in written(model, sources, beam=self.beam, limit=self.limit)}
        for n, row in enumerate(kept):
            text = rows[row].values[0]
            output = kit.texts().decode(made[n].ids.tolist())
            more = {"coverage": covered(model, kit, text, sources[n], made[n].ids)}
            yield Prediction(text, output, made[n].score, more, place=rows[row].place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        assert isinstance(model, PointerTransformer)
        return pair_graphs(model)


def lead(text: str, count: int) -> str:
    """The first sentences of a text.

    >>> lead("It is 3.5 m long. It floats! Does it sink?", 2)
    'It is 3.5 m long. It floats!'
    """
    return " ".join(re.split(r"(?<=[.!?])\s+(?=\W*[A-Z0-9])", text)[:count])


def covered(
    model: PointerTransformer, kit: Kit, text: str, source: np.ndarray, made: Tensor
) -> list[tuple[str, float]]:
    """The tokens of a text as they stand in it, and how much its summary looked at each; the last is the end."""
    start = made.new_tensor([model.config.start])
    looked = model.coverage(torch.from_numpy(source).to(made.device), torch.cat((start, made)))
    kit.texts().encode_special_tokens = True
    spans = kit.texts().encode(text, add_special_tokens=False).offsets[: len(source) - 1]
    return list(zip([text[first:last] for first, last in spans] + [END], looked.tolist(), strict=True))
