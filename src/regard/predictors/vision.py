"""Image models: labels of images, and objects with their boxes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.images import decode_image, folder_of_classes, pillow
from regard.data.labels import encode_labels
from regard.data.readers import Row, resolve_paths, split_cells
from regard.errors import BadRows, UserError
from regard.field_types import check_value
from regard.models.dual_encoder import DualEncoder
from regard.predictors.checkpoint import PREPROCESSOR, Checkpoint, as_user_errors
from regard.predictors.predictor import PredictOptions, Predictor
from regard.progress import track
from regard.training import metrics
from regard.training.task import Metrics, Prediction

SIZES = {"height", "width", "shortest_edge", "longest_edge"}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
MAX_SIDE = 8192  # pixels to which an image may be resized


class ImagePreparation:
    """Resizing, cropping and normalisation as preprocessor_config.json specifies."""

    def __init__(self, checkpoint: Checkpoint, *, size: dict[str, int], mean: float | list[float], std: Any) -> None:
        settings = checkpoint.settings(PREPROCESSOR)
        with as_user_errors(f"{checkpoint.name}: {PREPROCESSOR}"):
            self.size = _sides(settings, "size", size) if settings.get("do_resize", True) else {}
            self.crop = _sides(settings, "crop_size", {}) if settings.get("do_center_crop") else {}
            self.resample = settings.get("resample", 2)
            check_value("resample", self.resample, int)
            if not 0 <= self.resample <= 5:
                raise ValueError(f"resample must be 0 to 5, got {self.resample}")
            scale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
            check_value("rescale_factor", scale, float)
            self.scale = float(scale)
            normalizes = settings.get("do_normalize", True)
            self.mean, self.std = (
                torch.tensor(_channels(settings, name, default) if normalizes else [neutral] * 3)[:, None, None]
                for name, default, neutral in (("image_mean", mean, 0.0), ("image_std", std, 1.0))
            )
            if not bool((self.std > 0).all()):
                raise ValueError("image_std must be positive")

    def resize(self, image: Any) -> Any:
        """Resize and crop a Pillow image."""
        image = image.convert("RGB")
        if self.size:
            image = image.resize(_target(image.size, self.size), self.resample)
        if self.crop:
            width, height = self.crop.get("width", image.width), self.crop.get("height", image.height)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        return image

    def normalize(self, image: Any) -> Tensor:
        """Convert an image to the input of the model, (3, height, width)."""
        pixels = torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1)
        return (pixels * self.scale - self.mean) / self.std


def _sides(settings: dict[str, Any], name: str, default: dict[str, int]) -> dict[str, int]:
    given = settings.get(name)
    given = default if given is None else given
    sides = {"height": given, "width": given} if isinstance(given, int) else given
    check_value(name, sides, dict[str, int])
    if not set(sides) <= SIZES or not all(0 < side <= MAX_SIDE for side in sides.values()):
        raise ValueError(f"{name} must have sides of 1 to {MAX_SIDE} pixels, got {given!r:.80}")
    return sides


def _channels(settings: dict[str, Any], name: str, default: float | list[float]) -> list[float]:
    given = settings.get(name)
    given = default if given is None else given
    given = [float(given)] * 3 if isinstance(given, int | float) else given
    check_value(name, given, list[float])
    if len(given) != 3:
        raise ValueError(f"{name} must have 3 values, got {len(given)}")
    return [float(value) for value in given]


def _target(size: tuple[int, int], sides: dict[str, int]) -> tuple[int, int]:
    """Return width and height of a resized image."""
    if "shortest_edge" not in sides:
        return sides["width"], sides["height"]
    (width, height), (short, long) = size, sorted(size)
    edge = exact = float(sides["shortest_edge"])
    if "longest_edge" in sides and long / short * edge > sides["longest_edge"]:
        exact = sides["longest_edge"] * short / long
        edge = round(exact)
    if short == edge:
        return size
    other = int(exact * long / short)  # transformers rounds this side down
    wide, high = (edge, other) if width < height else (other, edge)
    return max(1, min(MAX_SIDE, int(wide))), max(1, min(MAX_SIDE, int(high)))


class ImagePredictor(Predictor):
    """A predictor whose inputs are image files, or folders of them."""

    input_kind = "image"
    columns: tuple[str, ...] = ("image", "label")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name, self.model, self.checkpoint = checkpoint.name, checkpoint.model, checkpoint
        self.preparation = self.prepare()

    def prepare(self) -> ImagePreparation:
        raise NotImplementedError

    def read(self, source: str, bad: BadRows) -> list[Row]:
        path = Path(source)
        if path.is_dir():
            rows = list(folder_of_classes(path))
            if not rows:
                raise UserError(f"{source}: expected one subdirectory of images per class, found none")
            return rows
        return list(resolve_paths(path, super().read(source, bad)))

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        path = Path(source)
        if path.is_dir():
            return [Row(row.place, row.values[:1]) for row in self.read(source, bad)]
        return resolve_paths(path, super().read_inputs(source, bad))

    def images(self, rows: Sequence[Row], bad: BadRows) -> Iterator[tuple[Row, Any]]:
        """Yield the rows with their decoded images."""
        for row in track(rows):
            if (image := decode_image(row, bad)) is not None:
                yield row, image


class ImageLabels(ImagePredictor):
    """Gives each image a label."""

    kind: ClassVar[str] = "an image classifier"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.labels = checkpoint.labels(self.model.config.classes)

    def prepare(self) -> ImagePreparation:
        height, width = self.model.config.image
        if self.model.config.channels != 3:
            raise UserError(f"{self.name}: takes images of {self.model.config.channels} channels; expected 3")
        return ImagePreparation(self.checkpoint, size={"height": height, "width": width}, mean=0.5, std=0.5)

    @torch.inference_mode()
    def scores(self, image: Any) -> Tensor:
        inputs = self.preparation.normalize(self.preparation.resize(image))
        return self.checkpoint.class_scores(self.model(inputs[None])[0])

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        for row, image in self.images(rows, bad):
            best, at = self.scores(image).topk(min(5, len(self.labels)))
            probabilities = {self.labels[n]: score for n, score in zip(at.tolist(), best.tolist(), strict=True)}
            note = ", ".join(f"{label} {score:.3f}" for label, score in list(probabilities.items())[1:])
            label = next(iter(probabilities))
            yield Prediction(row.values[0], label, probabilities[label], probabilities, note, place=row.place)

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure accuracy and F1. Labels are those of the model, or their numbers."""
        self.checkpoint.check_one_label(len(self.labels))
        numbers = {str(n): label for n, label in enumerate(self.labels)}
        named = [Row(row.place, (row.values[0], numbers.get(row.values[1], row.values[1]))) for row in rows]
        good, targets = encode_labels(self.labels, named, bad)
        right = dict(zip((row.place for row in good), targets.tolist(), strict=True))
        scored = [(right[row.place], self.scores(image)) for row, image in self.images(good, bad)]
        if not scored:
            raise UserError("there is no image to evaluate on")
        scores, labels = torch.stack([score for _, score in scored]), torch.tensor([label for label, _ in scored])
        loss = F.nll_loss(scores.clamp(min=1e-12).log(), labels)
        return {"loss": float(loss)} | metrics.classification(scores, labels) | {"rows": len(labels)}

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        image = decode_image(Row(prediction.input, (prediction.input,)), BadRows())
        pixels = torch.from_numpy(np.array(self.preparation.resize(image))).permute(2, 0, 1)
        patch = self.model.config.patch
        record.set_image(pixels, (pixels.shape[1] // patch, pixels.shape[2] // patch), first=1)


class ZeroShotLabels(ImagePredictor):
    """Compares images with texts: `--labels` in `predict`, the labels of the data in `evaluate`."""

    kind: ClassVar[str] = "a dual encoder of images and texts"
    accepts: ClassVar[tuple[str, ...]] = ("labels",)
    model: DualEncoder

    def prepare(self) -> ImagePreparation:
        vision, several = self.model.config.vision, self.model.config.logit_bias
        if vision.channels != 3:
            raise UserError(f"{self.name}: takes images of {vision.channels} channels; expected 3")
        size = dict(zip(("height", "width"), vision.image, strict=True))
        mean, std = (0.5, 0.5) if several else (CLIP_MEAN, CLIP_STD)
        return ImagePreparation(self.checkpoint, size=size, mean=mean, std=std)

    def configure(self, options: PredictOptions) -> None:
        super().configure(options)
        if options.labels is not None and len(set(self._labels())) != len(self._labels()):
            raise UserError(f"--labels must be distinct, got {options.labels!r}")

    def _labels(self) -> list[str]:
        labels = [label for label in split_cells(self.options.labels or "", ",") if label]
        if not labels:
            raise UserError(
                f'{self.name}: compares images with texts; give some: --labels "a photo of a cat,a photo of a dog"'
            )
        return labels

    @torch.inference_mode()
    def embed_labels(self, labels: Sequence[str]) -> Tensor:
        """Return unit vectors (labels, d_output)."""
        tokenizer, longest = self.checkpoint.tokenizer, self.model.config.text.positions
        texts = [tokenizer.encode(label).ids for label in labels]
        for label, ids in zip(labels, texts, strict=True):
            if len(ids) > longest:
                raise UserError(f"the label {label!r:.60} has {len(ids)} tokens, but the model takes at most {longest}")
        if self.model.config.text_pooling == "last":  # texts are padded to the length of those in training
            padding = tokenizer.token_to_id(self.checkpoint.special_token("pad_token") or "</s>")
            if padding is None:
                raise UserError(f"{self.name}: tokenizer_config.json must have a pad_token, which its texts end with")
            return self.model.embed_texts(torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in texts]))
        return self.model.embed_texts([torch.tensor(ids) for ids in texts])

    @torch.inference_mode()
    def scores(self, image: Any, labels: Tensor) -> Tensor:
        """Return the probability of each label: they sum to 1, or are independent if the model has a logit bias."""
        inputs = self.preparation.normalize(self.preparation.resize(image))
        logits = (self.model.embed_images(inputs[None]) @ labels.mT)[0] * self.model.scale.exp()
        return logits.softmax(-1) if self.model.bias is None else (logits + self.model.bias).sigmoid()

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        labels = self._labels()
        vectors = self.embed_labels(labels)
        for row, image in self.images(rows, bad):
            scores, order = self.scores(image, vectors).sort(descending=True, stable=True)
            scored = {labels[n]: score for n, score in zip(order.tolist(), scores.tolist(), strict=True)}
            note = ", ".join(f"{label} {score:.3f}" for label, score in list(scored.items())[1:5])
            label = next(iter(scored))
            yield Prediction(row.values[0], label, scored[label], scored, note, place=row.place)

    def examine(self, row: Row, bad: BadRows) -> Prediction | None:
        """Embed the image only."""
        for _, image in self.images([row], bad):
            inputs = self.preparation.normalize(self.preparation.resize(image))
            with torch.inference_mode():
                self.model.embed_images(inputs[None])
            return Prediction(row.values[0], "", None, {}, place=row.place)
        return None

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure accuracy and F1 among the labels of the data."""
        names = sorted({row.values[1] for row in rows})
        if len(names) < 2:
            raise UserError("there are fewer than two labels to evaluate on")
        vectors = self.embed_labels(names)
        scored = [(names.index(row.values[1]), self.scores(image, vectors)) for row, image in self.images(rows, bad)]
        if not scored:
            raise UserError("there is no image to evaluate on")
        scores, labels = torch.stack([score for _, score in scored]), torch.tensor([label for label, _ in scored])
        return {**metrics.classification(scores, labels), "labels": len(names), "rows": len(labels)}

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        image = decode_image(Row(prediction.input, (prediction.input,)), BadRows())
        pixels = torch.from_numpy(np.array(self.preparation.resize(image))).permute(2, 0, 1)
        vision = self.model.config.vision
        record.set_image(pixels, vision.grid, first=int(vision.class_token))


class ObjectDetector(ImagePredictor):
    """Finds objects in images; with `--out picture.png` it draws their boxes."""

    kind: ClassVar[str] = "an object detector"
    accepts: ClassVar[tuple[str, ...]] = ("threshold",)
    file_suffixes: ClassVar[tuple[str, ...]] = (".png", ".jpg")
    columns = ("image",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        given = checkpoint.config.get("id2label") or {}
        self.labels = [str(given.get(str(n), n)) for n in range(self.model.config.classes)]  # unused ones are "N/A"

    def prepare(self) -> ImagePreparation:
        size = {"shortest_edge": 800, "longest_edge": 1333}
        return ImagePreparation(self.checkpoint, size=size, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        threshold = 0.7 if self.options.threshold is None else self.options.threshold
        for row, image in self.images(rows, bad):
            inputs = self.preparation.normalize(self.preparation.resize(image))
            ((labels, scores, boxes),) = self.model.detect(inputs[None], threshold=threshold)
            edges = boxes * torch.tensor([image.width, image.height] * 2)
            objects = [
                {"label": self.labels[label], "score": score, "box": [round(edge, 1) for edge in box]}
                for label, score, box in zip(labels.tolist(), scores.tolist(), edges.tolist(), strict=True)
            ]
            text = ", ".join(
                f"{each['label']} {each['score']:.2f} at {' '.join(f'{edge:.0f}' for edge in each['box'])}"
                for each in objects
            )
            score = min(scores.tolist(), default=None)
            yield Prediction(row.values[0], text or "nothing", score, {"objects": objects}, place=row.place)

    def write_file(self, prediction: Prediction, suffix: str) -> bytes:
        """Draw the boxes on the image, with labels and scores."""
        image = decode_image(Row(prediction.input, (prediction.input,)), BadRows()).convert("RGB")
        pen = pillow("ImageDraw").Draw(image)
        width, size = max(2, image.height // 200), max(12, image.height // 40)
        font = pillow("ImageFont").load_default(size)
        for each in prediction.more["objects"]:
            color = COLORS[sum(map(ord, each["label"])) % len(COLORS)]
            pen.rectangle(each["box"], outline=color, width=width)
            words, corner = (
                f"{each['label']} {each['score']:.2f}",
                (each["box"][0], max(0, each["box"][1] - size * 1.3)),
            )
            pen.rectangle(pen.textbbox(corner, words, font=font), fill=color)
            pen.text(corner, words, fill="white", font=font)
        buffer = io.BytesIO()
        image.save(buffer, "PNG" if suffix == ".png" else "JPEG")
        return buffer.getvalue()

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        """Leave the numbers of the cells: the grid of the backbone depends on the size of the image."""


COLORS = ("#4e79a7", "#d1662a", "#c2383a", "#3d8c84", "#48853d", "#8c6d1f", "#8e5f87", "#b0566a")
