"""Results of `regard check` for other libraries: docs/findings.json, and docs/findings.md, which is rendered from it.

python -m tools.findings torch keras          check these targets and write both files
python -m tools.findings --show torch nan-leaks   print the program that reproduces a failure
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path("docs/findings.json")
PAGE = Path("docs/findings.md")
SIGNS = {"passed": "✓", "failed": "**✗**", "not applicable": "–"}
INTRODUCTION = """\
# Findings

Results of `regard check` for the attention functions of other libraries. ✓ passes, ✗ fails, – is not supported or not
applicable, empty was not run. A ✗ is not always a defect: the remarks say what is documented and what is by design.

`docs/findings.json` has a self-contained program for every failure, with the smallest input found. Print one with

    python -m tools.findings --show torch nan-leaks
"""


def collect(names: Sequence[str]) -> dict[str, Any]:
    """Check the targets with these names."""
    from regard.check import PROPERTIES, check, target

    targets = [target(name) for name in names]
    return {
        "platform": f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "properties": {name: each.statement for name, each in PROPERTIES.items()},
        "targets": [
            {
                "name": each.name,
                "version": each.version or each.name,
                "outcomes": [
                    {
                        "property": outcome.property,
                        "status": outcome.status,
                        "reason": outcome.reason,
                        "remark": each.remarks.get(outcome.property, "") if outcome.status == "failed" else "",
                        "program": outcome.code,
                    }
                    for outcome in check([each], list(PROPERTIES.values()))
                ],
            }
            for each in targets
        ],
    }


def render(data: dict[str, Any]) -> str:
    """Return the page: a table of all results, then a table of failures for each target."""
    targets = data["targets"]
    status = {(each["name"], o["property"]): o["status"] for each in targets for o in each["outcomes"]}
    names = [each["name"] for each in targets]
    lines = [INTRODUCTION, _row("property", *names), "| --- |" + " :-: |" * len(names)]
    for name in data["properties"]:
        signs = [SIGNS.get(status.get((each, name), ""), "") for each in names]
        if any(signs):
            lines.append(_row(name, *signs))
    lines += ["", f"{data['platform']}."]
    for each in targets:
        lines += ["", f"## {each['name']}", "", f"{each['version']}: {_summary(each['outcomes'])}."]
        if failed := [o for o in each["outcomes"] if o["status"] == "failed"]:
            lines += ["", _row("property", "expected", "result", "remark"), "| --- | --- | --- | --- |"]
            lines += [_row(o["property"], data["properties"][o["property"]], o["reason"], o["remark"]) for o in failed]
        reasons: dict[str, list[str]] = {}
        for outcome in each["outcomes"]:
            if outcome["status"] == "not applicable":
                reasons.setdefault(outcome["reason"], []).append(outcome["property"])
        if reasons:
            lines += ["", "Not applicable:", ""]
            lines += [f"- {', '.join(properties)}: {reason}" for reason, properties in reasons.items()]
    return "\n".join(lines) + "\n"


def program(data: dict[str, Any], target: str, name: str) -> str:
    """Return the program that reproduces a failure."""
    for each in data["targets"]:
        for outcome in each["outcomes"]:
            if (each["name"], outcome["property"], outcome["status"]) == (target, name, "failed"):
                return outcome["program"]
    raise SystemExit(f"tools.findings: {target} has no failure of {name}; docs/findings.md lists the failures")


def _summary(outcomes: Sequence[dict[str, Any]]) -> str:
    counts = {status: sum(outcome["status"] == status for outcome in outcomes) for status in SIGNS}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count or status != "not applicable")


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="targets to check, as in `regard check --list`")
    parser.add_argument("--show", nargs=2, metavar=("TARGET", "PROPERTY"), help="print the program of a failure")
    options = parser.parse_args()
    if options.show:
        print(program(json.loads(DATA.read_text("utf-8")), *options.show), end="")
        return
    if options.targets:
        DATA.write_text(json.dumps(collect(options.targets), indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(render(json.loads(DATA.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
