"""Image-text matching."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.data.images import (
    SUFFIXES,
    ImageFormat,
    center_crop,
    content_hash,
    fit_image_format,
    load_pixels,
    random_shifts,
    shift_and_flip,
)
from regard.data.processor import Processor
from regard.data.readers import Row, read_rows, resolve_paths
from regard.data.splits import split
from regard.data.text import encode_texts
from regard.data.tokenizer import train_tokenizer
from regard.errors import BadRows, UserError
from regard.field_types import check_maximum, check_minimum
from regard.models.match import ImageTextMatcher, MatchConfig
from regard.models.text import TextConfig
from regard.models.vision import VisionConfig
from regard.nn.loss import restricted_loss
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

YES, NO = ("yes", "1", "true", "match"), ("no", "0", "false", "mismatch")
CANDIDATES = 20  # texts to rank, one of which is right
MAX_IMAGES = 500  # images used for the ranking metrics
ENDING = re.compile(rf"(?:{'|'.join(map(re.escape, SUFFIXES))})(?=[\s:])", re.IGNORECASE)


@dataclass(frozen=True)
class Match(Task):
    """Image and text encoders with cross-attention in both directions."""

    name: ClassVar[str] = "match"
    description: ClassVar[str] = "image-text matching: whether a text describes an image"
    example: ClassVar[str] = (
        "image,text,label\nscenes/1.png,a seven left of a two,yes\nscenes/1.png,a two above a six,no"
    )
    columns: ClassVar[tuple[str, ...]] = ("image", "text", "label")
    input_columns: ClassVar[tuple[str, ...]] = ("image", "text")
    splits_at_tabs: ClassVar[bool] = True
    recipe: ClassVar[Recipe] = Recipe(
        steps=3000,
        tokens=2048,
        learning_rate=1e-3,
        warmup=100,
        weight_decay=0.05,
        ema=0.99,
        evaluate_every=250,
        save_every=250,
    )

    image: str = option(
        "", "column of the path of the image, relative to the data file: its name, or its number (from 1)"
    )
    text: str = option("", "column of the text")
    label: str = option("", "column of the label: yes or no, 1 or 0")
    size: int = option(0, "height and width to which images are resized; 0 keeps their size, if all have the same")
    patch: int = option(8, "patch size in pixels")
    stem: int = option(3, "convolutions before the patch embedding; each halves the resolution")
    shift: int = option(2, "maximum random shift of the images in training, in pixels")
    vocabulary: int = option(2000, "maximum size of the vocabulary")
    d_model: int = option(64, "width of the hidden states")
    layers: int = option(2, "layers of the image encoder; the text encoder has one")
    fusion: int = option(2, "cross-attention layers between words and patches; 0 compares the two embeddings by cosine")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.0, "dropout probability")
    contrast: float = option(1.0, "weight of the contrastive loss between the encoders; 0 turns it off")
    similarity_scale: float = option(
        10.0, "factor on cosine similarities in the contrastive loss (inverse temperature)"
    )
    longest: int = option(64, "maximum number of tokens per text")
    cut: bool = option(False, "truncate texts that are too long")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, size=0, shift=0, stem=0, fusion=0, layers=1)
        check_maximum(self, stem=10)
        if self.patch < 1 or self.patch % 2**self.stem:
            raise ValueError(f"patch must be a multiple of 2 to the power of stem = {self.stem}, but is {self.patch}")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        return list(
            resolve_paths(Path(source), read_rows(source, {name: getattr(self, name) for name in self.columns}, bad))
        )

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        if Path(source).suffix.lower() in SUFFIXES:
            raise UserError(f'{source}: expected a text after the image, such as: "{source} a seven above a two"')
        return resolve_paths(Path(source), super().read_inputs(source, bad))

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Hold out `held_out` images with all their texts, so that no image is on both sides."""
        known = {row.values[0]: row for row in rows}
        same = {path: content_hash(row) for path, row in known.items()}
        return split(rows, lambda row: same[row.values[0]], held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        images = list({row.values[0]: row for row in rows}.values())
        form = fit_image_format(images, self.size, center_crop, self.patch)
        return Processor(train_tokenizer((row.values[1] for row in rows), self.vocabulary, lower=True), config=form)

    def model(self, processor: Processor) -> nn.Module:
        form = ImageFormat.from_processor(processor)
        shape = {"d_model": self.d_model, "heads": self.heads, "d_hidden": 2 * self.d_model, "arrangement": "pre"}
        text = TextConfig(
            vocabulary=processor.require_tokenizer().get_vocab_size(), layers=1, positions=self.longest, segments=0,
            eps=1e-5,
            dropout=self.dropout, **shape,  # type: ignore[arg-type]
        )  # fmt: skip
        vision = VisionConfig(
            layers=self.layers, image=(form.height, form.width), patch=self.patch, channels=form.channels,
            stem=tuple(32 * 2**n for n in range(self.stem)), eps=1e-6, dropout=self.dropout,
            **shape,  # type: ignore[arg-type]
        )  # fmt: skip
        return ImageTextMatcher(MatchConfig(text, vision, self.fusion))

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> ImageTextPairs:
        good = []
        for row in rows:
            if row.values[2].lower() in (*YES, *NO):
                good.append(row)
            else:
                bad.add(f"{row.place}: expected the label yes or no, or 1 or 0, got {row.values[2]!r}")
        items, kept = self._prepare(processor, good, bad)
        items.targets = np.array([good[n].values[2].lower() in YES for n in kept], np.int64)
        return items

    def _prepare(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> tuple[ImageTextPairs, list[int]]:
        """Encode images and texts, and return the indices of their rows; an image with many texts is decoded once."""
        ids, kept = encode_texts(processor.require_tokenizer(), rows, 1, bad, longest=self.longest, cut=self.cut)
        form, first = ImageFormat.from_processor(processor), dict[str, Row]()
        for n in kept:
            first.setdefault(rows[n].values[0], rows[n])
        pixels, decoded = load_pixels(list(first.values()), form, bad, center_crop)
        paths = list(first)
        number = {paths[n]: at for at, n in enumerate(decoded)}
        usable = [at for at, n in enumerate(kept) if rows[n].values[0] in number]
        places = [rows[kept[at]].place for at in usable]
        which = np.array([number[rows[kept[at]].values[0]] for at in usable], np.int64)
        pairs = ImageTextPairs(self, form, pixels, which, [ids[at] for at in usable], places)
        return pairs, [int(kept[at]) for at in usable]

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """Matching loss, plus a contrastive loss that speeds up the training of the encoders."""
        assert isinstance(model, ImageTextMatcher)
        images, moves, text, mask = batch.inputs
        right, same = batch.targets
        if model.training:
            images = shift_and_flip(images, *moves)
        logits, image_vectors, text_vectors = model.match(images, text, mask)
        targets = right.float() * (1 - smoothing) + smoothing / 2
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        if not self.contrast:
            return loss
        scores, others = (self.similarity_scale * image_vectors @ text_vectors.mT)[right.bool()], ~same[right.bool()]
        return loss + self.contrast * restricted_loss(scores, right.nonzero()[:, 0], others, smoothing=smoothing)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        logits, targets = _predict_logits(model, items), torch.from_numpy(items.targets)
        scores = torch.stack((-logits, logits), -1)
        loss = F.binary_cross_entropy_with_logits(logits, targets.float())
        return {"loss": float(loss)} | metrics.classification(scores, targets) | self._ranking_metrics(model, items)

    def _ranking_metrics(self, model: nn.Module, items: ImageTextPairs) -> Metrics:
        """How well the right text of an image ranks among 20; the others are right for other images."""
        right = np.flatnonzero(items.targets == 1)
        texts = [items.ids[n].tobytes() for n in range(len(items.sizes))]
        true = {(int(items.which[n]), texts[n]) for n in right}
        kinds = {texts[n]: n for n in reversed(right)}  # one example of each text
        random, images, candidates = np.random.default_rng(0), list[int](), list[int]()
        _, first = np.unique(items.which[right], return_index=True)
        for n in right[np.sort(first)][:MAX_IMAGES]:
            others = [at for text, at in kinds.items() if (int(items.which[n]), text) not in true]
            if len(others) < CANDIDATES - 1:
                return {}
            images += [int(n)] * CANDIDATES
            candidates += [int(n), *random.choice(others, CANDIDATES - 1, replace=False).tolist()]
        if not images:
            return {}
        logits = _predict_logits(model, items.combine(images, candidates)).view(-1, CANDIDATES)
        ranks = 1 + (logits[:, 1:] >= logits[:, :1]).sum(1)
        return {f"right of {CANDIDATES}": float((ranks == 1).float().mean()), "mrr": float((1 / ranks).mean())}

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        texts, held_out_texts = ([row.values[1] for row in rows] for rows in (train, held_out))
        ours, theirs = ([int(row.values[2].lower() in YES) for row in rows] for rows in (train, held_out))
        return {
            "most frequent answer": baselines.most_frequent(ours, theirs, 2),
            "the words alone": baselines.tfidf_regression(texts, ours, held_out_texts, theirs, 2),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield yes or no, and the probability of yes, for inputs such as `scene.png a seven left of a two`."""
        inputs = []
        for row in rows:
            if parts := row.values if len(row.values) == 2 else split_input(row.values[0]):
                inputs.append(Row(row.place, (*parts, " ".join(row.values))))
            else:
                bad.add(
                    f"{row.place}: expected the path of an image and a text, such as: scene.png a seven above a two"
                )
        items, kept = self._prepare(processor, inputs, bad)
        for n, logit in zip(kept, _predict_logits(model, items).tolist(), strict=True):
            yes = 1 / (1 + float(np.exp(-logit)))
            yield Prediction(inputs[n].values[2], "yes" if yes > 0.5 else "no", yes, place=inputs[n].place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        """Name the words of the text and the patches of the image."""
        (rows, columns), ids = model.config.grid, record.inputs["target"].tolist()  # type: ignore[union-attr, misc]
        words = [processor.require_tokenizer().decode([token], skip_special_tokens=False).strip() for token in ids]
        patches = ["[CLS]", *(f"{row},{column}" for row in range(rows) for column in range(columns))]
        for stream, entry in record.streams.items():
            for names in (words, patches):
                if len(entry.tokens) == len(names):
                    record.set_tokens(**{stream: names}, special=("[CLS]", "<s>", "</s>"))
        record.set_image(record.inputs["source"], (rows, columns), first=1)


class ImageTextPairs:
    """Images as bytes (images, C, height, width), texts, the image index of each text, and whether the two match."""

    targets: np.ndarray

    def __init__(
        self, task: Match, form: ImageFormat, pixels: np.ndarray, which: np.ndarray, ids: Sequence[np.ndarray],
        places: Sequence[str],
    ) -> None:  # fmt: skip
        self.task, self.form, self.pixels, self.which, self.ids, self.places = task, form, pixels, which, ids, places
        self.sizes = np.array([len(row) for row in ids], np.int64) + form.height * form.width // task.patch**2
        self.targets = np.zeros(len(ids), np.int64)

    def inputs(self, chosen: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the model: normalized images, padded ids and their mask."""
        ids = [torch.from_numpy(self.ids[n]) for n in chosen]
        text = pad_sequence(ids, batch_first=True)
        mask = torch.arange(text.shape[1]) < torch.tensor([len(row) for row in ids])[:, None]
        return self.form.normalize(torch.from_numpy(self.pixels[self.which[chosen]])), text, mask

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        images, text, mask = self.inputs(chosen)
        moves = random_shifts(random, len(chosen), self.task.shift, flip=False)
        kinds = np.unique([self.ids[n].tobytes() for n in chosen], return_inverse=True)[1]
        same = torch.from_numpy(
            (kinds[:, None] == kinds) & ~np.eye(len(chosen), dtype=bool)
        )  # duplicates in other rows
        targets = (torch.from_numpy(self.targets[chosen]), same)
        return Batch((images, moves, text, mask), targets, int(self.sizes[chosen].sum()), len(chosen))

    def combine(self, images: Sequence[int], texts: Sequence[int]) -> ImageTextPairs:
        """Combine the images of some examples with the texts of others."""
        ids, which = [self.ids[n] for n in texts], self.which[np.array(images)]
        return ImageTextPairs(self.task, self.form, self.pixels, which, ids, ())


def split_input(text: str) -> tuple[str, str] | None:
    """Split an input into the path of an image and the text after it; None if one is missing.

    >>> from regard.tasks.match import split_input
    >>> split_input("my scenes/1.png a seven left of a two"), split_input("a seven")
    (('my scenes/1.png', 'a seven left of a two'), None)
    """
    suffix = ENDING.search(text)
    path, caption = (text[: suffix.end()], text[suffix.end() :]) if suffix else ("", "")
    caption = caption.lstrip(": \t").strip()
    return (path.strip(), caption) if caption else None


@torch.no_grad()
def _predict_logits(model: nn.Module, items: ImageTextPairs) -> Tensor:
    """Logits (n,)."""
    device, logits = next(model.parameters()).device, torch.zeros(len(items.sizes))
    for chosen in track(np.array_split(np.arange(len(logits)), max(1, round(items.sizes.sum() / 8192)))):
        if len(chosen):
            logits[chosen] = model(*(each.to(device) for each in items.inputs(chosen))).float().cpu()
    return logits
