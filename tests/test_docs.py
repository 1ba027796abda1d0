"""Run the documentation: the python blocks of a page in order, and the commands that are quick.

A comment before a block changes how it is handled: `<!-- not run: why -->` leaves it out, and `<!-- run -->` runs
the commands of a block, which are otherwise only parsed.
"""

from __future__ import annotations

import ast
import gc
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.figures import read_all, update_page

ROOT = Path(__file__).parents[1]
GENERATED = {"findings.md"}  # programs that end in the failure of another library
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)(```+|~~~+) *(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)\2 *$", re.M | re.S
)
NOTE = re.compile(r"<!-- *(?P<word>not run|run)(?:: *(?P<why>[^>]*?))? *-->\s*\Z")


@dataclass(frozen=True)
class Fence:
    """A fenced block: language, text, first line, and the note before it."""

    language: str
    text: str
    line: int
    note: str


def fences(text: str) -> Iterator[Fence]:
    for fence in FENCE.finditer(text):
        before = NOTE.search(text[: fence.start()])
        if before and before["word"] == "not run":
            assert before["why"], "a block that is not run must say why: <!-- not run: why -->"
        line = text.count("\n", 0, fence.start("text")) + 1
        yield Fence(fence["language"], fence["text"], line, before["word"] if before else "")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_fences(language: str) -> list[Path]:
    pages = (page for page in PAGES if page.name not in GENERATED)
    return [page for page in pages if any(fence.language == language for fence in fences(page.read_text("utf-8")))]


@pytest.mark.parametrize("page", with_fences("python"), ids=name_of)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of plain text that follows is the expected output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.manual_seed(0)
    module = ModuleType("__page__")
    monkeypatch.setitem(sys.modules, "__page__", module)  # where torch.compile looks for the names of a function
    names = vars(module)
    output: str | None = None
    for fence in fences(page.read_text("utf-8")):
        if fence.language == "text" and output is not None:
            assert output.strip() == fence.text.strip(), f"{page}:{fence.line}: printed\n{output}"
        output = None
        if fence.note == "not run":
            continue
        if fence.language == "python":
            tree = ast.parse(fence.text, filename=str(page))
            ast.increment_lineno(tree, fence.line - 1)
            with redirect_stdout(StringIO()) as printed:
                exec(compile(tree, str(page), "exec", dont_inherit=True), names)
            output = printed.getvalue()
        elif fence.language == "sh" and fence.note == "run":
            output = "".join(run(words) for words in commands(f"```sh\n{fence.text}```"))
    names.clear()
    gc.collect()  # a task defined by a page is registered as long as its class lives


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_those_of_the_command_line(page: Path) -> None:
    for words in commands(page.read_text("utf-8")):
        parse(words)


@pytest.mark.parametrize("page", [page for page in PAGES if "benchmarks.md)" in page.read_text("utf-8")], ids=name_of)
def test_times_and_ratios_are_those_of_the_benchmarks(page: Path) -> None:
    text = page.read_text("utf-8")
    unnamed = re.findall(r"(?<!-->)(?<![\d.])\d+(?:\.\d+)?(?:x| ms)\b", text)
    assert not unnamed, f"{unnamed[0]} does not say which measurement it is: see benchmarks/figures.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_figures_are_those_measured(page: Path) -> None:
    text = page.read_text("utf-8")
    assert update_page(text, read_all()) == text, "the measurements have changed: run `python -m benchmarks.figures`"


@pytest.mark.parametrize("page", [page for page in PAGES if "results.md)" in page.read_text("utf-8")], ids=name_of)
def test_figures_are_those_of_the_results(page: Path) -> None:
    measured = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("benchmarks.md", "results.md"))
    text = re.sub(r"--[\w-]+ \S+", "", page.read_text("utf-8"))  # options of a command are not measurements
    for figure in re.findall(r"\b\d+\.\d\d+\b", text):
        assert figure in measured, f"{figure} is neither in docs/benchmarks.md nor in docs/results.md"


@pytest.mark.parametrize(
    "module",
    ["regard", "regard.nn", "regard.models", "regard.tasks", "regard.view", "regard.check", "regard.distributed"],
)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: [\w.]*\.(\w+)$", pages, re.M)) | {"models", "nn", "pictures"}
    value = import_module(module)
    names = {name for name in value.__all__ if getattr(getattr(value, name), "__doc__", None) and not name.isupper()}
    missing = sorted(names - documented)
    assert not missing, f"{module}: add `::: {module}.{missing[0]}` to a page of docs/api, and so {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_figure_is_left_open(page: Path) -> None:
    assert not re.search(r"@[A-Z]+@", page.read_text("utf-8")), "a placeholder for a figure"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=name_of)
def test_links_of_the_first_pages_lead_somewhere(page: Path) -> None:
    """Links of docs/ are checked by `make docs`."""
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (ROOT / link).exists(), f"{page.name} links to {link}, which is not there"


def test_every_test_that_a_page_names_exists() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8")):
            assert f"def {name}(" in sources, f"{page} names {name}, which is no test"


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe", reason="pip install --group docs")
    spec = spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.plain("What it is.\n\nwidth: of a head,\n    or of all.\n\n>>> 1 + 1\n2\n\nAnd more: this.")
    assert text == (
        "What it is.\n\n- `width`: of a head,\n    or of all.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nAnd more: this."
    )


def test_the_drawing_of_the_walk_is_that_of_the_masks() -> None:
    from examples.tile_walk import draw

    assert (ROOT / "docs/inside/walk.svg").read_text("utf-8") == draw()


def test_the_diagram_of_the_transformer_is_that_of_the_model() -> None:
    import regard as rg
    import regard.view

    sizes: dict[str, Any] = {
        "vocabulary": 13,
        "d_model": 32,
        "layers": 1,
        "heads": 4,
        "d_hidden": 64,
        "start": 11,
        "stop": 12,
    }
    model = rg.models.Transformer(rg.models.TransformerConfig(**sizes))
    for file, name, lang in (("transformer.svg", "From zero", "en"), ("transformer-zh.svg", "从零开始", "zh")):
        assert (ROOT / "docs/view" / file).read_text("utf-8") == rg.view.diagram(model, name=name, lang=lang)


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="No such option"):
        parse(["train", "classify", "--dta", "x.csv", "--out", "run"])
    with pytest.raises(AssertionError, match="there is no command"):
        parse(["trian", "classify"])
    text = "say `regard view run 'a | b' --json` or\n\n    regard info && regard tasks > file     what there is # yes\n"
    assert list(commands(text)) == [["info"], ["tasks"], ["view", "run", "a | b", "--json"]]
    text = "a\n\n<!-- not run: too long -->\n\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n"
    assert [fence.note for fence in fences(text)] == ["not run", ""]


def commands(text: str) -> Iterator[list[str]]:
    """Return the arguments of every `regard` command of a text: lines of blocks, and code in sentences."""
    joined = re.sub(r"\\\n *", " ", text)
    for line in joined.splitlines():
        match = re.match(
            r"^ *(?:\$ )?(?:[\w. /-]*\bpython -m |(?:torchrun|accelerate launch)\b.* -m )?regard ([a-z].*)", line
        )
        if match and (line.startswith((" ", "$")) or _in_fence(joined, line)):
            yield from _commands_of(match[1])
    for code in re.findall(r"(?<!`)`regard ([a-z][^`]+)`(?!`)", text):
        yield from _commands_of(" ".join(code.split()))


