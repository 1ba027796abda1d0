"""The dialogue of `regard predict MODEL` at a terminal: a line of input, then the output of the model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from regard.cli.console import print_error, print_line, print_message, print_piece
from regard.cli.inputs import with_context
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.predictors import Predictor
from regard.predictors.chat import Message
from regard.predictors.language import LanguagePredictor
from regard.printable import printable

PROMPT = "> "


def interact(predictor: Predictor, context: Path | None = None) -> None:
    """Read lines until the end of the input and print an output for each. Ctrl-C stops an output."""
    with suppress(ImportError):  # on Windows
        import readline  # noqa: F401 - editing and history of lines
    chats = isinstance(predictor, LanguagePredictor) and predictor.chats
    about = "a conversation; /new begins another" if chats else "one input per line"
    print_message(f"{predictor.name}: {predictor.kind}, {about}; Ctrl-C stops an output, Ctrl-D ends")
    messages: list[Message] = []
    while True:
        try:
            text = input(PROMPT).strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if text == "/new":
            messages = []
        elif text:
            try:
                if isinstance(predictor, LanguagePredictor):
                    messages = _generate(predictor, text, messages)
                else:
                    _predict(predictor, with_context(Row("the input", (text,)), context))
            except KeyboardInterrupt:
                print()
            except UserError as error:
                print_error(error)


def _generate(predictor: LanguagePredictor, text: str, messages: list[Message]) -> list[Message]:
    """Print the reply to a message or the continuation of a text; return the conversation so far."""
    messages = [*messages, {"role": "user", "content": text}] if messages else predictor.messages(text)
    prompt = predictor.prompt(messages if predictor.chats else text)
    if (problem := predictor.why_too_long(prompt)) is not None:
        raise UserError(f"the conversation {problem}, or begin another with /new" if predictor.chats else problem)
    reply = ""
    try:
        for piece in predictor.pieces(prompt):
            print_piece(piece)
            reply += piece
    except KeyboardInterrupt:
        pass
    print_piece("\n")
    return [*messages, {"role": "assistant", "content": reply}] if predictor.chats else []


def _predict(predictor: Predictor, row: Row) -> None:
    bad = BadRows(skip=True)
    for prediction in predictor.predict([row], bad):
        score = None if prediction.score is None else f"{prediction.score:.3f}"
        print_line("\t".join(map(printable, (prediction.output, *filter(None, (score, prediction.note))))))
    for message in bad.first:
        print_message(message)
