"""The ways to run a subject, each compared with the yardstick in float64."""

from __future__ import annotations

import copy
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import regard as rg
from regard.engines import packed_linear
from tools.differential.draw import Draw
from tools.differential.reference import use_reference
from tools.differential.subject import Form, Item, Padded, Result, Rows, Subject

FLOAT64 = 1e-9  # of the largest number
OWN, ROUNDINGS = {torch.float32: 8, torch.bfloat16: 4}, {torch.float32: 64, torch.bfloat16: 8}
"""A result may be so many times as far off as the plain path in its dtype, and so many roundings of the largest number,
or of 1, the size of hidden states, from which a small result comes by cancellation."""
MOST = 1e-3
"""The plain path in float32 may be off by this share of the largest number: else it depends on what is hidden."""


class Mismatch(AssertionError):
    """A result that is farther from the yardstick than roundings explain."""


@dataclass
class Yardstick:
    """Expected results of every sequence by the plain path in float64, and in other dtypes to judge rounding."""

    subject: Subject
    module: nn.Module
    weights: list[Tensor] = field(default_factory=list)  # of the sum of results that is differentiated
    gapped: Padded | None = None  # the form, if its holes count as positions
    memory: dict[Any, Any] = field(default_factory=dict)

    def of_form(self, form: Form) -> Yardstick:
        """The yardstick of a form: another one if its sequences have holes that count as positions."""
        if not (isinstance(form, Padded) and form.gaps):
            return self
        return self.memory.setdefault(form, Yardstick(self.subject, self.module, self.weights, form))

    def plain(self, module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        if self.gapped is not None:
            return self.gapped.plain(module, items)
        outs = [self.subject.plain(module, item) for item in items]
        return [torch.stack(outs).sum()] if self.subject.total else outs

    def outputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        if dtype not in self.memory:
            module, items = convert(self.module, dtype), convert_items(self.subject.items, dtype)
            with torch.no_grad(), use_reference():
                self.memory[dtype] = [out.double() for out in self.plain(module, items)]
                if dtype == torch.bfloat16:
                    self.memory[dtype] = self.farthest(module, items, self.memory[dtype])
        return self.memory[dtype]

    def farthest(self, module: nn.Module, items: Sequence[Item], outs: list[Tensor]) -> list[Tensor]:
        """Of a few results whose weights differ by a rounding, return the one farthest from the exact result.

        In 16 bits, a norm of what cancels may turn around; one path may be lucky.
        """
        exact, generator = self.outputs(), torch.Generator().manual_seed(0)
        for _ in range(2):
            other = copy.deepcopy(module)
            for weight in other.parameters():
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)
            pairs = zip(exact, outs, self.plain(other, items), strict=True)
            outs = [right + torch.maximum((out - right).abs(), (new - right).abs()) for right, out, new in pairs]
        return outs

    def gradients(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        if ("gradients", dtype) not in self.memory:
            module, items = convert(self.module, dtype), require_grad(convert_items(self.subject.items, dtype))
            with use_reference():
                outs = self.plain(module, items)
                self.memory["gradients", dtype] = gradients(module, items, outs, self.weights)
        return self.memory["gradients", dtype]

    def judge(self, results: Sequence[Result], dtype: torch.dtype) -> None:
        """Raise if results of all sequences are too far off."""
        expected = self.outputs()
        if len(results) != len(expected):
            raise Mismatch(f"{len(results)} results for {len(expected)} sequences")
        scale = max((float(each.abs().max()) for each in expected if each.numel()), default=1.0)
        for n, (result, right) in enumerate(zip(results, expected, strict=True)):
            own = None if dtype == torch.float64 else self.outputs(dtype)[n]
            if isinstance(result, Rows):
                own = None if own is None else own[result.at]
                compare(f"sequence {n}", result.values, right[result.at], own, scale, dtype)
            else:
                compare(f"sequence {n}", result, right, own, scale, dtype)

    def judge_gradients(self, grads: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        expected = self.gradients()
        if missing := sorted(set(expected) ^ set(grads)):
            raise Mismatch(f"parameters with a gradient in one of the two paths only: {', '.join(missing)}")
        scale = max((float(each.abs().max()) for each in expected.values() if each.numel()), default=1.0)
        for name, right in expected.items():
            own = None if dtype == torch.float64 else self.gradients(dtype)[name]
            compare(f"gradient of {name}", grads[name], right, own, scale, dtype)


def compare(name: str, actual: Tensor, right: Tensor, own: Tensor | None, scale: float, dtype: torch.dtype) -> None:
    """Raise if `actual` is farther from `right` than allowed; `own` is the plain path in the dtype of `actual`."""
    if actual.shape != right.shape:
        raise Mismatch(f"{name}: the result is {tuple(actual.shape)}, expected {tuple(right.shape)}")
    if not actual.numel():
        return
    if torch.promote_types(actual.dtype, dtype) != actual.dtype:
        raise Mismatch(f"{name}: the result is {actual.dtype}, expected {dtype}")
    far = float((actual.detach().double() - right).abs().nan_to_num(torch.inf, posinf=torch.inf).max())
    size = max(scale, 1.0)
    allowed = FLOAT64 * size
    if own is not None:
        plain = float((own.double() - right).abs().max())
        if dtype == torch.float32 and not plain <= MOST * size:
            raise Mismatch(
                f"{name}: the plain path in {dtype} is off by {plain:.3g}, the largest number is {scale:.3g}"
            )
        allowed = OWN[dtype] * plain + ROUNDINGS[dtype] * torch.finfo(dtype).eps * size
    if not far <= allowed:
        raise Mismatch(f"{name}: off by {far:.3g} where {allowed:.3g} is allowed; the largest number is {scale:.3g}")


def convert(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(module).to(dtype)


def convert_items(items: Sequence[Item], dtype: torch.dtype) -> list[Item]:
    return [tuple(part.to(dtype) if part.is_floating_point() else part for part in item) for item in items]


def require_grad(items: Sequence[Item]) -> list[Item]:
    return [
        tuple(part.clone().requires_grad_() if part.is_floating_point() else part for part in item) for item in items
    ]


def inputs(items: Sequence[Item]) -> dict[str, Tensor]:
    """The parts of all sequences, by name."""
    return {f"input {n}.{m}": part for n, item in enumerate(items) for m, part in enumerate(item)}


def gradients(
    module: nn.Module, items: Sequence[Item], outs: Sequence[Any], weights: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Gradients of a weighted sum of results, by the names of parameters and inputs; 0 where there is none."""
    leaves: dict[str, Tensor] = {name: each for name, each in module.named_parameters() if each.requires_grad}
    leaves |= {
        f"input {n}.{m}": part for n, item in enumerate(items) for m, part in enumerate(item) if part.requires_grad
    }
    loss = weighted_sum(outs, weights)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(each) if grad is None else grad
        for (name, each), grad in zip(leaves.items(), grads, strict=True)
    }


def weighted_sum(outs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return sum(((out * weight.to(out.dtype)).sum() for out, weight in zip(outs, weights, strict=True)), torch.zeros(()))


Way = Callable[["Run"], None]
WAYS: dict[str, Way] = {}
EVERY_FORM: set[str] = set()
"""Ways that are run in every form; the others are run in one form that is drawn."""


def way(*, every_form: bool = False) -> Callable[[Way], Way]:
    def register(function: Way) -> Way:
        name = function.__name__.replace("_", "-")
        WAYS[name] = function
        if every_form:
            EVERY_FORM.add(name)
        return function

    return register


class NotApplicable(Exception):
    """The way does not exist for this subject and form."""


@dataclass
class Run:
    """One subject in one form."""

    subject: Subject
    yardstick: Yardstick
    name: str  # of the form
    draw: Draw

    @cached_property
    def form(self) -> Form:
        return self.subject.forms[self.name]

    @property
    def module(self) -> nn.Module:
        """A fresh copy of the module."""
        return copy.deepcopy(self.yardstick.module)

    def check(self, module: Any, dtype: torch.dtype = torch.float32) -> None:
        self.yardstick.judge(self.form(module, convert_items(self.subject.items, dtype)), dtype)

    def check_gradients(self, module: nn.Module, dtype: torch.dtype) -> None:
        if self.name in self.subject.forward_only:
            raise NotApplicable
        items = require_grad(convert_items(self.subject.items, dtype))
        outs = self.form(module, items)
        self.yardstick.judge(outs, dtype)
        self.yardstick.judge_gradients(gradients(module, items, outs, self.yardstick.weights), dtype)


@way(every_form=True)
def float32(run: Run) -> None:
    with torch.no_grad():
        run.check(run.module)


@way(every_form=True)
def float64(run: Run) -> None:
    with torch.no_grad():
        run.check(run.module.double(), torch.float64)


@way()
def bfloat16(run: Run) -> None:
    with torch.no_grad():
        run.check(run.module.bfloat16(), torch.bfloat16)


@way()
def inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.check(run.module)


@way()
def repeated(run: Run) -> None:
    """The same call again, after others of the same module: plans and tables are reused."""
    module = run.module
    with torch.no_grad():
        run.check(module)
        for form in run.subject.forms.values():
            form(module, run.subject.items)
        run.check(module)


@way()
def gradients_float32(run: Run) -> None:
    run.check_gradients(run.module.train(), torch.float32)


@way()
def gradients_float64(run: Run) -> None:
    run.check_gradients(run.module.double().train(), torch.float64)


@way()
def checkpointing(run: Run) -> None:
    module = run.module.double().train()
    stacks = [part for part in module.modules() if hasattr(part, "checkpointing")]
    if not stacks or any(isinstance(part, rg.nn.CrossLayerAttention) for part in module.modules()):
        raise NotApplicable  # keys shared by layers cannot be recomputed block by block, and are refused
    for stack in stacks:
        stack.checkpointing = True  # type: ignore[assignment]
    if run.name not in run.subject.forward_only:
        return run.check_gradients(module, torch.float64)
    try:
        run.check(module, torch.float64)
    except ValueError as error:
        if "checkpointing" not in str(error):
            raise  # a cache cannot be written twice, so that it is refused


@way()
def unused_dropout(run: Run) -> None:
    """Dropout is not applied in evaluation, for any probability."""
    module = run.module
    for part in module.modules():
        if isinstance(getattr(part, "dropout", None), float) and not isinstance(part, rg.Attention):
            part.dropout = 0.5  # type: ignore[assignment]
    with torch.no_grad():
        run.check(module)


def directional(
    run: Run,
    dtype: torch.dtype,
    derive: Callable[..., Tensor],
) -> None:
    """A directional derivative in forward mode, compared with the gradients of the yardstick."""
    if run.name in run.subject.forward_only or run.subject.total:
        raise NotApplicable  # a loss that is fused with its gradient has no forward mode, and says so
    module, items = run.module.to(dtype), convert_items(run.subject.items, dtype)
    expected = run.yardstick.gradients()
    generator = torch.Generator().manual_seed(run.draw.random("tangents").randrange(2**31))
    directions = {name: torch.randn(each.shape, generator=generator).to(dtype) for name, each in expected.items()}
    values = {name: each.detach() for name, each in module.named_parameters() if each.requires_grad}
    values |= {name: part for name, part in inputs(items).items() if part.is_floating_point()}

    def function(values: dict[str, Tensor]) -> Tensor:
        parts = inputs(items) | values
        given = [tuple(parts[f"input {n}.{m}"] for m in range(len(item))) for n, item in enumerate(items)]
        parameters = {name: value for name, value in values.items() if not name.startswith("input ")}
        outs = call_with(module, parameters, lambda module: run.form(module, given))
        return weighted_sum(outs, run.yardstick.weights)

    try:
        derivative = derive(function, values, directions)
    except NotImplementedError as error:
        if "Trying to use forward AD" in str(error):
            raise NotApplicable from None  # an operator of torch without forward mode
        raise
    terms = [grad * directions[name].double() for name, grad in expected.items()]
    right, scale = sum(float(term.sum()) for term in terms), sum(float(term.abs().sum()) for term in terms)
    far, allowed = abs(float(derivative) - right), (FLOAT64 if dtype == torch.float64 else 1e-4) * max(scale, 1)
    if not far <= allowed:
        raise Mismatch(f"the directional derivative is {float(derivative):.6g}, by gradients {right:.6g}")


def by_jvp(function: Callable[..., Tensor], values: dict[str, Tensor], directions: dict[str, Tensor]) -> Tensor:
    return torch.func.jvp(function, (values,), (directions,))[1]


def by_duals(function: Callable[..., Tensor], values: dict[str, Tensor], directions: dict[str, Tensor]) -> Tensor:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, directions[name]) for name, value in values.items()}
        tangent = forward_ad.unpack_dual(function(duals)).tangent
        return torch.zeros(()) if tangent is None else tangent


@way()
def jvp_float32(run: Run) -> None:
    directional(run, torch.float32, by_jvp)


@way()
def jvp_float64(run: Run) -> None:
    directional(run, torch.float64, by_jvp)


@way()
def duals_float32(run: Run) -> None:
    directional(run, torch.float32, by_duals)


@way()
def duals_float64(run: Run) -> None:
    directional(run, torch.float64, by_duals)


class Caller(nn.Module):
    """A module whose forward is any function of another one, so that functional_call can call every method."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.module)


def call_with(module: nn.Module, values: Mapping[str, Tensor], function: Callable[[nn.Module], Any]) -> Any:
    named = {f"module.{name}": value for name, value in values.items()}
    return torch.func.functional_call(Caller(module), named, (function,))


@way()
def functional_call(run: Run) -> None:
    """Weights of one module in another."""
    other = scramble(run.module)
    values = {**dict(run.yardstick.module.named_parameters()), **dict(run.yardstick.module.named_buffers())}
    values = {name: value.detach().clone() for name, value in values.items()}
    with torch.no_grad():
        results = call_with(other, values, lambda module: run.form(module, run.subject.items))
    run.yardstick.judge(results, torch.float32)


@way()
def state_dict(run: Run) -> None:
    """Weights loaded into a module that has computed with others before."""
    other = scramble(run.module)
    with torch.no_grad():
        run.form(other, run.subject.items)
        other.load_state_dict(run.module.state_dict())
        run.check(other)


@way()
def pickled(run: Run) -> None:
    module, buffer = run.module, io.BytesIO()
    if any(nn.utils.parametrize.is_parametrized(part) for part in module.modules()):
        raise NotApplicable  # torch pickles no module with parametrizations
    torch.save(module, buffer)
    buffer.seek(0)
    with torch.no_grad():
        run.check(torch.load(buffer, weights_only=False))


@way()
def changed_weights(run: Run) -> None:
    """Every way to write to a weight is seen by the next call."""
    other, source = scramble(run.module), dict(run.module.named_parameters())
    how = run.draw.pick("how weights change", ["copy_", "data", "data.copy_", "rows", "numpy", "swap"])
    with torch.no_grad():
        run.form(other, run.subject.items)
        for name, parameter in list(other.named_parameters()):
            value = source[name].detach().clone()
            if how == "copy_":
                parameter.copy_(value)
            elif how == "data":
                parameter.data = value
            elif how == "data.copy_":
                parameter.data.copy_(value)
            elif how == "rows" and parameter.dim():
                for n in range(len(parameter)):
                    parameter.data[n] = value[n]
            elif how == "numpy":
                parameter.detach().numpy()[...] = value.numpy()
            else:
                torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        run.check(other)


@way()
def saved(run: Run) -> None:
    if not run.subject.saves:
        raise NotApplicable
    with tempfile.TemporaryDirectory() as folder:
        rg.save(run.module, folder)
        with torch.no_grad():
            run.check(rg.load(folder).eval())


@way()
def frozen(run: Run) -> None:
    module = run.module
    with mock.patch.object(packed_linear, "PADDING", math.inf):  # models here are small, and few weights fill a panel
        rg.nn.freeze(module)
    with torch.no_grad():
        run.check(module)
        rg.nn.thaw(module)
        run.check(module)


@way()
def compiled(run: Run) -> None:
    if run.name not in run.subject.compiles:
        raise NotApplicable
    torch.compiler.reset()
    backend = run.draw.pick("compiler backend", ["eager", "aot_eager"])
    with torch.no_grad():
        run.check(torch.compile(run.module, backend=backend, dynamic=run.draw.pick("dynamic sizes", [None, True])))


@torch.no_grad()
def scramble(module: nn.Module) -> nn.Module:
    """The module with other weights."""
    for parameter in module.parameters():
        parameter.copy_(parameter.flatten().flip(0).view(parameter.shape) * 0.7 + 0.1)
    return module


def runs(subject: Subject, yardstick: Yardstick, draw: Draw, ways: Sequence[str]) -> Iterator[tuple[str, Way, Run]]:
    """What to do for a subject: (name, way, run) for every form of some ways and one form of the others."""
    for name in ways:
        forms = list(subject.forms)
        if name not in EVERY_FORM:
            fitting = forms
            if name == "compiled":
                fitting = [form for form in forms if form in subject.compiles] or forms[:1]
            elif name.startswith(("gradients", "jvp", "duals")):
                fitting = [form for form in forms if form not in subject.forward_only] or forms[:1]
            forms = [draw.pick(f"form of {name}", fitting)]
        for form in forms:
            yield f"{form}/{name}", WAYS[name], Run(subject, yardstick.of_form(subject.forms[form]), form, draw)
