"""The training loop: bitwise identical results after any interruption, and its errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from regard.tasks import Run, Sources, UserError, create_run, tasks, train
from regard.tasks.masked import MaskedTexts
from regard.training.recipe import Recipe
from regard.training.run_files import read_lines as read_log
from regard.training.runs import load
from regard.training.sources import read_examples
from regard.training.task import Batch
from tests.tasks.conftest import Start
from tests.tasks.tiny_runs import RecordingCallback, Signals, kill_at_step, kill_while_saving, new_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run. Masking and dropout are random, so that random states must be reproduced too."""
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("finished"))
    assert train(run).done
    return run


@pytest.fixture
def fresh(finished: Run, tmp_path: Path) -> Run:
    """The same run, not yet trained."""
    shutil.copytree(
        finished.folder, tmp_path / "run", ignore=lambda folder, names: {"best.safetensors", "log.jsonl"} & set(names)
    )
    for path in Run.open(tmp_path / "run").checkpoints():
        path.unlink()
    return Run.open(tmp_path / "run")


def assert_same_bits(run: Run, other: Run) -> None:
    for name in ("checkpoints/step-00000008.safetensors", "best.safetensors"):
        (ours, notes), (theirs, their_notes) = load(run.folder / name), load(other.folder / name)
        assert notes == their_notes
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    states = [
        [(line["step"], line["loss"]) for line in read_log(each.folder / "log.jsonl") if "loss" in line]
        for each in (run, other)
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize("step", range(1, 9))
def test_a_run_killed_at_any_step_ends_with_the_same_bits(step: int, fresh: Run, finished: Run, start: Start) -> None:
    process = start(kill_at_step, str(fresh.folder), step)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert train(Run.open(fresh.folder)).done
    assert_same_bits(fresh, finished)


@pytest.mark.parametrize("moment", ["while it is written", "before it has its name", "right after"])
def test_a_run_killed_while_it_saves_ends_with_the_same_bits(
    moment: str, fresh: Run, finished: Run, start: Start
) -> None:
    process = start(kill_while_saving, str(fresh.folder), moment)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert bool(list((fresh.folder / "checkpoints").glob(".*"))) == (moment != "right after")
    assert train(Run.open(fresh.folder)).done
    assert_same_bits(fresh, finished)
    assert list((fresh.folder / "checkpoints").glob(".*")) == []  # no partial files are left


def test_a_run_killed_again_and_again_still_ends_with_the_same_bits(fresh: Run, finished: Run, start: Start) -> None:
    for step in (2, 5, 7):
        start(kill_at_step, str(fresh.folder), step).join(60)
    assert train(Run.open(fresh.folder)).done
    assert_same_bits(fresh, finished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_first(number: int, fresh: Run, finished: Run) -> None:
    progress = train(fresh, callback=Signals(5, number))
    assert (progress.step, progress.done) == (5, False)
    assert fresh.checkpoints()[0].name == "step-00000005.safetensors"
    assert train(Run.open(fresh.folder)).done
    assert_same_bits(fresh, finished)


def test_a_truncated_checkpoint_is_skipped_for_the_one_before(fresh: Run, finished: Run) -> None:
    train(fresh, callback=Signals(7, signal.SIGINT))
    last = fresh.checkpoints()[0]
    os.truncate(last, last.stat().st_size // 2)
    recorded = RecordingCallback()
    assert train(Run.open(fresh.folder), callback=recorded).done
    assert recorded.steps[0].step == 7  # the one of step 6 was taken
    assert last.name in recorded.lines[0]
    assert_same_bits(fresh, finished)


def test_when_no_checkpoint_can_be_read_it_reports_it(fresh: Run) -> None:
    train(fresh, callback=Signals(4, signal.SIGINT))
    for path in fresh.checkpoints():
        path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="no checkpoint can be read"):
        train(Run.open(fresh.folder))


def test_a_finished_run_is_not_trained_again(finished: Run) -> None:
    recorded = RecordingCallback()
    assert train(Run.open(finished.folder), callback=recorded).done
    assert recorded.steps == []


def test_data_that_changed_stops_a_resumed_run(fresh: Run) -> None:
    source = Path(fresh.about["sources"]["data"][0])
    before = source.read_text()
    try:
        source.write_text(before + "one more line\n")
        with pytest.raises(UserError, match=f"{source}: changed since the run started"):
            train(fresh)
    finally:
        source.write_text(before)


def test_accumulated_parts_give_the_losses_of_the_whole_batch(tmp_path: Path) -> None:
    recorded = []
    for n, parts in enumerate((1, 3)):
        (tmp_path / str(n)).mkdir()
        run = new_run(tmp_path / str(n), "translate", options={"dropout": 0.0}, accumulate=parts)
        recorded.append(RecordingCallback())
        train(run, callback=recorded[-1])
    whole, parts = ([step.loss for step in each.steps] for each in recorded)
    assert parts == pytest.approx(whole, rel=1e-5)


def test_every_example_comes_once_before_one_comes_again(fresh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[np.ndarray] = []
    batch = MaskedTexts.batch

    def watched(self: MaskedTexts, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        taken.append(chosen)
        return batch(self, chosen, random)

    monkeypatch.setattr(MaskedTexts, "batch", watched)
    monkeypatch.setattr("regard.training.loop._Trainer._evaluate", lambda self: None)
    examples = read_examples(fresh.task, Sources.from_json(fresh.about["sources"]), 1)
    train(fresh, examples, Signals(7, signal.SIGINT))
    count = len(examples.train)
    assert len(taken) == 8  # the last was not taken to its end
    assert sorted(np.concatenate(taken)[:count].tolist()) == list(range(count))


def test_early_stopping_ends_a_run_that_gets_no_better(tmp_path: Path) -> None:
    run = new_run(tmp_path, "classify", steps=200, evaluate_every=1, patience=2, learning_rate=0.5, ema=0.0, tokens=600)
    progress = train(run)
    assert progress.done
    assert progress.step < 200
    assert progress.stale == 2
    _, step = run.model()
    assert step == progress.step - 2  # the best, not the last


class _Breaks(nn.Module):
    def __init__(self, inner: nn.Module, step: int) -> None:
        super().__init__()
        self.inner, self.left = inner, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        return self.inner(x) * (float("nan") if self.left <= 0 else 1.0)


def test_a_loss_that_is_not_finite_stops_with_the_step_the_batch_and_the_layer(
    fresh: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(fresh.task)
    model_of = kind.model

    def broken(self: object, processor: object) -> nn.Module:
        model = model_of(self, processor)  # type: ignore[arg-type]
        block = model.encoder.stack.layers[0]  # type: ignore[union-attr, index]
        block.feedforward = _Breaks(block.feedforward, 3)
        return model

    monkeypatch.setattr(kind, "model", broken)
    with pytest.raises(UserError) as caught:
        train(fresh)
    message = str(caught.value)
    assert message.startswith("step 3: the loss is nan; it comes from the layer encoder.stack.layers.0.feedforward")
    assert "texts.txt:" in message
    assert "\n" not in message


def test_weights_that_are_not_finite_are_named(fresh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(fresh.task)
    monkeypatch.setattr(kind, "load_pretrained", lambda self, model: model.transform.weight.data.fill_(float("inf")))
    with pytest.raises(UserError, match=r"step 1: the loss is nan; it comes from the weight transform.weight"):
        train(fresh)


def test_a_gradient_that_is_not_finite_is_named(fresh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_pretrained(self: object, model: nn.Module) -> None:
        model.bias.register_hook(lambda grad: grad * float("inf"))  # type: ignore[union-attr, operator]

    monkeypatch.setattr(type(fresh.task), "load_pretrained", load_pretrained)
    with pytest.raises(
        UserError, match=r"step 1: the norm of the gradient is (nan|inf); it comes from the gradient of bias"
    ):
        train(fresh)


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=100, warmup=10, learning_rate=1.0)
    rates = [recipe.learning_rate_at(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert rates[54] == pytest.approx(0.5)
    assert rates[-1] == 0


def test_run_json_has_all_that_is_needed_to_repeat_it(finished: Run) -> None:
    about = json.loads((finished.folder / "run.json").read_text())
    assert {"task", "options", "recipe", "sources", "command", "machine"} <= about.keys()
    assert about["recipe"]["seed"] == 1
    assert len(about["sources"]["files"][0]["sha256"]) == 64


def test_another_seed_gives_other_losses(tmp_path: Path, finished: Run) -> None:
    run = new_run(tmp_path, seed=2)
    train(run)
    ours, theirs = (load(each.folder / "best.safetensors")[0] for each in (run, finished))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 0), ("learning_rate", 0.0), ("ema", 1.0), ("precision", "bf61"), ("evaluate_every", 0)],
)
def test_a_recipe_that_makes_no_sense_says_what_is_expected(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}.* must be .*{value}"):
        replace(Recipe(), **{field: value})


@pytest.mark.parametrize(
    ("name", "options"), [("answer", {}), ("transcribe", {}), ("speak", {}), ("detect", {}), ("sets", {"number": True})]
)
def test_smoothing_is_refused_where_the_loss_has_no_labels(name: str, options: dict[str, bool], tmp_path: Path) -> None:
    task = tasks()[name](**options)
    with pytest.raises(UserError, match=r"--label-smoothing 0.1.*not supported"):
        create_run(tmp_path / "run", task, replace(task.recipe, label_smoothing=0.1), Sources(("data",)))


def test_a_held_out_loss_that_is_nan_does_not_stop_later_ones_from_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, float("nan"), 2.0, float("nan")])
    monkeypatch.setattr("regard.training.loop._Trainer.validation_loss", lambda self: next(losses))
    run = new_run(tmp_path, steps=8, evaluate_every=2)
    assert train(run).best == 2.0
    assert run.model()[1] == 6


def test_a_first_held_out_loss_that_is_nan_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([float("nan"), 5.0])
    monkeypatch.setattr("regard.training.loop._Trainer.validation_loss", lambda self: next(losses))
    run = new_run(tmp_path, steps=8, evaluate_every=4)
    assert train(run).best == 5.0
    assert (run.folder / "best.safetensors").exists()
