"""The program for the first person with a GPU, run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import gpu

import regard as rg


def test_one_report_has_correctness_and_ratios(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    assert gpu.main(["--device", "cpu", "--quick", "--dtype", "float32", "--only", "causal", "--out", str(out)]) == 0
    text = out.read_text()
    assert "- selected: 1 properties hold, 0 fail" in text
    rows = [line for line in text.splitlines() if line.startswith("| causal |")]
    assert len(rows) == 2
    assert all("x |" in row and row.endswith("% |") for row in rows)
    assert "NO TIME" not in text


def test_a_wrong_case_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, attend = gpu.Bench(torch.device("cpu"), torch.float32, True), rg.Attention.__call__

    def wrong(self: rg.Attention, *tensors: torch.Tensor, engine: str | None = None) -> torch.Tensor:
        return attend(self, *tensors, engine=engine) * (1.0 if engine else 1.1)

    monkeypatch.setattr(rg.Attention, "__call__", wrong)
    result = bench.measure(gpu.CASES[0], False)
    assert "output is off by 0.1 of the largest" in result.wrong
    assert "NO TIME: output" in gpu.report(bench, [result], [], "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_the_device_it_says_so() -> None:
    with pytest.raises(Exception, match="device 'cuda' is not available"):
        gpu.main(["--device", "cuda"])
