"""Text tasks: each learns a toy problem, beats its baseline, and reports scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.text import encode_texts
from regard.data.tokenizer import train_tokenizer
from regard.errors import BadRows
from regard.tasks import Run, Sources, Task, UserError, create_run, tasks, train
from regard.training.baselines import Trigrams
from regard.training.export import export
from regard.training.metrics import retrieval, translation
from regard.training.sources import Examples, read_examples
from regard.training.task import Prediction
from tests.tasks.tiny_runs import DATA, classes, new_run, pairs, small, texts

LEARNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "classify": ({"dropout": 0.1}, {"steps": 60, "learning_rate": 1e-2, "tokens": 600}),
    "embed": ({}, {"steps": 30, "learning_rate": 3e-3, "tokens": 600}),
    "language": ({"context": 32, "dropout": 0.0, "d_model": 32}, {"steps": 200, "learning_rate": 1e-2, "tokens": 512}),
    "masked": ({"dropout": 0.0, "mask_ratio": 0.3}, {"steps": 60, "learning_rate": 5e-3, "tokens": 600}),
    "translate": (
        {"dropout": 0.0, "d_model": 32, "beam": 2},
        {"steps": 250, "learning_rate": 1e-2, "tokens": 600, "label_smoothing": 0.0},
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Examples]]:
    torch.set_num_threads(1)
    results = {}
    for name, (options, recipe) in LEARNS.items():
        folder = tmp_path_factory.mktemp(name)
        run = new_run(
            folder, name, options=options, **({"warmup": 10, "evaluate_every": 50, "save_every": 500} | recipe)
        )
        examples = read_examples(run.task, Sources.from_json(run.about["sources"]), 1)
        train(run, examples)
        results[name] = run, examples
    return results


@pytest.mark.parametrize("name", tasks())
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 10, "heads": 4}, "d_model must be a multiple of heads = 4, but is 10"),
        ({"heads": 0}, "heads must be at least 1, but is 0"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\), but is 1.5"),
    ],
)
def test_invalid_options_are_reported_before_any_data_is_read(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks()[name](**options)


def predict(run: Run, *texts: str, skip: bool = False) -> list[Prediction]:
    model, _ = run.model()
    return list(
        run.task.predict(
            model, run.processor, [Row(f"input {n}", (text,)) for n, text in enumerate(texts, 1)], BadRows(skip=skip)
        )
    )


@pytest.mark.parametrize(
    ("name", "figure", "low"),
    [
        ("classify", "accuracy", False), ("embed", "mrr", False), ("masked", "accuracy", False),
        ("translate", "bleu", False), ("language", "loss", True),
    ],
)  # fmt: skip
def test_a_task_beats_its_baselines_on_a_toy_problem(
    name: str, figure: str, low: bool, trained: dict[str, tuple[Run, Examples]]
) -> None:
    run, examples = trained[name]
    model, _ = run.model()
    ours = run.task.evaluate(model, run.processor, examples.test)
    for means, theirs in run.task.baselines(run.processor, examples.train, examples.test).items():
        if means.startswith("TF-IDF + logistic"):  # a single word decides, which it detects perfectly
            assert ours[figure] >= theirs[figure] - 0.1
        elif low:
            assert ours[figure] < theirs[figure] + 0.25, means  # trigrams capture all structure of this data
        else:
            assert ours[figure] > theirs[figure], means


def test_a_translation_comes_with_its_probability(trained: dict[str, tuple[Run, Examples]]) -> None:
    known, strange = predict(trained["translate"][0], "the red cat sees", "zzz qqq zzz")
    assert known.output == "eht der tac sees"
    assert 0 < strange.score < known.score <= 1


def test_a_class_comes_with_its_probability_and_those_of_the_others(trained: dict[str, tuple[Run, Examples]]) -> None:
    with_cat, without = predict(trained["classify"][0], "the cat sees one dog", "one dog")
    assert (with_cat.output, without.output) == ("cat", "none")
    assert with_cat.score > 0.5
    assert sum(with_cat.more.values()) == pytest.approx(1, abs=1e-5)


def test_hidden_words_are_filled_in(trained: dict[str, tuple[Run, Examples]]) -> None:
    (prediction,) = predict(trained["masked"][0], "the <mask> dog")
    first, middle, last = prediction.output.split()
    assert (first, last) == ("the", "dog")
    assert prediction.more["words"][0][0][0] == middle
    with pytest.raises(UserError, match="input 1: expected <mask> in place of the words to predict"):
        predict(trained["masked"][0], "the dog")


def test_text_is_continued(trained: dict[str, tuple[Run, Examples]]) -> None:
    prediction, again = predict(trained["language"][0], "the red", "the red")
    assert prediction[:3] == again[:3]
    assert 0 < prediction.score < 1


def test_the_nearest_other_text_is_predicted(trained: dict[str, tuple[Run, Examples]]) -> None:
    query, right, wrong = "the red cat sees", "eht der tac sees", "eno llams drib"
    first = predict(trained["embed"][0], query, wrong, right)[0]
    assert first.output == right
    assert -1 <= first.score <= 1
    assert len(first.more["vector"]) == 16


@pytest.mark.parametrize("name", ["classify", "embed", "language", "translate"])
def test_a_text_that_is_too_long_is_reported_with_its_place_or_left_out(
    name: str, trained: dict[str, tuple[Run, Examples]]
) -> None:
    run, _ = trained[name]
    long = "cat " * 600
    with pytest.raises(
        UserError, match=r"input 2: has \d+ tokens, but the model takes at most \d+; train with --(longest|context) \d+"
    ):
        predict(run, "the cat", long)
    assert len(predict(run, "the cat", long, "one dog", skip=True)) == 2


@pytest.mark.parametrize("name", ["classify", "embed", "translate"])
def test_a_row_that_is_too_long_to_train_on_is_reported_with_file_and_line(name: str, tmp_path: Path) -> None:
    run = new_run(tmp_path, name, options={"longest": 5})
    with pytest.raises(UserError, match=r"(pairs.tsv|classes.csv):\d+: has \d+ tokens, but the model takes at most 5"):
        train(run)


def test_long_texts_are_cut_when_asked_to(tmp_path: Path) -> None:
    assert train(new_run(tmp_path, "classify", options={"longest": 5, "cut": True}, steps=1)).done


def test_the_middle_of_a_long_text_is_left_out() -> None:
    words = "one two three four five six seven eight nine ten"
    tokenizer = train_tokenizer([words] * 3, 100)
    whole, cut = (
        encode_texts(tokenizer, [Row("a:1", (words,))], 0, BadRows(), longest=longest, cut=True)[0][0]
        for longest in (99, 10)
    )
    assert len(cut) == 10
    assert cut.tolist() == [*whole[:3], *whole[-7:]]


def test_a_label_never_seen_in_training_is_reported_with_file_and_line(tmp_path: Path) -> None:
    run = new_run(tmp_path, "classify")
    rows = [Row("test.csv:7", ("a dog", "dog"))]
    with pytest.raises(UserError, match=r"test.csv:7: the label 'dog' was not seen in training; known are cat, none"):
        run.task.dataset(run.processor, rows, BadRows())
    run.task.dataset(run.processor, rows, bad := BadRows(skip=True))
    assert bad.count == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\na,x\nb,x\nc,x\n", "at least 2 classes"),
        ("text,label\n" + "".join(f"t{n},{n}\n" for n in range(20)), "is --label the right column"),
    ],
)
def test_invalid_labels_are_reported(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    task = small("classify")
    with pytest.raises(UserError, match=message):
        create_run(tmp_path / "run", task, task.recipe, Sources((str(tmp_path / "a.csv"),), held_out=1))


@pytest.mark.parametrize("name", ["classify", "embed"])
def test_fine_tuning_begins_with_the_encoder_of_a_run(
    name: str, tmp_path: Path, trained: dict[str, tuple[Run, Examples]]
) -> None:
    masked, _ = trained["masked"]
    source, _ = masked.model()
    run = new_run(
        tmp_path, name, options={"pretrained": str(masked.folder), "d_model": 999}, steps=1, learning_rate=1e-9, ema=0.0
    )
    assert train(run).done
    model, _ = Run.open(run.folder).model()
    ours, theirs = model.encoder.state_dict(), source.encoder.state_dict()  # type: ignore[union-attr, operator]
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in theirs)
    assert run.processor.require_tokenizer().to_str() == masked.processor.require_tokenizer().to_str()


def test_fine_tuning_begins_with_a_checkpoint_folder(tmp_path: Path, trained: dict[str, tuple[Run, Examples]]) -> None:
    export(trained["embed"][0], tmp_path / "exported", onnx=False)
    run = new_run(tmp_path, "classify", options={"pretrained": str(tmp_path / "exported")}, steps=1)
    assert train(run).done


def test_an_invalid_pretrained_model_is_reported(tmp_path: Path, trained: dict[str, tuple[Run, Examples]]) -> None:
    with pytest.raises(
        UserError, match="is a Transformer, which has no text encoder; --pretrained takes runs of masked"
    ):
        new_run(tmp_path, "classify", options={"pretrained": str(trained["translate"][0].folder)})
    with pytest.raises(UserError, match="neither a run nor a checkpoint"):
        new_run(tmp_path, "classify", options={"pretrained": str(tmp_path)})
    with pytest.raises(UserError, match=r"the run has no tokenizer; expected tokenizer.json"):
        Processor().require_tokenizer()


@pytest.mark.parametrize("name", list(LEARNS))
def test_an_exported_run_loads_to_the_same_model(
    name: str, tmp_path: Path, trained: dict[str, tuple[Run, Examples]]
) -> None:
    run, _ = trained[name]
    notes = export(run, tmp_path / "out", onnx=False)
    assert {"config.json", "model.safetensors", "tokenizer.json", "run.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert notes
    ours, _ = run.model()
    theirs = regard.load(tmp_path / "out")
    assert type(theirs) is type(ours)
    for actual, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(actual, other)
    with pytest.raises(UserError, match="not empty"):
        export(run, tmp_path / "out")


def test_an_exported_graph_computes_the_same(tmp_path: Path, trained: dict[str, tuple[Run, Examples]]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run, _ = trained["classify"]
    export(run, tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    ids, mask = torch.randint(4, 200, (3, 11)), torch.arange(11) < torch.tensor([[11], [5], [1]])
    prediction = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0]
    model, _ = run.model()
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(prediction), model(ids, mask), rtol=1e-4, atol=1e-5)


def test_a_task_that_is_one_class_is_known_and_trains(tmp_path: Path) -> None:
    """A task defined by a user: a classifier with one more option."""
    from dataclasses import dataclass
    from typing import ClassVar

    from regard.tasks.classify import Classify
    from regard.training.recipe import option

    @dataclass(frozen=True)
    class Moods(Classify):
        name: ClassVar[str] = "moods"
        description: ClassVar[str] = "text to its mood"
        mildness: float = option(1.0, "how mild")

    try:
        assert tasks()["moods"] is Moods
        task = Moods(d_model=16, layers=1, heads=2, vocabulary=300)
        recipe = replace(task.recipe, steps=2)
        run, examples = create_run(tmp_path / "run", task, recipe, Sources((classes(tmp_path),), held_out=10))
        assert train(run, examples).done
        assert Run.open(tmp_path / "run").task == task
    finally:
        Moods.name = ""  # type: ignore[misc]
        import gc

        del Moods, task, run
        gc.collect()


@pytest.mark.parametrize("name", list(DATA))
def test_every_task_describes_itself(name: str) -> None:
    kind: type[Task] = tasks()[name]
    assert kind.description
    assert kind.example
    assert len(kind.columns) in (1, 2)


def test_lines_of_a_language_model_are_held_out_from_the_end(tmp_path: Path) -> None:
    task = small("language")
    examples = read_examples(task, Sources((texts(tmp_path),), held_out=5), 1)
    assert [Path(row.place).name for row in examples.test] == [f"texts.txt:{n}" for n in range(56, 61)]


def test_translations_of_one_sentence_are_references_together() -> None:
    figures = translation(["the cat sat on the mat"], [["a dog lay on a rug", "the cat sat on the mat"]])
    assert figures["bleu"] < 20
    assert figures["bleu_all_references"] == pytest.approx(100)


def test_retrieval_counts_ties_against_the_model() -> None:
    same = torch.nn.functional.normalize(torch.ones(4, 8), dim=-1)
    assert retrieval(same, same)["recall@1"] == 0
    assert retrieval(torch.eye(4), torch.eye(4)) == {"recall@1": 1, "recall@10": 1, "mrr": 1}


def test_trigrams_are_a_distribution() -> None:
    """Kneser-Ney over all next tokens sums to one, for contexts seen and unseen."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 6, 200)
    model = Trigrams(tokens, 7)
    for a, b in [(int(tokens[0]), int(tokens[1])), (6, 6), (int(tokens[3]), 6)]:
        total = sum(1 / model.perplexity(np.array([a, b, c])) for c in range(7))
        assert total == pytest.approx(1)


