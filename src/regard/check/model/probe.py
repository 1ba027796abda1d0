"""Replace what enters every attention module of a model, and record what leaves it.

The hidden states that enter a module are replaced by rows of a table, one for each token. So a module sees the same
states in every layout, what one module does wrong does not reach the next, and one call of the model measures all of
them. To change one token, replace its number by that of the same state times a factor.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ATTENTION = re.compile(r"Att(entio)?n\d*$")
_KEY_NAMES = ("key_value_states", "encoder_hidden_states")


@dataclass(frozen=True)
class Source:
    """A tensor that a module is called with: the parameter, its place among the positional arguments, or None."""

    name: str
    place: int | None

    def get(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(self.name) if self.place is None else args[self.place]

    def put(self, args: tuple, kwargs: dict[str, Any], value: Tensor) -> tuple[tuple, dict[str, Any]]:
        if self.place is None:
            return args, kwargs | {self.name: value}
        return (*args[: self.place], value, *args[self.place + 1 :]), kwargs


@dataclass
class Layer:
    """An attention module of a model and what it is called with.

    role: "self", "encoder", "decoder" or "cross". reason: why it cannot be measured; empty if it can.
    """

    name: str
    module: nn.Module
    role: str = ""
    queries: Source | None = None
    keys: Source | None = None
    scale: float = 1.0
    width: int = 0
    key_scale: float = 1.0
    key_width: int = 0
    reason: str = "not called with these inputs"
    notes: list[str] = field(default_factory=list)

    @property
    def number(self) -> int | None:
        """The index of the layer in its model."""
        index = getattr(self.module, "layer_idx", None)
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", self.name)
        return index if isinstance(index, int) else int(numbers[0]) if numbers else None

    def tables(self, tokens: int, factor: float) -> tuple[Tensor, Tensor]:
        """States of queries and of keys: of each token, then the same times `factor`, then times `-factor`."""
        tables = []
        for seed, width, scale in ((0, self.width, self.scale), (1, self.key_width, self.key_scale)):
            generator = torch.Generator().manual_seed(seed)
            states = torch.randn(tokens, width, generator=generator) * scale
            tables.append(torch.cat([states, states * factor, states * -factor]))
        return tables[0], tables[1]


def attention_layers(model: nn.Module) -> list[Layer]:
    """The innermost modules of a model that are named attention."""
    names = [name for name, module in model.named_modules() if _ATTENTION.search(type(module).__name__)]
    outer = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return [Layer(name, model.get_submodule(name)) for name in names if name not in outer]


@contextmanager
def discover(layers: list[Layer], lengths: Mapping[str, int]) -> Iterator[None]:
    """Fill in what the layers are called with, from one call of the model with sequences of different lengths.

    lengths: of each sequence of the model, {"self": 12} or {"encoder": 10, "decoder": 12}.
    """
    hooks = [
        layer.module.register_forward_pre_hook(_discovery_hook(layer, lengths), with_kwargs=True) for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _discovery_hook(layer: Layer, lengths: Mapping[str, int]) -> Any:
    sequences = {length: name for name, length in lengths.items()}

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        names = [name for name in inspect.signature(module.forward).parameters if name not in ("args", "kwargs")]
        places = {name: place for place, name in enumerate(names[: len(args)])}
        given = dict(zip(names, args, strict=False)) | kwargs
        first = next((name for name, value in given.items() if _is_states(value)), None)
        if first is None:
            layer.reason = "its inputs are not hidden states (B, N, C)"
            return
        states = given[first]
        key_name = next((name for name in _KEY_NAMES if name != first and _is_states(given.get(name))), None)
        keys = states if key_name is None else given[key_name]
        queries_of, keys_of = sequences.get(states.shape[1]), sequences.get(keys.shape[1])
        if queries_of is None or keys_of is None:
            shapes = " and ".join(str(tuple(x.shape)) for x in (states, keys)[: 1 if key_name is None else 2])
            layer.reason = f"its hidden states {shapes} are not the tokens of the model"
            return
        layer.role = queries_of if key_name is None else "cross"
        layer.queries = Source(first, places.get(first))
        layer.keys = None if key_name is None else Source(key_name, places.get(key_name))
        layer.width, layer.key_width = states.shape[-1], keys.shape[-1]
        layer.scale, layer.key_scale = (float(x.float().std()) or 1.0 for x in (states, keys))
        layer.reason = ""

    return hook


def _is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


class Probe:
    """Replaces the inputs of layers and records their outputs.

    tokens: for each sequence of the model, the token numbers (B, N) of queries and of keys.
    """

    def __init__(
        self, layers: list[Layer], queries: Mapping[str, Tensor], keys: Mapping[str, Tensor], count: int, factor: float
    ) -> None:
        self.layers = [layer for layer in layers if not layer.reason]
        self.queries, self.keys = queries, keys
        self.tables = {layer.name: layer.tables(count, factor) for layer in self.layers}
        self.start = 0  # the first position of this call in a sequence that a cache continues
        self.outputs: dict[str, list[Tensor]] = {layer.name: [] for layer in self.layers}
        self.problems: dict[str, str] = {}
        self.inside = ""  # the layer that is running

    def begin(self, start: int) -> None:
        """Set the first position of the next call."""
        self.start = start

    @contextmanager
    def active(self) -> Iterator[None]:
        hooks: list[Any] = []
        for layer in self.layers:
            hooks.append(layer.module.register_forward_pre_hook(self._before(layer), with_kwargs=True))
            hooks.append(layer.module.register_forward_hook(self._after(layer)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def output(self, layer: Layer) -> Tensor:
        """The output of a layer (B, N, C) over all calls."""
        return torch.cat(self.outputs[layer.name], dim=1)

    def _before(self, layer: Layer) -> Any:
        sequence = "decoder" if layer.role == "cross" else layer.role
        queries, keys = self.tables[layer.name]
        assert layer.queries is not None

        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            self.inside = layer.name
            given = layer.queries.get(args, kwargs)  # type: ignore[union-attr]
            # the tokens of self-attention are queries and keys at once
            tokens = (self.queries if layer.keys else self.keys)[sequence]
            start = 0 if sequence == "encoder" else self.start
            states = queries[tokens[:, start : start + given.shape[1]]].to(given)
            if states.shape != given.shape:
                self.problems[layer.name] = f"expected states {tuple(states.shape)}, got {tuple(given.shape)}"
                return args, kwargs
            args, kwargs = layer.queries.put(args, kwargs, states)  # type: ignore[union-attr]
            if layer.keys is not None and (given := layer.keys.get(args, kwargs)) is not None:
                args, kwargs = layer.keys.put(args, kwargs, keys[self.keys["encoder"]].to(given))
            return args, kwargs

        return hook

    def _after(self, layer: Layer) -> Any:
        starts: list[int] = []

        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self.inside = ""
            result = output if isinstance(output, Tensor) else output[0]
            if self.start in starts:  # a module that several layers share: the last call counts
                self.outputs[layer.name][starts.index(self.start)] = result.detach().float()
            else:
                starts.append(self.start)
                self.outputs[layer.name].append(result.detach().float())

        return hook
