"""Figures by the libraries of each field, and what simple means reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.tasks.task import Figures


def classification(scores: Tensor, targets: Tensor) -> Figures:
    """Accuracy, and F1 averaged over classes, of scores (n, classes)."""
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

    classes = max(2, scores.shape[-1])
    predicted = scores.argmax(-1)
    return {
        "accuracy": float(multiclass_accuracy(predicted, targets, classes, average="micro")),
        "f1": float(multiclass_f1_score(predicted, targets, classes, average="macro")),
    }


def most_frequent(train: Sequence[int], held: Sequence[int], classes: int) -> Figures:
    """Always the class that is most frequent in training."""
    best, _ = Counter(train).most_common(1)[0]
    scores = torch.zeros(len(held), classes)
    scores[:, best] = 1
    return classification(scores, torch.tensor(held))


def tfidf_regression(
    train: Sequence[str], targets: Sequence[int], held: Sequence[str], held_targets: Sequence[int], classes: int
) -> Figures:
    """Logistic regression on TF-IDF of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors = TfidfVectorizer(ngram_range=(1, 2), min_df=2 if len(train) >= 1000 else 1, sublinear_tf=True)
    fitted = LogisticRegression(C=10, max_iter=1000).fit(vectors.fit_transform(train), targets)
    scores = torch.zeros(len(held), classes)
    scores[:, torch.from_numpy(fitted.classes_.astype(np.int64))] = torch.from_numpy(
        fitted.predict_proba(vectors.transform(held))
    ).float()
    return classification(scores, torch.tensor(held_targets))


