"""A question about a text to its answer: a part of the text, or that there is none."""

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

LEAST = 16  # tokens of a context that a window must have room for


@dataclass(frozen=True)
class Answer(Task):
    """An encoder reads question and context together; a head tells where the answer begins and ends.

    A context that is too long is read in windows that overlap. All of its windows are in one batch, and compete: the
    probabilities of where an answer begins sum to 1 over all of them. The first token stands for no answer.
    """

    name: ClassVar[str] = "answer"
    description: ClassVar[str] = "a question about a text to the part of the text that answers it"
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

    context: str = option("", "column of the text, in files that have columns; SQuAD's JSON needs none of these")
    question: str = option("", "column of the question")
    answer: str = option("", "column of the answer, a part of the text, or nothing")
    pretrained: str = option(
        "", "begin with the encoder and tokenizer of this run (masked, embed) or checkpoint folder"
    )
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most")
    lower: bool = option(True, "the tokenizer makes all letters small")
    d_model: int = option(128, "width of the hidden states")
    layers: int = option(4, "of the encoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    longest: int = option(384, "tokens of question and window together at most")
    windows: bool = option(True, "read long contexts in windows")
    overlap: int = option(128, "tokens that a window shares with the next")
    max_answer_length: int = option(30, "tokens of an answer at most")

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
        """What is right may stand in several windows, and several answers may be right: any of them will do."""
        ids, segments, allowed, parts = batch.inputs
        logits = model(ids, segments=segments).values.float().masked_fill(~allowed[:, None], -torch.inf)
        right = logits.masked_fill(~batch.targets, -torch.inf)
        every = torch.stack([part.logsumexp(0) for part in logits.split(parts)])
        return (every - torch.stack([part.logsumexp(0) for part in right.split(parts)])).sum() / 2

    def calibrate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Processor:
        """The threshold with the best F1: above it, what speaks for no answer outweighs the best one."""
        found = self._find_answers(model, self.dataset(processor, rows, BadRows(skip=True)))
        references = [_references(each.asked) for each in found]
        if all(references):
            return processor
        absences, outputs = [each.absence for each in found], [each.text for each in found]
        threshold = metrics.best_threshold(absences, outputs, references)
        return replace(processor, calibration={"threshold": threshold})

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        found = self._find_answers(model, self.dataset(processor, rows, BadRows()))
        return metrics.answers(
            [self._answer_text(processor, each) for each in found], [_references(row.values) for row in rows]
        )

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """Of the names and numbers of the context: the first, the most frequent, and that with most of the question's
        words around it (the sliding window of Richardson et al., as in SQuAD's paper)."""
        references = [_references(row.values) for row in held_out]
        found = {
            name: metrics.answers([means(row.values[0], row.values[1]) for row in held_out], references)
            for name, means in baselines.ANSWERERS.items()
        }
        if not all(references):
            found["no answer"] = metrics.answers([""] * len(held_out), references)
        return found

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        asked = [Row(row.place, question) for row in rows if (question := _parse_input(row, bad)) is not None]
        for each in self._find_answers(model, self.dataset(processor, asked, bad)):
            answer_text, place = self._answer_text(processor, each), asked[each.number].place
            score = each.chance if answer_text else each.none
            more = {
                "start": each.start if answer_text else None,
                "best": each.text,
                "chance": each.chance,
                "none": each.none,
            }
            name = {"id": each.asked.id} if each.asked.id else {}
            yield Prediction(each.asked.question, answer_text, score, name | more, place=place)

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        if file_format(Path(source)) == ".json":
            return read_squad(Path(source), bad, answers=False)
        asked = ((row.place, *row.values) for row in super().read_inputs(source, bad))
        return (Row(place, SquadExample(context, question, (), place)) for place, context, question in asked)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return () if processor.config is not None and processor.config["segments"] else (text_graph(model),)

    def _answer_text(self, processor: Processor, found: BestAnswer) -> str:
        return "" if found.absence > (processor.calibration or {}).get("threshold", math.inf) else found.text

    @torch.no_grad()
    def _find_answers(self, model: nn.Module, items: QuestionDataset) -> list[BestAnswer]:
        """The best answer to every question, over all windows of its context."""
        found, device = dict[int, BestAnswer](), next(model.parameters()).device
        for chosen in track(in_order(items.sizes, budget=8192)) if len(items.sizes) else ():
            ids, segments, allowed, parts = items.batch(chosen, np.random.default_rng(0)).inputs
            ids, segments = (each.with_values(each.values.to(device)) for each in (ids, segments))
            logits = model(ids, segments=segments).values.float().cpu().masked_fill(~allowed[:, None], -torch.inf)
            chances = torch.cat([part.log_softmax(0) for part in logits.split(parts)])
            windows = iter(chances.split(ids.lengths))
            for n in chosen.tolist():
                found[n] = best_answer(
                    items.questions[n], [next(windows) for _ in items.questions[n].windows], self.max_answer_length
                )
        return [found[n] for n in range(len(items.sizes))]


class BestAnswer(NamedTuple):
    """The best answer to a question: its text, where it begins, and how likely it is and that there is none."""

    number: int  # of the row
    asked: SquadExample
    text: str
    start: int
    chance: float
    none: float

    @property
    def absence(self) -> float:
        """How much more likely no answer is than this one, as a logarithm."""
        return math.log(max(self.none, 1e-30)) - math.log(max(self.chance, 1e-30))


class Window(NamedTuple):
    """A part of a context: its first token and the one behind its last, and how many tokens stand before it."""

    first: int
    stop: int
    before: int


class EncodedQuestion(NamedTuple):
    """A question made ready. offsets: where each token of its context begins and ends, (n, 2), spaces apart."""

    number: int  # of the row
    asked: SquadExample
    offsets: np.ndarray
    windows: list[Window]


class QuestionDataset:
    """Questions with the windows of their contexts; an item is a question, with all of its windows."""

    def __init__(
        self, processor: Processor, rows: Sequence[Row], bad: BadRows, *, longest: int, overlap: int, windows: bool
    ) -> None:
        tokenizer = processor.require_tokenizer()
        tokenizer.encode_special_tokens = True
        begin, end = special_id(tokenizer, BEGIN, "[CLS]"), special_id(tokenizer, END, "[SEP]")
        texts = list(dict.fromkeys(text for row in rows for text in row.values[:2]))
        known = dict(zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True))
        offsets = {text: _trimmed(text, known[text].offsets) for text in {row.values[0] for row in rows}}
        self.questions, pieces = list[EncodedQuestion](), list[np.ndarray]()
        for number, row in enumerate(rows):
            asked = SquadExample(*row.values)
            question, context = known[asked.question].ids, known[asked.context].ids
            room = longest - len(question) - 3
            if room < min(LEAST, len(context)):
                bad.add(too_long_message(row.place, len(question) + LEAST + 3, longest))
                continue
            if len(context) > room and not windows:
                bad.add(
                    too_long_message(row.place, len(question) + len(context) + 3, longest, " or read it in --windows,")
                )
                continue
            step = max(1, room - min(overlap, room // 2))
            firsts = range(0, max(1, len(context) - room + step), step)
            parts = [Window(first, min(first + room, len(context)), len(question) + 2) for first in firsts]
            self.questions.append(EncodedQuestion(number, asked, offsets[asked.context], parts))
            for first, stop, _ in parts:
                pieces.append(np.concatenate([[begin], question, [end], context[first:stop], [end]]))
        self.places: Sequence[str] = [rows[each.number].place for each in self.questions]
        self.ids = Ragged(pieces)
        self.edges = np.concatenate([[0], np.cumsum([len(each.windows) for each in self.questions], dtype=np.int64)])
        self.sizes = self.ids.edges[self.edges[1:]] - self.ids.edges[self.edges[:-1]]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        """Inputs: ids and segments, packed; which tokens may be ends of an answer (N,); how many tokens each question
        has in all its windows. Targets: which tokens are right as begin and as end, (N, 2)."""
        packed = self.ids.pack(np.concatenate([np.arange(self.edges[n], self.edges[n + 1]) for n in chosen]))
        segments, allowed = np.zeros(len(packed.values), np.int64), np.zeros(len(packed.values), bool)
        right, at = np.zeros((len(packed.values), 2), bool), 0
        for _, asked, offsets, windows in (self.questions[n] for n in chosen):
            spans = [_tokens(offsets, text, start) for text, start in asked.answers]
            starts, nowhere = [], True
            for first, stop, before in windows:
                inside = slice(at + before, at + before + stop - first)
                segments[at + before : inside.stop + 1] = 1
                allowed[at], allowed[inside] = True, offsets[first:stop, 0] < offsets[first:stop, 1]  # not spaces
                for begin, end in spans:
                    if first <= begin and end < stop:  # all of it is in this window
                        right[inside.start + begin - first, 0] = right[inside.start + end - first, 1] = True
                        nowhere = False
                starts.append(at)
                at = inside.stop + 1
            if nowhere:
                right[starts] = True
        inputs = packed, Packed(torch.from_numpy(segments), packed.lengths), torch.from_numpy(allowed)
        parts = tuple(self.sizes[chosen].tolist())
        return Batch((*inputs, parts), torch.from_numpy(right), len(packed.values), len(chosen))


def best_answer(question: EncodedQuestion, windows: Sequence[Tensor], max_answer_length: int) -> BestAnswer:
    """The span with the largest product of chances, at most `max_answer_length` tokens long, of log-chances (n, 2) by
    window."""
    number, asked, offsets, parts = question
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
    return BestAnswer(number, asked, asked.context[start:stop], start, math.exp(highest), math.exp(none))


def _trimmed(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Where tokens begin and end in a text (n, 2), without the spaces around them."""
    found = []
    for first, last in offsets:
        piece = text[first:last]
        found.append((last - len(piece.lstrip()), first + len(piece.rstrip())) if piece.strip() else (first, first))
    return np.array(found, np.int64).reshape(-1, 2)


def _tokens(offsets: np.ndarray, text: str, start: int) -> tuple[int, int]:
    """The first and the last token that have a letter of the answer."""
    start, stop = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (len(offsets), len(offsets))


def _references(asked: Sequence[Any]) -> list[str]:
    return [text for text, _ in asked[2]]


def _parse_input(row: Row, bad: BadRows) -> SquadExample | None:
    """What is asked: read from a file, or one text with a question, a tab or a new line, and the context."""
    if len(row.values) > 1:
        return SquadExample(*row.values)
    question, context = ([part.strip() for part in row.values[0].replace("\n", "\t", 1).split("\t", 1)] + [""])[:2]
    if not question or not context:
        bad.add(
            f"{row.place}: expected a question, a tab and the text that it is about; or give that with --context FILE"
        )
        return None
    return SquadExample(context, question, (), "")
