"""Text encoders: classify texts and tokens, fill masks, answer questions, compare texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.labels import encode_labels
from regard.data.readers import Row, file_format
from regard.data.squad import SquadExample, read_squad, read_table
from regard.errors import BadRows, UserError
from regard.models.text import batches_by_length
from regard.nn import Packed
from regard.predictors.checkpoint import Checkpoint
from regard.predictors.predictor import Predictor
from regard.progress import track
from regard.tasks.answer import Answer, EncodedQuestion, Window, best_answer, parse_input, trim_offsets
from regard.training import metrics
from regard.training.task import Metrics, Prediction

if TYPE_CHECKING:
    from tokenizers import Encoding

MASKS = ("[MASK]", "<mask>")
BATCH_TOKENS = 4096


class TextPredictor(Predictor):
    """A predictor with a text encoder and its tokenizer. A tab separates the two parts of a pair of texts."""

    splits_at_tabs = True
    longest: int

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name, self.model, self.checkpoint = checkpoint.name, checkpoint.model, checkpoint
        self.tokenizer = checkpoint.tokenizer
        config = self.model.config
        self.longest = config.positions - getattr(config, "first_position", 0)

    def encode(self, rows: Sequence[Row], bad: BadRows) -> tuple[list[Encoding], list[int]]:
        """Encode the first values of rows, and return the indices of those that fit the model."""
        encodings, kept = [], []
        for n, row in enumerate(rows):
            first, tab, second = row.values[0].partition("\t")
            encoding = self.tokenizer.encode(first, second) if tab else self.tokenizer.encode(first)
            if len(encoding.ids) > self.longest:
                size = len(encoding.ids)
                bad.add(f"{row.place}: has {size} tokens, but the model takes at most {self.longest}; shorten it")
            elif not encoding.ids:
                bad.add(f"{row.place}: has no tokens; give at least one word")
            else:
                encodings.append(encoding)
                kept.append(n)
        return encodings, kept

    @torch.inference_mode()
    def outputs(self, encodings: Sequence[Encoding]) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each encoding and the output of the model for it, in batches of similar length."""
        batches = list(batches_by_length([len(each.ids) for each in encodings], BATCH_TOKENS))
        for chosen in track(batches):
            lengths = tuple(len(encodings[n].ids) for n in chosen)
            ids, types = (
                torch.tensor([value for n in chosen for value in getattr(encodings[n], name)])
                for name in ("ids", "type_ids")
            )
            most = self.model.config.segments
            if 0 in lengths or (most > 1 and int(types.max()) >= most):
                problem = (
                    "no tokens" if 0 in lengths else f"a token of type {types.max()}, but the model has {most} types"
                )
                raise UserError(f"{self.name}: the tokenizer gives a text {problem}")
            segments = Packed(types, lengths) if most > 1 else None
            output = self.model(Packed(ids, lengths), segments=segments)
            parts = output.values.split(lengths) if isinstance(output, Packed) else output
            yield from zip(chosen, (part.float() for part in parts), strict=True)

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        record.decode(self.tokenizer)


