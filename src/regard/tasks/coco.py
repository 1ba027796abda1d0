"""Objects in images, as COCO writes them: a JSON of images, annotations and categories, and the images beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.field_types import quoted
from regard.files import is_regular
from regard.tasks.data import Row, text_of
from regard.tasks.metrics import Found
from regard.tasks.trouble import Bad, Trouble, first_line

SLACK = 1.0  # pixels by which boxes may stand out: tools round


class Thing(NamedTuple):
    """An object: its class, and its box in pixels."""

    label: str
    left: float
    top: float
    width: float
    height: float


def coco_rows(source: str, pictures: str, bad: Bad) -> Iterator[Row]:
    """A row for each image: its path, its things, and its (width, height) as told; crowds are left out, as COCO does.

    pictures: the folder of the images; empty looks beside the file, in folders named as people name them.
    """
    held = _held(source)
    names: dict[Any, str] = {}
    for entry in held["categories"]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            bad(f"{source}: a category must have an id, a number or a text, but is {_short(entry)}")
        else:
            names[entry["id"]] = str(entry.get("name", entry["id"]))
    things: dict[Any, list[Thing]] = {}
    for entry in held["images"]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("file_name"), str):
            bad(f"{source}: an image must have id and file_name, but is {_short(entry)}")
        elif entry["id"] in things:
            bad(f"{source}: image {entry['id']}: there are two of this id")
        else:
            things[entry["id"]] = []
    sizes = {
        entry["id"]: (entry.get("width"), entry.get("height"))
        for entry in held["images"]
        if isinstance(entry, dict) and _is_id(entry.get("id"))
    }
    for entry in held["annotations"]:
        at = f"{source}: annotation {_short(entry.get('id', '?')) if isinstance(entry, dict) else '?'}"
        found = _thing(at, entry, names, sizes, bad)
        if found is not None and entry["image_id"] in things:
            things[entry["image_id"]].append(found)
    folder = _folder(source, pictures, held["images"])
    for entry in held["images"]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or entry["id"] not in things:
            continue
        path = folder / entry["file_name"]
        if not is_regular(path):
            bad(f"{source}: image {entry['id']}: {path}: there is no such file; --pictures FOLDER says where they are")
        else:
            yield Row(f"{source}: image {entry['id']}", (str(path), tuple(things.pop(entry["id"])), sizes[entry["id"]]))


def coco_images(source: str, pictures: str, bad: Bad) -> Iterator[Row]:
    """A row for each image of a COCO file, with its path; annotations need not be there."""
    images = _held(source, needed=("images",))["images"]
    named = [entry for entry in images if isinstance(entry, dict) and isinstance(entry.get("file_name"), str)]
    folder = _folder(source, pictures, named)
    for n, entry in enumerate(images):
        if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
            bad(f"{source}: an image must have file_name, but is {_short(entry)}")
        else:
            yield Row(f"{source}: image {entry.get('id', n)}", (str(folder / entry["file_name"]),))


def _held(source: str, needed: Sequence[str] = ("images", "annotations", "categories")) -> dict[str, Any]:
    if not Path(source).exists():
        raise Trouble(f"{source}: there is no such file; give a COCO file, such as instances_train.json")
    text = text_of(Path(source))
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Trouble(f"{source}: is no JSON ({first_line(error)}); is it the COCO file?") from error
    lacking = [name for name in needed if not isinstance(held, dict) or not isinstance(held.get(name), list)]
    if lacking:
        *others, last = needed
        parts = f"{', '.join(others)} and {last}" if others else last
        raise Trouble(f"{source}: a COCO file has {parts}, but this has no {lacking[0]}")
    if not held["images"]:
        raise Trouble(f"{source}: has no images; is it the right file?")
    return held


def _thing(at: str, entry: Any, names: dict[Any, str], sizes: dict[Any, Any], bad: Bad) -> Thing | None:
    if not isinstance(entry, dict) or not {"image_id", "category_id", "bbox"} <= set(entry):
        bad(f"{at}: must have image_id, category_id and bbox, but is {_short(entry)}")
        return None
    if entry.get("iscrowd"):
        return None
    if not _is_id(entry["image_id"]) or entry["image_id"] not in sizes:
        bad(f"{at}: is of image {_short(entry['image_id'])}, which is none of the images")
        return None
    if not _is_id(entry["category_id"]) or entry["category_id"] not in names:
        known = ", ".join(str(key) for key in list(names)[:6]) + (", ..." if len(names) > 6 else "")
        bad(f"{at}: category_id {_short(entry['category_id'])} is none of the categories, which are {known or 'none'}")
        return None
    box = entry["bbox"]
    if not isinstance(box, list) or len(box) != 4 or not all(_number(side) for side in box):
        bad(f"{at}: bbox must be 4 numbers, left, top, width and height in pixels, but is {_short(box)}")
        return None
    left, top, width, height = map(float, box)
    if width <= 0 or height <= 0:
        bad(f"{at}: the box {box} is empty; COCO's boxes are left, top, width, height")
        return None
    wide, high = sizes[entry["image_id"]]
    wide, high = (side if _number(side) else math.inf for side in (wide, high))
    if min(left, top) < -SLACK or left + width > wide + SLACK or top + height > high + SLACK:
        bad(f"{at}: the box {box} reaches outside of its image, which is {wide} x {high} pixels")
        return None
    right, bottom, left, top = min(left + width, wide), min(top + height, high), max(left, 0.0), max(top, 0.0)
    return Thing(names[entry["category_id"]], left, top, right - left, bottom - top)


def _number(value: Any) -> bool:
    """Whether a value is a number that can be one of pixels."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2**31


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str)


