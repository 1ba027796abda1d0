"""Scenes of two digits and what is said of them: a folder of PNGs and tables image, text, label.

    python examples/digit_captions.py --images images-idx3-ubyte.gz --labels labels-idx1-ubyte.gz --out digits
    regard train match --data digits/train.csv --validation digits/valid.csv --test digits/test.csv --out runs/described

Each scene comes with what is right, such as "a seven left of a two", and with one thing that is wrong by little: the
two exchanged, the other direction, or another digit. No digit of a training scene is in a held-out one.
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
    """Two digits (2, 28, 28) on (2 * side, 2 * side) pixels of noise: left and right, or above and below."""
    canvas = chance.normal(20, 8, (2 * side, 2 * side)).clip(0, 255)
    for n, digit in enumerate(digits):
        small = np.asarray(Image.fromarray(digit).resize((side, side), Image.Resampling.BILINEAR), np.float64)
        free = int(chance.integers(0, side + 1))  # along the side where they do not stand apart
        top, left = (free, n * side) if across else (n * side, free)
        part = canvas[top : top + side, left : left + side]
        np.maximum(part, small, out=part)
    return canvas.round().astype(np.uint8)


def said(first: int, across: bool, second: int) -> str:
    return f"a {WORDS[first]} {'left of' if across else 'above'} a {WORDS[second]}"


def wrong(first: int, across: bool, second: int, chance: np.random.Generator) -> str:
    """What is wrong by little."""
    other = int(chance.choice([n for n in range(10) if n not in (first, second)]))
    ways = [(second, across, first), (first, not across, second), (other, across, second), (first, across, other)]
    return said(*ways[int(chance.choice(4, p=(0.4, 0.2, 0.2, 0.2)))])


def write(name: str, out: Path, digits: np.ndarray, labels: np.ndarray, count: int, side: int, seed: int) -> None:
    """`count` scenes as out/name.csv and out/name/*.png."""
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
        rows += [(path, said(first, across, second), "yes"), (path, wrong(first, across, second, chance), "no")]
    with (out / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    print(f"{out / name}.csv: {count} scenes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", required=True, help="MNIST images, IDX")
    parser.add_argument("--labels", required=True, help="MNIST labels, IDX")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--count", type=int, default=8000, help="scenes to train on; a tenth to choose by, and to test")
    parser.add_argument("--side", type=int, default=16, help="pixels of a digit each way; a scene has twice as many")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    images, labels = read_idx(given.images), read_idx(given.labels)
    cuts = len(images) * 8 // 10, len(images) * 9 // 10
    parts = zip(("train", "valid", "test"), np.split(images, cuts), np.split(labels, cuts), strict=True)
    for n, (name, digits, known) in enumerate(parts):
        write(name, given.out, digits, known, given.count // (10 if n else 1), given.side, given.seed + n)


if __name__ == "__main__":
    main()
