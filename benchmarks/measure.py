"""Measure one case: build the competitors, check each, and time them in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import machine
from benchmarks.case import Case, Inputs
from benchmarks.cases import PEAK, READS
from benchmarks.check import WrongResult, check, leaves
from benchmarks.timing import time_interleaved

OURS = "ours"
BELIEVED = 1.05  # no kernel exceeds the machine: beyond this share of its peak, the peak was measured in noise
_best_rate: dict[int, float] = {}  # the highest peak seen so far, by threads


@dataclass
class Result:
    """The result of one case: seconds of our call, peer time / ours, and the reasons of peers without a time."""

    name: str
    row: str
    threads: int
    seconds: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)  # which of them are other calls of ours
    missing: dict[str, str] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # peers of targets that have no time
    wrong: str = ""

    def line(self) -> str:
        if self.wrong:
            return f"{self.name}: NO TIME, {self.wrong}"
        parts = [f"{ratio:.2f}x {name}" for name, ratio in self.ratios.items()]
        failed = [format_target(target) for target in self.targets if not target["met"]]
        parts += [f"no {name}: {reason}" for name, reason in self.missing.items()]
        missed = f"   MISSED: {'; '.join(failed)}" if failed else ""
        return f"{self.name}: {self.seconds * 1e3:.3f} ms, {', '.join(parts)}{missed}"


def format_target(target: dict[str, Any]) -> str:
    """Format a target and the measured value, with one digit more than elsewhere to show narrow misses."""
    if target["peer"] in (PEAK, READS):
        noise = " (more than the machine can do: measured in noise)" if target["ratio"] > BELIEVED else ""
        return f"{target['ratio']:.1%} of {target['peer']}, at least {target['at_least']:.0%}{noise}"
    if target["at_least"]:
        return f"{target['ratio']:.3f}x {target['peer']}, at least {target['at_least']:g}x"
    return f"{1 / target['ratio']:.3f}x the time of {target['peer']}, at most {target['at_most']:g}x"


def calls_of(case: Case, threads: int, only_ours: bool = False) -> tuple[dict[str, Callable[[], Any]], Inputs, Result]:
    """The calls of a case that give the right result, ready to be timed."""
    x = case.inputs()
    for tensor in x.values():
        tensor.requires_grad_(case.backward and tensor.is_floating_point())
    result, calls, expected = Result(case.name, case.row, threads), {}, {}
    own = lambda: case.ours(x)  # noqa: E731
    try:
        with torch.set_grad_enabled(case.backward):
            check(case, None, own, x, expected)
    except Exception as error:  # wrong or failed: the run continues, and the report shows it
        result.wrong = str(error) if isinstance(error, WrongResult) else f"{type(error).__name__}: {error}"
        return {}, x, result
    calls[OURS] = _timed(own, case, x)
    for peer in () if only_ours else case.peers:
        try:
            call = peer.build(x, threads)
            with torch.set_grad_enabled(case.backward):
                check(case, peer, call, x, expected)
            calls[peer.name] = _timed(call, case, x)
        except ImportError as error:
            result.missing[peer.name] = f"not installed ({error})"
        except WrongResult as error:
            result.missing[peer.name] = f"wrong result: {error}"
        except Exception as error:  # a failing peer is reported, and the run continues
            result.missing[peer.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    result.own = [peer.name for peer in case.peers if peer.ours]
    return calls, x, result


def measure(case: Case, threads: int, budget: float) -> Result:
    calls, x, result = calls_of(case, threads)
    if result.wrong:
        return result
    peak_flops = 0.0
    if case.flops:
        calls[PEAK], peak_flops = machine.peak_call(threads)
    if case.reads:
        calls[READS] = machine.read_call([x["k"], x["v"]], threads)
    seconds = time_interleaved(calls, budget)
    result.seconds = ours = seconds.pop(OURS)
    shares = {peer.name: peer.share for peer in case.peers}
    for name, times in seconds.items():
        if name == PEAK:
            _best_rate[threads] = max(_best_rate.get(threads, 0.0), peak_flops / times)
            result.ratios[name] = case.flops / ours / _best_rate[threads]
        else:
            share = shares.get(name, 1.0)
            result.ratios[name] = times * (share() if callable(share) else share) / ours
    for target in case.targets:
        if target.peer not in result.ratios:
            result.unjudged.append(target.peer)
        else:
            ratio = result.ratios[target.peer]
            believed = target.peer not in (PEAK, READS) or ratio <= BELIEVED
            result.targets.append(vars(target) | {"ratio": ratio, "met": believed and target.met(ratio)})
    return result


def _timed(call: Callable[[], Any], case: Case, x: Inputs) -> Callable[[], Any]:
    """The call as it is timed: with its backward pass, or without any graph."""
    if not case.backward:

        def forward() -> None:
            with torch.no_grad():
                call()

        return call if case.smallest else forward

    with torch.no_grad():
        seed = torch.randn(call().shape).to(next(iter(x.values())))
    inputs = leaves(x)
    return lambda: torch.autograd.grad(call(), inputs, seed, allow_unused=True)
