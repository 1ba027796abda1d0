"""Text encoders: labels, masks, answers and similarities, computed from the outputs of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.predictors import Predictor, open_model
from regard.training.task import Prediction
from tests.models.transformers_models import their_model
from tests.predictors.tiny_checkpoints import save_checkpoint

NAMES = {"0": "anger", "1": "joy", "2": "fear", "3": "love", "4": "none"}


def predict(predictor: Predictor, *texts: str) -> list[Prediction]:
    return list(predictor.predict([Row(f"input {n}", (text,)) for n, text in enumerate(texts, 1)], BadRows()))


@torch.no_grad()
def theirs(case: str, *ids: int, types: Any = None) -> Any:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return their_model(case)(torch.tensor([ids]), **given)


def piece(kind: str, name: str, type_id: int = 0) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": type_id}}


def change_template(folder: Path, *single: dict[str, Any], pair: Sequence[dict[str, Any]] = ()) -> None:
    """Replace the template of the tokenizer by one that the library's constructor refuses."""
    file = folder / "tokenizer.json"
    template = {"single": single, "pair": pair, "special_tokens": {}}
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"post_processor": {"type": "TemplateProcessing"} | template})
    )


def test_templates_of_other_models_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence")
    for template, message in (
        ([piece("Sequence", "A", 2)], "a token of type 2, but the model has 2 types"),
        ([], "input 1: has no tokens"),
        ([piece("SpecialToken", "[X]")], r"tokenizer\.json: special_tokens of the post-processor has no '\[X\]'"),
    ):
        change_template(tmp_path, *template)
        with pytest.raises(UserError, match=message):
            predict(open_model(tmp_path), "the cat")


def test_a_context_without_tokens_is_refused(tmp_path: Path) -> None:
    change_template(save_checkpoint(tmp_path, "bert-answer"), pair=[piece("Sequence", "A")])
    with pytest.raises(UserError, match="the context has no tokens"):
        predict(open_model(tmp_path), "where is the cat\tthe cat is on a mat")


