"""`regard plan`: compare the costs of all layouts and format the result."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from regard.distributed.cost import Cost, Machine, ModelShape, cost, splits

POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def parse_amount(name: str, text: str) -> float:
    """Parse a number with a unit, such as 16GB, 25Gbit/s, 1.5e9 or 40 GFLOP/s.

    >>> parse_amount("memory", "16GB"), parse_amount("bandwidth", "8 Mbit/s"), parse_amount("memory", "1GiB")
    (16000000000.0, 1000000.0, 1073741824.0)
    """
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]?)(i?)(b|byte|bytes|bit|bits|flop|flops)?(/s)?\s*", text.lower()
    )
    try:
        if match is None:
            raise ValueError(text)
        value = float(match[1]) * (POWERS[match[2]] if not match[3] else 1024.0 ** "kmgtp".index(match[2]) * 1024)
    except ValueError:
        raise ValueError(f"--{name} must be a number with a unit, such as 16GB, but is {text!r}") from None
    if not value > 0:
        raise ValueError(f"--{name} must be positive, but is {text}")
    return value / 8 if match[4] in ("bit", "bits") else value


@dataclass(frozen=True)
class PlanReport:
    """The costs of all layouts: those that fit first, the fastest of them first."""

    model: ModelShape
    machine: Machine
    sequence: int
    batch: int
    costs: tuple[Cost, ...]

    @staticmethod
    def of(model: ModelShape, machine: Machine, *, sequence: int, ranks: int, batch: int) -> PlanReport:
        costs = [
            cost(model, split, machine, sequence=sequence, batch=batch)
            for split in splits(model, ranks, sequence=sequence, batch=batch)
        ]
        if not costs:
            raise ValueError(
                f"{batch} sequences of {sequence} tokens cannot be split over {ranks} ranks; give a larger "
                "--batch, or fewer --ranks"
            )
        order = sorted(costs, key=lambda each: (each.peak > machine.memory, each.time, each.peak))
        if order[0].peak > machine.memory:
            order.sort(key=lambda each: each.peak)
        return PlanReport(model, machine, sequence, batch, tuple(order))

    @property
    def best(self) -> Cost | None:
        """The recommended layout, or None if none fits."""
        return self.costs[0] if self.costs[0].peak <= self.machine.memory else None

    def reason(self, other: Cost) -> str:
        """Explain why a layout is or is not recommended."""
        best = self.best
        if other.peak > self.machine.memory:
            part = max(other.memory, key=lambda name: other.memory[name])
            return f"needs {format_quantity(other.peak)}B, {format_quantity(other.memory[part])}B of it for {part}"
        if best is None or other is best:
            fit = sum(each.peak <= self.machine.memory for each in self.costs)
            return f"the fastest of the {fit} that fit" if fit > 1 else "the only one that fits"
        part = max(other.seconds, key=lambda name: other.seconds[name] - best.seconds[name])
        times = other.time / best.time
        seconds, best_seconds = (format_seconds(each.seconds[part]) for each in (other, best))
        return f"{times:.2f} times as long: {part} takes {seconds} instead of {best_seconds}"

    def recommendation(self) -> str:
        """The recommended layout with its `regard train` command, or the reason why none fits."""
        tokens = f"{self.batch} x {self.sequence:,} tokens"
        if self.best is None:
            least = self.costs[0]
            return (
                f"No layout fits: {least.split} needs the least, {format_quantity(least.peak)}B per rank for {tokens}, "
                "and a rank "
                f"has {format_quantity(self.machine.memory)}B. Take more ranks, or a shorter sequence."
            )
        command = f"regard train language --context {self.sequence} --tokens {self.batch * self.sequence}"
        command += self.best.split.cli_options()
        accumulate = -(-self.batch // self.best.split.data)
        command += f" --accumulate {accumulate}" if accumulate > 1 else ""
        return (
            f"Take {self.best.split}: {self.reason(self.best)}. {format_quantity(self.best.peak)}B per rank, "
            f"{format_seconds(self.best.time)} per step of {tokens}. torchrun ... -m {command}"
        )

    def table(self) -> Table:
        """A table with one row per layout; the values are per rank."""
        ranks = self.costs[0].split.ranks
        size = f"{format_quantity(self.model.count)} weights"
        title = f"{size}, {self.batch} x {self.sequence:,} tokens, {ranks} ranks; each rank:"
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("layout", no_wrap=True)
        for name in ("kept", "memory", "FLOPs", "sent", "compute", "communication", "step"):
            table.add_column(name, justify="right", no_wrap=True)
        for each in self.costs:
            kept, communication = each.memory["activations"], each.seconds["communication"]
            cells = (
                *(f"{format_quantity(size)}B" for size in (kept, each.peak)), format_quantity(sum(each.flops.values())),
                f"{format_quantity(sum(each.sent.values()))}B", *map(format_seconds, (
                each.time - communication, communication, each.time)),
            )  # fmt: skip
            table.add_row(
                f"{each.split}", *(cell.replace(" ", "") for cell in cells),
                style="bold" if each is self.best else "dim" if each.peak > self.machine.memory else "",
            )  # fmt: skip
        return table

    def reasons(self) -> list[str]:
        """Explain why each of the other layouts is not recommended."""
        return [f"not {each.split}: {self.reason(each)}" for each in self.costs if each is not self.best]

    def as_json(self) -> dict[str, Any]:
        layouts = [
            asdict(each) | {
                "layout": str(each.split), "peak": each.peak, "time": each.time,
                "fits": each.peak <= self.machine.memory, "why": self.reason(each),
            }
            for each in self.costs
        ]  # fmt: skip
        machine = {key: value for key, value in asdict(self.machine).items() if value != float("inf")}
        return {
            "weights": self.model.count, "sequence": self.sequence, "batch": self.batch, "machine": machine,
            "take": None if self.best is None else str(self.best.split), "recommendation": self.recommendation(),
            "layouts": layouts,
        }  # fmt: skip


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits, in seconds or hours."""
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds / 3600:.3g} h"


def format_quantity(number: float) -> str:
    """Format a number with three digits and an SI prefix."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if number < 999.5 or unit == " P":
            return f"{number:.3g}{unit or ' '}"
        number /= 1000
    return ""
