"""Somebody's attention, and what it promises."""

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
    "dropout": "takes `dropout`, the share of weights that is dropped",
    "grouped": "takes fewer heads of keys and values than of queries",
    "value-width": "takes values of another width than keys",
    "empty": "takes axes without entries",
    "gradients": "can be differentiated",
    "double-backward": "can be differentiated twice",
    "forward-mode": "can be differentiated in forward mode: dual tensors and torch.func.jvp",
    "threads": "may be called from several threads at once",
    "memory": "is to be measured on 6144 keys",
}


class NotSupported(Exception):
    """Raised by a target that cannot compute a call and says why: the case is then not applicable."""


@dataclass(frozen=True)
class Target:
    """A function `attention(q, k, v, *, mask=None, causal=False, scale=None, dropout=0.0)` and its promises.

    Query is (B, H, Q, D), key (B, G, K, D), value (B, G, K, E), output (B, H, Q, E). Everything is promised that
    `unsupported` does not take back: it maps capabilities (`CAPABILITIES`), or names of properties, to the reason. A
    call
    passes only what it asks for, so that a function needs no parameter for what it does not promise.

    unsupported: what is not promised, and why.
    alignment: where the causal mask stands if Q and K differ.
    growth: the power of n with which memory grows.
    dtypes: those that are taken.
    setup: Python that makes `attend`, for reproductions; an import of the function unless given.
    remarks: for a property that fails: what the documentation says of it.
    max_cases: cases of each property that are run, from the smallest; all unless given.
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
        """Python that makes `attend`."""
        if self.setup:
            return self.setup
        module, name = self.attention.__module__, self.attention.__qualname__
        return f"from {module} import {name} as attend"
