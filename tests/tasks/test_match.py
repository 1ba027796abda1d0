"""Image-text matching: reading data, bad data, and a toy problem."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli.view import make_capture
from regard.data.readers import Row
from regard.errors import BadRows
from regard.predictors import open_model
from regard.tasks import Run, Sources, UserError, create_run, train
from regard.tasks.match import CANDIDATES, Match, split_input
from regard.training.sources import read_examples
from tests.tasks.tiny_images import stripes

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "fusion": 1, "heads": 2, "patch": 4, "stem": 1, "shift": 0,
                         "vocabulary": 300}  # fmt: skip


def table(folder: Path, count: int = 120) -> Path:
    """Each image with a right and a wrong text."""
    rows = [("image", "text", "label")]
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    for n, (label, image) in enumerate(stripes(count)):
        Image.fromarray(image).save(folder / "seen" / f"{n}.png")
        other = {"lies": "rises", "rises": "lies"}[label]
        rows += [(f"seen/{n}.png", f"it {label}", "yes"), (f"seen/{n}.png", f"it {other}", "no")]
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "list.csv"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("match")
    task = Match(**SMALL)
    recipe = replace(task.recipe, steps=150, tokens=300, learning_rate=1e-2, warmup=10, evaluate_every=50, ema=0.9)
    run, examples = create_run(folder / "run", task, recipe, Sources((str(table(folder)),), held_out=15))
    assert train(run, examples).done
    return run, examples, folder


def test_no_image_is_on_two_sides(tmp_path: Path) -> None:
    examples = read_examples(Match(**SMALL), Sources((str(table(tmp_path, 40)),), held_out=10), 1)
    sides = [{row.values[0] for row in part} for part in (examples.train, examples.validation, examples.test)]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 40
    assert len(examples.test) == 2 * len(sides[2])


def test_an_image_of_many_texts_is_decoded_once(tmp_path: Path) -> None:
    task = Match(**SMALL)
    rows = task.read(str(table(tmp_path, 6)), BadRows())
    items = task.dataset(task.fit_processor(rows), rows, BadRows())
    assert (len(items.pixels), len(items.sizes)) == (6, 12)
    images, text, mask = items.inputs(np.array([0, 1, 4]))
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert text.shape == mask.shape
    assert items.targets.tolist() == [1, 0] * 6


def test_the_loss_is_of_the_answers_and_of_the_right_text_among_those_of_the_batch(tmp_path: Path) -> None:
    task = Match(**SMALL, contrast=0.5)
    rows = task.read(str(table(tmp_path, 3)), BadRows())
    processor = task.fit_processor(rows)
    model, items = task.model(processor).eval(), task.dataset(processor, rows, BadRows())
    batch = items.batch(np.arange(6), np.random.default_rng(0))
    logits, images, texts = model.match(*items.inputs(np.arange(6)))  # type: ignore[operator]
    right = torch.tensor([1.0, 0, 1, 0, 1, 0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, right, reduction="sum")
    for n in (0, 2, 4):  # the same text of another image is not a negative
        among = [n, *(m for m in range(6) if rows[m].values[1] != rows[n].values[1])]
        expected += 0.5 * -(10 * images[n] @ texts[among].T).log_softmax(0)[0]
    torch.testing.assert_close(task.loss(model, batch, 0.0), expected)


@pytest.mark.parametrize("how", ["no image", "missing"])
def test_an_image_that_cannot_be_read_is_reported_or_left_out_with_all_its_texts(how: str, tmp_path: Path) -> None:
    task = Match(**SMALL)
    rows = task.read(str(table(tmp_path, 6)), BadRows())
    processor = task.fit_processor(rows)
    path = tmp_path / "seen" / "2.png"
    if how == "missing":
        path.unlink()
    else:
        path.write_text("hello")
    message = "no such file" if how == "missing" else "cannot be read as an image"
    with pytest.raises(UserError, match=rf"list.csv:6: .*seen/2.png: {message}.*--skip-bad"):
        task.dataset(processor, rows, BadRows())
    items = task.dataset(processor, rows, bad := BadRows(skip=True))
    assert (len(items.sizes), bad.count) == (10, 1)
    assert items.targets.tolist() == [1, 0] * 5


BAD = {
    "empty": (b"", r"a.csv:1: no line can be used"),
    "no text": (b"image,label\na.png,yes\n", r"a.csv:1: no column 'text'"),
    "an empty cell": (b"image,text,label\na.png,,yes\n", r"a.csv:2: column 2 \(text\) is empty"),
    "no UTF-8": (b"image,text,label\na.png,\xff,yes\n", r"a.csv:2: not valid UTF-8"),
}


@pytest.mark.parametrize("how", list(BAD))
def test_defects_of_a_table_are_reported_with_file_and_line(how: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(BAD[how][0])
    with pytest.raises(UserError, match=BAD[how][1]):
        Match().read(str(tmp_path / "a.csv"), BadRows())


def test_answers_and_texts_that_the_model_cannot_take_are_reported(tmp_path: Path) -> None:
    task = Match(**SMALL, longest=8)
    rows = task.read(str(table(tmp_path, 4)), BadRows())
    processor = task.fit_processor(rows)
    image = rows[0].values[0]
    with pytest.raises(UserError, match=r"b:1: expected the label yes or no, or 1 or 0, got 'maybe'"):
        task.dataset(processor, [Row("b:1", (image, "it lies", "maybe"))], BadRows())
    with pytest.raises(UserError, match=r"b:2: has \d+ tokens, but the model takes at most 8; train with --longest"):
        task.dataset(processor, [Row("b:2", (image, "it rises and it lies and it rises", "no"))], BadRows())
    assert task.dataset(processor, [Row("b:3", (image, "it lies", "FALSE"))], BadRows()).targets.tolist() == [0]


def test_a_text_of_an_image_is_known_from_one_that_is_not(trained: tuple[Run, Any, Path]) -> None:
    run, examples, _ = trained
    model, _ = run.model()
    metrics = run.task.evaluate(model, run.processor, examples.test)
    assert metrics["accuracy"] > 0.9
    assert f"right of {CANDIDATES}" not in metrics  # there are only two texts
    rivals = run.task.baselines(run.processor, examples.train, examples.test)
    assert all(each["accuracy"] < 0.7 for each in rivals.values())


def test_the_right_text_is_looked_for_among_others(tmp_path: Path) -> None:
    rows = [("image", "text", "label")]
    for n in range(25):
        Image.fromarray(np.full((8, 8), n * 10, np.uint8)).save(tmp_path / f"{n}.png")
        rows.append((f"{n}.png", f"it has {n}", "yes"))
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    task = Match(**SMALL)
    listed = task.read(str(tmp_path / "list.csv"), BadRows())
    processor = task.fit_processor(listed)

    class Knows(torch.nn.Module):
        """Match images and texts by brightness and last words."""

        def __init__(self, sign: int) -> None:
            super().__init__()
            self.weight, self.sign = torch.nn.Parameter(torch.zeros(())), sign

        def forward(self, images: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            known = {
                task.dataset(processor, [row], BadRows()).inputs(np.array([0]))[0][0, 0, 0, 0].item(): row
                for row in listed
            }
            words = [
                processor.require_tokenizer().decode(ids[real].tolist()) for ids, real in zip(text, mask, strict=True)
            ]
            right = [known[image[0, 0, 0].item()].values[1] for image in images]
            return self.sign * torch.tensor([float(a == b) for a, b in zip(words, right, strict=True)])

    items = task.dataset(processor, listed, BadRows())
    assert task._ranking_metrics(Knows(1), items) == {f"right of {CANDIDATES}": 1.0, "mrr": 1.0}
    assert task._ranking_metrics(Knows(-1), items) == {
        f"right of {CANDIDATES}": 0.0,
        "mrr": pytest.approx(1 / CANDIDATES),
    }


@pytest.mark.parametrize("between", [" ", "\t", ": "])
def test_an_image_and_a_text_are_given_in_one_line(trained: tuple[Run, Any, Path], between: str) -> None:
    run, examples, _ = trained
    model, _ = run.model()
    path = examples.test[0].values[0]
    right = next(row.values[1] for row in examples.test if row.values[0] == path and row.values[2] == "yes")
    (prediction,) = run.task.predict(model, run.processor, [Row("input 1", (f"{path}{between}{right}",))], BadRows())
    assert (prediction.output, prediction.score > 0.5) == ("yes", True)


def test_invalid_inputs_are_reported(trained: tuple[Run, Any, Path]) -> None:
    run, _, _ = trained
    model, _ = run.model()
    for given in ("it lies", "a.png", "a.png  "):
        assert split_input(given) is None
        with pytest.raises(UserError, match=r"input 1: expected the path of an image and a text, such as: scene.png"):
            list(run.task.predict(model, run.processor, [Row("input 1", (given,))], BadRows()))
    with pytest.raises(UserError, match=r"input 1: nowhere.png: no such file"):
        list(run.task.predict(model, run.processor, [Row("input 1", ("nowhere.png it lies",))], BadRows()))


def test_words_and_patches_are_the_tokens_of_a_view(trained: tuple[Run, Any, Path]) -> None:
    run, examples, _ = trained
    record = make_capture(open_model(str(run.folder)))(f"{examples.test[0].values[0]} it rises")
    across = [seen for seen in record.attentions if seen.kind == "cross"]
    words, patches = (record.streams[name].tokens for name in record.stream_names(across[0]))
    assert (words[0], words[-1], patches[:3]) == ("<s>", "</s>", ("[CLS]", "0,0", "0,1"))
    assert tuple(record.streams[name].tokens for name in record.stream_names(across[1])) == (patches, words)
    assert record.image is not None
    assert record.image["grid"] == [2, 2]
