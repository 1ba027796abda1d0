"""Pretrained text encoders, as a starting point of other tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from regard.data.processor import Processor
from regard.errors import UserError
from regard.models.checkpoints.family import check_config
from regard.models.checkpoints.own_format import from_json, to_json
from regard.models.text import TextConfig, TextEncoder
from regard.training.run_files import name_in_errors
from regard.training.runs import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class EncoderOptions(Protocol):
    """The options of a task that determine its encoder."""

    @property
    def d_model(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def longest(self) -> int: ...


def encoder_config(processor: Processor, shape: EncoderOptions, **more: Any) -> TextConfig:
    """Configuration of a text encoder: that of the pretrained model, if any, or of this shape."""
    if processor.config is not None:
        config = replace(from_json({"is": TextConfig.__name__} | processor.config), dropout=shape.dropout, **more)
        check_config(config)
        return config
    return TextConfig(
        vocabulary=processor.require_tokenizer().get_vocab_size(), d_model=shape.d_model, layers=shape.layers,
        heads=shape.heads,
        d_hidden=4 * shape.d_model, positions=shape.longest, dropout=shape.dropout,
        segments=0, arrangement="pre", eps=1e-5, **more,
    )  # fmt: skip


def load_encoder(start: str) -> tuple[TextEncoder, Tokenizer]:
    """Load the text encoder and tokenizer of a run, or of a checkpoint directory with tokenizer.json."""
    model, tokenizer = load_model(start)
    return get_encoder(model, start), tokenizer


def load_model(start: str) -> tuple[nn.Module, Tokenizer]:
    """Load the model and tokenizer of a run or of a checkpoint directory."""
    folder = Path(start)
    if (folder / "run.json").exists():
        run = Run.open(folder)
        return run.model()[0], run.processor.require_tokenizer()
    if not (folder / "config.json").exists():
        raise UserError(f"{start}: neither a run nor a checkpoint (no run.json or config.json); check --pretrained")
    from regard.models.checkpoints import load
    from regard.models.checkpoints.tokenizers import read_tokenizer

    if not (folder / "tokenizer.json").exists():
        raise UserError(f"{start}: no tokenizer.json next to the checkpoint; copy its tokenizer there")
    with name_in_errors(start, "check --pretrained"):
        tokenizer = read_tokenizer(folder / "tokenizer.json")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return load(folder), tokenizer


def processor_from_pretrained(start: str) -> Processor:
    """Processor of a model that starts from a pretrained encoder."""
    encoder, tokenizer = load_encoder(start)
    return Processor(tokenizer, config=to_json(encoder.config))


def get_encoder(model: nn.Module, start: str) -> TextEncoder:
    """Return the text encoder of a model loaded from `start`."""
    encoder = model if isinstance(model, TextEncoder) else getattr(model, "encoder", None)
    if not isinstance(encoder, TextEncoder):
        raise UserError(
            f"{start}: is a {type(model).__name__}, which has no text encoder; --pretrained takes runs of masked, "
            "classify or embed, and checkpoints like BERT"
        )
    return encoder
