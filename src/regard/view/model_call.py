"""One call of a whole model with copies of its inputs, which can be run again, also with other tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.fingerprint import readable
from regard.masks import Mask
from regard.nn.packing import Packed
from regard.view.inputs import SOURCES, TARGETS

PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, Mask, type(None))


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call `model(*args, **kwargs)`.

    versions: of the parameters and buffers at the time of the call. contents: their checksums at the end of the
    capture, since writes through `.data` do not change the version of a tensor.
    """

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    versions: tuple
    contents: tuple = ()

    @classmethod
    def copy(cls, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> ModelCall | None:
        """Copy the inputs of a call; None if one of them, such as a cache, would be changed by running it again."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                return cls(model, _copy(args), _copy(kwargs), _versions(model))
        except TypeError:
            return None

    def with_contents(self) -> ModelCall:
        """Return the call with the checksums of the parameters and buffers, all of which are read."""
        return replace(self, contents=tuple(map(_checksum, _tensors(self.model))))

    def check(self) -> None:
        """Raise unless running the call again gives the result of the first time; reads all parameters."""
        if self.model.training:
            raise ValueError(
                "the model is in training mode, where dropout is random; call model.eval() and capture again"
            )
        contents = tuple(map(_checksum, _tensors(self.model)))
        if _versions(self.model) != self.versions or contents != self.contents:
            raise ValueError("the parameters of the model have changed since the capture; capture again")

    def run(self) -> Any:
        """Run the call; `check` it before the first time."""
        with torch.no_grad():
            return self.model(*self.args, **self.kwargs)

    @property
    def roles(self) -> list[str]:
        """The inputs that are token ids: source, target, both or none."""
        roles = []
        for role in ("source", "target"):
            with suppress(ValueError):
                self._find(role)
                roles.append(role)
        return roles

    def ids(self, role: str, row: int = 0) -> Tensor:
        """Return the token ids (n,) of a batch row of the source or the target."""
        _, value = self._find(role)
        if isinstance(value, Tensor):
            return value[row]
        return (value.values if isinstance(value, Packed) else torch.cat(list(value)))[_part(value, row)]

    def replace_ids(self, role: str, ids: Tensor, row: int = 0) -> ModelCall:
        """Return the call with other ids (n,) in a batch row. A batch of one may get another number of tokens."""
        where, value = self._find(role)
        if isinstance(value, Tensor):
            if ids.shape != value[row].shape and len(value) > 1:
                raise ValueError("the number of tokens can only change in a batch of one; capture one sequence")
            new: Any = ids[None] if len(value) == 1 else value.clone()
            if len(value) > 1:
                new[row] = ids
        else:
            packed = isinstance(value, Packed)
            lengths = value.lengths if packed else tuple(map(len, value))
            flat = value.values if packed else torch.cat(list(value))
            part = _part(value, row)
            if len(ids) != part.stop - part.start and len(lengths) > 1:
                raise ValueError("the number of tokens can only change in a batch of one; capture one sequence")
            flat = torch.cat([flat[: part.start], ids, flat[part.stop :]])
            lengths = (len(ids),) if len(lengths) == 1 else lengths
            new = Packed(flat, lengths) if packed else list(flat.split(lengths))
        if isinstance(where, int):
            return replace(self, args=(*self.args[:where], new, *self.args[where + 1 :]))
        return replace(self, kwargs={**self.kwargs, where: new})

    def drop_masks(self, length: int) -> ModelCall:
        """Return the call without masks (1, length) that hide nothing, so that the number of tokens may change."""
        given = {name: value for name, value in self.kwargs.items() if _has_length(value, length)}
        for name, value in given.items():
            if "mask" in name and value.dim() == 2 and bool((value != 0).all()):
                continue
            if name not in (*SOURCES, *TARGETS):
                raise ValueError(f"the input {name!r} has one entry per token; capture a call with token ids only")
        dropped = {name for name in given if "mask" in name}
        return replace(self, kwargs={name: value for name, value in self.kwargs.items() if name not in dropped})

    def _find(self, role: str) -> tuple[int | str, Any]:
        """Return the place of the ids of a role among the arguments, an index or a name, and their value."""
        names = SOURCES if role == "source" else TARGETS
        parameters = list(inspect.signature(self.model.forward).parameters)
        for name in names:
            if _is_ids(self.kwargs.get(name)):
                return name, self.kwargs[name]
            if name in parameters[: len(self.args)] and _is_ids(self.args[parameters.index(name)]):
                return parameters.index(name), self.args[parameters.index(name)]
        if role == "source" and self.args and _is_ids(self.args[0]):
            return 0, self.args[0]
        raise ValueError(f"the model was not called with token ids as its {role}, so its tokens cannot be changed")


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Packed):
        return value.with_values(value.values.detach().clone())
    if type(value) in (tuple, list):
        return type(value)(map(_copy, value))
    if type(value) is dict:
        return {name: _copy(each) for name, each in value.items()}
    if isinstance(value, PLAIN):
        return value
    raise TypeError(f"cannot copy {type(value).__name__}")


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _versions(model: nn.Module) -> tuple:
    return tuple((id(each), -1 if each.is_inference() else each._version) for each in _tensors(model))


def _checksum(tensor: Tensor) -> int:
    """Return the sum of the content as integers; 0 if it cannot be read, as that of a packed weight."""
    if not readable(tensor) or not tensor.numel():
        return 0
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor.clone(memory_format=torch.contiguous_format) if tensor.storage_offset() else tensor.contiguous()
    content = tensor.reshape(-1).view(torch.uint8)
    whole = len(content) // 8 * 8
    return int(content[:whole].view(torch.int64).sum()) + int(content[whole:].sum())


def _is_ids(value: Any) -> bool:
    if isinstance(value, Packed):
        value = value.values
    elif isinstance(value, Sequence) and value and all(isinstance(each, Tensor) and each.dim() == 1 for each in value):
        value = value[0]
    elif not isinstance(value, Tensor) or value.dim() != 2:
        return False
    return value.dim() <= 2 and value.dtype in (torch.int32, torch.int64)


def _part(value: Any, row: int) -> slice:
    """Return the place of a batch row in concatenated sequences; all of them if they run as one row."""
    lengths = value.lengths if isinstance(value, Packed) else tuple(map(len, value))
    if len(set(lengths)) > 1:
        return slice(0, sum(lengths))
    return slice(row * lengths[0], (row + 1) * lengths[0])


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
