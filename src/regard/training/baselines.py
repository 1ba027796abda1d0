"""Baselines: frequencies, regressions, heuristics for answers, trigrams and item neighbours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.coco import Detections
from regard.errors import UserError
from regard.training.metrics import classification
from regard.training.task import Metrics


def most_frequent(train: Sequence[int], held_out: Sequence[int], classes: int) -> Metrics:
    """Always predict the most frequent class of the training data."""
    best, _ = Counter(train).most_common(1)[0]
    scores = torch.zeros(len(held_out), classes)
    scores[:, best] = 1
    return classification(scores, torch.tensor(held_out))


def tfidf_regression(
    train: Sequence[str], targets: Sequence[int], held_out: Sequence[str], held_out_targets: Sequence[int], classes: int
) -> Metrics:
    """Logistic regression on TF-IDF of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors = TfidfVectorizer(ngram_range=(1, 2), min_df=2 if len(train) >= 1000 else 1, sublinear_tf=True)
    fitted = LogisticRegression(C=10, max_iter=1000).fit(vectors.fit_transform(train), targets)
    scores = torch.zeros(len(held_out), classes)
    scores[:, torch.from_numpy(fitted.classes_.astype(np.int64))] = torch.from_numpy(
        fitted.predict_proba(vectors.transform(held_out))
    ).float()
    return classification(scores, torch.tensor(held_out_targets))


