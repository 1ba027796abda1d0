"""Metrics, computed by the standard library of each field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.coco import Detections
from regard.training.task import Metrics


def classification(scores: Tensor, targets: Tensor) -> Metrics:
    """Accuracy and macro F1 of scores (n, classes)."""
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

    classes = max(2, scores.shape[-1])
    predicted = scores.argmax(-1)
    return {
        "accuracy": float(multiclass_accuracy(predicted, targets, classes, average="micro")),
        "f1": float(multiclass_f1_score(predicted, targets, classes, average="macro")),
    }


def regression(predicted: np.ndarray, true: np.ndarray) -> Metrics:
    """Mean absolute error, root mean squared error, and explained variance (R2).

    >>> import numpy as np
    >>> from regard.training.metrics import regression
    >>> regression(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 6.0]))["mae"]
    1.0
    """
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    return {
        "mae": float(mean_absolute_error(true, predicted)),
        "rmse": float(root_mean_squared_error(true, predicted)),
        "r2": float(r2_score(true, predicted)) if len(true) > 1 else 0.0,
    }


def detection(predicted: Sequence[Detections], true: Sequence[Detections], classes: int) -> Metrics:
    """Average precision by pycocotools: over IoU 0.50 to 0.95, at 0.50 and at 0.75.

    >>> import numpy as np
    >>> from regard.training.metrics import detection
    >>> from regard.data.coco import Detections
    >>> one = Detections(np.array([[2.0, 3.0, 10.0, 10.0]]), np.array([0]), np.array([0.9]))
    >>> {name: round(value, 6) for name, value in detection([one], [one], 2).items()}
    {'ap': 1.0, 'ap50': 1.0, 'ap75': 1.0}
    """
    from contextlib import redirect_stdout
    from io import StringIO

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def to_coco(each: Sequence[Detections]) -> list[dict[str, Any]]:
        rows = [(n, *row) for n, one in enumerate(each, 1) for row in zip(*map(np.ndarray.tolist, one), strict=True)]
        return [
            {"id": n, "image_id": image, "bbox": box, "category_id": label + 1, "score": score, "area": box[2] * box[3],
             "iscrowd": 0}
            for n, (image, box, label, score) in enumerate(rows, 1)
        ]  # fmt: skip

    ours, theirs = to_coco(predicted), to_coco(true)
    if not ours or not theirs:
        return {"ap": 0.0, "ap50": 0.0, "ap75": 0.0}
    with redirect_stdout(StringIO()):  # pycocotools prints its progress
        known = COCO()
        known.dataset = {
            "info": {},
            "images": [{"id": n} for n in range(1, len(true) + 1)],
            "annotations": theirs,
            "categories": [{"id": n} for n in range(1, classes + 1)],
        }
        known.createIndex()
        evaluation = COCOeval(known, known.loadRes(ours), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(("ap", "ap50", "ap75"), map(float, evaluation.stats[:3]), strict=True))


def transcription(outputs: Sequence[str], references: Sequence[str]) -> Metrics:
    """Character and word error rates by jiwer.

    >>> from regard.training.metrics import transcription
    >>> transcription(["one too"], ["one two"])
    {'cer': 0.14285714285714285, 'wer': 0.5}
    """
    from jiwer import cer, wer

    expected, actual = list(references), list(outputs)
    return (
        {"cer": float(cer(expected, actual)), "wer": float(wer(expected, actual))}
        if expected
        else {"cer": 0.0, "wer": 0.0}
    )


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance of two texts."""
    from rapidfuzz.distance import Levenshtein

    return int(Levenshtein.distance(one, other))


COEFFICIENTS = 13


def cepstral_distortion(outputs: Sequence[np.ndarray], true: Sequence[np.ndarray]) -> float:
    """Mel-cepstral distortion in dB: the mean over clips of the mean over the frames (i, j) aligned by DTW of

        10 / ln 10 * sqrt(2 * sum over d = 1 ... 13 of (c_d(i) - c'_d(j))^2)
        c_d = 1/M * sum over the M mel bands m of ln(power of band m) * cos(pi d (m + 1/2) / M)

    outputs, true: log10 of powers, (frames, M). c_0, the loudness, is ignored.

    >>> import numpy as np
    >>> from regard.training.metrics import cepstral_distortion
    >>> clip = np.random.default_rng(0).normal(size=(50, 80))
    >>> cepstral_distortion([np.repeat(clip, 2, 0) + 1], [clip]) < 1e-9  # invariant to speed and loudness
    True
    """
    from scipy.spatial.distance import cdist

    def cepstra(clip: np.ndarray) -> np.ndarray:
        bands = clip.shape[1]
        waves = np.cos(np.pi * np.arange(1, COEFFICIENTS + 1) * (np.arange(bands)[:, None] + 0.5) / bands)
        return np.log(10) / bands * clip.astype(np.float64) @ waves  # (frames, 13)

    distortions = []
    for one, other in zip(outputs, true, strict=True):
        distances = 10 / np.log(10) * np.sqrt(2) * cdist(cepstra(one), cepstra(other))
        distortions.append(float(np.mean([distances[pair] for pair in dtw_path(distances)])))
    return float(np.mean(distortions)) if distortions else 0.0


