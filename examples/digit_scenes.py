"""Create scenes of MNIST digits for object detection: a COCO file and a folder of PNGs.

    python examples/digit_scenes.py --images t10k-images-idx3-ubyte.gz --labels t10k-labels-idx1-ubyte.gz --out scenes

writes scenes/train.json, scenes/train/*.png, scenes/valid.json and scenes/valid/*.png. No digit of a training scene is
in a held-out one: the digits are split before scenes are composed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from regard.data.images import read_idx


def cut(digit: np.ndarray) -> np.ndarray:
    """Crop a digit (28, 28) to its bounding box."""
    rows, columns = np.nonzero(digit > 40)
    return digit[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def overlap(box: tuple[int, ...], other: tuple[int, ...]) -> bool:
    (x, y, w, h), (left, top, width, height) = box, other
    return x < left + width and left < x + w and y < top + height and top < y + h


def scene(
    digits: np.ndarray, size: int, chance: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, tuple[int, ...]]]]:
    """Return an image (size, size) and its objects: index of the digit, and box (left, top, width, height)."""
    canvas = chance.normal(30, 12, (size, size)).clip(0, 255)
    objects: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(chance.integers(1, 6)):
        which = int(chance.integers(len(digits)))
        piece = Image.fromarray(cut(digits[which]))
        height = int(chance.integers(size * 7 // 32, size * 7 // 16 + 1))
        width = max(3, round(piece.width * height / piece.height))
        if width > size // 2:
            continue
        ink = np.asarray(piece.resize((width, height), Image.Resampling.BILINEAR), np.float64) * chance.uniform(0.6, 1)
        for _ in range(20):  # try to find a free place
            left, top = (int(chance.integers(0, size - side + 1)) for side in (width, height))
            box = (left, top, width, height)
            if not any(overlap(box, other) for _, other in objects):
                part = canvas[top : top + height, left : left + width]
                np.maximum(part, ink, out=part)
                objects.append((which, box))
                break
    return canvas.round().astype(np.uint8), objects


def write(name: str, out: Path, digits: np.ndarray, labels: np.ndarray, count: int, size: int, seed: int) -> None:
    """Write `count` scenes as out/name.json and out/name/*.png."""
    chance = np.random.default_rng(seed)
    (out / name).mkdir(parents=True)
    images, annotations = [], []
    for n in range(count):
        canvas, objects = scene(digits, size, chance)
        Image.fromarray(canvas).save(out / name / f"{n:05}.png")
        images.append({"id": n, "file_name": f"{n:05}.png", "width": size, "height": size})
        for which, box in objects:
            annotations.append(
                {"id": len(annotations) + 1, "image_id": n, "category_id": int(labels[which]) + 1, "bbox": box,
                 "area": box[2] * box[3], "iscrowd": 0}
            )  # fmt: skip
    categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
    (out / f"{name}.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
    print(f"{out / name}.json: {len(annotations)} digits in {count} scenes of {size} x {size}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", required=True, help="MNIST images, IDX")
    parser.add_argument("--labels", required=True, help="MNIST labels, IDX")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--train", type=int, default=12000, help="training scenes")
    parser.add_argument("--validation", type=int, default=1000, help="validation scenes")
    parser.add_argument("--size", type=int, default=64, help="width and height of a scene in pixels")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    digits, labels = read_idx(options.images), read_idx(options.labels)
    order = np.random.default_rng(options.seed).permutation(len(digits))
    train, valid = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    write("train", options.out, digits[train], labels[train], options.train, options.size, options.seed + 1)
    write("valid", options.out, digits[valid], labels[valid], options.validation, options.size, options.seed + 2)


if __name__ == "__main__":
    main()
