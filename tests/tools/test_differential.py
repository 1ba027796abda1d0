"""The differential tester: it draws every module and model, holds on a few of them, and finds planted bugs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tools.differential import FAMILIES, Finding, check, is_confirmed, replay, simplify
from tools.differential.__main__ import main
from tools.differential.draw import Draw
from torch import Tensor, nn

import regard as rg
from regard import models
from regard.models import inputs
from regard.nn import context

WAYS = ["float32", "float64", "gradients-float64", "state-dict", "functional-call"]
MODES = ["float64", "duals-float64", "jvp-float64", "frozen", "bfloat16"]
ABSTRACT = {rg.nn.Residual}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Calls are so small that threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_holds_in_a_few_configurations(family: str) -> None:
    findings = [*check(family, 0, WAYS, fixed={}), *check(family, 1, WAYS), *check(family, 2, MODES)]
    assert [str(finding) for finding in findings if is_confirmed(finding)] == []


def test_every_module_and_model_is_drawn() -> None:
    public = {
        kind
        for home in (rg.nn, models)
        for name in home.__all__
        if isinstance(kind := getattr(home, name), type) and issubclass(kind, nn.Module)
    }
    drawn = set()
    for family in FAMILIES.values():
        for seed in range(20):
            drawn |= {type(part) for part in family(Draw(seed)).build().modules()}
    assert public - drawn - ABSTRACT == set()


def first(family: str, ways: list[str], fixed: dict[str, int]) -> Finding:
    finding = next(check(family, 0, ways, fixed=fixed), None)
    assert finding is not None, "the planted bug is not found"
    return finding


def test_a_mask_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = context.key_mask

    def wrong(mask: Tensor | None, *rest: Any) -> Any:
        return right(mask if mask is None else mask | mask.roll(1, 1), *rest)

    monkeypatch.setattr(inputs, "key_mask", wrong)
    finding = first("language", ["float32"], {"spare columns": 2})
    assert finding.way in ("right/float32", "left/float32")


def test_a_projection_that_is_wrong_in_every_form_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rg.nn.MultiHeadAttention._fused_projection

    def wrong(self: Any, *args: Any) -> Any:
        q, k, v = right(self, *args)
        return q, k, v * 1.001

    monkeypatch.setattr(rg.nn.MultiHeadAttention, "_fused_projection", wrong)
    finding = first("encoder", ["float64"], {})
    assert finding.way == "alone/float64"


def test_a_gradient_that_is_cut_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rg.nn.MultiHeadAttention._fused_projection

    def wrong(self: Any, *args: Any) -> Any:
        q, k, v = right(self, *args)
        return q, k.detach(), v

    monkeypatch.setattr(rg.nn.MultiHeadAttention, "_fused_projection", wrong)
    assert list(check("multi-head-attention", 0, ["float64"], fixed={})) == []
    assert "gradient of qkv.weight" in first("multi-head-attention", ["gradients-float64"], {}).reason


def test_a_cache_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rg.nn.Cache.append

    def wrong(self: Any, key: Tensor, value: Tensor) -> Any:
        keys, values = right(self, key, value)
        return (keys, values) if self.length < 4 else (keys, values * (torch.arange(self.length) != 1)[:, None])

    monkeypatch.setattr(rg.nn.Cache, "append", wrong)
    finding = first("language", ["float64"], {"kind of lengths": 2, "values": 1})
    assert finding.way.split("/")[0] in ("generation", "pieces")


def test_a_finding_is_made_simpler_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_column(self: Any, x: Any, mask: Tensor | None = None) -> Tensor:
        return right(self, x, mask) if isinstance(x, rg.Packed) else x[:, -1]

    right = rg.nn.Last.forward
    monkeypatch.setattr(rg.nn.Last, "forward", last_column)
    chosen = {"pooling": 3, "d_model": 2, "number of lengths": 2, "filler": 1, "spare columns": 2}
    finding = first("pooling", ["float32"], chosen)
    small = simplify(finding)
    assert set(small.fixed) <= {"pooling", "spare columns", "number of lengths"}
    assert "pooling: 'last'" in str(small)
    with pytest.raises(AssertionError, match="off by"):
        exec(str(small).split("Again:\n")[1].replace("    ", ""))
    monkeypatch.undo()
    replay(small.family, seed=small.seed, way=small.way, fixed=small.fixed)


def test_the_command_counts_what_held(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--minutes", "0", "--seed", "3", "--family", "feed-forward"]
    monkeypatch.setattr(sys, "argv", ["tools.differential", *words])
    assert main() == 0
    shown = capsys.readouterr().out
    assert "SEED=3" in shown
    assert "0 findings" in shown


def test_the_command_ends_with_1_and_the_first_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = rg.nn.Max.forward
    monkeypatch.setattr(rg.nn.Max, "forward", lambda self, x, mask=None: right(self, x, mask) + 1)
    monkeypatch.setattr(sys, "argv", ["tools.differential", "--minutes", "1", "--seed", "3", "--family", "pooling"])
    assert main() == 1
    shown = capsys.readouterr().out
    assert "pooling: 'max'" in shown
    assert "1 findings" in shown
