"""Assemblies of modules: text, language, translation, vision, detection, speech."""

from regard.models.checkpoints import load, save, tokenizer
from regard.models.detection import Detr, DetrConfig
from regard.models.language import LanguageConfig, LanguageModel
from regard.models.matching import Objects, SetLoss
from regard.models.resnet import RESNETS, ResNet, ResNetConfig
from regard.models.speaking import Speaker, SpeakerConfig
from regard.models.speech import SpeechConfig, SpeechRecognizer
from regard.models.text import (
    MaskedLanguageModel,
    SentenceEmbedder,
    SequenceClassifier,
    TextConfig,
    TextEncoder,
    TokenClassifier,
)
from regard.models.translation import Transformer, TransformerConfig
from regard.models.vision import ImageClassifier, VisionConfig, VisionTransformer
from regard.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from regard.models.whisper import Whisper, WhisperConfig

__all__ = [
    "Detr",
    "DetrConfig",
    "ImageClassifier",
    "LanguageConfig",
    "LanguageModel",
    "MaskedLanguageModel",
    "Objects",
    "RESNETS",
    "ResNet",
    "ResNetConfig",
    "SentenceEmbedder",
    "SequenceClassifier",
    "SetLoss",
    "Speaker",
    "SpeakerConfig",
    "SpeechConfig",
    "SpeechRecognizer",
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
    "Wav2Vec2",
    "Wav2Vec2Config",
    "Whisper",
    "WhisperConfig",
]
