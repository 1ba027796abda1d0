"""Checkpoints: models from and to the folders that Hugging Face's libraries read and write."""

from regard.models.checkpoints.api import load, save, tokenizer

__all__ = ["load", "save", "tokenizer"]
