"""A subject: a module, sequences for it, and the forms in which it accepts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import regard as rg
from tools.differential.draw import Draw

Item = tuple[Tensor, ...]
"""What one sequence consists of, without a batch axis: ids, or hidden states and a source, or an image and ids."""


class Rows(NamedTuple):
    """Some rows of a sequence's result, for forms that return no others: the logits of the last token of each step."""

    at: list[int]
    values: Tensor


Result = Tensor | Rows
Form = Callable[[Any, Sequence[Item]], Sequence[Result]]


@dataclass
class Subject:
    """A module and the ways to call it.

    build: a module with fresh weights. items: the sequences.
    plain: one sequence to its result by the simplest call: no padding, no packing, no cache.
    forms: all sequences at once to one result for each, by the name of the form.
    forward_only: forms without gradients, such as those that write to a cache.
    total: forms return one result, the sum over sequences of what `plain` returns (a loss).
    compiles: forms that call the module itself, so that it can be compiled. saves: whether `regard.save` takes it.
    """

    build: Callable[[], nn.Module]
    items: Sequence[Item]
    plain: Callable[[Any, Item], Tensor]
    forms: dict[str, Form]
    forward_only: frozenset[str] = frozenset()
    total: bool = False
    compiles: frozenset[str] = frozenset()
    saves: bool = False


def stepwise_names(forms: dict[str, Form]) -> frozenset[str]:
    return frozenset(name for name in forms if name.startswith("stepwise"))


def as_batch_of_one(call: Callable[..., Tensor]) -> Callable[[Any, Item], Tensor]:
    """Return `plain` for a module that takes a batch: a call with a batch of one."""
    return lambda module, item: call(module, *(part[None] for part in item))[0]


def forward(module: nn.Module, *inputs: Any, mask: Tensor | None = None) -> Any:
    return module(*inputs) if mask is None else module(*inputs, mask)


def alone(plain: Callable[[Any, Item], Tensor]) -> Form:
    """Compute every sequence alone, as the reference path does."""
    return lambda module, items: [plain(module, item) for item in items]


class Layout(NamedTuple):
    """Where the tokens of sequences are in a padded batch (B, N): `at[b]` are the columns of sequence b."""

    at: list[Tensor]
    width: int

    @property
    def mask(self) -> Tensor:
        mask = torch.zeros(len(self.at), self.width, dtype=torch.bool)
        for row, columns in zip(mask, self.at, strict=True):
            row[columns] = True
        return mask

    def fill(self, rows: Sequence[Tensor], filler: str = "noise") -> Tensor:
        """Rows (n, ...) in one tensor (B, N, ...). Filler is noise, and for float tensors also zeros or NaN."""
        shape, like = (self.width, *rows[0].shape[1:]), rows[0]
        batch = []
        for row, columns in zip(rows, self.at, strict=True):
            if like.is_floating_point():
                value = {"zeros": 0.0, "nan": torch.nan, "noise": 1.0}[filler]
                empty = torch.full(shape, value, dtype=like.dtype)
                empty = empty * torch.randn(shape).to(like.dtype) * 3 if filler == "noise" else empty
            else:
                largest = max(int(each.max()) if each.numel() else 0 for each in rows)
                empty = torch.randint(0, largest + 1, shape, dtype=like.dtype)
            batch.append(empty.index_copy(0, columns, row) if len(columns) else empty)
        return torch.stack(batch)

    def rows(self, batch: Tensor) -> list[Tensor]:
        return [row[columns] for row, columns in zip(batch, self.at, strict=True)]

    def row(self, n: int) -> Layout:
        """Sequence n alone, from its first token to its last."""
        first, last = (int(self.at[n][end]) for end in (0, -1))
        return Layout([self.at[n] - first], last + 1 - first)


def right(lengths: Sequence[int], spare: int = 0) -> Layout:
    width = max(lengths) + spare
    return Layout([torch.arange(n) for n in lengths], width)


def pad_left(lengths: Sequence[int], spare: int = 0) -> Layout:
    width = max(lengths) + spare
    return Layout([torch.arange(width - n, width) for n in lengths], width)


def holes(lengths: Sequence[int], draw: Draw) -> Layout:
    """Tokens at random columns, in order."""
    width, random = max(lengths) + 3, draw.random("holes")
    return Layout([torch.tensor(sorted(random.sample(range(width), n)), dtype=torch.long) for n in lengths], width)


@dataclass(frozen=True, eq=False)
class Padded:
    """A form of padded sequences: `call(layout, module, items)`.

    gaps: whether holes count as positions, so that the yardstick has them too: each row alone, with its mask, by
    `simple`, or the same call without one.
    """

    call: Callable[[Layout, Any, Sequence[Item]], Sequence[Result]]
    layout: Layout
    gaps: bool = False
    simple: Callable[[Layout, Any, Sequence[Item]], Sequence[Tensor]] | None = None

    def __call__(self, module: Any, items: Sequence[Item]) -> Sequence[Result]:
        return self.call(self.layout, module, items)

    def plain(self, module: Any, items: Sequence[Item]) -> list[Tensor]:
        call: Any = self.simple or self.call
        return [call(self.layout.row(n), module, [item])[0] for n, item in enumerate(items)]


