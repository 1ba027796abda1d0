from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: models are tiny, and tests run several processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def start() -> Start:
    """Start a function in a new process, forked cheaply from a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    modules = ["tests.tasks.tiny_runs", "regard.training.sharded_checkpoint", "regard.training.state"]
    modules += ["accelerate", "torch.utils.tensorboard"]
    assert all(find_spec(name) for name in modules), "the server skips a module that it does not find"
    context.set_forkserver_preload(modules)

    def start_process(function: Callable[..., None], *args: Any) -> Any:
        process = context.Process(target=function, args=args)
        process.start()
        return process

    return start_process
