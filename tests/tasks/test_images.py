"""Image classification: formats, bad data, and a toy problem."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data.images import ImageFormat, center_crop, fit_image_format, load_pixels
from regard.data.readers import Row, fingerprint
from regard.errors import BadRows
from regard.tasks import Run, Sources, UserError, tasks, train
from regard.training.export import export
from regard.training.runs import load
from regard.training.sources import Examples, read_examples
from tests.tasks.tiny_images import DieAtStep, folder_of, new_run, stripes

PICTURES = stripes(60)


def idx(values: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def idx_files(folder: Path, name: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    labels = np.array([label == "rises" for label, _ in PICTURES], np.uint8)
    path = folder / f"{name}-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.stack([image for _, image in PICTURES]))))
    (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return path


def rows_of(source: Path | str, *, skip: bool = False, **options: Any) -> list[Row]:
    return tasks()["images"](**options).read(str(source), BadRows(skip=skip))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Examples]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("images")
    run, examples = new_run(
        folder, "images", folder_of(folder / "data", stripes(160)), steps=150, learning_rate=1e-2, warmup=10,
        evaluate_every=50,
        save_every=500,
    )  # fmt: skip
    assert train(run, examples).done
    return run, examples


@pytest.mark.parametrize("form", ["folder", "csv", "tsv", "jsonl", "idx"])
def test_the_same_images_come_from_every_format(form: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", PICTURES)
    paths = {path.name: path.relative_to(tmp_path) for path in folder.rglob("*.png")}
    lines = [(str(paths[f"{n:03}.png"]), label) for n, (label, _) in enumerate(PICTURES)]
    source = tmp_path / f"list.{form}"
    if form == "folder":
        source = folder
    elif form == "csv":
        source.write_text("image,label\n" + "".join(f"{path},{label}\n" for path, label in lines))
    elif form == "tsv":
        source.write_text("".join(f"{path}\t{label}\n" for path, label in lines))
    elif form == "jsonl":
        source.write_text("".join(json.dumps({"image": path, "label": label}) + "\n" for path, label in lines))
    else:
        source = idx_files(tmp_path)
    rows = rows_of(source)
    pixels, kept = load_pixels(rows, ImageFormat(**fit_image_format(rows, 0, center_crop)), BadRows(), center_crop)
    names = {"0": "lies", "1": "rises"}
    came = {(names.get(rows[n].values[1], rows[n].values[1]), pixels[n].tobytes()) for n in kept}
    assert came == {(label, image.tobytes()) for label, image in PICTURES}


@pytest.mark.parametrize("names", [("train", "valid"), ("train", "test"), ("Train", "val")])
def test_a_folder_with_both_splits_determines_the_held_out_data(names: tuple[str, str], tmp_path: Path) -> None:
    folder_of(tmp_path / names[0], PICTURES[:40])
    folder_of(tmp_path / names[1], PICTURES[40:])
    examples = read_examples(tasks()["images"](), Sources((str(tmp_path),)), 1)
    assert (len(examples.train), len(examples.validation), len(examples.test)) == (36, 4, 20)
    with pytest.raises(UserError, match=r"contains .* and .*; pass one of them"):
        rows_of(tmp_path)


def test_a_folder_of_mnist_files_determines_the_held_out_data(tmp_path: Path) -> None:
    idx_files(tmp_path)
    idx_files(tmp_path, "t10k")
    examples = read_examples(tasks()["images"](), Sources((str(tmp_path),)), 1)
    assert (len(examples.train), len(examples.validation), len(examples.test)) == (54, 6, 60)
    assert "t10k" in examples.test[0].place


def broken(path: Path, how: str) -> str:
    """Damage an image, and return the expected message."""
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:70])
        return "cannot be read as an image"
    if how == "no image":
        path.write_text("hello")
        return r"cannot be read as an image \(unknown format\); save it again as PNG or JPEG"
    if how == "empty":
        path.write_bytes(b"")
        return "cannot be read as an image"
    path.unlink()
    return "no such file"


@pytest.mark.parametrize("how", ["truncated", "no image", "empty", "missing"])
def test_an_image_that_cannot_be_read_is_reported_with_its_file_or_left_out(how: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", PICTURES)
    rows = rows_of(folder)
    task = tasks()["images"](patch=4, stem=1)
    processor = task.fit_processor(rows)
    message = broken(folder / "lies" / "004.png", how)
    with pytest.raises(UserError, match=rf"lies/004.png: {message}.*--skip-bad"):
        task.dataset(processor, rows, BadRows())
    items = task.dataset(processor, rows, bad := BadRows(skip=True))
    assert (len(items.sizes), bad.count) == (59, 1)
    assert "lies/004.png" not in " ".join(items.places)


def test_an_image_of_a_table_that_is_missing_is_reported_with_file_and_line(tmp_path: Path) -> None:
    folder_of(tmp_path, PICTURES)
    (tmp_path / "list.csv").write_text("image,label\nlies/000.png,lies\nrises/999.png,rises\n")
    task = tasks()["images"](patch=4, stem=1)
    rows = task.read(str(tmp_path / "list.csv"), BadRows())
    with pytest.raises(UserError, match=r"list.csv:3: .*rises/999.png: no such file"):
        task.dataset(task.fit_processor(rows * 2), rows, BadRows())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no labels", "expected the labels in train-labels-idx1-ubyte.gz next to it"),
        ("cut short", r"expected 60 x 8 x 8 bytes after the header, got 3838"),
        ("damaged", "cannot be read"),
        ("another format", "not an IDX file of bytes"),
        ("other labels", r"\(60, 8, 8\) and \(59,\); are they of the same dataset"),
    ],
)
def test_defects_of_idx_files_are_reported(what: str, message: str, tmp_path: Path) -> None:
    path = idx_files(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    if what == "no labels":
        labels.unlink()
    elif what == "cut short":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-2]))
    elif what == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    elif what == "another format":
        path.write_bytes(b"PNG and more")
    else:
        labels.write_bytes(gzip.compress(idx(np.zeros(59, np.uint8))))
    with pytest.raises(UserError, match=message):
        rows_of(path)


def test_images_of_different_sizes_ask_for_one_size(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [*stripes(6), *[("wide", np.zeros((5, 9), np.uint8))] * 6])
    rows = rows_of(folder)
    with pytest.raises(UserError, match=r"images have 2 sizes, such as .*8 x 8.*; set the size .* --size 64"):
        tasks()["images"](patch=4, stem=1).fit_processor(rows)
    assert ImageFormat.from_processor(tasks()["images"](patch=4, stem=1, size=16).fit_processor(rows)).height == 16


def test_sizes_are_whole_patches_and_colour_is_kept(tmp_path: Path) -> None:
    images = [(label, np.stack([image, image // 2, image // 4], -1)) for label, image in stripes(10, 9)]
    form = ImageFormat.from_processor(
        tasks()["images"](patch=4, stem=1).fit_processor(rows_of(folder_of(tmp_path, images)))
    )
    assert (form.channels, form.height, form.width) == (3, 12, 12)
    assert form.mean[0] > form.mean[1] > form.mean[2]


def test_images_of_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(tmp_path / "a.png")
    pixels, _ = load_pixels(
        [Row("a", (str(tmp_path / "a.png"),))], ImageFormat(1, 8, 8, (0,), (1,)), BadRows(), center_crop
    )
    assert pixels.ravel().tolist() == [n * 1000 // 256 for n in range(64)]


def test_the_same_image_is_never_on_both_sides(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, PICTURES[:20])
    for path in list(folder.rglob("*.png")):
        path.with_name(f"copy-{path.name}").write_bytes(path.read_bytes())
    examples = read_examples(tasks()["images"](), Sources((str(folder),), held_out=5), 1)
    assert len(examples.test) == 10
    held = {Path(row.values[0]).read_bytes() for row in examples.test}
    assert not any(Path(row.values[0]).read_bytes() in held for row in examples.train)


def test_a_folder_that_changed_is_noticed(tmp_path: Path) -> None:
    folder_of(tmp_path, PICTURES[:4])
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "lies" / "000.png").unlink()
    assert fingerprint(str(tmp_path)) != before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("images", {"shift": -1}, "shift must be at least 0, but is -1"),
        ("images", {"layers": 0}, "layers must be at least 1, but is 0"),
        ("images", {"patch": 6, "stem": 2}, "patch must be a multiple of 2 to the power of stem = 2, but is 6"),
        ("detect", {"shift": -1}, "shift must be at least 0, but is -1"),
        ("detect", {"queries": 0}, "queries must be at least 1, but is 0"),
        ("detect", {"d_model": 18, "heads": 2}, "d_model must be a multiple of 4, but is 18"),
    ],
)
def test_invalid_options_are_reported(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks()[name](**options)


def test_only_training_moves_images(trained: tuple[Run, Examples]) -> None:
    run, examples = trained
    model, _ = run.model()
    items, chosen = run.task.dataset(run.processor, examples.test, BadRows()), np.arange(8)
    one, other = (items.batch(chosen, np.random.default_rng(seed)) for seed in (1, 2))
    assert torch.equal(run.task.loss(model, one, 0.0), run.task.loss(model, other, 0.0))
    assert not torch.equal(run.task.loss(model.train(), one, 0.0), run.task.loss(model, other, 0.0))


def test_a_run_that_died_ends_with_the_same_bits(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "data", PICTURES)
    ended = []
    for name, dies in (("whole", 99), ("died", 5)):
        (tmp_path / name).mkdir()
        run, examples = new_run(tmp_path / name, "images", source, options={"flip": True, "dropout": 0.1})
        if dies < 99:
            with pytest.raises(KeyboardInterrupt):
                train(run, examples, DieAtStep(dies))
        assert train(Run.open(run.folder)).done
        ended.append(load(run.folder / "checkpoints" / "step-00000008.safetensors")[0])
    assert [key for key in ended[0] if not torch.equal(ended[0][key], ended[1][key])] == []


def test_a_toy_problem_is_learned_and_predicted_with_its_probability(
    trained: tuple[Run, Examples], tmp_path: Path
) -> None:
    run, examples = trained
    model, _ = run.model()
    figures = run.task.evaluate(model, run.processor, examples.test)
    baselines = run.task.baselines(run.processor, examples.train, examples.test)
    assert figures["accuracy"] == 1
    assert baselines["most frequent class"]["accuracy"] < 1
    assert 0 <= baselines["logistic regression on pixels"]["accuracy"] <= 1
    folder = folder_of(tmp_path, stripes(6, seed=9))
    rows = [Row(str(path), (str(path),)) for path in sorted(folder.rglob("*.png"))]
    predictions = list(run.task.predict(model, run.processor, rows, BadRows()))
    assert [each.output for each in predictions] == ["lies"] * 3 + ["rises"] * 3
    assert all(0.5 < each.score <= 1 and sum(each.more.values()) == pytest.approx(1, abs=1e-5) for each in predictions)
    with pytest.raises(UserError, match=r"nowhere.png: no such file"):
        list(run.task.predict(model, run.processor, [Row("nowhere.png", ("nowhere.png",))], BadRows()))


def test_an_exported_image_classifier_computes_the_same(trained: tuple[Run, Examples], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run, _ = trained
    export(run, tmp_path / "out")
    model, _ = run.model()
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(regard.load(tmp_path / "out").eval()(images), expected)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    predictions = session.run(None, {"pixels": images.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(predictions), expected, rtol=1e-4, atol=1e-5)
