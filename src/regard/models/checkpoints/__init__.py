"""Checkpoints: models from and to the folders that Hugging Face's libraries read and write."""

from regard.models.checkpoints.calls import load, save, tokenizer

__all__ = ["load", "save", "tokenizer"]
