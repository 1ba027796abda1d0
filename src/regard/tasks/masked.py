"""Text with words hidden: an encoder learns to fill them in, and others begin with it (`--start`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.text import MaskedLanguageModel
from regard.tasks.batches import in_order
from regard.tasks.data import Row
from regard.tasks.graphs import Graph, text_graph
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option
from regard.tasks.texts import TextItems, encoder_config, too_long
from regard.tasks.tokens import BEGIN, END, MASK, SPECIAL, encode, learn, special
from regard.tasks.trouble import Bad


@dataclass(frozen=True)
class Masked(Task):
    """BERT's objective: of the tokens chosen, most are hidden, some are others, some stay; all are to be told."""

    name: ClassVar[str] = "masked"
    does: ClassVar[str] = "hidden words of a text: a masked language model, to fine-tune others from"
    example: ClassVar[str] = "Any text, a paragraph a line.\nThe next one."
    columns: ClassVar[tuple[str, ...]] = ("text",)
    shown: ClassVar[str] = "The cat sat on the <mask>."
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, rate=1e-3, warmup=200, ema=0.995, evaluate_every=250, save_every=250
    )

    text: str = option("", "column of the text, in files that have columns")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most")
    lower: bool = option(True, "the tokenizer makes all letters small")
    width: int = option(256, "of the hidden states")
    layers: int = option(4, "of the encoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    longest: int = option(512, "tokens that the model takes; longer texts are taken in pieces")
    share: float = option(0.15, "of the tokens that are to be told")

    def learn(self, rows: Sequence[Row]) -> Kit:
        return Kit(learn((row.values[0] for row in rows), self.vocabulary, lower=self.lower))

    def model(self, kit: Kit) -> nn.Module:
        return MaskedLanguageModel(encoder_config(kit, self))

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> HiddenWords:
        begin, end = special(kit.texts(), BEGIN), special(kit.texts(), END)
        pieces, places, room = [], [], self.longest - 2
        for row, ids in zip(rows, encode(kit.texts(), [row.values[0] for row in rows]), strict=True):
            for start in range(0, len(ids), room):
                pieces.append(np.concatenate([[begin], ids[start : start + room], [end]]))
                places.append(row.place)
        return HiddenWords(pieces, places, kit, self.share)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        return F.cross_entropy(_told(model, batch), batch.targets, reduction="sum", label_smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        items, right, total, count = self.items(kit, rows, Bad()), 0, 0.0, 0
        for batch in items.all():
            logits = _told(model, batch).float()
            right += int((logits.argmax(-1) == batch.targets).sum())
            total, count = total + float(F.cross_entropy(logits, batch.targets, reduction="sum")), count + batch.count
        return {"accuracy": right / count, "perplexity": float(np.exp(total / count)), "loss": total / count}

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        """By how often each token comes in training."""
        size = kit.texts().get_vocab_size()
        often = np.bincount(self.items(kit, train, Bad()).ids.values, minlength=size) + 1.0
        often[: len(SPECIAL)] = 1e-9
        said, right, total, count = np.log(often / often.sum()), 0, 0.0, 0
        for batch in self.items(kit, held, Bad()).all():
            targets = batch.targets.numpy()
            right += int((targets == said.argmax()).sum())
            total, count = total - float(said[targets].sum()), count + batch.count
        figures = {"accuracy": right / count, "perplexity": float(np.exp(total / count)), "loss": total / count}
        return {"most frequent token": figures}

    @torch.no_grad()
    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        tokenizer, device = kit.texts(), next(model.parameters()).device
        begin, end, mask = (special(tokenizer, name) for name in (BEGIN, END, MASK))
        for row, ids in zip(track(rows), encode(tokenizer, [row.values[0] for row in rows], special=True), strict=True):
            at = np.flatnonzero(ids == mask)
            if not len(at):
                bad(f"{row.place}: expected {MASK} where words are to be filled in, but there is none")
                continue
            if len(ids) + 2 > self.longest:
                bad(too_long(row.place, len(ids) + 2, self.longest))
                continue
            inputs = torch.from_numpy(np.concatenate([[begin], ids, [end]])).to(device)
            chances = model(inputs[None])[0, at + 1].float().softmax(-1)
            best, tokens = chances.topk(5)
            filled = ids.copy()
            filled[at] = tokens[:, 0].cpu().numpy()
            words = [[tokenizer.decode([token]) for token in each] for each in tokens.tolist()]
            # pairs, since several tokens may be spelled alike
            more = [list(zip(word, chance, strict=True)) for word, chance in zip(words, best.tolist(), strict=True)]
            output = tokenizer.decode(filled.tolist())
            score = float(best[:, 0].log().mean().exp())
            yield Prediction(row.values[0], output, score, {"words": more}, place=row.place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        return (text_graph(model),)


class HiddenWords(TextItems):
    """Pieces of text; a batch hides some of their tokens."""

    def __init__(self, ids: Sequence[np.ndarray], places: Sequence[str], kit: Kit, share: float) -> None:
        super().__init__(ids, places)
        self.share, self.size, self.mask = share, kit.texts().get_vocab_size(), special(kit.texts(), MASK)

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed = self.ids.pack(chosen)
        ids = packed.values.numpy()
        words = np.flatnonzero(ids >= len(SPECIAL))
        count = max(1, round(self.share * len(words)))
        at = np.sort(random.choice(words, count, replace=False)) if len(words) else np.zeros(0, np.int64)
        targets, lot = ids[at].copy(), random.random(len(at))
        ids[at[lot < 0.8]] = self.mask
        other = at[(lot >= 0.8) & (lot < 0.9)]
        ids[other] = random.integers(len(SPECIAL), self.size, len(other))
        return Batch((packed, torch.from_numpy(at)), torch.from_numpy(targets), len(ids), len(at))

    def all(self) -> Iterator[Batch]:
        """Every piece once, always with the same tokens hidden."""
        for n, chosen in enumerate(track(in_order(self.sizes, budget=8192))):
            yield self.batch(chosen, np.random.default_rng(n))


def _told(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the tokens that are to be told, and of no other: they are few, and the vocabulary is large."""
    assert isinstance(model, MaskedLanguageModel)
    packed, at = batch.inputs
    return model.logits(model.encoder(packed).values[at])
