"""Czech speech to recognize: the dialogues of the game Fish Fillets as a table of clips and what is said in them.

    python examples/fillets.py --game /usr/share/games/fillets-ng --out fillets.tsv

The game's data is Debian's packages fillets-ng-data and fillets-ng-data-cs: sound/LEVEL/cs/NAME.ogg, and in
script/LEVEL/dialogs_cs.lua `dialogId("NAME", ...)` with `dialogStr("what is said")` in the next line.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

LINE = re.compile(r'dialogId\("([^"]+)".*?\)\s*dialogStr\("((?:[^"\\]|\\.)*)"\)', re.DOTALL)


def dialogues(game: Path) -> list[tuple[Path, str]]:
    """The clips of all levels that have a text, and the texts."""
    found = []
    for script in sorted(game.glob("script/*/dialogs_cs.lua")):
        for name, text in LINE.findall(script.read_text(encoding="utf-8")):
            clip = game / "sound" / script.parent.name / "cs" / f"{name}.ogg"
            words = " ".join(re.sub(r"\\.", " ", text).split())
            if clip.is_file() and any(letter.isalpha() for letter in words):
                found.append((clip.resolve(), words))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--game", required=True, type=Path, help="folder of the game's data")
    parser.add_argument("--out", required=True, type=Path, help="the table, .tsv")
    given = parser.parse_args()
    found = dialogues(given.game)
    given.out.write_text("audio\ttext\n" + "".join(f"{clip}\t{text}\n" for clip, text in found), encoding="utf-8")
    print(f"{given.out}: {len(found)} clips")


if __name__ == "__main__":
    main()
