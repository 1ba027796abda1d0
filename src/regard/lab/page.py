"""The page of the lab: one file, no scripts, nothing fetched."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.lab.claim import Result, Text, Verdict
from regard.lab.draw import svg
from regard.lab.theory import THEMES

WORDS = {
    "title": Text("The theory of attention, measured", "注意力理论的实测"),
    "lead": Text(
        "What the books say of attention, one claim at a time: the formula, what a measurement finds, a picture, and a "
        "verdict that was computed from the numbers. The code that is shown is the code that ran.",
        "书上关于注意力的说法，逐条检验：公式、实测结果、图，以及由数值计算得出的结论。页面上的代码就是实际运行的代码。",
    ),
    "contents": Text("Contents", "目录"),
    "code": Text("The code that measured it", "测量所用的代码"),
    "foot": Text(
        "Made by “regard lab”. Times are the least processor time of several runs on one core, and powers are "
        "least-squares fits with 95% intervals.",
        "由 “regard lab” 生成。时间取单核上多次运行中最短的处理器时间；幂次由最小二乘拟合得到，并附 95% 区间。",
    ),
}
ABOUT = Text(
    "{claims} claims, {seconds:.0f} seconds of processor time; seed {seed}; torch {torch}, Python {python}, {machine}.",
    "{claims} 条说法，共用处理器时间 {seconds:.0f} 秒；随机种子 {seed}；torch {torch}，Python {python}，{machine}。",
)


def page(results: Sequence[Result], language: str = "en") -> str:
    """The results as a page in a language."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    shelf = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    themes = []
    for name, title in THEMES.items():
        items = [_item(result, language) for result in results if result.claim.theme == name]
        if items:
            themes.append({"name": name, "title": title.render(language), "results": items})
    said = {
        "claims": len(results), "seconds": sum(result.cpu_seconds for result in results),
        "seed": results[0].seed if results else 0, "torch": torch.__version__, "python": platform.python_version(),
        "machine": platform.machine(),
    }  # fmt: skip
    tally = [
        (verdict.name.lower(), verdict.text.render(language), sum(result.verdict is verdict for result in results))
        for verdict in Verdict
    ]
    return shelf.get_template("page.html").render(
        language=language, themes=themes, tally=tally, about=ABOUT.render(language, said),
        words={name: text.render(language) for name, text in WORDS.items()},
    )  # fmt: skip


def _item(result: Result, language: str) -> dict[str, Any]:
    from markupsafe import Markup

    claim = result.claim
    return {
        "name": claim.name,
        "kind": result.verdict.name.lower(),
        "verdict": result.verdict.text.render(language),
        "title": claim.title.render(language),
        "says": claim.says.render(language),
        "finding": raised(claim.finding.render(language, result.found)),
        "caption": claim.caption.render(language),
        # what follows was made by libraries that escape for themselves
        "formula": Markup(mathml(claim.formula)),
        "picture": Markup(svg(claim, result.found, language)),
        "code": Markup(_highlighted(claim.code(result.seed))),
    }


def raised(text: str) -> Any:
    """Text with its powers set as powers.

    >>> from regard.lab.page import raised
    >>> raised("a < n^1.25")
    Markup('a &lt; n<sup>1.25</sup>')
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\b([a-z])\^(-?\d+(?:\.\d+)?)", r"\1<sup>\2</sup>", str(escape(text))))


def mathml(formula: str) -> str:
    """A formula of LaTeX as MathML, which browsers draw by themselves.

    >>> from regard.lab.page import mathml
    >>> mathml("x^2")[:5]
    '<math'
    """
    from latex2mathml.converter import convert

    return convert(formula, display="block")


def _highlighted(code: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
