from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models, and processes beside one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def start() -> Start:
    """Starts a function in a process of its own, which is cheap: a server has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tests.tasks.tiny_runs",
            "regard.training.sharded_checkpoint",
            "regard.training.state",
            "accelerate",
            "torch.utils.tensorboard",
        ]
    )

    def started(function: Callable[..., None], *args: Any) -> Any:
        process = context.Process(target=function, args=args)
        process.start()
        return process

    return started
