"""What models share: parts by the names of configurations, and inputs in their three forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.geometry import shape_of
from regard.masks import Mask, dense, global_tokens, window
from regard.nn import Packed, PostNorm, PreNorm, Residual, SandwichNorm, Shared, UnitRMSNorm, key_mask, pack, unpack
from regard.nn.shared import check_mask
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


def wide(x: Tensor) -> Tensor:
    """In float32 at least: what is summed, or goes through a softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
        if self.mask is not None and torch.compiler.is_compiling():  # a graph cannot read where rows start
            at = torch.arange(self.mask.shape[1], device=self.mask.device)
            first = at == self.mask.int().argmax(1, keepdim=True)  # (B, N)
            visible = ((at[:, None] - at).abs() <= width) | first[:, None] | first[:, :, None]
            return Shared(dense(visible[:, None] & self.mask[:, None, None]), positions=self.positions)
        if self.mask is not None:
            starts = [[first] for first in self.mask.int().argmax(1).tolist()]
        elif self.packed is not None and len(self.values) == 1:
            starts = [first for first in self.packed.edges[:-1].tolist() if first < self.values.shape[1]]
        local: Mask = window(width, width) | global_tokens(starts)
        return Shared(local if self.shared.mask is None else local & self.shared.mask, positions=self.positions)


def positions_of(inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Positions of tokens (B, N, ...), counted from the first real token of each row: (N,), or (B, N) if rows differ.

    Filler before the first token is at 0, filler behind the last of a row is where that is. A hole counts, so that
    distances are those of relative positions, windows and biases, which know nothing of the mask. A row has
    the same positions in any batch, compiled or not.

    >>> import torch
    >>> from regard.models.parts import positions_of
    >>> positions_of(torch.zeros(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]).bool())
    tensor([[0, 0, 0, 1, 2],
            [0, 1, 2, 3, 3]])
    """
    at = torch.arange(inputs.shape[1], device=inputs.device)
    if mask is None or not mask.shape[1]:
        return at
    first = mask.int().argmax(1, keepdim=True)
    if not torch.compiler.is_compiling() and not bool(first.any()):
        return at
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1, keepdim=True)
    return (at.minimum(last) - first).clamp(min=0)


def check_leading(mask: Tensor, tokens: Tensor) -> None:
    """A mask (B, N) of samples or frames is True for the first of each row: models that count them take no other."""
    check_mask(mask, tokens.shape[:2])
    leading = mask[:, :1].all() & ~(mask[:, 1:] & ~mask[:, :-1]).any()
    message = "mask must be True for the first frames of each row, at least one, and False behind them"
    if torch.compiler.is_compiling():
        torch._assert_async(leading, message)
    elif not bool(leading):
        raise ValueError(message)


def rows_of(inputs: Inputs, mask: Tensor | None = None, *, batched: bool | None = None) -> Rows:
    """Inputs (B, N, ...) with a (B, N) mask, packed, or a list of (n, ...), which is packed.

    batched: whether packed sequences of equal lengths become a plain batch (B, N, ...). Unless specified, they do where
        sequences are not shared with other processes: there the form of the result must not depend on the lengths.
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() < 2:
            raise ValueError(
                f"inputs must be (B, N), packed, or a list of sequences, but are {shape_of(inputs)}; try inputs[None]"
            )
        keys, positions = key_mask(mask, inputs), positions_of(inputs, mask)
        return Rows(inputs, positions, Shared(keys, positions=positions), mask, None, False)
    if mask is not None:
        raise ValueError("mask goes with inputs (B, N); packed inputs and lists say their lengths themselves")
    packed = inputs if isinstance(inputs, Packed) else pack(inputs)
    listed = not isinstance(inputs, Packed)
    batched = sharding() is None if batched is None else batched
    if batched and len(set(packed.lengths)) == 1 and packed.lengths[0]:
        values = packed.values.unflatten(0, (len(packed), -1))
        positions = torch.arange(values.shape[1], device=values.device)
        return Rows(values, positions, Shared(positions=positions), None, packed, listed)
    shared = Shared(packed.mask, positions=packed.positions)
    return Rows(packed.values[None], packed.positions, shared, None, packed, listed)
