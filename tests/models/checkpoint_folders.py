"""Small checkpoints, and functions to modify their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.models import (
    LanguageConfig,
    LanguageModel,
)
from tests.models import transformers_models as t

SMALL = LanguageConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_hidden=32, positions=20)
IDS = torch.tensor([[5, 6, 7, 8]])


def small(config: LanguageConfig = SMALL) -> LanguageModel:
    return t.randomize(LanguageModel(config))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    held = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(held), folder / "model.safetensors")


def same(model: nn.Module, other: nn.Module) -> None:
    for (name, tensor), (_, expected) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(tensor, expected), name
