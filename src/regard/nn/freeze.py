"""Packing of weights for inference, and unpacking."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.engines.native import release_free_memory
from regard.engines.packed_linear import PackedWeight, check_format, why_not
from regard.engines.weight_formats import Quantized
from regard.nn.experts import Experts


@torch.inference_mode(False)  # so that a model frozen under inference_mode can be trained after thaw
def freeze(model: nn.Module, *, weights: str | None = None) -> dict[str, str]:
    """Pack the weights of a model for inference on a CPU, in place, to speed up small batches.

    This packs float32 CPU weights of `nn.Linear` layers and of embeddings that also compute the logits. A packed weight
    is stored once, in the layout of the kernel, and is read-only: until `thaw`, writing to it or changing its dtype
    raises, before any other part of the model is converted. Values and derivatives are those of the plain weights, but
    only calls without gradients are fast: use `torch.inference_mode()`. The weights of `rg.nn.Experts` stay float32.

    weights: the format of the packed numbers. "float32" keeps every bit. "bfloat16", "int8" and "int4" take fewer
        bytes, so that generation reads less memory per token, and round the weights: int8 and int4 to integers with a
        scale per output and group of 32 inputs. Products are computed in float32 from the rounded numbers, and other
        functions of the weights read those too. With None, packed weights keep their format and others are packed as
        float32, so that freezing a frozen model has no effect.

    `state_dict()` returns plain float32 copies. `regard.save` writes other formats than float32 as they are.

    Returns the names of the weights that were not packed, with the reasons.

    >>> import regard as rg, torch
    >>> layer = rg.nn.FeedForward(64, 256).eval()
    >>> x, expected = torch.randn(2, 64), layer.up.weight.detach().clone()
    >>> rg.nn.freeze(layer)
    {}
    >>> with torch.inference_mode():
    ...     layer(x).shape
    torch.Size([2, 64])
    >>> rg.nn.thaw(layer)
    >>> torch.equal(layer.up.weight, expected)
    True
    """
    if weights is not None:
        check_format(weights)
    unpacked = {
        f"{name}.{matrices}".lstrip("."): "it has a matrix for each expert, and the kernel takes one"
        for name, module in model.named_modules() if isinstance(module, Experts) for matrices in ("up", "output")
    }  # fmt: skip
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    try:
        for name, module in _projections(model):
            weight = module._parameters.get("weight")
            # Every token is an embedding, so that its error is in all of them: not below int8.
            wanted = "int8" if weights == "int4" and id(weight) in embeddings else weights
            if weight is None:
                unpacked[name] = "it is computed from other parameters, as by weight_norm or prune"
                continue
            if isinstance(weight, PackedWeight) and (weights is None or _choice(weight) in (wanted, weights)):
                continue
            plain = weight.unpack() if isinstance(weight, PackedWeight) else weight
            if reason := why_not(plain, wanted or "float32"):
                unpacked[name] = reason
                if plain is not weight:  # packed in another format than the wanted one
                    _swap(name, weight, plain)
            else:
                _swap(name, weight, PackedWeight.pack(plain, wanted or "float32"))
    except BaseException:  # an interrupted call packs nothing
        _thaw(model)
        raise
    _finish(model)
    return unpacked


@torch.inference_mode(False)
def pack_quantized(model: nn.Module, contents: dict[str, Quantized | Tensor]) -> None:
    """Replace the weights with these names by packed ones: quantised numbers, or bfloat16 tensors, as they are."""
    for name, content in contents.items():
        weight = model.get_parameter(name)
        format = content.format if isinstance(content, Quantized) else "bfloat16"
        if not why_not(weight, format):
            _swap(name, weight, PackedWeight.pack(content, format))
    _finish(model)


def packable_names(model: nn.Module) -> list[str]:
    """Return the names of the weights that `freeze` packs if it can."""
    return [name for name, _ in _projections(model)]


def _choice(weight: PackedWeight) -> str:
    """Return the format of a packed weight in the words of `freeze`: int4 with or without a minimum is int4."""
    return weight.format.removesuffix("_minimum")


def _finish(model: nn.Module) -> None:
    for module in model.modules():
        if any(isinstance(each, PackedWeight) for each in module.parameters()):
            _add_hooks(module)
    release_free_memory()


def thaw(model: nn.Module) -> None:
    """Undo `freeze`: restore the same values in the same parameters, which can be trained again.

    Weights that were rounded by `freeze(weights=...)` keep their rounded values, and a warning says so.
    """
    rounded = {name: weight.format for name, weight in packed_weights(model).items() if weight.format != "float32"}
    _thaw(model)
    if rounded:
        formats = ", ".join(sorted(set(rounded.values())))
        warnings.warn(
            f"{len(rounded)} weights, such as {next(iter(rounded))}, keep the values that they were rounded to "
            f"({formats}); load the model again for the original ones",
            stacklevel=2,
        )


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return the packed weights of a model by name."""
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)}


@torch.inference_mode(False)
def _thaw(model: nn.Module) -> None:
    for name, weight in packed_weights(model).items():
        _swap(name, weight, weight.unpack())
    for module in model.modules():
        _remove_hooks(module)
    release_free_memory()


def _projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules whose weight can be packed, each with the name of its weight.

    Subclasses of nn.Linear are left out, since they may use their weight differently; embeddings are included if a
    model refers to them as `output_layer`.
    """
    outputs = {id(getattr(module, "output_layer", None)) for module in model.modules()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear or (type(module) is nn.Embedding and id(module) in outputs):
            yield f"{name}.weight" if name else "weight", module


def _swap(name: str, weight: Tensor, replacement: Tensor) -> None:
    """Replace the contents of a parameter but keep the object, so that modules that share it see the change."""
    grad, weight.grad = weight.grad, None
    parameter = nn.Parameter(replacement, weight.requires_grad)
    packed_attributes = ("panels", "layout_of_panels", "_is_param")  # attributes of packed weights
    parameter.__dict__.update({key: value for key, value in weight.__dict__.items() if key not in packed_attributes})
    try:
        try:
            torch.utils.swap_tensors(weight, parameter)
        except RuntimeError:  # a reference cycle may still hold it
            gc.collect()
            torch.utils.swap_tensors(weight, parameter)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name} is in use elsewhere ({error}); first delete its views and outputs computed with gradients"
        ) from error
    finally:
        weight.grad = grad


def _add_hooks(module: nn.Module) -> None:
    _remove_hooks(module)
    module.register_load_state_dict_pre_hook(_refuse_to_load)
    module.__dict__["_apply"] = _AllOrNothing(module)


def _remove_hooks(module: nn.Module) -> None:
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is _refuse_to_load]:
        del hooks[key]
    module.__dict__.pop("_apply", None)


class _AllOrNothing:
    """Replacement for `module._apply` that converts nothing if the conversion of a packed weight raises."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def __call__(self, function: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> nn.Module:
        module = self.module()
        assert module is not None
        for weight in module.parameters():
            if isinstance(weight, PackedWeight):
                with torch.no_grad():
                    function(weight)
        return type(module)._apply(module, function, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AllOrNothing:
        return _AllOrNothing(memo[id(self.module())])

    def __reduce__(self) -> Any:
        return _AllOrNothing, (self.module(),)


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    if any(isinstance(each, PackedWeight) for each in module._parameters.values()):
        raise RuntimeError("the weights of a frozen model are read-only: call rg.nn.thaw(model) before load_state_dict")
