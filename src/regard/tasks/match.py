"""An image and a text: whether they belong together."""

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
from regard.models.match import ImageTextMatcher, MatchConfig
from regard.models.text import TextConfig
from regard.models.vision import VisionConfig
from regard.nn.loss import restricted_loss
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.recipe import Recipe, check_maximum, check_minimum, option
from regard.training.task import Batch, Metrics, Prediction, Task

YES, NO = ("yes", "1", "true", "match"), ("no", "0", "false", "mismatch")
CANDIDATES = 20  # texts of which one is right
MAX_IMAGES = 500  # images at most of which the right text is looked for
ENDING = re.compile(rf"(?:{'|'.join(map(re.escape, SUFFIXES))})(?=[\s:])", re.IGNORECASE)


@dataclass(frozen=True)
class Match(Task):
    """Encoders of images and texts, and cross-attention between them in both directions."""

    name: ClassVar[str] = "match"
    description: ClassVar[str] = "an image and a text: whether they belong together"
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

    image: str = option("", "column of the path of the image, beside the file: a name, or a number from 1")
    text: str = option("", "column of the text")
    label: str = option("", "column that says yes or no, or 1 or 0")
    size: int = option(0, "pixels each way that images are resized to; 0 for their own, if all have the same")
    patch: int = option(8, "pixels of a patch each way")
    stem: int = option(3, "convolutions before the patches, each of which halves the image")
    shift: int = option(2, "pixels by which images are moved at random in training")
    vocabulary: int = option(2000, "tokens that the tokenizer learns at most")
    d_model: int = option(64, "width of the hidden states")
    layers: int = option(2, "of the encoder of images; that of texts has one")
    fusion: int = option(2, "layers of attention between words and patches; 0 for two vectors and their cosine")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.0, "in training")
    contrast: float = option(
        1.0, "how much it counts that the encoders alone find the right text in a batch; 0 for not"
    )
    similarity_scale: float = option(10.0, "what their likenesses are multiplied by for that")
    longest: int = option(64, "tokens of a text at most")
    cut: bool = option(False, "cut texts that are too long")

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
            raise UserError(f'{source}: expected a text behind the image, such as: "{source} a seven above a two"')
        return resolve_paths(Path(source), super().read_inputs(source, bad))

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """`held_out` images with all their texts: no image is on two sides."""
        known = {row.values[0]: row for row in rows}
        same = {path: content_hash(row) for path, row in known.items()}
        return split(rows, lambda row: same[row.values[0]], held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        image_vectors = list({row.values[0]: row for row in rows}.values())
        form = fit_image_format(image_vectors, self.size, center_crop, self.patch)
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
                bad.add(f"{row.place}: expected yes or no, or 1 or 0, but the label is {row.values[2]!r}")
        items, kept = self._prepare(processor, good, bad)
        items.targets = np.array([good[n].values[2].lower() in YES for n in kept], np.int64)
        return items

    def _prepare(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> tuple[ImageTextPairs, list[int]]:
        """Images and texts made ready, and which rows they are of; an image of many texts is decoded once."""
        ids, kept = encode_texts(processor.require_tokenizer(), rows, 1, bad, longest=self.longest, cut=self.cut)
        form, first = ImageFormat.from_processor(processor), dict[str, Row]()
        for n in kept:
            first.setdefault(rows[n].values[0], rows[n])
        pixels, read_well = load_pixels(list(first.values()), form, bad, center_crop)
        paths = list(first)
        number = {paths[n]: at for at, n in enumerate(read_well)}
        whole = [at for at, n in enumerate(kept) if rows[n].values[0] in number]
        places = [rows[kept[at]].place for at in whole]
        which = np.array([number[rows[kept[at]].values[0]] for at in whole], np.int64)
        pairs = ImageTextPairs(self, form, pixels, which, [ids[at] for at in whole], places)
        return pairs, [int(kept[at]) for at in whole]

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """Whether they belong together; and, so that the encoders learn soon, which text of the batch an image has."""
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
        """How often the right text of an image stands first among 20; the others are right for other images."""
        right = np.flatnonzero(items.targets == 1)
        texts = [items.ids[n].tobytes() for n in range(len(items.sizes))]
        true = {(int(items.which[n]), texts[n]) for n in right}
        kinds = {texts[n]: n for n in reversed(right)}  # one example of each text
        chance, asked, among = np.random.default_rng(0), list[int](), list[int]()
        _, alone = np.unique(items.which[right], return_index=True)
        for n in right[np.sort(alone)][:MAX_IMAGES]:
            others = [at for text, at in kinds.items() if (int(items.which[n]), text) not in true]
            if len(others) < CANDIDATES - 1:
                return {}
            asked += [int(n)] * CANDIDATES
            among += [int(n), *chance.choice(others, CANDIDATES - 1, replace=False).tolist()]
        if not asked:
            return {}
        logits = _predict_logits(model, items.crossed(asked, among)).view(-1, CANDIDATES)
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
        """Of `scene.png a seven left of a two`: yes or no, and the probability of yes."""
        given = []
        for row in rows:
            if parts := row.values if len(row.values) == 2 else split_input(row.values[0]):
                given.append(Row(row.place, (*parts, " ".join(row.values))))
            else:
                bad.add(
                    f"{row.place}: expected the path of an image and a text, such as: scene.png a seven above a two"
                )
        items, kept = self._prepare(processor, given, bad)
        for n, logit in zip(kept, _predict_logits(model, items).tolist(), strict=True):
            yes = 1 / (1 + float(np.exp(-logit)))
            yield Prediction(given[n].values[2], "yes" if yes > 0.5 else "no", yes, place=given[n].place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        """Words, and patches over the image."""
        (rows, columns), ids = model.config.grid, record.inputs["target"].tolist()  # type: ignore[union-attr, misc]
        words = [processor.require_tokenizer().decode([token], skip_special_tokens=False).strip() for token in ids]
        patches = ["[CLS]", *(f"{row},{column}" for row in range(rows) for column in range(columns))]
        for stream, entry in record.streams.items():
            for names in (words, patches):
                if len(entry.tokens) == len(names):
                    record.set_tokens(**{stream: names}, special=("[CLS]", "<s>", "</s>"))
        record.set_image(record.inputs["source"], (rows, columns), first=1)


class ImageTextPairs:
    """Images as bytes (images, C, height, width), texts, which image each is of, and whether they belong together."""

    targets: np.ndarray

    def __init__(
        self, task: Match, form: ImageFormat, pixels: np.ndarray, which: np.ndarray, ids: Sequence[np.ndarray],
        places: Sequence[str],
    ) -> None:  # fmt: skip
        self.task, self.form, self.pixels, self.which, self.ids, self.places = task, form, pixels, which, ids, places
        self.sizes = np.array([len(row) for row in ids], np.int64) + form.height * form.width // task.patch**2
        self.targets = np.zeros(len(ids), np.int64)

    def inputs(self, chosen: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """As the model takes them: pixels, ids and their mask."""
        ids = [torch.from_numpy(self.ids[n]) for n in chosen]
        text = pad_sequence(ids, batch_first=True)
        mask = torch.arange(text.shape[1]) < torch.tensor([len(row) for row in ids])[:, None]
        return self.form.normalize(torch.from_numpy(self.pixels[self.which[chosen]])), text, mask

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        images, text, mask = self.inputs(chosen)
        moves = random_shifts(random, len(chosen), self.task.shift, flip=False)
        kinds = np.unique([self.ids[n].tobytes() for n in chosen], return_inverse=True)[1]
        same = torch.from_numpy((kinds[:, None] == kinds) & ~np.eye(len(chosen), dtype=bool))  # equal texts of others
        targets = (torch.from_numpy(self.targets[chosen]), same)
        return Batch((images, moves, text, mask), targets, int(self.sizes[chosen].sum()), len(chosen))

    def crossed(self, images: Sequence[int], texts: Sequence[int]) -> ImageTextPairs:
        """The images of some examples with the texts of others."""
        ids, which = [self.ids[n] for n in texts], self.which[np.array(images)]
        return ImageTextPairs(self.task, self.form, self.pixels, which, ids, ())


def split_input(given: str) -> tuple[str, str] | None:
    """The path of an image and the text behind it, or none.

    >>> from regard.tasks.match import split_input
    >>> split_input("my scenes/1.png a seven left of a two"), split_input("a seven")
    (('my scenes/1.png', 'a seven left of a two'), None)
    """
    found = ENDING.search(given)
    path, text = (given[: found.end()], given[found.end() :]) if found else ("", "")
    text = text.lstrip(": \t").strip()
    return (path.strip(), text) if text else None


@torch.no_grad()
def _predict_logits(model: nn.Module, items: ImageTextPairs) -> Tensor:
    """Logits (n,)."""
    device, logits = next(model.parameters()).device, torch.zeros(len(items.sizes))
    for chosen in track(np.array_split(np.arange(len(logits)), max(1, round(items.sizes.sum() / 8192)))):
        if len(chosen):
            logits[chosen] = model(*(each.to(device) for each in items.inputs(chosen))).float().cpu()
    return logits
