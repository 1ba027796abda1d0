"""The parts of a diagram, read from a model: boxes, frames, residual connections and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.description import Description
from regard.nn import (
    Block,
    CrossBlock,
    Decoder,
    Encoder,
    LayerScale,
    OutputNorm,
    PostNorm,
    PreNorm,
    ProbePooling,
    RelativeBias,
    RelativeEmbedding,
    Residual,
    SandwichNorm,
)
from regard.view.diagrams.describe import Row, box_lines, describe, kind_of, signature, tensor_rows, title_of
from regard.view.diagrams.words import Say

PARALLEL = ("classifier", "boxes"), ("frames", "end")  # output layers of a detector and of a speech synthesizer
MOST_PERIOD = 6  # layers in a repeated pattern, such as five local layers and a global one


@dataclass(frozen=True)
class Box:
    """A module, or the learned tensors that belong to no submodule.

    path: its dotted name in the model, empty for the model itself. parameters: the numbers that it learns, without
    those that an earlier box counted. aside: whether no hidden states pass through it. from_source: whether it attends
    to the result of the other column.
    """

    path: str
    title: str
    kind: str
    lines: tuple[str, ...]
    details: tuple[Row, ...]
    parameters: int
    aside: bool = False
    from_source: bool = False


@dataclass(frozen=True)
class Frame:
    """Parts in order, inside a border. times: how many copies with equal sizes it represents; paths: of all copies."""

    box: Box
    parts: tuple[Part, ...]
    times: int = 1
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """Parts whose result is added to their input: a residual connection."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Columns:
    """Two sequences of parts side by side. attends: whether the right one attends to the result of the left one."""

    left: tuple[Part, ...]
    right: tuple[Part, ...]
    attends: bool


Part = Box | Frame | Branch | Columns


