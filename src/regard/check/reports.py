"""Outcomes as a table, as JSON, as JUnit XML for CI, and as Markdown."""

from __future__ import annotations

import platform
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regard.check.runner import PROPERTIES, Outcome
from regard.check.targets.target import Target
from regard.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

SIGNS = {"passed": "[green]✓[/]", "failed": "[bold red]✗[/]", "not applicable": "[dim]–[/]"}

ABOUT = """\
# Findings

What `regard check` finds in attentions. ✓ holds, ✗ does not, – is not promised or cannot be asked; empty was not run.
What each property demands is said where it fails, and by `regard check --list`. A ✗ is not always a defect: the words
below it say what is documented, what is by design and what is not. Every finding has the smallest input found, as a
program that stands alone.""".splitlines()


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each property, one column for each target, and why."""
    from rich.markup import escape
    from rich.table import Table

    names = list(dict.fromkeys(outcome.target for outcome in outcomes))
    made = Table("property", *(escape(printable(name)) for name in names), "why", title_justify="left")
    for name, row in by_property(outcomes).items():
        cells = {outcome.target: SIGNS[outcome.status] for outcome in row}
        why = [f"{label}{escape(printable(reason))}" for label, reason in _reasons(row, len(names) > 1)]
        made.add_row(name, *(cells.get(target, "") for target in names), "\n".join(why))
    return made


def _reasons(row: Sequence[Outcome], several: bool) -> list[tuple[str, str]]:
    """Reasons of one property, each once, behind the targets that share it."""
    shared: dict[str, list[str]] = {}
    for outcome in row:
        if outcome.reason:
            shared.setdefault(outcome.reason, []).append(outcome.target)
    return [
        (f"[bold]{printable(', '.join(targets))}[/]: " if several else "", reason) for reason, targets in shared.items()
    ]


def by_property(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.property, []).append(outcome)
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """`40 passed, 3 failed, 2 not applicable`."""
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in SIGNS}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count or status != "not applicable")


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    failed = sum(outcome.status == "failed" for outcome in outcomes)
    return {"passed": not failed, "summary": summary(outcomes), "outcomes": [asdict(outcome) for outcome in outcomes]}


def junit(outcomes: Sequence[Outcome]) -> str:
    """JUnit XML: a suite for each target, a case for each property."""
    root = ET.Element("testsuites", name="regard check")
    for target in dict.fromkeys(outcome.target for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.target == target]
        failures, skipped = (sum(o.status == status for o in own) for status in ("failed", "not applicable"))
        suite = ET.SubElement(
            root, "testsuite", name=target, tests=str(len(own)), failures=str(failures), skipped=str(skipped),
            errors="0", time=f"{sum(outcome.seconds for outcome in own):.3f}",
        )  # fmt: skip
        for outcome in own:
            case = ET.SubElement(
                suite,
                "testcase",
                classname=f"regard.check.{target}",
                name=outcome.property,
                time=f"{outcome.seconds:.3f}",
            )
            if outcome.status == "failed":
                ET.SubElement(case, "failure", message=_printable(outcome.reason)).text = _printable(outcome.code)
            elif outcome.status == "not applicable":
                ET.SubElement(case, "skipped", message=_printable(outcome.reason))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """Without the control characters that XML has no place for."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def markdown(targets: Sequence[Target], outcomes: Sequence[Outcome]) -> str:
    """Targets beside one another, then every failure with what its documentation says and its smallest input."""
    names = [target.name for target in targets]
    signs = {"passed": "✓", "failed": "**✗**", "not applicable": "–"}
    lines = [*ABOUT, "", "| property | " + " | ".join(names) + " |", "| --- |" + " :-: |" * len(names)]
    for name, row in by_property(outcomes).items():
        cells = {outcome.target: signs[outcome.status] for outcome in row}
        lines.append(f"| {name} | " + " | ".join(cells.get(target, "") for target in names) + " |")
    lines += ["", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}."]
    for target in targets:
        own = [outcome for outcome in outcomes if outcome.target == target.name]
        lines += ["", f"## {target.name}", "", f"{target.version or target.name}: {summary(own)}."]
        for outcome in own:
            if outcome.status == "failed":
                lines += [
                    "",
                    f"### {target.name}: {outcome.property}",
                    "",
                    f"*{PROPERTIES[outcome.property].statement}*",
                    "",
                ]
                lines += [f"Found: {outcome.reason}.", ""]
                if remark := target.remarks.get(outcome.property):
                    lines += [remark, ""]
                lines += [
                    "<details><summary>Smallest input</summary>",
                    "",
                    "```python",
                    outcome.code.rstrip(),
                    "```",
                    "",
                ]
                lines += ["</details>"]
        unsupported = {
            o.reason: [p.property for p in own if p.reason == o.reason] for o in own if o.status == "not applicable"
        }
        if unsupported:
            lines += ["", "Not applicable:", ""]
            lines += [f"- {', '.join(properties)}: {reason}" for reason, properties in unsupported.items()]
    return "\n".join(lines) + "\n"
