"""The table of architectures as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

STATUSES = {
    "exact": "all attention modules that were called ran regard; every result is that of `eager`",
    "as sdpa": "the same, but `eager` and `sdpa` differ from each other, and regard gives what `sdpa` gives",
    "warned": "as `exact` or `as sdpa`, and a warning names modules that compute their attention themselves",
    "no attention": "there is no attention module; the results are those of `eager`",
    "refused": "a clear error: the model passes something to its attention that regard does not take",
    "wrong": "some result differs from that of `eager`",
    "failed": "an error where `eager` gives a result",
    "not built": "no tiny model, or no inputs for it, was found by general rules: nothing is known",
}
CHECKS = ("plain", "padding left", "padding right", "generation", "gradient", "attentions")
_HEAD = """# Architectures of Transformers

A tiny random model of every architecture of Transformers {version} (torch {torch}) that general rules can build, in
float32: `attn_implementation="regard"` compared with `"eager"`, and with `"sdpa"` where the two differ.
`make architectures` writes this page.

The checks are a plain forward pass, padding on the left and on the right (compared at real tokens), four tokens of
greedy generation (compared by their logits), the gradient of all parameters, and `output_attentions=True`. A number is
equal if it differs by at most 2e-4 of the largest number of its tensor; a difference that vanishes in float64 is one of
rounding, and is noted. Models that take both text and images are compared on text where that is enough for a forward
pass.

| status | architectures | meaning |
| --- | --- | --- |
"""


def write(path: Path, rows: list[dict]) -> None:
    """Write the page: a count of every status, the architectures that were compared, and those that were not."""
    counts = Counter(row["status"] for row in rows)
    text = _HEAD.format(version=transformers.__version__, torch=torch.__version__.partition("+")[0])
    text += "".join(f"| {status} | {counts[status]} | {STATUSES[status]} |\n" for status in STATUSES)
    text += "\n## Compared\n\n`ran` counts the attention modules that ran regard, of those that the model has.\n\n"
    text += "| architecture | status | ran | checks | notes |\n| --- | --- | --- | --- | --- |\n"
    for row in rows:
        if row["status"] != "not built":
            ran = f"{row.get('computed', 0)} of {row['modules']}" if row.get("modules") else ""
            notes = [*_modules(row.get("missed")), *row["notes"]]
            cells = (f"`{row['architecture']}`", row["status"], ran, _checks(row.get("checks", {})), _cell(notes))
            text += f"| {' | '.join(cells)} |\n"
    text += "\n## Not built\n\n| architecture | reason |\n| --- | --- |\n"
    for row in rows:
        if row["status"] == "not built":
            text += f"| `{row['architecture']}` | {_cell(row['notes'])} |\n"
    path.write_text(text)


def _checks(checks: dict[str, str]) -> str:
    """Return the checks of the model, naming those that are not exact."""
    done = [f"{name}: {checks[name]}" if checks[name] != "exact" else name for name in CHECKS if name in checks]
    return "all" if done == list(CHECKS) else ", ".join(done)


def _modules(missed: Iterable[str] | str | None) -> list[str]:
    return [] if missed in (None, "none") else list(missed or ())


def _cell(notes: list[str]) -> str:
    escaped = (note.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") for note in notes)
    return "; ".join(one.replace("[", "\\[") for one in escaped)
