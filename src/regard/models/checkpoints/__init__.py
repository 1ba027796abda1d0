"""Checkpoints: models from and to the folders that Hugging Face's libraries read and write."""

from regard.models.checkpoints.loading import load
from regard.models.checkpoints.saving import save
from regard.models.checkpoints.sentences import tokenizer

__all__ = ["load", "save", "tokenizer"]
