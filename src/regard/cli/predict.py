"""`regard predict` and `regard export`: a run in use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.console import print_bad_rows, print_json, print_line, print_message
from regard.cli.inputs import pair_predictions, read_inputs, with_context
from regard.cli.options import Context, Json, RunFolder, SkipBad
from regard.errors import BadRows
from regard.files import check_writable, write_atomically, write_text_atomically
from regard.printable import printable
from regard.progress import stage
from regard.tasks import Run, UserError
from regard.training.export import export as export_run
from regard.training.task import Prediction

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
    file_format: Annotated[
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
    suffix = SUFFIXES.get(run.task.output_kind, "")
    if suffix and out is None:
        raise UserError(f"{run.task.name} makes files; say where to: --out said{suffix}")
    if out is not None and not suffix and out.suffix != ".json":
        raise UserError(f"{out}: what {run.task.name} says is written as JSON; name it {out.stem}.json")
    bad = BadRows(skip=skip_bad)
    with stage("reading inputs"):
        rows = [with_context(row, context) for row in read_inputs(run.task, inputs or [], bad, file_format)]
    if not any(row.values for row in rows):
        raise UserError('nothing to predict; give texts or files: regard predict RUN "..."')
    if out is not None:
        one = not suffix or (out.suffix == suffix and len(rows) == 1)
        check_writable(out if one else out / f"0001{suffix}", parents=bool(suffix))
    model, _ = run.model(frozen=True)
    asked = [row for row in rows if row.values]
    predictions = _reported(
        run.task.predict(model, run.processor, asked, bad), f"predicting {len(asked):,} inputs", out
    )
    if out is not None and not suffix:
        answers = {prediction.more.get("id", prediction.input): prediction.output for prediction in predictions}
        write_text_atomically(out, json.dumps(answers, indent=1, ensure_ascii=False))
        print_message(f"{out}: {len(answers)} answers")
        print_bad_rows(bad)
        return
    for n, (row, prediction) in enumerate(pair_predictions(rows, iter(predictions)), 1):
        if prediction is None:
            given = " ".join(map(str, row.values[:1]))
            if as_json:
                print_json({"input": given, "output": None, "score": None}, indent=None)
            else:
                print_line("")
            continue
        where = prediction.input if run.task.input_kind != "text" else ""
        more = dict(prediction.more)
        if out is not None:
            path = out if out.suffix == suffix and len(rows) == 1 else out / f"{n:04}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, partial(Path.write_bytes, data=prediction.file))
            where = more["file"] = str(path)
        if as_json:
            record = {"input": prediction.input, "output": prediction.output, "score": prediction.score}
            print_json(record | more, indent=None)
        else:
            cells = (prediction.output, f"{prediction.score:.3f}", *filter(None, (where, prediction.note)))
            print_line("\t".join(map(printable, cells)))  # line n is the output of input n
    print_bad_rows(bad)


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