class Classifier(TextPredictor):
    """Gives each text a label, or several if the model was trained so."""

    kind: ClassVar[str] = "a text classifier"
    columns = ("text", "label")

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.labels = checkpoint.labels(self.model.config.classes)

    def scores(self, encodings: Sequence[Encoding]) -> Tensor:
        """Return the scores of the classes (n, classes)."""
        result = torch.zeros(len(encodings), len(self.labels))
        for n, logits in self.outputs(encodings):
            result[n] = self.checkpoint.class_scores(logits)
        return result

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        encodings, kept = self.encode(rows, bad)
        for n, scores in zip(kept, self.scores(encodings).tolist(), strict=True):
            best = int(np.argmax(scores))
            others = dict(sorted(zip(self.labels, scores, strict=True), key=lambda pair: -pair[1]))
            yield Prediction(rows[n].values[0], self.labels[best], scores[best], others, place=rows[n].place)

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure accuracy and F1. Labels are those of the model, or their numbers."""
        self.checkpoint.check_one_label(len(self.labels))
        numbers = {str(n): label for n, label in enumerate(self.labels)}
        named = [Row(row.place, (row.values[0], numbers.get(row.values[1], row.values[1]))) for row in rows]
        good, targets = encode_labels(self.labels, named, bad)
        encodings, kept = self.encode(good, bad)
        if not kept:
            raise UserError("there is no row to evaluate on")
        scores, right = self.scores(encodings), torch.from_numpy(targets[kept])
        loss = F.nll_loss(scores.clamp(min=1e-12).log(), right)
        return {"loss": float(loss)} | metrics.classification(scores, right) | {"rows": len(kept)}


class TokenLabels(TextPredictor):
    """Labels the words of a text, such as names."""

    kind: ClassVar[str] = "a token classifier"

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        labels = self.checkpoint.labels(self.model.config.classes)
        encodings, kept = self.encode(rows, bad)
        logits = dict(self.outputs(encodings))
        for n, row in enumerate(kept):
            text = rows[row].values[0]
            entities = _entities(text, encodings[n], logits[n].softmax(-1), labels)
            output = ", ".join(f"{each['text']} {each['label']}" for each in entities) or "nothing"
            score = min((each["score"] for each in entities), default=None)
            yield Prediction(text, output, score, {"entities": entities}, place=rows[row].place)


def _entities(text: str, encoding: Encoding, scores: Tensor, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the spans of words with a label other than O; a word has the label of its first token."""
    words: list[tuple[str, bool, float, int, int]] = []  # label, whether it begins a span, score, start, end
    previous = None
    for n, word in enumerate(encoding.word_ids):
        if word is None or encoding.special_tokens_mask[n]:
            previous = None
            continue
        start, stop = encoding.offsets[n]
        if word == previous:
            words[-1] = (*words[-1][:4], stop)
        else:
            best = int(scores[n].argmax())
            prefix, _, label = labels[best].rpartition("-")
            words.append((label, prefix in ("B", "S", "U"), float(scores[n, best]), start, stop))
        previous = word
    entities: list[dict[str, Any]] = []
    spans = np.cumsum([n == 0 or words[n][1] or words[n][0] != words[n - 1][0] for n in range(len(words))])
    for _, part in groupby(range(len(words)), key=lambda n: spans[n]):
        span = [words[n] for n in part]
        if span[0][0] not in ("O", ""):
            start, stop = span[0][3], span[-1][4]
            start += len(text[start:stop]) - len(text[start:stop].lstrip())
            score = min(word[2] for word in span)
            entities.append(
                {"text": text[start:stop], "label": span[0][0], "score": score, "start": start, "end": stop}
            )
    return entities


class MaskFiller(TextPredictor):
    """Predicts the masked words of a text."""

    kind: ClassVar[str] = "a masked language model"
    splits_at_tabs = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        names = (checkpoint.special_token("mask_token"), *MASKS)
        tokens = (name for name in names if name and self.tokenizer.token_to_id(name) is not None)
        self.mask = next(tokens, MASKS[0])
        self.viewer_text = f"The cat sat on the {self.mask}."

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        mask, good = self.tokenizer.token_to_id(self.mask), []
        for row in rows:
            text = row.values[0]
            for name in MASKS:
                text = text.replace(name, self.mask)
            if mask is not None and self.mask in text:
                good.append(Row(row.place, (text, row.values[0])))
            else:
                bad.add(f"{row.place}: expected {self.mask} in place of the words to predict, found none")
        encodings, kept = self.encode(good, bad)
        logits = dict(self.outputs(encodings))
        for n, at_row in enumerate(kept):
            ids = encodings[n].ids
            at = [position for position, token in enumerate(ids) if token == mask]
            scores, tokens = logits[n][at].softmax(-1).topk(5)
            filled = list(ids)
            for position, token in zip(at, tokens[:, 0].tolist(), strict=True):
                filled[position] = token
            words = [[self._word(token) for token in each] for each in tokens.tolist()]
            pairs = [list(zip(word, score, strict=True)) for word, score in zip(words, scores.tolist(), strict=True)]
            note = "; ".join(", ".join(f"{word} {score:.2f}" for word, score in each) for each in pairs)
            score = float(scores[:, 0].log().mean().exp())
            output = self.tokenizer.decode(filled)
            yield Prediction(good[at_row].values[1], output, score, {"words": pairs}, note, place=good[at_row].place)

    def _word(self, token: int) -> str:
        """Return the text of a token; that of a special token is its name."""
        return self.tokenizer.decode([token], skip_special_tokens=False).strip()


