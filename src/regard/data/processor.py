"""The processor of a run: its tokenizer, labels and settings, saved with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.saved_files import build, name_in_errors, read_object
from regard.errors import UserError
from regard.field_types import check_value, short_repr

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a run, which must not pad or truncate."""
    from regard.models.checkpoints.tokenizers import read_tokenizer

    with name_in_errors(path):
        tokenizer = read_tokenizer(path)
        if tokenizer.padding is not None or tokenizer.truncation is not None:
            raise ValueError("pads or truncates texts, which the tokenizer of a run must not; was it changed?")
    return tokenizer


@dataclass(frozen=True)
class Processor:
    """What a task fits to its data before training, and needs for prediction.

    config: settings of the data, such as the image format, or configuration fields of a pretrained model.
    calibration: values chosen on validation data after training, such as thresholds.
    """

    tokenizer: Tokenizer | None = None
    labels: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    calibration: dict[str, float] | None = None

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise if there is none."""
        if self.tokenizer is None:
            raise UserError("the run has no tokenizer; expected tokenizer.json in its directory")
        return self.tokenizer

    def settings(self) -> dict[str, Any]:
        """Return `config` with lists as tuples, since JSON has no tuples."""
        if self.config is None:
            raise UserError("the run has no config in processor.json; is it complete?")
        return {key: tuple(value) if isinstance(value, list) else value for key, value in self.config.items()}

    def settings_as(self, kind: Any) -> Any:
        """Return `config` as a dataclass, with types checked."""
        return build(kind, self.settings(), "config")

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, if there is one, and processor.json."""
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "processor.json").write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Encode all but the tokenizer as JSON."""
        processor = {"labels": list(self.labels), "config": self.config, "calibration": self.calibration}
        return json.dumps(processor, indent=1, ensure_ascii=False)

    @staticmethod
    def load(folder: Path) -> Processor:
        """Read and check the files that `save` writes."""
        tokenizer = None
        if (folder / "tokenizer.json").exists():
            tokenizer = _load_tokenizer(folder / "tokenizer.json")
        path = folder / "processor.json"
        processor = read_object(path)
        with name_in_errors(path):
            labels, config, calibration = processor.get("labels"), processor.get("config"), processor.get("calibration")
            if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
                raise ValueError(f"labels must be a list of strings, got {short_repr(labels)}")
            if len(set(labels)) != len(labels):
                raise ValueError(f"labels must be distinct, got {short_repr(labels)}")
            check_value("config", config, dict[str, Any] | None)
            check_value("calibration", calibration, dict[str, float] | None)
            rows = (config or {}).get("vocabulary", 0)
            check_value("config.vocabulary", rows, int)
        if tokenizer is not None:
            largest, rows = max(tokenizer.get_vocab().values(), default=-1), max(rows, tokenizer.get_vocab_size())
            if largest >= rows:
                raise UserError(f"{folder / 'tokenizer.json'}: has token id {largest}, but ids must be below {rows}")
        return Processor(tokenizer, tuple(labels), config, calibration)
