"""Load the model that `regard check --model` names: a folder of Transformers, or a function that returns a model."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch

from regard.check.targets.lookup import UnknownTarget, import_object
from regard.errors import UserError, first_line

EXPECTED = "a folder with config.json and model.safetensors, or package.module:function that returns a model"


def load_model(name: str, *, random_weights: bool = False) -> tuple[Any, str]:
    """Return the model in float32 and the code that builds it.

    random_weights: read only the configuration of a folder, and draw the weights.
    """
    path = Path(name)
    if path.is_dir():
        return _from_folder(path, random_weights)
    if ":" in name and not path.exists():
        return _from_function(name)
    what = "is a file" if path.exists() else "is neither"
    raise UserError(f"--model must be {EXPECTED}, but {name} {what}")


def _from_function(name: str) -> tuple[Any, str]:
    try:
        function = import_object(name)
    except UnknownTarget as error:
        raise UserError(f"--model: {error}") from error
    if not callable(function):
        raise UserError(f"--model: {name} must be a function that returns a model, but is {type(function).__name__}")
    model = function()
    check_type(model, name)
    module, attribute = name.split(":")
    return model, f"from {module} import {attribute.split('.')[0]}\n\nmodel = {attribute}()"


def check_type(model: Any, name: str) -> None:
    """Raise unless the model is one of Transformers."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{name} must be a transformers.PreTrainedModel, but is {type(model).__name__}")


def _from_folder(path: Path, random_weights: bool) -> tuple[Any, str]:
    from safetensors import SafetensorError

    kind, config = _class(path)
    name = kind.__name__
    if random_weights:
        torch.manual_seed(0)
        model = kind._from_config(config)
        code = [
            f"from transformers import AutoConfig, {name}",
            "",
            "torch.manual_seed(0)",
            f"model = {name}._from_config(AutoConfig.from_pretrained({str(path)!r}))",
        ]
        return model.float(), "\n".join(code)
    if not any(path.glob("*.safetensors")):
        pickled = next((each.name for each in path.glob("*.bin")), None)
        also = f" ({pickled} is a pickle, which can run code, and is not read)" if pickled else ""
        raise UserError(f"{path} has no weights in model.safetensors{also}; give --random-weights to draw them")
    try:
        model, report = kind.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: the weights cannot be read: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{path}: the weights lack {len(missing)} tensors of {name}, the first is {missing[0]}")
    code = [
        f"from transformers import {name}",
        "",
        f"model = {name}.from_pretrained({str(path)!r}, dtype=torch.float32)",
    ]
    return model, "\n".join(code)


def _class(path: Path) -> tuple[Any, Any]:
    """The class of the model in a folder, and its configuration."""
    import transformers

    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{path} has no config.json; --model must be {EXPECTED}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        kind = values["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not the configuration of a model: it has no model_type") from error
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UserError(f"{file}: model_type {kind!r} is not known to transformers {transformers.__version__}{hint}")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # each configuration raises its own kinds
        raise UserError(f"{file}: {first_line(error)}") from error
    names = [name for name in config.architectures or () if isinstance(name, str)]
    model_class = next((each for name in names if isinstance(each := getattr(transformers, name, None), type)), None)
    if model_class is None:
        mapping = transformers.MODEL_MAPPING
        if type(config) not in mapping:
            raise UserError(f"{file}: transformers has no model class for {kind!r}")
        model_class = mapping[type(config)]
        model_class = model_class[0] if isinstance(model_class, tuple | list) else model_class
    if not issubclass(model_class, transformers.PreTrainedModel):
        raise UserError(f"{file}: architecture {model_class.__name__} is not a model of transformers")
    return model_class, config
