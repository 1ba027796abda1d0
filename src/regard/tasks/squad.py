"""Questions about texts, to rows: SQuAD's JSON, versions 1.1 and 2.0, or tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from regard.field_types import quoted
from regard.tasks.data import Row, read, text_of
from regard.tasks.trouble import Bad, Trouble, first_line


class Asked(NamedTuple):
    """A question about a context. answers: each as (text, where it begins in the context); none if it has none."""

    context: str
    question: str
    answers: tuple[tuple[str, int], ...]
    id: str


def read_squad(path: Path, bad: Bad, *, answers: bool = True) -> Iterator[Row]:
    """The questions of a file. An answer that does not stand where it says is bad; without `answers` none are read."""
    text = text_of(path)
    try:
        articles = json.loads(text)["data"]
    except json.JSONDecodeError as error:
        raise Trouble(f"{path}:{error.lineno}: is no JSON ({error.msg} at {error.colno}); is it whole?") from error
    except (ValueError, RecursionError) as error:  # too many digits, or too deep
        raise Trouble(f"{path}: is no JSON that can be used ({first_line(error)}); is it whole?") from error
    except (KeyError, TypeError):
        raise Trouble(
            f'{path}: expected SQuAD\'s JSON, {{"data": [{{"paragraphs": [...]}}]}}, but it is other'
        ) from None
    found = False
    for place, said in _questions(str(path), articles, bad):
        try:
            asked = _asked(said, answers)
        except _Wrong as wrong:
            bad(f"{place}: {wrong}")
            continue
        found = True
        yield Row(place, asked)
    if not found:
        raise Trouble(f"{path}: expected at least one question that can be used, but there is none")


def read_table(source: str, columns: Mapping[str, str], bad: Bad) -> Iterator[Row]:
    """The questions of a CSV, TSV or JSONL with columns, or of a dataset of the hub.

    An answer is a text, the first place of which in the context counts, or none, or what datasets of the hub have,
    {"text": [...], "answer_start": [...]}.
    """
    for row in read(source, columns, bad, empty=frozenset({"answer"})):
        context, question, answer = row.values
        try:
            answers = _told(context, answer)
        except _Wrong as wrong:
            bad(f"{row.place}: {wrong}")
            continue
        yield Row(row.place, Asked(context, question, answers, row.place))


class _Wrong(Exception):
    """What is wrong with a question."""


def _questions(path: str, articles: Any, bad: Bad) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every question with its place and its context."""
    for a, article in enumerate(articles if isinstance(articles, list) else ()):
        for p, paragraph in enumerate(_list(article, "paragraphs")):
            for q, said in enumerate(_list(paragraph, "qas")):
                place = f"{path}:data[{a}].paragraphs[{p}].qas[{q}]"
                if isinstance(said, dict):
                    yield place, {"context": paragraph.get("context"), **said}
                else:
                    bad(f"{place}: expected a question, but {type(said).__name__} came")


def _list(held: Any, name: str) -> list[Any]:
    """The list of this name in an object; none where there is none."""
    found = held.get(name) if isinstance(held, dict) else None
    return found if isinstance(found, list) else []


def _asked(said: dict[str, Any], answers: bool) -> Asked:
    for name in ("context", "question"):
        if not isinstance(said.get(name), str) or not said[name].strip():
            raise _Wrong(f"expected a {name}, but it has {quoted(said.get(name))}")
    if "id" not in said:
        raise _Wrong("expected an id, but it has none")
    context, found = said["context"], []
    listed = [] if said.get("is_impossible") or not answers else said.get("answers")
    if not isinstance(listed, list) or (answers and not listed and not said.get("is_impossible")):
        raise _Wrong("expected answers, or is_impossible, but it has neither")
    for answer in listed:
        try:
            text, start = answer["text"], int(answer["answer_start"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _Wrong(f"expected an answer with text and answer_start, but it is {quoted(answer)}") from None
        found.append(_placed(context, text, start))
    return Asked(context, said["question"].strip(), tuple(dict.fromkeys(found)), str(said["id"]))


def _told(context: str, answer: str) -> tuple[tuple[str, int], ...]:
    if not answer:
        return ()
    if answer.startswith("{"):
        try:
            listed = json.loads(answer)
            pairs = zip(listed["text"], listed["answer_start"], strict=True)
            return tuple(dict.fromkeys(_placed(context, text, int(start)) for text, start in pairs))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            pass  # a text that begins with a brace
    return (_placed(context, answer, context.find(answer)),)


def _placed(context: str, text: Any, start: int) -> tuple[str, int]:
    if not isinstance(text, str) or not text.strip():
        raise _Wrong(f"expected the text of an answer, but it is {quoted(text)}")
    if start < 0 or context[start : start + len(text)] != text:
        at = context.find(text)
        where = f"it stands at {at}, not {start}" if at >= 0 else "it does not stand there"
        raise _Wrong(f"the answer {text[:60]!r} is no part of the context: {where}")
    return text, start