def _in_fence(text: str, line: str) -> bool:
    return any(line in fence.text.splitlines() for fence in fences(text))


def _commands_of(line: str) -> Iterator[list[str]]:
    """Return the arguments of each `regard` of a line; two spaces outside quotes start a remark."""
    command = re.match(r"""(?:[^\s"']|"[^"]*"|'[^']*'|\s(?!\s))*""", line)
    assert command
    lexer = shlex.shlex(f"regard {command[0]}", posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("|&;<>"):
            words.append(word)
            continue
        if words[:1] == ["regard"]:
            yield words[1:]
        words = []


def parse(words: list[str]) -> None:
    """Fail unless the command line accepts these arguments."""
    import click
    from typer.main import get_command

    from regard.cli import app

    command: Any = get_command(app)
    left = list(words)
    while hasattr(command, "commands") and left and not left[0].startswith("-"):
        name = left.pop(0)
        assert name in command.commands, f"there is no command `regard {name}` (of `regard {' '.join(words)}`)"
        command = command.commands[name]
    named = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    for word in left:
        option = word.split("=")[0]
        if re.match(r"--?[a-z]", option):
            assert option in named, f"No such option: {option} (of `regard {' '.join(words)}`)"
    if len(left) > 1:  # a command that is only named has no arguments
        try:
            command.make_context("regard", left, resilient_parsing=True)
        except click.UsageError as error:
            pytest.fail(f"`regard {' '.join(words)}`: {error.format_message()}")


def run(words: list[str]) -> str:
    """Run a command in this process and expect success."""
    from typer.testing import CliRunner

    from regard.cli import app

    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (
        f"`regard {shlex.join(words)}` ended with {done.exit_code}: {done.output} {done.exception!r}"
    )
    return done.output
