"""Summaries that people wrote: what Debian's packages say of themselves at length, and in one line.

    apt-get update -o Acquire::Languages=en
    apt-cache dumpavail > Packages
    lists=$(apt-get indextargets -o Acquire::Languages=en --format '$(FILENAME)' 'Created-By: Translations')
    /usr/lib/apt/apt-helper cat-file $lists > Descriptions
    python examples/package_summaries.py --packages Packages --descriptions Descriptions --out packages

writes packages/train.tsv, valid.tsv and test.tsv with the columns text and summary. Of every source package one binary
package is taken, the one of its name or else the first, and of equal texts or summaries the first: so no text is
twice, and what was built from one source is on one side. The sides are drawn by a hash of the source's name.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path


def stanzas(path: Path) -> Iterator[dict[str, str]]:
    """The records of a control file; what goes on over many lines keeps its line ends."""
    for stanza in path.read_text(encoding="utf-8").split("\n\n"):
        record, name = dict[str, str](), ""
        for line in stanza.splitlines():
            if line[:1] in " \t":
                record[name] = f"{record.get(name, '')}\n{line[1:]}"
            else:
                name, _, value = line.partition(":")
                record[name] = value.strip()
        if "Package" in record:
            yield record


def told(description: str) -> tuple[str, str]:
    """A long description in one line, and the short one. A paragraph, or an item of a list, ends as a sentence does."""
    short, _, long = description.partition("\n")
    parts = re.split(r"\n\.(?:\n|$)|\n(?=\s*[*+-] )", f"\n{long}")
    flat = [" ".join(part.split()) for part in parts]
    return " ".join(part for part in flat if part), " ".join(short.split())


def pairs(packages: Path, descriptions: Path) -> Iterator[tuple[str, str, str]]:
    """The source's name, the text and its summary, in the order of the names."""
    long = {record["Description-md5"]: record["Description-en"] for record in stanzas(descriptions)}
    sources = dict[str, list[tuple[str, str]]]()
    for record in stanzas(packages):
        source = record.get("Source", record["Package"]).split()[0]
        if (digest := record.get("Description-md5")) in long:
            sources.setdefault(source, []).append((record["Package"], long[digest or ""]))
    texts, summaries = set[str](), set[str]()
    for source, built in sorted(sources.items()):
        _, description = min(built, key=lambda each: (each[0] != source, each[0]))
        text, summary = told(description)
        if "packaged by debcargo" in text:  # it says the crate's name and nothing of what it does
            continue
        if len(text.split()) < 12 or len(summary.split()) < 3 or text in texts or summary.lower() in summaries:
            continue
        texts.add(text)
        summaries.add(summary.lower())
        yield source, text, summary


def side(source: str) -> str:
    """Of a hundred sources four are for valid and six for test."""
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % 100
    return "valid" if number < 4 else "test" if number < 10 else "train"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packages", required=True, type=Path, help="what apt-cache dumpavail prints")
    parser.add_argument("--descriptions", required=True, type=Path, help="the lists of descriptions")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    lines = {"train": [], "valid": [], "test": []}  # type: dict[str, list[str]]
    for source, text, summary in pairs(given.packages, given.descriptions):
        lines[side(source)].append(f"{text}\t{summary}\n")
    if not all(lines.values()):
        parser.error(f"{given.descriptions} describes too few of {given.packages}: see the head of this file")
    given.out.mkdir(parents=True, exist_ok=True)
    for name, found in lines.items():
        (given.out / f"{name}.tsv").write_text("text\tsummary\n" + "".join(found), encoding="utf-8")
        print(f"{given.out / name}.tsv: {len(found)} pairs")


if __name__ == "__main__":
    main()