def dtw_path(distances: np.ndarray) -> list[tuple[int, int]]:
    """Dynamic time warping: the monotonic path of pairs from (0, 0) to the end with the least sum of distances."""
    rows, columns = distances.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    for both in range(rows + columns - 1):  # anti-diagonals, whose cells are independent
        i = np.arange(max(0, both - columns + 1), min(rows, both + 1))
        j = both - i
        total[i + 1, j + 1] = distances[i, j] + np.minimum(np.minimum(total[i, j], total[i, j + 1]), total[i + 1, j])
    i, j, pairs = rows, columns, []
    while i and j:
        pairs.append((i - 1, j - 1))
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
    return pairs[::-1]


def translation(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Metrics:
    """BLEU and chrF by sacrebleu: against the first reference of each, and BLEU against all of them."""
    import sacrebleu

    outputs, first = list(outputs), [each[0] for each in references]
    most = max(map(len, references))
    # sacrebleu takes streams of equal length; repeating the last reference of a sentence does not change the score
    streams = [[each[min(n, len(each) - 1)] for each in references] for n in range(most)]
    return {
        "bleu": sacrebleu.corpus_bleu(outputs, [first]).score,
        "bleu_all_references": sacrebleu.corpus_bleu(outputs, streams).score,
        "chrf": sacrebleu.corpus_chrf(outputs, [first]).score,
    }


def answer(output: str, references: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of one answer, 0 to 100, as in the SQuAD script, by torchmetrics.

    The best value over the references counts, ignoring case, punctuation, articles and extra spaces. An empty list of
    references means that no answer is right.

    >>> from regard.training.metrics import answer
    >>> answer("the Eiffel Tower!", ["Eiffel tower", "a tower"]), answer("", []), answer("Paris", [])
    ((100.0, 100.0), (100.0, 100.0), (0.0, 0.0))
    """
    from torchmetrics.functional.text import squad

    texts = list(references) or [""]
    outputs = {"prediction_text": output, "id": ""}
    scores = squad([outputs], [{"answers": {"text": texts, "answer_start": [0] * len(texts)}, "id": ""}])
    return float(scores["exact_match"]), float(scores["f1"])


def answers(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Metrics:
    """Exact match and F1 over all questions, 0 to 100, and separately over answerable and unanswerable questions if
    there are both, as in SQuAD 2.0."""
    scores = np.array([answer(*pair) for pair in zip(outputs, references, strict=True)])
    answerable = np.array([bool(each) for each in references])
    results = {"exact": scores[:, 0].mean(), "f1": scores[:, 1].mean()}
    if answerable.any() and not answerable.all():
        results |= {"exact_answerable": scores[answerable, 0].mean(), "f1_answerable": scores[answerable, 1].mean()}
        results |= {"exact_unanswerable": scores[~answerable, 0].mean()}
    return {name: float(value) for name, value in results.items()}


def best_threshold(absences: Sequence[float], outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The threshold with the best F1, where questions with a higher absence score get no answer.

    >>> from regard.training.metrics import best_threshold
    >>> best_threshold([-2.0, 1.0, 3.0], ["a cat", "two dogs", "x"], [["cat"], ["dogs"], []])
    2.0
    """
    order = np.argsort(np.array(absences), kind="stable")
    gains = [answer(outputs[n], references[n])[1] - answer("", references[n])[1] for n in order]
    known = np.array([absences[order[0]] - 2, *(absences[n] for n in order), absences[order[-1]] + 2])
    total = np.concatenate([[0.0], np.cumsum(gains)])  # gain if the n questions with the lowest absence are answered
    total[known[:-1] == known[1:]] = -np.inf  # no threshold separates equal scores
    low, high = known[np.argmax(total) :][:2].tolist()
    middle = (low + high) / 2
    return middle if middle < high else low  # adjacent floats have no midpoint


def summaries(outputs: Sequence[str], references: Sequence[str]) -> Metrics:
    """ROUGE-1, 2 and L by rouge-score with stemming: mean F1 over all summaries, 0 to 100.

    >>> from regard.training.metrics import summaries
    >>> {name: round(value) for name, value in summaries(["the cat sat"], ["The cats sat down."]).items()}
    {'rouge1': 86, 'rouge2': 80, 'rougeL': 86}
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
    return {name: 100 * float(np.mean([each[name].fmeasure for each in scores])) for name in names}


def retrieval(queries: Tensor, documents: Tensor) -> Metrics:
    """Recall and mean reciprocal rank of document n for query n, both unit vectors (n, d_model)."""
    from torchmetrics.functional.retrieval import retrieval_hit_rate

    scores = queries @ documents.T
    own = scores.diagonal()[:, None]
    ranks = ((scores > own).sum(1) + ((scores == own).sum(1) - 1)).float() + 1  # ties are counted as errors
    top_10 = [
        float(retrieval_hit_rate(row, torch.arange(len(row)) == n, top_k=min(10, len(row))))
        for n, row in enumerate(scores)
    ]
    return {
        "recall@1": float((ranks == 1).float().mean()),
        "recall@10": float(np.mean(top_10)),
        "mrr": float((1 / ranks).mean()),
    }


def ranking(ranks: Tensor, count: int = 10) -> Metrics:
    """NDCG, hit rate and mean reciprocal rank from the ranks (n,) of the right item, which start at 1.

    >>> import torch
    >>> from regard.training.metrics import ranking
    >>> ranking(torch.tensor([1, 3, 11]))
    {'ndcg@10': 0.5, 'hit@10': 0.66..., 'mrr': 0.47...}
    """
    hits, ranks = ranks <= count, ranks.double()
    return {
        f"ndcg@{count}": float((hits / (ranks + 1).log2()).mean()),
        f"hit@{count}": float(hits.double().mean()),
        "mrr": float((1 / ranks).mean()),
    }
