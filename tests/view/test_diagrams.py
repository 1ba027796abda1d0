"""Diagrams of models: their numbers, order, folding and escaping, and what a browser shows of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import regard as rg
from regard import models
from regard.nn import Block, Encoder
from regard.view import diagram
from regard.view.diagrams.parts import Box, Branch, Columns, Frame, Part, Reader, find_repeats, total
from regard.view.diagrams.words import words
from tests.conftest import Command
from tests.view.browser import Tab, write

SIZES: dict[str, Any] = {"d_model": 32, "layers": 3, "heads": 4, "d_hidden": 64}
VISION = models.VisionConfig(**SIZES, image=(16, 16), patch=8, classes=3)
TEXT = models.TextConfig(100, **SIZES)
RESNET = models.ResNetConfig(stem=8, widths=(8, 16), depths=(1, 1), bottleneck=False)
IDS = torch.tensor([[5, 6, 7]])
PIXELS = torch.rand(1, 3, 16, 16)
SOUND = torch.randn(1, 24, 80)


def config(**changes: Any) -> models.TransformerConfig:
    return models.TransformerConfig(vocabulary=100, **SIZES, **changes)


def language(**changes: Any) -> models.LanguageModel:
    return models.LanguageModel(models.LanguageConfig(vocabulary=100, **SIZES, **changes))


MODELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "transformer": (lambda: models.Transformer(config()), (IDS, IDS)),
    "t5": (lambda: models.Transformer(config(position="relative", norm="rms", gated=True, bias=False)), (IDS, IDS)),
    "bart": (
        lambda: models.Transformer(
            config(position="learned", arrangement="post", embedding_norm=True, tied=False, target_vocabulary=50)
        ),
        (IDS, IDS),
    ),
    "gpt2": (language, (IDS,)),
    "mistral": (
        lambda: language(
            rotary=rg.nn.Rotary(), norm="rms", gated=True, bias=False, kv_heads=2, windows=(4, None, None)
        ),
        (IDS,),
    ),
    "gpt-oss": (lambda: language(rotary=rg.nn.Rotary(), gated=True, experts=4, sinks=True, tied=False), (IDS,)),
    "gemma": (lambda: language(rotary=rg.nn.Rotary(), norm="unit_rms", arrangement="sandwich", qk_norm=True), (IDS,)),
    "olmo": (lambda: language(rotary=rg.nn.Rotary(), norm="rms", arrangement="output"), (IDS,)),
    "deepseek": (
        lambda: language(
            rotary=rg.nn.Rotary(d_rotary=4), bias=False, latent=models.LatentSizes(d_latent=16, d_rotary=4, d_value=8)
        ),
        (IDS,),
    ),
    "qwen3-next": (
        lambda: language(
            rotary=rg.nn.Rotary(),
            delta=models.DeltaSizes(heads=2, value_heads=4, d_head=8, d_value=8),
            delta_layers=(True, True, False),
        ),
        (IDS,),
    ),
    "deberta": (lambda: models.TextEncoder(models.TextConfig(100, **SIZES, disentangled=4, max_distance=8)), (IDS,)),
    "text": (lambda: models.TextEncoder(TEXT), (IDS,)),
    "masked": (lambda: models.MaskedLanguageModel(TEXT), (IDS,)),
    "classifier": (lambda: models.SequenceClassifier(TEXT), (IDS,)),
    "labels": (lambda: models.TokenClassifier(TEXT), (IDS,)),
    "answers": (lambda: models.QuestionAnswering(TEXT), (IDS,)),
    "sentences": (lambda: models.SentenceEmbedder(TEXT), (IDS,)),
    "images": (lambda: models.ImageClassifier(VISION), (PIXELS,)),
    "dino": (
        lambda: models.ImageClassifier(models.VisionConfig(**{**vars(VISION), "arrangement": "layer_scale"})),
        (PIXELS,),
    ),
    "clip": (lambda: models.DualEncoder(models.DualEncoderConfig(text=TEXT, vision=VISION, stop=7)), (PIXELS, IDS)),
    "detr": (
        lambda: models.Detr(models.DetrConfig(classes=3, queries=5, **SIZES, backbone=RESNET)),
        (torch.rand(1, 3, 32, 32),),
    ),
    "sets": (lambda: models.SetTransformer(models.SetConfig(features=3, **SIZES)), (torch.randn(1, 5, 3),)),
    "speech": (lambda: models.SpeechRecognizer(models.SpeechConfig(labels=10, **SIZES)), (SOUND,)),
    "wav2vec2": (
        lambda: models.Wav2Vec2(
            models.Wav2Vec2Config(
                labels=10, **SIZES, channels=(16, 16), kernels=(10, 3), strides=(5, 2), position_groups=4
            )
        ),
        (torch.randn(1, 4000),),
    ),
    "graph": (lambda: models.NodeClassifier(models.GraphConfig(features=3, **SIZES)), ()),
    "whisper": (lambda: models.Whisper(models.WhisperConfig(vocabulary=100, **SIZES, frames=20)), ()),
    "match": (lambda: models.ImageTextMatcher(models.MatchConfig(text=TEXT, vision=VISION)), ()),
    "synthesis": (lambda: models.SpeechSynthesizer(models.SpeechSynthesizerConfig(vocabulary=100, **SIZES)), ()),
    "pointer": (lambda: models.PointerTransformer(config()), ()),
}


def read(model: nn.Module) -> tuple[Part, ...]:
    return Reader(model, words("en")).read()


def columns(parts: Any) -> list[Columns]:
    actual = [part for part in parts if isinstance(part, Columns)]
    return actual + [inner for part in actual for inner in columns((*part.left, *part.right))]


def boxes(parts: Any) -> list[Box]:
    """Return all boxes in drawing order, without frames."""
    actual: list[Box] = []
    for part in parts:
        if isinstance(part, Box):
            actual.append(part)
        elif isinstance(part, Columns):
            actual += boxes(part.left) + boxes(part.right)
        else:
            actual += boxes(part.parts)
    return actual


def frames(parts: Any) -> list[Frame]:
    actual = [part for part in parts if isinstance(part, Frame)]
    for part in parts:
        inner = (*part.left, *part.right) if isinstance(part, Columns) else getattr(part, "parts", ())
        actual += frames(inner)
    return actual


@pytest.fixture(params=MODELS)
def sample(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    build, inputs = MODELS[request.param]
    return build().eval(), inputs


def test_every_parameter_is_counted_once(sample: tuple[nn.Module, Any]) -> None:
    model, _ = sample
    parts = read(model)
    assert total(parts) == sum(each.numel() for each in model.parameters())
    for frame in frames(parts):
        counted = sum(each.numel() for path in frame.paths for each in model.get_submodule(path).parameters())
        assert frame.box.parameters * frame.times == counted
    for box in boxes(parts):
        module = model.get_submodule(box.path)
        assert box.parameters in (0, sum(each.numel() for each in module.parameters()), sum(
            each.numel() for each in module.parameters(recurse=False)
        ))  # fmt: skip


def test_boxes_are_in_the_order_of_the_calls(sample: tuple[nn.Module, Any]) -> None:
    model, inputs = sample
    if not inputs:
        pytest.skip("its inputs are not plain tensors")
    order: list[str] = []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, path=path: order.append(path))
    with torch.no_grad():
        model(*inputs)
    called = list(dict.fromkeys(order))
    shown = [box.path for box in boxes(read(model)) if not box.aside and box.path in called]
    shown = list(dict.fromkeys(shown))
    parallel = {
        box.path for part in columns(read(model)) if not part.attends for box in boxes((*part.left, *part.right))
    }
    shown = [path for path in shown if path not in parallel]
    assert shown == [path for path in called if path in shown]
    assert len(shown) + len(parallel) > 4


def test_the_svg_is_well_formed_and_the_same_every_time(sample: tuple[nn.Module, Any]) -> None:
    model, _ = sample
    svg = diagram(model)
    root = ElementTree.fromstring(svg)
    links = {each.get("href") for each in root.iter("{http://www.w3.org/2000/svg}a")}
    ids = {f"#{each.get('id')}" for each in root.iter() if each.get("id")}
    assert links <= ids
    assert svg == diagram(model)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    for lang in ("en", "zh"):
        assert diagram(model, lang=lang).count("<a ") == svg.count("<a ")


def test_repeated_layers_are_drawn_once() -> None:
    layers = [frame for frame in frames(read(language())) if frame.times > 1]
    assert [(frame.times, frame.paths) for frame in layers] == [
        (3, ("stack.layers.0", "stack.layers.1", "stack.layers.2"))
    ]
    model = models.LanguageModel(
        models.LanguageConfig(vocabulary=100, **SIZES | {"layers": 12}, windows=(4, 4, 4, 4, 4, None))
    )
    pattern = [frame for frame in frames(read(model)) if frame.times > 1]
    assert [(frame.times, len(frame.paths)) for frame in pattern] == [(2, 12)]
    assert find_repeats([1, 2, 3]) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    with torch.no_grad():
        deeper = language()
        deeper.stack.layers[1].feedforward = rg.nn.FeedForward(32, 48)
    assert not [frame for frame in frames(read(deeper)) if frame.times > 1]


def test_attention_is_described_by_its_description() -> None:
    torch.manual_seed(0)
    attend = rg.Attention(mask=rg.causal() & rg.window(7, 0), bias=rg.alibi(heads=4), temperature=2.0, sink=0.5)
    layer = rg.nn.MultiHeadAttention(32, heads=4, kv_heads=2, attend=attend, rotary=rg.nn.Rotary())
    block = Block(layer, rg.nn.FeedForward(32, 64), residual=lambda: rg.nn.PreNorm(32))
    model = Encoder([block])
    box = next(box for box in boxes(read(model)) if box.kind == "attention")
    details = dict(box.details)
    assert details["Weights"] == "w = softmax((Rq·Rk / √8 + bias) / 2, sink), 0 where masked"
    assert details["Mask"] == "causal() & window(7, 0)"
    assert details["Bias"] == "alibi(heads=4)"
    assert details["Sink"] == "0.5"
    assert details["Heads"] == "4 heads × 8, 2 key/value heads"
    assert details["Description"] == repr(attend)


def test_residuals_are_where_the_arrangement_has_them() -> None:
    expected: dict[str, list[Any]] = {
        "pre": [["norm", "attention"]],
        "post": [["attention"], "norm"],
        "output": [["attention", "norm"]],
        "sandwich": [["norm", "attention", "norm"]],
    }
    for arrangement, kinds in expected.items():
        (layer,) = (frame for frame in frames(read(language(arrangement=arrangement))) if frame.times == 3)
        shape = [
            [each.kind for each in boxes(p.parts)] if isinstance(p, Branch) else boxes([p])[0].kind for p in layer.parts
        ]
        assert shape[: len(kinds)] == kinds


def test_cross_attention_has_an_arrow_from_the_encoder() -> None:
    parts = read(models.Transformer(config()))
    crossing = [box.path for box in boxes(parts) if box.from_source]
    assert crossing == ["decoder.layers.0.cross"]
    assert diagram(models.Transformer(config())).count("l-7 -4v8z") == 1


def test_names_cannot_become_markup() -> None:
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>\x1b[2J\x00", nn.Linear(2, 3))
    for standalone in (False, True):
        text = diagram(model, name='"><b>x</b>\x00', standalone=standalone)
        assert "<script" not in text
        assert "<b>" not in text
        assert "\x00" not in text
        assert "\x1b" not in text
    ElementTree.fromstring(diagram(model, name='"><b>x</b>\x00'))


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_frozen_model_is_drawn_as_before(weights: str | None) -> None:
    model = language(rotary=rg.nn.Rotary(), bias=False).eval()
    before = diagram(model)
    rg.nn.freeze(model, **({} if weights is None else {"weights": weights}))
    assert diagram(model) == before


def test_what_cannot_be_drawn_raises() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        diagram(nn.ReLU())
    with pytest.raises(ValueError, match="lang must be one of"):
        diagram(nn.Linear(2, 2), lang="xx")


def test_a_model_of_transformers_is_drawn() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    parts = read(model)
    assert total(parts) == sum(each.numel() for each in model.parameters())
    assert [frame.times for frame in frames(parts) if frame.times > 1] == [3]
    assert [box.path for box in boxes(parts) if box.kind == "attention"] == ["encoder.layer.0.attention"]


def test_the_command_writes_a_diagram(tmp_path: Path, regard: Command) -> None:
    done = regard("view", "en-fr", "--diagram", "-o", tmp_path / "out.svg", "--json")
    assert '"parameters": 7066624' in done.out
    assert "<svg" in (tmp_path / "out.svg").read_text()
    assert regard("view", "en-fr", "--diagram", "--lang", "zh", "-o", tmp_path / "out.html").code == 0
    assert "交叉注意力" in (tmp_path / "out.html").read_text("utf-8")
    for extra, message in (
        (("text", "--diagram"), "leave out the input"),
        (("--diagram", "-o", tmp_path / "out.png"), "name the file out.html or out.svg"),
        ((), "give an input"),
    ):
        done = regard("view", "en-fr", *extra)
        assert done.code == 1
        assert message in done.err


def test_a_click_shows_the_details(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.Transformer(config())
    for suffix, standalone in ((".html", True), (".svg", False)):
        tab = Tab(browser)
        tab.url = write(tmp_path / f"diagram{suffix}", diagram(model, standalone=standalone))
        tab.page.goto(tab.url)
        assert tab.page.locator(".details:visible").count() == 0
        tab.page.click('a[data-path="decoder.layers.0.cross"]')
        shown = tab.page.locator(".details:visible")
        assert shown.count() == 1
        text = shown.text_content()
        cross = model.get_submodule("decoder.layers.0.cross")
        assert f"{sum(each.numel() for each in cross.parameters()):,} parameters" in text
        for name, tensor in cross.named_parameters():
            assert f"{name} ({', '.join(map(str, tensor.shape))}): {tensor.numel():,}" in text
        tab.page.click(".details:target a")
        assert tab.page.locator(".details:visible").count() == 0
        inside = tab.page.evaluate(
            """() => [...document.querySelectorAll(".box")].every((box) => {
            const frame = box.querySelector("rect").getBBox();
            return [...box.querySelectorAll("text")].every((text) => { const size = text.getBBox();
            return size.x >= frame.x && size.x + size.width <= frame.x + frame.width }) })"""
        )
        assert inside
        assert tab.errors == []
        tab.context.close()


def test_numbers_on_boxes_are_those_of_the_links() -> None:
    svg = diagram(models.Transformer(config()))
    for number, title in re.findall(r'data-parameters="(\d+)">\n<title>[^<]*: ([\d,]+) parameters', svg):
        assert int(number) == int(title.replace(",", ""))
