"""Create scenes of two digits with captions: a folder of PNGs and tables with the columns image, text and label.

    python examples/digit_captions.py --images images-idx3-ubyte.gz --labels labels-idx1-ubyte.gz --out digits
    regard train match --data digits/train.csv --validation digits/valid.csv --test digits/test.csv --out runs/described

Each scene has a correct caption, such as "a seven left of a two", and one that is slightly wrong: digits swapped,
another direction, or another digit. No digit of a training scene is in a held-out one.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image

from regard.data.images import read_idx

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def scene(digits: np.ndarray, across: bool, side: int, chance: np.random.Generator) -> np.ndarray:
    """Draw two digits (2, 28, 28) on (2 * side, 2 * side) pixels of noise: left and right, or above and below."""
    canvas = chance.normal(20, 8, (2 * side, 2 * side)).clip(0, 255)
    for n, digit in enumerate(digits):
        small = np.asarray(Image.fromarray(digit).resize((side, side), Image.Resampling.BILINEAR), np.float64)
        free = int(chance.integers(0, side + 1))  # random offset along the other axis
        top, left = (free, n * side) if across else (n * side, free)
        part = canvas[top : top + side, left : left + side]
        np.maximum(part, small, out=part)
    return canvas.round().astype(np.uint8)


def caption(first: int, across: bool, second: int) -> str:
    return f"a {WORDS[first]} {'left of' if across else 'above'} a {WORDS[second]}"


def wrong_caption(first: int, across: bool, second: int, chance: np.random.Generator) -> str:
    """Return a slightly wrong caption."""
    other = int(chance.choice([n for n in range(10) if n not in (first, second)]))
    ways = [(second, across, first), (first, not across, second), (other, across, second), (first, across, other)]
    return caption(*ways[int(chance.choice(4, p=(0.4, 0.2, 0.2, 0.2)))])


def write(name: str, out: Path, digits: np.ndarray, labels: np.ndarray, count: int, side: int, seed: int) -> None:
    """Write `count` scenes as out/name.csv and out/name/*.png."""
    chance = np.random.default_rng(seed)
    (out / name).mkdir(parents=True)
    rows = [("image", "text", "label")]
    while len(rows) <= 2 * count:
        pair = chance.choice(len(digits), 2, replace=False)
        first, second = (int(label) for label in labels[pair])
        if first == second:
            continue
        across, path = bool(chance.integers(2)), f"{name}/{len(rows) // 2:05}.png"
        Image.fromarray(scene(digits[pair], across, side, chance)).save(out / path)
        rows += [
            (path, caption(first, across, second), "yes"),
            (path, wrong_caption(first, across, second, chance), "no"),
        ]
    with (out / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    print(f"{out / name}.csv: {count} scenes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", required=True, help="MNIST images, IDX")
    parser.add_argument("--labels", required=True, help="MNIST labels, IDX")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--count", type=int, default=8000, help="training scenes; a tenth each for validation and test")
    parser.add_argument("--side", type=int, default=16, help="size of a digit in pixels; a scene is twice as large")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    images, labels = read_idx(options.images), read_idx(options.labels)
    cuts = len(images) * 8 // 10, len(images) * 9 // 10
    parts = zip(("train", "valid", "test"), np.split(images, cuts), np.split(labels, cuts), strict=True)
    for n, (name, digits, known) in enumerate(parts):
        write(name, options.out, digits, known, options.count // (10 if n else 1), options.side, options.seed + n)


if __name__ == "__main__":
    main()
