"""Tables of names: which of our tensors is which of theirs, applied in both directions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from regard.printable import printable

Shape = tuple[int, ...]


class Tensors(Protocol):
    """Named tensors that are read one at a time: a checkpoint."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> Shape: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """One line of a table: a module or tensor of ours, and what it is called, or is put together of, in theirs."""

    ours: str
    theirs: tuple[str, ...]
    form: str = ""

    def match(self, name: str) -> tuple[str, ...] | None:
        """Their names of our tensor, or none where the rule is about another."""
        found = _pattern(self.ours).fullmatch(name)
        if found is None:
            return None
        *numbers, rest = found.groups()
        filled = []
        for theirs in self.theirs:
            for number in numbers:
                theirs = theirs.replace("*", number, 1)
            filled.append(theirs if theirs == NOTHING else theirs + rest)
        return tuple(filled)


@dataclass(frozen=True)
class StoredForm:
    """How they hold a tensor: ours from theirs, theirs from ours, and which tensors of a module are meant."""

    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    dims: tuple[int, ...]


FORMS = {
    "T": StoredForm(lambda x: x.t(), lambda x: x.t(), (2,)),
    "conv": StoredForm(lambda x: x[:, :, 0, 0], lambda x: x[:, :, None, None], (2,)),
    "1": StoredForm(lambda x: x[0], lambda x: x[None], (1, 2)),
}
NOTHING = "0"  # the name of a part that they do not hold, because it is zero
PLAIN = StoredForm(lambda x: x, lambda x: x, ())


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of ours, and the tensors of theirs that it is put together of, with their shapes."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    shapes: tuple[Shape, ...]
    form: StoredForm

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Theirs to ours."""
        converted = [self.form.ours(part) for part in parts]
        if len(converted) > 1:
            return torch.cat(converted)
        return converted[0].clone(memory_format=torch.contiguous_format)  # a file that changes must not reach the model

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Ours to theirs."""
        parts = tensor.split(self.rows) if len(self.theirs) > 1 else [tensor]
        for name, part in zip(self.theirs, parts, strict=True):
            if name != NOTHING:
                yield name, self.form.theirs(part).contiguous()


@cache
def table(text: str, *, ours: str = "", theirs: str = "") -> tuple[Rule, ...]:
    """Rules from lines of two names, ours and theirs, put behind these prefixes.

    A name stands for a module with all its tensors, or for one tensor. `*` is a number that both names have.
    `{a,b}` puts a and b one below the other; `{a,0,b}` has zeros between them, which they do not hold: the bias of
    keys, which moves all scores of a query alike and so changes nothing. `^T` is a matrix that they hold transposed,
    `^conv` one that they hold as a 1x1 convolution, `^1` a tensor with an axis of length 1 before ours.

    >>> from regard.models.checkpoints.tensor_names import table
    >>> table("layers.*.up   blocks.*.{gate,up}", theirs="model.")[0].match("layers.3.up.weight")
    ('model.blocks.3.gate.weight', 'model.blocks.3.up.weight')
    """
    rules = []
    for line in filter(None, map(str.strip, text.splitlines())):
        own, other = line.split()
        other, _, mark = other.partition("^")
        rules.append(Rule(ours + own, _alternatives(theirs + other), mark))
    return tuple(rules)


def tensor_mappings(model: nn.Module, rules: Iterable[Rule]) -> list[TensorMapping]:
    """How every tensor of a model comes from, and goes to, a checkpoint. A tensor that no rule knows is an error."""
    rules, seen, found, unknown = tuple(rules), set(), [], []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # a tied one is moved once
            continue
        seen.add(id(tensor))
        for rule in rules:
            if (theirs := rule.match(name)) is not None:
                found.append(_move(model, name, tensor, theirs, rule))
                break
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"the table of names does not know {abbreviate(unknown)}")
    return found


def _move(model: nn.Module, name: str, tensor: Tensor, theirs: tuple[str, ...], rule: Rule) -> TensorMapping:
    rows = [len(tensor)] if tensor.dim() else []
    if len(theirs) > 1:
        around = model.get_submodule(name.rsplit(".", 2)[0])
        rows = list(getattr(around, "widths", ()))
        if len(rows) != len(theirs):
            rows = [len(tensor) // len(theirs)] * len(theirs)
    form = FORMS[rule.form] if rule.form and tensor.dim() in FORMS[rule.form].dims else PLAIN
    parts = (torch.empty((*rows[n : n + 1], *tensor.shape[1:]), device="meta") for n in range(len(theirs)))
    shapes = tuple(tuple(form.theirs(part).shape) for part in parts)
    return TensorMapping(name, theirs, tuple(rows), shapes, form)


def abbreviate(names: Iterable[str], most: int = 8) -> str:
    """Names in order, and how many more there are."""
    names = sorted(map(printable, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


Difference = Callable[[Any, Tensor], Tensor]
"""By how much a stored tensor differs from what a model of this configuration computes."""


@dataclass(frozen=True)
class Extras:
    """Tensors that a checkpoint may hold and the model does not have; their names are patterns.

    ignored: without influence on any output, such as counters.
    reported: weights of parts that the model does not have, such as a pooler; a warning lists them.
    computed: what the model computes; the stored tensors must agree with that.
    copies: names that repeat another tensor, the first of those given that the model has; they must be equal, and are
        used in its place where it is absent.
    renamed: regular expressions of other names, and what they are here.
    """

    ignored: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    computed: Mapping[str, Difference] = field(default_factory=dict)
    reported: tuple[str, ...] = ()


class Located(NamedTuple):
    """Where the tensors of a model are in a checkpoint, by their name there, and the tensors that it has no use for."""

    found: dict[str, str]
    unused: list[str]


def locate_tensors(
    source: Tensors, wanted: Iterable[TensorMapping], extras: Extras, prefix: str, config: Any
) -> Located:
    """Locate each tensor that is wanted in a checkpoint; the base may have a prefix or not.

    Missing tensors, unknown ones, other shapes, and copies and computed tensors that differ are errors that list them.
    """
    needed = {name: shape for move in wanted for name, shape in zip(move.theirs, move.shapes, strict=True)}
    needed.pop(NOTHING, None)
    copies = {
        copy: next(name for name in names if name in needed)
        for copy, names in extras.copies.items()
        if any(name in needed for name in names)
    }
    found: dict[str, str] = {}
    copied: list[tuple[str, str]] = []
    unused, unknown = [], []
    for stored in source.names():
        name = stored
        for old, new in extras.renamed:
            name = re.sub(old, new, name)
        forms = (name, prefix + name, name.removeprefix(prefix))
        here = next((form for form in forms if form in needed), None)
        if here is not None:
            if here in found:
                raise ValueError(f"{printable(stored)} and {found[here]} are both {here}; one of them has to go")
            found[here] = stored
        elif (here := next((form for form in forms if form in copies), None)) is not None:
            copied.append((copies[here], stored))
        elif (here := _matching(extras.computed, forms)) is not None:
            _check_computed(stored, source.read(stored), config, extras.computed[here])
        elif _matching(extras.reported, forms) is not None:
            unused.append(stored)
        elif _matching(extras.ignored, forms) is None:
            unknown.append(stored)
    for original, stored in copied:
        if original not in found:
            found[original] = stored
        elif not torch.equal(source.read(stored), source.read(found[original])):
            raise ValueError(
                f"{stored} and {found[original]} must be equal, as the configuration ties them, but differ; "
                "remove one, or set tie_word_embeddings to false in config.json"
            )
    missing = [name for name in needed if name not in found]
    if missing or unknown:
        parts = [f"lacks {abbreviate(missing)}"] if missing else []
        parts += [f"has {abbreviate(unknown)}, which the model does not know"] if unknown else []
        raise ValueError(f"the checkpoint {' and '.join(parts)}")
    other = [
        f"{found[name]} is {source.shape(found[name])}, not {shape}"
        for name, shape in needed.items()
        if source.shape(found[name]) != shape
    ]
    if other:
        raise ValueError(f"the tensors do not have the shapes that config.json says: {'; '.join(other[:8])}")
    return Located(found, unused)


def _matching(patterns: Iterable[str], forms: Iterable[str]) -> str | None:
    """The first pattern that a form of a name matches."""
    return next((each for each in patterns if any(_pattern(each).fullmatch(form) for form in forms)), None)


def _check_computed(name: str, stored: Tensor, config: Any, difference: Difference) -> None:
    """Raise if a stored tensor is not the one that the model computes."""
    try:
        apart = difference(config, stored.double()).abs().max().item()
    except (RuntimeError, IndexError, TypeError, ValueError):  # no such shape, or nothing in it
        apart = float("nan")
    eps = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
    if not apart <= max(1e-4, 2 * eps):
        how = f"its shape is {tuple(stored.shape)}" if math.isnan(apart) else f"they differ by up to {apart:.2g}"
        raise ValueError(
            f"{name} is not the tensor that the model computes: {how}; checkpoints that were trained with another one "
            "are not supported; if it is of no use, remove it from the file"
        )


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"((?:\..+)?)")


def _alternatives(name: str) -> tuple[str, ...]:
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if found is None:
        return (name,)
    before, inner, after = found.groups()
    return tuple(part if part == NOTHING else before + part + after for part in inner.split(","))
