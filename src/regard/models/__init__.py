"""Assemblies of modules: text and language."""

from regard.models.checkpoints import load, save, tokenizer
from regard.models.language import LanguageConfig, LanguageModel
from regard.models.text import (
    MaskedLanguageModel,
    SentenceEmbedder,
    SequenceClassifier,
    TextConfig,
    TextEncoder,
    TokenClassifier,
)

__all__ = [
    "LanguageConfig",
    "LanguageModel",
    "MaskedLanguageModel",
    "SentenceEmbedder",
    "SequenceClassifier",
    "TextConfig",
    "TextEncoder",
    "TokenClassifier",
    "load",
    "save",
    "tokenizer",
]
