"""Models for text, translation, vision, detection, speech, recommendation, sets and graphs; checkpoints."""

from regard.models.boxes import Objects, SetLoss
from regard.models.checkpoints import load, save, tokenizer
from regard.models.detection import Detr, DetrConfig
from regard.models.dual_encoder import DualEncoder, DualEncoderConfig
from regard.models.graph import GraphConfig, NodeClassifier
from regard.models.language import DeltaSizes, LanguageConfig, LanguageModel, LatentSizes
from regard.models.match import ImageTextMatcher, MatchConfig
from regard.models.pointer import PointerTransformer
from regard.models.recommend import Recommender
from regard.models.resnet import RESNETS, ResNet, ResNetConfig
from regard.models.sets import SetConfig, SetTransformer
from regard.models.speech_recognition import SpeechConfig, SpeechRecognizer
from regard.models.speech_synthesis import SpeechSynthesizer, SpeechSynthesizerConfig
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
from regard.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from regard.models.whisper import Whisper, WhisperConfig

__all__ = [
    "DeltaSizes",
    "Detr",
    "DetrConfig",
    "DualEncoder",
    "DualEncoderConfig",
    "GraphConfig",
    "ImageClassifier",
    "ImageTextMatcher",
    "LanguageConfig",
    "LanguageModel",
    "LatentSizes",
    "MaskedLanguageModel",
    "MatchConfig",
    "NodeClassifier",
    "Objects",
    "PointerTransformer",
    "QuestionAnswering",
    "RESNETS",
    "Recommender",
    "ResNet",
    "ResNetConfig",
    "SentenceEmbedder",
    "SequenceClassifier",
    "SetConfig",
    "SetLoss",
    "SetTransformer",
    "SpeechSynthesizer",
    "SpeechSynthesizerConfig",
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
