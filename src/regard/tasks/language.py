"""Text, from left to right: what comes next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.language import LanguageConfig, LanguageModel
from regard.nn import Packed, Rotary, Sample
from regard.tasks import baselines
from regard.tasks.data import Row
from regard.tasks.graphs import Graph, text_graph
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option
from regard.tasks.texts import too_long
from regard.tasks.tokens import END, encode, learn, special
from regard.tasks.trouble import Bad, Trouble


@dataclass(frozen=True)
class Language(Task):
    """A model of the Llama kind, on windows of one stream of tokens; each line ends with a token for its end."""

    name: ClassVar[str] = "language"
    does: ClassVar[str] = "text goes on: a language model from left to right"
    example: ClassVar[str] = "Any text, a paragraph a line.\nThe next one."
    columns: ClassVar[tuple[str, ...]] = ("text",)
    shares_sequences: ClassVar[bool] = True
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, rate=2e-3, warmup=200, decay=0.1, ema=0.995, evaluate_every=250, save_every=250
    )

    text: str = option("", "column of the text, in files that have columns")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most")
    width: int = option(256, "of the hidden states")
    layers: int = option(4, "of the model")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    context: int = option(256, "tokens that the model sees at most")

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        """The last lines are held out: lines from between others would tell of their neighbours."""
        if held >= len(rows):
            raise Trouble(
                f"{held} lines are to be held out, but there are only {len(rows)}; give more data, a lower --held, "
                "or a file with --valid"
            )
        return list(rows[:-held]), list(rows[-held:])

    def learn(self, rows: Sequence[Row]) -> Kit:
        return Kit(learn((row.values[0] for row in rows), self.vocabulary))

    def model(self, kit: Kit) -> nn.Module:
        return LanguageModel(
            LanguageConfig(
                vocabulary=kit.texts().get_vocab_size(),
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                hidden=-(-8 * self.width // 24) * 8,  # gated, it has three matrices: 8/3 for 4, in whole vectors
                rotary=Rotary(),
                norm="rms",
                activation="silu",
                gated=True,
                bias=False,
                dropout=self.dropout,
            )
        )

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Windows:
        return Windows(_stream(kit, rows), self.context, self.context)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, LanguageModel)
        return model.loss(batch.inputs, batch.targets, smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        stream = _stream(kit, rows)
        windows = Windows(stream, self.context, max(1, self.context // 2))
        total, count, device = 0.0, 0, next(model.parameters()).device
        parts = np.array_split(np.arange(len(windows.sizes)), max(1, len(windows.sizes) * self.context // 4096))
        for chosen in track(parts):
            batch = windows.batch(chosen, np.random.default_rng(0))
            inputs = batch.inputs.holding(batch.inputs.values.to(device))
            losses = F.cross_entropy(model(inputs).values, batch.targets.to(device), reduction="none")
            fresh = windows.fresh(chosen).to(device)  # tokens that no window before has predicted
            total, count = total + float(losses[fresh].double().sum()), count + int(fresh.sum())
        return _perplexity(total / count, count, rows)

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        trigrams = baselines.Trigrams(_stream(kit, train).tokens, kit.texts().get_vocab_size())
        tokens = _stream(kit, held).tokens  # the first is the end of a line that is not there; trigrams see it twice
        perplexity = trigrams.perplexity(np.concatenate([tokens[:1], tokens]))
        return {"Kneser-Ney trigrams": _perplexity(float(np.log(perplexity)), len(tokens) - 1, held)}

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        assert isinstance(model, LanguageModel)
        end, device = special(kit.texts(), END), next(model.parameters()).device
        for row, ids in zip(track(rows), encode(kit.texts(), [row.values[0] for row in rows]), strict=True):
            prompt = torch.from_numpy(np.concatenate([[end], ids])).to(device)
            if len(prompt) >= self.context:
                bad(too_long(row.place, len(prompt), self.context - 1, option="context"))
                continue
            limit = min(64, self.context - len(prompt))
            made = model.generate([prompt], limit=limit, strategy=Sample(0.8, top_p=0.9, seed=1), stop=(end,))[0]
            with torch.no_grad():
                logits = model(torch.cat((prompt, made))[None])[0, len(prompt) - 1 : -1].float()
            said = -F.cross_entropy(logits, made, reduction="none") if len(made) else torch.zeros(1)
            output = kit.texts().decode(made.tolist())
            yield Prediction(row.values[0], output, float(said.mean().exp()), place=row.place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        return (text_graph(model, "logits"),)


class _Stream:
    """Tokens end to end, and where the rows they came from begin."""

    def __init__(self, tokens: np.ndarray, edges: np.ndarray, places: Sequence[str]) -> None:
        self.tokens, self.edges, self.places = tokens, edges, places


def _stream(kit: Kit, rows: Sequence[Row]) -> _Stream:
    """All rows end to end, the token for the end before the first and after each."""
    end = special(kit.texts(), END)
    parts = [np.append(ids, end) for ids in encode(kit.texts(), [row.values[0] for row in rows])]
    edges = np.cumsum([1, *map(len, parts)])[:-1]
    return _Stream(np.concatenate([[end], *parts]), edges, [row.place for row in rows])


class Windows:
    """Windows of a stream, `step` tokens apart; each token of one predicts the token behind it."""

    def __init__(self, stream: _Stream, context: int, step: int) -> None:
        self.tokens, self.step = stream.tokens, step
        last = max(1, len(self.tokens) - 1 - (context - step))
        self.starts = np.arange(0, last, step)
        self.sizes = np.minimum(context, len(self.tokens) - 1 - self.starts)
        row = np.maximum(np.searchsorted(stream.edges, self.starts, side="right") - 1, 0)
        self.places: Sequence[str] = [stream.places[n] for n in row]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        lengths = self.sizes[chosen]
        at = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(self.starts[chosen], lengths, strict=True)]
        )
        inputs, targets = torch.from_numpy(self.tokens[at]), torch.from_numpy(self.tokens[at + 1])
        return Batch(Packed(inputs, tuple(lengths.tolist())), targets, len(at), len(at))

    def fresh(self, chosen: np.ndarray) -> Tensor:
        """Which tokens of a batch the window before it did not predict already."""
        known = [0 if n == 0 else int(self.sizes[n - 1]) - self.step for n in chosen]
        lengths = self.sizes[chosen]
        return torch.cat([torch.arange(int(n)) >= seen for n, seen in zip(lengths, known, strict=True)])


def _perplexity(loss: float, tokens: int, rows: Sequence[Row]) -> Figures:
    """Of tokens; and of words, which does not depend on the tokenizer: ends of lines count as words."""
    words = sum(len(row.values[0].split()) + 1 for row in rows)
    return {"perplexity": float(np.exp(loss)), "word_perplexity": float(np.exp(loss * tokens / words)), "loss": loss}
