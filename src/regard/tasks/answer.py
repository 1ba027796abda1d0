"""Extractive question answering: a question and a context to a span of the context, or no answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batches import Ragged, in_order
from regard.data.processor import Processor
from regard.data.readers import Row, file_format
from regard.data.squad import SquadExample, read_squad, read_table
from regard.data.text import too_long_message
from regard.data.tokenizer import BEGIN, END, special_id, train_tokenizer
from regard.errors import BadRows
from regard.models.text import QuestionAnswering
from regard.nn import Packed
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.pretrained import encoder_config, get_encoder, load_model, processor_from_pretrained
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

MIN_CONTEXT = 16  # context tokens that every window must have room for


@dataclass(frozen=True)
class Answer(Task):
    """An encoder over question and context, with a head that predicts the start and the end of the answer.

    A long context is split into overlapping windows. All windows of a question are in the same batch and share one
    softmax: the start probabilities sum to 1 over all of them. The first token represents "no answer".
    """

    name: ClassVar[str] = "answer"
    description: ClassVar[str] = "question answering: find the part of a text that answers a question"
    example: ClassVar[str] = "context,question,answer\nMarie Curie was born in Warsaw.,Where was she born?,Warsaw"
    columns: ClassVar[tuple[str, ...]] = ("context", "question", "answer")
    input_columns: ClassVar[tuple[str, ...]] = ("context", "question")
    splits_at_tabs: ClassVar[bool] = True
    viewer_text: ClassVar[str] = "Who sat on the mat?\tThe cat sat on the mat."
    recipe: ClassVar[Recipe] = Recipe(
        steps=1000,
        tokens=4096,
        learning_rate=1e-4,
        warmup=50,
        weight_decay=0.05,
        ema=0.99,
        evaluate_every=100,
        save_every=100,
        patience=5,
    )

    context: str = option("", "column of the context, for files with columns; not needed for SQuAD JSON")
    question: str = option("", "column of the question")
    answer: str = option("", "column of the answer: a part of the context, or empty if there is none")
    pretrained: str = option(
        "", "start from the encoder and tokenizer of this run (masked, embed) or checkpoint directory"
    )
    vocabulary: int = option(8000, "maximum size of the vocabulary")
    lower: bool = option(True, "lowercase the text")
    d_model: int = option(128, "width of the hidden states")
    layers: int = option(4, "encoder layers")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.1, "dropout probability")
    longest: int = option(384, "maximum number of tokens of the question and a window together")
    windows: bool = option(True, "split long contexts into windows")
    overlap: int = option(128, "tokens shared by consecutive windows")
    max_answer_length: int = option(30, "maximum number of tokens per answer")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        if file_format(Path(source)) == ".json":
            return list(read_squad(Path(source), bad))
        return list(read_table(source, {name: getattr(self, name) for name in self.columns}, bad))

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        if self.pretrained:
            return processor_from_pretrained(self.pretrained)
        texts = {text: None for row in rows for text in row.values[:2]}
        return Processor(train_tokenizer(texts, self.vocabulary, lower=self.lower))

    def model(self, processor: Processor) -> nn.Module:
        return QuestionAnswering(encoder_config(processor, self))

    def load_pretrained(self, model: nn.Module) -> None:
        if self.pretrained:
            assert isinstance(model, QuestionAnswering)
            before, _ = load_model(self.pretrained)
            model.encoder.load_state_dict(get_encoder(before, self.pretrained).state_dict())
            if isinstance(before, QuestionAnswering):
                model.ends.load_state_dict(before.ends.state_dict())

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> QuestionDataset:
        longest = self.longest
        if processor.config is not None:
            longest = min(longest, processor.config["positions"] - processor.config["first_position"])
        return QuestionDataset(processor, rows, bad, longest=longest, overlap=self.overlap, windows=self.windows)

    @property
    def supports_label_smoothing(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """Marginal log-likelihood: the probabilities of all correct spans are summed, over answers and windows."""
        ids, segments, allowed, parts = batch.inputs
        logits = model(ids, segments=segments).values.float().masked_fill(~allowed[:, None], -torch.inf)
        right = logits.masked_fill(~batch.targets, -torch.inf)
        total = torch.stack([part.logsumexp(0) for part in logits.split(parts)])
        return (total - torch.stack([part.logsumexp(0) for part in right.split(parts)])).sum() / 2

    def calibrate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Processor:
        """Choose the no-answer threshold with the best F1.

        If the log-odds of "no answer" against the best span exceed it, the prediction is "no answer".
        """
        best = self._find_answers(model, self.dataset(processor, rows, BadRows(skip=True)))
        references = [_references(each.example) for each in best]
        if all(references):
            return processor
        absences, outputs = [each.absence for each in best], [each.text for each in best]
        threshold = metrics.best_threshold(absences, outputs, references)
        return replace(processor, calibration={"threshold": threshold})

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        best = self._find_answers(model, self.dataset(processor, rows, BadRows()))
        return metrics.answers(
            [self._answer_text(processor, each) for each in best], [_references(row.values) for row in rows]
        )

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """Names and numbers of the context: the first, the most frequent, and the one with most words of the question
        around it (the sliding window of Richardson et al., as in the SQuAD paper)."""
        references = [_references(row.values) for row in held_out]
        results = {
            name: metrics.answers([answer(row.values[0], row.values[1]) for row in held_out], references)
            for name, answer in baselines.ANSWERERS.items()
        }
        if not all(references):
            results["no answer"] = metrics.answers([""] * len(held_out), references)
        return results

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        examples = [Row(row.place, example) for row in rows if (example := parse_input(row, bad)) is not None]
        for each in self._find_answers(model, self.dataset(processor, examples, bad)):
            answer_text, place = self._answer_text(processor, each), examples[each.number].place
            score = each.chance if answer_text else each.none
            more = {
                "start": each.start if answer_text else None,
                "best": each.text,
                "chance": each.chance,
                "none": each.none,
            }
            name = {"id": each.example.id} if each.example.id else {}
            yield Prediction(each.example.question, answer_text, score, name | more, place=place)

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        if file_format(Path(source)) == ".json":
            return read_squad(Path(source), bad, answers=False)
        inputs = ((row.place, *row.values) for row in super().read_inputs(source, bad))
        return (Row(place, SquadExample(context, question, (), place)) for place, context, question in inputs)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return () if processor.config is not None and processor.config["segments"] else (text_graph(model),)

    def _answer_text(self, processor: Processor, best: BestAnswer) -> str:
        return "" if best.absence > (processor.calibration or {}).get("threshold", math.inf) else best.text

    @torch.no_grad()
    def _find_answers(self, model: nn.Module, items: QuestionDataset) -> list[BestAnswer]:
        """Return the best answer to every question, over all windows of its context."""
        answers, device = dict[int, BestAnswer](), next(model.parameters()).device
        for chosen in track(in_order(items.sizes, budget=8192)) if len(items.sizes) else ():
            ids, segments, allowed, parts = items.batch(chosen, np.random.default_rng(0)).inputs
            ids, segments = (each.with_values(each.values.to(device)) for each in (ids, segments))
            logits = model(ids, segments=segments).values.float().cpu().masked_fill(~allowed[:, None], -torch.inf)
            chances = torch.cat([part.log_softmax(0) for part in logits.split(parts)])
            windows = iter(chances.split(ids.lengths))
            for n in chosen.tolist():
                answers[n] = best_answer(
                    items.questions[n], [next(windows) for _ in items.questions[n].windows], self.max_answer_length
                )
        return [answers[n] for n in range(len(items.sizes))]


class BestAnswer(NamedTuple):
    """The best answer to a question: text, start in the context, its probability and the one of no answer."""

    number: int  # index of the row
    example: SquadExample
    text: str
    start: int
    chance: float
    none: float

    @property
    def absence(self) -> float:
        """Log-odds of no answer against this one."""
        return math.log(max(self.none, 1e-30)) - math.log(max(self.chance, 1e-30))


class Window(NamedTuple):
    """Context tokens `first` to `stop` (exclusive), preceded by `before` tokens of the input."""

    first: int
    stop: int
    before: int


class EncodedQuestion(NamedTuple):
    """An encoded question. offsets (n, 2): start and end of each context token in the text, without spaces."""

    number: int  # index of the row
    example: SquadExample
    offsets: np.ndarray
    windows: list[Window]


class QuestionDataset:
    """Questions with the windows of their contexts; an item is a question with all of its windows."""

    def __init__(
        self, processor: Processor, rows: Sequence[Row], bad: BadRows, *, longest: int, overlap: int, windows: bool
    ) -> None:
        tokenizer = processor.require_tokenizer()
        tokenizer.encode_special_tokens = True
        begin, end = special_id(tokenizer, BEGIN, "[CLS]"), special_id(tokenizer, END, "[SEP]")
        texts = list(dict.fromkeys(text for row in rows for text in row.values[:2]))
        known = dict(zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True))
        offsets = {text: trim_offsets(text, known[text].offsets) for text in {row.values[0] for row in rows}}
        self.questions, pieces = list[EncodedQuestion](), list[np.ndarray]()
        for number, row in enumerate(rows):
            example = SquadExample(*row.values)
            question, context = known[example.question].ids, known[example.context].ids
            room = longest - len(question) - 3
            if room < min(MIN_CONTEXT, len(context)):
                bad.add(too_long_message(row.place, len(question) + MIN_CONTEXT + 3, longest))
                continue
            if len(context) > room and not windows:
                bad.add(
                    too_long_message(row.place, len(question) + len(context) + 3, longest, " split it with --windows,")
                )
                continue
            step = max(1, room - min(overlap, room // 2))
            firsts = range(0, max(1, len(context) - room + step), step)
            parts = [Window(first, min(first + room, len(context)), len(question) + 2) for first in firsts]
            self.questions.append(EncodedQuestion(number, example, offsets[example.context], parts))
            for first, stop, _ in parts:
                pieces.append(np.concatenate([[begin], question, [end], context[first:stop], [end]]))
        self.places: Sequence[str] = [rows[each.number].place for each in self.questions]
        self.ids = Ragged(pieces)
        self.edges = np.concatenate([[0], np.cumsum([len(each.windows) for each in self.questions], dtype=np.int64)])
        self.sizes = self.ids.edges[self.edges[1:]] - self.ids.edges[self.edges[:-1]]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        """Inputs: packed ids and segments; a mask (N,) of tokens at which an answer may start or end; tokens per
        question, over all its windows. Targets: a mask (N, 2) of correct starts and ends."""
        packed = self.ids.pack(np.concatenate([np.arange(self.edges[n], self.edges[n + 1]) for n in chosen]))
        segments, allowed = np.zeros(len(packed.values), np.int64), np.zeros(len(packed.values), bool)
        right, at = np.zeros((len(packed.values), 2), bool), 0
        for _, example, offsets, windows in (self.questions[n] for n in chosen):
            spans = [_answer_tokens(offsets, text, start) for text, start in example.answers]
            starts, unanswered = [], True
            for first, stop, before in windows:
                inside = slice(at + before, at + before + stop - first)
                segments[at + before : inside.stop + 1] = 1
                allowed[at], allowed[inside] = True, offsets[first:stop, 0] < offsets[first:stop, 1]  # not spaces
                for begin, end in spans:
                    if first <= begin and end < stop:
                        right[inside.start + begin - first, 0] = right[inside.start + end - first, 1] = True
                        unanswered = False
                starts.append(at)
                at = inside.stop + 1
            if unanswered:
                right[starts] = True
        inputs = packed, Packed(torch.from_numpy(segments), packed.lengths), torch.from_numpy(allowed)
        parts = tuple(self.sizes[chosen].tolist())
        return Batch((*inputs, parts), torch.from_numpy(right), len(packed.values), len(chosen))


def best_answer(question: EncodedQuestion, windows: Sequence[Tensor], max_answer_length: int) -> BestAnswer:
    """Return the span of at most `max_answer_length` tokens with the largest product of start and end probability.

    windows: log-probabilities (n, 2) of start and end, per window.
    """
    number, example, offsets, parts = question
    highest, first, last = -math.inf, 0, 0
    for part, chances in zip(parts, windows, strict=True):
        begins, ends = chances[part.before : part.before + part.stop - part.first].unbind(-1)
        long = min(max_answer_length, len(begins))
        after = torch.cat((ends, ends.new_full((long - 1,), -torch.inf))).unfold(0, long, 1)  # (n, long)
        score, where = (begins[:, None] + after).flatten().max(0)
        if float(score) > highest:
            highest, first = float(score), part.first + int(where) // long
            last = first + int(where) % long
    start, stop = int(offsets[first, 0]), int(offsets[last, 1])
    none = float(torch.stack([chances[0] for chances in windows]).logsumexp(0).sum())
    return BestAnswer(number, example, example.context[start:stop], start, math.exp(highest), math.exp(none))


def trim_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Start and end of each token in a text, (n, 2), without surrounding spaces."""
    trimmed = []
    for first, last in offsets:
        piece = text[first:last]
        trimmed.append((last - len(piece.lstrip()), first + len(piece.rstrip())) if piece.strip() else (first, first))
    return np.array(trimmed, np.int64).reshape(-1, 2)


def _answer_tokens(offsets: np.ndarray, text: str, start: int) -> tuple[int, int]:
    """Return the first and the last token that overlap the answer."""
    start, stop = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (len(offsets), len(offsets))


def _references(example: Sequence[Any]) -> list[str]:
    return [text for text, _ in example[2]]


def parse_input(row: Row, bad: BadRows) -> SquadExample | None:
    """Parse an input row: columns of a file, or one text of question, tab or newline, context."""
    if len(row.values) > 1:
        return SquadExample(*row.values)
    question, context = ([part.strip() for part in row.values[0].replace("\n", "\t", 1).split("\t", 1)] + [""])[:2]
    if not question or not context:
        bad.add(f"{row.place}: expected a question, a tab and its context; or pass the context with --context FILE")
        return None
    return SquadExample(context, question, (), "")
