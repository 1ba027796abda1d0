"""Create a Czech speech recognition dataset from the dialogues of the game Fish Fillets: a table of clips and texts.

    python examples/fillets.py --game /usr/share/games/fillets-ng --out fillets.tsv

The data is in the Debian packages fillets-ng-data and fillets-ng-data-cs: clips in sound/LEVEL/cs/NAME.ogg, and texts
in script/LEVEL/dialogs_cs.lua, as `dialogId("NAME", ...)` followed by `dialogStr("text")` on the next line.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

LINE = re.compile(r'dialogId\("([^"]+)".*?\)\s*dialogStr\("((?:[^"\\]|\\.)*)"\)', re.DOTALL)


def dialogues(game: Path) -> list[tuple[Path, str]]:
    """Return the clips of all levels that have a text, with their texts."""
    clips = []
    for script in sorted(game.glob("script/*/dialogs_cs.lua")):
        for name, text in LINE.findall(script.read_text(encoding="utf-8")):
            clip = game / "sound" / script.parent.name / "cs" / f"{name}.ogg"
            words = " ".join(re.sub(r"\\.", " ", text).split())
            if clip.is_file() and any(letter.isalpha() for letter in words):
                clips.append((clip.resolve(), words))
    return clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--game", required=True, type=Path, help="data folder of the game")
    parser.add_argument("--out", required=True, type=Path, help="output table, .tsv")
    options = parser.parse_args()
    clips = dialogues(options.game)
    options.out.write_text("audio\ttext\n" + "".join(f"{clip}\t{text}\n" for clip, text in clips), encoding="utf-8")
    print(f"{options.out}: {len(clips)} clips")


if __name__ == "__main__":
    main()
