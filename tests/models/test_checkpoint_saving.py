"""Saved files: shards, atomic writes, dtypes, and values kept from the original checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
from regard.models.checkpoints import files
from tests.models import transformers_models as t
from tests.models.checkpoint_folders import edit, rewrite, same, small


def test_large_models_are_written_in_shards_that_transformers_reads(tmp_path: Path) -> None:
    model = rg.load(t.save_their_model("llama", tmp_path / "whole"))
    rg.save(model, tmp_path, max_shard_size=10_000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert all((tmp_path / shard).stat().st_size < 15_000 for shard in shards[1:-1])
    same(rg.load(tmp_path), model)
    other = type(t.their_model("llama")).from_pretrained(tmp_path)
    for name, tensor in t.their_model("llama").state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_files_of_an_earlier_save_are_removed(tmp_path: Path) -> None:
    rg.save(small(), tmp_path, max_shard_size=2000)
    rg.save(small(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    rg.save(small(), tmp_path, max_shard_size=2000)
    assert not (tmp_path / "model.safetensors").exists()
    same(rg.load(tmp_path), small())


def test_a_failed_save_leaves_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    rg.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with torch.no_grad():
        model.embedding.weight.zero_()
    with pytest.raises(OSError, match="no space left"):
        rg.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (order.append(name), real(*args))[1])
    files.write_json(tmp_path / "a.json", {})
    assert order[:2] == ["fsync", "replace"]
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_by_default(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small().to(dtype)
    rg.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    same(rg.load(tmp_path), model)
    same(rg.load(tmp_path, dtype=torch.float32), small().to(dtype).float())


def test_mixed_dtypes_raise(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    rewrite(tmp_path, lambda held: held | {"transformer.wpe.weight": held["transformer.wpe.weight"].half()})
    with pytest.raises(ValueError, match="float16 and float32; choose one"):
        rg.load(tmp_path)
    assert rg.load(tmp_path, dtype=torch.float32).position.weight.dtype == torch.float32


def test_changes_of_a_file_after_loading_do_not_reach_the_model(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    model, path = rg.load(tmp_path), tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    same(model, small())


def test_a_loaded_model_is_in_eval_mode_trains_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    before = torch.get_rng_state()
    model = rg.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_configuration_values_without_counterpart_are_kept(tmp_path: Path) -> None:
    t.save_their_model("bert-sequence", tmp_path)
    edit(tmp_path, id2label={str(n): f"kind {n}" for n in range(5)}, classifier_dropout=0.3)
    rg.save(rg.load(tmp_path), tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["id2label"]["4"] == "kind 4"
    assert config["classifier_dropout"] == 0.3


def test_a_value_that_generation_config_replaced_is_not_kept(tmp_path: Path) -> None:
    t.save_their_model("t5", tmp_path)
    edit(tmp_path, eos_token_id=[1, 2])  # not supported, but generation_config.json takes precedence
    model = rg.load(tmp_path)
    assert model.config.stop == 1
    rg.save(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == 1
    assert rg.load(tmp_path / "again").config == model.config
