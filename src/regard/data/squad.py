"""Questions about texts, to rows: SQuAD's JSON, versions 1.1 and 2.0, or tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.readers import Row, read_rows, read_text
from regard.errors import BadRows, UserError, first_line
from regard.field_types import short_repr


class SquadExample(NamedTuple):
    """A question about a context. answers: each as (text, where it begins in the context); none if it has none."""

    context: str
    question: str
    answers: tuple[tuple[str, int], ...]
    id: str


def read_squad(path: Path, bad: BadRows, *, answers: bool = True) -> Iterator[Row]:
    """The questions of a file. An answer that does not stand where it says is bad; without `answers` none are read."""
    text = read_text(path)
    try:
        articles = json.loads(text)["data"]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: is no JSON ({error.msg} at {error.colno}); is it whole?") from error
    except (ValueError, RecursionError) as error:  # too many digits, or too deep
        raise UserError(f"{path}: is no JSON that can be used ({first_line(error)}); is it whole?") from error
    except (KeyError, TypeError):
        raise UserError(
            f'{path}: expected SQuAD\'s JSON, {{"data": [{{"paragraphs": [...]}}]}}, but it is other'
        ) from None
    found = False
    for place, record in _questions(str(path), articles, bad):
        try:
            asked = _parse_question(record, answers)
        except _InvalidQuestion as problem:
            bad.add(f"{place}: {problem}")
            continue
        found = True
        yield Row(place, asked)
    if not found:
        raise UserError(f"{path}: expected at least one question that can be used, but there is none")


def read_table(source: str, columns: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
    """The questions of a CSV, TSV or JSONL with columns, or of a dataset of the hub.

    An answer is a text, the first place of which in the context counts, or none, or what datasets of the hub have,
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
    """What is wrong with a question."""


def _questions(path: str, articles: Any, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every question with its place and its context."""
    for a, article in enumerate(articles if isinstance(articles, list) else ()):
        for p, paragraph in enumerate(_list(article, "paragraphs")):
            for q, record in enumerate(_list(paragraph, "qas")):
                place = f"{path}:data[{a}].paragraphs[{p}].qas[{q}]"
                if isinstance(record, dict):
                    yield place, {"context": paragraph.get("context"), **record}
                else:
                    bad.add(f"{place}: expected a question, but {type(record).__name__} came")


def _list(held: Any, name: str) -> list[Any]:
    """The list of this name in an object; none where there is none."""
    found = held.get(name) if isinstance(held, dict) else None
    return found if isinstance(found, list) else []


def _parse_question(record: dict[str, Any], answers: bool) -> SquadExample:
    for name in ("context", "question"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise _InvalidQuestion(f"expected a {name}, but it has {short_repr(record.get(name))}")
    if "id" not in record:
        raise _InvalidQuestion("expected an id, but it has none")
    context, found = record["context"], []
    listed = [] if record.get("is_impossible") or not answers else record.get("answers")
    if not isinstance(listed, list) or (answers and not listed and not record.get("is_impossible")):
        raise _InvalidQuestion("expected answers, or is_impossible, but it has neither")
    for answer in listed:
        try:
            text, start = answer["text"], int(answer["answer_start"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _InvalidQuestion(
                f"expected an answer with text and answer_start, but it is {short_repr(answer)}"
            ) from None
        found.append(_check_answer(context, text, start))
    return SquadExample(context, record["question"].strip(), tuple(dict.fromkeys(found)), str(record["id"]))


def _parse_answers(context: str, answer: str) -> tuple[tuple[str, int], ...]:
    if not answer:
        return ()
    if answer.startswith("{"):
        try:
            listed = json.loads(answer)
            pairs = zip(listed["text"], listed["answer_start"], strict=True)
            return tuple(dict.fromkeys(_check_answer(context, text, int(start)) for text, start in pairs))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            pass  # a text that begins with a brace
    return (_check_answer(context, answer, context.find(answer)),)


def _check_answer(context: str, text: Any, start: int) -> tuple[str, int]:
    if not isinstance(text, str) or not text.strip():
        raise _InvalidQuestion(f"expected the text of an answer, but it is {short_repr(text)}")
    if start < 0 or context[start : start + len(text)] != text:
        at = context.find(text)
        where = f"it stands at {at}, not {start}" if at >= 0 else "it does not stand there"
        raise _InvalidQuestion(f"the answer {text[:60]!r} is no part of the context: {where}")
    return text, start
