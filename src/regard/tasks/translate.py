"""A sentence to its translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Beam, Packed
from regard.nn.generate import Strategy
from regard.tasks import metrics
from regard.tasks.batches import Ragged, in_order
from regard.tasks.data import TATOEBA, Row
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option
from regard.tasks.texts import too_long
from regard.tasks.tokens import BEGIN, END, MASK, PAD, encode, learn, special
from regard.tasks.trouble import Bad


@dataclass(frozen=True)
class Translate(Task):
    """The Transformer, with one vocabulary for both languages and one table for all embeddings."""

    name: ClassVar[str] = "translate"
    summary: ClassVar[str] = "a sentence to its translation"
    example: ClassVar[str] = "I am hungry.\tJ'ai faim.\nGo home.\tRentre chez toi."
    columns: ClassVar[tuple[str, ...]] = ("source", "target")
    data: ClassVar[str] = TATOEBA
    held: ClassVar[int] = 2000
    recipe: ClassVar[Recipe] = Recipe(
        steps=1200, tokens=4096, rate=2e-3, warmup=150, smoothing=0.1, ema=0.998, evaluate_every=250, save_every=250
    )

    source: str = option("", "column of the sentence: a name, or a number from 1 where there is no header")
    target: str = option("", "column of its translation")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most, for both languages")
    width: int = option(256, "of the hidden states")
    layers: int = option(3, "of the encoder, and of the decoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    longest: int = option(256, "tokens of a sentence at most")
    beam: int = option(4, "sentences that are followed at a time when translating")

    def learn(self, rows: Sequence[Row]) -> Kit:
        return Kit(learn((text for row in rows for text in row.values), self.vocabulary))

    def model(self, kit: Kit) -> nn.Module:
        tokenizer = kit.texts()
        return Transformer(
            TransformerConfig(
                vocabulary=tokenizer.get_vocab_size(),
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                hidden=4 * self.width,
                start=special(tokenizer, BEGIN),
                stop=special(tokenizer, END),
                never=tuple(special(tokenizer, name) for name in (PAD, BEGIN, MASK)),
                dropout=self.dropout,
            )
        )

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Pairs:
        sources, kept = self._sources(kit, rows, bad)
        begin, end = special(kit.texts(), BEGIN), special(kit.texts(), END)
        targets = [
            np.concatenate([[begin], ids, [end]]) for ids in encode(kit.texts(), [rows[n].values[1] for n in kept])
        ]
        good = []
        for n, (row, ids) in enumerate(zip(kept, targets, strict=True)):
            if len(ids) - 1 > self.longest:
                bad(too_long(rows[row].place, len(ids) - 1, self.longest))
            else:
                good.append(n)
        places = [rows[kept[n]].place for n in good]
        return Pairs([sources[n] for n in good], [targets[n] for n in good], places)

    def _sources(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> tuple[list[np.ndarray], list[int]]:
        """Ids of the sentences with the token for the end, and which rows they are of."""
        end, found, kept = special(kit.texts(), END), [], []
        for n, ids in enumerate(encode(kit.texts(), [row.values[0] for row in rows])):
            if len(ids) + 1 > self.longest:
                bad(too_long(rows[n].place, len(ids) + 1, self.longest))
            else:
                found.append(np.append(ids, end))
                kept.append(n)
        return found, kept

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, Transformer)
        source, before = batch.inputs
        return model.loss(source, before, batch.targets, smoothing=smoothing)

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        references = _references(rows)
        one = [Row("", (source,)) for source in references]
        outputs = {made.input: made.output for made in self.predict(model, kit, one, Bad(skip=True))}
        # a sentence that the model cannot take counts, as an empty translation
        return metrics.translation([outputs.get(source, "") for source in references], list(references.values()))

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        references = _references(held)
        return {"copy of the source": metrics.translation(list(references), list(references.values()))}

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        assert isinstance(model, Transformer)
        sources, kept = self._sources(kit, rows, bad)
        ragged = Ragged(sources)
        outputs, scores = [""] * len(kept), [0.0] * len(kept)
        device = next(model.parameters()).device
        strategy: Strategy | None = Beam(self.beam) if self.beam > 1 else None
        for chosen in in_order(ragged.lengths, budget=512) if len(kept) else ():
            packed = ragged.pack(chosen)
            packed = packed.holding(packed.values.to(device))
            limit = min(self.longest, 2 * max(packed.lengths) + 16)
            made = model.generate(packed, limit=limit, strategy=strategy)
            for n, ids, score in zip(chosen, made, sureness(model, packed, made), strict=True):
                outputs[n], scores[n] = kit.texts().decode(ids.tolist()), score
        for row, output, score in zip(kept, outputs, scores, strict=True):
            yield Prediction(rows[row].values[0], output, score)


class Pairs:
    """Sentences and translations; a translation has the tokens for begin and end around it."""

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.sources, self.places = Ragged(sources), places
        self.before, self.after = Ragged([ids[:-1] for ids in targets]), Ragged([ids[1:] for ids in targets])
        self.sizes = self.sources.lengths + self.before.lengths

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        source, before = self.sources.pack(chosen), self.before.pack(chosen)
        after = self.after.pack(chosen).values
        return Batch((source, before), after, len(source.values) + len(after), len(after))


@torch.no_grad()
def sureness(model: Transformer, source: Packed, targets: Sequence[Tensor]) -> list[float]:
    """The probability of each translation, token for token: the geometric mean, its end included."""
    start, stop = (
        torch.tensor([token], device=source.values.device) for token in (model.config.start, model.config.stop)
    )
    before = [torch.cat((start, ids)) for ids in targets]
    logits = model(source, Packed(torch.cat(before), tuple(map(len, before)))).values
    after = torch.cat([torch.cat((ids, stop)) for ids in targets])
    said = -F.cross_entropy(logits.float(), after, reduction="none")
    return [float(part.mean().exp()) for part in said.split([len(ids) for ids in before])]


def _references(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Every translation of each sentence, in order."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.values[0], []).append(row.values[1])
    return found
