"""Packed batches: sequences of different lengths concatenated into one row, without padding."""

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
    """Concatenated sequences: `values` (N, ...) and their `lengths`, which sum to N. Built by `regard.pack`.

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
            raise ValueError(f"lengths must not be negative, got {min(self.lengths)}")
        if sum(self.lengths) != len(self.values):
            raise ValueError(
                f"lengths must sum to the {len(self.values)} packed tokens, but sum to {sum(self.lengths)}; "
                "build packed batches with regard.pack(sequences)"
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Start of each sequence, followed by N: (sequences + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def ids(self) -> np.ndarray:
        """Index of the sequence of each token, (N,)."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token within its sequence, (N,)."""
        return torch.from_numpy(np.arange(len(self.values)) - self.cu_seqlens[self.ids]).to(self.values.device)

    @cached_property
    def mask(self) -> Mask:
        """The mask in which each token attends to its own sequence."""
        return documents(torch.from_numpy(self.ids))

    def cross_mask(self, source: Packed) -> Mask:
        """The mask from each token to the sequence of the same index in `source`. Use it with `Attention(offset=0)`."""
        if len(self) != len(source):
            raise ValueError(
                f"packed source and target must have the same number of sequences, got {len(source)} and {len(self)}"
            )
        return ranges(torch.from_numpy(source.cu_seqlens[self.ids]), torch.from_numpy(source.cu_seqlens[self.ids + 1]))

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return values (B, longest, ...) padded with zeros, and the (B, longest) mask of real tokens.

        >>> import regard as rg, torch
        >>> rg.pack([torch.tensor([5, 6]), torch.tensor([8])]).padded()[0].tolist()
        [[5, 6], [8, 0]]
        """
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.values.device)
        mask = torch.arange(max((0, *self.lengths)), device=self.values.device) < lengths[:, None]
        padded = self.values.new_zeros(*mask.shape, *self.values.shape[1:])
        padded[mask] = self.values
        return padded, mask

    def with_values(self, values: Tensor) -> Packed:
        """Return a batch with the same lengths and other values (N, ...); cached properties are kept."""
        other = Packed(values, self.lengths)
        for name in ("cu_seqlens", "ids", "positions", "mask"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other


def pack(sequences: Sequence[Tensor] | Sequence[Sequence[int]]) -> Packed:
    """Concatenate sequences (n, ...) of different lengths. Models accept the result in place of (B, N) and a mask.

    >>> import regard as rg, torch
    >>> rg.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).lengths
    (3, 2)
    """
    if isinstance(sequences, Tensor) or not isinstance(sequences, Sequence) or not len(sequences):
        given = (
            f"a tensor {format_shape(sequences)}" if isinstance(sequences, Tensor) else f"{type(sequences).__name__}"
        )
        raise TypeError(f"sequences must be a list of at least one tensor (n, ...), got {given}; try list(batch)")
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    if any(not tensor.dim() for tensor in tensors) or len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = ", ".join(sorted({format_shape(tensor) for tensor in tensors})[:4])
        raise ValueError(f"sequences must be (n, ...) and differ in n only, got shapes {shapes}")
    return Packed(torch.cat(tensors), tuple(len(tensor) for tensor in tensors))


def unpack(packed: Packed) -> list[Tensor]:
    """Split a packed batch into its sequences, as views of its values.

    >>> import regard as rg, torch
    >>> rg.unpack(rg.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]))
    [tensor([5, 6, 7]), tensor([8, 9])]
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"packed must be a batch built by regard.pack, got {type(packed).__name__}")
    return list(packed.values.split(packed.lengths))
