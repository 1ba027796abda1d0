"""Questions with a blank, made of real text: articles of WikiText to SQuAD's JSON.

    python examples/cloze.py --out cloze --train wikitext2-train.raw.gz --validation wikitext2-valid.raw.gz \\
        --test wikitext2-test.raw.gz

writes cloze/train.json, valid.json and test.json, version 2.0. A question is a sentence in which a name or a number is
replaced by a blank. Its context is the paragraph without that sentence, so that the answer, which stands elsewhere in
the paragraph, has to be inferred; --keep leaves the sentence in, so that it has to be found. One question in four is
asked of a paragraph of another article, in which the answer does not stand: it has none. No article is in two files,
since WikiText has them so.
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
    """WikiText's words as people write them."""
    text = re.sub(r" @(.)@ ", r"\1", f" {text.strip()} ")
    text = re.sub(r" ([,.;:!?)\]%]|'s|n't|'re|'ve)(?= )", r"\1", text)
    return re.sub(r"([(\[$£]) ", r"\1", text).strip()


def articles(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Titles, and paragraphs of a moderate length."""
    title, held = "", list[str]()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            if found := re.fullmatch(r" = ([^=].*[^=]) = \n", line):
                if held:
                    yield title, held
                title, held = plain(found.group(1)), []
            elif not line.startswith(" =") and "<unk>" not in line and 50 <= len(line.split()) <= 150:
                held.append(plain(line))
    if held:
        yield title, held


def questions(paragraph: str, most: int, keep: bool, chance: random.Random) -> Iterator[Question]:
    """Of sentences with a name or number that stands in another sentence too, at most so many."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z\"(])", paragraph)
    found = []
    for n, sentence in enumerate(sentences):
        rest = " ".join(sentences[:n] + sentences[n + 1 :])
        names = [
            match
            for match in NAME.finditer(sentence)
            if match.start() > 0  # the first word has a capital, whatever it is
            and sentence.count(match.group()) == 1
            and re.search(rf"\b{re.escape(match.group())}\b", rest)
        ]
        if 8 <= len(sentence.split()) <= 40 and names:
            match = chance.choice(names)
            asked = sentence[: match.start()] + BLANK + sentence[match.end() :]
            found.append(Question(asked, paragraph if keep else rest, match.group()))
    yield from chance.sample(found, min(most, len(found)))


def entry(number: str, asked: Question, context: str) -> dict[str, Any]:
    """A question of SQuAD; where its answer stands several times, all of its places are right."""
    places = [match.start() for match in re.finditer(rf"\b{re.escape(asked.answer)}\b", context)]
    return {
        "id": number,
        "question": asked.text,
        "answers": [{"text": asked.answer, "answer_start": start} for start in places],
        "is_impossible": not places,
    }


def write(source: Path, out: Path, given: argparse.Namespace, most: int | None = None) -> None:
    """All questions of a file, or `most` of them, drawn from all articles."""
    chance, read = random.Random(given.seed), list(articles(source))
    made: list[tuple[str, dict[str, Any]]] = []
    for a, (title, paragraphs) in enumerate(read):
        for paragraph in paragraphs:
            for asked in questions(paragraph, given.most, given.keep, chance):
                context = asked.context
                if chance.random() < 0.25:
                    other = chance.choice(read[(a + chance.randrange(1, len(read))) % len(read)][1])
                    if asked.answer in other:
                        continue
                    context = other
                said = entry(f"{out.stem}-{len(made)}", asked, context)
                made.append((title, {"context": context, "qas": [said]}))
    if most is not None:
        made = [made[n] for n in sorted(chance.sample(range(len(made)), min(most, len(made))))]
    data = [
        {"title": title, "paragraphs": [each for _, each in group]}
        for title, group in itertools.groupby(made, key=lambda pair: pair[0])
    ]
    out.write_text(json.dumps({"version": "v2.0", "data": data}, ensure_ascii=False), encoding="utf-8")
    none = sum(each["qas"][0]["is_impossible"] for _, each in made)
    print(f"{out}: {len(made)} questions of {len(data)} articles, {none} without an answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("train", "valid", "test"):
        parser.add_argument(f"--{name}", required=True, type=Path, help="a file of WikiText, .gz")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--max-answer-length", type=int, default=2, help="questions of a paragraph at most")
    parser.add_argument("--held-out", type=int, default=500, help="questions of valid, and of test, at most")
    parser.add_argument("--keep", action="store_true", help="leave the sentence of the question in the context")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    write(given.train, given.out / "train.json", given)
    write(given.validation, given.out / "valid.json", given, given.held)
    write(given.test, given.out / "test.json", given, given.held)


if __name__ == "__main__":
    main()
