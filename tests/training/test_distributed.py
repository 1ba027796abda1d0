"""Several processes: the same losses as one, checkpoints for other numbers of processes, and a killed worker."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
from regard.tasks import Run, UserError, train
from regard.training.export import export
from regard.training.run_files import read_lines as read_log
from regard.training.runs import load
from tests.tasks.conftest import Start
from tests.tasks.tiny_runs import new_run, shard_on_two_ranks, train_as_rank


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def losses(run: Run, name: str = "loss") -> list[float]:
    return [line[name] for line in read_log(run.folder / "log.jsonl") if name in line]


def tokens(run: Run) -> list[float]:
    steps = [line for line in read_log(run.folder / "log.jsonl") if "loss" in line]
    return [line["tokens_per_second"] * line["seconds"] for line in steps]


@pytest.fixture
def train_together(start: Start) -> Callable[..., Run]:
    """Train a run with several processes."""

    def trained(folder: Path, world: int, stop: int = 0, **recipe: Any) -> Run:
        port = free_port()
        arguments = [(world, str(folder), rank, port, recipe, stop) for rank in range(world)]
        processes = [start(train_as_rank, *each) for each in arguments]
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * world
        return Run.open(folder)

    return trained


@pytest.mark.parametrize(("parts", "shard", "world"), [(2, "data", 2), (2, "fsdp", 2), (1, "fsdp", 4)])
def test_several_processes_get_the_losses_of_one_for_the_same_global_batch(
    parts: int, shard: str, world: int, tmp_path: Path, train_together: Callable[..., Run]
) -> None:
    one = new_run(tmp_path, "translate", options={"dropout": 0.0}, accumulate=parts, steps=6)
    shutil.copytree(one.folder, tmp_path / "more")
    train(one)
    more = train_together(tmp_path / "more", world, shard=shard)
    assert losses(more) == pytest.approx(losses(one), rel=2e-5)
    assert losses(more, "validation_loss") == pytest.approx(losses(one, "validation_loss"), rel=2e-5)


@pytest.mark.parametrize(("world", "ranks", "shard", "context"), [(4, 2, "data", 23), (2, 2, "fsdp", 24)])
def test_processes_that_share_sequences_get_the_losses_of_one(
    world: int, ranks: int, shard: str, context: int, tmp_path: Path, train_together: Callable[..., Run]
) -> None:
    one = new_run(tmp_path, "language", options={"dropout": 0.0, "context": context}, accumulate=2, steps=5)
    shutil.copytree(one.folder, tmp_path / "more")
    train(one)
    more = train_together(tmp_path / "more", world, shard=shard, sequence_ranks=ranks)
    assert losses(more) == pytest.approx(losses(one), rel=2e-5)
    assert losses(more, "validation_loss") == pytest.approx(losses(one, "validation_loss"), rel=2e-5)
    assert tokens(more) == pytest.approx(tokens(one))


def test_a_task_that_cannot_share_sequences_reports_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"classify cannot share a sequence among processes \(language can\)"):
        new_run(tmp_path, "classify", sequence_ranks=2)


def test_ranks_of_a_sequence_that_do_not_divide_the_processes_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sequence-ranks 2 must divide the number of processes, which is 1; choose"):
        new_run(tmp_path, "language", sequence_ranks=2)


def test_an_fsdp_checkpoint_of_two_resumes_with_one_four_and_unsharded_processes(
    tmp_path: Path, train_together: Callable[..., Run]
) -> None:
    one = new_run(tmp_path, "language", options={"dropout": 0.0, "context": 24, "d_model": 24}, steps=9)
    shutil.copytree(one.folder, tmp_path / "two")
    train(one)
    two = train_together(tmp_path / "two", 2, stop=4, shard="fsdp")
    assert [path.name for path in two.checkpoints()] == ["step-00000004", "step-00000003"]
    for name in ("by one", "by four", "whole"):
        shutil.copytree(two.folder, tmp_path / name)
    train(Run.open(tmp_path / "by one"))
    train_together(tmp_path / "by four", 4, shard="fsdp")
    train_together(tmp_path / "whole", 2)
    for name in ("by one", "by four", "whole"):
        assert losses(Run.open(tmp_path / name)) == pytest.approx(losses(one), rel=2e-5), name
    notes = export(Run.open(tmp_path / "by four"), tmp_path / "out")
    assert any(note.startswith("model.safetensors") for note in notes)
    exported, expected = rg.load(tmp_path / "out"), one.model()[0]
    for (name, weight), (_, other) in zip(exported.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-5, msg=name)


def test_two_fsdp_processes_that_are_killed_end_with_the_same_weights(
    tmp_path: Path, train_together: Callable[..., Run]
) -> None:
    run = new_run(tmp_path, "masked", steps=7, save_every=2, evaluate_every=7)
    shutil.copytree(run.folder, tmp_path / "killed")
    whole, killed = (
        train_together(run.folder, 2, shard="fsdp"),
        train_together(tmp_path / "killed", 2, stop=4, shard="fsdp"),
    )
    newest = killed.checkpoints()[0]
    part = newest.with_name(f".{newest.name}.part")  # as if it had been killed before the folder got its name
    newest.rename(part)
    killed = train_together(killed.folder, 2, shard="fsdp")
    ours, theirs = load(whole.checkpoints()[0])[0], load(killed.checkpoints()[0])[0]
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert losses(whole) == losses(killed)


def test_a_damaged_checkpoint_of_shared_weights_is_skipped(tmp_path: Path, train_together: Callable[..., Run]) -> None:
    run = new_run(tmp_path, "classify", steps=2, save_every=1, evaluate_every=2)
    run = train_together(run.folder, 3, shard="fsdp")  # more processes than labels: some shards are empty
    newest = run.checkpoints()[0].name
    latest = run.latest()
    assert latest is not None
    run.task.model(run.processor).load_state_dict(
        {name.removeprefix("model."): value for name, value in latest[0].items() if name.startswith("model.")}
    )

    def gone(file: Path) -> None:
        file.unlink()

    def short(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-8])

    def without_notes(file: Path) -> None:
        (file.parent / "notes.json").unlink()

    for damage in (gone, short, without_notes):
        folder = tmp_path / damage.__name__
        shutil.copytree(run.folder, folder)
        files = sorted((folder / "checkpoints" / newest).glob("*.safetensors"))
        assert len(files) == 3
        damage(files[1])
        messages: list[str] = []
        latest = Run.open(folder).latest(messages.append)
        assert latest is not None
        assert latest[1].step == 1, damage.__name__
        assert len(messages) == 1
        assert newest in messages[0]


def test_weights_that_two_processes_share_are_captured_and_restored_to_the_bit(start: Start) -> None:
    port = free_port()
    processes = [start(shard_on_two_ranks, rank, port) for rank in (0, 1)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_worker_killed_under_torchrun_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    options = {"dropout": 0.0, "context": 24}
    one = new_run(tmp_path, "language", options=options, steps=30, save_every=5, evaluate_every=30)
    task, recipe = one.about["options"], one.about["recipe"] | {"shard": "fsdp", "sequence_ranks": 2}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (task | recipe).items()]
    folder = tmp_path / "two"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
        "-m", "regard", "train", "language", "--held-out", "12",
        "--data", one.about["sources"]["data"][0], "--out", str(folder), *words,
    ]  # fmt: skip
    log = (tmp_path / "output").open("w")
    launcher = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            assert launcher.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.02)
        os.kill(_workers(launcher.pid)[-1], signal.SIGKILL)
        assert launcher.wait(180) == 0, (tmp_path / "output").read_text()
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(30)
    output = (tmp_path / "output").read_text()
    assert "from step " in output, f"it began anew: {output}"
    train(one)
    assert losses(Run.open(folder)) == pytest.approx(losses(one), rel=1e-3)


def _workers(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    if not children.exists():
        pytest.skip("child processes cannot be listed here")
    named = [int(child) for child in children.read_text().split()]
    return [child for child in named if b"--held-out" in Path(f"/proc/{child}/cmdline").read_bytes()]
