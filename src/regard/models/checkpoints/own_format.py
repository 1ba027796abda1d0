"""regard's own checkpoint format, for models without a counterpart in other libraries."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from regard import models, positions
from regard.models.checkpoints.family import Architecture, check_config
from regard.models.checkpoints.tensor_names import Rule
from regard.nn import Rotary, Routing

MODEL_TYPE = "regard"


class Identity(Rule):
    """A rule that keeps all tensor names."""

    def match(self, name: str) -> tuple[str, ...]:
        return (name,)


RULES: tuple[Rule, ...] = (Identity("", ()),)


def config_values(model: nn.Module) -> dict[str, Any]:
    """Return the content of config.json."""
    name = type(model).__name__
    if getattr(models, name, None) is not type(model):
        raise TypeError(f"{name} is not a class of regard.models, so regard.load could not read it")
    return {"model_type": MODEL_TYPE, "architectures": [name], "config": to_json(model.config)}


def parse_config(config_json: dict[str, Any]) -> tuple[Architecture, Any]:
    """Return the class and the configuration of a config.json."""
    try:
        (name,) = config_json["architectures"]
        model_class = getattr(models, name) if name in models.__all__ else None
        if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
            raise ValueError(f"{name!r} is not a class of regard.models")
        config = from_json(config_json["config"])
        if not dataclasses.is_dataclass(config):
            raise ValueError("config is not a configuration")
        check_config(config)
        return Architecture(model_class, lambda _: RULES), config
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"not written by regard.save, or by an incompatible version: {error}") from error


def to_json(value: Any) -> Any:
    """Convert a configuration, or a part of one, to JSON; objects name their class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {entry.name: to_json(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
        if type(value) not in _known_types().values():
            raise TypeError(f"{type(value).__name__} in a configuration cannot be saved")
        return {"is": type(value).__name__} | fields
    if isinstance(value, (tuple, list)):
        return [to_json(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} in a configuration cannot be saved")


def from_json(value: Any) -> Any:
    """Convert the output of `to_json` back."""
    if isinstance(value, dict):
        fields = {key: from_json(entry) for key, entry in value.items() if key != "is"}
        if value.get("is") not in _known_types():
            raise ValueError(f"{value.get('is')!r} is not a configuration class")
        return _known_types()[value["is"]](**fields)
    return tuple(map(from_json, value)) if isinstance(value, list) else value


def _known_types() -> dict[str, type]:
    """The classes that a configuration file may refer to, by name."""
    parts = (
        positions.Linear,
        positions.Dynamic,
        positions.Yarn,
        positions.Llama3,
        positions.LongRope,
        Rotary,
        Routing,
        models.LatentSizes,
        models.DeltaSizes,
    )
    configs = (getattr(models, name) for name in models.__all__ if name.endswith("Config"))
    return {known_type.__name__: known_type for known_type in (*parts, *configs)}
