"""An attention function and its promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Alignment = Literal["bottom-right", "top-left"]
CAPABILITIES = {
    "mask": "takes `mask`, bool, True = may attend, broadcast to (B, H, Q, K)",
    "causal": "takes `causal=True`",
    "causal-and-mask": "takes both at once",
    "scale": "takes `scale`, a number",
    "dropout": "takes `dropout`, the fraction of weights that is dropped",
    "grouped": "takes fewer key and value heads than query heads",
    "value-width": "takes values with another width than keys",
    "empty": "takes empty axes",
    "gradients": "can be differentiated",
    "double-backward": "can be differentiated twice",
    "forward-mode": "can be differentiated in forward mode: dual tensors and torch.func.jvp",
    "threads": "may be called from several threads at once",
    "memory": "memory can be measured with 6144 keys",
}


class NotSupported(Exception):
    """Raised by a target that cannot compute a call, with the reason; the case is then not applicable."""


@dataclass(frozen=True)
class Target:
    """A function `attention(q, k, v, *, mask=None, causal=False, scale=None, dropout=0.0)` and its promises.

    Query is (B, H, Q, D), key (B, G, K, D), value (B, G, K, E), output (B, H, Q, E). A target promises all capabilities
    that are not in `unsupported`. Only options that differ from their default are passed, so that a function needs no
    parameters for unsupported ones.

    unsupported: capabilities (`CAPABILITIES`) or names of properties that are not promised, with the reason.
    alignment: alignment of the causal mask if Q and K differ.
    growth: the power of n with which memory grows.
    dtypes: supported dtypes.
    setup: Python code that defines `attend`, for reproductions; by default an import of the function.
    remarks: for a property that fails: what the documentation of the function says about it.
    max_cases: number of cases to run per property, from the smallest; by default all.
    """

    name: str
    attention: Callable[..., Tensor]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    alignment: Alignment = "bottom-right"
    growth: float = 2.0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    setup: str = ""
    remarks: Mapping[str, str] = field(default_factory=dict)
    max_cases: int | None = None
    version: str = ""

    def __post_init__(self) -> None:
        if self.alignment not in ("bottom-right", "top-left"):
            raise ValueError(f"alignment must be 'bottom-right' or 'top-left', but is {self.alignment!r}")

    def setup_code(self) -> str:
        """Python code that defines `attend`."""
        if self.setup:
            return self.setup
        module, name = self.attention.__module__, self.attention.__qualname__
        return f"from {module} import {name} as attend"
