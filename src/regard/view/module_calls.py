"""The modules of a model that are running, innermost last, and the attention calls of each in this forward pass."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.description import Description


class RunningModule(NamedTuple):
    """A module inside its `forward`: its dotted name in the model, and the arguments of the call."""

    name: str
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]


class ModuleCalls:
    """The stack of running modules, and how many attention calls each has made in this forward pass."""

    def __init__(self) -> None:
        self.stack: list[RunningModule] = []
        self.counts: Counter[str] = Counter()

    def count_call(self) -> tuple[str, int]:
        """Count an attention call of the innermost module; return the name of the module and the calls before it."""
        name = self.stack[-1].name
        before = self.counts[name]
        self.counts[name] += 1
        return name, before

    def display_name(self, name: str, call_number: int) -> str:
        """The name of an attention: that of its module, with a number from its second call on."""
        name = name or type(self.stack[-1].module).__name__
        return name + (f" ({call_number + 1})" if call_number else "")


@contextmanager
def track_modules(
    model: nn.Module,
    calls: ModuleCalls,
    active: Callable[[], bool],
    enter: Callable[[RunningModule], None] = lambda running: None,
    leave: Callable[[RunningModule, Any], None] = lambda running, output: None,
) -> Iterator[None]:
    """Keep `calls` up to date inside the block, where compiled parts run eagerly.

    active: whether the current thread is the one to track. enter, leave: called before and after every module.
    """

    def pre_hook(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if active():
                if not calls.stack:
                    calls.counts.clear()
                calls.stack.append(RunningModule(name, module, args, kwargs))
                enter(calls.stack[-1])

        return hook

    def post_hook(module: nn.Module, args: tuple, output: Any) -> None:
        if active() and calls.stack:
            leave(calls.stack.pop(), output)

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing dynamo is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            if isinstance(module, Description):  # its calls belong to the module that calls it
                continue
            before = module.register_forward_pre_hook(pre_hook(name), with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(post_hook, always_call=True)
            stack.callback(after.remove)
        yield
