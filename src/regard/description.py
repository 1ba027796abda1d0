"""Descriptions: immutable dataclasses that are modules too, so that torch registers their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, replace
from inspect import get_annotations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from regard.arguments import check_layout

# The state of an empty module, set by __new__ because torch.compile cannot trace nn.Module.__init__.
_CONSTANTS = {name: value for name, value in nn.Module().__dict__.items() if not isinstance(value, dict | set)}
_CONTAINERS = {name: type(value) for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)}
HOOKS = tuple(name for name in _CONTAINERS if "hooks" in name)
Module = TypeVar("Module")


class _Default:
    """The default of a field; as a plain class attribute it would hide a tensor registered under that name."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __get__(self, description: Description | None, kind: type) -> Any:
        if description is None:
            return self.value
        return nn.Module.__getattr__(description, self.name)


@dataclass(eq=False, repr=False)
class Description(nn.Module):
    """Base class of scores, biases and attentions.

    Subclasses are dataclasses (`@dataclass(eq=False)`). A field that is an `nn.Parameter` is a parameter of the module,
    any other tensor is a buffer, and a description, a module or a tuple of descriptions is a submodule. A module that
    holds a description as an attribute therefore trains, saves, loads, moves and converts its tensors. Several tensors
    or modules in one field are an `nn.ParameterList` or `nn.ModuleList`.

    The tensors are those that were passed in, never copies or views. Only torch replaces them, as in
    `load_state_dict(assign=True)` or `functional_call`; all other fields are immutable.

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
        if cls.__hash__ is None:
            raise TypeError(f"{cls.__name__} must be declared with @dataclass(eq=False): torch keeps modules in sets")
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
                f"create another with description.replace({name}=...)"
            )
        elif name in self._parameters or name in self._buffers:
            super().__setattr__(name, value)  # torch replaces a tensor, as load_state_dict(assign=True) does
        else:
            self._register(name, value)

    def replace(self, **changes: Any) -> Any:
        """Return the same description with other fields, in the same mode (`train` or `eval`) and with the same hooks.

        >>> import regard as rg
        >>> rg.Attention(mask=rg.causal(), dropout=0.1).replace(dropout=0.0)
        Attention(mask=causal())
        """
        other = replace(self, **changes)
        object.__setattr__(other, "training", self.training)
        for name in HOOKS:
            if hooks := self.__dict__[name]:
                object.__setattr__(other, name, hooks)
        return other

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the floating-point tensors of the description, in field order; each may require grad."""
        tensors: list[Tensor] = []
        for name in self.__dataclass_fields__ if _holds_tensors(self) else ():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Description):
                    tensors += one.tensors()
                elif isinstance(one, Tensor) and one.is_floating_point():
                    tensors.append(one)
        return tuple(tensors)

    def closes_over_trainable(self, device: torch.device) -> bool:
        """Whether it uses tensors that require grad and are not among `tensors()`."""
        return any(tensor.requires_grad for tensor in self.hidden_tensors()) or any(
            part.closes_over_trainable(device) for part in self._modules.values() if isinstance(part, Description)
        )

    def closes_over_tangent(self, device: torch.device) -> bool:
        """Whether it uses tensors that have a tangent in forward mode and are not among `tensors()`."""
        if forward_ad._current_level < 0:
            return False
        return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in self.hidden_tensors()) or any(
            part.closes_over_tangent(device) for part in self._modules.values() if isinstance(part, Description)
        )

    def hidden_tensors(self) -> list[Tensor]:
        """Return the tensors of submodules, and those that are not fields."""
        if not _holds_tensors(self):
            return []
        listed = {id(tensor) for tensor in self.tensors()}
        return [t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point() and id(t) not in listed]

    def _set(self, name: str, value: Any) -> None:
        """Set a field, overwriting a previous value."""
        for held in (self.__dict__, self._parameters, self._buffers, self._modules):
            held.pop(name, None)
        self._register(name, value)

    def _register(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            object.__setattr__(self, name, value)
            if isinstance(value, nn.Module):
                self._modules[name] = value
            elif isinstance(value, tuple | list | dict):
                self._register_many(name, value)
            return
        check_layout(name, value, sequences=False)
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        else:
            self._buffers[name] = value
        if getattr(self, name) is not value:
            raise TypeError(
                f"{type(self).__name__}.{name}: define its default as a plain value, not with field(default=...)"
            )

    def _register_many(self, name: str, values: Any) -> None:
        parts = values if isinstance(values, tuple) and all(isinstance(one, Description) for one in values) else ()
        if not parts and any(isinstance(one, Tensor | nn.Module) for one in tree_leaves(values)):
            raise TypeError(
                f"{type(self).__name__}.{name}: torch does not see tensors and modules in a {type(values).__name__}; "
                "use one field each, an nn.ParameterList or an nn.ModuleList"
            )
        if parts and "0" in self._modules:
            raise TypeError(
                f"{type(self).__name__}.{name}: only one field may be a tuple of descriptions; use an nn.ModuleList"
            )
        self._modules |= {str(n): one for n, one in enumerate(parts)}


def snapshot(part: Module) -> Module:
    """Return the same description over the tensors that it holds now.

    A backward pass reads it after `functional_call` has restored the original tensors.
    """
    return replace_tensors(part, lambda tensor: tensor)


def replace_tensors(part: Module, replacement: Callable[[Tensor], Tensor]) -> Module:
    """Return a copy of a description, or of a module inside one, with other tensors; the rest is shared."""
    if not isinstance(part, nn.Module) or isinstance(part, torch.jit.ScriptModule) or not _holds_tensors(part):
        return part
    computed = {}
    if isinstance(part, Description) and is_parametrized(part):
        computed = {name: replacement(getattr(part, name)) for name in part.parametrizations}  # type: ignore[union-attr]
    copy: Any = object.__new__(type(part).__mro__[1] if computed else type(part))  # not the parametrized class
    state = dict(part.__dict__)
    for held in ("_parameters", "_buffers"):
        state[held] = {name: t if t is None else replacement(t) for name, t in part.__dict__[held].items()}
    state["_buffers"] |= computed
    state["_modules"] = {name: replace_tensors(one, replacement) for name, one in state["_modules"].items()}
    if computed:
        del state["_modules"]["parametrizations"]
    for name in part.__dataclass_fields__ if isinstance(part, Description) else ():
        if name in state["_modules"]:
            state[name] = state["_modules"][name]
        elif isinstance(state.get(name), tuple) and any(isinstance(one, Description) for one in state[name]):
            state[name] = tuple(state["_modules"][str(n)] for n in range(len(state[name])))
    copy.__dict__.update(state)
    return copy


def _holds_tensors(module: nn.Module) -> bool:
    inside = module._modules.values()
    return bool(module._parameters or module._buffers) or any(_holds_tensors(one) for one in inside if one is not None)
