"""Image data: files, directories of classes and IDX files, decoded once to bytes; and augmentation of batches."""

from __future__ import annotations

import gzip
import hashlib
import math
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.processor import Processor
from regard.data.readers import Row
from regard.errors import BadRows, UserError, first_line
from regard.field_types import check_minimum, short_repr
from regard.files import is_regular, require_file
from regard.progress import track

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SAMPLE = 2000  # images used to estimate mean and deviation
MAX_MEMORY = 2 << 30  # bytes of images kept in memory; beyond it, a temporary file is used


Resize = Callable[[Any, int, int], Any]
"""Resizes a Pillow image to a width and a height."""


@dataclass(frozen=True)
class ImageFormat:
    """Size of the images, and the mean and standard deviation that normalize each channel.

    >>> import torch
    >>> from regard.data.images import ImageFormat
    >>> ImageFormat(1, 2, 2, (0.5,), (0.25,)).normalize(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).max()
    tensor(2.)
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @staticmethod
    def from_processor(processor: Processor) -> ImageFormat:
        """Read and check the settings that `fit_image_format` saved."""
        form = processor.settings_as(ImageFormat)
        check_minimum(form, height=1, width=1)
        if form.channels not in (1, 3) or not len(form.mean) == len(form.deviation) == form.channels:
            raise UserError(
                f"config must have 1 or 3 channels with a mean and a deviation each, got {short_repr(form)}"
            )
        if min(form.deviation) <= 0:
            raise UserError(f"config.deviation must be positive, but is {short_repr(form.deviation)}")
        return form

    def normalize(self, pixels: Tensor) -> Tensor:
        """Standardize bytes (B, C, height, width)."""
        mean, deviation = (torch.tensor(each)[:, None, None] for each in (self.mean, self.deviation))
        return (pixels.float() / 255 - mean) / deviation


def fit_image_format(rows: Sequence[Row], size: int, fit: Resize, patch: int = 1) -> dict[str, Any]:
    """Determine the image format of the data, as settings of a processor.

    The size is `size`, or that of the images if all have the same, rounded up to whole patches.
    """
    shapes: Counter[tuple[int, int]] = Counter()
    colour = False
    for row in track(rows):
        header = image_header(row)
        if header is not None:
            shapes[header[:2]] += 1
            colour = colour or header[2]
    if not shapes:
        raise UserError(f"{rows[0].place}: no image can be read; is it the right data?")
    if size:
        height = width = size
    elif len(shapes) == 1:
        ((height, width),) = shapes
    else:
        (one, _), (other, _) = shapes.most_common(2)
        raise UserError(
            f"{rows[0].place}: images have {len(shapes)} sizes, such as {one[1]} x {one[0]} and "
            f"{other[1]} x {other[0]}; set the size to which they are resized, such as --size 64"
        )
    height, width = (-(-side // patch) * patch for side in (height, width))
    step = max(1, len(rows) // SAMPLE)
    plain = ImageFormat(3 if colour else 1, height, width, (0.0,), (1.0,))
    sample, _ = load_pixels(rows[::step], plain, BadRows(skip=True), fit)
    if not len(sample):
        raise UserError(f"{rows[0].place}: no image can be read; is it the right data?")
    mean = (sample.mean((0, 2, 3)) / 255).round(4)
    deviation = np.maximum(sample.std((0, 2, 3), dtype=np.float64) / 255, 0.01).round(4)
    return asdict(plain) | {"mean": mean.tolist(), "deviation": deviation.tolist()}


def center_crop(image: Any, width: int, height: int) -> Any:
    """Resize an image to fill the frame, and crop what exceeds it."""
    return pillow("ImageOps").fit(image, (width, height))


def letterbox(image: Any, width: int, height: int) -> Any:
    """Resize an image to fit the frame, at the top left, and pad it with black."""
    scale = fit_scale(image.width, image.height, width, height)
    small = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    frame = pillow("Image").new(image.mode, (width, height))
    frame.paste(small)
    return frame


def fit_scale(width: int, height: int, to_width: int, to_height: int) -> float:
    """Scale factor by which an image fits a frame."""
    return min(to_width / width, to_height / height)


def load_pixels(rows: Sequence[Row], form: ImageFormat, bad: BadRows, fit: Resize) -> tuple[np.ndarray, np.ndarray]:
    """Load images as bytes (n, channels, height, width) and the indices of their rows; unreadable ones are bad."""
    shape = (len(rows), form.channels, form.height, form.width)
    if np.prod(shape, dtype=np.int64) > MAX_MEMORY:
        pixels: np.ndarray = np.memmap(tempfile.TemporaryFile(), np.uint8, "w+", shape=shape)  # noqa: SIM115
    else:
        pixels = np.zeros(shape, np.uint8)
    kept: list[int] = []
    for n, row in enumerate(track(rows)):
        image = decode_image(row, bad)
        if image is None:
            continue
        image = image.convert("RGB" if form.channels == 3 else "L")
        if image.size != (form.width, form.height):
            image = fit(image, form.width, form.height)
        array = np.asarray(image)
        pixels[len(kept)] = array[None] if form.channels == 1 else array.transpose(2, 0, 1)
        kept.append(n)
    return pixels[: len(kept)], np.array(kept, np.int64)


def decode_image(row: Row, bad: BadRows) -> Any:
    """Decode the first value of a row, a path or bytes (height, width, ...), as a Pillow image; None if it is bad."""
    source = row.values[0]
    if isinstance(source, np.ndarray):
        return pillow("Image").fromarray(source)
    pillow("Image")
    try:
        with pillow("Image").open(require_file(source)) as image:
            if image.mode.startswith("I;16"):  # Pillow would clip values above 255
                return pillow("Image").fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image.load()
            return pillow("ImageOps").exif_transpose(image)
    except FileNotFoundError:
        bad.add(f"{row.at}: no such file")
    except Exception as error:  # damaged files raise many types
        bad.add(f"{row.at}: cannot be read as an image ({_error_reason(error)}); save it again as PNG or JPEG")
    return None


def image_header(row: Row) -> tuple[int, int, bool] | None:
    """Height, width and whether there is colour, without decoding; None if unreadable, which `load_pixels` reports."""
    source = row.values[0]
    if isinstance(source, np.ndarray):
        return source.shape[0], source.shape[1], source.ndim == 3
    pillow("Image")
    try:
        with pillow("Image").open(require_file(source)) as image:
            sideways = image.getexif().get(0x0112, 1) >= 5  # EXIF orientation
            height, width = image.size if sideways else image.size[::-1]
            return height, width, not (image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I"))
    except Exception:
        return None


def _error_reason(error: BaseException) -> str:
    words = first_line(error)
    return "unknown format" if words.startswith("cannot identify") else words


def pillow(name: str) -> Any:
    """Import a module of Pillow."""
    from importlib import import_module

    try:
        return import_module(f"PIL.{name}")
    except ImportError:
        raise UserError("images need Pillow: pip install 'regard[images]'") from None


def image_name(row: Row) -> str:
    """Name of the image of a row: its path, or its place in an IDX file."""
    return row.place if isinstance(row.values[0], np.ndarray) else row.values[0]


def content_hash(row: Row) -> str:
    """A hash of the bytes of an image, so that duplicates stay on one side of a split."""
    source = row.values[0]
    data = (
        source.tobytes() if isinstance(source, np.ndarray) else Path(source).read_bytes() if is_regular(source) else b""
    )
    return hashlib.blake2b(data, digest_size=16).hexdigest() if data else str(source)


def folder_of_classes(folder: Path) -> Iterator[Row]:
    """Yield paths and labels of the images `folder/label/**/*.png`, sorted."""
    for label in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        for path in sorted(label.rglob("*")):
            if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
                yield Row(str(path), (str(path), label.name))


def read_idx(source: str) -> np.ndarray:
    """Read an IDX file, the format of MNIST, compressed or not: images (n, height, width) or labels (n,)."""
    try:
        with require_file(source).open("rb") as plain:
            compressed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(source) if compressed else open(source, "rb") as file:
            first = file.read(4)
            axes = first[3] if len(first) == 4 and first[:3] == b"\0\0\x08" else 0
            sizes = file.read(4 * axes)
            if not 0 < axes <= 8 or len(sizes) < 4 * axes:
                raise UserError(
                    f"{source}: not an IDX file of bytes, which starts with 00 00 08; is it the right file?"
                )
            shape = np.frombuffer(sizes, ">u4").tolist()
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error, MemoryError, OverflowError) as error:
        raise UserError(f"{source}: cannot be read ({first_line(error)}); download it again") from error
    if len(data) != math.prod(shape):
        expected, actual = " x ".join(map(str, shape)), "more" if len(data) > math.prod(shape) else len(data)
        raise UserError(f"{source}: expected {expected} bytes after the header, got {actual}; download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def idx_images(source: str) -> Iterator[Row]:
    """Yield the images of an IDX file."""
    images = read_idx(source)
    if images.ndim != 3:
        raise UserError(f"{source}: expected images (n, height, width), got {images.shape}; is it the right file?")
    yield from (Row(f"{source}:{n}", (image,)) for n, image in enumerate(images, 1))


def idx_rows(source: str) -> Iterator[Row]:
    """Yield images of an IDX file with labels from the file next to it, `labels-idx1` instead of `images-idx3`."""
    path = Path(source)
    labels_path = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    if labels_path == path or not labels_path.exists():
        raise UserError(f"{source}: expected the labels in {labels_path.name} next to it, as in MNIST")
    images, labels = read_idx(source), read_idx(str(labels_path))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise UserError(
            f"{source}: expected images (n, height, width) and n labels in {labels_path.name}, got "
            f"{images.shape} and {labels.shape}; are they of the same dataset?"
        )
    for n, (image, label) in enumerate(zip(images, labels, strict=True), 1):
        yield Row(f"{source}:{n}", (image, str(label)))


def random_shifts(random: np.random.Generator, count: int, shift: int, flip: bool) -> tuple[Tensor, Tensor]:
    """Draw random shifts (2, B), in pixels down and right of at most `shift`, and random flips (B,)."""
    by = random.integers(-shift, shift + 1, (2, count))
    return torch.from_numpy(by), torch.from_numpy(random.random(count) < flip / 2)


def shift_and_flip(images: Tensor, by: Tensor, mirrored: Tensor) -> Tensor:
    """Shift images (B, C, height, width) by pixels (2, B), repeating edges, and flip some horizontally.

    >>> import torch
    >>> from regard.data.images import shift_and_flip
    >>> shift_and_flip(torch.arange(3).view(1, 1, 1, 3), torch.tensor([[0], [1]]), torch.tensor([False]))
    tensor([[[[0, 0, 1]]]])
    """
    count, _, height, width = images.shape
    at = torch.arange(width, device=images.device)
    rows = (torch.arange(height, device=images.device) - by[0, :, None]).clamp(0, height - 1)
    columns = (torch.where(mirrored[:, None], at.flip(0), at) - by[1, :, None]).clamp(0, width - 1)
    which = torch.arange(count, device=images.device)[:, None, None]
    return images[which, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
