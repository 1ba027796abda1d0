"""Look up targets by name: an engine, a function of another library, or any `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.check.targets.engines import SELECTED, engine
from regard.check.targets.peers import PEERS, peer
from regard.check.targets.target import Target
from regard.engines.select import ENGINES

ENGINE_PREFIX = "regard-"
OPTION_NAMES = ("mask", "causal", "scale", "dropout")
TORCH_NAMES = {"mask": "attn_mask", "causal": "is_causal", "scale": "scale", "dropout": "dropout_p"}


class UnknownTarget(ValueError):
    """Raised if a target cannot be found; the message lists the known ones."""


def target(name: str) -> Target:
    """Return the target with this name.

    >>> from regard.check import target
    >>> target("torch.nn.functional:scaled_dot_product_attention").alignment
    'top-left'
    """
    if name.removeprefix(ENGINE_PREFIX) in (SELECTED, *ENGINES) and name.startswith(ENGINE_PREFIX):
        return engine(name.removeprefix(ENGINE_PREFIX))
    if name in PEERS:
        return peer(name)
    if ":" not in name:
        known = ", ".join([*(ENGINE_PREFIX + each for each in (SELECTED, *ENGINES)), *PEERS])
        raise UnknownTarget(f"target must be package.module:function or one of {known}, but is {name!r}")
    target = import_object(name)
    if isinstance(target, Target):
        return target
    if not callable(target):
        raise UnknownTarget(f"{name} must be a function or a regard.check.Target, but is {type(target).__name__}")
    return of_function(name, target)


def of_function(name: str, function: Callable[..., Tensor]) -> Target:
    """A target that promises the options that the function has parameters for, by our names or those of torch."""
    module, attribute = name.split(":")
    first = attribute.split(".")[0]
    setup = f"from {module} import {first}\n\nattend = {attribute}"
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin, such as scaled_dot_product_attention
        parameters = None
    if parameters is None or "attn_mask" in parameters or "is_causal" in parameters:
        names = (
            TORCH_NAMES if parameters is None else {ours: own for ours, own in TORCH_NAMES.items() if own in parameters}
        )
        gqa = parameters is None or "enable_gqa" in parameters
        unsupported = _missing(names, TORCH_NAMES) | {
            "causal-and-mask": "attn_mask and is_causal are mutually exclusive"
        }
        if not gqa:
            unsupported["grouped"] = "the function has no parameter enable_gqa"
        arguments = ", ".join(f"{ours}={own!r}" for ours, own in names.items())
        lines = [
            f"from {module} import {first}",
            "",
            "def attend(q, k, v, **given):",
            f"    names = dict({arguments})",
            "    options = {names[name]: value for name, value in given.items()}",
            *(["    if q.shape[1] != k.shape[1]:", '        options["enable_gqa"] = True'] if gqa else []),
            f"    return {attribute}(q, k, v, **options)",
        ]
        return Target(
            name, _adapt_torch_names(function, names, gqa), unsupported, alignment="top-left", setup="\n".join(lines)
        )
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return Target(name, function, setup=setup)
    return Target(name, function, _missing(parameters, OPTION_NAMES), setup=setup)


def _adapt_torch_names(function: Callable[..., Tensor], names: dict[str, str], gqa: bool) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        options = {names[name]: value for name, value in given.items()}
        if gqa and q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        return function(q, k, v, **options)

    return attend


def _missing(parameters: Any, names: Any) -> dict[str, str]:
    own = names if isinstance(names, dict) else {name: name for name in names}
    return {name: f"the function has no parameter {own[name]}" for name in own if name not in parameters}


def import_object(name: str) -> Any:
    """Import `package.module:name`, also from the current folder."""
    module, attribute = name.split(":", 1)
    if os.getcwd() not in sys.path:  # like `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownTarget(f"{name} cannot be imported: {error}") from error
    return value
