"""Object detection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data import coco
from regard.data.coco import Detections
from regard.data.images import (
    ImageFormat,
    content_hash,
    fit_image_format,
    fit_scale,
    image_header,
    letterbox,
    load_pixels,
    random_shifts,
    shift_and_flip,
)
from regard.data.labels import unseen_message
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.splits import split
from regard.errors import BadRows, UserError
from regard.field_types import check_maximum, check_minimum
from regard.models.boxes import Objects, SetLoss, to_corners
from regard.models.detection import Detr, DetrConfig
from regard.models.resnet import ResNetConfig
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, image_graph
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

LOSS = SetLoss(class_weight=2.0)


@dataclass(frozen=True)
class Detect(Task):
    """DETR on a small ResNet backbone, trained from scratch."""

    name: ClassVar[str] = "detect"
    description: ClassVar[str] = "object detection: the objects of an image and their boxes"
    example: ClassVar[str] = (
        'a COCO file and a directory of images:\n{"images": [{"id": 1, "file_name": "1.png", ...}],\n "annotations": '
        '[{"image_id": 1, "category_id": 3,\n "bbox": [left, top, width, height], ...}],\n "categories": [...]}'
    )
    input_kind: ClassVar[str] = "image"
    recipe: ClassVar[Recipe] = Recipe(
        steps=12000, tokens=1024, learning_rate=5e-4, warmup=300, weight_decay=1e-4, ema=0.998, evaluate_every=1000,
        save_every=500,
    )  # fmt: skip

    image_folder: str = option("", "directory of the images; by default searched for next to the COCO file")
    size: int = option(0, "height and width to which images are resized; 0 keeps their size, if all have the same")
    queries: int = option(16, "maximum number of objects per image")
    channels: int = option(32, "channels of the first convolution stage, doubled in each further stage")
    stages: int = option(2, "convolution stages; 2 reduce the resolution 8 times, 3 reduce it 16 times")
    d_model: int = option(96, "width of the hidden states")
    layers: int = option(1, "encoder layers")
    decoder_layers: int = option(3, "decoder layers")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.0, "dropout probability")
    shift: int = option(0, "maximum random shift of the images in training, in pixels")
    flip: bool = option(False, "flip images horizontally at random in training")
    threshold: float = option(0.5, "minimum score of the objects that `regard predict` prints")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, size=0, shift=0, queries=1, channels=1, stages=1, layers=1, decoder_layers=1)
        check_maximum(self, stages=10)
        if self.d_model % 4:
            raise ValueError(f"d_model must be a multiple of 4, but is {self.d_model}")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        if Path(source).is_dir():
            if parts := _find_splits(Path(source)):
                raise UserError(f"{source}: contains {' and '.join(part.name for part in parts)}; pass one of them")
            raise UserError(f"{source}: is a directory; expected a COCO file, such as {source}/instances_train.json")
        return list(coco.coco_rows(source, self.image_folder, bad))

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        if Path(source).is_dir():
            self.read(source, bad)  # raises an error that names the expected file
        return coco.coco_images(source, self.image_folder, bad)

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        return _find_splits(folder)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, content_hash, held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        for needed in ("scipy", "pycocotools"):  # fail before training, not at its end
            if find_spec(needed) is None:
                raise UserError(f"detect needs {needed}: pip install 'regard[detect]'")
        labels = tuple(sorted({thing.label for row in rows for thing in row.values[1]}))
        if not labels:
            raise UserError(f"{rows[0].place if rows else 'the data'}: no image has an object; is this the right file?")
        return Processor(labels=labels, config=fit_image_format(rows, self.size, letterbox))

    def model(self, processor: Processor) -> nn.Module:
        form = ImageFormat.from_processor(processor)
        widths = tuple(self.channels * 2**n for n in range(self.stages))
        return Detr(
            DetrConfig(
                classes=len(processor.labels),
                queries=self.queries,
                d_model=self.d_model,
                layers=self.layers,
                decoder_layers=self.decoder_layers,
                heads=self.heads,
                d_hidden=2 * self.d_model,
                backbone=ResNetConfig(
                    stem=self.channels, widths=widths, depths=(1,) * self.stages, bottleneck=False,
                    channels=form.channels, norm="group",
                ),
                arrangement="pre",
                dropout=self.dropout,
                anchors=True,
            )
        )  # fmt: skip

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> DetectedImages:
        known = {label: n for n, label in enumerate(processor.labels)}
        form, good = ImageFormat.from_processor(processor), []
        for row in rows:
            _, things, size = row.values
            unknown = next((thing.label for thing in things if thing.label not in known), None)
            if unknown is not None:
                bad.add(unseen_message(row.place, "category", unknown, processor.labels))
            elif len(things) > self.queries:
                bad.add(f"{row.place}: has {len(things)} objects, more than --queries {self.queries}")
            elif (header := image_header(row)) and None not in size and header[1::-1] != size:
                mismatch = f"is {header[1]} x {header[0]} pixels, but the COCO file states {size[0]} x {size[1]}"
                bad.add(f"{row.place}: {row.values[0]}: {mismatch}; its boxes would be misplaced")
            else:
                good.append(row)
        pixels, kept = load_pixels(good, form, bad, letterbox)
        good = [good[n] for n in kept]
        detections = []
        for row in good:
            labels = [known[thing.label] for thing in row.values[1]]
            boxes = np.array([thing[1:] for thing in row.values[1]], np.float64).reshape(-1, 4)
            detections.append(Detections(boxes, np.array(labels, np.int64), np.ones(len(labels))))
        return DetectedImages(self, form, pixels, detections, good)

    @property
    def supports_label_smoothing(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """The mean over the images and objects of a batch, times the number of images."""
        assert isinstance(model, Detr)
        (images, by, mirrored), objects = batch.inputs, batch.targets
        if model.training:
            images, objects = shift_and_flip(images, by, mirrored), _shift_and_flip_boxes(objects, by, mirrored, images)
        return model.loss(images, objects, criterion=LOSS) * len(images)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        return metrics.detection(self._detect(model, items), items.detections, len(processor.labels))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        ours, theirs = self.dataset(processor, train[:5000], BadRows()), self.dataset(processor, held_out, BadRows())
        frequent = baselines.frequent_boxes(ours.detections, theirs.detections, self.queries)
        components = baselines.component_boxes(
            ours.pixels, [ours.scaled(n) for n in range(len(ours.detections))], theirs.pixels, len(processor.labels)
        )
        components = [theirs.unscaled(n, one) for n, one in enumerate(components)]
        classes = len(processor.labels)
        return {
            "most frequent boxes": metrics.detection(frequent, theirs.detections, classes),
            "connected components, nearest mean": metrics.detection(components, theirs.detections, classes),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        form = ImageFormat.from_processor(processor)
        pixels, kept = load_pixels(rows, form, bad, letterbox)
        items = DetectedImages(self, form, pixels, [], [rows[n] for n in kept])
        for n, one in zip(kept, self._detect(model, items), strict=True):
            shown = one.scores >= self.threshold
            objects = [
                {"label": processor.labels[label], "score": score, "box": [round(side, 2) for side in box]}
                for box, label, score in zip(*(each[shown].tolist() for each in one), strict=True)
            ]
            text = ", ".join(
                f"{each['label']} at {' '.join(f'{side:.0f}' for side in each['box'])}" for each in objects
            )
            score = float(one.scores[shown].min()) if objects else 1 - float(one.scores.max(initial=0.0))
            yield Prediction(rows[n].values[0], text or "nothing", score, {"objects": objects}, place=rows[n].place)

    @torch.no_grad()
    def _detect(self, model: nn.Module, items: DetectedImages) -> list[Detections]:
        """Detect the objects of each image, highest score first, in pixels of the original image."""
        device, detections = next(model.parameters()).device, []
        for first in track(range(0, len(items.pixels), 64)):
            chosen = np.arange(first, min(first + 64, len(items.pixels)))
            logits, boxes = model(items.images(chosen).to(device))
            scores, labels = logits.float().softmax(-1)[..., :-1].max(-1)
            shares = to_corners(boxes.float()).cpu().double().numpy()
            for n, score, label, share in zip(chosen, scores.cpu().numpy(), labels.cpu().numpy(), shares, strict=True):
                order = np.argsort(-score, kind="stable")
                edges = share[order] * np.tile([items.form.width, items.form.height], 2)
                sides = np.concatenate([edges[:, :2], edges[:, 2:] - edges[:, :2]], 1)
                detections.append(
                    items.unscaled(int(n), Detections(sides, label[order], score[order].astype(np.float64)))
                )
        return detections

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        form = ImageFormat.from_processor(processor)
        return (image_graph(model, (form.channels, form.height, form.width), "logits", "boxes"),)


class DetectedImages:
    """Images as bytes (n, C, height, width), and the objects of each in pixels of the original image."""

    def __init__(
        self, task: Detect, form: ImageFormat, pixels: np.ndarray, detections: Sequence[Detections], rows: Sequence[Row]
    ) -> None:
        self.task, self.form, self.pixels, self.detections = task, form, pixels, detections
        self.places: Sequence[str] = [row.place for row in rows]
        self.extents = [(image_header(row) or (form.height, form.width, False))[:2] for row in rows]
        self.scales = [fit_scale(wide, high, form.width, form.height) for high, wide in self.extents]
        self.sizes = np.full(len(pixels), max(1, form.height * form.width // (4 * 4**task.stages)))

    def images(self, chosen: np.ndarray) -> Tensor:
        """Normalized images, as the model expects them."""
        return self.form.normalize(torch.from_numpy(self.pixels[chosen]))

    def scaled(self, n: int) -> Detections:
        """The objects of an image in pixels of the resized image."""
        return self.detections[n]._replace(boxes=self.detections[n].boxes * self.scales[n])

    def unscaled(self, n: int, detections: Detections) -> Detections:
        """Convert boxes from pixels of the resized image to pixels of the original, clipped to it."""
        high, wide = self.extents[n]
        low, size = np.split(detections.boxes / self.scales[n], 2, 1)
        end = np.clip(low + size, 0, (wide, high))
        low = np.clip(low, 0, (wide, high))
        return detections._replace(boxes=np.concatenate([low, end - low], 1))

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        moves = random_shifts(random, len(chosen), self.task.shift, self.task.flip)
        frame = np.tile([self.form.width, self.form.height], 2)
        objects = []
        for n in chosen:
            low, size = np.split(self.scaled(int(n)).boxes / frame, 2, 1)
            boxes = torch.from_numpy(np.concatenate([low + size / 2, size], 1)).float()
            objects.append(Objects(torch.from_numpy(self.detections[int(n)].labels), boxes))
        return Batch((self.images(chosen), *moves), objects, int(self.sizes[chosen].sum()), len(chosen))


def _shift_and_flip_boxes(objects: Sequence[Objects], by: Tensor, mirrored: Tensor, images: Tensor) -> list[Objects]:
    """Move boxes along with `shift_and_flip`: clipped at the edges, dropped if their centre leaves the image."""
    height, width = images.shape[2:]
    moved = []
    for (labels, boxes), down, right, mirror in zip(
        objects, by[0].tolist(), by[1].tolist(), mirrored.tolist(), strict=True
    ):
        if down or right:
            boxes = boxes + boxes.new_tensor([right / width, down / height, 0, 0])
            inside = ((boxes[:, :2] > 0) & (boxes[:, :2] < 1)).all(1)
            low, high = to_corners(boxes[inside]).clamp(0, 1).split(2, 1)
            labels, boxes = labels[inside], torch.cat(((low + high) / 2, high - low), 1)
        if mirror:
            boxes = torch.cat((1 - boxes[:, :1], boxes[:, 1:]), 1)
        moved.append(Objects(labels, boxes))
    return moved


def _find_splits(folder: Path) -> tuple[Path, Path] | None:
    """Find one training and one validation COCO file in a directory or in its `annotations` subdirectory."""
    for place in (folder, folder / "annotations"):
        files = sorted(place.glob("*.json"))
        train, valid = ([path for path in files if word in path.stem] for word in ("train", "val"))
        if len(train) == len(valid) == 1:
            return train[0], valid[0]
    return None
