"""`regard predict` and `regard export`: a run in use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.inputs import asked, with_context
from regard.cli.options import Context, Json, RunFolder, SkipBad
from regard.cli.terminal import tell, tell_bad
from regard.files import whole, whole_text
from regard.tasks import Run, Trouble
from regard.tasks.export import export as export_run
from regard.tasks.trouble import Bad

SUFFIXES = {"audio": ".wav"}  # of the files that tasks make


def predict(
    folder: RunFolder,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, files of a text a line, images or sounds; none reads standard input."),
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
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """What a run's model says, and how sure it is.

    regard predict runs/reviews "What a film!"
    regard predict runs/reviews reviews.txt
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
    rows = [with_context(row, context) for row in asked(run.task, inputs or [], bad)]
    if not rows:
        raise Trouble('nothing to predict; give texts or files: regard predict RUN "..."')
    model, _ = run.model(frozen=True)
    said = run.task.predict(model, run.kit, rows, bad)
    if out is not None and not suffix:
        answers = {made.more.get("id", made.input): made.output for made in said}
        whole_text(out, json.dumps(answers, indent=1, ensure_ascii=False))
        tell(f"{out}: {len(answers)} answers")
    for n, made in enumerate(said, 1):
        where = made.input if run.task.takes != "text" else ""
        more = dict(made.more)
        if out is not None:
            path = out if out.suffix == suffix and len(rows) == 1 else out / f"{n:04}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            whole(path, partial(Path.write_bytes, data=made.file))
            where = more["file"] = str(path)
        if as_json:
            told_of = {"input": made.input, "output": made.output, "score": made.score}
            print(json.dumps(told_of | more, ensure_ascii=False))
        else:
            print("\t".join((made.output, f"{made.score:.3f}", *filter(None, (where, made.note)))))
    tell_bad(bad)


def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; it must be empty or new.")],
    onnx: Annotated[bool, typer.Option(help="Also write model.onnx, where the model allows it.")] = True,
) -> None:
    """A run as one folder for others: safetensors, config, tokenizer, ONNX.

    regard export runs/reviews reviews-model
    """
    for note in export_run(Run.open(folder), out, onnx=onnx):
        print(f"{out}: {note}")
