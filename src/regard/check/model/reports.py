"""Reports on a model: one table with equal rows merged, JSON, Markdown, and outcomes for JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from regard.check.model.runner import Finding
from regard.check.runner import Outcome
from regard.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

SIGNS = {
    "passed": "[green]✓[/]", "failed": "[bold red]✗[/]", "not promised": "[dim]not promised[/]",
    "not measured": "[yellow]not measured[/]",
}  # fmt: skip
COLUMNS = ("layer", "implementation", "called with", "promised", "measured", "verdict")


@dataclass(frozen=True)
class Line:
    """Findings with the same promise, measurement and verdict."""

    layers: tuple[str, ...]
    implementations: tuple[str, ...]
    scenarios: tuple[str, ...]
    first: Finding

    @property
    def cells(self) -> tuple[str, ...]:
        first, implementations, scenarios = self.first, ", ".join(self.implementations), "; ".join(self.scenarios)
        return join_layers(self.layers), implementations, scenarios, first.promised, first.measured, first.verdict


def lines(findings: Sequence[Finding]) -> list[Line]:
    """Merge equal findings: over scenarios, then over layers, then over implementations; failures first."""
    merged = [Line((f.layer,), (f.implementation,), (f.scenario,), f) for f in findings]
    for name in ("scenarios", "layers", "implementations"):
        merged = _merge(merged, name)
    return sorted(merged, key=lambda line: line.first.verdict != "failed")


def _merge(lines: Iterable[Line], name: str) -> list[Line]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        parts = {"layers": line.layers, "implementations": line.implementations, "scenarios": line.scenarios}
        del parts[name]
        first = line.first
        groups.setdefault((first.promised, first.measured, first.verdict, *parts.values()), []).append(line)
    merged = []
    for group in groups.values():
        values: dict[str, Any] = {"layers": group[0].layers, "implementations": group[0].implementations}
        values |= {
            "scenarios": group[0].scenarios,
            "first": next((g.first for g in group if g.first.code), group[0].first),
        }
        values[name] = tuple(dict.fromkeys(each for line in group for each in getattr(line, name)))
        merged.append(Line(**values))
    return merged


def join_layers(names: Sequence[str]) -> str:
    """Names with the numbers of equal layers in braces.

    >>> from regard.check.model.reports import join_layers
    >>> join_layers(["layers.0.attn", "layers.1.attn", "layers.2.attn", "layers.5.attn"])
    'layers.{0-2,5}.attn'
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.match(r"(.*?(?:^|\.))(\d+)((?:\..*)?)$", name)
        start, number, end = match.groups() if match else (name, "-1", "")
        groups.setdefault((start, end), []).append(int(number))
    return "\n".join(
        start if numbers == [-1] else f"{start}{_braces(numbers)}{end}" for (start, end), numbers in groups.items()
    )


def _braces(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return parts[0] if len(numbers) == 1 else "{" + ",".join(parts) + "}"


def table(findings: Sequence[Finding]) -> Table:
    """A table with one row for equal findings."""
    from rich.markup import escape
    from rich.table import Table

    result = Table()
    for name in COLUMNS:
        result.add_column(name, overflow="fold")
    for line in lines(findings):
        *cells, verdict = line.cells
        result.add_row(*(escape(printable(cell, keep="\n")) for cell in cells), SIGNS[verdict])
    return result


def markdown(findings: Sequence[Finding]) -> str:
    """The table as Markdown, then a program for every failure."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    clean: Callable[[str], str] = lambda cell: printable(cell.replace("\n", ", ")).replace("|", "\\|")  # noqa: E731
    rows += ["| " + " | ".join(map(clean, line.cells)) + " |" for line in lines(findings)]
    for line in lines(findings):
        if line.first.code:
            rows += ["", f"{line.cells[0]}, {line.cells[2]}:", "", "```python", line.first.code.rstrip(), "```"]
    return "\n".join(rows) + "\n"


def summary(findings: Sequence[Finding]) -> str:
    """`40 passed, 3 failed, 2 not promised`."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in SIGNS}
    return ", ".join(
        f"{count} {verdict}" for verdict, count in counts.items() if count or verdict in ("passed", "failed")
    )


def as_json(model: str, findings: Sequence[Finding]) -> dict[str, Any]:
    failed = any(finding.verdict == "failed" for finding in findings)
    entries = [asdict(finding) for finding in findings]
    return {"model": model, "passed": not failed, "summary": summary(findings), "findings": entries}


def outcomes(findings: Sequence[Finding]) -> list[Outcome]:
    """The findings as outcomes of `regard check`, for JUnit XML."""
    results = []
    for each in findings:
        status: Any = each.verdict if each.verdict in ("passed", "failed") else "not applicable"
        reason = f"promised: {each.promised or 'nothing'}; measured: {each.measured}"
        name = f"{each.layer}: {each.scenario}"
        results.append(Outcome(each.implementation, name, status, "" if status == "passed" else reason, each.code))
    return results