def test_texts_and_pairs_are_classified(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence", config={"id2label": NAMES})
    one, pair = predict(open_model(tmp_path), "the cat sat", "a dog\tran to")
    expected = theirs("bert-sequence", 2, 5, 6, 7, 3).logits[0].softmax(-1)
    assert one.output == NAMES[str(int(expected.argmax()))]
    assert one.score == pytest.approx(expected.max().item(), abs=1e-5)
    assert [one.more[name] for name in NAMES.values()] == pytest.approx(expected.tolist(), abs=1e-5)
    expected = theirs("bert-sequence", 2, 10, 11, 3, 12, 13, 3, types=[0, 0, 0, 0, 1, 1, 1]).logits[0].softmax(-1)
    assert [pair.more[name] for name in NAMES.values()] == pytest.approx(expected.tolist(), abs=1e-5)


def test_classes_that_do_not_exclude_each_other(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence", config={"problem_type": "multi_label_classification"})
    (one,) = predict(open_model(tmp_path), "the cat sat")
    expected = theirs("bert-sequence", 2, 5, 6, 7, 3).logits[0].sigmoid()
    assert [one.more[f"LABEL_{n}"] for n in range(5)] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_regression_gives_its_outputs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence", config={"problem_type": "regression"})
    predictor = open_model(tmp_path)
    (one,) = predict(predictor, "the cat sat")
    expected = theirs("bert-sequence", 2, 5, 6, 7, 3).logits[0]
    assert [one.more[f"LABEL_{n}"] for n in range(5)] == pytest.approx(expected.tolist(), abs=1e-5)
    assert one.score == pytest.approx(expected.max().item(), abs=1e-5)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_other_models_than_those_of_one_label_are_not_evaluated(problem: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence", config={"problem_type": problem})
    with pytest.raises(UserError, match=f"is a model of {problem.replace('_', '-')}; regard evaluate measures models"):
        open_model(tmp_path).evaluate([Row("row 1", ("the cat", "LABEL_0"))], BadRows())


def test_accuracy_of_a_classifier(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence", config={"id2label": NAMES})
    predictor, texts = open_model(tmp_path), ["the cat", "a dog ran", "the mat is red"]
    labels = [each.output for each in predict(predictor, *texts)]
    wrong = next(name for name in NAMES.values() if name != labels[2])
    number = next(n for n, name in NAMES.items() if name == labels[0])  # numbers are accepted too
    rows = zip(texts, [number, labels[1], wrong], strict=True)
    (tmp_path / "test.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    metrics = predictor.evaluate(predictor.read(str(tmp_path / "test.csv"), BadRows()), BadRows())
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="the label 'x' was not seen"):
        predictor.evaluate([Row("here", ("the cat", "x"))], BadRows())


def test_words_are_labelled(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-token", config={"id2label": {"0": "O", "1": "B-PER", "2": "I-PER"}})
    (one,) = predict(open_model(tmp_path), "the cat sat on a mat")
    labels = theirs("bert-token", 2, 5, 6, 7, 8, 10, 9, 3).logits[0, 1:-1].argmax(-1).tolist()
    spans: list[list[str]] = []
    for n, (word, label) in enumerate(zip(["the", "cat", "sat", "on", "a", "mat"], labels, strict=True)):
        if label and (label == 1 or n == 0 or not labels[n - 1]):
            spans.append([])
        if label:
            spans[-1].append(word)
    assert [each["text"] for each in one.more["entities"]] == [" ".join(span) for span in spans]
    assert all(each["label"] == "PER" for each in one.more["entities"])


def test_masks_are_filled(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-mlm")
    predictor = open_model(tmp_path)
    (one,) = predict(predictor, "the <mask> sat")  # both spellings are accepted
    best = theirs("bert-mlm", 2, 5, 4, 7, 3).logits[0, 2].softmax(-1).topk(5)
    assert one.score == pytest.approx(best.values[0].item(), abs=1e-5)
    assert [score for _, score in one.more["words"][0]] == pytest.approx(best.values.tolist(), abs=1e-5)
    with pytest.raises(UserError, match=r"expected \[MASK\] in place of the words to predict"):
        predict(predictor, "the cat sat")


def test_a_special_token_in_place_of_a_mask_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = open_model(save_checkpoint(tmp_path, "bert-mlm"))
    monkeypatch.setattr(predictor, "outputs", lambda encodings: [(0, torch.eye(99)[[3]].expand(5, -1))])
    (one,) = predict(predictor, "the [MASK] sat")
    assert one.more["words"][0][0][0] == "[SEP]"


@pytest.mark.parametrize("case", ["bert-answer", "distilbert-answer"])
def test_a_question_is_answered(case: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, case)
    (one,) = predict(open_model(tmp_path), "who sat ?\tthe red cat sat on the mat")
    types = [0] * 5 + [1] * 8 if case == "bert-answer" else None
    output = theirs(case, 2, 15, 7, 25, 3, 5, 20, 6, 7, 8, 5, 9, 3, types=types)
    inside, words = [0, *range(5, 12)], ["the", "red", "cat", "sat", "on", "the", "mat"]
    start, end = (logits[0, inside].softmax(-1)[1:] for logits in (output.start_logits, output.end_logits))
    spans = {(a, b): float(start[a] * end[b]) for a in range(7) for b in range(a, 7)}
    first, last = max(spans, key=spans.__getitem__)
    assert one.output == " ".join(words[first : last + 1])
    assert one.score == pytest.approx(max(spans.values()), rel=1e-4)


def test_a_long_context_is_split_into_windows(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-answer")
    predictor = open_model(tmp_path)
    context = "the red cat sat on the mat . a dog ran to the big blue mat . " * 4
    (one,) = predict(predictor, f"who sat ?\t{context}")
    assert context[one.more["start"] :].startswith(one.output)
    with pytest.raises(UserError, match="the question has 45 tokens"):
        predict(predictor, f"{'who ' * 42}\t{context}")


def test_texts_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = rg.models.TextConfig(
        vocabulary=99, d_model=32, layers=1, heads=4, d_hidden=48, positions=40, pooling="mean"
    )
    model = rg.models.SentenceEmbedder(config).eval()
    rg.save(model, tmp_path)
    save_tokenizer(tmp_path)
    texts = ["the cat sat", "a dog ran", "the big cat sat"]
    predictor = open_model(tmp_path)
    result = predict(predictor, *texts)
    vectors = model([torch.tensor(ids) for ids in ([2, 5, 6, 7, 3], [2, 10, 11, 12, 3], [2, 5, 22, 6, 7, 3])])
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    similar = (vectors @ vectors.T).detach() - 2 * torch.eye(3)
    assert [each.output for each in result] == [texts[n] for n in similar.argmax(1).tolist()]
    assert [each.score for each in result] == pytest.approx(similar.max(1).values.tolist(), abs=1e-5)
    with pytest.raises(UserError, match="give at least two"):
        predict(predictor, texts[0])
    rows = [Row("1", ("the cat", "the cat")), Row("2", ("a dog ran", "a dog ran"))]
    assert predictor.evaluate(rows, BadRows())["recall@1"] == 1


def save_tokenizer(folder: Path) -> None:
    from tests.predictors.tiny_checkpoints import word_tokenizer

    word_tokenizer().save(str(folder / "tokenizer.json"))


def test_a_text_that_is_too_long_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert-sequence")
    with pytest.raises(UserError, match="input 1: has 52 tokens, but the model takes at most 40; shorten it"):
        predict(open_model(tmp_path), "cat " * 50)


def test_a_model_without_a_head_predicts_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    with pytest.raises(UserError, match="TextEncoder has no head, so it predicts nothing; regard view shows"):
        predict(open_model(tmp_path), "cat")
