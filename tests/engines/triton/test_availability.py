"""Where the kernels for GPUs cannot run, the reason is given beforehand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import regard as rg
from regard.engines.triton import availability, engine
from regard.engines.triton import layout as layouts
from regard.geometry import Frame
from tests.engines.calls import normal

needs_triton = pytest.mark.skipif(bool(availability.why_missing()), reason="triton is not installed")


def reasons(*, D: int = 4, E: int = 4, dtype: torch.dtype = torch.float32, **description: object) -> list[str]:
    tensors = normal(1, 1, 5, D), normal(1, 1, 5, D), normal(1, 1, 5, E)
    problem = rg.Attention(**description).problem(*(tensor.to(dtype) for tensor in tensors))  # type: ignore[arg-type]
    return engine.why_not(problem)


def run(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**kept, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_regard_does_not_import_triton() -> None:
    assert run("import sys, regard; print('triton' in sys.modules)").strip() == "False"


CALL = "import torch, regard as rg; x = torch.randn(3, 1, 1, 4, 8)\n"


@needs_triton
def test_on_a_cpu_it_needs_the_interpreter() -> None:
    asked = CALL + "print(rg.Attention().explain(*x).reasons['triton'])"
    assert "set TRITON_INTERPRET=1" in run(asked)
    assert "for tests" in run(asked, TRITON_INTERPRET="1")
    late = "import triton, os\nos.environ['TRITON_INTERPRET'] = '1'\n"
    assert "before triton is imported" in run(late + asked)


def test_a_missing_or_old_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    availability._why_missing.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reasons() == ['triton is not installed; install it with pip install "regard[gpu]"']
    availability._why_missing.cache_clear()
    monkeypatch.undo()
    if not availability.why_missing():
        availability._why_missing.cache_clear()
        monkeypatch.setattr("importlib.metadata.version", lambda name: "3.1.0")
        assert reasons() == ["triton 3.1.0 is older than 3.5; upgrade it"]
    monkeypatch.undo()
    availability._why_missing.cache_clear()


@needs_triton
def test_a_gpu_that_is_too_old_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    actual = availability.why_not_on(torch.device("cuda", 0))
    assert actual == "its kernels need compute capability 8.0 or higher, but Tesla T4 has 7.5"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    assert availability.why_not_on(torch.device("cuda", 0)) == ""
    assert "does not run on mps" in availability.why_not_on(torch.device("mps"))


@needs_triton
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"dtype": torch.float64}, "not in float64"),
        ({"D": 257}, "widths up to 256, but D is 257"),
        ({"E": 0}, "no columns"),
        ({"score": lambda s, b, h, i, j: s.sin()}, "dot products and the additive score"),
    ],
)
def test_what_it_does_not_support_is_refused(asked: dict, expected: str) -> None:
    assert any(expected in reason for reason in reasons(**asked))


def test_the_layout_by_keys_is_the_transpose_of_that_by_rows() -> None:
    frame, device = Frame(2, 2, 300, 200, -100), torch.device("cpu")
    for mask in (rg.causal(), rg.causal() & rg.window(70, 0), rg.padding([130, 0])):
        actual = layouts.device_layout(mask, frame.cache_key(), device)
        start, stop = actual.layout.rows
        first, last = actual.layout.keys
        for lead in range(first.shape[0] * first.shape[1]):
            low, high = start.reshape(-1, 300)[lead], stop.reshape(-1, 300)[lead]
            for tile in range(4):
                seen = ((low < (tile + 1) * 64) & (high > tile * 64) & (low < high)).nonzero()
                inside = torch.arange(300)[first.view(-1, 4)[lead, tile] : last.view(-1, 4)[lead, tile]]
                assert not len(seen) or {*seen.flatten().tolist()} <= {*inside.tolist()}
    mask = rg.where(lambda b, h, p, j: (p // 64 * 5 + j // 64 * 3 + h + b) % 4 < 2)
    actual = layouts.device_layout(mask, frame.cache_key(), device)
    pointer, start, stop, index, _ = actual.layout.rows
    ends, rows, bits = actual.layout.keys
    by_rows, by_keys = set(), set()
    for line in range(len(pointer) - 1):
        for n in range(pointer[line], pointer[line + 1]):
            for tile in range(start[n], stop[n]):
                by_rows.add((line // 5, line % 5, tile, -1 if index[n] < 0 else int(index[n] + tile - start[n])))
    for line in range(len(ends) - 1):
        for n in range(ends[line], ends[line + 1]):
            by_keys.add((line // 4, int(rows[n]), line % 4, int(bits[n])))
    assert by_rows == by_keys
    assert layouts.device_layout(mask, frame.cache_key(), device) is not None
    assert layouts.device_layout(rg.causal(), frame.cache_key(), device) is layouts.device_layout(
        rg.causal(), frame.cache_key(), device
    )
