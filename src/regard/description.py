"""Descriptions: immutable dataclasses that are modules too, so that torch sees the tensors they hold."""

from __future__ import annotations

from dataclasses import Field, dataclass
from functools import partial
from inspect import get_annotations
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

# The state of an empty module, which __new__ makes because torch.compile cannot trace nn.Module.__init__.
_CONSTANTS = {name: value for name, value in nn.Module().__dict__.items() if not isinstance(value, dict | set)}
_CONTAINERS = {name: type(value) for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)}
Part = TypeVar("Part")


class _Default:
    """The default of a field, which as a plain class attribute would hide a tensor that is registered by that name."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __get__(self, description: Description | None, kind: type) -> Any:
        if description is None:
            return self.value
        return nn.Module.__getattr__(description, self.name)


@dataclass(eq=False, repr=False)
class Description(nn.Module):
    """The base of scores, biases and attentions.

    Subclasses are dataclasses (`@dataclass(eq=False)`). A field that is an `nn.Parameter` is a parameter of the module,
    any other tensor is a buffer, and a description, a module or a tuple of descriptions is a submodule. A module that
    holds a description as an attribute therefore trains, saves, loads, moves and converts its tensors.

    The tensors are those that were given, never copies or views of them. Only torch replaces them, as in
    `load_state_dict(assign=True)` or `functional_call`; every other field keeps the value it was made with.

    >>> import regard as rg, torch
    >>> score = rg.Dot(scale=torch.nn.Parameter(torch.ones(4)))
    >>> [name for name, _ in score.named_parameters()]
    ['scale']
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in get_annotations(cls):
            if name in cls.__dict__ and not isinstance(cls.__dict__[name], Field):
                setattr(cls, name, _Default(name, cls.__dict__[name]))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        for name, value in _CONSTANTS.items():
            object.__setattr__(self, name, value)
        for name, kind in _CONTAINERS.items():
            object.__setattr__(self, name, kind())
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            super().__setattr__(name, value)
        elif name in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be changed: a description is immutable; "
                f"make another with dataclasses.replace(description, {name}=...)"
            )
        elif name in self._parameters or name in self._buffers:
            super().__setattr__(name, value)  # torch replaces a tensor, as load_state_dict(assign=True) does
        else:
            self._register(name, value)

    def tensors(self) -> tuple[Tensor, ...]:
        """The floating-point tensors of the description, in the order of its fields; each may require grad."""
        found: list[Tensor] = []
        for name in self.__dataclass_fields__ if _holds_tensors(self) else ():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Description):
                    found += one.tensors()
                elif isinstance(one, Tensor) and one.is_floating_point():
                    found.append(one)
        return tuple(found)

    def _set(self, name: str, value: Any) -> None:
        """Set a field that may be set already."""
        for held in (self.__dict__, self._parameters, self._buffers, self._modules):
            held.pop(name, None)
        self._register(name, value)

    def _register(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            object.__setattr__(self, name, value)
            if isinstance(value, nn.Module):
                self._modules[name] = value
            elif isinstance(value, tuple):
                self._modules |= {str(n): one for n, one in enumerate(value) if isinstance(one, Description)}
            return
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        else:
            self._buffers[name] = value
        if getattr(self, name) is not value:
            raise TypeError(
                f"{type(self).__name__}.{name}: give its default as a plain value, not by field(default=...)"
            )


def snapshot(part: Part) -> Part:
    """The same description over the tensors that it holds now.

    A backward pass reads it after `functional_call` has put other tensors back.
    """
    if isinstance(part, Description):
        if not _holds_tensors(part):
            return part
        fields = {name: snapshot(getattr(part, name)) for name in part.__dataclass_fields__}
        kind = type(part).__mro__[1] if is_parametrized(part) else type(part)  # torch derives a class to parametrize
        return kind(**fields)
    if isinstance(part, tuple):
        return tuple(snapshot(one) for one in part)  # type: ignore[return-value]
    if isinstance(part, nn.Module):  # a score function
        tensors = dict(part.named_parameters()) | dict(part.named_buffers())
        return partial(_call_with, part, tensors) if tensors else part  # type: ignore[return-value]
    return part


def _holds_tensors(module: nn.Module) -> bool:
    inside = module._modules.values()
    return bool(module._parameters or module._buffers) or any(_holds_tensors(one) for one in inside if one is not None)


def _call_with(module: nn.Module, tensors: dict[str, Tensor], *arguments: Tensor) -> Any:
    return functional_call(module, tensors, arguments)