def pixel_regression(
    train: np.ndarray, targets: np.ndarray, held_out: np.ndarray, held_out_targets: np.ndarray, classes: int
) -> Metrics:
    """Logistic regression on pixels of images (n, C, height, width), subsampled to about 32 x 32."""

    def flatten(images: np.ndarray) -> np.ndarray:
        step = max(1, max(images.shape[2:]) // 32)
        return images[:, :, ::step, ::step].reshape(len(images), -1).astype(np.float32) / 255

    return logistic_regression(flatten(train), targets, flatten(held_out), held_out_targets, classes, scaled=False)


def logistic_regression(
    train: np.ndarray, targets: np.ndarray, held_out: np.ndarray, held_out_targets: np.ndarray, classes: int,
    *, scaled: bool = True,
) -> Metrics:  # fmt: skip
    """Logistic regression on features (n, features). scaled: standardize them first."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if scaled:
        scaler = StandardScaler().fit(train)
        train, held_out = scaler.transform(train), scaler.transform(held_out)
    fitted = LogisticRegression(max_iter=100, tol=1e-3).fit(train, targets)
    scores = torch.zeros(len(held_out), classes)
    scores[:, torch.from_numpy(fitted.classes_.astype(np.int64))] = torch.from_numpy(
        fitted.predict_proba(held_out)
    ).float()
    return classification(scores, torch.from_numpy(held_out_targets))


def ridge_regression(train: np.ndarray, targets: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Predictions (n,) of ridge regression on features (n, features)."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV()).fit(train, targets).predict(held_out)


def propagate_labels(ends: np.ndarray, nodes: np.ndarray, targets: np.ndarray, count: int, classes: int) -> Tensor:
    """One-hot labels (count, classes) propagated along edges (2, E) by the harmonic function of networkx."""
    try:
        import networkx
    except ImportError:
        raise UserError("label propagation needs networkx: pip install 'regard[graph]'") from None

    graph = networkx.Graph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(ends.T.tolist())
    networkx.set_node_attributes(graph, dict(zip(nodes.tolist(), targets.tolist(), strict=True)), "label")
    predicted = networkx.node_classification.harmonic_function(graph)
    return torch.eye(classes)[torch.tensor(predicted)]


NAME = re.compile(r"(?<![.!?\"'(] )(?<!^)\b[A-Z][\w'’-]+(?: [A-Z][\w'’-]+)*|\b\d[\d,.]*\d\b")


def names(context: str) -> list[str]:
    """Names and numbers of a text: capitalized words within a sentence, and numbers of at least two digits."""
    return list(dict.fromkeys(NAME.findall(context)))


def first_name(context: str, question: str) -> str:
    """The first name or number of a context that is not in the question."""
    return next((name for name in names(context) if name not in question), "")


def most_frequent_name(context: str, question: str) -> str:
    """The most frequent name or number of a context that is not in the question."""
    return max((name for name in names(context) if name not in question), key=context.count, default="")


def sliding_window(context: str, question: str) -> str:
    """The name or number that shares the best window of the context with the words of the question.

    A word has the weight log(1 + 1 / its count in the context) (Richardson et al. 2013).

    >>> from regard.training.baselines import sliding_window
    >>> context = "The tower of Paris is tall. A bridge in Rome was built by Anna."
    >>> sliding_window(context, "Who built the bridge in Rome?")
    'Anna'
    """

    def split(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    words, question_words = split(context), split(question)
    counts = Counter(words)
    weights = np.array([np.log1p(1 / counts[word]) for word in words])
    in_question = np.isin(words, question_words)
    best, predicted = -1.0, ""
    for name in names(context):
        own = split(name)
        if not own or set(own) <= set(question_words):
            continue
        size = min(len(set(question_words) | set(own)), len(words))
        scores = np.where(in_question | np.isin(words, own), weights, 0.0)
        total = np.concatenate([[0.0], np.cumsum(scores)])
        score = float((total[size:] - total[: len(total) - size]).max())
        if score > best:
            best, predicted = score, name
    return predicted


ANSWERERS = {
    "first name or number": first_name,
    "most frequent name or number": most_frequent_name,
    "sliding window": sliding_window,
}


class Trigrams:
    """An interpolated Kneser-Ney trigram model, the usual baseline of language models.

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
        # Lower orders count distinct contexts instead of occurrences.
        self.before, self.before_count = np.unique(
            self.keys % vocabulary**2, return_counts=True
        )  # number of distinct a before (b, c)
        self.middle_total = np.bincount(self.before // vocabulary, self.before_count, vocabulary)
        self.middle_kinds = np.bincount(self.before // vocabulary, minlength=vocabulary)
        self.single = np.bincount(pairs % vocabulary, minlength=vocabulary)
        self.discounts = [self._discount(self.counts), self._discount(self.before_count), self._discount(self.single)]

    @staticmethod
    def _discount(counts: np.ndarray) -> float:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        return once / (once + 2 * twice) if once and twice else 0.5

    def perplexity(self, tokens: np.ndarray) -> float:
        """Perplexity of held-out tokens, from the third on."""
        a, b, c = (tokens[n : len(tokens) - 2 + n].astype(np.int64) for n in range(3))
        V, (d3, d2, d1) = self.vocabulary, self.discounts
        kinds = int((self.single > 0).sum())
        one = np.maximum(self.single[c] - d1, 0) / self.single.sum() + d1 * kinds / self.single.sum() / V
        total = np.maximum(self.middle_total[b], 1)
        two = np.maximum(_counts_at(self.before, self.before_count, b * V + c) - d2, 0) / total
        two = np.where(self.middle_total[b] > 0, two + d2 * self.middle_kinds[b] / total * one, one)
        seen = _counts_at(self.contexts, self.context_total, a * V + b)
        three = np.maximum(_counts_at(self.keys, self.counts, (a * V + b) * V + c) - d3, 0) / np.maximum(seen, 1)
        rest = d3 * _counts_at(self.contexts, self.context_kinds, a * V + b) / np.maximum(seen, 1)
        return float(np.exp(-np.log(np.where(seen > 0, three + rest * two, two)).mean()))


def _counts_at(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Look up values by sorted keys; 0 if missing."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


class Neighbours:
    """Item-based nearest neighbours: cosine similarity of the columns of the user-item matrix.

    >>> import numpy as np
    >>> from regard.training.baselines import Neighbours
    >>> near = Neighbours([np.array([0, 1]), np.array([0, 1]), np.array([2])], 3)
    >>> near.scores([np.array([0])])
    array([[0., 1., 0.]], dtype=float32)
    """

    def __init__(self, histories: Sequence[np.ndarray], items: int, nearest: int = 100) -> None:
        self.items = items
        table = self._table(histories)
        table.data /= np.sqrt(np.maximum(np.bincount(table.indices, minlength=items), 1))[table.indices]
        similarity = (table.T @ table).tolil()
        similarity.setdiag(0)
        similarity = similarity.tocsr()
        for n in range(items):  # keep only the nearest items of each
            start, stop = similarity.indptr[n : n + 2]
            row = similarity.data[start:stop]
            if len(row) > nearest:
                row[row < np.partition(row, -nearest)[-nearest]] = 0
        self.similarity = similarity.astype(np.float32)

    def _table(self, histories: Sequence[np.ndarray]) -> Any:
        from scipy.sparse import csr_matrix

        kinds = [np.unique(items) for items in histories]
        rows = np.repeat(np.arange(len(kinds)), [len(items) for items in kinds])
        return csr_matrix((np.ones(len(rows)), (rows, np.concatenate(kinds))), shape=(len(kinds), self.items))

    def scores(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Scores (n, items): similarity of each item to a history, summed over the items in it."""
        return (self._table(histories).astype(np.float32) @ self.similarity.T).toarray()


def frequent_boxes(train: Sequence[Detections], held_out: Sequence[Detections], count: int) -> list[Detections]:
    """Predict the same `count` boxes for every image: cluster centres of the training boxes with their main class."""
    from sklearn.cluster import KMeans

    boxes = np.concatenate([one.boxes for one in train])[:20000]
    labels = np.concatenate([one.labels for one in train])[:20000]
    clusters = KMeans(min(count, len(np.unique(boxes, axis=0))), n_init=1, random_state=0).fit(boxes)
    kinds = [np.bincount(labels[clusters.labels_ == n]) for n in range(len(clusters.cluster_centers_))]
    scores = np.array([kind.max() for kind in kinds]) / len(train)
    predicted = Detections(clusters.cluster_centers_, np.array([int(kind.argmax()) for kind in kinds]), scores)
    return [predicted] * len(held_out)


def component_boxes(
    images: np.ndarray, train: Sequence[Detections], held_out: np.ndarray, classes: int, patch: int = 16
) -> list[Detections]:
    """Boxes of connected components of the foreground, labelled by the nearest mean image of a class.

    Images (n, C, height, width) are bytes. The foreground differs from the median of its image by more than a third of
    the largest difference.
    """
    from scipy.ndimage import find_objects, label

    def thumbnail(part: np.ndarray) -> np.ndarray:
        rows, columns = (np.arange(patch) * side // patch for side in part.shape)
        small = part[np.ix_(rows, columns)].astype(np.float64)
        return ((small - small.mean()) / (small.std() + 1e-6)).ravel()

    totals, counts = np.zeros((classes, patch * patch)), np.zeros((classes, 1))
    for image, one in zip(images, train, strict=True):
        grey = image.mean(0)
        for (left, top, width, height), kind in zip(one.boxes, one.labels, strict=True):
            part = grey[
                int(top) : max(int(top) + 1, round(top + height)), int(left) : max(int(left) + 1, round(left + width))
            ]
            if part.size:
                totals[kind] += thumbnail(part)
                counts[kind] += 1
    means = totals / np.maximum(counts, 1)
    detections = []
    for image in held_out:
        grey = image.mean(0)
        contrast = np.abs(grey - np.median(grey))
        components, _ = label(contrast > max(1.0, np.quantile(contrast, 0.995) / 3), np.ones((3, 3)))
        boxes, kinds, scores = [], [], []
        for rows, columns in find_objects(components):
            height, width = rows.stop - rows.start, columns.stop - columns.start
            if height * width < 0.004 * grey.size:
                continue
            correlation = means @ thumbnail(grey[rows, columns]) / patch**2  # both are standardized
            boxes.append((columns.start, rows.start, width, height))
            kinds.append(int(correlation.argmax()))
            scores.append(float(correlation.max()))
        detections.append(
            Detections(np.array(boxes, np.float64).reshape(-1, 4), np.array(kinds, np.int64), np.array(scores))
        )
    return detections
