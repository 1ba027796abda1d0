"""The axes of one call, and indices into it.

Axis legend of the project: `B` batch, `H` query heads, `G` key/value heads, `Q` queries, `K` keys, `D` width of queries
and keys, `E` width of values. Query `i` is at key position `p = offset + i`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Offset = int | Tensor


@dataclass(frozen=True)
class CallSlice:
    """A slice of a call: contiguous heads, queries and keys."""

    heads: slice
    rows: slice
    columns: slice


@dataclass(frozen=True, eq=False)
class Frame:
    """The axes that masks and biases depend on, and the offset of the queries among the keys."""

    B: int
    H: int
    Q: int
    K: int
    offset: Offset  # an int, or (B,)

    def indices(
        self,
        batch: slice | None = None,
        heads: slice | None = None,
        rows: slice | None = None,
        columns: slice | None = None,
        device: torch.device | str | None = None,
    ) -> Indices:
        """Return the indices of a box; None means a whole axis. Slices need a start and a stop, neither negative."""
        box = tuple(
            slice(0, n) if part is None else slice(part.start, min(part.stop, n))  # n may be symbolic
            for part, n in zip((batch, heads, rows, columns), (self.B, self.H, self.Q, self.K), strict=True)
        )
        b, h, i, j = (torch.arange(part.start, part.stop, device=device) for part in box)
        return Indices(self, b[:, None, None, None], h[:, None, None], i[:, None], j, box)

    def offsets(self) -> list[int]:
        """Return one offset if all batch rows share it, else one per row."""
        return self.offset.tolist() if isinstance(self.offset, Tensor) else [self.offset]

    def cache_key(self) -> tuple:
        """Return the frame as a hashable value."""
        return self.B, self.H, self.Q, self.K, tuple(self.offsets())


@dataclass(frozen=True, eq=False)
class Indices:
    """Index tensors `(b, h, i, j)` that broadcast against each other, for a box or for any entries."""

    frame: Frame
    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    box: tuple[slice, ...] | None = None

    @property
    def p(self) -> Tensor:
        """The positions of the queries among the keys."""
        offset = self.frame.offset
        return self.i + (offset.to(self.i.device)[self.b] if isinstance(offset, Tensor) else offset)

    def take(self, tensor: Tensor) -> Tensor:
        """Index a tensor that broadcasts to (B, H, Q, K) with these indices."""
        if self.box is not None:
            return tensor[
                tuple(slice(None) if n == 1 else part for n, part in zip(tensor.shape, self.box, strict=True))
            ]
        index = (self.b, self.h, self.i, self.j)
        return tensor[tuple(torch.zeros_like(at) if n == 1 else at for n, at in zip(tensor.shape, index, strict=True))]

    def per_head(self, tensor: Tensor, axes: int = 0) -> Tensor:
        """Index a tensor of one entry per head (or one for all), each with `axes` axes; broadcasts to (B, H, Q, K)."""
        if tensor.dim() > axes:
            tensor = tensor[self.h] if tensor.shape[0] > 1 else tensor[torch.zeros_like(self.h)]
        return tensor


def pad_leading(tensor: Tensor, dims: int = 4) -> Tensor:
    """Add leading axes of size 1."""
    return tensor.reshape((1,) * (dims - tensor.dim()) + tuple(tensor.shape))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values as an array, also within torch.func, where tensors have no storage.

    >>> import torch
    >>> from regard.geometry import to_numpy
    >>> torch.func.grad(lambda x: x * int(to_numpy(torch.tensor([1, 3])).sum()))(torch.tensor(2.0))
    tensor(4.)
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return tensor.cpu().numpy()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack():
        return tensor.cpu().numpy()


def broadcasts(entries: int, size: int) -> bool:
    """Whether an axis of so many entries broadcasts to a size. Symbolic numbers, unlike for `in`, may be equal."""
    return bool(entries == 1 or entries == size)


def format_shape(tensor: Tensor | Sequence[int]) -> str:
    """Format a shape as a tuple."""
    return str(tuple(tensor.shape if isinstance(tensor, Tensor) else tensor))
