"""What simple means reach: frequencies and regressions, names for answers, trigrams for words, likeness of items."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.tasks.metrics import classification
from regard.tasks.task import Figures
from regard.tasks.trouble import Trouble


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

    def flat(images: np.ndarray) -> np.ndarray:
        step = max(1, max(images.shape[2:]) // 32)
        return images[:, :, ::step, ::step].reshape(len(images), -1).astype(np.float32) / 255

    return logistic(flat(train), targets, flat(held), held_targets, classes, scaled=False)


def logistic(
    train: np.ndarray, targets: np.ndarray, held: np.ndarray, held_targets: np.ndarray, classes: int,
    *, scaled: bool = True,
) -> Figures:  # fmt: skip
    """Logistic regression on rows of numbers (n, features); scaled: by their mean and deviation first."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if scaled:
        scaler = StandardScaler().fit(train)
        train, held = scaler.transform(train), scaler.transform(held)
    fitted = LogisticRegression(max_iter=100, tol=1e-3).fit(train, targets)
    scores = torch.zeros(len(held), classes)
    scores[:, torch.from_numpy(fitted.classes_.astype(np.int64))] = torch.from_numpy(fitted.predict_proba(held)).float()
    return classification(scores, torch.from_numpy(held_targets))


def linear(train: np.ndarray, targets: np.ndarray, held: np.ndarray) -> np.ndarray:
    """What ridge regression on rows of numbers (n, features) says of those held out, (n,)."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV()).fit(train, targets).predict(held)


def propagated(ends: np.ndarray, nodes: np.ndarray, targets: np.ndarray, count: int, classes: int) -> Tensor:
    """What labels spread over edges (2, E) say of all nodes, (count, classes): the harmonic function of networkx."""
    try:
        import networkx
    except ImportError:
        raise Trouble("label propagation needs networkx: pip install 'regard[graph]'") from None

    graph = networkx.Graph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(ends.T.tolist())
    networkx.set_node_attributes(graph, dict(zip(nodes.tolist(), targets.tolist(), strict=True)), "label")
    said = networkx.node_classification.harmonic_function(graph)
    return torch.eye(classes)[torch.tensor(said)]


NAME = re.compile(r"(?<![.!?\"'(] )(?<!^)\b[A-Z][\w'’-]+(?: [A-Z][\w'’-]+)*|\b\d[\d,.]*\d\b")


def names(context: str) -> list[str]:
    """Names and numbers of a text: what has capitals within a sentence, and what has two digits."""
    return list(dict.fromkeys(NAME.findall(context)))


def first_name(context: str, question: str) -> str:
    """The first name or number of a context that is not in the question."""
    return next((name for name in names(context) if name not in question), "")


def most_frequent_name(context: str, question: str) -> str:
    """The most frequent name or number of a context that is not in the question."""
    return max((name for name in names(context) if name not in question), key=context.count, default="")


def sliding_window(context: str, question: str) -> str:
    """The name or number whose own words and the question's are most in one window of as many words of the context.

    A word counts log(1 + 1 / how often the context has it) (Richardson et al. 2013).

    >>> from regard.tasks.baselines import sliding_window
    >>> context = "The tower of Paris is tall. A bridge in Rome was built by Anna."
    >>> sliding_window(context, "Who built the bridge in Rome?")
    'Anna'
    """

    def split(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    words, asked = split(context), split(question)
    often = Counter(words)
    worth = np.array([np.log1p(1 / often[word]) for word in words])
    in_question = np.isin(words, asked)
    best, said = -1.0, ""
    for name in names(context):
        own = split(name)
        if not own or set(own) <= set(asked):
            continue
        wide = len(set(asked) | set(own))
        scores = np.where(in_question | np.isin(words, own), worth, 0.0)
        total = np.concatenate([[0.0], np.cumsum(scores)])
        score = float((total[min(wide, len(words)) :] - total[: len(total) - min(wide, len(words))]).max())
        if score > best:
            best, said = score, name
    return said


ANSWERERS = {
    "first name or number": first_name,
    "most frequent name or number": most_frequent_name,
    "sliding window": sliding_window,
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


class Neighbours:
    """Items that the same people had: the cosine of their columns in the table of users and items.

    >>> import numpy as np
    >>> from regard.tasks.baselines import Neighbours
    >>> near = Neighbours([np.array([0, 1]), np.array([0, 1]), np.array([2])], 3)
    >>> near.scores([np.array([0])])
    array([[0., 1., 0.]], dtype=float32)
    """

    def __init__(self, histories: Sequence[np.ndarray], items: int, nearest: int = 100) -> None:
        self.items = items
        table = self._table(histories)
        table.data /= np.sqrt(np.maximum(np.bincount(table.indices, minlength=items), 1))[table.indices]
        likeness = (table.T @ table).tolil()
        likeness.setdiag(0)
        likeness = likeness.tocsr()
        for n in range(items):  # only the nearest of each count
            start, stop = likeness.indptr[n : n + 2]
            row = likeness.data[start:stop]
            if len(row) > nearest:
                row[row < np.partition(row, -nearest)[-nearest]] = 0
        self.likeness = likeness.astype(np.float32)

    def _table(self, histories: Sequence[np.ndarray]) -> Any:
        from scipy.sparse import csr_matrix

        kinds = [np.unique(items) for items in histories]
        rows = np.repeat(np.arange(len(kinds)), [len(items) for items in kinds])
        return csr_matrix((np.ones(len(rows)), (rows, np.concatenate(kinds))), shape=(len(kinds), self.items))

    def scores(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """How near all items are to each history, (n, items): the sum over what is in it."""
        return (self._table(histories).astype(np.float32) @ self.likeness.T).toarray()
