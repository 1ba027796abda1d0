"""Checkpoint folders: validated reading and atomic writing of safetensors and JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import Tensor

from regard.files import read_json as read_value
from regard.files import require_file, unique_keys, write_atomically, write_text_atomically

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


def resolve_folder(
    name: str | os.PathLike[str], *, revision: str | None = None, local_files_only: bool = False
) -> Path:
    """Return the folder, or the local copy of a Hub repository."""
    if Path(name).is_dir():
        return Path(name)
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise FileNotFoundError(f"{name} is not a folder; pass a folder with config.json and model.safetensors")
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            f"{name} is not a local folder, and loading it from the Hub needs huggingface_hub: "
            "pip install 'regard[hub]', or pass a folder"
        ) from None
    patterns = ["*.json", "*.txt", "model*.safetensors"]  # no pickled files
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
            )
        )
    except Exception as error:  # the library raises many different types
        where = "in the local cache" if local_files_only else "on the Hub"
        raise FileNotFoundError(
            f"{name} is not a folder and was not found {where} ({type(error).__name__}: {first_line(error)}); "
            "check the name and the network, or pass a folder"
        ) from error


def path_inside(folder: Path, name: object) -> Path:
    """Return the path of a file named in the folder; raise if it is outside of the folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{folder} refers to {name!r}, which is not a file name")
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    if posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts:
        raise ValueError(f"{folder} refers to {name!r}, which is outside of the folder; such files are not read")
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; other values and duplicate keys raise an error with the file name."""
    try:
        read = read_value(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} has no {path.name}; is it a checkpoint folder?") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(read).__name__}")
    return read


class Weights:
    """The tensors of a folder, in one file or in shards, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        single, index = folder / WEIGHTS, folder / INDEX
        if single.exists():
            self._where = dict.fromkeys(self._open(single).keys(), single)
        elif index.exists():
            self._read_index(index)
        else:
            raise FileNotFoundError(_no_safetensors_message(folder))

    def _read_index(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} must contain a weight_map from tensor names to files")
        self._where = {name: path_inside(self.folder, file) for name, file in weight_map.items()}
        for path in sorted(set(self._where.values())):
            if not path.exists():
                raise FileNotFoundError(f"{index} lists {path.name}, which is not in the folder")
            in_file = set(self._open(path).keys())
            listed = {name for name, where in self._where.items() if where == path}
            if in_file != listed:
                name = min(in_file ^ listed)
                place = f"in {self._where[name].name}" if name in self._where else "in no file"
                raise ValueError(
                    f"{index} and {path.name} disagree: {name} is {'' if name in in_file else 'not '}in the file, but "
                    f"according to the index it is {place}"
                )

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                from safetensors import safe_open
            except ImportError:
                raise ImportError("checkpoints need safetensors: pip install 'regard[checkpoints]'") from None
            require_file(path)
            try:
                self._files[path] = safe_open(path, framework="pt")
                with path.open("rb") as file:  # the library does not reject duplicate names
                    json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=unique_keys)
            except Exception as error:
                raise ValueError(f"{path} is not a valid safetensors file: {first_line(error)}") from None
        return self._files[path]

    def names(self) -> Iterable[str]:
        return self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._where[name]).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        path = self._where[name]
        try:
            return self._open(path).get_tensor(name)
        except Exception as error:
            raise ValueError(f"{path}: {name} cannot be read: {first_line(error)}") from None


def _no_safetensors_message(folder: Path) -> str:
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if not pickled:
        return f"{folder} has neither {WEIGHTS} nor {INDEX}; is it a checkpoint folder?"
    return (
        f"{folder} has weights in {pickled[0]} only, which is not read: such files can run code when opened. "
        "If you trust it, convert it with the model's class in transformers, as in "
        f"BertModel.from_pretrained(folder).save_pretrained(other), which writes {WEIGHTS}"
    )


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_size: int) -> None:
    """Write one file, or shards of at most `max_shard_size` bytes with an index; then remove files of earlier saves."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > max_shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files = [WEIGHTS]
    if len(shards) > 1:
        files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_atomically(folder / file, partial(save_file, shard, metadata={"format": "pt"}))
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    stale = (
        set(_saved_files(folder)) - {folder / file for file in files} - ({folder / INDEX} if len(shards) > 1 else set())
    )
    for path in stale:
        path.unlink()


def _saved_files(folder: Path) -> Iterator[Path]:
    yield from (path for path in (folder / WEIGHTS, folder / INDEX) if path.exists())
    shard = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
    yield from (path for path in folder.iterdir() if shard.fullmatch(path.name))


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_text_atomically(path, text)


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def float_types(tensors: Iterable[Tensor]) -> list[str]:
    """Return the sorted names of the floating-point dtypes of the tensors."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()})
