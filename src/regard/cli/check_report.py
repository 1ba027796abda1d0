"""`regard check`: run the checks, print the outcomes, return the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from regard.check import reports
from regard.check.property import Property
from regard.check.runner import PROPERTIES, Outcome, check
from regard.check.targets import PEERS, NotSupported, UnknownTarget, installed_engines, target
from regard.check.targets.devices import available_device, on_device
from regard.files import Unwritable, check_writable, write_text_atomically
from regard.printable import printable, printable_json

PASSED, FAILED, NOT_CHECKED = 0, 1, 2
LINES = "\n\t"  # control characters that programs and tables may contain


def run(
    stdout: Console,
    stderr: Console,
    names: Sequence[str],
    only: Sequence[str],
    *,
    form: str = "table",
    junit: Path | None = None,
    device: str = "cpu",
) -> int:
    """Check targets by name, print the outcomes as `form` (table, json or markdown) and return the exit code."""
    try:
        place = available_device(device)
        targets = [target(name) for name in names] if names else installed_engines(place.type)
        targets = [on_device(each, place) for each in targets]
        properties = select_properties(only)
        if junit is not None:
            check_writable(junit)
    except (UnknownTarget, NotSupported, Unwritable) as error:
        stderr.print(f"[bold red]regard:[/] {escape(printable(error))}", soft_wrap=True)
        return NOT_CHECKED
    outcomes: list[Outcome] = []
    with stderr.status("checking") as status:
        for each in targets:
            for prop in properties:
                status.update(f"{each.name}: {prop.name}")
                outcomes += check([each], [prop])
    if junit is not None:
        write_text_atomically(junit, reports.junit(outcomes))
    if form == "json":
        print(printable_json(reports.as_json(outcomes), indent=1))
    elif form == "markdown":
        print(printable(reports.markdown(targets, outcomes), keep=LINES), end="")
    else:
        print_table(stdout, outcomes)
    return FAILED if any(outcome.status == "failed" for outcome in outcomes) else PASSED


def print_table(stdout: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the table, then for every failure a program that reproduces it."""
    stdout.print(reports.table(outcomes))
    for outcome in outcomes:
        if outcome.status == "failed":
            name, reason = (escape(printable(text)) for text in (outcome.target, outcome.reason))
            stdout.print(f"\n[bold red]✗ {name}: {outcome.property}[/]  {reason}", soft_wrap=True)
            stdout.print(f"[dim]{escape(PROPERTIES[outcome.property].statement)}[/]", soft_wrap=True)
            stdout.print(f"\n{escape(printable(outcome.code, keep=LINES))}", soft_wrap=True)
    stdout.print(reports.summary(outcomes))


def select_properties(only: Sequence[str]) -> list[Property]:
    """The properties of these names, or all if there are no names."""
    if unknown := [name for name in only if name not in PROPERTIES]:
        raise UnknownTarget(f"--only must be one of {', '.join(PROPERTIES)}, but is {unknown[0]}")
    return [PROPERTIES[name] for name in only] or list(PROPERTIES.values())


def list_properties(stdout: Console, as_json: bool) -> None:
    """Print every property with its statement, and the named targets."""
    if as_json:
        print(
            json.dumps(
                {each.name: {"statement": each.statement, "needs": sorted(each.needs)} for each in PROPERTIES.values()},
                indent=1,
            )
        )
        return
    table = Table("property", "statement", "needs")
    for each in PROPERTIES.values():
        table.add_row(f"[bold]{each.name}[/]", escape(each.statement), ", ".join(sorted(each.needs)))
    stdout.print(table)
    engines = [f"regard-{each.name}" for each in installed_engines()]
    stdout.print(f"Targets by name: {', '.join([*engines, *PEERS])}; or package.module:function.")
