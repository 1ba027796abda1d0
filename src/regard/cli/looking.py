"""`regard view` and `regard serve`: what a model looks at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.inputs import with_context
from regard.cli.options import Context, Json, Lang, RunFolder
from regard.cli.terminal import print_json, print_line, tell
from regard.files import check_writable
from regard.tasks import Run, Task, Trouble
from regard.tasks.data import Row
from regard.tasks.trouble import Bad


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
    check_writable(out)
    record = looker(folder)(with_context(Row("the text", (text,)), context).values[0])
    record.save(out, lang)
    if as_json:
        about = {"page": str(out), "note": record.note, "attentions": [repr(seen) for seen in record.attentions]}
        print_json(about)
    else:
        print_line(f"{out}: {len(record)} attentions, {out.stat().st_size / 1e6:.1f} MB")


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
    try:
        from regard.view.server import Session, listen
        from regard.view.server import serve as serve_at
    except ImportError as error:
        raise Trouble(f"regard serve needs {error.name}: pip install 'regard[view]'") from error
    try:
        listener = listen(port)
    except OSError as error:
        raise Trouble(f"port {port} at 127.0.0.1: {error.strerror}; choose another with --port") from error
    look = looker(folder)
    if text is None and isinstance(look, RunLooker) and look.run.task.takes != "text":
        kind = look.run.task.takes
        raise Trouble(f'give the path of an {kind} file first: regard serve {folder} "{kind}.file"')
    first = text or (look.run.task.shown if isinstance(look, RunLooker) else Task.shown)
    serve_at(Session(look, first), listener, lang=lang, told=tell)


class RunLooker:
    """Predicts as `regard predict` does, and watches: the last that the model computes is what is shown."""

    def __init__(self, folder: Path) -> None:
        self.run = Run.open(folder)
        self.model, _ = self.run.model(frozen=True)

    def __call__(self, text: str) -> Any:
        from regard.view import capture

        bad = Bad(skip=True)
        with capture(self.model) as record:
            made = list(self.run.task.predict(self.model, self.run.kit, [Row("the text", (text,))], bad))
        if not made:
            raise Trouble(bad.first[0] if bad.first else "the model said nothing of it")
        record.title = f"{self.run.task.name}, {self.run.folder.resolve().name}"
        record.text = text
        record.note = f"{made[0].output} ({made[0].score:.2f})"
        self.run.task.name_tokens(self.model, self.run.kit, record, made[0])
        return record


def looker(folder: Path) -> Callable[[str], Any]:
    """From a text to the record of what the model of a run, or of a checkpoint with its tokenizer, makes of it."""
    if (folder / "run.json").exists() or not (folder / "config.json").exists():
        return RunLooker(folder)
    from regard.models import load, tokenizer
    from regard.view import look_at_image, look_at_text

    try:
        model = load(folder, frozen=True)
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
    from regard.view.page import LANGUAGES

    if lang not in LANGUAGES:
        raise Trouble(f"--lang must be {' or '.join(LANGUAGES)}, but is {lang!r}")
