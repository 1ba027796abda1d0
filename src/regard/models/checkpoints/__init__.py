"""Checkpoints: load and save models in the format of Hugging Face's libraries."""

from regard.models.checkpoints.api import load, save, tokenizer

__all__ = ["load", "save", "tokenizer"]
