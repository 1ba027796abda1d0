"""What tasks on text share: encoding with lengths checked, and the parts of a model that was trained before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import nn

from regard.models.checkpoints.family import check_config
from regard.models.text import TextConfig, TextEncoder
from regard.tasks.batches import Ragged
from regard.tasks.data import Row
from regard.tasks.run_files import naming
from regard.tasks.runs import Run
from regard.tasks.task import Kit
from regard.tasks.tokens import BEGIN, END, encode, special
from regard.tasks.trouble import Bad, Trouble

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def encoded(
    tokenizer: Tokenizer, rows: Sequence[Row], column: int, bad: Bad, *, longest: int, cut: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """Ids of one column, between the tokens for begin and end, and which rows they are of (too long ones are bad).

    To cut is to leave out of the middle: a fourth of what fits is the text's beginning, the rest its end, where people
    say what they think.
    """
    begin, end = special(tokenizer, BEGIN, "[CLS]"), special(tokenizer, END, "[SEP]")
    found, kept = [], []
    for n, ids in enumerate(encode(tokenizer, [row.values[column] for row in rows])):
        if len(ids) + 2 > longest:
            if not cut:
                bad(too_long(rows[n].place, len(ids) + 2, longest, " or cut long texts with --cut,"))
                continue
            room = longest - 2
            ids = np.concatenate([ids[: room // 4], ids[len(ids) - (room - room // 4) :]])
        found.append(np.concatenate([[begin], ids, [end]]))
        kept.append(n)
    return found, np.array(kept, np.int64)


def too_long(place: str, tokens: int, longest: int, more: str = "", option: str = "longest") -> str:
    """What is said of a text that the model cannot take."""
    return (
        f"{place}: has {tokens} tokens, but the model takes {longest}; train with --{option} {tokens},{more} shorten it"
    )


class Shape(Protocol):
    """The options of a task that say what its encoder is like."""

    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def longest(self) -> int: ...


def encoder_config(kit: Kit, shape: Shape, **more: Any) -> TextConfig:
    """An encoder of this shape, or that which a pretrained model brought along."""
    if kit.config is not None:
        config = TextConfig(**(kit.settings() | {"dropout": shape.dropout} | more))
        check_config(config)
        return config
    return TextConfig(
        vocabulary=kit.texts().get_vocab_size(), width=shape.width, layers=shape.layers, heads=shape.heads,
        hidden=4 * shape.width, positions=shape.longest, dropout=shape.dropout,
        segments=0, arrangement="pre", eps=1e-5, **more,
    )  # fmt: skip


def pretrained(start: str) -> tuple[TextEncoder, Tokenizer]:
    """The text encoder of a run, or of a checkpoint folder with its tokenizer.json, and its tokenizer."""
    model, tokenizer = loaded(start)
    return encoder_of(model, start), tokenizer


def loaded(start: str) -> tuple[nn.Module, Tokenizer]:
    """The model of a run or of a checkpoint folder, and its tokenizer."""
    folder = Path(start)
    if (folder / "run.json").exists():
        run = Run.open(folder)
        return run.model()[0], run.kit.texts()
    if not (folder / "config.json").exists():
        raise Trouble(f"{start}: holds neither a run nor a checkpoint (run.json or config.json); check --start")
    from regard.models.checkpoints import load
    from regard.models.checkpoints.tokens import read_tokenizer

    if not (folder / "tokenizer.json").exists():
        raise Trouble(f"{start}: there is no tokenizer.json beside the checkpoint; put its tokenizer there")
    with naming(start, "check --start"):
        tokenizer = read_tokenizer(folder / "tokenizer.json")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return load(folder), tokenizer


def started(start: str) -> Kit:
    """The kit of a model that begins with a pretrained encoder."""
    encoder, tokenizer = pretrained(start)
    return Kit(tokenizer, config=json.loads(json.dumps(asdict(encoder.config))))


def encoder_of(model: nn.Module, start: str) -> TextEncoder:
    """The text encoder of a model that was loaded from `start`."""
    found = model if isinstance(model, TextEncoder) else getattr(model, "encoder", None)
    if not isinstance(found, TextEncoder):
        raise Trouble(
            f"{start}: is a {type(model).__name__}, which has no text encoder; --start takes runs of masked, classify "
            "or embed, and checkpoints like BERT"
        )
    return found


class TextItems:
    """Texts and what is to be said of each: a number, or nothing."""

    def __init__(self, ids: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.ids, self.places = Ragged(ids), places
        self.sizes = self.ids.lengths
