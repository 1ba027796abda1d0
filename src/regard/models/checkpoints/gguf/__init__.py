"""GGUF files of llama.cpp, read as checkpoints: weights, configuration and tokenizer."""

from regard.models.checkpoints.gguf.blocks import quantized_weights
from regard.models.checkpoints.gguf.file import GgufFile, is_gguf
from regard.models.checkpoints.gguf.tokenizer import chat_settings, tokenizer
from regard.models.checkpoints.gguf.weights import GgufWeights

__all__ = ["GgufFile", "GgufWeights", "chat_settings", "is_gguf", "quantized_weights", "tokenizer"]
