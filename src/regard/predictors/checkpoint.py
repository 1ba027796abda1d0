"""A loaded checkpoint: the model and the files next to its weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.errors import UserError, first_line
from regard.field_types import check_value, short_repr
from regard.models.checkpoints import gguf, load, tokenizer
from regard.models.checkpoints.files import CONFIG, read_json
from regard.models.checkpoints.generation import GenerationSettings, read_generation_settings
from regard.progress import stage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_CONFIG, GENERATION, PREPROCESSOR = (
    "tokenizer_config.json", "generation_config.json", "preprocessor_config.json",
)  # fmt: skip


@contextmanager
def as_user_errors(name: object) -> Iterator[None]:
    """Convert errors about the files of a model to `UserError`s that name it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError) as error:
        message = first_line(error)
        raise UserError(message if message.startswith(str(name)) else f"{name}: {message}") from error


class Checkpoint:
    """A checkpoint: its name as given, its path (a folder or a GGUF file), its model and its settings."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        with as_user_errors(name), stage("loading the model"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # unused weights, such as a pooler, change no prediction
            # The stored blocks of a GGUF file would be packed as they are, and inputs rounded to 8 bits on some CPUs.
            exact = {"weights": "float32"} if gguf.is_gguf(path) else {"frozen": True}
            self.model: nn.Module = load(path, dtype=torch.float32, **exact)
        self.config: dict[str, Any] = self.model.__dict__.get("origin") or {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, without padding and truncation."""
        with as_user_errors(self.name):
            loaded = tokenizer(self.path)
        loaded.no_padding()
        loaded.no_truncation()
        return loaded

    def settings(self, file: str) -> dict[str, Any]:
        """Return the content of a JSON file next to the weights, empty if there is none; GGUF files include two."""
        with as_user_errors(self.name):
            if gguf.is_gguf(self.path):
                return self._gguf_settings if file in (TOKENIZER_CONFIG, GENERATION) else {}
            return read_json(self.path / file) if (self.path / file).exists() else {}

    @cached_property
    def _gguf_settings(self) -> dict[str, Any]:
        return gguf.chat_settings(gguf.GgufFile(self.path))

    def special_token(self, name: str) -> str | None:
        """Return a token of tokenizer_config.json, such as "bos_token": a string, or the content of an object."""
        token = self.settings(TOKENIZER_CONFIG).get(name)
        token = token.get("content") if isinstance(token, dict) else token
        with as_user_errors(self.name):
            check_value(f"{name} of {TOKENIZER_CONFIG}", token, str | None)
        return token

    def labels(self, count: int) -> tuple[str, ...]:
        """Return the names of the classes in config.json, or their numbers."""
        given = self.config.get("id2label") or {}
        names = tuple(str(given.get(str(n), n)) for n in range(count))
        if len(set(names)) != count:
            raise UserError(f"{self.name}: id2label of config.json must have distinct names, got {short_repr(given)}")
        return names

    def class_scores(self, logits: Tensor) -> Tensor:
        """Return the scores of the classes (..., classes), as the pipelines of Transformers compute them.

        They are the outputs themselves of a regression, independent probabilities if an input may have several
        classes or if there is one class, and otherwise probabilities that sum to 1.
        """
        problem = self.config.get("problem_type")
        if problem == "regression":
            return logits.float()
        several = problem == "multi_label_classification" or logits.shape[-1] == 1
        return logits.float().sigmoid() if several else logits.float().softmax(-1)

    def check_one_label(self, count: int) -> None:
        """Raise unless the model gives every input one of several labels."""
        problem = self.config.get("problem_type")
        if problem in ("regression", "multi_label_classification") or count < 2:
            what = problem.replace("_", "-") if problem else "one class"
            raise UserError(
                f"{self.name}: is a model of {what}; regard evaluate measures models that give one of several labels"
            )

    def generation_settings(self, ignored: Collection[str] = ()) -> GenerationSettings:
        """Return how tokens are chosen: as generation_config.json specifies, or config.json of older checkpoints.

        ignored: names of values that the model reads.
        """
        is_newer = gguf.is_gguf(self.path) or (self.path / GENERATION).exists()
        values, file = (self.settings(GENERATION), GENERATION) if is_newer else (self.config, CONFIG)
        values = {name: value for name, value in values.items() if name not in ignored}
        try:
            return read_generation_settings(values, tuple(self.stop_tokens()))
        except ValueError as error:
            raise UserError(f"{self.name}: {file}: {first_line(error)}") from error

    def stop_tokens(self) -> list[int]:
        """Return the tokens that end a text: those of generation_config.json, config.json and the tokenizer."""
        for settings in (self.settings(GENERATION), self.config):
            given = settings.get("eos_token_id")
            if given is not None:
                with as_user_errors(self.name):
                    check_value("eos_token_id", given, int | list[int])
                return given if isinstance(given, list) else [given]
        end = self.special_token("eos_token")
        token = None if end is None else self.tokenizer.token_to_id(end)
        return [] if token is None else [token]
