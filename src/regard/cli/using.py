"""`regard predict` and `regard export`: a run in use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.inputs import inputs_of, matched, with_context
from regard.cli.options import Context, Json, RunFolder, SkipBad
from regard.cli.terminal import print_json, print_line, tell, tell_bad
from regard.files import check_writable, whole, whole_text
from regard.printable import printable
from regard.tasks import Run, Trouble
from regard.tasks.export import export as export_run
from regard.tasks.stages import stage
from regard.tasks.task import Prediction
from regard.tasks.trouble import Bad

SUFFIXES = {"audio": ".wav"}  # of the files that tasks make


def predict(
    folder: RunFolder,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts, images or sounds; or files of them: .csv, .tsv and .jsonl with the columns of the run's data, "
            "or .txt, a text a line. Without any, standard input is read."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The sound to write, or a folder for several; of other tasks {id: output}, as SQuAD has it.",
        ),
    ] = None,
    context: Context = None,
    form: Annotated[
        str, typer.Option("--format", help="Of standard input: txt (unless told otherwise), csv, tsv or jsonl.")
    ] = "",
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """What a run's model says, and how sure it is: one line for each input, in order.

    Tables are read as in training; labels need not be there, and are never read. A blank line of a text, and an input
    that --skip-bad leaves out, give an empty line; with --json, an output of null.

        regard predict runs/reviews "What a film!"
        regard predict runs/reviews reviews.csv
        cat reviews.txt | regard predict runs/reviews --json
        regard predict runs/squad "Who wrote it?" --context article.txt
        regard predict runs/squad dev-v2.0.json --out predictions.json
        regard predict runs/voice "one two" --out said.wav
    """
    run = Run.open(folder)
    suffix = SUFFIXES.get(run.task.makes, "")
    if suffix and out is None:
        raise Trouble(f"{run.task.name} makes files; say where to: --out said{suffix}")
    if out is not None and not suffix and out.suffix != ".json":
        raise Trouble(f"{out}: what {run.task.name} says is written as JSON; name it {out.stem}.json")
    bad = Bad(skip=skip_bad)
    with stage("reading inputs"):
        rows = [with_context(row, context) for row in inputs_of(run.task, inputs or [], bad, form)]
    if not any(row.values for row in rows):
        raise Trouble('nothing to predict; give texts or files: regard predict RUN "..."')
    if out is not None:
        one = not suffix or (out.suffix == suffix and len(rows) == 1)
        check_writable(out if one else out / f"0001{suffix}", parents=bool(suffix))
    model, _ = run.model(frozen=True)
    asked = [row for row in rows if row.values]
    said = _reported(run.task.predict(model, run.kit, asked, bad), f"predicting {len(asked):,} inputs", out)
    if out is not None and not suffix:
        answers = {made.more.get("id", made.input): made.output for made in said}
        whole_text(out, json.dumps(answers, indent=1, ensure_ascii=False))
        tell(f"{out}: {len(answers)} answers")
        tell_bad(bad)
        return
    for n, (row, made) in enumerate(matched(rows, iter(said)), 1):
        if made is None:
            given = " ".join(map(str, row.values[:1]))
            if as_json:
                print_json({"input": given, "output": None, "score": None}, indent=None)
            else:
                print_line("")
            continue
        where = made.input if run.task.takes != "text" else ""
        more = dict(made.more)
        if out is not None:
            path = out if out.suffix == suffix and len(rows) == 1 else out / f"{n:04}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            whole(path, partial(Path.write_bytes, data=made.file))
            where = more["file"] = str(path)
        if as_json:
            told_of = {"input": made.input, "output": made.output, "score": made.score}
            print_json(told_of | more, indent=None)
        else:
            cells = (made.output, f"{made.score:.3f}", *filter(None, (where, made.note)))
            print_line("\t".join(map(printable, cells)))  # line n is the output of input n
    tell_bad(bad)


def _reported(predictions: Iterator[Prediction], label: str, out: Path | None) -> Iterator[Prediction]:
    """The predictions, made within a stage. Where they appear on a terminal, it ends with the first of them."""
    if out is None and sys.stdout.isatty():
        with stage(label):
            first = next(predictions, None)
        if first is not None:
            yield first
            yield from predictions
    else:
        with stage(label):
            yield from predictions


def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; it must be empty or new.")],
    onnx: Annotated[bool, typer.Option(help="Also write model.onnx, where the model allows it.")] = True,
) -> None:
    """A run as one folder for others: safetensors, config, tokenizer, ONNX.

    regard export runs/reviews reviews-model
    """
    for note in export_run(Run.open(folder), out, onnx=onnx):
        print_line(f"{out}: {note}")
