"""Object detection: bad COCO files, metrics, and a toy problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data.coco import Detections
from regard.data.images import ImageFormat, shift_and_flip
from regard.data.readers import Row
from regard.errors import BadRows
from regard.models.boxes import Objects, to_corners
from regard.tasks import Run, Sources, UserError, tasks, train
from regard.tasks.detect import DetectedImages, _shift_and_flip_boxes
from regard.training.export import export
from regard.training.metrics import detection
from regard.training.runs import load
from regard.training.sources import Examples, read_examples
from tests.tasks.tiny_images import DieAtStep, new_run, scenes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Examples]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("detect")
    run, examples = new_run(
        folder, "detect", scenes(folder / "data", 200), options={"shift": 0, "flip": False}, steps=700,
        learning_rate=2e-3,
        warmup=20, tokens=256, evaluate_every=700, save_every=700,
    )  # fmt: skip
    assert train(run, examples).done
    return run, examples


def spoilt(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = scenes(tmp_path, 6)
    coco = json.loads(path.read_text())
    change(coco)
    path.write_text(json.dumps(coco))
    return path


def boxed(box: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda coco: coco["annotations"][2].update(bbox=box)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda coco: coco["annotations"][2].update(category_id=8), "annotation 2: category_id 8 is not one of .*7, 9"),
        (lambda coco: coco["annotations"][2].update(image_id=77), "annotation 2: image_id 77 is not in images"),
        (lambda coco: coco["annotations"][2].pop("bbox"), "annotation 2: must have image_id, category_id and bbox"),
        (boxed([1, 2, 0, 4]), r"annotation 2: the box \[1, 2, 0, 4\] is empty; boxes of COCO are left, top, width"),
        (boxed([1, 2, 3, -4]), r"annotation 2: the box \[1, 2, 3, -4\] is empty"),
        (boxed([20, 2, 20, 4]), r"annotation 2: the box .* exceeds its image of 32 x 32"),
        (boxed([-5, 2, 20, 4]), "annotation 2: the box .* exceeds its image"),
        (boxed([1, 2, 3]), "annotation 2: bbox must be 4 numbers"),
        (boxed([1, 2, 3, "x"]), "annotation 2: bbox must be 4 numbers"),
        (boxed([1, 2, 3, float("nan")]), "annotation 2: bbox must be 4 numbers"),
        (
            lambda coco: coco["images"][3].update(file_name="x.png"),
            r"image 3: .*x.png: no such file; set the directory with --image-folder",
        ),
        (lambda coco: coco["images"][3].update(id=2), "image 2: duplicate id|is not in images"),
        (lambda coco: coco["images"][3].pop("file_name"), "an image must have id and file_name"),
    ],
)
def test_bad_entries_of_a_coco_file_are_reported_or_left_out(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    path, task = spoilt(tmp_path, change), tasks()["detect"]()
    with pytest.raises(UserError, match=f"objects.json: {message}.*--skip-bad"):
        task.read(str(path), BadRows())
    rows = task.read(str(path), bad := BadRows(skip=True))
    assert bad.count >= 1
    assert len(rows) >= 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "but this has no images"),
        ('{"images": [], "annotations": []}', "but this has no categories"),
        ('{"images": [], "annotations": [], "categories": []}', "has no images"),
    ],
)
def test_files_that_are_not_coco_are_reported(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=f"a.json: .*{message}"):
        tasks()["detect"]().read(str(tmp_path / "a.json"), BadRows())
    with pytest.raises(UserError, match="no such file"):
        tasks()["detect"]().read(str(tmp_path / "b.json"), BadRows())


def test_images_that_cannot_be_used_are_reported_with_file_and_number(tmp_path: Path) -> None:
    path, task = scenes(tmp_path, 6), tasks()["detect"](queries=1)
    rows = task.read(str(path), BadRows())
    processor = task.fit_processor(rows)
    picture = tmp_path / "images" / "4.png"
    picture.write_bytes(picture.read_bytes()[:200])
    with pytest.raises(UserError, match=r"objects.json: image 4: .*4.png: cannot be read as an image"):
        task.dataset(processor, rows, BadRows())
    assert len(task.dataset(processor, rows, BadRows(skip=True)).sizes) == 5
    Image.fromarray(np.zeros((32, 40), np.uint8)).save(picture)
    with pytest.raises(UserError, match=r"image 4: .*4.png: is 40 x 32 pixels, but the COCO file states 32 x 32"):
        task.dataset(processor, rows, BadRows())
    crowded = [rows[0]._replace(values=(rows[0].values[0], rows[0].values[1] * 2, (32, 32)))]
    with pytest.raises(UserError, match="image 0: has 2 objects, more than --queries 1"):
        task.dataset(processor, crowded, BadRows())
    strange = [rows[0]._replace(values=(rows[0].values[0], (rows[0].values[1][0]._replace(label="cow"),), (32, 32)))]
    with pytest.raises(UserError, match="image 0: the category 'cow' was not seen in training; known are bar, square"):
        task.dataset(processor, strange, BadRows())


def test_files_named_as_cocos_are_found_with_their_images(tmp_path: Path) -> None:
    for part in ("train", "val"):
        scenes(tmp_path / part, 6).rename(tmp_path / f"{part}.json")
        (tmp_path / part / "images").rename(tmp_path / f"{part}2017")
    (tmp_path / "annotations").mkdir()
    for part in ("train", "val"):
        (tmp_path / f"{part}.json").rename(tmp_path / "annotations" / f"instances_{part}2017.json")
    examples = read_examples(tasks()["detect"](), Sources((str(tmp_path),)), 1)
    assert Path(examples.train[0].values[0]).parent.name == "train2017"
    assert Path(examples.test[0].values[0]).parent.name == "val2017"
    with pytest.raises(UserError, match=r"contains instances_train2017.json and instances_val2017.json; pass one"):
        tasks()["detect"]().read(str(tmp_path), BadRows())


def test_a_library_that_is_missing_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.tasks.detect.find_spec", lambda name: None if name == "pycocotools" else name)
    with pytest.raises(UserError, match=r"detect needs pycocotools: pip install 'regard\[detect\]'"):
        tasks()["detect"]().fit_processor([])


def test_precision_is_one_for_what_is_true_and_falls_as_boxes_move() -> None:
    chance = np.random.default_rng(0)
    true = [
        Detections(np.concatenate([chance.uniform(0, 40, (3, 2)), np.full((3, 2), 20.0)], 1), np.arange(3), np.ones(3))
        for _ in range(5)
    ]
    moved = [one._replace(boxes=one.boxes + np.array([5, 0, 0, 0])) for one in true]
    gone = [one._replace(boxes=one.boxes + np.array([100, 0, 0, 0])) for one in true]
    renamed = [one._replace(labels=(one.labels + 1) % 3) for one in true]
    assert detection(true, true, 3)["ap"] == pytest.approx(1)
    assert detection(moved, true, 3)["ap50"] == pytest.approx(1)  # 15 / 25 overlap
    assert 0 < detection(moved, true, 3)["ap"] < 0.5
    assert detection(gone, true, 3)["ap50"] == 0
    assert detection(renamed, true, 3)["ap50"] == 0
    nothing = Detections(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0))
    assert detection([nothing] * 5, true, 3)["ap"] == 0


@pytest.mark.parametrize(("down", "right", "mirror"), [(0, 0, True), (3, -2, False), (-4, 5, True)])
def test_boxes_move_with_their_images(down: int, right: int, mirror: bool) -> None:
    images = torch.zeros(1, 1, 32, 32)
    images[0, 0, 8:14, 12:22] = 1
    objects = [Objects(torch.tensor([0]), torch.tensor([[17 / 32, 11 / 32, 10 / 32, 6 / 32]]))]
    by, mirrored = torch.tensor([[down], [right]]), torch.tensor([mirror])
    lit = shift_and_flip(images, by, mirrored)[0, 0].nonzero()
    (moved,) = _shift_and_flip_boxes(objects, by, mirrored, images)
    edges = (to_corners(moved.boxes)[0] * 32).round().int().tolist()
    assert edges == [*lit.min(0).values.flip(0).tolist(), *(lit.max(0).values.flip(0) + 1).tolist()]


def test_boxes_are_in_pixels_of_the_original_image(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((100, 200), np.uint8)).save(tmp_path / "a.png")
    detections = Detections(np.array([[20.0, 10.0, 150.0, 80.0]]), np.array([0]), np.ones(1))
    row = Row("a", (str(tmp_path / "a.png"), ()))
    items = DetectedImages(
        tasks()["detect"](), ImageFormat(1, 64, 64, (0,), (1,)), np.zeros((1, 1, 64, 64)), [detections], [row]
    )
    np.testing.assert_allclose(items.scaled(0).boxes, detections.boxes * 0.32)
    np.testing.assert_allclose(items.unscaled(0, items.scaled(0)).boxes, detections.boxes)


def test_a_run_that_died_ends_with_the_same_bits(tmp_path: Path) -> None:
    source = scenes(tmp_path / "data", 40)
    ended = []
    for name, dies in (("whole", 99), ("died", 5)):
        (tmp_path / name).mkdir()
        run, examples = new_run(tmp_path / name, "detect", source, options={"dropout": 0.1})
        if dies < 99:
            with pytest.raises(KeyboardInterrupt):
                train(run, examples, DieAtStep(dies))
        assert train(Run.open(run.folder)).done
        ended.append(load(run.folder / "checkpoints" / "step-00000008.safetensors")[0])
    assert [key for key in ended[0] if not torch.equal(ended[0][key], ended[1][key])] == []


def test_a_toy_problem_is_learned_and_predicted_with_boxes_and_scores(trained: tuple[Run, Examples]) -> None:
    run, examples = trained
    model, _ = run.model()
    figures = run.task.evaluate(model, run.processor, examples.test)
    baselines = run.task.baselines(run.processor, examples.train, examples.test)
    assert figures["ap50"] > 0.25  # a few seconds of training
    assert figures["ap50"] > 3 * baselines["most frequent boxes"]["ap50"]
    # the baseline finds every box, but cannot distinguish classes of equal brightness
    assert 0.25 < baselines["connected components, nearest mean"]["ap50"] < 0.75
    predictions = list(
        run.task.predict(model, run.processor, [Row("one", row.values[:1]) for row in examples.test], BadRows())
    )
    right = 0
    for row, each in zip(examples.test, predictions, strict=True):
        (thing,), objects = row.values[1], each.more["objects"]
        assert all(0.5 <= one["score"] <= 1 and len(one["box"]) == 4 for one in objects)
        assert each.output.startswith(f"{objects[0]['label']} at " if objects else "nothing")
        near = objects and np.abs(np.array(objects[0]["box"]) - thing[1:]).max() < 8
        right += bool(near and objects[0]["label"] == thing.label)
    assert right >= len(predictions) / 2


def test_an_exported_detector_computes_the_same(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run, _ = trained
    export(run, tmp_path / "out")
    model, _ = run.model()
    images = torch.randn(3, 1, 32, 32)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(regard.load(tmp_path / "out").eval()(images), expected)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    predictions = session.run(["logits", "boxes"], {"pixels": images.numpy()})
    for ours, theirs in zip(predictions, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=1e-4, atol=1e-4)
