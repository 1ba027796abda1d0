"""Tables of tensor names, applied in both directions between our models and checkpoints."""

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
    """A checkpoint: named tensors that are read on demand."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> Shape: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """One line of a table: a module or tensor of ours, and the names of the tensors of theirs that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    form: str | tuple[StoredForm, ...] = ""  # by name, or one for each of theirs

    def match(self, name: str) -> tuple[str, ...] | None:
        """Return their names of our tensor, or None if the rule does not apply to it."""
        match = _pattern(self.ours).fullmatch(name)
        if match is None:
            return None
        *numbers, rest = match.groups()
        filled = []
        for theirs in self.theirs:
            for number in numbers:
                theirs = theirs.replace("*", number, 1)
            filled.append(theirs if theirs == NOTHING else theirs + rest)
        return tuple(filled)


@dataclass(frozen=True)
class StoredForm:
    """A layout of stored tensors: conversions to ours and to theirs, and the dimensions of tensors it applies to.

    stacked: the tensors of theirs are the rows of the matrices of ours, one matrix after another.
    """

    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    dims: tuple[int, ...]
    stacked: bool = False


def selected_rows(rows: Tensor, total: int) -> StoredForm:
    """Return the form of a tensor that is some rows of a stored one, whose others belong to other tensors of ours.

    `theirs` has zeros in the other rows; tensors of one name are added when they are saved.
    """

    def to_theirs(x: Tensor) -> Tensor:
        whole = x.new_zeros(total, *x.shape[1:])
        if not x.is_meta:
            whole[rows] = x
        return whole

    return StoredForm(lambda x: x[rows], to_theirs, (1, 2))


def _from_pairs(x: Tensor) -> Tensor:
    """Columns a b a b ... to a a ... b b ...; a matrix per expert is stored transposed."""
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return x.mT if x.dim() == 3 else x


def _to_pairs(x: Tensor) -> Tensor:
    x = x.mT if x.dim() == 3 else x
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


