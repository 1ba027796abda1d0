"""Invalid and hostile folders raise clear errors."""

from __future__ import annotations

import json
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard as rg
from tests.models.checkpoint_folders import edit, small


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "tf_model.h5"])
def test_pickled_weights_raise_with_advice(file: str, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    with pytest.raises(FileNotFoundError, match=rf"{file} only, which is not read.*convert"):
        rg.load(tmp_path)


def test_a_folder_without_weights_or_configuration_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        rg.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        rg.load(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "\\x", "", "a\0b", 3]
)
def test_an_index_that_points_outside_of_the_folder_raises(file: Any, tmp_path: Path) -> None:
    rg.save(small(), tmp_path / "a", max_shard_size=2000)
    path = tmp_path / "a" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"outside of the folder|which is not a file name"):
        rg.load(tmp_path / "a")


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "\xff\xfe", "[" * 100_000])
def test_a_configuration_that_is_not_a_json_object_raises(text: str, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json") as error:
        rg.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_file_raises_one_line_with_its_name(share: float, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a valid safetensors file") as error:
        rg.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_modified_header_raises_value_error_only(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        broken = bytearray(whole)
        for place, value in torch.randint(0, 256, (3, 2), generator=draw).tolist():
            broken[place * 4 % 900] = value
        path.write_bytes(broken)
        with suppress(ValueError):
            rg.load(tmp_path)


def test_duplicate_tensor_names_in_a_header_raise(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + size].decode()
    entry = json.loads(header)["transformer.ln_f.bias"]
    twice = header.rstrip()[:-1] + f',"transformer.ln_f.bias":{json.dumps(entry)}}}'
    path.write_bytes(struct.pack("<Q", len(twice)) + twice.encode() + whole[8 + size :])
    with pytest.raises(ValueError, match=r"model\.safetensors .* duplicate key 'transformer\.ln_f\.bias'"):
        rg.load(tmp_path)


def test_shards_that_disagree_with_their_index_raise(tmp_path: Path) -> None:
    rg.save(small(), tmp_path, max_shard_size=2000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    moved = next(name for name, file in index["weight_map"].items() if file == first)
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {moved: last}}))
    with pytest.raises(ValueError, match=rf"disagree: {moved}"):
        rg.load(tmp_path)
    path.write_text(json.dumps(index))
    held = load_file(tmp_path / last)
    save_file(held | {moved: torch.zeros(1)}, tmp_path / last)  # one tensor in two files
    with pytest.raises(ValueError, match=rf"disagree: {moved}"):
        rg.load(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(FileNotFoundError, match=last):
        rg.load(tmp_path)


def test_a_configuration_of_excessive_size_raises_early(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    started = time.perf_counter()
    for changes in ({"n_layer": 10**9}, {"n_layer": 2, "vocab_size": 10**12}, {"vocab_size": -1}, {"n_embd": "wide"}):
        edit(tmp_path, **changes)
        with pytest.raises(ValueError, match=str(tmp_path)):
            rg.load(tmp_path)
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("name", ["auto_map", "quantization_config"])
def test_custom_code_and_quantization_raise(name: str, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    edit(tmp_path, **{name: {"AutoModel": "modeling.Mine"}})
    with pytest.raises(ValueError, match=name):
        rg.load(tmp_path)
