"""Write MovieLens 100k as a table of users, film titles and times, from the copy in the RecBole package.

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
    """Return the dataset folder of RecBole, without importing the package."""
    spec = find_spec("recbole")
    if spec is None or spec.origin is None:
        raise SystemExit("movielens.py: needs the data of RecBole: pip install recbole --no-deps")
    return Path(spec.origin).parent / "dataset_example" / "ml-100k"


def lines(path: Path) -> list[list[str]]:
    """Return the cells of a tab-separated table without its header."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--from", dest="source", type=Path, help="folder with ml-100k.inter; default: RecBole's")
    parser.add_argument("--out", type=Path, required=True, help="output CSV file")
    options = parser.parse_args()
    source = options.source or folder()
    titles = {cells[0]: f"{cells[1]} ({cells[2]})" for cells in lines(source / "ml-100k.item")}
    duplicates = [title for title in titles.values() if list(titles.values()).count(title) > 1]
    names = {item: f"{title} #{item}" if title in duplicates else title for item, title in titles.items()}
    rated = lines(source / "ml-100k.inter")
    with options.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["user", "item", "time"])
        table.writerows((user, names[item], time) for user, item, _, time in rated)
    print(f"{options.out}: {len(rated)} ratings of {len({row[1] for row in rated})} films")


if __name__ == "__main__":
    main()