FORMS = {
    "T": StoredForm(lambda x: x.t(), lambda x: x.t(), (2,)),
    "conv": StoredForm(lambda x: x[:, :, 0, 0], lambda x: x[:, :, None, None], (2,)),
    "1": StoredForm(lambda x: x[0], lambda x: x[None], (0, 1, 2)),
    "row": StoredForm(lambda x: x[None], lambda x: x[0], (2,)),
    "mT": StoredForm(lambda x: x.mT, lambda x: x.mT, (3,)),
    "pairs": StoredForm(_from_pairs, _to_pairs, (2, 3)),
    "channels": StoredForm(lambda x: x[:, 0], lambda x: x[:, None], (2,)),
    "stack": StoredForm(lambda x: x, lambda x: x, (3,), stacked=True),
}
NOTHING = "0"  # the name of a part that is zero and not stored
PLAIN = StoredForm(lambda x: x, lambda x: x, ())


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of ours and its shape, and the tensors of theirs that it is concatenated from, with their shapes."""

    ours: str
    shape: Shape
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    shapes: tuple[Shape, ...]
    forms: tuple[StoredForm, ...]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Convert theirs to ours."""
        converted = [form.ours(part) for form, part in zip(self.forms, parts, strict=True)]
        if len(converted) > 1:
            return torch.cat(converted).view(self.shape)
        # the file is memory-mapped: changes to it must not affect the model
        return converted[0].clone(memory_format=torch.contiguous_format).view(self.shape)

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Convert ours to theirs."""
        tensor = tensor.flatten(0, 1) if self.forms[0].stacked else tensor
        parts = tensor.split(self.rows) if len(self.theirs) > 1 else [tensor]
        for name, part, form in zip(self.theirs, parts, self.forms, strict=True):
            if name != NOTHING:
                yield name, form.theirs(part).contiguous()


@cache
def table(text: str, *, ours: str = "", theirs: str = "") -> tuple[Rule, ...]:
    """Parse lines of two names, ours and theirs, into rules; the arguments `ours` and `theirs` are prefixes.

    A name is that of a module with all its tensors, or of one tensor. `*` matches a number, the same in both names.
    `{a,b}` concatenates a and b by rows; `{a,0,b}` has zeros in between that are not stored (the bias of keys, which
    shifts all scores of a query alike and has no effect). `^T` is a matrix stored transposed, `^conv` a matrix stored
    as a 1x1 convolution, `^1` a tensor stored with a leading axis of length 1, `^row` one stored without that axis,
    `^channels` a depthwise convolution, stored with such an axis in the middle. Of experts, `^mT` is a matrix
    per expert stored transposed, `^pairs` the same with the columns of gate and up in alternation, `^stack` one per
    expert and matrix.

    >>> from regard.models.checkpoints.tensor_names import table
    >>> table("layers.*.up   blocks.*.{gate,up}", theirs="model.")[0].match("layers.3.up.weight")
    ('model.blocks.3.gate.weight', 'model.blocks.3.up.weight')
    """
    rules = []
    for line in filter(None, map(str.strip, text.splitlines())):
        our_name, their_name = line.split()
        their_name, _, form = their_name.partition("^")
        rules.append(Rule(ours + our_name, _alternatives(theirs + their_name), form))
    return tuple(rules)


def tensor_mappings(model: nn.Module, rules: Iterable[Rule]) -> list[TensorMapping]:
    """Return the mapping of every tensor of a model to a checkpoint; raise if no rule matches a tensor."""
    rules, seen, mappings, unknown = tuple(rules), set(), [], []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied tensors are mapped once
            continue
        seen.add(id(tensor))
        for rule in rules:
            if (theirs := rule.match(name)) is not None:
                mappings.append(_tensor_mapping(model, name, tensor, theirs, rule))
                break
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"the table of names has no rule for {abbreviate(unknown)}")
    return mappings


def _tensor_mapping(model: nn.Module, name: str, tensor: Tensor, theirs: tuple[str, ...], rule: Rule) -> TensorMapping:
    if isinstance(rule.form, tuple):
        forms = rule.form
    else:
        applies = bool(rule.form) and tensor.dim() in FORMS[rule.form].dims
        forms = (FORMS[rule.form] if applies else PLAIN,) * len(theirs)
    shape = tuple(tensor.shape)
    tensor = tensor.flatten(0, 1) if forms[0].stacked else tensor
    rows = [len(tensor)] if tensor.dim() else []
    if len(theirs) > 1:
        parent = model.get_submodule(name.rsplit(".", 2)[0])
        rows = list(getattr(parent, "widths", ()))
        if len(rows) != len(theirs):
            rows = [len(tensor) // len(theirs)] * len(theirs)
    parts = (torch.empty((*rows[n : n + 1], *tensor.shape[1:]), device="meta") for n in range(len(theirs)))
    shapes = tuple(tuple(form.theirs(part).shape) for form, part in zip(forms, parts, strict=True))
    return TensorMapping(name, shape, theirs, tuple(rows), shapes, forms)


def abbreviate(names: Iterable[str], most: int = 8) -> str:
    """Join sorted names; beyond `most`, give their number."""
    names = sorted(map(printable, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


Difference = Callable[[Any, Tensor], Tensor]
"""Computes the difference between a stored tensor and the one that a model of a configuration computes."""


@dataclass(frozen=True)
class Extras:
    """Tensors that a checkpoint may contain and the model does not have; names are patterns.

    ignored: tensors without influence on any output, such as counters.
    reported: weights that the model does not use, such as a pooler; a warning lists them.
    computed: tensors that the model computes; the stored values must agree.
    copies: names that duplicate another tensor, the first of those given that the model has; they must be equal, and
        replace it if it is absent.
    renamed: regular expressions of alternative names, with their replacements.
    """

    ignored: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    computed: Mapping[str, Difference] = field(default_factory=dict)
    reported: tuple[str, ...] = ()


class Located(NamedTuple):
    """The stored name of every needed tensor of a checkpoint, and the names of unused tensors."""

    names: dict[str, str]
    unused: list[str]


def locate_tensors(
    source: Tensors, mappings: Iterable[TensorMapping], extras: Extras, prefix: str, config: Any
) -> Located:
    """Find the tensors of the mappings in a checkpoint, with or without the prefix of the base model.

    Raise if tensors are missing, unknown or of the wrong shape, or if copies or computed tensors differ.
    """
    needed = {name: shape for mapping in mappings for name, shape in zip(mapping.theirs, mapping.shapes, strict=True)}
    needed.pop(NOTHING, None)
    copies = {
        copy: next(name for name in names if name in needed)
        for copy, names in extras.copies.items()
        if any(name in needed for name in names)
    }
    stored_names: dict[str, str] = {}
    copied: list[tuple[str, str]] = []
    unused, unknown = [], []
    for stored in source.names():
        name = stored
        for old, new in extras.renamed:
            name = re.sub(old, new, name)
        forms = (name, prefix + name, name.removeprefix(prefix))
        here = next((form for form in forms if form in needed), None)
        if here is not None:
            if here in stored_names:
                raise ValueError(f"{printable(stored)} and {stored_names[here]} are both {here}; remove one of them")
            stored_names[here] = stored
        elif (here := next((form for form in forms if form in copies), None)) is not None:
            copied.append((copies[here], stored))
        elif (here := _matching(extras.computed, forms)) is not None:
            _check_computed(stored, source.read(stored), config, extras.computed[here])
        elif _matching(extras.reported, forms) is not None:
            unused.append(stored)
        elif _matching(extras.ignored, forms) is None:
            unknown.append(stored)
    for original, stored in copied:
        if original not in stored_names:
            stored_names[original] = stored
        elif not torch.equal(source.read(stored), source.read(stored_names[original])):
            raise ValueError(
                f"{stored} and {stored_names[original]} must be equal, because the configuration ties them, but "
                "differ; remove one, or set tie_word_embeddings to false in config.json"
            )
    missing = [name for name in needed if name not in stored_names]
    if missing or unknown:
        parts = [f"lacks {abbreviate(missing)}"] if missing else []
        parts += [f"has {abbreviate(unknown)}, which the model does not have"] if unknown else []
        raise ValueError(f"the checkpoint {' and '.join(parts)}")
    mismatches = [
        f"{stored_names[name]} is {source.shape(stored_names[name])}, not {shape}"
        for name, shape in needed.items()
        if source.shape(stored_names[name]) != shape
    ]
    if mismatches:
        raise ValueError(f"the tensors do not have the shapes that config.json implies: {'; '.join(mismatches[:8])}")
    return Located(stored_names, unused)


def _matching(patterns: Iterable[str], forms: Iterable[str]) -> str | None:
    """Return the first pattern that matches a form of a name."""
    return next((each for each in patterns if any(_pattern(each).fullmatch(form) for form in forms)), None)


def _check_computed(name: str, stored: Tensor, config: Any, difference: Difference) -> None:
    """Raise if a stored tensor differs from the one that the model computes."""
    try:
        distance = difference(config, stored.double()).abs().max().item()
    except (RuntimeError, IndexError, TypeError, ValueError):  # wrong shape, or empty
        distance = float("nan")
    eps = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
    if not distance <= max(1e-4, 2 * eps):
        how = f"its shape is {tuple(stored.shape)}" if math.isnan(distance) else f"they differ by up to {distance:.2g}"
        raise ValueError(
            f"{name} is not the tensor that the model computes: {how}; checkpoints trained with a different one are "
            "not supported. If the tensor is not needed, remove it from the file"
        )


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"((?:\..+)?)")


def _alternatives(name: str) -> tuple[str, ...]:
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if match is None:
        return (name,)
    before, inner, after = match.groups()
    return tuple(part if part == NOTHING else before + part + after for part in inner.split(","))
