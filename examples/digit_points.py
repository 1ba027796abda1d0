"""Convert digits to sets of points, with x, y and ink of every dark pixel: JSONL with set and label.

python examples/digit_points.py --images t10k-images-idx3-ubyte.gz --labels t10k-labels-idx1-ubyte.gz --out points.jsonl
regard train sets --data points.jsonl --out runs/points
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from regard.data.images import read_idx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", required=True, help="MNIST images, IDX")
    parser.add_argument("--labels", required=True, help="MNIST labels, IDX")
    parser.add_argument("--out", type=Path, required=True, help="output JSONL file")
    options = parser.parse_args()
    count = 0
    with options.out.open("w") as file:
        for image, label in zip(read_idx(options.images), read_idx(options.labels), strict=True):
            y, x = np.nonzero(image > 127)
            points = np.stack((x, y, image[y, x] // 16), 1)
            file.write(json.dumps({"set": points.tolist(), "label": str(label)}) + "\n")
            count += len(points)
    print(f"{options.out}: {count} points")


if __name__ == "__main__":
    main()
