"""Subjects of `regard.models` for sound, images, sets and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from regard import models
from regard.models import ctc as spelling
from tools.differential.draw import Draw
from tools.differential.families.modules import adjacency, chunks, drawn_edges, hidden
from tools.differential.families.text import VOCABULARY, common, family, ids, text_config
from tools.differential.subject import (
    Form,
    Item,
    Subject,
    alone,
    as_batch_of_one,
    forward,
    fresh,
    lengths_of,
    noise,
    padded_forms,
    right,
    sequence_forms,
)


@family
def speech(draw: Draw) -> Subject:
    config = models.SpeechConfig(
        7, **common(draw), features=5, halvings=draw.pick("halvings", [1, 2]), before=draw.pick("before", [2, 0, 9]),
        after=draw.pick("after", [0, 1, 4]),
    )  # fmt: skip
    lengths = lengths_of(draw)
    plain = as_batch_of_one(forward)
    filler = draw.pick("filler", ["zeros", "noise", "nan"])

    def padded(module: Any, items: Sequence[Item]) -> list[Tensor]:
        layout = right(lengths, draw.pick("spare columns", [0, 1, 5]))
        blank = "noise" if torch.is_grad_enabled() else filler
        out = module(layout.fill([x for (x,) in items], blank), layout.mask)
        return [row[: config.length(n)] for row, n in zip(out, lengths, strict=True)]

    def stream(module: Any, items: Sequence[Item]) -> list[Tensor]:
        outputs = []
        for (x,) in items:
            stream = module.stream()
            parts = x.split(chunks(draw, len(x)))
            outputs.append(torch.cat([stream(part, last=n + 1 == len(parts)) for n, part in enumerate(parts)]))
        return outputs

    forms = sequence_forms(draw, forward, lengths, kinds=())
    forms.pop("packed, one empty")  # a sound has at least one frame
    forms |= {"alone": alone(plain), "right": padded, "stream": stream}
    items = [(x,) for x in hidden(draw, lengths, 5)]
    return Subject(
        fresh(lambda: models.SpeechRecognizer(config), draw), items, plain, forms, frozenset({"stream"}), saves=True
    )


@family
def wav2vec2(draw: Draw) -> Subject:
    layers = draw.pick("conv layers", [1, 2])
    config = models.Wav2Vec2Config(
        7, **common(draw), channels=(6,) * layers, kernels=(5, 3)[:layers], strides=(3, 2)[:layers],
        conv_bias=draw.pick("conv bias", [False, True]), conv_norm=draw.pick("conv norm", ["layer", "group"]),
        position_kernel=draw.pick("position kernel", [4, 5]), position_groups=2,
        arrangement=draw.pick("arrangement", ["post", "pre"]),
    )  # fmt: skip
    lengths = lengths_of(draw, least=20)
    plain = as_batch_of_one(forward)

    def padded(module: Any, items: Sequence[Item]) -> list[Tensor]:
        layout = right(lengths, draw.pick("spare columns", [0, 1, 5]))
        out = module(layout.fill([x for (x,) in items]), layout.mask)
        return [row[: config.length(n)] for row, n in zip(out, lengths, strict=True)]

    forms: dict[str, Form] = {"alone": alone(plain)}
    if config.conv_norm == "layer":  # a norm over time sees the filler, and such models take no masks
        forms["right"] = padded
    items = [(noise(draw, n, name=f"wave {b}"),) for b, n in enumerate(lengths)]
    return Subject(fresh(lambda: models.Wav2Vec2(config), draw), items, plain, forms, saves=True)


@family
def speaking(draw: Draw) -> Subject:
    sizes = common(draw)
    sizes.pop("activation")
    step = draw.pick("reduction", [1, 2, 4])
    config = models.SpeechSynthesizerConfig(VOCABULARY, **sizes, features=3, reduction=step, narrow=4, squeeze=0.0)
    lengths = lengths_of(draw)
    groups = [draw.random(f"frames {n}").randint(1, 9) for n in range(len(lengths))]
    items = list(zip(ids(draw, lengths), hidden(draw, [step * n for n in groups], 3), strict=True))

    def plain(module: Any, item: Item) -> Tensor:
        frames = module.predict_frames(item[0][None], item[1][None])
        return torch.cat((frames.frames[0], frames.ends[0].repeat_interleave(step)[:, None]), -1)

    def padded(layout: Any, module: Any, items: Sequence[Item]) -> list[Tensor]:
        own = right([len(target) for _, target in items])
        frames = module.predict_frames(layout.fill([s for s, _ in items]), own.fill([t for _, t in items]), layout.mask)
        return own.rows(torch.cat((frames.frames, frames.ends.repeat_interleave(step, 1)[..., None]), -1))

    def generated(module: Any, items: Sequence[Item]) -> list[Tensor]:
        """Frames generated with a cache equal those of one pass over the same frames."""
        outputs = []
        for source, target in items:
            frames = module.generate([source], max_frames=len(target))[0].frames
            again = plain(module, (source, frames))
            outputs.append(plain(module, (source, target)) + (frames - again[:, :3]).abs().max())
        return outputs

    forms = padded_forms(draw, lengths, ("right", "left", "holes"), padded, gaps=True)
    forms |= {"alone": alone(plain), "generated": generated}
    return Subject(
        fresh(lambda: models.SpeechSynthesizer(config), draw), items, plain, forms, frozenset({"generated"}), saves=True
    )


def vision_config(draw: Draw, first: bool | None = None) -> models.VisionConfig:
    """first: whether there is a class token."""
    first = draw.pick("class token", [True, False]) if first is None else first
    return models.VisionConfig(
        **common(draw), image=(8, 12), patch=4, channels=2, stem=draw.pick("stem", [(), (8,)]), classes=3,
        arrangement=draw.pick("arrangement", ["pre", "post", "sandwich", "output", "layer_scale"]), eps=1e-6,
        norm=draw.pick("norm", ["layer", "rms"]), qkv_bias=draw.pick("qkv bias", [True, False]),
        class_token=first, patch_bias=draw.pick("patch bias", [True, False]),
        embedding_norm=draw.pick("image embedding norm", [False, True]), gated=draw.pick("image gated", [False, True]),
        pooling=draw.pick("image pooling", ["first", "first_mean", "probe"] if first else ["probe"]),
    )  # fmt: skip


@family
def vision(draw: Draw) -> Subject:
    config, count = vision_config(draw), draw.pick("images", [1, 2, 3])
    kind = draw.pick("model", [models.VisionTransformer, models.ImageClassifier])
    height, width = draw.pick("size", [(8, 12), (4, 4), (13, 9), (16, 20)])
    items = [(noise(draw, 2, height, width, name=f"image {n}"),) for n in range(count)]
    patches = (height // 4) * (width // 4)
    masked = draw.pick("masked", [False, True]) and not config.stem  # convolutions see beyond a patch
    seen = torch.tensor([draw.random("patches").random() < 0.6 for _ in range(patches)])
    mask = seen if masked else None

    def plain(module: Any, item: Item) -> Tensor:
        out = module(item[0][None], None if mask is None else mask[None])[0]
        return rows(out)

    def rows(out: Tensor) -> Tensor:
        if kind is models.ImageClassifier or mask is None:
            return out
        return out[F.pad(seen, (int(config.class_token), 0), value=True)]

    def hide(image: Tensor) -> Tensor:
        """Replace the pixels of masked patches."""
        grid = seen.view(height // 4, width // 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
        grid = F.pad(grid, (0, width % 4, 0, height % 4), value=True)
        return torch.where(grid, image, torch.randn(image.shape).to(image.dtype) * 5)

    def batch(module: Any, items: Sequence[Item]) -> list[Tensor]:
        images = torch.stack([image if mask is None else hide(image) for (image,) in items])
        return [rows(out) for out in module(images, None if mask is None else mask.expand(len(items), -1))]

    forms = {"alone": alone(plain), "batch": batch}
    return Subject(fresh(lambda: kind(config), draw), items, plain, forms, compiles=frozenset({"batch"}), saves=True)


@family
def detection(draw: Draw) -> Subject:
    norm = draw.pick("backbone norm", ["frozen", "group"])
    backbone = models.ResNetConfig(
        stem=8, widths=(8, 16), depths=(1, 1), bottleneck=draw.pick("bottleneck", [False, True]), norm=norm
    )
    sizes = common(draw)
    sizes["d_model"] *= 4 if sizes["d_model"] % 8 else 1  # sines and cosines of rows and of columns
    config = models.DetrConfig(
        classes=3, queries=draw.pick("queries", [1, 5]), backbone=backbone, dropout=0.0, **sizes,
        arrangement=draw.pick("arrangement", ["post", "pre"]), anchors=draw.pick("anchors", [False, True]),
    )  # fmt: skip
    size = draw.pick("size", [(32, 32), (48, 33)])
    items = [(noise(draw, 3, *size, name=f"image {n}"),) for n in range(draw.pick("images", [1, 2]))]
    masked = draw.pick("mask given", [False, True])

    def plain(module: Any, item: Item) -> Tensor:
        return torch.cat(module(item[0][None]), -1)[0]

    def batch(module: Any, items: Sequence[Item]) -> list[Tensor]:
        images = torch.stack([image for (image,) in items])
        mask = torch.ones(len(images), *size, dtype=torch.bool) if masked else None
        return list(torch.cat(module(images, mask), -1))

    forms = {"alone": alone(plain), "batch": batch}
    return Subject(fresh(lambda: models.Detr(config), draw), items, plain, forms, saves=True)


@family
def set_transformer(draw: Draw) -> Subject:
    points, seeds, lengths = draw.pick("points", [1, 4]), draw.pick("seeds", [1, 2]), lengths_of(draw)
    config = models.SetConfig(3, **common(draw), points=points, seeds=seeds, classes=3)
    plain, filler = as_batch_of_one(forward), draw.pick("filler", ["zeros", "noise"])
    forms = {"alone": alone(plain)} | sequence_forms(draw, forward, lengths, pooled=True, filler=filler)
    forms["shuffled"] = lambda module, items: [module(x[torch.randperm(len(x))][None])[0] for (x,) in items]
    items = [(x,) for x in hidden(draw, lengths, 3)]
    return Subject(fresh(lambda: models.SetTransformer(config), draw), items, plain, forms, saves=True)


@family
def graph(draw: Draw) -> Subject:
    config = models.GraphConfig(5, **common(draw), classes=3)
    count = draw.pick("nodes", [1, 4, 9, 70])
    edges = drawn_edges(draw, count)

    def plain(module: Any, item: Item) -> Tensor:
        return module(item[0][None], rg.dense(adjacency(edges, count)))[0]

    def joined(module: Any, items: Sequence[Item]) -> list[Tensor]:
        every = torch.cat([edges + n * count for n in range(len(items))], 1)
        return list(module(torch.cat([x for (x,) in items])[None], rg.edges(every))[0].split(count))

    forms: dict[str, Form] = {
        "alone": alone(plain), "joined": joined,
        "batch": lambda module, items: list(module(torch.stack([x for (x,) in items]), rg.edges(edges))),
    }  # fmt: skip
    items = [(x,) for x in hidden(draw, [count] * draw.pick("graphs", [1, 2]), 5)]
    return Subject(fresh(lambda: models.NodeClassifier(config), draw), items, plain, forms, saves=True)


@family
def match(draw: Draw) -> Subject:
    config = models.MatchConfig(text_config(draw), vision_config(draw, True), draw.pick("fusion layers", [2, 0, 1]))
    lengths = lengths_of(draw)
    items = list(
        zip([noise(draw, 2, 8, 12, name=f"image {n}") for n in range(len(lengths))], ids(draw, lengths), strict=True)
    )
    plain = as_batch_of_one(forward)

    def padded(layout: Any, module: Any, items: Sequence[Item]) -> list[Tensor]:
        images = torch.stack([image for image, _ in items])
        return list(module(images, layout.fill([text for _, text in items]), layout.mask))

    forms = padded_forms(draw, lengths, ("right", "left", "holes"), padded, gaps=True)
    return Subject(
        fresh(lambda: models.ImageTextMatcher(config), draw), items, plain, {"alone": alone(plain)} | forms, saves=True
    )


@family
def dual_encoder(draw: Draw) -> Subject:
    """Images and texts; the result of a pair is the logit of its image and text."""
    text, vision, stop = text_config(draw), vision_config(draw), draw.pick("stop token", [None, VOCABULARY - 1])
    d_image = vision.d_model * (2 if vision.pooling == "first_mean" else 1)
    projected = draw.pick("image projection", [True, False])
    config = models.DualEncoderConfig(
        text, vision, d_output=6 if projected else d_image, image_projection=projected,
        text_bias=draw.pick("text bias", [False, True]), text_pooling=draw.pick("text pooling", ["stop", "last"]),
        stop=stop, logit_bias=draw.pick("logit bias", [False, True]),
    )  # fmt: skip
    lengths = lengths_of(draw)
    if config.text_pooling == "last":  # for texts of one length
        lengths = [lengths[0]] * len(lengths)
    texts = [row.clamp(max=VOCABULARY - 2) for row in ids(draw, lengths)]
    for n, row in enumerate(texts):
        row[draw.random(f"place of the stop token {n}").randrange(len(row))] = VOCABULARY - 1
    images = [noise(draw, 2, 8, 12, name=f"image {n}") for n in range(len(lengths))]
    items = list(zip(images, texts, strict=True))

    def plain(module: Any, item: Item) -> Tensor:
        x, y = module.image(item[0][None]), module.text(item[1][None])
        picture = {
            "first": lambda: x[0, 0], "first_mean": lambda: torch.cat((x[0, 0], x[0, 1:].mean(0))),
            "probe": lambda: module.image_pooling(x)[0],
        }[vision.pooling]()  # fmt: skip
        at = len(item[1]) - 1 if config.text_pooling == "last" else item[1].tolist().index(VOCABULARY - 1)
        words = F.linear(y[0, at], module.text_projection.weight, module.text_projection.bias)
        picture = picture if module.image_projection is None else module.image_projection.weight @ picture
        cosine = (picture @ words) / (picture @ picture * (words @ words)).sqrt()
        return module.scale.exp() * cosine + (0 if module.bias is None else module.bias)

    def logits(module: Any, images: Tensor, *texts: Any) -> list[Tensor]:
        return list(module(images, *texts).diagonal())

    def padded(layout: Any, module: Any, items: Sequence[Item]) -> list[Tensor]:
        return logits(module, torch.stack([x for x, _ in items]), layout.fill([y for _, y in items]), layout.mask)

    def packed(module: Any, items: Sequence[Item]) -> list[Tensor]:
        return logits(module, torch.stack([x for x, _ in items]), rg.pack([y for _, y in items]))

    def listed(module: Any, items: Sequence[Item]) -> list[Tensor]:
        return logits(module, torch.stack([x for x, _ in items]), [y for _, y in items])

    forms: dict[str, Form] = {"packed": packed, "list": listed}
    if config.text_pooling == "stop":
        forms |= padded_forms(draw, lengths, ("right", "left"), padded)
    return Subject(fresh(lambda: models.DualEncoder(config), draw), items, plain, forms, saves=True)


@family
def resnet(draw: Draw) -> Subject:
    norm, bottleneck = draw.pick("norm", ["frozen", "group", "batch"]), draw.pick("bottleneck", [False, True])
    config = models.ResNetConfig(stem=8, widths=(8, 16), depths=(1, 2), bottleneck=bottleneck, norm=norm)
    items = [(noise(draw, 3, 20, 17, name=f"image {n}"),) for n in range(draw.pick("images", [1, 2]))]
    plain = as_batch_of_one(forward)
    forms: dict[str, Form] = {
        "alone": alone(plain),
        "batch": lambda module, items: list(module(torch.stack([image for (image,) in items]))),
    }
    forward_only = frozenset(forms) if norm == "batch" else frozenset()  # in training it sees the batch
    return Subject(fresh(lambda: models.ResNet(config), draw), items, plain, forms, forward_only)


@family
def ctc(draw: Draw) -> Subject:
    labels, lengths = draw.pick("labels", [2, 3]), [min(n, 5) for n in lengths_of(draw)]

    def plain(module: Any, item: Item) -> Tensor:
        """The log-probability of the best spelling, by all paths."""
        shares, sums = module(item[0]).log_softmax(-1), dict[tuple[int, ...], Tensor]()
        for path in product(range(labels), repeat=len(shares)):
            spelled = tuple(label for n, label in enumerate(path) if label and (not n or path[n - 1] != label))
            score = sum(frame[label] for frame, label in zip(shares, path, strict=True))
            sums[spelled] = score if spelled not in sums else torch.logaddexp(sums[spelled], score)
        return torch.stack(list(sums.values())).max()

    def beam(module: Any, items: Sequence[Item]) -> list[Tensor]:
        scores = [spelling.prefix_beam(module(x), width=labels**5).score for (x,) in items]
        return [torch.tensor(score, dtype=items[0][0].dtype) for score in scores]

    items = [(x,) for x in hidden(draw, lengths, 3)]
    return Subject(fresh(partial(nn.Linear, 3, labels), draw), items, plain, {"beam": beam}, frozenset({"beam"}))
