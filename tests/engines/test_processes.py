"""Out of memory, threads, forks and the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import regard as rg
from regard.engines import native
from regard.engines.native import binding


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    everything = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=everything, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STARVED = """
import resource, torch, regard as rg
torch.set_num_threads(1)
q, k, v = (torch.zeros(1, 1, 64, 64), *torch.zeros(2, 1, 1, 1 << 18, 64))
grown = torch.zeros(1, 1, 1 << 18, 64, requires_grad=True)
rg.attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], engine="native")
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), before[1]))
for call in (
    lambda: rg.attention(q, k, v, engine="native"),
    lambda: rg.Attention().statistics(q, k),
    lambda: rg.attention(grown[:, :, :128], k, v, engine="native").sum().backward(),
):
    try:
        call()
    except (MemoryError, RuntimeError) as error:
        print(type(error).__name__, error)
    else:
        print("there was room")
resource.setrlimit(resource.RLIMIT_AS, before)
assert rg.attention(q, k, v, engine="native").shape == q.shape
print("goes on")
"""


@pytest.mark.skipif(sys.platform != "linux" or "LD_PRELOAD" in os.environ, reason="needs a limit on memory")
def test_out_of_memory_raises_with_the_sizes_and_the_next_call_works() -> None:
    first, second, third, last = run_python(STARVED).strip().splitlines()
    assert "MemoryError" in first
    assert "K=262144" in first
    assert "MemoryError" in second
    assert "memory" in third
    assert last == "goes on"


def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "INTERFACE", binding.INTERFACE + 1)
    native.library.cache_clear()
    try:
        assert "reinstall regard" in native.why_missing()
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert not native.why_missing()


def test_concurrent_calls_of_different_sizes_do_not_interfere() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 30, 5), (2, 200, 64), (1, 64, 300), (3, 7, 16)]
    inputs = [torch.randn(B, 2, n, width, generator=generator, requires_grad=True) for B, n, width in sizes]
    wrong: list[str] = []

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        output = rg.attention(x, x, x, mask=rg.causal(), bias=rg.alibi(2), engine="native")
        return [output.detach(), torch.autograd.grad(output.sin().sum(), x)[0], *rg.Attention().statistics(x, x)[:-1]]

    expected, finished = [compute(x) for x in inputs], []

    def work(n: int) -> None:
        for _ in range(8):
            if not all(map(torch.equal, compute(inputs[n]), expected[n])):
                wrong.append(str(sizes[n]))
        finished.append(n)

    threads = [threading.Thread(target=work, args=(n % len(sizes),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == len(threads)
    assert not wrong


def test_calls_at_the_end_of_the_interpreter_and_from_its_last_threads_work() -> None:
    code = """
import atexit, threading, torch, regard as rg
q = torch.randn(1, 8, 256, 32)
def call(): print(rg.attention(q, q, q, engine="native").shape[2])
class Last:
    def __del__(self): call()
atexit.register(call)
kept = Last()
torch.set_num_threads(2)
call()
thread = threading.Thread(target=lambda: [call() for _ in range(3)])
thread.start()
"""
    assert run_python(code).split() == ["256"] * 6


def test_many_children_of_a_fork_can_use_it_at_once() -> None:
    code = """
import os, torch, regard as rg
torch.set_num_threads(2)
q = torch.randn(1, 4, 130, 16, requires_grad=True)
with torch.no_grad():
    before = rg.attention(q, q, q, mask=rg.causal(), engine="native").numpy().copy()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            output = rg.attention(q, q, q, mask=rg.causal(), engine="native").numpy()
            raised = rg.Attention(mask=rg.causal()).statistics(q, q).lse.numpy()
        os._exit(0 if abs(output - before).max() < 1e-5 and (raised == raised).all() else 1)
    children.append(child)
raise SystemExit(max(os.waitpid(child, 0)[1] for child in children))
"""
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    run_python(code)
