"""The sweep over architectures of Transformers finds what is wrong, and stops at nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.architectures import __main__ as sweep
from tools.architectures.build import architectures, tiny_config
from tools.architectures.compare import compare
from tools.architectures.shrink import shrink
from tools.architectures.table import CHECKS, write
from transformers import AttentionInterface

from regard.integrations import transformers as integration

attend = integration.attend


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    torch.set_num_threads(1)
    yield
    AttentionInterface.register("regard", attend)


def planted(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(integration, "attend", function)


def test_a_whole_model_is_exact_in_every_check() -> None:
    row = compare("llama", lambda: None)
    assert row["status"] == "exact", row
    assert row["checks"] == dict.fromkeys(CHECKS, "exact")
    assert row["computed"] == row["modules"] == 2


def test_a_model_that_computes_its_attention_itself_is_warned() -> None:
    row = compare("bloom", lambda: None)
    assert row["status"] == "warned", row
    assert row["missed"] == ["BloomAttention computes its attention itself"]


def test_a_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignores_masks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return attend(module, query, key, value, None, **kwargs)

    planted(monkeypatch, ignores_masks)
    row = compare("bert", lambda: None)  # which has no mask but that of padding
    assert row["status"] == "wrong"
    assert row["checks"]["plain"] == "exact"
    assert row["checks"]["padding left"] == row["checks"]["padding right"] == "wrong"


def test_lost_weights_and_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def drops(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)[0].detach(), None

    planted(monkeypatch, drops)
    row = compare("bert", lambda: None)
    assert row["checks"]["plain"] == "exact"
    assert row["checks"]["gradient"] == row["checks"]["attentions"] == "wrong"


@pytest.mark.parametrize(("error", "status"), [(NotImplementedError, "refused"), (RuntimeError, "failed")])
def test_errors_are_refusals_or_failures(error: type, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error("no")

    planted(monkeypatch, raises)
    row = compare("bert", lambda: None)
    assert row["status"] == status
    assert "no" in row["notes"][0]


@pytest.mark.parametrize(("built", "status"), [(False, "not built"), (True, "failed")])
def test_an_architecture_that_hangs_or_dies_does_not_stop_the_others(
    built: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(name: str, ready: Callable) -> dict:
        if built:
            ready()
        time.sleep(60)
        return {}

    monkeypatch.setattr(sweep, "compare", hangs)
    row = sweep._run("bert", 0.2, 64.0)
    assert (row["status"], row["notes"]) == (status, ["took more than 0.2 s"])

    def dies(name: str, ready: Callable) -> dict:
        if built:
            ready()
        os._exit(1)

    monkeypatch.setattr(sweep, "compare", dies)
    assert sweep._run("bert", 60, 64.0)["status"] == status


def test_kept_rows_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def run(name: str, seconds: float, gigabytes: float) -> dict:
        computed.append(name)
        return {"architecture": name, "status": "wrong" if name == "t5" else "exact", "checks": {}, "notes": []}

    monkeypatch.setattr(sweep, "_run", run)
    monkeypatch.setattr(sweep, "architectures", lambda: ["bert", "t5"])
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    asked = ["tools.architectures", "--results", str(tmp_path / "rows.jsonl")]
    for more, names in (([], ["bert", "t5"]), ([], []), (["--again", "wrong"], ["t5"]), (["bert"], ["bert"])):
        computed.clear()
        monkeypatch.setattr("sys.argv", asked + more)
        assert sweep.main() == 1  # one is wrong
        assert computed == names
    page = (tmp_path / "docs" / "architectures.md").read_text()
    assert "| `t5` | wrong |" in page


def test_sizes_shrink_and_kinds_of_layers_stay() -> None:
    values = {
        "hidden_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 10**5,
        "layer_types": ["sliding", "sliding", "full", "sliding", "sliding", "full"],
        "mlp_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
        "eos_token_id": 99_999,
        "rms_norm_eps": 1e-6,
    }
    small = shrink(values)
    assert (small["hidden_size"], small["vocab_size"], small["eos_token_id"]) == (32, 99, 2)
    assert small["num_attention_heads"] == small["num_key_value_heads"] == 4
    assert small["num_hidden_layers"] == 3
    assert small["layer_types"] == ["sliding", "sliding", "full"]
    assert small["mlp_types"] == ["dense", "sparse", "sparse"]
    assert small["rms_norm_eps"] == 1e-6


def test_architectures_are_those_of_transformers() -> None:
    assert {"bert", "llama", "sam", "whisper"} <= set(architectures())
    assert tiny_config("llama").hidden_size == 32


def test_the_page_counts_and_escapes(tmp_path: Path) -> None:
    rows = [
        {"architecture": "a", "status": "warned", "checks": {"plain": "exact", "gradient": "as sdpa"},
         "notes": ["x | y_z"], "missed": ["AAttention computes its attention itself"], "computed": 1, "modules": 3},
        {"architecture": "b", "status": "not built", "notes": ["no <timm>"]},
    ]  # fmt: skip
    write(tmp_path / "page.md", rows)
    page = (tmp_path / "page.md").read_text()
    assert "| `a` | warned | 1 of 3 | plain, gradient: as sdpa |" in page
    assert "AAttention computes its attention itself; x \\| y\\_z |" in page
    assert "| `b` | no &lt;timm> |" in page
    assert "| not built | 1 |" in page