class Reader:
    """Reads the parts of a model in the order in which its modules are defined; each parameter is counted once."""

    def __init__(self, model: nn.Module, say: Say) -> None:
        self.model, self.say = model, say
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.counted: dict[int, str] = {}

    def read(self) -> tuple[Part, ...]:
        """Return the parts of the whole model."""
        left, right, rest = _columns(self.model)
        if not right:
            return (*self._children(self.model), *self._output(self.model))
        first = tuple(self._parts(left))
        second = tuple(self._parts(right, from_source=True))
        attends = any(isinstance(module, Decoder) for _, module in right)
        if attends:
            second = _fork(self.model, second)
            return (Columns(first, (*second, *self._tensors(self.model), *self._output(self.model)), True),)
        return (Columns(first, second, False), *self._parts(rest), *self._tensors(self.model))

    def _parts(self, modules: Iterable[tuple[str, nn.Module]], *, from_source: bool = False) -> Iterator[Part]:
        for name, module in modules:
            yield from self._module(module, name, from_source=from_source)

    def _children(self, module: nn.Module) -> tuple[Part, ...]:
        named = list(_submodules(module))
        parts = tuple(self._parts(named))
        return (*self._tensors(module), *parts)

    def _module(self, module: nn.Module, name: str, *, from_source: bool = False) -> Iterator[Part]:
        if isinstance(module, Encoder):
            yield self._stack(module, name, from_source)
        elif isinstance(module, Block | CrossBlock):
            yield self._frame(module, name, tuple(self._block(module, from_source)))
        elif isinstance(module, ProbePooling):
            attention = self._box(module.attention, "cross-attention")
            feedforward = self._residual(module.residual, module.feedforward, "feed-forward")
            yield self._frame(module, name, (*self._tensors(module), attention, *feedforward))
        elif isinstance(module, nn.ModuleList | nn.Sequential) and _is_container(module):
            yield from self._fold(list(module), from_source)
        elif _is_container(module):
            yield self._frame(module, name, self._children(module))
        else:
            yield self._box(module, name)

    def _stack(self, stack: Encoder, name: str, from_source: bool) -> Frame:
        asides = [getattr(stack, each) for each in ("bias", "relative") if getattr(stack, each) is not None]
        parts: list[Part] = [self._box(each, type(each).__name__, aside=True) for each in asides]
        parts += self._fold(list(stack.layers), from_source)
        if stack.norm is not None:
            parts.append(self._box(stack.norm, "norm"))
        return self._frame(stack, name, tuple(parts))

    def _fold(self, layers: Sequence[nn.Module], from_source: bool) -> Iterator[Part]:
        """Yield layers, with repeated patterns of them drawn once."""
        for start, period, times in find_repeats([signature(layer) for layer in layers]):
            pattern = layers[start : start + period]
            copies = layers[start : start + period * times]
            paths = tuple(self.paths[id(layer)] for layer in copies)
            parts = tuple(part for layer in pattern for part in self._module(layer, "layer", from_source=from_source))
            for layer in copies[period:]:
                self._count(layer)
            if times == 1:
                yield from parts
                continue
            if period == 1 and isinstance(parts[0], Frame):
                yield Frame(parts[0].box, parts[0].parts, times, paths)
                continue
            about = Box(paths[0], self.say("pattern"), "frame", (), (), sum(_parameters(part) for part in parts))
            yield Frame(about, parts, times, paths)

    def _block(self, block: Block | CrossBlock, from_source: bool) -> Iterator[Part]:
        for field, name in (
            ("attention", "self-attention"),
            ("cross", "cross-attention"),
            ("feedforward", "feed-forward"),
        ):
            if (module := getattr(block, field, None)) is not None:
                residual = getattr(block, f"{field}_residual")
                yield from self._residual(residual, module, name, from_source=from_source and field == "cross")

    def _residual(
        self, residual: Residual, module: nn.Module, name: str, *, from_source: bool = False
    ) -> Iterator[Part]:
        """Yield a sublayer as its residual arrangement wraps it."""
        inner = self._box(module, name, from_source=from_source)

        def norm(name: str = "norm") -> Box:
            return self._box(getattr(residual, name), "norm")

        if isinstance(residual, LayerScale):
            yield Branch((norm(), inner, *self._tensors(residual)))
        elif isinstance(residual, PreNorm):
            yield Branch((norm(), inner))
        elif isinstance(residual, PostNorm):
            yield Branch((inner,))
            yield norm()
        elif isinstance(residual, OutputNorm):
            yield Branch((inner, norm()))
        elif isinstance(residual, SandwichNorm):
            yield Branch((norm(), inner, norm("after")))
        else:  # an arrangement of the user: its parts are known, their order is not
            yield Branch((self._box(residual, type(residual).__name__), inner))

    def _frame(self, module: nn.Module, name: str, parts: tuple[Part, ...]) -> Frame:
        path = self.paths[id(module)]
        parameters = sum(_parameters(part) for part in parts)
        title, rows = title_of(module, name, self.say), describe(module, path, self.say)
        return Frame(Box(path, title, "frame", (), rows, parameters), parts, 1, (path,))

    def _box(self, module: nn.Module, name: str, *, aside: bool = False, from_source: bool = False) -> Box:
        path, shared = self.paths[id(module)], self._shared(module)
        rows = describe(module, path, self.say)
        if shared:
            rows = (*rows, (self.say("row.shared"), self.say("shared", path=shared)))
        aside = aside or isinstance(module, RelativeBias | RelativeEmbedding)
        title, lines = title_of(module, name, self.say), box_lines(module, self.say)
        return Box(path, title, kind_of(module), lines, rows, self._count(module), aside, from_source)

    def _tensors(self, module: nn.Module) -> tuple[Box, ...]:
        """Return a box for the parameters that a module holds itself, if it has any."""
        named = dict(module.named_parameters(recurse=False))
        count = self._count_tensors(named.values(), self.paths[id(module)])
        if not named or not count:
            return ()
        rows = tuple(tensor_rows(named, self.say("row.parameters"), self.say))
        title, lines = self.say("tensors"), (", ".join(named),)
        return (Box(self.paths[id(module)], title, "other", lines, rows, count, aside=True),)

    def _output(self, model: nn.Module) -> tuple[Box, ...]:
        """Return a box for an output layer that is the table of an embedding."""
        layer = getattr(model, "output_layer", None)
        if not isinstance(layer, nn.Embedding):
            return ()
        path = self.paths[id(layer)]
        lines = (f"{layer.embedding_dim} → {layer.num_embeddings}",)
        rows = ((self.say("row.shared"), self.say("shared", path=path)),)
        return (Box(path, self.say("tied output"), "embedding", lines, rows, 0),)

    def _shared(self, module: nn.Module) -> str:
        """Return the path of the box that has counted a parameter of a module, or an empty string."""
        return next((self.counted[id(each)] for each in module.parameters() if id(each) in self.counted), "")

    def _count(self, module: nn.Module) -> int:
        return self._count_tensors(module.parameters(), self.paths[id(module)])

    def _count_tensors(self, tensors: Iterable[Tensor], path: str) -> int:
        new = [each for each in tensors if id(each) not in self.counted]
        self.counted |= {id(each): path for each in new}
        return sum(each.numel() for each in new)


