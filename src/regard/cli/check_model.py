"""`regard check --model`: check what the layers of a model see, print the findings, return the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from regard.check.model import Finding, check_model, reports
from regard.check.model.loading import load_model
from regard.check.model.runner import WHOLE
from regard.check.reports import junit as junit_xml
from regard.cli.check_report import FAILED, LINES, NOT_CHECKED, PASSED
from regard.errors import UserError
from regard.files import Unwritable, check_writable, write_text_atomically
from regard.models.checkpoints import gguf, own_format
from regard.printable import printable, printable_json
from regard.progress import stage

DEFAULT = ("eager", "sdpa", "regard")
NAMES = (*DEFAULT, "flex_attention")
OWN = (
    "the check replaces hidden states inside models of Transformers. Give the checkpoint that the model came from, or "
    "--random-weights with a folder that has its config.json; `regard check` tests the attention of regard"
)


def run(
    stdout: Console,
    stderr: Console,
    name: str,
    *,
    implementations: Sequence[str] = (),
    tokens: int | None = None,
    causal: bool | None = None,
    random_weights: bool = False,
    form: str = "table",
    junit: Path | None = None,
) -> int:
    """Check the model that `name` describes, print the findings as `form` and return the exit code."""
    try:
        findings = _findings(name, implementations, tokens, causal, random_weights, junit)
    except (UserError, Unwritable) as error:
        stderr.print(f"[bold red]regard:[/] {escape(printable(error))}", soft_wrap=True)
        return NOT_CHECKED
    if junit is not None:
        write_text_atomically(junit, junit_xml(reports.outcomes(findings)))
    if form == "json":
        print(printable_json(reports.as_json(name, findings), indent=1))
    elif form == "markdown":
        print(printable(reports.markdown(findings), keep=LINES), end="")
    else:
        print_findings(stdout, findings)
    if any(finding.verdict == "failed" for finding in findings):
        return FAILED
    return (
        PASSED if any(finding.verdict == "passed" and finding.layer != WHOLE for finding in findings) else NOT_CHECKED
    )


def _findings(
    name: str,
    implementations: Sequence[str],
    tokens: int | None,
    causal: bool | None,
    random_weights: bool,
    junit: Path | None,
) -> list[Finding]:
    names = ["flex_attention" if each == "flex" else each for each in implementations] or list(DEFAULT)
    if unknown := [each for each in names if each not in NAMES]:
        raise UserError(f"--implementation must be eager, sdpa, flex or regard, but is {unknown[0]}")
    if junit is not None:
        check_writable(junit)
    try:
        import transformers
    except ImportError as error:
        raise UserError("--model needs Transformers: pip install 'regard[transformers]'") from error
    from regard.integrations.transformers import enable

    enable()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if (kind := _own_kind(Path(name))) is not None:
        raise UserError(f"--model: {name} is {kind}, which regard computes itself; {OWN}")
    with stage(f"loading {name}"):
        model, setup = load_model(name, random_weights=random_weights)
    return check_model(model, implementation=names, tokens=tokens, causal=causal, setup=setup)


def _own_kind(path: Path) -> str | None:
    """Return what a model is that only regard loads; None for others."""
    if (path / "run.json").is_file():
        return "a run"
    if gguf.is_gguf(path):
        return "a GGUF file"
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    own = isinstance(values, dict) and values.get("model_type") == own_format.MODEL_TYPE
    return "a checkpoint in the format of regard" if own else None


def print_findings(stdout: Console, findings: Sequence[Finding]) -> None:
    """Print the table, then a program for every row that failed."""
    stdout.print(reports.table(findings))
    for line in reports.lines(findings):
        if line.first.code:
            layer, implementation, scenario, promised, measured, _ = (escape(printable(cell)) for cell in line.cells)
            stdout.print(f"\n[bold red]✗ {layer}, {implementation}, {scenario}[/]", soft_wrap=True)
            stdout.print(f"promised: {promised}; measured: {measured}\n", soft_wrap=True)
            stdout.print(escape(printable(line.first.code, keep=LINES)), soft_wrap=True)
    stdout.print(reports.summary(findings))
