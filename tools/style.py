"""Words and names that the style guide rules out: `make lint` runs this over every text file of the project.

`python -m tools.style --message FILE` checks a commit message instead, as the commit-msg hook does.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    r"told(?! me)": "printed, reported, specified",
    r"beside(?!s)": "next to, compared with",
    r"stands(?! for)|stood": "is",
    r"mend(s|ed|ing)?": "fix",
    r"nobody|whoever|whatever": "say which",
    r"simple means": "baselines",
    r"somebody( else)?|anybody|everybody": "say who",
    r"(re-)?laid": "stored, packed, expanded",
    r"in vain": "timed out, without success",
    r"of (its|their|your) own accord|by itself": "automatically, alone",
    r"learnt": "learned",
    r"look(s|ed)? (at|ahead|back) (itself|themselves)": "attend to",
}
"""Regular expressions of words, matched as whole words in any case, and what to write instead."""

PARTICIPLES = (
    "asked|became|begun|came|drawn|found|given|held|kept|known|laid|left|made|meant|said|seen|settled|shown|spoken|taken|told|"
    "turned|wanted|written"
)
NAMES = re.compile(rf"^\s*(?:async )?(?:def|class) ({PARTICIPLES})\b", re.IGNORECASE)
"""Functions and classes whose whole name is a participle: name what they do or are."""
VARIABLES = re.compile(r"^\s*(?:for )?(?:\w+, )*(found|said|told|made)(?:, \w+)*(?:: [^=]+)? (?:=|in) ")
"""Variables that say that something was computed, not what it is."""

SUFFIXES = {".py", ".cpp", ".h", ".js", ".html", ".md", ".toml", ".yml", ".txt"}
EXEMPT = {"tools/style.py", "tests/tools/test_style.py", "tests/view/test_alignment.py"}  # the last has a sample text
LONGEST_SUBJECT = 72


def problems(path: str, text: str) -> Iterator[str]:
    """Yield a line for each use of a word or name that is ruled out.

    >>> from tools.style import problems
    >>> list(problems("a.py", "# nobody reads this"))
    ["a.py:1: 'nobody': say which"]
    """
    for number, line in enumerate(text.splitlines(), 1):
        for words, advice in WORDS.items():
            for match in re.finditer(rf"\b(?:{words})\b", line, re.IGNORECASE):
                yield f"{path}:{number}: {match.group()!r}: {advice}"
        if path.endswith(".py") and (name := NAMES.match(line)):
            yield f"{path}:{number}: {name[1]!r} is a participle: name what it does (a verb) or is (a noun)"
        if path.endswith(".py") and (name := VARIABLES.match(line)):
            yield f"{path}:{number}: {name[1]!r}: name what the variable holds"


def message_problems(message: str) -> Iterator[str]:
    """Yield what is wrong with the subject of a commit message."""
    subject = message.split("\n", 1)[0]
    if len(subject) > LONGEST_SUBJECT:
        yield f"the subject has {len(subject)} characters; write at most {LONGEST_SUBJECT}"
    first = subject.split(" ", 1)[0]
    if subject.endswith(".") or not first[:1].isupper() or re.fullmatch(r"\w+(ed|ing)", first):
        yield f"write the subject as an imperative without a full stop, such as 'Cache block masks', got {subject!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--message", type=Path, help="file of a commit message to check")
    options = parser.parse_args()
    if options.message is not None:
        lines = list(message_problems(options.message.read_text(encoding="utf-8")))
    else:
        listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
        paths = [
            path for path in listed if Path(path).suffix in SUFFIXES and path not in EXEMPT and Path(path).exists()
        ]
        lines = [line for path in paths for line in problems(path, Path(path).read_text(encoding="utf-8"))]
    print("\n".join(lines) or "style: nothing found")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
