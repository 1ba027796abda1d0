"""Create a summarization dataset from the long and the one-line descriptions of Debian packages.

    apt-get update -o Acquire::Languages=en
    apt-cache dumpavail > Packages
    lists=$(apt-get indextargets -o Acquire::Languages=en --format '$(FILENAME)' 'Created-By: Translations')
    /usr/lib/apt/apt-helper cat-file $lists > Descriptions
    python examples/package_summaries.py --packages Packages --descriptions Descriptions --out packages

writes packages/train.tsv, valid.tsv and test.tsv with the columns text and summary. One binary package is used per
source package: the one with the same name, or else the first. Duplicate texts and summaries are dropped. The split is
by a hash of the name of the source package, so that packages built from one source are in one file.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path


def stanzas(path: Path) -> Iterator[dict[str, str]]:
    """Yield the records of a control file; values of several lines keep their line breaks."""
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


def split_description(description: str) -> tuple[str, str]:
    """Return the long description, with its paragraphs and list items joined to one line, and the short one."""
    short, _, long = description.partition("\n")
    parts = re.split(r"\n\.(?:\n|$)|\n(?=\s*[*+-] )", f"\n{long}")
    flat = [" ".join(part.split()) for part in parts]
    return " ".join(part for part in flat if part), " ".join(short.split())


def pairs(packages: Path, descriptions: Path) -> Iterator[tuple[str, str, str]]:
    """Yield source name, text and summary, sorted by source name."""
    long = {record["Description-md5"]: record["Description-en"] for record in stanzas(descriptions)}
    sources = dict[str, list[tuple[str, str]]]()
    for record in stanzas(packages):
        source = record.get("Source", record["Package"]).split()[0]
        if (digest := record.get("Description-md5")) in long:
            sources.setdefault(source, []).append((record["Package"], long[digest or ""]))
    texts, summaries = set[str](), set[str]()
    for source, built in sorted(sources.items()):
        _, description = min(built, key=lambda each: (each[0] != source, each[0]))
        text, summary = split_description(description)
        if "packaged by debcargo" in text:  # boilerplate that does not describe the crate
            continue
        if len(text.split()) < 12 or len(summary.split()) < 3 or text in texts or summary.lower() in summaries:
            continue
        texts.add(text)
        summaries.add(summary.lower())
        yield source, text, summary


def split(source: str) -> str:
    """Return the split of a source: 4% valid, 6% test, the rest train."""
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % 100
    return "valid" if number < 4 else "test" if number < 10 else "train"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packages", required=True, type=Path, help="output of apt-cache dumpavail")
    parser.add_argument("--descriptions", required=True, type=Path, help="concatenated lists of descriptions")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    lines = {"train": [], "valid": [], "test": []}  # type: dict[str, list[str]]
    for source, text, summary in pairs(options.packages, options.descriptions):
        lines[split(source)].append(f"{text}\t{summary}\n")
    if not all(lines.values()):
        parser.error(
            f"{options.descriptions} describes too few packages of {options.packages}; see the top of this script"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in lines.items():
        (options.out / f"{name}.tsv").write_text("text\tsummary\n" + "".join(rows), encoding="utf-8")
        print(f"{options.out / name}.tsv: {len(rows)} pairs")


if __name__ == "__main__":
    main()
