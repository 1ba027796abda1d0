"""Assemblies of modules: text, language, translation, vision, detection."""

from regard.models.checkpoints import load, save, tokenizer
from regard.models.copying import PointerTransformer
from regard.models.detection import Detr, DetrConfig
from regard.models.language import LanguageConfig, LanguageModel
from regard.models.matching import Objects, SetLoss
from regard.models.resnet import RESNETS, ResNet, ResNetConfig
from regard.models.text import (
    MaskedLanguageModel,
    QuestionAnswering,
    SentenceEmbedder,
    SequenceClassifier,
    TextConfig,
    TextEncoder,
    TokenClassifier,
)
from regard.models.translation import Transformer, TransformerConfig
from regard.models.vision import ImageClassifier, VisionConfig, VisionTransformer

__all__ = [
    "Detr",
    "DetrConfig",
    "ImageClassifier",
    "LanguageConfig",
    "LanguageModel",
    "MaskedLanguageModel",
    "Objects",
    "PointerTransformer",
    "QuestionAnswering",
    "RESNETS",
    "ResNet",
    "ResNetConfig",
    "SentenceEmbedder",
    "SequenceClassifier",
    "SetLoss",
    "TextConfig",
    "TextEncoder",
    "TokenClassifier",
    "load",
    "save",
    "tokenizer",
    "Transformer",
    "TransformerConfig",
    "VisionConfig",
    "VisionTransformer",
]
