"""The `regard` command."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"regard: the command needs {error.name}: pip install 'regard[tasks]'") from error

import torch

from regard.tasks import Recipe, Run, Sources, Task, Trouble, begin, tasks, train
from regard.tasks.data import Row, whole
from regard.tasks.export import export as export_run
from regard.tasks.runs import full, write
from regard.tasks.sources import gather
from regard.tasks.trouble import Bad

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, evaluate and use models of attention.\n\n    regard train translate --data pairs.tsv --out runs/en-fr",
)  # fmt: skip
training = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown",
    help="Train a model of a task on your data.\n\n    regard train classify --data reviews.csv --out runs/reviews",
)  # fmt: skip
app.add_typer(training, name="train")
SUFFIXES = {"audio": ".wav"}  # of the files that tasks make
told = Console(stderr=True, highlight=False)
shown = Console(highlight=False)


class Patient(Console):
    """Goes on in silence when its reader has left, as with `| head`: what is being made is still wanted."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")]
Context = Annotated[Path | None, typer.Option(help="A text file that the inputs are questions about.")]
Lang = Annotated[str, typer.Option(help="Of the page: en or zh.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that --out named.", show_default=False)]


def main() -> None:
    """The command; what the user can mend is told in one line."""
    try:
        app()
    except Trouble as trouble:
        told.print(f"[bold red]regard:[/] {_plain(str(trouble))}", soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        if not full(error) and error.filename is None:
            raise
        told.print(f"[bold red]regard:[/] {_plain(str(error))}", soft_wrap=True)
        sys.exit(1)


@app.command("tasks")
def show_tasks(as_json: Json = False) -> None:
    """What can be trained, and what its data looks like.

    regard tasks
    """
    known = tasks()
    if as_json:
        about = {
            name: {"does": kind.does, "columns": kind.columns, "takes": kind.takes, "example": kind.example}
            for name, kind in known.items()
        }
        print(json.dumps(about, indent=1, ensure_ascii=False))
        return
    table = Table("task", "does", "columns", "a file of it", show_lines=True)
    for name, kind in known.items():
        table.add_row(f"[bold]{name}[/]", kind.does, ", ".join(kind.columns), _plain(kind.example.replace("\t", " → ")))
    shown.print(table)
    shown.print("Data: TSV (→ is a tab), CSV with a header, JSONL or text, also .gz .xz .bz2; or a dataset of the hub.")


@app.command("resume")
def resume(
    folder: RunFolder,
    shard: Annotated[
        str | None, typer.Option(help="What processes share: data or fsdp; as before unless told.")
    ] = None,
    sequence_ranks: Annotated[
        int | None, typer.Option(help="Processes that share one sequence; as before unless told.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run, from its last checkpoint, by any number of processes.

    regard resume runs/reviews
    """
    run = Run.open(folder)
    before = run.recipe
    try:
        run.recipe = replace(
            before, shard=shard or before.shard, sequence_ranks=sequence_ranks or before.sequence_ranks
        )
    except ValueError as error:
        raise Trouble(f"{error}") from error
    _train(run, None, as_json)


@app.command("evaluate")
def evaluate(
    folder: RunFolder,
    data: Annotated[
        list[str] | None, typer.Option(help="Held-out data; that of the run unless told otherwise.")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """How good a run is, beside what simple means reach.

    regard evaluate runs/reviews --data test.csv
    """
    run = Run.open(folder)
    sources = Sources.of(run.about["sources"])
    sources = replace(sources, test=tuple(data or sources.test), skip_bad=skip_bad or sources.skip_bad)
    examples = gather(run.task, sources, run.recipe.seed)
    run.task.items(run.kit, examples.test, examples.bad)  # what cannot be taken is told here, with its place
    _tell_bad(examples.bad)
    _figures(run, examples, as_json, keep=not data)


@app.command("predict")
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
    rows = [_about(row, context) for row in _inputs(run.task, inputs or [], bad)]
    if not rows:
        raise Trouble('nothing to predict; give texts or files: regard predict RUN "..."')
    model, _ = run.model()
    said = run.task.predict(model, run.kit, rows, bad)
    if out is not None and not suffix:
        answers = {made.more.get("id", made.input): made.output for made in said}
        write(out, lambda there: there.write_text(json.dumps(answers, indent=1, ensure_ascii=False)))
        told.print(f"{out}: {len(answers)} answers", soft_wrap=True)
    for n, made in enumerate(said, 1):
        where = made.input if run.task.takes != "text" else ""
        more = dict(made.more)
        if out is not None:
            path = out if out.suffix == suffix and len(rows) == 1 else out / f"{n:04}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, partial(Path.write_bytes, data=made.file))
            where = more["file"] = str(path)
        if as_json:
            told_of = {"input": made.input, "output": made.output, "score": made.score}
            print(json.dumps(told_of | more, ensure_ascii=False))
        else:
            print("\t".join((made.output, f"{made.score:.3f}", *filter(None, (where, made.note)))))
    _tell_bad(bad)


@app.command("export")
def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; it must be empty or new.")],
    onnx: Annotated[bool, typer.Option(help="Also write model.onnx, where the model allows it.")] = True,
) -> None:
    """A run as one folder for others: safetensors, config, tokenizer, ONNX.

    regard export runs/reviews reviews-model
    """
    for note in export_run(Run.open(folder), out, onnx=onnx):
        shown.print(f"{out}: {note}")


@app.command("view")
def view(
    folder: RunFolder,
    text: Annotated[str, typer.Argument(help="What the model is to read; for runs on images or sounds, a path.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("attention.html"),
    context: Context = None,
    lang: Lang = "en",
    as_json: Json = False,
) -> None:
    """The attention of a run's model, or of a checkpoint, over a text: one page that opens in any browser.

    regard view runs/en-fr "I am hungry." -o hungry.html
    """
    _check_lang(lang)
    record = _looker(folder)(_about(Row("the text", (text,)), context).values[0])
    if not out.parent.is_dir():
        raise Trouble(f"{out.parent}: there is no such folder")
    record.save(out, lang)
    if as_json:
        about = {"page": str(out), "note": record.note, "attentions": [repr(seen) for seen in record.attentions]}
        print(json.dumps(about, indent=1, ensure_ascii=False))
    else:
        shown.print(f"{out}: {len(record)} attentions, {out.stat().st_size / 1e6:.1f} MB", soft_wrap=True)


@app.command("serve")
def serve(
    folder: RunFolder,
    text: Annotated[str | None, typer.Argument(help="What is looked at first.")] = None,
    port: Annotated[
        int, typer.Option(help="At 127.0.0.1, which this machine alone can reach.", min=1, max=65535)
    ] = 8765,
    lang: Lang = "en",
) -> None:
    """The viewer at 127.0.0.1, with a text box and every weight within reach; Ctrl-C ends it.

    regard serve runs/en-fr
    """
    _check_lang(lang)
    look = _looker(folder)
    try:
        from regard.view.server import Session
        from regard.view.server import serve as serve_at
    except ImportError as error:
        raise Trouble(f"regard serve needs {error.name}: pip install 'regard[view]'") from error
    if text is None and isinstance(look, _RunLooker) and look.run.task.takes != "text":
        kind = look.run.task.takes
        raise Trouble(f'give the path of an {kind} file first: regard serve {folder} "{kind}.file"')
    first = text or (look.run.task.shown if isinstance(look, _RunLooker) else Task.shown)
    serve_at(Session(look, first), port=port, lang=lang, told=lambda address: told.print(address, soft_wrap=True))


@app.command("info")
def info(as_json: Json = False) -> None:
    """Versions, engines, instruction set and threads: what a bug report needs.

    regard info
    """
    from regard.info import info as about

    found = about()
    print(json.dumps(found, indent=1) if as_json else "\n".join(f"{name:16} {value}" for name, value in found.items()))


@app.command("lab")
def lab(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Claims to measure; all if none.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; lab.html if all claims are measured.")
    ] = None,
    notebook: Annotated[Path | None, typer.Option(help="Also as a Jupyter notebook.")] = None,
    language: Annotated[str, typer.Option("--lang", help="en or zh.")] = "en",
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    show: Annotated[bool, typer.Option("--list", help="Only show what the claims are.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what the theory says of attention, and write a page with formulas, pictures and verdicts.

    regard lab -o lab.html
    regard lab variance saturation
    regard lab --lang zh -o lab.html --notebook lab.ipynb
    """
    from regard.lab import command

    try:
        asked = command.Asked.of(names or [], out, notebook, language, seed)
    except ValueError as error:
        raise Trouble(f"{error}") from error
    if show:
        listed = [{"claim": claim.name, "title": claim.title.told(language)} for claim in asked.claims]
        lines = "\n".join(f"{each['claim']:22} {each['title']}" for each in listed)
        print(json.dumps(listed, indent=1, ensure_ascii=False) if as_json else lines)
        return
    results, patient = [], Patient(highlight=False)
    with told.status("") as status:
        for result in command.measured(asked, lambda line: status.update(line)):
            results.append(result)
            if not as_json:
                patient.print(command.line(result, language))
    if as_json:
        print(json.dumps([result.as_json(language) for result in results], indent=1, ensure_ascii=False))
    for path in command.written(asked, results):
        told.print(f"{path}", soft_wrap=True)


@app.command("check")
def check(
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="package.module:function or a name of --list; the engines of this installation unless given.",
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="PROPERTY", help="Only this property.")] = None,
    names: Annotated[bool, typer.Option("--list", help="What is demanded, and which targets have names.")] = False,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML.")] = None,
) -> None:
    """Whether an attention is one: definition, masks, gradients, dropout, memory.

    Ends with 0 if everything holds, 1 if something does not, 2 if it could not be checked.

    regard check
    regard check --target torch.nn.functional:scaled_dot_product_attention --only nan-leaks
    """
    from regard.check import command

    if names:
        command.listed(shown, as_json)
        return
    form = "json" if as_json else "markdown" if markdown else "table"
    raise typer.Exit(command.run(shown, told, targets or [], only or [], form=form, junit=junit))


@app.command("plan")
def plan(
    model: Annotated[
        str,
        typer.Option(help="A run of language, a checkpoint or its config.json, or layers=12,width=768,heads=12,..."),
    ],
    sequence: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")],
    memory: Annotated[str, typer.Option(help="Of each rank, such as 16GB.")],
    bandwidth: Annotated[
        str | None, typer.Option(help="That a rank sends with, such as 1GB/s or 10Gbit/s; --measure finds it.")
    ] = None,
    flops: Annotated[str | None, typer.Option(help="FLOP/s of a rank in products of matrices, such as 50G.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine: the speeds that are not told.")
    ] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; as many as ranks unless told.")] = None,
    per_machine: Annotated[int, typer.Option("--ranks-per-machine", min=1, help="That share its cores.")] = 1,
    cores: Annotated[int | None, typer.Option(min=1, help="Of a machine; those of this one unless told.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1,
    as_json: Json = False,
) -> None:
    """Which layout to train with on many ranks, and why: memory, FLOPs, bytes moved and seconds of each.

    Ends with 0 if a layout fits, 1 if none does.

    regard plan --model layers=24,width=1024,heads=16,vocabulary=32000 --sequence 131072 --ranks 64 --memory 32GB \
        --bandwidth 10Gbit/s --measure
    """
    import os

    from regard.distributed.command import Plan, amount
    from regard.distributed.cost import Machine, Model
    from regard.distributed.speed import measured, on_the_wire

    if not measure and (flops is None or bandwidth is None):
        raise Trouble("say --flops and --bandwidth, or let this machine be measured: --measure")
    try:
        costs = Model.of(_outline(model))
        machine = Machine(memory=amount("memory", memory), cores=cores or os.cpu_count() or 1, ranks=per_machine)
        machine = replace(machine, threads=threads)
        with told.status("measuring"):
            machine = measured(costs, machine, sequence) if flops is None else machine.told(amount("flops", flops))
            machine = on_the_wire(machine) if bandwidth is None and ranks > 1 else machine
        if bandwidth is not None:
            machine = replace(machine, bandwidth=amount("bandwidth", bandwidth))
        found = Plan.of(costs, machine, sequence=sequence, ranks=ranks, batch=batch or ranks)
    except (ValueError, RuntimeError) as error:
        raise Trouble(f"{error}") from error
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        shown.print(found.table())
        for line in (found.sentence(), *found.reasons()):
            shown.print(line, soft_wrap=True)
    if found.best is None:
        raise typer.Exit(1)


def _outline(model: str) -> Any:
    """The model that `regard plan` is asked about, without its weights."""
    from regard.models import LanguageConfig, LanguageModel
    from regard.nn import Rotary

    path = Path(model)
    if (path / "run.json").exists():
        run = Run.open(path)
        with torch.device("meta"):
            return run.task.model(run.kit)
    if path.exists():
        from regard.models.checkpoints.loading import outline

        return outline(path)
    if "=" not in model:
        raise Trouble(
            f"{model}: there is no such run or checkpoint; or say layers=12,width=768,heads=12,vocabulary=50257"
        )
    values: dict[str, Any] = {}
    kinds = {each.name: str(each.type).removesuffix(" | None") for each in fields(LanguageConfig)}
    kinds = {name: kind for name, kind in kinds.items() if kind in ("int", "bool", "str", "Rotary")}
    for word in model.split(","):
        name, _, value = word.partition("=")
        kind = kinds.get(name)
        if kind is None:
            raise Trouble(f"--model: {name!r} is no part of a language model; parts are {', '.join(kinds)}")
        if kind == "int" and not (value.isdecimal() and int(value)):
            raise Trouble(f"--model: {name} must be a whole number of at least 1, but is {value!r}")
        if kind in ("bool", "Rotary") and value not in ("true", "false"):
            raise Trouble(f"--model: {name} must be true or false, but is {value!r}")
        values[name] = int(value) if kind == "int" else value if kind == "str" else value == "true"
    for name in ("vocabulary", "width", "layers", "heads"):
        if name not in values:
            raise Trouble(f"--model: say {name}=... too")
    values["rotary"] = Rotary() if values.get("rotary") else None
    values.setdefault("hidden", 4 * values["width"])
    with torch.device("meta"):
        return LanguageModel(LanguageConfig(**values))


def _trainer(kind: type[Task]) -> Callable[..., None]:
    """The command that trains a task: its options are the fields of the task and of the recipe."""

    def command(**options: Any) -> None:
        def part(of: Any) -> dict[str, Any]:
            return {each.name: options[each.name] for each in fields(of)}

        held = kind.held if options["held"] is None else options["held"]
        if not options["data"] and kind.data:
            options["data"] = [kind.data]
        data, valid, test = (tuple(options[name] or ()) for name in ("data", "valid", "test"))
        sources = Sources(data, valid, test, held, options["skip_bad"])
        try:
            task, recipe = kind(**part(kind)), Recipe(**part(Recipe))
        except ValueError as error:
            raise Trouble(f"{error}") from error
        run, examples = begin(options["out"], task, recipe, sources)
        _train(run, examples, options["as_json"])

    def option(name: str, annotation: Any, default: Any, help: str, panel: str, *flags: str) -> inspect.Parameter:
        made = typer.Option(*flags, help=help, rich_help_panel=panel)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, made]
        )

    unsaid = f" [default: {kind.data}]" if kind.data else ""
    parameters = [
        option("data", list[str] | None, None, f"Files or a dataset of the hub, to train on.{unsaid}", "Data"),
        option("valid", list[str] | None, None, "Files held out, to choose the best weights by.", "Data"),
        option("test", list[str] | None, None, "Files held out, to tell how good they are; without, --valid.", "Data"),
        option(
            "held",
            int | None,
            None,
            f"Examples of the data held out, where no file is given. [default: {kind.held}]",
            "Data",
        ),
        option("skip_bad", bool, False, "Count bad lines and go on.", "Data", "--skip-bad"),
        option("out", Path, inspect.Parameter.empty, "The folder of the run.", "Data"),
        option("as_json", bool, False, "Print the figures as JSON.", "Data", "--json"),
    ]
    for panel, of, defaults in (("Model", kind, None), ("Training", Recipe, kind.recipe)):
        for each in fields(of):  # type: ignore[arg-type]
            default = each.default if defaults is None else getattr(defaults, each.name)
            words = each.metadata["help"][0].upper() + each.metadata["help"][1:] + "."
            parameters.append(option(each.name, type(default), default, words, panel))
    columns = " and ".join(kind.columns)
    command.__doc__ = f"""{kind.does[0].upper()}{kind.does[1:]}.{f" Data has {columns}." if columns else ""}

        regard train {kind.name} --data FILE --out runs/mine
    """
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


for _name, _kind in tasks().items():
    training.command(_name)(_trainer(_kind))


def _train(run: Run, examples: Any, as_json: bool) -> None:
    """Train to the end, then tell how good it is."""
    from regard.tasks.progress import Bar

    with Bar(told, run) as bar:
        progress = train(run, examples, bar)
    if not bar.main:
        return
    if not progress.done:
        line = f"Stopped and saved at step {progress.step}. Go on with: regard resume {run.folder}"
        told.print(line, soft_wrap=True)  # to be copied
        raise typer.Exit(130)
    if bar.examples is not None:
        _tell_bad(bar.examples.bad)
        _figures(run, bar.examples, as_json)


def _figures(run: Run, examples: Any, as_json: bool, *, keep: bool = True) -> None:
    """Figures of a run beside those of its baselines, kept in run.json too where they are of its own data."""
    model, step = run.model()
    figures = run.task.evaluate(model, run.kit, examples.test)
    baselines = run.task.baselines(run.kit, examples.train, examples.test)
    found = {
        "step": step, "minutes": run.minutes(), "trained_on": len(examples.train), "held_out": len(examples.test),
        "figures": figures, "baselines": baselines,
    }  # fmt: skip
    if keep and not run.shipped:
        run.about["results"] = found
        run.note()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(f"{run.task.name}, {len(examples.test)} held out", f"{run.folder.name} (step {step})", *baselines)
    for name, value in figures.items():
        table.add_row(
            name, f"{value:.4g}", *(f"{each[name]:.4g}" if name in each else "" for each in baselines.values())
        )
    shown.print(table)


def _inputs(task: Task, inputs: list[str], bad: Bad) -> Iterator[Row]:
    """What to predict: arguments, lines of files, or lines of standard input."""
    if task.takes != "text":
        yield from (Row(given, (given,)) for given in inputs)
        return
    if not inputs and not sys.stdin.isatty():
        yield from _lines("standard input", sys.stdin.buffer.read(), bad)
    for n, given in enumerate(inputs, 1):
        path = Path(given)
        if len(given) < 256 and path.is_file():
            own = task.asked(path, bad)
            yield from _lines(given, path.read_bytes(), bad) if own is None else own
        else:
            yield Row(f"input {n}", (given,))


def _about(row: Row, context: Path | None) -> Row:
    """An input, and behind a tab the text of the file that it is about, if there is one."""
    if context is None or len(row.values) > 1:
        return row
    return Row(row.place, (f"{row.values[0]}\t{whole(context).strip()}",))


def _lines(name: str, held: bytes, bad: Bad) -> Iterator[Row]:
    for n, line in enumerate(held.split(b"\n"), 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            bad(f"{name}:{n}: expected UTF-8, but byte 0x{line[error.start]:02x} at {error.start + 1} is not")
            continue
        if text:
            yield Row(f"{name}:{n}", (text,))


class _RunLooker:
    """Predicts as `regard predict` does, and watches: the last that the model computes is what is shown."""

    def __init__(self, folder: Path) -> None:
        self.run = Run.open(folder)
        self.model, _ = self.run.model()

    def __call__(self, text: str) -> Any:
        from regard.view import capture

        bad = Bad(skip=True)
        with capture(self.model) as record:
            made = list(self.run.task.predict(self.model, self.run.kit, [Row("the text", (text,))], bad))
        if not made:
            raise Trouble(bad.first[0] if bad.first else "the model said nothing of it")
        record.title = f"{self.run.task.name}, {self.run.folder.resolve().name}"
        record.note = f"{made[0].output} ({made[0].score:.2f})"
        self.run.task.name_tokens(self.model, self.run.kit, record, made[0])
        return record


def _looker(folder: Path) -> Callable[[str], Any]:
    """From a text to the record of what the model of a run, or of a checkpoint with its tokenizer, makes of it."""
    if (folder / "run.json").exists() or not (folder / "config.json").exists():
        return _RunLooker(folder)
    from regard.models import load, tokenizer
    from regard.view import look_at_image, look_at_text

    try:
        model = load(folder)
        read = None if hasattr(getattr(model, "config", None), "grid") else tokenizer(folder)
    except (OSError, ValueError) as error:
        raise Trouble(f"{folder}: {error}") from error

    def look(given: str) -> Any:
        try:
            return look_at_image(model, given) if read is None else look_at_text(model, read, given)
        except (OSError, ValueError) as error:
            raise Trouble(f"{error}") from error

    return look


def _check_lang(lang: str) -> None:
    if lang not in ("en", "zh"):
        raise Trouble(f"--lang must be en or zh, but is {lang}")


def _tell_bad(bad: Bad) -> None:
    if bad.count:
        told.print(f"[yellow]{bad.count} bad lines left out[/], the first: {_plain(bad.first[0])}", soft_wrap=True)


def _plain(text: str) -> str:
    """Text whose brackets are no markup."""
    return text.replace("[", "\\[")
