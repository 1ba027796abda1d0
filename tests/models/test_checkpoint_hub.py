"""Hub names instead of folders, and missing libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import regard as rg
from tests.models.checkpoint_folders import same, small


def test_a_name_is_downloaded_from_the_hub_without_unsafe_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    rg.save(small(), tmp_path)
    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    same(rg.load("someone/small", revision="v2", local_files_only=True), small())
    assert (asked["name"], asked["revision"], asked["local_files_only"]) == ("someone/small", "v2", True)
    assert all(pattern.endswith((".json", ".txt", ".safetensors")) for pattern in asked["allow_patterns"])


def test_an_uncached_name_raises_when_offline(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"someone/nothing is not a folder and was not found in the local cache"
    ):
        rg.load("someone/nothing", local_files_only=True)


def test_a_name_without_huggingface_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"regard\[hub\]"):
        rg.load("someone/small")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "../x/y", "a b"])
def test_a_missing_path_is_not_searched_on_the_hub(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder; pass a folder"):
        rg.load(name)


def test_missing_safetensors_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rg.save(small(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"regard\[checkpoints\]"):
        rg.load(tmp_path)
