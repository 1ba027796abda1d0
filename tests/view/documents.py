"""Documents from random queries and keys with known weights, so that every number of a page can be checked."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard as rg
from regard.view.captured_attention import Window
from regard.view.digits import encode

MARKUP = ["<script>alert(1)</script>", "</script>", "<img src=x onerror=alert(1)>"]
HOSTILE = [*MARKUP, "\u202eabc", "\u200f", "", " ", "\n"]


@dataclass
class Sample:
    """A document, and the weights (heads, Q, K) of each of its attentions."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def window(
        self, attention: str, head: int, rows: tuple, columns: tuple, size: tuple, *, scaled: bool = False
    ) -> Window:
        """Return what a record returns: means over the bands of torch's adaptive pooling."""
        part = self.weights[attention][head, rows[0] : rows[1], columns[0] : columns[1]]
        result = pooled(part[None], size)[0].numpy()
        edges = [
            np.array([[n * size // count, -(-(n + 1) * size // count)] for n in range(count)])
            for size, count in zip(part.shape, result.shape, strict=True)
        ]
        return Window(result, rows[0] + edges[0], columns[0] + edges[1])


def empty_document(title: str, **streams: list[str]) -> Sample:
    about = {
        "format": "regard.view/2", "title": title, "note": "", "image": None, "spectrogram": None, "rollout": None,
        "streams": {name: {"tokens": tokens, "special": [0]} for name, tokens in streams.items()}, "attentions": [],
    }  # fmt: skip
    return Sample(about)


def pooled(weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Pool (heads, Q, K) to (heads, *size), as means over bands."""
    size = (min(size[0], weights.shape[1]), min(size[1], weights.shape[2]))
    return torch.nn.functional.adaptive_avg_pool2d(weights, size)


def add(
    document: Sample, kind: str, layer: int, queries: str, keys: str, *, heads: int = 4, side: int = 4096,
    tops: int = 6, tops_of: int | None = None, patterns: tuple[tuple[int, str, float], ...] = (),
    sharpness: float = 2.0, width: int = 16, features: Tensor | None = None,
) -> None:  # fmt: skip
    """Add an attention with random queries and keys, or those of features, with maps pooled to side x side."""
    about = document.about
    Q, K = (len(about["streams"][name]["tokens"]) for name in (queries, keys))
    number = str(len(about["attentions"]))
    torch.manual_seed(int(number))
    q, k = sharpness * torch.randn(1, heads, Q, width), torch.randn(1, heads, K, width)
    if features is not None:  # (Q, n): similar tokens attend to each other, in a different projection per head
        q = k = features.float() @ torch.randn(heads, features.shape[1], width) * sharpness
        q, k = q[None], k[None]
    attend = rg.Attention(mask=rg.causal() if kind == "decoder" else None)
    statistics = attend.statistics(q, k, top=min(tops, K), mass_on=[0])
    if side >= max(Q, K):
        maps = attend.weights(q, k)[0]
        document.weights[number] = maps
    else:
        size = (min(side, Q), min(side, K))
        maps = attend.map(q, k, size=size)[0]
        if Q * K <= 1 << 20:
            document.weights[number] = attend.weights(q, k)[0]
    rows = torch.arange(Q) if tops_of is None else ((torch.arange(tops_of) + 0.5) * Q / tops_of).long()
    curves = {
        "entropy": statistics.entropy[0], "distance": statistics.distance[0], "max_logit": statistics.max_logit[0],
        "first": statistics.mass[0],
    }  # fmt: skip
    if kind == "cross":
        del curves["distance"]
    step = max(1, Q // 1024)

    def put(name: str, tensor: Tensor, dtype: str = "float16") -> str:
        array = tensor.numpy()
        document.arrays[f"{number}-{name}"] = encode(array) if dtype == "weights" else array.astype(dtype)
        return f"{number}-{name}"

    about["attentions"].append(
        {
            "id": number, "name": f"{kind}.layers.{layer}.attention", "layer": layer, "kind": kind, "queries": queries,
            "keys": keys, "heads": list(range(heads)), "formula": repr(attend), "Q": Q, "K": K,
            "maps": put("maps", maps, "weights"), "exact": tuple(maps.shape[1:]) == (Q, K),
            "top_keys": put("top_keys", statistics.top_keys[0][:, rows], "uint16"),
            "top_weights": put("top_weights", statistics.top_weights[0][:, rows], "weights"),
            "top_rows": None if tops_of is None else put("top_rows", rows, "int32"),
            "statistics": {name: put(name, curve[:, ::step]) for name, curve in curves.items()},
            "means": {
                {"first": "sink"}.get(name, name): [round(float(mean), 5) for mean in curve.mean(-1)]
                for name, curve in curves.items()
            },
            "found": [{"head": head, "name": name, "score": score} for head, name, score in patterns],
        }
    )  # fmt: skip


def translation() -> Sample:
    """A document with encoder, decoder, cross-attention, rollout, and tokens that contain markup."""
    source = ["<s>", "The", " small", " cat", " sat", " on", " the", " mat", ".", *HOSTILE, "</s>"]
    target = ["<s>", "Le", " petit", " chat", " était", " assis", " sur", " le", " tapis", "."]
    document = empty_document("The small cat <b>sat</b>", source=source, target=target)
    document.about["note"] = "Le petit chat était assis </script><script>alert(2)</script>"
    for layer in range(3):
        roles = ((1, "previous token", 0.97), (2, "induction", 0.61)) if layer == 1 else ()
        add(document, "encoder", layer, "source", "source", patterns=roles)
    for layer in range(2):
        add(document, "decoder", layer, "target", "target")
        add(document, "cross", layer, "target", "source", patterns=((0, "first token", 0.8),))
    N, layers = len(source), torch.eye(len(source))
    patterns = []
    for number in range(3):
        layers = (0.5 * document.weights[str(number)].mean(0) + 0.5 * torch.eye(N)) @ layers
        patterns.append(layers)
    document.weights["rollout"] = torch.stack(patterns)
    document.arrays["rollout-layers"] = encode(document.weights["rollout"].numpy())
    document.arrays["rollout"] = document.arrays["rollout-layers"][-1]
    document.about["rollout"] = {
        "stream": "source", "kind": "encoder", "map": "rollout", "layers": "rollout-layers", "exact": True,
    }  # fmt: skip
    return document


def picture(rows: int = 6, columns: int = 8) -> Sample:
    """A document of image patches after a class token."""
    tokens = ["[CLS]"] + [f"patch {n}" for n in range(rows * columns)]
    document = empty_document("A picture", patches=tokens)
    y, x = np.mgrid[0 : 32 * rows, 0 : 32 * columns]
    sky = np.stack([90 + 60 * y / y.max(), 140 + 50 * y / y.max(), 220 - 30 * y / y.max()], -1)
    sun = ((x - 24 * columns) ** 2 + (y - 9 * rows) ** 2 < (4 * rows) ** 2)[..., None]
    hill = (y > 22 * rows + 3 * rows * np.sin(x / 30))[..., None]
    image = np.where(hill, [70, 120, 80], np.where(sun, [250, 220, 120], sky))
    document.about["image"] = {"stream": "patches", "href": png(image), "grid": [rows, columns], "first": 1}
    patches = image.reshape(rows, 32, columns, 32, 3).mean((1, 3)).reshape(-1, 3) / 128 - 1
    place = np.mgrid[0:rows, 0:columns].reshape(2, -1).T / max(rows, columns) - 0.5
    features = torch.from_numpy(np.concatenate([np.zeros((1, 5)), np.concatenate([patches, 0.6 * place], 1)]))
    for layer in range(2):
        add(document, "encoder", layer, "patches", "patches", features=features, sharpness=1.6)
    return document


def sound(frames: int = 60) -> Sample:
    """A document of a spectrogram, with self-attention over its time slots and cross-attention of words."""
    words = ["<s>", "one", " two", " three", "</s>"]
    document = empty_document("A sound", audio=[f"{n}" for n in range(frames)], words=words)
    t, f = np.meshgrid(np.linspace(0, 1, 6 * frames), np.linspace(1, 0, 80))
    energy = sum(np.exp(-((f - 0.15 * n - 0.08 * np.sin(9 * t + n)) ** 2) / 0.0012) / n for n in range(1, 6))
    energy = energy * (0.35 + 0.65 * np.sin(14 * t) ** 2)
    image = np.stack([40 + 215 * energy**0.8, 20 + 160 * energy**1.4, 70 + 60 * energy], -1).clip(0, 255)
    document.about["spectrogram"] = {"stream": "audio", "href": png(image), "frames": frames, "seconds": 2.4}
    add(document, "encoder", 0, "audio", "audio")
    add(document, "cross", 0, "words", "audio")
    return document


def even(tokens: int) -> Sample:
    """A document with uniform attention."""
    document = empty_document("Even", words=[f"w{n}" for n in range(tokens)])
    add(document, "encoder", 0, "words", "words", heads=1, sharpness=0.0)
    return document


def long(tokens: int, layers: int, heads: int, *, side: int, tops: int, tops_of: int | None = None) -> Sample:
    """A document of many heads and tokens, with pooled maps and without single weights."""
    words = ["the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on"]
    document = empty_document(f"{tokens} tokens", source=[f" {words[n * n % len(words)]}" for n in range(tokens)])
    for layer in range(layers):
        add(document, "encoder", layer, "source", "source", heads=heads, side=side, tops=tops, tops_of=tops_of)
    return document


def png(image: np.ndarray) -> str:
    import matplotlib.image

    file = io.BytesIO()
    matplotlib.image.imsave(file, image.astype("uint8"))
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
