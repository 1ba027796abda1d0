"""Causal language modelling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.text import too_long_message
from regard.data.tokenizer import END, encode, special_id, train_tokenizer
from regard.errors import BadRows, UserError
from regard.models.language import LanguageConfig, LanguageModel
from regard.nn import Packed, Rotary, Sample
from regard.progress import track
from regard.training import baselines
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task


@dataclass(frozen=True)
class Language(Task):
    """A Llama-style model, trained on windows of one stream of tokens in which each line ends with an end token."""

    name: ClassVar[str] = "language"
    description: ClassVar[str] = "causal language modelling: continue a text"
    example: ClassVar[str] = "Any text, one paragraph per line.\nThe next one."
    columns: ClassVar[tuple[str, ...]] = ("text",)
    supports_sequence_parallel: ClassVar[bool] = True
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000,
        tokens=4096,
        learning_rate=2e-3,
        warmup=200,
        weight_decay=0.1,
        ema=0.995,
        evaluate_every=250,
        save_every=250,
    )

    text: str = option("", "column of the text, for files with columns")
    vocabulary: int = option(8000, "maximum size of the vocabulary")
    d_model: int = option(256, "width of the hidden states")
    layers: int = option(4, "layers of the model")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.1, "dropout probability")
    context: int = option(256, "context length in tokens")

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Hold out the last lines: lines drawn at random would share their context with training lines."""
        if held_out >= len(rows):
            raise UserError(
                f"cannot hold out {held_out} of {len(rows)} lines; use more data, a lower --held-out, or a file with "
                "--validation"
            )
        return list(rows[:-held_out]), list(rows[-held_out:])

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        return Processor(train_tokenizer((row.values[0] for row in rows), self.vocabulary))

    def model(self, processor: Processor) -> nn.Module:
        return LanguageModel(
            LanguageConfig(
                vocabulary=processor.require_tokenizer().get_vocab_size(),
                d_model=self.d_model,
                layers=self.layers,
                heads=self.heads,
                d_hidden=-(-8 * self.d_model // 24)
                * 8,  # a gated layer has three matrices: 8/3 instead of 4, a multiple of 8
                rotary=Rotary(),
                norm="rms",
                activation="silu",
                gated=True,
                bias=False,
                dropout=self.dropout,
            )
        )

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> Windows:
        return Windows(token_stream(processor, rows), self.context, self.context)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, LanguageModel)
        return model.loss(batch.inputs, batch.targets, smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        stream = token_stream(processor, rows)
        windows = Windows(stream, self.context, max(1, self.context // 2))
        total, count, device = 0.0, 0, next(model.parameters()).device
        parts = np.array_split(np.arange(len(windows.sizes)), max(1, len(windows.sizes) * self.context // 4096))
        for chosen in track(parts):
            batch = windows.batch(chosen, np.random.default_rng(0))
            inputs = batch.inputs.with_values(batch.inputs.values.to(device))
            losses = F.cross_entropy(model(inputs).values, batch.targets.to(device), reduction="none")
            fresh = windows.fresh(chosen).to(device)  # tokens that no earlier window has predicted
            total, count = total + float(losses[fresh].double().sum()), count + int(fresh.sum())
        return _perplexity(total / count, count, rows)

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        trigrams = baselines.Trigrams(
            token_stream(processor, train).tokens, processor.require_tokenizer().get_vocab_size()
        )
        # a stream starts with an end token, for its first line; trigrams need two
        tokens = token_stream(processor, held_out).tokens
        perplexity = trigrams.perplexity(np.concatenate([tokens[:1], tokens]))
        return {"Kneser-Ney trigrams": _perplexity(float(np.log(perplexity)), len(tokens) - 1, held_out)}

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        assert isinstance(model, LanguageModel)
        end, device = special_id(processor.require_tokenizer(), END), next(model.parameters()).device
        for row, ids in zip(
            track(rows), encode(processor.require_tokenizer(), [row.values[0] for row in rows]), strict=True
        ):
            prompt = torch.from_numpy(np.concatenate([[end], ids])).to(device)
            if len(prompt) >= self.context:
                bad.add(too_long_message(row.place, len(prompt), self.context - 1, option="context"))
                continue
            max_new_tokens = min(64, self.context - len(prompt))
            generated = model.generate(
                [prompt], max_new_tokens=max_new_tokens, strategy=Sample(0.8, top_p=0.9, seed=1), stop=(end,)
            )[0]
            with torch.no_grad():
                logits = model(torch.cat((prompt, generated))[None])[0, len(prompt) - 1 : -1].float()
            log_probabilities = (
                -F.cross_entropy(logits, generated, reduction="none") if len(generated) else torch.zeros(1)
            )
            output = processor.require_tokenizer().decode(generated.tolist())
            yield Prediction(row.values[0], output, float(log_probabilities.mean().exp()), place=row.place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model, "logits"),)


class _Stream:
    """Concatenated tokens of rows, and where each row starts."""

    def __init__(self, tokens: np.ndarray, edges: np.ndarray, places: Sequence[str]) -> None:
        self.tokens, self.edges, self.places = tokens, edges, places


def token_stream(processor: Processor, rows: Sequence[Row]) -> _Stream:
    """Concatenate all rows, with an end token before the first and after each."""
    end = special_id(processor.require_tokenizer(), END)
    parts = [np.append(ids, end) for ids in encode(processor.require_tokenizer(), [row.values[0] for row in rows])]
    edges = np.cumsum([1, *map(len, parts)])[:-1]
    return _Stream(np.concatenate([[end], *parts]), edges, [row.place for row in rows])


class Windows:
    """Windows of a stream, `step` tokens apart, in which every token predicts the next one."""

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
        """Mask of the tokens in a batch that the previous window did not predict."""
        known = [0 if n == 0 else int(self.sizes[n - 1]) - self.step for n in chosen]
        lengths = self.sizes[chosen]
        return torch.cat([torch.arange(int(n)) >= seen for n, seen in zip(lengths, known, strict=True)])


def _perplexity(loss: float, tokens: int, rows: Sequence[Row]) -> Metrics:
    """Perplexity per token, and per word, independent of the tokenizer; ends of lines count as words."""
    words = sum(len(row.values[0].split()) + 1 for row in rows)
    return {"perplexity": float(np.exp(loss)), "word_perplexity": float(np.exp(loss * tokens / words)), "loss": loss}