def find_repeats(signatures: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Divide a sequence into patterns: start, length and number of repetitions of each.

    >>> from regard.view.diagrams.parts import find_repeats
    >>> find_repeats("aaaa"), find_repeats("aabaabc")
    ([(0, 1, 4)], [(0, 3, 2), (6, 1, 1)])
    """
    repeats, start = [], 0
    while start < len(signatures):
        best = 1, 1
        for period in range(1, min(MOST_PERIOD, (len(signatures) - start) // 2) + 1):
            pattern, times = signatures[start : start + period], 1
            while signatures[start + times * period : start + (times + 1) * period] == pattern:
                times += 1
            if times > 1 and times * period > best[0] * best[1]:
                best = period, times
        repeats.append((start, *best))
        start += best[0] * best[1]
    return repeats


def total(parts: Iterable[Part]) -> int:
    """Return the number of parameters of parts."""
    return sum(_parameters(part) for part in parts)


def _parameters(part: Part) -> int:
    if isinstance(part, Box):
        return part.parameters
    if isinstance(part, Frame):
        return part.box.parameters * part.times
    if isinstance(part, Branch):
        return total(part.parts)
    return total(part.left) + total(part.right)


def _columns(model: nn.Module) -> tuple[list[Any], list[Any], list[Any]]:
    """Divide the submodules of a model with two inputs into source or image, target or text, and what follows both."""
    children = list(_submodules(model))
    names = [name for name, _ in children]
    if {"encoder", "decoder"} <= set(names) and isinstance(model.decoder, Decoder):
        last = names.index("encoder")
        targets = ("target", "queries", "squeeze", "widen")
        left = [pair for pair in children[: last + 1] if not pair[0].startswith(targets)]
        right = [pair for pair in children if pair not in left]
        if not any(name.startswith(("target_embedding", *targets[1:])) for name, _ in right):
            right.insert(0, next(pair for pair in children if pair[0] == "embedding"))
        return left, right, []
    if {"image", "text"} <= set(names):
        left = [pair for pair in children if pair[0].startswith("image")]
        right = [pair for pair in children if pair[0].startswith("text")]
        return left, right, [pair for pair in children if pair not in left and pair not in right]
    return children, [], []


def _fork(model: nn.Module, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Put two output layers that read the same hidden states side by side."""
    last = tuple(name for name, _ in _submodules(model))[-2:]
    if last not in PARALLEL or len(parts) < 2:
        return parts
    return (*parts[:-2], Columns(parts[-2:-1], parts[-1:], False))


def _submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that are drawn: no descriptions, and no empty sequences."""
    children = list(module.named_children())
    if {"encoder", "pooling", "transform"} <= {name for name, _ in children}:  # the pooling is defined too late
        children.sort(key=lambda pair: pair[0] not in ("encoder", "pooling"))
    for name, each in children:
        if not isinstance(each, Description) and not (isinstance(each, nn.Sequential) and not len(each)):
            yield name, each


def _is_container(module: nn.Module) -> bool:
    """Whether a module is drawn as its parts: it contains an attention, but is none."""
    if kind_of(module) == "attention":
        return False
    return any(kind_of(each) == "attention" for each in module.modules())
