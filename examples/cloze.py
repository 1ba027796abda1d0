"""Create fill-in-the-blank questions from articles of WikiText, as SQuAD JSON.

    python examples/cloze.py --out cloze --train wikitext2-train.raw.gz --validation wikitext2-valid.raw.gz \\
        --test wikitext2-test.raw.gz

writes cloze/train.json, valid.json and test.json, version 2.0. A question is a sentence in which a name or a number is
replaced by a blank. Its context is the paragraph without that sentence; the answer occurs elsewhere in the paragraph
and has to be inferred. With --keep the sentence stays in the context, and the answer only has to be located. One
question in four has a paragraph of another article as context, which does not contain the answer: it is unanswerable.
No article is in two files, because WikiText splits by article.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLANK = "_____"
NAME = re.compile(r"\b[A-Z][\w'-]+(?: [A-Z][\w'-]+)*|\b\d[\d,.]*\d\b")


class Question(NamedTuple):
    text: str
    context: str
    answer: str


def plain(text: str) -> str:
    """Undo the tokenization of WikiText."""
    text = re.sub(r" @(.)@ ", r"\1", f" {text.strip()} ")
    text = re.sub(r" ([,.;:!?)\]%]|'s|n't|'re|'ve)(?= )", r"\1", text)
    return re.sub(r"([(\[$£]) ", r"\1", text).strip()


def articles(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the paragraphs of 50 to 150 words of each article."""
    title, paragraphs = "", list[str]()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            if heading := re.fullmatch(r" = ([^=].*[^=]) = \n", line):
                if paragraphs:
                    yield title, paragraphs
                title, paragraphs = plain(heading.group(1)), []
            elif not line.startswith(" =") and "<unk>" not in line and 50 <= len(line.split()) <= 150:
                paragraphs.append(plain(line))
    if paragraphs:
        yield title, paragraphs


def questions(paragraph: str, most: int, keep: bool, chance: random.Random) -> Iterator[Question]:
    """Yield at most `most` questions, from sentences with a name or number that another sentence contains too."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z\"(])", paragraph)
    candidates = []
    for n, sentence in enumerate(sentences):
        rest = " ".join(sentences[:n] + sentences[n + 1 :])
        names = [
            match
            for match in NAME.finditer(sentence)
            if match.start() > 0  # the first word is always capitalised
            and sentence.count(match.group()) == 1
            and re.search(rf"\b{re.escape(match.group())}\b", rest)
        ]
        if 8 <= len(sentence.split()) <= 40 and names:
            match = chance.choice(names)
            text = sentence[: match.start()] + BLANK + sentence[match.end() :]
            candidates.append(Question(text, paragraph if keep else rest, match.group()))
    yield from chance.sample(candidates, min(most, len(candidates)))


def entry(number: str, question: Question, context: str) -> dict[str, Any]:
    """Return a SQuAD question; every occurrence of the answer is a right answer."""
    places = [match.start() for match in re.finditer(rf"\b{re.escape(question.answer)}\b", context)]
    return {
        "id": number,
        "question": question.text,
        "answers": [{"text": question.answer, "answer_start": start} for start in places],
        "is_impossible": not places,
    }


def write(source: Path, out: Path, options: argparse.Namespace, most: int | None = None) -> None:
    """Write all questions of a file, or a sample of `most` of them."""
    chance, read = random.Random(options.seed), list(articles(source))
    entries: list[tuple[str, dict[str, Any]]] = []
    for a, (title, paragraphs) in enumerate(read):
        for paragraph in paragraphs:
            for question in questions(paragraph, options.max_questions, options.keep, chance):
                context = question.context
                if chance.random() < 0.25:
                    other = chance.choice(read[(a + chance.randrange(1, len(read))) % len(read)][1])
                    if question.answer in other:
                        continue
                    context = other
                item = entry(f"{out.stem}-{len(entries)}", question, context)
                entries.append((title, {"context": context, "qas": [item]}))
    if most is not None:
        entries = [entries[n] for n in sorted(chance.sample(range(len(entries)), min(most, len(entries))))]
    data = [
        {"title": title, "paragraphs": [each for _, each in group]}
        for title, group in itertools.groupby(entries, key=lambda pair: pair[0])
    ]
    out.write_text(json.dumps({"version": "v2.0", "data": data}, ensure_ascii=False), encoding="utf-8")
    none = sum(each["qas"][0]["is_impossible"] for _, each in entries)
    print(f"{out}: {len(entries)} questions of {len(data)} articles, {none} without an answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("train", "validation", "test"):
        parser.add_argument(f"--{name}", required=True, type=Path, help="WikiText file, .gz")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--max-questions", type=int, default=2, help="most questions per paragraph")
    parser.add_argument("--held-out", type=int, default=500, help="most questions in valid.json and in test.json")
    parser.add_argument("--keep", action="store_true", help="leave the sentence of the question in the context")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    write(options.train, options.out / "train.json", options)
    write(options.validation, options.out / "valid.json", options, options.held_out)
    write(options.test, options.out / "test.json", options, options.held_out)


if __name__ == "__main__":
    main()