class Embedder(TextPredictor):
    """Compares texts by the cosine of their vectors."""

    kind: ClassVar[str] = "a text embedder"
    examines = "text"
    columns = ("text", "other")
    splits_at_tabs = False

    def encode(self, rows: Sequence[Row], bad: BadRows) -> tuple[list[Encoding], list[int]]:
        limit = (self.model.tokenizer.truncation or {}).get("max_length") if self.model.tokenizer else None
        self.longest = limit or self.longest
        return super().encode(rows, bad)

    def vectors(self, encodings: Sequence[Encoding]) -> Tensor:
        """Return unit vectors (n, d_model)."""
        outputs = dict(self.outputs(encodings))
        return F.normalize(torch.stack([outputs[n] for n in range(len(outputs))]), dim=-1)

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        """Yield the most similar other text and the similarity; `more` has the vector and all similarities."""
        encodings, kept = self.encode(rows, bad)
        if len(kept) < 2:
            raise UserError(f'{self.name}: compares texts; give at least two: regard predict MODEL "one" "other"')
        vectors = self.vectors(encodings)
        similarities = vectors @ vectors.T
        for n, row in enumerate(kept):
            others = similarities[n].clone()
            others[n] = -2
            best = int(others.argmax())
            more = {"vector": vectors[n].tolist(), "similarities": similarities[n].tolist()}
            output, score = rows[kept[best]].values[0], float(similarities[n, best])
            yield Prediction(rows[row].values[0], output, score, more, place=rows[row].place)

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure how well the partner of each text is found among all."""
        pairs = [[Row(row.place, (text,)) for text in row.values] for row in rows]
        sides, kept = zip(*(self.encode([pair[side] for pair in pairs], bad) for side in (0, 1)), strict=True)
        both = sorted({*kept[0]} & {*kept[1]})
        if len(both) < 2:
            raise UserError("there are fewer than two pairs to evaluate on")
        vectors = [
            self.vectors([side[rows_of.index(n)] for n in both]) for side, rows_of in zip(sides, kept, strict=True)
        ]
        return metrics.retrieval(*vectors) | {"rows": len(both)}


class QuestionAnswerer(TextPredictor):
    """Finds the answer to a question in a context."""

    kind: ClassVar[str] = "a question answering model"
    columns = Answer.columns
    input_columns = Answer.input_columns
    viewer_text = Answer.viewer_text
    max_answer_length = 30

    def read(self, source: str, bad: BadRows) -> list[Row]:
        if file_format(Path(source)) == ".json":
            return list(read_squad(Path(source), bad))
        return list(read_table(source, dict.fromkeys(self.columns, ""), bad))

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        if file_format(Path(source)) == ".json":
            return read_squad(Path(source), bad, answers=False)
        inputs = ((row.place, *row.values) for row in super().read_inputs(source, bad))
        return (Row(place, SquadExample(context, question, (), place)) for place, context, question in inputs)

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        for row in track(rows):
            example = parse_input(row, bad)
            if example is None or (windows := self._windows(example, row.place, bad)) is None:
                continue
            best = self._best(example, windows)
            more = {"start": best.start, "none": best.none} | ({"id": example.id} if example.id else {})
            yield Prediction(example.question, best.text, best.chance, more, place=row.place)

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure exact match and F1 as SQuAD does."""
        outputs, references = [], []
        for row in track(rows):
            example = SquadExample(*row.values)
            if (windows := self._windows(example, row.place, bad)) is not None:
                outputs.append(self._best(example, windows).text)
                references.append([text for text, _ in example.answers])
        if not outputs:
            raise UserError("there is no question to evaluate on")
        return metrics.answers(outputs, references) | {"rows": len(outputs)}

    def _windows(self, example: SquadExample, place: str, bad: BadRows) -> list[Encoding] | None:
        """Encode question and context, in overlapping windows if the context is long."""
        question = len(self.tokenizer.encode(example.question, "").ids)
        longest = min(self.longest, 384)
        if question + 16 > longest:
            bad.add(
                f"{place}: the question has {question} tokens, but the model takes at most {longest - 16}; shorten it"
            )
            return None
        self.tokenizer.enable_truncation(longest, stride=min(128, (longest - question) // 2), strategy="only_second")
        try:
            first = self.tokenizer.encode(example.question, example.context)
        finally:
            self.tokenizer.no_truncation()
        windows = [first, *first.overflowing]
        if not all(1 in window.sequence_ids for window in windows):
            bad.add(f"{place}: the context has no tokens; give at least one word")
            return None
        return windows

    def _best(self, example: SquadExample, encodings: Sequence[Encoding]) -> Any:
        outputs, offsets, parts, chances = (
            dict(self.outputs(encodings)),
            list[list[int]](),
            list[Window](),
            list[Tensor](),
        )
        for n, encoding in enumerate(encodings):
            at = [position for position, part in enumerate(encoding.sequence_ids) if part == 1]
            inside = trim_offsets(example.context, [encoding.offsets[position] for position in at])
            parts.append(Window(len(offsets), len(offsets) + len(at), at[0]))
            offsets += inside.tolist()
            allowed = torch.zeros(len(encoding.ids), dtype=torch.bool)
            allowed[0] = True
            allowed[at] = torch.from_numpy(inside[:, 0] < inside[:, 1])
            chances.append(outputs[n].masked_fill(~allowed[:, None], -torch.inf))
        shares = torch.cat(chances).log_softmax(0).split([len(each) for each in chances])
        return best_answer(EncodedQuestion(0, example, np.array(offsets), parts), shares, self.max_answer_length)
