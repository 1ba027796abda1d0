"""Models computed by one process, and by many ranks in `regard.distributed.sequence`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regard as rg
import regard.distributed as rd
from regard.models.detection import Detr, DetrConfig
from regard.models.graph import GraphConfig, NodeClassifier
from regard.models.language import LanguageConfig, LanguageModel
from regard.models.match import ImageTextMatcher, MatchConfig
from regard.models.recommend import Recommender
from regard.models.resnet import ResNetConfig
from regard.models.sets import SetConfig, SetTransformer
from regard.models.speech_recognition import SpeechConfig, SpeechRecognizer
from regard.models.speech_synthesis import SpeechSynthesizer, SpeechSynthesizerConfig
from regard.models.text import MaskedLanguageModel, SentenceEmbedder, SequenceClassifier, TextConfig, TextEncoder
from regard.models.translation import Transformer, TransformerConfig
from regard.models.vision import ImageClassifier, VisionConfig
from regard.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from regard.models.whisper import Whisper, WhisperConfig
from regard.positions import Dynamic

SMALL = {"vocabulary": 30, "d_model": 16, "layers": 2, "heads": 4, "d_hidden": 32}
RESNET = ResNetConfig(stem=8, widths=(8, 16), depths=(1, 1), bottleneck=False)
LLAMA = {"norm": "rms", "gated": True, "bias": False, "kv_heads": 2}
Run = Callable[[nn.Module], Tensor]
MODELS: dict[
    str, tuple[Callable[[], nn.Module], Run, bool]
] = {}  # model, call, whether the result has one row per token
N = 23


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(5))


def mask_of(lengths: list[int], left: bool = False) -> Tensor:
    real = torch.arange(N) < torch.tensor(lengths)[:, None]
    return real.flip(1) if left else real


def model(name: str, make: Callable[[], nn.Module], run: Run, by_token: bool = True) -> None:
    MODELS[name] = make, run, by_token


def language(**options: Any) -> Callable[[], nn.Module]:
    return lambda: LanguageModel(LanguageConfig(**SMALL, **options))


def text(kind: type, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(TextConfig(**SMALL, dropout=0.0, **options))


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def checkpointed() -> nn.Module:
    module = language(rotary=rg.nn.Rotary(), **LLAMA)()
    module.stack.checkpointing = True
    return module


packed = rg.pack([ids(40)[a:b] for a, b in ((0, 9), (9, 25), (25, 40))])
plain = rg.pack([ids(40)[a:b] for a, b in ((0, 20), (20, 40))])
model("gpt", language(), lambda m: m(ids(2, N)))
model("gpt, filled up", language(), lambda m: m(ids(2, N), mask_of([N, 9], left=True)))
model("gpt, packed", language(), lambda m: m(packed))
model("gpt, packed, equal lengths", language(), lambda m: m(plain))
model("bert, packed, equal lengths", text(TextEncoder), lambda m: m(plain))
model("llama", language(rotary=rg.nn.Rotary(), windows=(5, None), **LLAMA), lambda m: m(ids(2, N)))
model("llama, scaled", language(rotary=rg.nn.Rotary(scaling=Dynamic(2.0, 8)), **LLAMA), lambda m: m(ids(2, N)))
model("llama, checkpointed", checkpointed, lambda m: m(ids(2, N)))
model("gpt, short", language(), lambda m: m(ids(2, 2)))  # more ranks than tokens
model("bert", text(TextEncoder), lambda m: m(ids(2, N), mask_of([N, 7]), segments=ids(2, N) % 2))
model("bert, packed", text(TextEncoder), lambda m: m(packed, segments=packed.with_values(packed.values % 2)))
model("masked", text(MaskedLanguageModel), lambda m: m(ids(2, N)))
model("classifier", text(SequenceClassifier), lambda m: m(ids(2, N), mask_of([N, 7])), False)
model("classifier, packed", text(SequenceClassifier, pooling="attention"), lambda m: m(packed), False)
model("embedder", text(SentenceEmbedder, pooling="attention"), lambda m: m(ids(2, N), mask_of([N, 7])), False)
model("loss", language(), lambda m: m.loss(packed, ids(40)), False)
model("loss, equal lengths", language(rotary=rg.nn.Rotary()), lambda m: m.loss(plain, ids(40)), False)
model(
    "transformer",
    lambda: Transformer(TransformerConfig(**SMALL)),
    lambda m: m(ids(2, N), ids(2, 9), mask_of([N, 7])),
    False,
)
model("t5", lambda: Transformer(TransformerConfig(**SMALL, position="relative", norm="rms", bias=False, scale=1.0)),
      lambda m: m(ids(2, N), ids(2, 9)), False)  # fmt: skip
model("vit", lambda: ImageClassifier(VisionConfig(16, 2, 4, 32, image=(32, 32), patch=8, classes=5)),
      lambda m: m(images(2, 3, 32, 32)), False)  # fmt: skip
DETR = DetrConfig(3, queries=5, d_model=16, layers=1, heads=2, d_hidden=32, dropout=0.0, backbone=RESNET)
SETS = SetConfig(features=3, d_model=16, layers=2, heads=2, d_hidden=32, points=5, classes=4)
model("sets", lambda: SetTransformer(SETS), lambda m: m(images(2, N, 3), mask_of([N, 7])), False)
model("sets, packed", lambda: SetTransformer(SETS), lambda m: m([images(N, 3), images(4, 3)]), False)
EDGES = rg.edges(torch.cat((ids(2, 40) % N, torch.arange(N).expand(2, N)), 1))
model(
    "graph", lambda: NodeClassifier(GraphConfig(3, 16, 2, 2, 32, classes=4)), lambda m: m(images(1, N, 3), EDGES), False
)
MATCH = MatchConfig(
    TextConfig(30, 16, 1, 4, 32, dropout=0.0), VisionConfig(16, 1, 4, 32, image=(32, 32), patch=8), layers=2
)
model("match", lambda: ImageTextMatcher(MATCH), lambda m: m(images(2, 3, 32, 32), ids(2, N), mask_of([N, 7])), False)
SPEECH = SpeechConfig(labels=9, d_model=16, layers=2, heads=2, d_hidden=32, features=5, before=4, after=2, dropout=0.0)
model("speech", lambda: SpeechRecognizer(SPEECH), lambda m: m(images(2, 60, 5)), False)
SPEAKER = SpeechSynthesizerConfig(
    vocabulary=30, d_model=16, layers=2, heads=2, d_hidden=32, features=5, dropout=0.0, squeeze=0.0
)
model("speaker", lambda: SpeechSynthesizer(SPEAKER), lambda m: m(ids(2, N), images(2, 24, 5), mask_of([N, 7])), False)
WHISPER = WhisperConfig(vocabulary=30, d_model=16, layers=2, heads=2, d_hidden=32, frames=25)
model("whisper", lambda: Whisper(WHISPER), lambda m: m(images(2, 50, 80), ids(2, 9)), False)
WAV2VEC2 = Wav2Vec2Config(labels=9, d_model=16, layers=2, heads=2, d_hidden=32, channels=(4,) * 7)
model("wav2vec2", lambda: Wav2Vec2(WAV2VEC2), lambda m: m(images(2, 8000)), False)
model("recommend", lambda: Recommender(LanguageConfig(**SMALL)), lambda m: m(ids(2, N)))
model("detr", lambda: Detr(DETR), lambda m: torch.cat(m(images(1, 3, 64, 64)), -1), False)


def all_models(rank: int) -> dict[str, dict[str, float]]:
    torch.set_default_dtype(torch.float64)
    results: dict[str, Any] = {}
    for n, (name, (make, run, by_token)) in enumerate(MODELS.items()):
        torch.manual_seed(3)
        one = make()
        layout = rd.LAYOUTS[n % 2]
        expected = run(one)
        expected = expected.values[None] if isinstance(expected, rg.Packed) else expected
        by = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        wanted_grads = grads_of(one, expected, by)
        with rd.sequence(layout=layout):
            out = run(one)
            own_by = rd.shard(by, layout=layout) if by_token else by
            grads = grads_of(one, out, own_by)
        whole = rd.gather(out, layout=layout) if by_token else out
        times = 1.0  # number of ranks that count the loss
        if name.startswith("loss"):
            whole = out.detach().clone()
            dist.all_reduce(whole)
        elif not by_token:
            times = dist.get_world_size()
        worst = 0.0
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            dist.all_reduce(grad)
            worst = max(worst, float((grad / times - wanted_grad).abs().max()))
        results[name] = {
            "output": float((whole - expected).detach().abs().max()),
            "gradients": worst,
            "rows": out.shape[1:2],
        }
    return results | {"bare": bare(rank), "cached": cached()}


def grads_of(module: nn.Module, out: Tensor, by: Tensor) -> list[Tensor]:
    module.zero_grad()
    (out * by).sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


def bare(rank: int) -> dict[str, float]:
    """A single layer, not in a stack, on local tokens of uneven shards."""
    torch.manual_seed(3)
    layer = rg.nn.MultiHeadAttention(16, 4, kv_heads=2, rotary=rg.nn.Rotary(scaling=Dynamic(2.0, 8)))
    block = rg.nn.Block(layer, rg.nn.FeedForward(16, 32), residual=lambda: rg.nn.PreNorm(16))
    x = torch.randn(2, 10, 16)
    held = rd.Layout.of([3, 0, 6, 1])
    results = {}
    for name, part in (("layer", layer), ("block", block)):
        expected = part(x, mask=rg.causal())
        with rd.sequence():
            out = part(held.own(x, 1, rank), mask=rg.causal())
        results[name] = float((rd.gather(out) - expected).detach().abs().max())
    additive = rg.nn.AdditiveAttention(16, 16, 8)
    expected = additive(x[:, :4], x)
    with rd.sequence():
        out = additive(rd.shard(x[:, :4]), held.own(x, 1, rank))
    return results | {"additive": float((rd.gather(out) - expected).detach().abs().max())}


def cached() -> list[str]:
    """Error messages of calls that cannot be sharded."""
    results = []
    layer = rg.nn.MultiHeadAttention(16, 4)
    tries = (
        lambda: LanguageModel(LanguageConfig(**SMALL)).generate(ids(2, 5), max_new_tokens=2),
        lambda: layer(torch.randn(1, 2, 16), context=rg.nn.LayerContext()),
        lambda: layer(torch.randn(1, 2, 16), cache=layer.cache()),
        lambda: rg.Attention().weights(*torch.randn(2, 1, 2, 5, 8)),
        lambda: rg.Attention().statistics(*torch.randn(2, 1, 2, 5, 8)),
    )
    for attempt in tries:
        try:
            with rd.sequence():
                attempt()
            results.append("taken")
        except ValueError as error:
            results.append(str(error))
    return results