def test_pairs_that_are_equal_are_not_held_against_one_another(tmp_path: Path) -> None:
    task = small("embed")
    path = Path(pairs(tmp_path, 30))
    path.write_text(path.read_text() + "one cat\teno tac\none cat\ta cat\n")
    examples = read_examples(task, Sources((str(path),), held_out=3), 1)
    processor = task.fit_processor(examples.train)
    rows = [Row("1", ("one cat", "x")), Row("2", ("one cat", "y")), Row("3", ("a dog", "x"))]
    import numpy as np

    same_text, same_other = (
        task.dataset(processor, rows, BadRows()).batch(np.arange(3), np.random.default_rng(0)).targets
    )
    assert same_text.nonzero().tolist() == [[0, 1], [1, 0]]
    assert same_other.nonzero().tolist() == [[0, 2], [2, 0]]


def test_words_that_are_spelled_alike_all_come_with_their_chances(
    trained: dict[str, tuple[Run, Examples]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens that decode to the same word are both reported."""
    run, _ = trained["masked"]
    model, _ = run.model()
    processor = run.processor
    monkeypatch.setattr(type(processor), "require_tokenizer", lambda self: Alike(processor.tokenizer))
    (prediction,) = run.task.predict(model, processor, [Row("a", ("the <mask> sees",))], BadRows())
    (words,) = prediction.more["words"]
    assert [word for word, _ in words] == ["same"] * 5
    chances = [chance for _, chance in words]
    assert chances == sorted(chances, reverse=True)
    assert 0 < sum(chances) <= 1


class Alike:
    """A tokenizer that decodes single tokens to one word."""

    def __init__(self, own: Any) -> None:
        self.__dict__["own"] = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own, name, value)

    def decode(self, ids: list[int]) -> str:
        return "same" if len(ids) == 1 else self.own.decode(ids)