def pixel_regression(
    train: np.ndarray, targets: np.ndarray, held: np.ndarray, held_targets: np.ndarray, classes: int
) -> Figures:
    """Logistic regression on the pixels of images (n, C, height, width), shrunk where they have more than 32 x 32."""
    from sklearn.linear_model import LogisticRegression

    def flat(images: np.ndarray) -> np.ndarray:
        step = max(1, max(images.shape[2:]) // 32)
        return images[:, :, ::step, ::step].reshape(len(images), -1).astype(np.float32) / 255

    fitted = LogisticRegression(max_iter=100, tol=1e-3).fit(flat(train), targets)
    scores = torch.zeros(len(held), classes)
    scores[:, torch.from_numpy(fitted.classes_.astype(np.int64))] = torch.from_numpy(
        fitted.predict_proba(flat(held))
    ).float()
    return classification(scores, torch.from_numpy(held_targets))


class Found(NamedTuple):
    """Objects of one image: boxes (n, 4) as left, top, width, height, their classes (n,) and scores (n,)."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def detection(found: Sequence[Found], true: Sequence[Found], classes: int) -> Figures:
    """Average precision by pycocotools: over overlaps of 0.50 ... 0.95, and at 0.50 and 0.75 alone.

    >>> import numpy as np
    >>> from regard.tasks.metrics import Found, detection
    >>> one = Found(np.array([[2.0, 3.0, 10.0, 10.0]]), np.array([0]), np.array([0.9]))
    >>> {name: round(value, 6) for name, value in detection([one], [one], 2).items()}
    {'ap': 1.0, 'ap50': 1.0, 'ap75': 1.0}
    """
    from contextlib import redirect_stdout
    from io import StringIO

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def told(each: Sequence[Found]) -> list[dict[str, Any]]:
        rows = [(n, *row) for n, one in enumerate(each, 1) for row in zip(*map(np.ndarray.tolist, one), strict=True)]
        return [
            {"id": n, "image_id": image, "bbox": box, "category_id": label + 1, "score": score, "area": box[2] * box[3],
             "iscrowd": 0}
            for n, (image, box, label, score) in enumerate(rows, 1)
        ]  # fmt: skip

    ours, theirs = told(found), told(true)
    if not ours or not theirs:
        return {"ap": 0.0, "ap50": 0.0, "ap75": 0.0}
    with redirect_stdout(StringIO()):  # it prints what it does
        known = COCO()
        known.dataset = {
            "info": {},
            "images": [{"id": n} for n in range(1, len(true) + 1)],
            "annotations": theirs,
            "categories": [{"id": n} for n in range(1, classes + 1)],
        }
        known.createIndex()
        judged = COCOeval(known, known.loadRes(ours), "bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return dict(zip(("ap", "ap50", "ap75"), map(float, judged.stats[:3]), strict=True))


def transcription(outputs: Sequence[str], references: Sequence[str]) -> Figures:
    """Errors a letter and errors a word, by jiwer: insertions, deletions and exchanges over what was said.

    >>> from regard.tasks.metrics import transcription
    >>> transcription(["one too"], ["one two"])
    {'cer': 0.14285714285714285, 'wer': 0.5}
    """
    from jiwer import cer, wer

    said, heard = list(references), list(outputs)
    return {"cer": float(cer(said, heard)), "wer": float(wer(said, heard))} if said else {"cer": 0.0, "wer": 0.0}


def edits(one: str, other: str) -> int:
    """How many letters must be put in, left out or exchanged to make one text of another."""
    from rapidfuzz.distance import Levenshtein

    return int(Levenshtein.distance(one, other))


COEFFICIENTS = 13


def cepstral_distortion(made: Sequence[np.ndarray], true: Sequence[np.ndarray]) -> float:
    """Mel-cepstral distortion in dB: mean over clips of the mean over the pairs (i, j) of frames that DTW aligns of

        10 / ln 10 * sqrt(2 * sum over d = 1 ... 13 of (c_d(i) - c'_d(j))^2)
        c_d = 1/M * sum over the M mel bands m of ln(power of band m) * cos(pi d (m + 1/2) / M)

    made, true: log10 of powers, (frames, M). c_0, the loudness, does not count.

    >>> import numpy as np
    >>> from regard.tasks.metrics import cepstral_distortion
    >>> clip = np.random.default_rng(0).normal(size=(50, 80))
    >>> cepstral_distortion([np.repeat(clip, 2, 0) + 1], [clip]) < 1e-9  # slower and louder, but the same
    True
    """
    from scipy.spatial.distance import cdist

    def cepstra(clip: np.ndarray) -> np.ndarray:
        bands = clip.shape[1]
        waves = np.cos(np.pi * np.arange(1, COEFFICIENTS + 1) * (np.arange(bands)[:, None] + 0.5) / bands)
        return np.log(10) / bands * clip.astype(np.float64) @ waves  # (frames, 13)

    found = []
    for one, other in zip(made, true, strict=True):
        far = 10 / np.log(10) * np.sqrt(2) * cdist(cepstra(one), cepstra(other))
        found.append(float(np.mean([far[pair] for pair in aligned(far)])))
    return float(np.mean(found)) if found else 0.0


def aligned(far: np.ndarray) -> list[tuple[int, int]]:
    """Dynamic time warping: the pairs from (0, 0) to the ends, by steps of one, with the least sum of distances."""
    rows, columns = far.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    for both in range(rows + columns - 1):  # anti-diagonals, whose cells do not depend on one another
        i = np.arange(max(0, both - columns + 1), min(rows, both + 1))
        j = both - i
        total[i + 1, j + 1] = far[i, j] + np.minimum(np.minimum(total[i, j], total[i, j + 1]), total[i + 1, j])
    i, j, pairs = rows, columns, []
    while i and j:
        pairs.append((i - 1, j - 1))
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
    return pairs[::-1]


def translation(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Figures:
    """BLEU and chrF by sacrebleu: against the first reference of each, and BLEU against all of them."""
    import sacrebleu

    outputs, first = list(outputs), [each[0] for each in references]
    most = max(map(len, references))
    # sacrebleu takes streams; a sentence with fewer references than others repeats its last one, which changes nothing
    streams = [[each[min(n, len(each) - 1)] for each in references] for n in range(most)]
    return {
        "bleu": sacrebleu.corpus_bleu(outputs, [first]).score,
        "bleu_all_references": sacrebleu.corpus_bleu(outputs, streams).score,
        "chrf": sacrebleu.corpus_chrf(outputs, [first]).score,
    }


def retrieval(queries: Tensor, found: Tensor) -> Figures:
    """How well row n of one side, unit vectors (n, width), finds row n of the other among all rows."""
    from torchmetrics.functional.retrieval import retrieval_hit_rate

    scores = queries @ found.T
    own = scores.diagonal()[:, None]
    ranks = ((scores > own).sum(1) + ((scores == own).sum(1) - 1)).float() + 1  # ties count against it
    tenth = [
        float(retrieval_hit_rate(row, torch.arange(len(row)) == n, top_k=min(10, len(row))))
        for n, row in enumerate(scores)
    ]
    return {
        "recall@1": float((ranks == 1).float().mean()),
        "recall@10": float(np.mean(tenth)),
        "mrr": float((1 / ranks).mean()),
    }


class Trigrams:
    """An interpolated Kneser-Ney model of three tokens, the n-gram that language models are held against.

    >>> import numpy as np
    >>> model = Trigrams(np.array([1, 2, 3] * 20), vocabulary=5)
    >>> bool(model.perplexity(np.array([1, 2, 3, 1, 2, 3])) < 3 < model.perplexity(np.array([3, 2, 1, 3, 2, 1])))
    True
    """

    def __init__(self, tokens: np.ndarray, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        a, b, c = (tokens[n : len(tokens) - 2 + n].astype(np.int64) for n in range(3))
        self.keys, self.counts = np.unique((a * vocabulary + b) * vocabulary + c, return_counts=True)
        pairs = np.unique(tokens[:-1].astype(np.int64) * vocabulary + tokens[1:])
        contexts = self.keys // vocabulary
        self.contexts, start = np.unique(contexts, return_index=True)
        self.context_total = np.add.reduceat(self.counts, start)
        self.context_kinds = np.diff(np.append(start, len(contexts)))
        # Lower orders count in how many contexts something was seen, not how often.
        self.before, self.before_count = np.unique(
            self.keys % vocabulary**2, return_counts=True
        )  # (b, c) after how many a
        self.middle_total = np.bincount(self.before // vocabulary, self.before_count, vocabulary)
        self.middle_kinds = np.bincount(self.before // vocabulary, minlength=vocabulary)
        self.single = np.bincount(pairs % vocabulary, minlength=vocabulary)
        self.discounts = [self._discount(self.counts), self._discount(self.before_count), self._discount(self.single)]

    @staticmethod
    def _discount(counts: np.ndarray) -> float:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        return once / (once + 2 * twice) if once and twice else 0.5

    def perplexity(self, tokens: np.ndarray) -> float:
        """Of held-out tokens, from the third on."""
        a, b, c = (tokens[n : len(tokens) - 2 + n].astype(np.int64) for n in range(3))
        V, (d3, d2, d1) = self.vocabulary, self.discounts
        kinds = int((self.single > 0).sum())
        one = np.maximum(self.single[c] - d1, 0) / self.single.sum() + d1 * kinds / self.single.sum() / V
        total = np.maximum(self.middle_total[b], 1)
        two = np.maximum(_look_up(self.before, self.before_count, b * V + c) - d2, 0) / total
        two = np.where(self.middle_total[b] > 0, two + d2 * self.middle_kinds[b] / total * one, one)
        seen = _look_up(self.contexts, self.context_total, a * V + b)
        three = np.maximum(_look_up(self.keys, self.counts, (a * V + b) * V + c) - d3, 0) / np.maximum(seen, 1)
        rest = d3 * _look_up(self.contexts, self.context_kinds, a * V + b) / np.maximum(seen, 1)
        return float(np.exp(-np.log(np.where(seen > 0, three + rest * two, two)).mean()))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Values by sorted keys, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
