"""What models share: parts by the names of configurations, and inputs in their three forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.geometry import shape_of
from regard.masks import Mask, global_tokens, window
from regard.nn import Packed, PostNorm, PreNorm, Residual, SandwichNorm, Shared, UnitRMSNorm, key_mask, pack, unpack
from regard.sharding import sharding

T = TypeVar("T")
Inputs = Tensor | Packed | Sequence[Tensor]

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "unit_rms": UnitRMSNorm}
ARRANGEMENTS: dict[str, Callable[..., Residual]] = {"pre": PreNorm, "post": PostNorm, "sandwich": SandwichNorm}


def norm_named(name: str, eps: float) -> Callable[[int], nn.Module]:
    """A maker of norms, by its name in a configuration."""
    return partial(choose("norm", name, NORMS), eps=eps)


def choose(what: str, name: str, among: dict[str, T]) -> T:
    """The part of this name."""
    if name not in among:
        raise ValueError(f"{what} must be one of {', '.join(among)}, but is {name!r}")
    return among[name]


def embedding(count: int, width: int, std: float = 0.02) -> nn.Embedding:
    """A table of vectors from N(0, std^2)."""
    made = nn.Embedding(count, width, device="meta").to_empty(device=torch.get_default_device())
    nn.init.normal_(made.weight, std=std)
    return made


def embedded(ids: Tensor, table: nn.Embedding) -> Tensor:
    """The vectors (..., width) of token ids; ids that the table has not are told."""
    if torch.compiler.is_compiling():
        return F.embedding(ids, table.weight)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids must be whole numbers, int64 or int32, but are {ids.dtype}")
    try:
        return F.embedding(ids, table.weight)
    except IndexError:
        least, most = int(ids.min()), int(ids.max())
        raise ValueError(
            f"token ids must be in 0 ... {table.num_embeddings - 1}, but {least if least < 0 else most} came; "
            "is it the tokenizer of this model?"
        ) from None


class Rows(NamedTuple):
    """Inputs as a stack takes them. `packed` and `listed` say how results go back to the form that came."""

    values: Tensor  # (B, N, ...)
    positions: Tensor  # (N,) or (B, N)
    shared: Shared
    mask: Tensor | None
    packed: Packed | None
    listed: bool

    def own(self) -> Rows:
        """The tokens of this process, where sequences are shared with others; results are then (B, N, ...) of them."""
        if (together := sharding()) is None:
            return self
        values, positions = together.own(self.values, 1), together.own(self.positions, -1)
        return self._replace(values=values, positions=positions, shared=self.shared.own())

    def beside(self, whole: Tensor) -> Tensor:
        """What is told of every token, (B, N, ...), for the tokens that are here."""
        together = sharding()
        return together.own(whole, 1) if self.shared.parted and together is not None else whole

    def back(self, hidden: Tensor) -> Tensor | Packed | list[Tensor]:
        """(B, N, width) in the form of the inputs: as it is, packed, or a list."""
        if self.packed is None or self.shared.parted:
            return hidden
        packed = self.packed.holding(hidden.flatten(0, 1))
        return unpack(packed) if self.listed else packed

    def pooled(self, pooling: nn.Module, hidden: Tensor) -> Tensor:
        """(B, N, width) to one vector a sequence."""
        if self.packed is None:
            return pooling(hidden, self.mask)
        return pooling(self.packed.holding(hidden.flatten(0, 1)))

    def near(self, width: int) -> Shared:
        """What tokens share that see `width` to each side, and the first of their sequence: Longformer's mask."""
        starts: list[int] | list[list[int]] = [0]
        if self.mask is not None:
            starts = [[first] for first in self.mask.int().argmax(1).tolist()]
        elif self.packed is not None and len(self.values) == 1:
            starts = [first for first in self.packed.edges[:-1].tolist() if first < self.values.shape[1]]
        local: Mask = window(width, width) | global_tokens(starts)
        return Shared(local if self.shared.mask is None else local & self.shared.mask, positions=self.positions)


def rows_of(inputs: Inputs, mask: Tensor | None = None) -> Rows:
    """Inputs (B, N, ...) with a (B, N) mask, packed, or a list of (n, ...), which is packed."""
    if isinstance(inputs, Tensor):
        if inputs.dim() < 2:
            raise ValueError(
                f"inputs must be (B, N), packed, or a list of sequences, but are {shape_of(inputs)}; try inputs[None]"
            )
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        keys = key_mask(mask)
        if mask is not None and keys is not None and (torch.compiler.is_compiling() or not bool(mask[:, 0].all())):
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)  # filler before the first token counts for nothing
        return Rows(inputs, positions, Shared(keys, positions=positions), mask, None, False)
    if mask is not None:
        raise ValueError("mask goes with inputs (B, N); packed inputs and lists say their lengths themselves")
    packed = inputs if isinstance(inputs, Packed) else pack(inputs)
    listed = not isinstance(inputs, Packed)
    if len(set(packed.lengths)) == 1 and packed.lengths[0]:  # equal lengths are a plain batch
        values = packed.values.unflatten(0, (len(packed), -1))
        positions = torch.arange(values.shape[1], device=values.device)
        return Rows(values, positions, Shared(positions=positions), None, packed, listed)
    shared = Shared(packed.mask, positions=packed.positions)
    return Rows(packed.values[None], packed.positions, shared, None, packed, listed)
