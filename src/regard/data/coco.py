"""Object detection data in COCO format: a JSON file of images, annotations and categories, and a directory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.readers import Row, read_text
from regard.errors import BadRows, UserError, first_line
from regard.field_types import short_repr
from regard.files import is_regular

SLACK = 1.0  # pixels by which boxes may exceed the image, since tools round


class Thing(NamedTuple):
    """An object: its class, and its box in pixels."""

    label: str
    left: float
    top: float
    width: float
    height: float


def coco_rows(source: str, image_folder: str, bad: BadRows) -> Iterator[Row]:
    """Read one row per image: path, objects, and (width, height) as stated. Crowds are left out, as in COCO.

    image_folder: directory of the images; if empty, common places near the file are searched.
    """
    content = _read_coco(source)
    names: dict[Any, str] = {}
    for entry in content["categories"]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            bad.add(f"{source}: a category must have an id (integer or string), got {_shorten(entry)}")
        else:
            names[entry["id"]] = str(entry.get("name", entry["id"]))
    things: dict[Any, list[Thing]] = {}
    for entry in content["images"]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("file_name"), str):
            bad.add(f"{source}: an image must have id and file_name, got {_shorten(entry)}")
        elif entry["id"] in things:
            bad.add(f"{source}: image {entry['id']}: duplicate id")
        else:
            things[entry["id"]] = []
    sizes = {
        entry["id"]: (entry.get("width"), entry.get("height"))
        for entry in content["images"]
        if isinstance(entry, dict) and _is_id(entry.get("id"))
    }
    for entry in content["annotations"]:
        at = f"{source}: annotation {_shorten(entry.get('id', '?')) if isinstance(entry, dict) else '?'}"
        parsed = _parse_annotation(at, entry, names, sizes, bad)
        if parsed is not None and entry["image_id"] in things:
            things[entry["image_id"]].append(parsed)
    folder = _image_folder(source, image_folder, content["images"])
    for entry in content["images"]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or entry["id"] not in things:
            continue
        path = folder / entry["file_name"]
        if not is_regular(path):
            bad.add(f"{source}: image {entry['id']}: {path}: no such file; set the directory with --image-folder")
        else:
            yield Row(f"{source}: image {entry['id']}", (str(path), tuple(things.pop(entry["id"])), sizes[entry["id"]]))


def coco_images(source: str, image_folder: str, bad: BadRows) -> Iterator[Row]:
    """Read one row per image of a COCO file, with its path; annotations are not needed."""
    images = _read_coco(source, needed=("images",))["images"]
    named = [entry for entry in images if isinstance(entry, dict) and isinstance(entry.get("file_name"), str)]
    folder = _image_folder(source, image_folder, named)
    for n, entry in enumerate(images):
        if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
            bad.add(f"{source}: an image must have file_name, got {_shorten(entry)}")
        else:
            yield Row(f"{source}: image {entry.get('id', n)}", (str(folder / entry["file_name"]),))


def _read_coco(source: str, needed: Sequence[str] = ("images", "annotations", "categories")) -> dict[str, Any]:
    if not Path(source).exists():
        raise UserError(f"{source}: no such file; expected a COCO file such as instances_train.json")
    text = read_text(Path(source))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid JSON ({first_line(error)}); is it the COCO file?") from error
    missing = [name for name in needed if not isinstance(content, dict) or not isinstance(content.get(name), list)]
    if missing:
        *others, last = needed
        parts = f"{', '.join(others)} and {last}" if others else last
        raise UserError(f"{source}: a COCO file has {parts}, but this has no {missing[0]}")
    if not content["images"]:
        raise UserError(f"{source}: has no images; is it the right file?")
    return content


def _parse_annotation(at: str, entry: Any, names: dict[Any, str], sizes: dict[Any, Any], bad: BadRows) -> Thing | None:
    if not isinstance(entry, dict) or not {"image_id", "category_id", "bbox"} <= set(entry):
        bad.add(f"{at}: must have image_id, category_id and bbox, got {_shorten(entry)}")
        return None
    if entry.get("iscrowd"):
        return None
    if not _is_id(entry["image_id"]) or entry["image_id"] not in sizes:
        bad.add(f"{at}: image_id {_shorten(entry['image_id'])} is not in images")
        return None
    if not _is_id(entry["category_id"]) or entry["category_id"] not in names:
        known = ", ".join(str(key) for key in list(names)[:6]) + (", ..." if len(names) > 6 else "")
        bad.add(f"{at}: category_id {_shorten(entry['category_id'])} is not one of the categories {known or 'none'}")
        return None
    box = entry["bbox"]
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(side) for side in box):
        bad.add(f"{at}: bbox must be 4 numbers (left, top, width, height in pixels), got {_shorten(box)}")
        return None
    left, top, width, height = map(float, box)
    if width <= 0 or height <= 0:
        bad.add(f"{at}: the box {box} is empty; boxes of COCO are left, top, width, height")
        return None
    wide, high = sizes[entry["image_id"]]
    wide, high = (side if _is_number(side) else math.inf for side in (wide, high))
    if min(left, top) < -SLACK or left + width > wide + SLACK or top + height > high + SLACK:
        bad.add(f"{at}: the box {box} exceeds its image of {wide} x {high} pixels")
        return None
    right, bottom, left, top = min(left + width, wide), min(top + height, high), max(left, 0.0), max(top, 0.0)
    return Thing(names[entry["category_id"]], left, top, right - left, bottom - top)


def _is_number(value: Any) -> bool:
    """Whether a value is a number in the range of pixels."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2**31


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str)


def _shorten(value: Any) -> str:
    text = short_repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _image_folder(source: str, image_folder: str, images: Sequence[Any]) -> Path:
    """Return the first candidate directory that contains one of the first images."""
    if image_folder:
        return Path(image_folder)
    path = Path(source)
    named = path.stem.removeprefix("instances_")
    places = [path.parent, *(base / name for base in (path.parent, path.parent.parent) for name in (named, "images"))]
    names = (entry.get("file_name") for entry in images[:20] if isinstance(entry, dict))
    first = [name for name in names if isinstance(name, str)]
    return next((place for place in places if any(is_regular(place / name) for name in first)), places[1])


class Detections(NamedTuple):
    """Objects of one image: boxes (n, 4) as left, top, width, height, their classes (n,) and scores (n,)."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
