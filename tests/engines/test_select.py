"""Engine selection and its explanation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import regard as rg
from regard.engines import native
from regard.engines.select import ENGINES, exclude_engine, explain, select, select_inspection

needs_kernels = pytest.mark.skipif(bool(native.why_missing()), reason="the kernels are not built")


def inputs(grad: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(3, 1, 2, 16, 8, requires_grad=grad).unbind())


@needs_kernels
def test_the_first_engine_without_an_objection_is_selected() -> None:
    q, k, v = inputs()
    assert rg.Attention().explain(q, k, v).engine == next(iter(ENGINES))
    with exclude_engine("native"):
        assert rg.Attention().explain(q, k, v).engine == "sdpa"
        assert rg.Attention(sink=0.0).explain(q, k, v).engine == "reference"


def test_an_unsupported_engine_raises_with_its_reasons() -> None:
    q, k, v = inputs()
    with pytest.raises(rg.CannotCompute, match="no sink") as caught:
        rg.attention(q, k, v, sink=0.0, engine="sdpa")
    assert caught.value.reasons == ["its kernel has no sink"]
    with pytest.raises(ValueError, match="engine must be one of native"):
        rg.attention(q, k, v, engine="fast")


def test_the_explanation_names_the_objections_to_other_engines() -> None:
    explanation = rg.Attention(dropout=0.5).explain(*inputs())
    assert "dropout" in explanation.reasons["sdpa"][0]
    assert explanation.engine not in explanation.reasons
    assert "not sdpa: its dropout" in str(explanation)


@pytest.mark.parametrize(
    ("engine", "grad", "expected"),
    [
        ("sdpa", False, ["computes the call again"]),
        ("sdpa", True, ["computes the call again", "second derivatives", "gradients again"]),
        pytest.param("native", False, [], marks=needs_kernels),
        pytest.param("native", True, ["second derivatives"], marks=needs_kernels),
        ("tiled", True, []),
        ("reference", True, []),
    ],
)
def test_the_explanation_reports_what_is_left_to_another_engine(engine: str, grad: bool, expected: list[str]) -> None:
    explanation = rg.Attention(mask=rg.causal()).explain(*inputs(grad), engine=engine)
    assert len(explanation.fallbacks) == len(expected)
    for words, line in zip(expected, explanation.fallbacks, strict=True):
        assert words in line
        assert f"          {line}\n" in str(explanation)


def test_sdpa_hands_a_call_over_as_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    k[0, 0, -1] = float("nan")  # masked for all queries but the last
    calls = []
    run = rg.engines.tiled.run
    monkeypatch.setattr(rg.engines.tiled, "run", lambda *call: calls.append(call) or run(*call))
    output = rg.attention(q, k, v, mask=rg.causal(), engine="sdpa")
    assert len(calls) == 1
    assert output[:, :, :-1].isfinite().all()


@needs_kernels
def test_inspection_uses_the_kernels_where_they_apply() -> None:
    q, k, _ = inputs()
    attend = rg.Attention(bias=rg.alibi(2))
    in_torch = rg.engines.inspection
    rows, all_of = torch.tensor([0, 5]), torch.arange
    assert select_inspection(attend.problem(q, k)) is native.inspection
    assert select_inspection(attend.problem(q, k), (all_of(2), all_of(16), all_of(16))) is native.inspection
    assert select_inspection(attend.problem(q, k), (all_of(2), rows, all_of(16))) is in_torch  # rows with a gap
    assert select_inspection(attend.problem(q.requires_grad_(), k), (all_of(2), all_of(16), all_of(16))) is in_torch


GPU = torch.device("cuda", 0)


def test_inspection_on_a_gpu_uses_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.engines.triton.engine.why_not_on", lambda device: "")
    q, k, _ = inputs()
    problem = dataclasses.replace(rg.Attention(mask=rg.causal()).problem(q, k), device=GPU)
    assert select_inspection(problem) is rg.engines.triton.inspection


CHOICES = {
    "plain": ({}, 4, "sdpa"),
    "causal from the top left": ({"mask": rg.causal(), "offset": 0}, 4, "sdpa"),
    "window": ({"mask": rg.window(8, 0)}, 4, "triton"),
    "grouped heads": ({}, 2, "triton"),
    "alibi": ({"bias": rg.alibi(4)}, 4, "triton"),
    "dropout": ({"dropout": 0.1}, 4, "triton"),
    "entmax": ({"normalization": rg.Entmax(1.5)}, 4, "reference"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_selection_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    description, kv_heads, expected = CHOICES[name]
    monkeypatch.setattr("regard.engines.triton.engine.why_not_on", lambda device: "")
    query, key = torch.randn(1, 4, 64, 8), torch.randn(1, kv_heads, 64, 8)
    attend = rg.Attention(**description)
    problem = dataclasses.replace(attend.problem(query, key, key), device=GPU)
    explained = explain(problem, repr(attend))
    assert explained.engine == expected
    assert ("not run on a GPU" in str(explained)) == (expected == "triton")
    if expected == "triton":
        assert explained.reasons["sdpa"], "sdpa is passed over for a reason"


def test_without_triton_a_gpu_has_sdpa_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.engines.triton.engine.why_not_on", lambda device: "triton is not installed")
    x = torch.randn(1, 4, 64, 8)
    problem = dataclasses.replace(rg.Attention(mask=rg.window(8, 0)).problem(x, x, x), device=GPU)
    assert select(problem).name == "sdpa"
