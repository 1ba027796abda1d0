"""The objects of an image: what they are, and where."""

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
from regard.models.boxes import Objects, SetLoss, to_corners
from regard.models.detection import Detr, DetrConfig
from regard.models.resnet import ResNetConfig
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, image_graph
from regard.training.recipe import Recipe, check_maximum, check_minimum, option
from regard.training.task import Batch, Metrics, Prediction, Task

LOSS = SetLoss(class_weight=2.0)


@dataclass(frozen=True)
class Detect(Task):
    """DETR, on a small residual network that is trained with it."""

    name: ClassVar[str] = "detect"
    description: ClassVar[str] = "the objects of an image, with their boxes"
    example: ClassVar[str] = (
        'a COCO file and a folder of images:\n{"images": [{"id": 1, "file_name": "1.png", ...}],\n "annotations": '
        '[{"image_id": 1, "category_id": 3,\n "bbox": [left, top, width, height], ...}],\n "categories": [...]}'
    )
    input_kind: ClassVar[str] = "image"
    recipe: ClassVar[Recipe] = Recipe(
        steps=12000, tokens=1024, learning_rate=5e-4, warmup=300, weight_decay=1e-4, ema=0.998, evaluate_every=1000,
        save_every=500,
    )  # fmt: skip

    image_folder: str = option("", "folder of the images; looked for beside the COCO file unless told")
    size: int = option(0, "pixels each way that images are brought to; 0 for their own size, where all have the same")
    queries: int = option(16, "objects found in an image at most")
    channels: int = option(32, "of the first stage of convolutions; each further stage has twice as many")
    stages: int = option(2, "of convolutions: 2 leave an eighth of the image each way, 3 a sixteenth")
    d_model: int = option(96, "width of the hidden states")
    layers: int = option(1, "of the encoder")
    decoder_layers: int = option(3, "of the decoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.0, "in training")
    shift: int = option(0, "pixels by which images are moved at random in training")
    flip: bool = option(False, "images are mirrored left to right at random in training")
    threshold: float = option(0.5, "lowest score of an object that `regard predict` tells")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, size=0, shift=0, queries=1, channels=1, stages=1, layers=1, decoder_layers=1)
        check_maximum(self, stages=10)
        if self.d_model % 4:
            raise ValueError(f"d_model must be a multiple of 4, but is {self.d_model}")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        if Path(source).is_dir():
            if parts := _find_splits(Path(source)):
                raise UserError(f"{source}: holds {' and '.join(part.name for part in parts)}; say which of them it is")
            raise UserError(f"{source}: is a folder; expected a COCO file, such as {source}/instances_train.json")
        return list(coco.coco_rows(source, self.image_folder, bad))

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        if Path(source).is_dir():
            self.read(source, bad)  # raises, and says which file is expected
        return coco.coco_images(source, self.image_folder, bad)

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        return _find_splits(folder)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, content_hash, held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        for needed in ("scipy", "pycocotools"):  # before the training, not at its end
            if find_spec(needed) is None:
                raise UserError(f"detect needs {needed}: pip install 'regard[detect]'")
        labels = tuple(sorted({thing.label for row in rows for thing in row.values[1]}))
        if not labels:
            raise UserError(
                f"{rows[0].place if rows else 'the data'}: there is no object in any image; is it the right file?"
            )
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
            _, things, text = row.values
            strange = next((thing.label for thing in things if thing.label not in known), None)
            if strange is not None:
                bad.add(unseen_message(row.place, "category", strange, processor.labels))
            elif len(things) > self.queries:
                bad.add(f"{row.place}: has {len(things)} objects, but --queries {self.queries} finds no more")
            elif (came := image_header(row)) and None not in text and came[1::-1] != text:
                was = f"is {came[1]} x {came[0]} pixels, but the COCO file says {text[0]} x {text[1]}"
                bad.add(f"{row.place}: {row.values[0]}: {was}; its boxes would be elsewhere")
            else:
                good.append(row)
        pixels, kept = load_pixels(good, form, bad, letterbox)
        good = [good[n] for n in kept]
        found = []
        for row in good:
            labels = [known[thing.label] for thing in row.values[1]]
            boxes = np.array([thing[1:] for thing in row.values[1]], np.float64).reshape(-1, 4)
            found.append(Detections(boxes, np.array(labels, np.int64), np.ones(len(labels))))
        return DetectedImages(self, form, pixels, found, good)

    @property
    def supports_label_smoothing(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """The mean over images and objects of a batch, times its images."""
        assert isinstance(model, Detr)
        (images, by, mirrored), objects = batch.inputs, batch.targets
        if model.training:
            images, objects = shift_and_flip(images, by, mirrored), _shift_and_flip_boxes(objects, by, mirrored, images)
        return model.loss(images, objects, criterion=LOSS) * len(images)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        return metrics.detection(self._detect(model, items), items.found, len(processor.labels))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        ours, theirs = self.dataset(processor, train[:5000], BadRows()), self.dataset(processor, held_out, BadRows())
        usual = baselines.frequent_boxes(ours.found, theirs.found, self.queries)
        pieces = baselines.component_boxes(
            ours.pixels, [ours.scaled(n) for n in range(len(ours.found))], theirs.pixels, len(processor.labels)
        )
        pieces = [theirs.unscaled(n, one) for n, one in enumerate(pieces)]
        return {
            "most frequent boxes": metrics.detection(usual, theirs.found, len(processor.labels)),
            "connected pieces, nearest mean": metrics.detection(pieces, theirs.found, len(processor.labels)),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        form = ImageFormat.from_processor(processor)
        pixels, kept = load_pixels(rows, form, bad, letterbox)
        items = DetectedImages(self, form, pixels, [], [rows[n] for n in kept])
        for n, one in zip(kept, self._detect(model, items), strict=True):
            sure = one.scores >= self.threshold
            objects = [
                {"label": processor.labels[label], "score": score, "box": [round(side, 2) for side in box]}
                for box, label, score in zip(*(each[sure].tolist() for each in one), strict=True)
            ]
            text = ", ".join(
                f"{each['label']} at {' '.join(f'{side:.0f}' for side in each['box'])}" for each in objects
            )
            score = float(one.scores[sure].min()) if objects else 1 - float(one.scores.max(initial=0.0))
            yield Prediction(rows[n].values[0], text or "nothing", score, {"objects": objects}, place=rows[n].place)

    @torch.no_grad()
    def _detect(self, model: nn.Module, items: DetectedImages) -> list[Detections]:
        """What the model finds in each image, the surest first, in pixels of the image."""
        device, found = next(model.parameters()).device, []
        for first in track(range(0, len(items.pixels), 64)):
            chosen = np.arange(first, min(first + 64, len(items.pixels)))
            logits, boxes = model(items.images(chosen).to(device))
            scores, labels = logits.float().softmax(-1)[..., :-1].max(-1)
            shares = to_corners(boxes.float()).cpu().double().numpy()
            for n, score, label, share in zip(chosen, scores.cpu().numpy(), labels.cpu().numpy(), shares, strict=True):
                order = np.argsort(-score, kind="stable")
                edges = share[order] * np.tile([items.form.width, items.form.height], 2)
                sides = np.concatenate([edges[:, :2], edges[:, 2:] - edges[:, :2]], 1)
                found.append(items.unscaled(int(n), Detections(sides, label[order], score[order].astype(np.float64))))
        return found

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        form = ImageFormat.from_processor(processor)
        return (image_graph(model, (form.channels, form.height, form.width), "logits", "boxes"),)


class DetectedImages:
    """Images as bytes (n, C, height, width), and the objects of each, in pixels of the images as they were."""

    def __init__(
        self, task: Detect, form: ImageFormat, pixels: np.ndarray, found: Sequence[Detections], rows: Sequence[Row]
    ) -> None:
        self.task, self.form, self.pixels, self.found = task, form, pixels, found
        self.places: Sequence[str] = [row.place for row in rows]
        self.extents = [(image_header(row) or (form.height, form.width, False))[:2] for row in rows]
        self.scales = [fit_scale(wide, high, form.width, form.height) for high, wide in self.extents]
        self.sizes = np.full(len(pixels), max(1, form.height * form.width // (4 * 4**task.stages)))

    def images(self, chosen: np.ndarray) -> Tensor:
        """As the model takes them."""
        return self.form.normalize(torch.from_numpy(self.pixels[chosen]))

    def scaled(self, n: int) -> Detections:
        """The objects of an image in pixels of what the model sees."""
        return self.found[n]._replace(boxes=self.found[n].boxes * self.scales[n])

    def unscaled(self, n: int, found: Detections) -> Detections:
        """Boxes in pixels of what the model sees, in those of the image, within its edges."""
        high, wide = self.extents[n]
        low, size = np.split(found.boxes / self.scales[n], 2, 1)
        end = np.clip(low + size, 0, (wide, high))
        low = np.clip(low, 0, (wide, high))
        return found._replace(boxes=np.concatenate([low, end - low], 1))

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        moves = random_shifts(random, len(chosen), self.task.shift, self.task.flip)
        frame = np.tile([self.form.width, self.form.height], 2)
        objects = []
        for n in chosen:
            low, size = np.split(self.scaled(int(n)).boxes / frame, 2, 1)
            boxes = torch.from_numpy(np.concatenate([low + size / 2, size], 1)).float()
            objects.append(Objects(torch.from_numpy(self.found[int(n)].labels), boxes))
        return Batch((self.images(chosen), *moves), objects, int(self.sizes[chosen].sum()), len(chosen))


def _shift_and_flip_boxes(objects: Sequence[Objects], by: Tensor, mirrored: Tensor, images: Tensor) -> list[Objects]:
    """The objects of images that `shift_and_flip` moved: cut off at the edges, gone if their middle is outside."""
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
    """Where a folder, or its folder `annotations`, has a COCO file to train on and one that is held out."""
    for place in (folder, folder / "annotations"):
        files = sorted(place.glob("*.json"))
        train, valid = ([path for path in files if word in path.stem] for word in ("train", "val"))
        if len(train) == len(valid) == 1:
            return train[0], valid[0]
    return None
