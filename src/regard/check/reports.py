"""Reports of outcomes: a table, JSON, JUnit XML for CI, and Markdown."""

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

Results of `regard check`. ✓: the property holds, ✗: it does not, –: it is not promised or not applicable, empty: it was
not run. `regard check --list` prints the statement of each property. A ✗ is not always a defect: the remark on a
failure says whether the behaviour is documented or by design. Every failure has its smallest input found, as a
self-contained program.""".splitlines()


def table(outcomes: Sequence[Outcome]) -> Table:
    """A table with one row per property, one column per target, and the reasons."""
    from rich.markup import escape
    from rich.table import Table

    names = list(dict.fromkeys(outcome.target for outcome in outcomes))
    result = Table("property", *(escape(printable(name)) for name in names), "why", title_justify="left")
    for name, row in by_property(outcomes).items():
        cells = {outcome.target: SIGNS[outcome.status] for outcome in row}
        why = [f"{label}{escape(printable(reason))}" for label, reason in _reasons(row, len(names) > 1)]
        result.add_row(name, *(cells.get(target, "") for target in names), "\n".join(why))
    return result


def _reasons(row: Sequence[Outcome], several: bool) -> list[tuple[str, str]]:
    """The reasons of one property, each once, after the targets that share it."""
    shared: dict[str, list[str]] = {}
    for outcome in row:
        if outcome.reason:
            shared.setdefault(outcome.reason, []).append(outcome.target)
    return [
        (f"[bold]{printable(', '.join(targets))}[/]: " if several else "", reason) for reason, targets in shared.items()
    ]


def by_property(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.property, []).append(outcome)
    return groups


def summary(outcomes: Sequence[Outcome]) -> str:
    """`40 passed, 3 failed, 2 not applicable`."""
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in SIGNS}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count or status != "not applicable")


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    failed = sum(outcome.status == "failed" for outcome in outcomes)
    return {"passed": not failed, "summary": summary(outcomes), "outcomes": [asdict(outcome) for outcome in outcomes]}


def junit(outcomes: Sequence[Outcome]) -> str:
    """JUnit XML with one suite per target and one case per property."""
    root = ET.Element("testsuites", name="regard check")
    for target in dict.fromkeys(outcome.target for outcome in outcomes):
        of_target = [outcome for outcome in outcomes if outcome.target == target]
        failures, skipped = (sum(o.status == status for o in of_target) for status in ("failed", "not applicable"))
        suite = ET.SubElement(
            root, "testsuite", name=target, tests=str(len(of_target)), failures=str(failures), skipped=str(skipped),
            errors="0", time=f"{sum(outcome.seconds for outcome in of_target):.3f}",
        )  # fmt: skip
        for outcome in of_target:
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
    """Replace control characters, which XML does not allow."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def markdown(targets: Sequence[Target], outcomes: Sequence[Outcome]) -> str:
    """A table of all targets, then every failure with its remark and its smallest input."""
    names = [target.name for target in targets]
    signs = {"passed": "✓", "failed": "**✗**", "not applicable": "–"}
    lines = [*ABOUT, "", "| property | " + " | ".join(names) + " |", "| --- |" + " :-: |" * len(names)]
    for name, row in by_property(outcomes).items():
        cells = {outcome.target: signs[outcome.status] for outcome in row}
        lines.append(f"| {name} | " + " | ".join(cells.get(target, "") for target in names) + " |")
    lines += ["", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}."]
    for target in targets:
        of_target = [outcome for outcome in outcomes if outcome.target == target.name]
        lines += ["", f"## {target.name}", "", f"{target.version or target.name}: {summary(of_target)}."]
        for outcome in of_target:
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
            o.reason: [p.property for p in of_target if p.reason == o.reason]
            for o in of_target
            if o.status == "not applicable"
        }
        if unsupported:
            lines += ["", "Not applicable:", ""]
            lines += [f"- {', '.join(properties)}: {reason}" for reason, properties in unsupported.items()]
    return "\n".join(lines) + "\n"
