"""Packed batches: sequences of different lengths end to end in one row, so that no filler is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from regard.geometry import format_shape
from regard.masks import Mask, documents, ranges


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences end to end: `values` (N, ...) and their `lengths`, which sum to N. Made by `regard.pack`.

    >>> import regard as rg, torch
    >>> packed = rg.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
    >>> packed.values, packed.positions
    (tensor([5, 6, 7, 8, 9]), tensor([0, 1, 2, 0, 1]))
    >>> print(packed.mask.draw())
    ███··
    ███··
    ███··
    ···██
    ···██
    """

    values: Tensor  # (N, ...)
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(length < 0 for length in self.lengths):
            raise ValueError(f"lengths must not be negative, but the least is {min(self.lengths)}")
        if sum(self.lengths) != len(self.values):
            raise ValueError(
                f"lengths must sum to the {len(self.values)} packed tokens, but sum to {sum(self.lengths)}; "
                "regard.pack(sequences) makes both"
            )

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Where the sequences start, and behind them N: (sequences + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def ids(self) -> np.ndarray:
        """Which sequence each token belongs to, (N,)."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """Where each token stands in its sequence, (N,): it restarts at 0 in every one."""
        return torch.from_numpy(np.arange(len(self.values)) - self.cu_seqlens[self.ids]).to(self.values.device)

    @cached_property
    def mask(self) -> Mask:
        """Tokens see their own sequence."""
        return documents(torch.from_numpy(self.ids))

    def cross_mask(self, source: Packed) -> Mask:
        """Tokens see the sequence of the same number in another packed batch, as in translation; with `offset=0`."""
        if len(self) != len(source):
            raise ValueError(
                f"packed source and target must hold as many sequences, but hold {len(source)} and {len(self)}"
            )
        return ranges(torch.from_numpy(source.cu_seqlens[self.ids]), torch.from_numpy(source.cu_seqlens[self.ids + 1]))

    def padded(self) -> tuple[Tensor, Tensor]:
        """Values (B, longest, ...) with zeros behind each sequence, and the (B, longest) mask of real tokens.

        >>> import regard as rg, torch
        >>> rg.pack([torch.tensor([5, 6]), torch.tensor([8])]).padded()[0].tolist()
        [[5, 6], [8, 0]]
        """
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.values.device)
        mask = torch.arange(max(self.lengths, default=0), device=self.values.device) < lengths[:, None]
        filled = self.values.new_zeros(*mask.shape, *self.values.shape[1:])
        filled[mask] = self.values
        return filled, mask

    def with_values(self, values: Tensor) -> Packed:
        """The same sequences of other values, (N, ...); what was worked out about lengths is kept."""
        other = Packed(values, self.lengths)
        for name in ("cu_seqlens", "ids", "positions", "mask"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other


def pack(sequences: Sequence[Tensor] | Sequence[Sequence[int]]) -> Packed:
    """Put sequences (n, ...) of different lengths end to end. Encoders take the result instead of (B, N) and a mask.

    >>> import regard as rg, torch
    >>> rg.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).lengths
    (3, 2)
    """
    if isinstance(sequences, Tensor) or not isinstance(sequences, Sequence) or not len(sequences):
        came = f"a tensor {format_shape(sequences)}" if isinstance(sequences, Tensor) else f"{type(sequences).__name__}"
        raise TypeError(f"sequences must be a list of at least one tensor (n, ...), but is {came}; try list(batch)")
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    if any(not tensor.dim() for tensor in tensors) or len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = ", ".join(sorted({format_shape(tensor) for tensor in tensors})[:4])
        raise ValueError(f"sequences must be (n, ...) and differ in n only, but are of shapes {shapes}")
    return Packed(torch.cat(tensors), tuple(len(tensor) for tensor in tensors))


def unpack(packed: Packed) -> list[Tensor]:
    """The sequences of a packed batch, views of its values.

    >>> import regard as rg, torch
    >>> rg.unpack(rg.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]))
    [tensor([5, 6, 7]), tensor([8, 9])]
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"packed must come from regard.pack, but is {type(packed).__name__}")
    return list(packed.values.split(packed.lengths))
