"""Two processes: the losses of one, and a worker that dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.tasks import Run, train
from regard.tasks.runs import lines
from tests.tasks.conftest import Start
from tests.tasks.toy import begun, sharded_by_two, trained_by_one_of_two


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def losses(run: Run, name: str = "loss") -> list[float]:
    return [line[name] for line in lines(run.folder / "log.jsonl") if name in line]


@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_get_the_losses_of_one_for_the_same_global_batch(
    parts: int, tmp_path: Path, start: Start
) -> None:
    one = begun(tmp_path, "translate", options={"dropout": 0.0}, accumulate=parts, steps=6)
    shutil.copytree(one.folder, tmp_path / "two")
    train(one)
    port = free_port()
    processes = [start(trained_by_one_of_two, str(tmp_path / "two"), rank, port) for rank in (0, 1)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    two = Run.open(tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert losses(two, "held_out_loss") == pytest.approx(losses(one, "held_out_loss"), rel=2e-5)


def test_weights_that_two_processes_share_are_captured_and_restored_to_the_bit(start: Start) -> None:
    port = free_port()
    processes = [start(sharded_by_two, rank, port) for rank in (0, 1)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_worker_killed_under_torchrun_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    one = begun(tmp_path, "translate", options={"dropout": 0.0}, steps=40, save_every=5, evaluate_every=40)
    task, recipe = one.about["options"] | {"source": "1", "target": "2"}, one.about["recipe"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (task | recipe).items()]
    folder = tmp_path / "two"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
        "-m", "regard", "train", "translate", "--held", "12",
        "--data", str(tmp_path / "pairs.tsv"), "--out", str(folder), *options,
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
        pytest.skip("the children of a process are not told here")
    named = [int(child) for child in children.read_text().split()]
    return [child for child in named if b"--held" in Path(f"/proc/{child}/cmdline").read_bytes()]
