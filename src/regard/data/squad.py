"""Question answering data: JSON files of SQuAD 1.1 and 2.0, and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.readers import Row, read_rows, read_text
from regard.errors import BadRows, UserError, first_line
from regard.field_types import short_repr


class SquadExample(NamedTuple):
    """A question about a context. answers: pairs (text, start in the context); empty if there is no answer."""

    context: str
    question: str
    answers: tuple[tuple[str, int], ...]
    id: str


def read_squad(path: Path, bad: BadRows, *, answers: bool = True) -> Iterator[Row]:
    """Read the questions of a SQuAD file; answers not found at their position are bad. answers=False ignores them."""
    text = read_text(path)
    try:
        articles = json.loads(text)["data"]
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg} at column {error.colno}); is it complete?"
        ) from error
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise UserError(f"{path}: unusable JSON ({first_line(error)}); is it complete?") from error
    except (KeyError, TypeError):
        raise UserError(f'{path}: expected the JSON of SQuAD, {{"data": [{{"paragraphs": [...]}}]}}') from None
    empty = True
    for place, record in _questions(str(path), articles, bad):
        try:
            example = _parse_question(record, answers)
        except _InvalidQuestion as problem:
            bad.add(f"{place}: {problem}")
            continue
        empty = False
        yield Row(place, example)
    if empty:
        raise UserError(f"{path}: no question can be used")


def read_table(source: str, columns: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
    """Read the questions of a CSV, TSV or JSONL file with columns, or of a hub dataset.

    An answer is a text (its first occurrence in the context is used), empty, or an object as in hub datasets,
    {"text": [...], "answer_start": [...]}.
    """
    for row in read_rows(source, columns, bad, empty=frozenset({"answer"})):
        context, question, answer = row.values
        try:
            answers = _parse_answers(context, answer)
        except _InvalidQuestion as problem:
            bad.add(f"{row.place}: {problem}")
            continue
        yield Row(row.place, SquadExample(context, question, answers, row.place))


class _InvalidQuestion(Exception):
    """A defect of a question."""


def _questions(path: str, articles: Any, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every question with its place and its context."""
    for a, article in enumerate(articles if isinstance(articles, list) else ()):
        for p, paragraph in enumerate(_list(article, "paragraphs")):
            for q, record in enumerate(_list(paragraph, "qas")):
                place = f"{path}:data[{a}].paragraphs[{p}].qas[{q}]"
                if isinstance(record, dict):
                    yield place, {"context": paragraph.get("context"), **record}
                else:
                    bad.add(f"{place}: expected a question, got {type(record).__name__}")


def _list(record: Any, name: str) -> list[Any]:
    """Return the list `name` of an object; empty if there is none."""
    value = record.get(name) if isinstance(record, dict) else None
    return value if isinstance(value, list) else []


def _parse_question(record: dict[str, Any], answers: bool) -> SquadExample:
    for name in ("context", "question"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise _InvalidQuestion(f"expected a {name}, got {short_repr(record.get(name))}")
    if "id" not in record:
        raise _InvalidQuestion("expected an id, found none")
    context, checked = record["context"], []
    listed = [] if record.get("is_impossible") or not answers else record.get("answers")
    if not isinstance(listed, list) or (answers and not listed and not record.get("is_impossible")):
        raise _InvalidQuestion("expected answers or is_impossible, found neither")
    for answer in listed:
        try:
            text, start = answer["text"], int(answer["answer_start"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _InvalidQuestion(f"expected an answer with text and answer_start, got {short_repr(answer)}") from None
        checked.append(_check_answer(context, text, start))
    return SquadExample(context, record["question"].strip(), tuple(dict.fromkeys(checked)), str(record["id"]))


def _parse_answers(context: str, answer: str) -> tuple[tuple[str, int], ...]:
    if not answer:
        return ()
    if answer.startswith("{"):
        try:
            listed = json.loads(answer)
            pairs = zip(listed["text"], listed["answer_start"], strict=True)
            return tuple(dict.fromkeys(_check_answer(context, text, int(start)) for text, start in pairs))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            pass  # a plain text that starts with a brace
    return (_check_answer(context, answer, context.find(answer)),)


def _check_answer(context: str, text: Any, start: int) -> tuple[str, int]:
    if not isinstance(text, str) or not text.strip():
        raise _InvalidQuestion(f"expected the text of an answer, got {short_repr(text)}")
    if start < 0 or context[start : start + len(text)] != text:
        at = context.find(text)
        where = f"it is at {at}, not {start}" if at >= 0 else "not found"
        raise _InvalidQuestion(f"the answer {text[:60]!r} is not part of the context: {where}")
    return text, start
