"""The lab as a Jupyter notebook: every claim with its formula, the code that measured it, and what it found."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from regard.lab.claim import Result
from regard.lab.draw import png
from regard.lab.page import WORDS
from regard.lab.theory import THEMES

SHORT = 8  # lists longer than this are for the picture, not for reading


def notebook(results: Sequence[Result], language: str = "en") -> str:
    """The results as the text of an .ipynb file."""
    import nbformat
    from nbformat import v4

    cells = [v4.new_markdown_cell(f"# {WORDS['title'].render(language)}\n\n{WORDS['lead'].render(language)}")]
    theme = None
    for number, result in enumerate(results, 1):
        claim = result.claim
        if claim.theme != theme:
            theme = claim.theme
            cells.append(v4.new_markdown_cell(f"## {THEMES[theme].render(language)}"))
        cells.append(
            v4.new_markdown_cell(
                f"### {claim.title.render(language)}\n\n{claim.says.render(language)}\n\n$${claim.formula}$$\n\n"
                f"**{result.verdict.text.render(language)}** — {claim.finding.render(language, result.found)}"
            )
        )
        shown = (
            "{name: value for name, value in found.items() if not isinstance(value, list | dict) or len(value) <= 8}"
        )
        cell = v4.new_code_cell(f"{claim.code(result.seed)}{shown}", execution_count=number)
        cell.outputs = [
            v4.new_output("execute_result", {"text/plain": _short(result)}, execution_count=number),
            v4.new_output(
                "display_data",
                {
                    "image/png": base64.b64encode(png(claim, result.found, language)).decode(),
                    "text/plain": claim.caption.render(language),
                },
            ),
        ]
        cells.append(cell)
    made = v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, each in enumerate(made.cells):
        each["id"] = f"cell-{number}"  # so that the same results give the same file
    nbformat.validate(made)
    return nbformat.writes(made)


def _short(result: Result) -> str:
    found = {
        name: value for name, value in result.found.items() if not isinstance(value, list | dict) or len(value) <= SHORT
    }
    return json.dumps(found, indent=1, ensure_ascii=False)
