"""Check that a tree is ready to be released: version, changelog, pages and figures agree.

    python -m tools.release 0.2.0

docs/release.md has the whole procedure.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import ROOT, read_all, update_page

QUOTES_VERSION = re.compile(r"It is at (\d+\.\d+\.\d+)\.")  # docs/comparison.md


def find_problems(version: str, root: Path = ROOT) -> list[str]:
    """Return what has to change in the tree before it can be released as `version`."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"a version is three numbers, such as 0.2.0, but is {version!r}"]
    problems = []
    package = re.search(r'^__version__ = "(.+)"', _read(root, "src/regard/__init__.py"), re.M)
    if package is None or package[1] != version:
        problems.append(f"src/regard/__init__.py: __version__ is {package and package[1]}, set it to {version}")
    heading = re.search(r"^## (.+)", _read(root, "CHANGELOG.md"), re.M)
    if heading is None or not re.fullmatch(re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", heading[1]):
        problems.append(f"CHANGELOG.md begins with {heading and heading[1]!r}, rename it to '{version} (YYYY-MM-DD)'")
    report = _read(root, "docs/benchmarks.md")
    if f"regard {version} " not in report:
        problems.append(f"docs/benchmarks.md is not of {version}: run make bench on a quiet machine")
    figures = read_all(root)
    for page in sorted([*root.glob("README*.md"), *(root / "docs").rglob("*.md")]):
        text, name = page.read_text("utf-8"), page.relative_to(root)
        try:
            if update_page(text, figures) != text:
                problems.append(f"{name} quotes other figures than those measured: run python -m benchmarks.figures")
        except KeyError as error:
            problems.append(f"{name} quotes {error}, which was not measured")
        if (quoted := QUOTES_VERSION.search(text)) and quoted[1] != version:
            problems.append(f"{name} says that this is {quoted[1]}")
    return problems


def _read(root: Path, name: str) -> str:
    return (root / name).read_text("utf-8")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m tools.release VERSION\n{__doc__}")
    problems = find_problems(sys.argv[1])
    if subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, cwd=ROOT).stdout:
        problems.append("there are uncommitted changes: commit or remove them")
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print(f"ready: git tag v{sys.argv[1]}")


if __name__ == "__main__":
    main()
