"""Measure operations, memory and processor time of a call, and fit the power of the length with which they grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regard.lab.criteria import median_interval

Call = Callable[[], Any]
T975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # Student's t, 1 to 10 degrees of freedom


class Growth(NamedTuple):
    """Fit of cost = constant · size^power, with the 95% confidence interval of the power."""

    power: float
    low: float
    high: float


def growth(sizes: Sequence[float], costs: Sequence[float]) -> Growth:
    """Fit the power with which costs grow, by least squares of logarithms.

    >>> from regard.lab.complexity import growth
    >>> round(growth([1, 2, 4, 8], [3, 12, 48, 192]).power, 6)
    2.0
    """
    return slope([math.log(x) for x in sizes], [math.log(max(y, 1e-300)) for y in costs])


def degree(values: Sequence[float], digits: float = 0.01) -> int:
    """Return the degree of the polynomial through values at equal steps; differences below `digits` of the last are 0.

    >>> from regard.lab.complexity import degree
    >>> degree([3 * n * n + 5 for n in range(4)]), degree([7, 9, 11, 13])
    (2, 1)
    """
    rest, order = list(values), 0
    while len(rest) > 1 and max(abs(b - a) for a, b in pairwise(rest)) > digits * abs(values[-1]):
        rest, order = [b - a for a, b in pairwise(rest)], order + 1
    return order


def slope(x: Sequence[float], y: Sequence[float]) -> Growth:
    """Fit the slope of a line through points, with its 95% interval.

    >>> from regard.lab.complexity import slope
    >>> slope([0, 1, 2], [5, 3, 1])
    Growth(power=-2.0, low=-2.0, high=-2.0)
    """
    n = len(x)
    if n < 3 or n != len(y):
        raise ValueError(f"x and y must have the same length of at least 3, but have {n} and {len(y)} points")
    mean_x, mean_y = sum(x) / n, sum(y) / n
    spread = sum((a - mean_x) ** 2 for a in x)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - rise * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    freedom = n - 2
    half = (T975[freedom - 1] if freedom <= len(T975) else 1.96) * math.sqrt(rest / freedom / spread)
    return Growth(rise, rise - half, rise + half)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use a single torch thread, so that the time of this thread is the time of all work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Timing(NamedTuple):
    """Processor times of calls: the least of each, and the 99% interval of the power with which they grow."""

    seconds: list[float]
    power: list[float]
    rounds: int


def time_growth(calls: Sequence[Call], sizes: Sequence[float], *, narrow: float = 0.15, most: int = 60) -> Timing:
    """Time interleaved calls round by round, until the interval of their power is narrow or after `most` rounds.

    A round times every call and fits one power, so that a load on the machine that lasts for a round changes all times
    alike; a load that comes and goes within a round spoils that round, which the median of the rounds ignores.
    """
    best, powers = [math.inf] * len(calls), []
    with one_thread():
        for call in calls:
            call()
        for done in range(1, most + 1):
            times = []
            for call in calls:
                began = time.thread_time()
                call()
                times.append(time.thread_time() - began)
            best = [min(pair) for pair in zip(best, times, strict=True)]
            powers.append(growth(sizes, times).power)
            if done >= 12:
                low, middle, high = median_interval(powers)
                if high - low < narrow:
                    break
    return Timing(best, [low, middle, high], done)


def flops(call: Call) -> int:
    """Count the floating-point operations of matrix products in a call of plain torch."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


class _Live(TorchDispatchMode):
    """Track the memory of every new tensor."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: pair for key, pair in self.held.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return out


def peak_bytes(call: Call, *inputs: Tensor) -> int:
    """Return the peak memory of a call of plain torch, including its output but not its inputs.

    >>> import torch
    >>> from regard.lab.complexity import peak_bytes
    >>> x = torch.ones(1000)
    >>> peak_bytes(lambda: (x + 1).sum(), x)
    4004
    """
    live = _Live(inputs)
    with live:
        call()
    return live.peak


def saved_bytes(call: Call, *parameters: Tensor) -> int:
    """Return the bytes that a call saves for its backward pass, without parameters."""
    known = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call()  # kept alive, so that no address is reused
    del output
    return sum(kept.values())


def depth(output: Tensor) -> int:
    """Return the length of the longest chain of dependent operations that leads to an output.

    >>> import torch
    >>> from regard.lab.complexity import depth
    >>> x = torch.ones(3, requires_grad=True)
    >>> depth((x + 1).exp().sum()) - depth((x + 1).sum())
    1
    """
    depths: dict[Any, int] = {}
    todo = [output.grad_fn]
    while todo:
        node = todo[-1]
        below = [each for each, _ in node.next_functions if each is not None] if node is not None else []
        waiting = [each for each in below if each not in depths]
        if waiting:
            todo.extend(waiting)
        else:
            depths[node] = 1 + max((depths[each] for each in below), default=0)
            todo.pop()
    return depths[output.grad_fn]


def costs(attend: Callable[[Tensor, Tensor, Tensor], Tensor], lengths: Sequence[int], width: int) -> dict[str, Any]:
    """Measure an attention in plain torch at several lengths, and fit the powers with which its costs grow."""
    inputs = [torch.randn(3, n, width) for n in lengths]
    calls = [lambda x=x: attend(*x) for x in inputs]
    with torch.no_grad():
        work = [flops(call) for call in calls]
        memory = [peak_bytes(call, x) for call, x in zip(calls, inputs, strict=True)]
        timing = time_growth(calls, lengths)
    return {
        "lengths": list(lengths), "flops": work, "bytes": memory, "seconds": timing.seconds, "rounds": timing.rounds,
        "flops_power": growth(lengths, work).power, "bytes_power": growth(lengths, memory).power,
        "time_power": timing.power,
    }  # fmt: skip
