"""All commands, in the order in which `regard --help` lists them: the order of use.

The first paragraph of a docstring is the summary in `regard --help`. The lines after it are printed as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from regard_cli.paths import check_model, check_run
from regard_cli.tasks import list_tasks
from regard_cli.train import TrainGroup

P = ParamSpec("P")
WRITE, HEAR = "Generated text", "Speech"  # panels of options in the help of `regard predict`

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and continue.")]
Context = Annotated[Path | None, typer.Option(help="A text file that the inputs are questions about.")]
Lang = Annotated[str, typer.Option(help="Language of the page: en or zh.")]
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run directory or an exported model.", show_default=False, callback=check_run),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, an exported or checkpoint folder, a GGUF file, a name on the Hub, or en-fr.",
        show_default=False,
        callback=check_model,
    ),
]


class CommandGroup(TyperGroup):
    """All commands. Typer lists groups last, but `train` is the first step."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: name != "train")


app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True,
    pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, evaluate, use and inspect attention models.\n\n"
    "regard tasks\nregard train translate --data pairs.tsv --out runs/en-fr",
)  # fmt: skip
training = typer.Typer(
    cls=TrainGroup, no_args_is_help=True, rich_markup_mode="rich",
    help="Train a model on your data.\n\nregard train classify --data reviews.csv --out runs/reviews",
)  # fmt: skip
training.callback()(lambda: None)


