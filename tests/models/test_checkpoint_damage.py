"""Checkpoints whose files were changed: each loads, or is one clear error, in little time and memory."""

from __future__ import annotations

from pathlib import Path

from tests import damaged
from tests.models import theirs as t

FAMILIES = (
    "bert-sequence", "roberta-mlm", "distilbert", "albert-mlm", "gpt2", "llama-yarn", "mistral", "qwen2-window",
    "gemma2", "t5", "marian", "vit-classifier", "detr", "whisper", "wav2vec2",
)  # fmt: skip


def test_every_change_to_a_checkpoint_loads_or_is_one_error(tmp_path: Path) -> None:
    folders = [t.stored(name, tmp_path / name) for name in FAMILIES]
    assert damaged.run("checkpoint", folders, every=25) == []
