"""Tiny images: horizontal or vertical stripes, and scenes with a square or a bar."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from regard.tasks import Run, Sources, create_run, tasks
from regard.training.loop import NoCallback, Step
from regard.training.sources import Examples


def stripes(count: int, size: int = 8, seed: int = 1) -> list[tuple[str, np.ndarray]]:
    """Labels and images: a bright horizontal (lies) or vertical (rises) line on noise."""
    chance, rows = np.random.default_rng(seed), []
    for n in range(count):
        image = chance.integers(0, 60, (size, size)).astype(np.uint8)
        at = int(chance.integers(size))
        label = ("lies", "rises")[n % 2]
        image[(at, slice(None)) if label == "lies" else (slice(None), at)] = 220
        rows.append((label, image))
    return rows


def folder_of(folder: Path, images: list[tuple[str, np.ndarray]]) -> Path:
    for n, (label, image) in enumerate(images):
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / label / f"{n:03}.png")
    return folder


def scenes(folder: Path, count: int = 60, size: int = 32, seed: int = 1) -> Path:
    """Write a COCO file and its images: each has a square or a horizontal bar, bright on noise."""
    chance = np.random.default_rng(seed)
    coco: dict[str, list[Any]] = {
        "images": [], "annotations": [], "categories": [{"id": 7, "name": "square"}, {"id": 9, "name": "bar"}]
    }  # fmt: skip
    (folder / "images").mkdir(parents=True)
    for n in range(count):
        image = chance.integers(0, 60, (size, size)).astype(np.uint8)
        width, height = (size // 4, size // 4) if n % 2 else (size // 2, size // 8)
        left, top = int(chance.integers(size - width)), int(chance.integers(size - height))
        image[top : top + height, left : left + width] = 220
        Image.fromarray(image).save(folder / "images" / f"{n}.png")
        coco["images"].append({"id": n, "file_name": f"{n}.png", "width": size, "height": size})
        coco["annotations"].append(
            {"id": n, "image_id": n, "category_id": 7 if n % 2 else 9, "bbox": [left, top, width, height]}
        )
    (folder / "objects.json").write_text(json.dumps(coco))
    return folder / "objects.json"


SMALL = {
    "images": {"d_model": 16, "layers": 1, "heads": 2, "patch": 4, "stem": 1, "shift": 1},
    "detect": {"d_model": 32, "layers": 1, "decoder_layers": 1, "heads": 2, "queries": 4, "channels": 8, "shift": 2,
               "flip": True},
}  # fmt: skip


def new_run(
    folder: Path, name: str, source: Path, *, options: dict[str, Any] | None = None, **recipe: Any
) -> tuple[Run, Examples]:
    task = tasks()[name](**(SMALL[name] | (options or {})))
    known = {"steps": 8, "tokens": 64, "warmup": 2, "evaluate_every": 4, "save_every": 3, "ema": 0.9} | recipe
    return create_run(folder / "run", task, replace(task.recipe, **known), Sources((str(source),), held_out=10))


class DieAtStep(NoCallback):
    """Interrupt a training at a step without saving, like a power cut."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, step: Step) -> None:
        if step.step == self.at:
            raise KeyboardInterrupt
