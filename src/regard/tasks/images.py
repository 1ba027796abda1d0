"""Image classification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.images import (
    ImageFormat,
    center_crop,
    content_hash,
    fit_image_format,
    folder_of_classes,
    idx_images,
    idx_rows,
    image_name,
    load_pixels,
    random_shifts,
    shift_and_flip,
)
from regard.data.labels import collect_classes, encode_labels
from regard.data.processor import Processor
from regard.data.readers import Row, read_rows, resolve_paths
from regard.data.splits import split
from regard.errors import BadRows, UserError
from regard.field_types import check_maximum, check_minimum
from regard.models.vision import ImageClassifier, VisionConfig
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, image_graph
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

TRAIN, VALID = ("train", "training"), ("valid", "val", "validation", "test", "t10k")


@dataclass(frozen=True)
class Images(Task):
    """A Vision Transformer with a convolutional stem."""

    name: ClassVar[str] = "images"
    description: ClassVar[str] = "image classification"
    example: ClassVar[str] = (
        "a directory photos/cat/1.png photos/dog/2.png, IDX files like MNIST, or:\nimage,label\nphotos/1.png,cat"
    )
    columns: ClassVar[tuple[str, ...]] = ("image", "label")
    input_kind: ClassVar[str] = "image"
    recipe: ClassVar[Recipe] = Recipe(
        steps=4000,
        tokens=1024,
        learning_rate=7e-4,
        warmup=100,
        weight_decay=0.05,
        ema=0.998,
        evaluate_every=500,
        save_every=250,
    )

    image: str = option(
        "", "column of the path of the image, relative to the data file: its name, or its number (from 1)"
    )
    label: str = option("", "column of the class")
    size: int = option(
        0, "height and width to which images are resized; 0 keeps their size, if all have the same, in whole patches"
    )
    patch: int = option(8, "patch size in pixels")
    stem: int = option(3, "convolutions before the patch embedding; each halves the resolution")
    d_model: int = option(128, "width of the hidden states")
    layers: int = option(4, "encoder layers")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.0, "dropout probability")
    shift: int = option(2, "maximum random shift of the images in training, in pixels")
    flip: bool = option(False, "flip images horizontally at random in training")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, size=0, shift=0, stem=0, layers=1)
        check_maximum(self, stem=10)
        if self.patch < 1 or self.patch % 2**self.stem:
            raise ValueError(f"patch must be a multiple of 2 to the power of stem = {self.stem}, but is {self.patch}")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        path = Path(source)
        if path.is_dir():
            if parts := _find_splits(path):
                raise UserError(f"{source}: contains {' and '.join(part.name for part in parts)}; pass one of them")
            rows = list(folder_of_classes(path))
            if not rows:
                raise UserError(f"{source}: expected one subdirectory of images per class, found none")
            return rows
        if "idx3" in path.name:
            return list(idx_rows(source))
        return list(resolve_paths(path, read_rows(source, {"image": self.image, "label": self.label}, bad)))

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        path = Path(source)
        if path.is_dir():
            return [Row(row.place, row.values[:1]) for row in self.read(source, bad)]
        if "idx3" in path.name:
            return idx_images(source)
        return resolve_paths(path, super().read_inputs(source, bad))

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        return _find_splits(folder)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, content_hash, held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        labels = collect_classes(rows)
        if len(labels) > max(2, len(rows) // 2):
            raise UserError(
                f"{rows[0].place}: {len(labels)} classes of {len(rows)} images; is --label the right column?"
            )
        return Processor(labels=labels, config=fit_image_format(rows, self.size, center_crop, self.patch))

    def model(self, processor: Processor) -> nn.Module:
        form = ImageFormat.from_processor(processor)
        return ImageClassifier(
            VisionConfig(
                d_model=self.d_model,
                layers=self.layers,
                heads=self.heads,
                d_hidden=2 * self.d_model,
                image=(form.height, form.width),
                patch=self.patch,
                channels=form.channels,
                stem=tuple(32 * 2**n for n in range(self.stem)),
                classes=len(processor.labels),
                eps=1e-6,
                dropout=self.dropout,
            )
        )

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> ClassifiedImages:
        good, targets = encode_labels(processor.labels, rows, bad)
        form = ImageFormat.from_processor(processor)
        pixels, kept = load_pixels(good, form, bad, center_crop)
        return ClassifiedImages(self, form, pixels, targets[kept], [good[n].place for n in kept])

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        images, by, mirrored = batch.inputs
        scores = model(shift_and_flip(images, by, mirrored) if model.training else images)
        return F.cross_entropy(scores, batch.targets, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        scores, targets = _scores(model, items), torch.from_numpy(items.targets)
        return {"loss": float(F.cross_entropy(scores.log(), targets))} | metrics.classification(scores, targets)

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        classes = len(processor.labels)
        ours, theirs = (self.dataset(processor, rows, BadRows()) for rows in (train, held_out))
        return {
            "most frequent class": baselines.most_frequent(ours.targets.tolist(), theirs.targets.tolist(), classes),
            "logistic regression on pixels": baselines.pixel_regression(
                ours.pixels, ours.targets, theirs.pixels, theirs.targets, classes
            ),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        form = ImageFormat.from_processor(processor)
        pixels, kept = load_pixels(rows, form, bad, center_crop)
        scores = _scores(model, ClassifiedImages(self, form, pixels, np.zeros(len(kept), np.int64), ()))
        for n, row in zip(kept, scores.tolist(), strict=True):
            best = int(np.argmax(row))
            name, more = image_name(rows[n]), dict(zip(processor.labels, row, strict=True))
            yield Prediction(name, processor.labels[best], row[best], more, place=rows[n].place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        form = ImageFormat.from_processor(processor)
        return (image_graph(model, (form.channels, form.height, form.width), "output"),)


class ClassifiedImages:
    """Images as bytes (n, C, height, width), with their classes (n,)."""

    def __init__(
        self, task: Images, form: ImageFormat, pixels: np.ndarray, targets: np.ndarray, places: Sequence[str]
    ) -> None:
        self.task, self.form, self.pixels, self.targets, self.places = task, form, pixels, targets, places
        self.sizes = np.full(len(pixels), form.height * form.width // task.patch**2)

    def images(self, chosen: np.ndarray) -> Tensor:
        """Normalized images, as the model expects them."""
        return self.form.normalize(torch.from_numpy(self.pixels[chosen]))

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        moves = random_shifts(random, len(chosen), self.task.shift, self.task.flip)
        targets = torch.from_numpy(self.targets[chosen])
        return Batch((self.images(chosen), *moves), targets, int(self.sizes[chosen].sum()), len(chosen))


@torch.no_grad()
def _scores(model: nn.Module, items: ClassifiedImages) -> Tensor:
    """Probabilities (n, classes)."""
    device = next(model.parameters()).device
    parts = [
        model(items.images(chosen).to(device)).float().softmax(-1).cpu()
        for chosen in track(np.array_split(np.arange(len(items.pixels)), max(1, round(items.sizes.sum() / 16384))))
        if len(chosen)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, 1)


def _find_splits(folder: Path) -> tuple[Path, Path] | None:
    """Find training and held-out data in a directory: directories of classes, or IDX files."""
    if not folder.is_dir():
        return None
    inside = sorted(path for path in folder.iterdir() if path.is_dir() or "images-idx3" in path.name)
    names = {path.name.lower().split("-images-idx3")[0]: path for path in inside}
    train = next((names[name] for name in TRAIN if name in names), None)
    valid = next((names[name] for name in VALID if name in names), None)
    return (train, valid) if train and valid else None
