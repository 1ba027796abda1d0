"""Copy measured figures from docs/benchmarks.md into the pages that quote them.

A quoted figure follows a comment that names its row and column; for the time ratio to SDPA of a case at 1 thread:

    <!-- bench: dense forward, N = 2,048; 1; SDPA -->2.43x

The column is the name of a peer, `memory` (ours), `memory PEER`, or a heading of the table. `targets` and `targets met`
are the counts of targets. `make bench` runs this at its end.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUOTED = re.compile(r"(<!-- bench: ([^>]+?) -->)(\d[\d.,]*(?:x| ms| µs| s| MB|%)?)")


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


def update_page(text: str, figures: dict[str, str]) -> str:
    """Return the page with every quoted figure as measured; raise KeyError for one that the report does not have."""
    return QUOTED.sub(lambda quoted: quoted[1] + figures[quoted[2]], text)


def main() -> None:
    figures = read_figures((ROOT / "docs" / "benchmarks.md").read_text("utf-8"))
    for page in sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text("utf-8")
        try:
            updated = update_page(text, figures)
        except KeyError as error:
            sys.exit(f"{page.relative_to(ROOT)} quotes {error}, which docs/benchmarks.md does not have")
        if updated != text:
            page.write_text(updated, "utf-8")
            print(f"updated {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