def padded_forms(
    draw: Draw,
    lengths: Sequence[int],
    kinds: Sequence[str],
    call: Callable[..., Sequence[Result]],
    *,
    gaps: bool = False,
    simple: Callable[..., Sequence[Tensor]] | None = None,
) -> dict[str, Form]:
    """Forms of padded sequences by the name of the layout: "right", "left" and "holes"."""
    spare = draw.pick("spare columns", [0, 1, 5])
    layouts = {"right": right(lengths, spare), "left": pad_left(lengths, spare), "holes": holes(lengths, draw)}
    return {kind: Padded(call, layouts[kind], gaps and kind == "holes", simple) for kind in kinds}


def sequence_forms(
    draw: Draw,
    call: Callable[..., Any],
    lengths: Sequence[int],
    *,
    kinds: Sequence[str] = ("right", "left", "holes"),
    packs: bool = True,
    pooled: bool = False,
    gaps: bool = False,
    filler: str = "noise",
) -> dict[str, Form]:
    """Forms of modules that are called as `call(module, *inputs, mask=None)`: padded, packed, and a list.

    The inputs of a call are the tensors of an item, all of one length. Results are one for each token, or `pooled`.
    """

    def padded(layout: Layout, module: nn.Module, items: Sequence[Item]) -> Sequence[Tensor]:
        inputs = [layout.fill(parts, filler) for parts in zip(*items, strict=True)]
        out = call(module, *inputs, mask=layout.mask)
        return list(out) if pooled else layout.rows(out)

    def packed(module: nn.Module, items: Sequence[Item]) -> Sequence[Tensor]:
        out = call(module, *(rg.pack(list(parts)) for parts in zip(*items, strict=True)))
        return list(out) if pooled else rg.unpack(out)

    def with_empty(module: nn.Module, items: Sequence[Item]) -> Sequence[Tensor]:
        """Add an empty sequence, which must not change the others and must not be NaN."""
        place = draw.random("place of the empty sequence").randint(0, len(items))
        every = [*items[:place], tuple(part[:0] for part in items[0]), *items[place:]]
        outputs = list(packed(module, every))
        own = outputs.pop(place)
        return [outputs[0] + torch.nan, *outputs[1:]] if own.isnan().any() else outputs

    def listed(module: nn.Module, items: Sequence[Item]) -> Sequence[Tensor]:
        return list(call(module, *(list(parts) for parts in zip(*items, strict=True))))

    forms = padded_forms(draw, lengths, kinds, padded, gaps=gaps)
    if len(set(lengths)) == 1:
        forms["batch"] = lambda module, items: list(
            call(module, *(torch.stack(parts) for parts in zip(*items, strict=True)))
        )
    return forms | ({"packed": packed, "packed, one empty": with_empty, "list": listed} if packs else {})


def lengths_of(draw: Draw, *, least: int = 1, name: str = "lengths") -> list[int]:
    """Draw the lengths of a few sequences: mostly short, sometimes equal, sometimes longer than a tile."""
    count = draw.pick(f"number of {name}", [1, 2, 3, 5])
    kind = draw.pick(f"kind of {name}", ["short", "alike", "mixed", "long"])
    random = draw.random(name)
    most = {"short": 6, "alike": 12, "mixed": 24, "long": 150}[kind]
    lengths = [random.randint(least, max(most, least)) for _ in range(count)]
    return [lengths[0]] * count if kind == "alike" else lengths


def noise(draw: Draw, *shape: int, name: str = "values") -> Tensor:
    """Normal numbers that depend on the seed, the name and the choice of values."""
    number = draw.pick("values", [0, 1, 2, 3])
    generator = torch.Generator().manual_seed(draw.random(f"{name}:{number}:{shape}").randrange(2**31))
    return torch.randn(*shape, generator=generator)


def tokens(draw: Draw, length: int, vocabulary: int, *, name: str) -> Tensor:
    number = draw.pick("values", [0, 1, 2, 3])
    generator = torch.Generator().manual_seed(draw.random(f"{name}:{number}:{length}").randrange(2**31))
    return torch.randint(0, vocabulary, (length,), generator=generator)


@torch.no_grad()
def vary(module: nn.Module, seed: int) -> nn.Module:
    """Change weights so that they cannot hide a bug: biases are not 0, norms not 1, and tables not small."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        elif parameter.numel() > 1 and parameter.std() < 0.1:
            parameter.mul_(0.5 / max(float(parameter.std()), 1e-6))
    return module


def fresh(build: Callable[[], nn.Module], draw: Draw) -> Callable[[], nn.Module]:
    """Return a function that builds the module with weights that follow from the draw."""

    def make() -> nn.Module:
        seed = draw.random("weights").randrange(2**31)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return vary(build(), seed).eval()

    return make
