"""`regard predict` and `regard export`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from regard.cli.console import print_bad_rows, print_json, print_line, print_message
from regard.cli.inputs import pair_predictions, read_inputs, with_context
from regard.errors import BadRows
from regard.files import check_writable, write_atomically, write_text_atomically
from regard.printable import printable
from regard.progress import stage
from regard.tasks import Run, UserError
from regard.training.export import export as export_run
from regard.training.task import Prediction

SUFFIXES = {"audio": ".wav"}  # by kind of output


def predict(
    folder: Path, inputs: list[str] | None, out: Path | None, context: Path | None, file_format: str, skip_bad: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Print one line of output and score per input, or write `out`."""
    run = Run.open(folder)
    suffix = SUFFIXES.get(run.task.output_kind, "")
    if suffix and out is None:
        raise UserError(f"{run.task.name} writes files; give a path, such as --out speech{suffix}")
    if out is not None and not suffix and out.suffix != ".json":
        raise UserError(f"{out}: the outputs of {run.task.name} are written as JSON; name the file {out.stem}.json")
    bad = BadRows(skip=skip_bad)
    with stage("reading inputs"):
        rows = [with_context(row, context) for row in read_inputs(run.task, inputs or [], bad, file_format)]
    if not any(row.values for row in rows):
        raise UserError('nothing to predict; give texts or files: regard predict RUN "..."')
    if out is not None:
        one = not suffix or (out.suffix == suffix and len(rows) == 1)
        check_writable(out if one else out / f"0001{suffix}", parents=bool(suffix))
    model, _ = run.model(frozen=True)
    nonempty = [row for row in rows if row.values]
    predictions = _reported(
        run.task.predict(model, run.processor, nonempty, bad), f"predicting {len(nonempty):,} inputs", out
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
            print_line("\t".join(map(printable, cells)))  # line n belongs to input n
    print_bad_rows(bad)


def _reported(predictions: Iterator[Prediction], label: str, out: Path | None) -> Iterator[Prediction]:
    """Yield the predictions within a stage. If they are printed on a terminal, the stage ends with the first one."""
    if out is None and sys.stdout.isatty():
        with stage(label):
            first = next(predictions, None)
        if first is not None:
            yield first
            yield from predictions
    else:
        with stage(label):
            yield from predictions


def export(folder: Path, out: Path, onnx: bool) -> None:
    """Export a run as one folder and print the files written."""
    for note in export_run(Run.open(folder), out, onnx=onnx):
        print_line(f"{out}: {note}")
