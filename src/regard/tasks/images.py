"""An image to one of a few classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.vision import ImageClassifier, VisionConfig
from regard.tasks import baselines, metrics
from regard.tasks.data import Row, beside, read, split
from regard.tasks.graphs import Graph, image_graph
from regard.tasks.labels import classes_of, known
from regard.tasks.pictures import (
    Form,
    content,
    cropped,
    drawn,
    folder_of_classes,
    idx_images,
    idx_rows,
    learnt,
    named,
    pixels_of,
    shaken,
)
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, check_least, check_most, option
from regard.tasks.trouble import Bad, Trouble

TRAIN, VALID = ("train", "training"), ("valid", "val", "validation", "test", "t10k")


@dataclass(frozen=True)
class Images(Task):
    """A Vision Transformer, with convolutions before its patches."""

    name: ClassVar[str] = "images"
    does: ClassVar[str] = "an image to one of a few classes"
    example: ClassVar[str] = (
        "a folder photos/cat/1.png photos/dog/2.png, IDX files as MNIST has, or:\nimage,label\nphotos/1.png,cat"
    )
    columns: ClassVar[tuple[str, ...]] = ("image", "label")
    takes: ClassVar[str] = "image"
    recipe: ClassVar[Recipe] = Recipe(
        steps=4000, tokens=1024, rate=7e-4, warmup=100, decay=0.05, ema=0.998, evaluate_every=500, save_every=250
    )

    image: str = option("", "column of the path of the image, beside the file: a name, or a number from 1")
    label: str = option("", "column of the class")
    size: int = option(
        0, "pixels each way that images are resized to; 0 for their own, if all have the same, in whole patches"
    )
    patch: int = option(8, "pixels of a patch each way")
    stem: int = option(3, "convolutions before the patches, each of which halves the image")
    width: int = option(128, "of the hidden states")
    layers: int = option(4, "of the encoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.0, "in training")
    shift: int = option(2, "pixels by which images are moved at random in training")
    flip: bool = option(False, "images are mirrored left to right at random in training")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, size=0, shift=0, stem=0, layers=1)
        check_most(self, stem=10)
        if self.patch < 1 or self.patch % 2**self.stem:
            raise ValueError(f"patch must be a multiple of 2 to the power of stem = {self.stem}, but is {self.patch}")

    def read(self, source: str, bad: Bad) -> list[Row]:
        path = Path(source)
        if path.is_dir():
            if parts := _parts(path):
                raise Trouble(f"{source}: holds {' and '.join(part.name for part in parts)}; say which of them it is")
            rows = list(folder_of_classes(path))
            if not rows:
                raise Trouble(f"{source}: expected folders of images, one for each class, but there are none")
            return rows
        if "idx3" in path.name:
            return list(idx_rows(source))
        return list(beside(path, read(source, {"image": self.image, "label": self.label}, bad)))

    def read_inputs(self, source: str, bad: Bad) -> Iterable[Row]:
        path = Path(source)
        if path.is_dir():
            return [Row(row.place, row.values[:1]) for row in self.read(source, bad)]
        if "idx3" in path.name:
            return idx_images(source)
        return beside(path, super().read_inputs(source, bad))

    def parts(self, folder: Path) -> tuple[Path, Path] | None:
        return _parts(folder)

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, content, held, seed)

    def learn(self, rows: Sequence[Row]) -> Kit:
        labels = classes_of(rows)
        if len(labels) > max(2, len(rows) // 2):
            raise Trouble(f"{rows[0].place}: {len(labels)} classes of {len(rows)} images; is --label the right column?")
        return Kit(labels=labels, config=learnt(rows, self.size, cropped, self.patch))

    def model(self, kit: Kit) -> nn.Module:
        form = Form.of(kit)
        return ImageClassifier(
            VisionConfig(
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                hidden=2 * self.width,
                image=(form.height, form.width),
                patch=self.patch,
                channels=form.channels,
                stem=tuple(32 * 2**n for n in range(self.stem)),
                classes=len(kit.labels),
                eps=1e-6,
                dropout=self.dropout,
            )
        )

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> ClassifiedImages:
        good, targets = known(kit.labels, rows, bad)
        form = Form.of(kit)
        pixels, kept = pixels_of(good, form, bad, cropped)
        return ClassifiedImages(self, form, pixels, targets[kept], [good[n].place for n in kept])

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        images, by, mirrored = batch.inputs
        scores = model(shaken(images, by, mirrored) if model.training else images)
        return F.cross_entropy(scores, batch.targets, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        items = self.items(kit, rows, Bad())
        scores, targets = _scores(model, items), torch.from_numpy(items.targets)
        return {"loss": float(F.cross_entropy(scores.log(), targets))} | metrics.classification(scores, targets)

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        classes = len(kit.labels)
        ours, theirs = (self.items(kit, rows, Bad()) for rows in (train, held))
        return {
            "most frequent class": baselines.most_frequent(ours.targets.tolist(), theirs.targets.tolist(), classes),
            "logistic regression on pixels": baselines.pixel_regression(
                ours.pixels, ours.targets, theirs.pixels, theirs.targets, classes
            ),
        }

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        form = Form.of(kit)
        pixels, kept = pixels_of(rows, form, bad, cropped)
        scores = _scores(model, ClassifiedImages(self, form, pixels, np.zeros(len(kept), np.int64), ()))
        for n, row in zip(kept, scores.tolist(), strict=True):
            best = int(np.argmax(row))
            name, more = named(rows[n]), dict(zip(kit.labels, row, strict=True))
            yield Prediction(name, kit.labels[best], row[best], more, place=rows[n].place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        form = Form.of(kit)
        return (image_graph(model, (form.channels, form.height, form.width), "output"),)


class ClassifiedImages:
    """Images as bytes (n, C, height, width), with their classes (n,)."""

    def __init__(
        self, task: Images, form: Form, pixels: np.ndarray, targets: np.ndarray, places: Sequence[str]
    ) -> None:
        self.task, self.form, self.pixels, self.targets, self.places = task, form, pixels, targets, places
        self.sizes = np.full(len(pixels), form.height * form.width // task.patch**2)

    def images(self, chosen: np.ndarray) -> Tensor:
        """As the model takes them."""
        return self.form.ready(torch.from_numpy(self.pixels[chosen]))

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        moves = drawn(random, len(chosen), self.task.shift, self.task.flip)
        targets = torch.from_numpy(self.targets[chosen])
        return Batch((self.images(chosen), *moves), targets, int(self.sizes[chosen].sum()), len(chosen))


@torch.no_grad()
def _scores(model: nn.Module, items: ClassifiedImages) -> Tensor:
    """Probabilities (n, classes)."""
    device = next(model.parameters()).device
    found = [
        model(items.images(chosen).to(device)).float().softmax(-1).cpu()
        for chosen in track(np.array_split(np.arange(len(items.pixels)), max(1, round(items.sizes.sum() / 16384))))
        if len(chosen)
    ]
    return torch.cat(found) if found else torch.zeros(0, 1)


def _parts(folder: Path) -> tuple[Path, Path] | None:
    """Where a folder holds what to train on and what is held out: folders of classes, or IDX files."""
    if not folder.is_dir():
        return None
    inside = sorted(path for path in folder.iterdir() if path.is_dir() or "images-idx3" in path.name)
    names = {path.name.lower().split("-images-idx3")[0]: path for path in inside}
    train = next((names[name] for name in TRAIN if name in names), None)
    valid = next((names[name] for name in VALID if name in names), None)
    return (train, valid) if train and valid else None