def _short(value: Any) -> str:
    text = quoted(value)
    return text if len(text) < 60 else text[:57] + "..."


def _folder(source: str, pictures: str, images: Sequence[Any]) -> Path:
    """Where the images are: the first place that has one of the first few."""
    if pictures:
        return Path(pictures)
    path = Path(source)
    named = path.stem.removeprefix("instances_")
    places = [path.parent, *(base / name for base in (path.parent, path.parent.parent) for name in (named, "images"))]
    told = (entry.get("file_name") for entry in images[:20] if isinstance(entry, dict))
    first = [name for name in told if isinstance(name, str)]
    return next((place for place in places if any(is_regular(place / name) for name in first)), places[1])


def by_frequency(train: Sequence[Found], held: Sequence[Found], count: int) -> list[Found]:
    """The same for every image: `count` boxes in the middle of what training has, each with its commonest class."""
    from sklearn.cluster import KMeans

    boxes = np.concatenate([one.boxes for one in train])[:20000]
    labels = np.concatenate([one.labels for one in train])[:20000]
    grouped = KMeans(min(count, len(np.unique(boxes, axis=0))), n_init=1, random_state=0).fit(boxes)
    kinds = [np.bincount(labels[grouped.labels_ == n]) for n in range(len(grouped.cluster_centers_))]
    scores = np.array([kind.max() for kind in kinds]) / len(train)
    said = Found(grouped.cluster_centers_, np.array([int(kind.argmax()) for kind in kinds]), scores)
    return [said] * len(held)


def by_components(
    images: np.ndarray, train: Sequence[Found], held: np.ndarray, classes: int, patch: int = 16
) -> list[Found]:
    """What stands out from the background, piece by piece, named after the class whose mean picture is nearest.

    Images (n, C, height, width) as bytes. What differs from an image's median by a third of what any part of it does is
    a piece.
    """
    from scipy.ndimage import find_objects, label

    def shrunk(part: np.ndarray) -> np.ndarray:
        rows, columns = (np.arange(patch) * side // patch for side in part.shape)
        small = part[np.ix_(rows, columns)].astype(np.float64)
        return ((small - small.mean()) / (small.std() + 1e-6)).ravel()

    totals, counts = np.zeros((classes, patch * patch)), np.zeros((classes, 1))
    for image, one in zip(images, train, strict=True):
        grey = image.mean(0)
        for (left, top, width, height), kind in zip(one.boxes, one.labels, strict=True):
            part = grey[
                int(top) : max(int(top) + 1, round(top + height)), int(left) : max(int(left) + 1, round(left + width))
            ]
            if part.size:
                totals[kind] += shrunk(part)
                counts[kind] += 1
    means = totals / np.maximum(counts, 1)
    found = []
    for image in held:
        grey = image.mean(0)
        away = np.abs(grey - np.median(grey))
        pieces, _ = label(away > max(1.0, np.quantile(away, 0.995) / 3), np.ones((3, 3)))
        boxes, kinds, scores = [], [], []
        for rows, columns in find_objects(pieces):
            height, width = rows.stop - rows.start, columns.stop - columns.start
            if height * width < 0.004 * grey.size:
                continue
            near = means @ shrunk(grey[rows, columns]) / patch**2  # both have mean 0 and deviation 1: their correlation
            boxes.append((columns.start, rows.start, width, height))
            kinds.append(int(near.argmax()))
            scores.append(float(near.max()))
        found.append(Found(np.array(boxes, np.float64).reshape(-1, 4), np.array(kinds, np.int64), np.array(scores)))
    return found
