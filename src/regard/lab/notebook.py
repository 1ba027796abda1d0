"""Results of the lab as a Jupyter notebook: every claim with its formula, its measurement and its findings."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from regard.lab.claim import Result
from regard.lab.draw import png
from regard.lab.page import WORDS
from regard.lab.theory import THEMES

SHORT = 8  # longer lists are for the picture and not printed


def notebook(results: Sequence[Result], language: str = "en") -> str:
    """Return the results as the text of an .ipynb file."""
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
                f"**{result.verdict.text.render(language)}** — {result.sentence(language)}\n\n"
                + "\n".join(f"- {each.render(language)}" for each in result.judgements)
            )
        )
        shown = (
            "{name: value for name, value in findings.items() if not isinstance(value, list | dict) or len(value) <= 8}"
        )
        cell = v4.new_code_cell(f"{claim.code(result.seed, len(result.samples))}{shown}", execution_count=number)
        cell.outputs = [
            v4.new_output("execute_result", {"text/plain": _short(result)}, execution_count=number),
            v4.new_output(
                "display_data",
                {
                    "image/png": base64.b64encode(png(claim, result.findings, language)).decode(),
                    "text/plain": claim.caption.render(language),
                },
            ),
        ]
        cells.append(cell)
    document = v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, each in enumerate(document.cells):
        each["id"] = f"cell-{number}"  # random ids would make the file irreproducible
    nbformat.validate(document)
    return nbformat.writes(document)


def _short(result: Result) -> str:
    findings = {
        name: value
        for name, value in result.findings.items()
        if not isinstance(value, list | dict) or len(value) <= SHORT
    }
    return json.dumps(findings, indent=1, ensure_ascii=False)