def with_stages(command: Callable[P, None]) -> Callable[P, None]:
    """Show the progress of a command's stages on standard error."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from regard.cli.stages import reporting_stages

        with reporting_stages():
            command(*args, **kwargs)

    return run


def resume(
    folder: RunFolder,
    shard: Annotated[
        str | None, typer.Option(help="What processes share: data or fsdp.", show_default="as before")
    ] = None,
    sequence_ranks: Annotated[
        int | None, typer.Option(help="Processes that share one sequence.", show_default="as before")
    ] = None,
    as_json: Json = False,
) -> None:
    """Resume a run from its last checkpoint.

    The number of processes may differ from before.

    regard resume runs/reviews
    """
    from regard.cli.train import resume

    resume(folder, shard, sequence_ranks, as_json)


def evaluate(
    model: Model,
    data: Annotated[list[str] | None, typer.Option(help="Test data.", show_default="the test rows of the run")] = None,
    longest: Annotated[
        int | None, typer.Option(help="Maximum tokens or elements of an input.", show_default="as in training")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """Measure a model on test rows; a run is compared with baselines.

    Baselines are trained on the data of the run. If that data is gone, --data
    is measured without baselines. A checkpoint needs --data: a text file for
    language models, a table for others.

    regard evaluate runs/reviews
    regard evaluate runs/reviews --data test.csv
    regard evaluate SmolLM2-135M.gguf --data book.txt
    """
    from regard.cli.evaluate import evaluate

    evaluate(model, data, longest, skip_bad, as_json)


def predict(
    model: Model,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts, or paths of images or sounds; or files of inputs: .csv, .tsv and .jsonl with the columns of "
            "the data, or .txt with one text per line.",
            show_default="standard input",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file to write, or a folder for several: sound, .srt subtitles of speech, .png with the boxes of "
            "objects; for other models a JSON file of {id: output}, the format of SQuAD.",
        ),
    ] = None,
    context: Context = None,
    file_format: Annotated[
        str, typer.Option("--format", help="Format of standard input: txt, csv, tsv or jsonl.", show_default="txt")
    ] = "",
    skip_bad: SkipBad = False,
    as_json: Json = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an output.", show_default="256", rich_help_panel=WRITE)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Sample at this temperature; 0 takes the most likely token.",
            rich_help_panel=WRITE,
            show_default="as generation_config.json, else 0",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Sample from the most likely tokens of this total.", rich_help_panel=WRITE),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.", rich_help_panel=WRITE)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Reply to inputs, or continue them as they are.",
            rich_help_panel=WRITE,
            show_default="--chat if the model has a chat template",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of a chat.", rich_help_panel=WRITE)] = None,
    language: Annotated[
        str | None,
        typer.Option(
            help="Language of the speech, such as en; for M2M100, NLLB and mBART that of the output.",
            rich_help_panel=HEAR,
            show_default="detected",
        ),
    ] = None,
    translate: Annotated[
        bool | None, typer.Option("--translate", help="Translate speech to English.", rich_help_panel=HEAR)
    ] = None,
    timestamps: Annotated[
        bool | None, typer.Option("--timestamps", help="Print when each part is spoken.", rich_help_panel=HEAR)
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Lowest score of a detected object.", show_default="0.7"),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="For CLIP and SigLIP: the labels of images, separated by commas.")
    ] = None,
) -> None:
    """Predict with a model: one line of output and score per input, in order.

    The architecture decides what it does: language models continue a text or
    reply to it, translators translate, embedders compare texts, classifiers and
    masked models give labels with scores, detectors find objects, speech models
    transcribe. Without inputs, at a terminal, it reads them line by line.

    Tables are read as in training; labels may be missing and are never read.
    A blank line, and an input that --skip-bad skips, print an empty line, or
    an output of null with --json.

    regard predict runs/reviews "What a film!"
    regard predict runs/reviews reviews.csv
    cat reviews.txt | regard predict runs/reviews --json
    regard predict runs/squad "Who wrote it?" --context article.txt
    regard predict runs/squad dev-v2.0.json --out predictions.json
    regard predict runs/voice "one two" --out speech.wav
    regard predict SmolLM2-135M.gguf "What is gravity?" --temperature 0.7
    regard predict whisper-base talk.flac --timestamps
    regard predict clip-vit-base-patch32 photo.jpg --labels "a cat,a dog"
    """
    from regard.cli.predict import predict
    from regard.predictors import PredictOptions

    options = PredictOptions(
        max_new_tokens, temperature, top_p, seed, chat, system, language, translate, timestamps, threshold, labels
    )
    predict(model, inputs, out, context, file_format, skip_bad, as_json, options)


def view(
    model: Model,
    text: Annotated[
        str | None, typer.Argument(help="The input of the model: a text, or the path of an image or a sound.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The HTML page to write.", show_default="attention.html or diagram.html"),
    ] = None,
    diagram: Annotated[
        bool, typer.Option("--diagram", help="Draw the architecture of the model instead, as .html or .svg.")
    ] = False,
    context: Context = None,
    lang: Lang = "en",
    as_json: Json = False,
) -> None:
    """Write a page that shows the attention of a model over an input, or its architecture.

    regard view runs/en-fr "I am hungry." -o hungry.html
    regard view SmolLM2-135M.gguf "The cat sat on the mat."
    regard view en-fr --diagram -o en-fr.svg
    """
    from regard.cli.view import view, view_diagram

    if diagram:
        view_diagram(model, text, out or Path("diagram.html"), context, lang, as_json)
    else:
        view(model, text, out or Path("attention.html"), context, lang, as_json)


def serve(
    model: Model,
    text: Annotated[str | None, typer.Argument(help="The first input to show.")] = None,
    port: Annotated[
        int, typer.Option(help="Port at 127.0.0.1, reachable from this machine only.", min=1, max=65535)
    ] = 8765,
    lang: Lang = "en",
    against: Annotated[
        str | None, typer.Option(help="A second model, to compare with in the Experiment view.", metavar="MODEL")
    ] = None,
) -> None:
    """Serve the attention viewer at 127.0.0.1, with a text box; Ctrl-C stops it.

    regard serve runs/en-fr
    """
    from regard.cli.view import serve

    serve(model, text, port, lang, against)


def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write; it must be empty or new.")],
    onnx: Annotated[bool, typer.Option(help="Also write model.onnx, if the model allows it.")] = True,
) -> None:
    """Export a run as one folder: safetensors, config, tokenizer, ONNX.

    regard export runs/reviews reviews-model
    """
    from regard.cli.predict import export

    export(folder, out, onnx)


def info(
    only_version: Annotated[bool, typer.Option("--version", help="Print the version of regard only.")] = False,
    as_json: Json = False,
) -> None:
    """Print versions, engines, instruction set and threads, for bug reports.

    regard info
    """
    if only_version:
        print(version("regard"))
        return
    from regard.cli.info import info

    info(as_json)


def check(
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="package.module:function, or a name that --list prints.",
            show_default="the engines of this installation",
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="PROPERTY", help="Check only this property.")] = None,
    names: Annotated[bool, typer.Option("--list", help="List the properties and the named targets.")] = False,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML.")] = None,
    device: Annotated[str | None, typer.Option(help="Run targets there, as in cuda.", show_default="cpu")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Check what the layers of a model see: a folder of Transformers, or package.module:function that "
            "returns a model."
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="eager, sdpa, flex or regard, for --model.", show_default="eager, sdpa and regard"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Length of the texts, for --model.", show_default="12, or enough for the windows"),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional",
            help="For --model, if the configuration does not say.",
            show_default="from the configuration",
        ),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Read only the configuration of --model, and draw the weights.")
    ] = False,
) -> None:
    """Check an attention function, or what the layers of a model see.

    A function: definition, masks, gradients, dropout, memory. A model: causal
    masks, windows, padding, documents, sinks, cross-attention, cache.

    Exit code: 0 if all properties hold, 1 if one fails, 2 if the check could
    not run.

    regard check
    regard check --target torch.nn.functional:scaled_dot_product_attention
    regard check --target flex --only nan-leaks
    regard check --device cuda
    regard check --model path/to/checkpoint --implementation sdpa
    """
    from regard.cli.check_report import list_properties, run
    from regard.cli.console import stderr, stdout

    form = "json" if as_json else "markdown" if markdown else "table"
    if model is not None:
        if targets or only or names or device:
            raise typer.BadParameter("--model cannot be combined with --target, --only, --list or --device")
        from regard.cli import check_model

        raise typer.Exit(
            check_model.run(
                stdout, stderr, model, implementations=implementation or [], tokens=tokens, causal=causal,
                random_weights=random_weights, form=form, junit=junit,
            )
        )  # fmt: skip
    if implementation or tokens is not None or causal is not None or random_weights:
        raise typer.BadParameter("--implementation, --tokens, --causal and --random-weights need --model")
    if names:
        list_properties(stdout, as_json)
        return
    raise typer.Exit(run(stdout, stderr, targets or [], only or [], form=form, junit=junit, device=device or "cpu"))


def lab(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLAIM]...", help="Claims to measure.", show_default="all claims"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The HTML page to write.", show_default="lab.html if all claims are measured"),
    ] = None,
    notebook: Annotated[Path | None, typer.Option(help="Also write a Jupyter notebook.")] = None,
    language: Annotated[str, typer.Option("--lang", help="Language of the page: en or zh.")] = "en",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")] = 0,
    show: Annotated[bool, typer.Option("--list", help="Only list the claims.")] = False,
    calculator: Annotated[
        bool, typer.Option("--calculator", help="Only write the attention calculator, a page in English and Chinese.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure claims of the theory of attention, and write a page of results.

    The page has formulas, figures and verdicts.

    regard lab -o lab.html
    regard lab variance saturation
    regard lab --lang zh -o lab.html --notebook lab.ipynb
    regard lab --calculator -o calculator.html
    """
    from regard.cli.lab import lab, write_calculator

    if calculator:
        write_calculator(names or [], out or Path("calculator.html"))
        return
    lab(names or [], out, notebook, language, seed, show, as_json)


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A run of the task language, a checkpoint or its config.json, or layers=12,d_model=768,heads=12,..."
        ),
    ],
    sequence: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")],
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes.")],
    memory: Annotated[str, typer.Option(help="Memory per rank, such as 16GB.")],
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth at which a rank sends, such as 1GB/s or 10Gbit/s.", show_default="--measure"),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(help="Matrix-product FLOP/s of a rank, such as 50G.", show_default="--measure"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the speeds that are not given on this machine.")
    ] = False,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step.", show_default="as many as ranks")
    ] = None,
    per_machine: Annotated[
        int, typer.Option("--ranks-per-machine", min=1, help="Ranks that share the cores of one machine.")
    ] = 1,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores per machine.", show_default="those of this machine")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank.")] = 1,
    as_json: Json = False,
) -> None:
    """Recommend how to split the training of a language model over many ranks.

    Prints memory, FLOPs, bytes sent and seconds of every layout. Exit code: 0
    if a layout fits, 1 if none does.

    regard plan --model layers=24,d_model=1024,heads=16,vocabulary=32000 \\
        --sequence 131072 --ranks 64 --memory 32GB --bandwidth 10Gbit/s --measure
    """
    from regard.cli.plan import plan

    plan(
        model, sequence, ranks, memory, bandwidth=bandwidth, flops=flops, measure=measure, batch=batch,
        per_machine=per_machine, cores=cores, threads=threads, as_json=as_json,
    )  # fmt: skip


app.add_typer(training, name="train")
app.command()(with_stages(resume))
app.command()(with_stages(evaluate))
app.command()(with_stages(predict))
app.command()(with_stages(view))
app.command()(with_stages(serve))
app.command()(with_stages(export))
app.command("tasks")(list_tasks)
app.command()(info)
app.command()(with_stages(check))
app.command()(with_stages(lab))
app.command()(with_stages(plan))
