"""Copy measured figures from docs/benchmarks.md and docs/results.json into the pages that quote them.

A quoted figure follows a comment that names its row and column; for the time ratio to SDPA of a case at 1 thread:

    <!-- bench: dense forward, N = 2,048; 1; SDPA -->2.43x

The column is the name of a peer, `memory` (ours), `memory PEER`, or a heading of the table. `targets` and `targets met`
are the counts of targets. A result of a task is named by its run and metric, or run, baseline and metric; `minutes` is
the time of the training:

    <!-- result: wikitext; Kneser-Ney trigrams; perplexity -->146.4

`make bench` and `make results` run this at their end.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
QUOTED = re.compile(r"(<!-- (?:bench|result): ([^>]+?) -->)(\d[\d.,]*(?:x| ms| µs| s| MB|%)?)")


def read_figures(report: str) -> dict[str, str]:
    """Return the figures of the report by `row; threads; column`."""
    met, targets = re.search(r"Targets: (\d+) of (\d+) met", report).groups()  # type: ignore[union-attr]
    figures = {"targets": targets, "targets met": met}
    headings: list[str] = []
    for line in report.splitlines():
        cells = [re.sub(r"\*\*|~~", "", cell.strip()) for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = [heading.strip() for heading in cells]
        elif len(cells) == len(headings) and "threads" in headings[:2]:
            row = f"{cells[0].strip()}; {cells[1].strip()}"
            for heading, cell in zip(headings[2:], cells[2:], strict=True):
                figures[f"{row}; {heading}"] = cell
                for amount, peer in re.findall(r"([\d.,]+x|[\d,]+ MB) ?(.*?)(?=, [\d.,]+(?:x| MB)|$)", cell):
                    column = f"memory {peer}".strip() if heading == "memory" else peer
                    figures[f"{row}; {column}"] = amount
    return figures


def read_results(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the figures of the results by `run; metric`, `run; baseline; metric` and `run; minutes`."""
    figures = {f"{run}; minutes": f"{result['minutes']:.0f}" for run, result in results.items()}
    for run, result in results.items():
        sources = {"": result["metrics"], **{f"{name}; ": values for name, values in result["baselines"].items()}}
        figures |= {
            f"{run}; {source}{metric}": f"{x:.4g}" for source, xs in sources.items() for metric, x in xs.items()
        }
    return figures


def read_all(root: Path = ROOT) -> dict[str, str]:
    """Return every figure that a page may quote."""
    report = (root / "docs" / "benchmarks.md").read_text("utf-8")
    results = json.loads((root / "docs" / "results.json").read_text("utf-8"))
    return read_figures(report) | read_results(results)


def update_page(text: str, figures: dict[str, str]) -> str:
    """Return the page with every quoted figure as measured; raise KeyError for one that was not measured."""
    return QUOTED.sub(lambda quoted: quoted[1] + figures[quoted[2]], text)


def main() -> None:
    figures = read_all()
    for page in sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text("utf-8")
        try:
            updated = update_page(text, figures)
        except KeyError as error:
            sys.exit(f"{page.relative_to(ROOT)} quotes {error}, which was not measured")
        if updated != text:
            page.write_text(updated, "utf-8")
            print(f"updated {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
