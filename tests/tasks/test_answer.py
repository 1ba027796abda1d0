"""Question answering: reading data, windows of long contexts, no answer, metrics, and errors."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.data.readers import Row
from regard.data.squad import SquadExample
from regard.errors import BadRows
from regard.models import QuestionAnswering
from regard.tasks import Run, Sources, UserError, create_run, train
from regard.tasks.answer import Answer, best_answer
from regard.training.export import export
from tests.models.transformers_models import randomize
from tests.tasks.tiny_runs import new_run as new_other_run
from tests.tasks.tiny_runs import sentences

COLOURS, WHO = ("red", "blue"), ("cat", "dog", "bird")


def toys(count: int = 240) -> list[dict[str, Any]]:
    """Questions for the colour or the subject; those for a colour have no answer in contexts without one."""
    rows = []
    for n, context in enumerate(sentences(count, seed=3)):
        words = context.split()
        names, question = (COLOURS, "which colour") if n % 2 else (WHO, "who does it")
        answers = [{"text": word, "answer_start": context.index(word)} for word in words if word in names][:1]
        qa = {"id": f"q{n}", "question": question, "answers": answers, "is_impossible": not answers}
        rows.append({"context": context, "qas": [qa]})
    random.Random(1).shuffle(rows)
    return rows


def squad(folder: Path, paragraphs: Any, name: str = "data.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "toys", "paragraphs": paragraphs}]}))
    return path


def small(**options: Any) -> Answer:
    return Answer(**({"d_model": 32, "layers": 2, "heads": 2, "vocabulary": 300, "dropout": 0.0} | options))


def new_run(folder: Path, paragraphs: Any = None, *, options: dict[str, Any] | None = None, **recipe: Any) -> Run:
    task = small(**(options or {}))
    known = {
        "steps": 4,
        "tokens": 300,
        "warmup": 2,
        "evaluate_every": 50,
        "save_every": 50,
        "learning_rate": 5e-3,
    } | recipe
    path = squad(folder, toys() if paragraphs is None else paragraphs)
    return create_run(folder / "run", task, replace(task.recipe, **known), Sources((str(path),), held_out=30))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("answer"), steps=150, tokens=600)
    assert train(run).done
    return Run.open(run.folder)


def predict(run: Run, *texts: str, skip: bool = False) -> list[Any]:
    rows = [Row(f"input {n}", (text,)) for n, text in enumerate(texts, 1)]
    return list(run.task.predict(run.model()[0], run.processor, rows, BadRows(skip=skip)))


def build_processor(*texts: str, **options: Any) -> Any:
    return small(**options).fit_processor([Row("", SquadExample(text, text, (), "")) for text in texts])


# Learning


def test_questions_are_answered_better_than_by_baselines_and_unanswerable_ones_are_detected(trained: Run) -> None:
    rows = trained.task.read(trained.about["sources"]["data"][0], BadRows())[:80]
    ours = trained.task.evaluate(trained.model()[0], trained.processor, rows)
    assert ours["exact"] > 85
    assert ours["exact_unanswerable"] > 70
    for theirs in trained.task.baselines(trained.processor, [], rows).values():
        assert ours["f1"] > theirs["f1"]


def test_the_no_answer_threshold_is_calibrated_after_training_and_saved(trained: Run) -> None:
    assert set(trained.processor.calibration or {}) == {"threshold"}
    colour, none = predict(trained, "which colour\tthe red cat sees", "which colour\tthe cat sees")
    assert (colour.output, none.output) == ("red", "")
    assert colour.score > 0.5 < none.score
    always = replace(trained.processor, calibration={"threshold": -1e9})
    rows = [Row("", ("which colour\tthe red cat sees",))]
    assert next(trained.task.predict(trained.model()[0], always, rows, BadRows())).output == ""


def test_without_unanswerable_questions_everything_is_answered(tmp_path: Path) -> None:
    examples = [each for each in toys() if each["qas"][0]["answers"]]
    run = new_run(tmp_path, examples)
    assert train(run).done
    assert run.processor.calibration is None
    assert all(prediction.output for prediction in predict(run, "who does it\tthe cat sees", "zzz\tqqq"))


@pytest.mark.parametrize(
    "context", ["  the   red\u00a0cat sees ", "the naïve 🐈 cat", "Étude in red", "cat", "日本語の猫"]
)
def test_an_answer_is_an_exact_part_of_the_context(context: str, trained: Run) -> None:
    prediction = predict(trained, f"who does it\t{context}")[0]
    text, start = prediction.more["best"], prediction.more["start"]
    assert text
    assert text == text.strip()
    assert text in context
    if prediction.output:
        assert context.strip()[start : start + len(text)] == text


def test_a_resumed_run_has_the_same_calibration(trained: Run) -> None:
    again = Run.open(trained.folder)
    assert train(again).done
    assert again.processor.calibration == trained.processor.calibration


# Windows


def questions(task: Answer, processor: Any, *examples: SquadExample) -> Any:
    return task.dataset(processor, [Row(f"row {n}", each) for n, each in enumerate(examples)], BadRows())


def test_windows_cover_a_long_context_and_share_tokens_and_are_one_item() -> None:
    task = small(longest=30, overlap=8)
    context = " ".join(f"w{n}" for n in range(60))
    processor = build_processor(context)
    items = questions(
        task,
        processor,
        SquadExample(context, "w1", (("w33", context.index("w33")),), "a"),
        SquadExample("w2", "w1", (), "b"),
    )
    parts, count = items.questions[0].windows, len(items.questions[0].offsets)
    assert len(parts) > 3
    assert parts[0].first == 0
    assert parts[-1].stop == count
    assert all(one.stop - other.first >= 8 for one, other in pairwise(parts))
    assert len(items.sizes) == 2
    batch = items.batch(np.array([0, 1]), np.random.default_rng(0))
    ids, segments, allowed, sizes = batch.inputs
    assert len(ids) == len(parts) + 1
    assert max(ids.lengths) <= 30
    assert sizes == tuple(items.sizes.tolist())
    assert segments.lengths == ids.lengths
    read = "".join(
        sorted(
            {
                processor.require_tokenizer().decode([int(t)])
                for t in ids.values[allowed.bool() & (segments.values == 1)]
            }
        )
    )
    assert "3" in read
    assert bool((batch.targets.any(1) <= allowed).all())


def test_the_loss_is_over_all_windows_and_all_places_that_are_right() -> None:
    """Compare with a loop in float64: an answer in two overlapping windows, and an unanswerable question."""
    task = small(longest=24, overlap=10)
    context = " ".join(f"w{n % 7}{n % 5}" for n in range(30))
    processor = build_processor(context)
    examples = [
        SquadExample(context, "w1", (("w33", context.index("w33")),), "a"),
        SquadExample(context, "w2", (), "b"),
    ]
    items = questions(task, processor, *examples)
    torch.manual_seed(0)
    model = task.model(processor).double().eval()
    batch = items.batch(np.arange(2), np.random.default_rng(0))
    loss = task.loss(model, batch, 0.0)
    ids, segments, _, _ = batch.inputs
    logits, at, want = model(ids, segments=segments).values, 0, 0.0
    for n, one in enumerate(examples):
        every: list[list[torch.Tensor]] = [[], []]
        right: list[list[torch.Tensor]] = [[], []]
        for part in items.questions[n].windows:
            for side in (0, 1):
                own = []
                for token in range(part.first, part.stop):
                    first, last = items.questions[n].offsets[token]
                    edge = context[:last].endswith("w33") if side else context[first:].startswith("w33")
                    whole = one.answers and one.answers[0][1] <= first and last <= one.answers[0][1] + 3
                    value = logits[at + part.before + token - part.first, side]
                    own.append((value, bool(edge and whole)))
                every[side] += [logits[at, side], *(value for value, _ in own)]
                right[side] += [value for value, yes in own if yes] if one.answers else [logits[at, side]]
            at += part.before + part.stop - part.first + 1
        for side in (0, 1):
            assert right[side]
            want = want + (torch.stack(every[side]).logsumexp(0) - torch.stack(right[side]).logsumexp(0)) / 2
    torch.testing.assert_close(loss.double(), torch.as_tensor(want), rtol=1e-5, atol=1e-6, check_dtype=False)


def test_an_answer_that_is_cut_by_a_window_counts_in_the_window_that_has_all_of_it() -> None:
    task = small(longest=24, overlap=6)
    context = " ".join(f"w{n}" for n in range(40))
    processor = build_processor(context)
    for n in range(38):
        answer = f"w{n} w{n + 1}"
        items = questions(task, processor, SquadExample(context, "w1", ((answer, context.index(answer)),), "a"))
        targets = items.batch(np.array([0]), np.random.default_rng(0)).targets
        assert targets[:, 0].sum() == targets[:, 1].sum() >= 1, answer


def test_the_best_span_is_that_of_all_windows_and_no_longer_than_asked() -> None:
    task = small(longest=24, overlap=8)
    context = " ".join(f"w{n}" for n in range(30))
    processor = build_processor(context)
    items = questions(task, processor, SquadExample(context, "w1", (), "a"))
    draw = torch.Generator().manual_seed(0)
    for most in (1, 3, 100):
        windows = []
        for part in items.questions[0].windows:
            length = part.before + part.stop - part.first + 1
            windows.append(torch.randn(length, 2, generator=draw) * 2 - 9)
        most_likely = (-np.inf, 0, 0)
        for part, chances in zip(items.questions[0].windows, windows, strict=True):
            for i in range(part.first, part.stop):
                for j in range(i, min(part.stop, i + most)):
                    shift = part.before - part.first
                    most_likely = max(most_likely, (float(chances[i + shift, 0] + chances[j + shift, 1]), i, j))
        result = best_answer(items.questions[0], windows, most)
        first, last = (
            int(items.questions[0].offsets[most_likely[1], 0]),
            int(items.questions[0].offsets[most_likely[2], 1]),
        )
        assert (result.text, result.start) == (context[first:last], first)
        assert result.chance == pytest.approx(np.exp(most_likely[0]), rel=1e-5)
        none = sum(np.exp(float(chances[0, 0])) for chances in windows)
        none *= sum(np.exp(float(chances[0, 1])) for chances in windows)
        assert result.none == pytest.approx(none, rel=1e-4)


def test_a_long_context_is_answered_from_any_of_its_windows(trained: Run) -> None:
    task = replace(trained.task, longest=40, overlap=10)
    filler = "the dog hears the dog . " * 12
    examples = [
        SquadExample(f"{filler}{middle}{filler}", "which colour", (), "") for middle in ("", "the red cat sees . ")
    ]
    items = task.dataset(trained.processor, [Row("", each) for each in examples], BadRows())
    assert len(items.questions[1].windows) > 4
    _, answers = task._find_answers(trained.model()[0], items)
    assert answers.text == "red"
    assert examples[1].context[answers.start : answers.start + 3] == "red"


# Reading


def test_both_versions_of_squad_and_tables_are_read_to_the_same_questions(tmp_path: Path) -> None:
    context = "Anna lives in Rome. Rome is old."
    answers = [
        {"text": "Rome", "answer_start": 14},
        {"text": "Rome", "answer_start": 20},
        {"text": "Rome", "answer_start": 14},
    ]
    paragraph = {"context": context, "qas": [
        {"id": "a", "question": " Where does she live? ", "answers": answers},
        {"id": "b", "question": "Who is Bob?", "answers": [], "is_impossible": True, "plausible_answers": answers},
    ]}  # fmt: skip
    task = small()
    first, second = task.read(str(squad(tmp_path, [paragraph])), BadRows())
    assert first.values == SquadExample(context, "Where does she live?", (("Rome", 14), ("Rome", 20)), "a")
    assert second.values == SquadExample(context, "Who is Bob?", (), "b")
    assert first.place.endswith("data.json:data[0].paragraphs[0].qas[0]")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["question", "context", "answer"], ["Where?", context, "Rome"], ["Who?", context, ""]]
        )
    known, none = task.read(str(tmp_path / "a.csv"), BadRows())
    assert known.values[:3] == (context, "Where?", (("Rome", 14),))
    assert none.values[:3] == (context, "Who?", ())
    records = [{"context": context, "question": "Where?", "answers": {"text": ["Rome"], "answer_start": [20]}},
             {"context": context, "question": "Who?", "answers": {"text": [], "answer_start": []}},
             {"context": context, "question": "Who?"}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    hub = small(answer="answers").read(str(tmp_path / "a.jsonl"), BadRows())
    assert [row.values[2] for row in hub] == [(("Rome", 20),), (), ()]


QA = {"id": "a", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 0}]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", r"a.json:1: not valid JSON \(Expecting value at column 1\)"),
        ("a.json", '{"data": [\n{"paragraphs": [', r"a.json:2: not valid JSON .*; is it complete\?"),
        ("a.json", '["x"]', r"a.json: expected the JSON of SQuAD"),
        ("a.json", '{"data": []}', r"a.json: no question can be used"),
        ("a.json", '{"data": [3, {"paragraphs": [4, {"qas": []}]}]}', r"no question can be used"),
        ("a.json", b'{"data": \n"caf\xe9"}', r"a.json:2: not valid UTF-8 \(byte 0xe9"),
        ("a.csv", "", r"a.csv:1: no line can be used"),
        ("a.csv", "context,question\nRome,Where\n", r"a.csv:1: no column 'answer'"),
        ("a.csv", "context,question,answer\n,Where,x\n", r"a.csv:2: column 1 \(context\) is empty"),
        ("a.csv", "context,question,answer\nRome,Where,Paris\n", r"a.csv:2: the answer 'Paris' is not part of"),
        ("a.csv", b"context,question,answer\nRom\xe9,Where,x\n", r"a.csv:2: not valid UTF-8"),
        ("a.jsonl", '{"context": "Rome"}\n', r"a.jsonl:1: expected a value for 'question'"),
        ("a.jsonl", '{"context": \n', r"a.jsonl:1: not valid JSON"),
        ("a.txt", "Rome\n", r"a.txt: is plain text, but context and question and answer are needed"),
        ("missing.json", None, r"missing.json: no such file"),
    ],
)  # fmt: skip
def test_a_bad_file_is_reported_with_its_place(
    name: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        small().read(str(path), BadRows())


@pytest.mark.parametrize(
    ("paragraph", "message"),
    [
        ({"context": "In Rome.", "qas": [QA]}, r"'Rome' is not part of the context: it is at 3, not 0"),
        (
            {"context": "In Paris.", "qas": [QA]},
            r"'Rome' is not part of the context: not found",
        ),
        ({"context": "Rome", "qas": [QA | {"answers": [{"text": "Rome"}]}]}, "an answer with text and answer_start"),
        ({"context": "Rome", "qas": [QA | {"answers": [{"text": " ", "answer_start": 0}]}]}, "the text of an answer"),
        ({"context": "Rome", "qas": [QA | {"answers": []}]}, "expected answers or is_impossible"),
        ({"context": "Rome", "qas": [{"id": "a", "answers": []}]}, "expected a question, got None"),
        ({"context": "  ", "qas": [QA]}, "expected a context, got '  '"),
        ({"context": "Rome", "qas": [{"question": "Where?", "answers": QA["answers"]}]}, "expected an id"),
        ({"context": "Rome", "qas": [3]}, "expected a question, got int"),
    ],
)
def test_a_bad_question_is_reported_with_its_place_or_counted(paragraph: Any, message: str, tmp_path: Path) -> None:
    path = squad(tmp_path, [{"context": "Rome", "qas": [QA]}, paragraph])
    with pytest.raises(UserError, match=rf"data.json:data\[0\].paragraphs\[1\].qas\[0\]: .*{message}"):
        small().read(str(path), BadRows())
    rows = small().read(str(path), bad := BadRows(skip=True))
    assert (len(rows), bad.count) == (1, 1)


@pytest.mark.parametrize("windows", [True, False])
def test_inputs_that_are_too_long_are_reported_with_their_place(windows: bool, trained: Run) -> None:
    task = replace(trained.task, windows=windows, longest=40)
    long = Row("file:3", SquadExample("cat " * 60, "cat " * (40 if windows else 3), (), ""))
    more = "" if windows else " split it with --windows,"
    with pytest.raises(
        UserError, match=rf"file:3: has \d+ tokens, but the model takes at most 40; train with --longest \d+,{more}"
    ):
        task.dataset(trained.processor, [long], BadRows())
    items = task.dataset(
        trained.processor, [long, Row("", SquadExample("a cat", "who", (), ""))], bad := BadRows(skip=True)
    )
    assert (len(items.sizes), bad.count) == (1, 1)


def test_a_question_without_its_text_is_reported(trained: Run) -> None:
    for text in ("who does it", "who does it\t ", "\tthe cat"):
        with pytest.raises(UserError, match="input 1: expected a question, a tab and its context; or pass"):
            predict(trained, text)
    assert [prediction.output for prediction in predict(trained, "who", "who does it\nthe cat sees", skip=True)] == [
        "cat"
    ]


# Metrics


def ask(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_the_command_answers_about_a_file_and_writes_squads_predictions(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the red cat sees\n")
    prediction = ask(
        "predict", str(trained.folder), "who does it", "which colour", "--context", str(tmp_path / "text.txt")
    )
    assert [line.split("\t")[0] for line in prediction.stdout.splitlines()] == ["cat", "red"]
    paragraphs = [{"context": "the blue dog hears", "qas": [
        {"id": "x1", "question": "which colour"}, {"id": "x2", "question": "who does it"}]}]  # fmt: skip
    examples = squad(tmp_path, paragraphs)
    assert ask("predict", str(trained.folder), str(examples), "--out", str(tmp_path / "out.json")).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text()) == {"x1": "blue", "x2": "dog"}
    line = json.loads(ask("predict", str(trained.folder), str(examples), "--json").stdout.splitlines()[0])
    assert (line["id"], line["output"], line["start"]) == ("x1", "blue", 4)
    page = tmp_path / "page.html"
    words = ("who does it", "--context", str(tmp_path / "text.txt"), "-o", str(page))
    assert ask("view", str(trained.folder), *words).exit_code == 0
    assert "sees" in page.read_text()


def test_a_run_of_another_task_is_reported(trained: Run, tmp_path: Path) -> None:
    other = new_other_run(tmp_path, "translate")
    train(other)
    with pytest.raises(UserError, match="is a Transformer, which has no text encoder"):
        new_run(tmp_path / "..", options={"pretrained": str(other.folder)})
    with pytest.raises(UserError, match="contains a run of answer; continue with regard resume"):
        create_run(trained.folder, small(), small().recipe, Sources((trained.about["sources"]["data"][0],)))


def test_a_truncated_checkpoint_is_reported(trained: Run, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(trained.folder, folder)
    held = (folder / "best.safetensors").read_bytes()
    (folder / "best.safetensors").write_bytes(held[: len(held) // 2])
    with pytest.raises(UserError, match=r"best.safetensors: cannot be read .*; regard resume .* rewrites it"):
        Run.open(folder).model()


def test_a_checkpoint_of_transformers_answers_as_it_does_there(tmp_path: Path) -> None:
    """Start from a BertForQuestionAnswering with its tokenizer and head: same logits, same answer."""
    tokenizer = transformers.BertTokenizerFast(vocab={word: n for n, word in enumerate(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "red", "cat", "sees", "who", "?"])})  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    theirs = randomize(transformers.BertForQuestionAnswering(config))
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    run = new_run(
        tmp_path,
        options={"pretrained": str(tmp_path / "theirs")},
        steps=1,
        learning_rate=1e-12,
        ema=0.0,
        weight_decay=0.0,
    )
    assert train(run).done
    model, _ = run.model()
    assert isinstance(model, QuestionAnswering)
    inputs = tokenizer("who sees ?", "the red cat sees", return_tensors="pt")
    with torch.no_grad():
        other = theirs(**inputs)
        ours = model(inputs["input_ids"], segments=inputs["token_type_ids"])
    torch.testing.assert_close(ours, torch.stack((other.start_logits, other.end_logits), -1), atol=1e-4, rtol=1e-4)
    task = replace(run.task, max_answer_length=99)
    (answer,) = task._find_answers(
        model, task.dataset(run.processor, [Row("", SquadExample("the red cat sees", "who sees ?", (), ""))], BadRows())
    )
    begins, ends = (each[0, 5:9].log_softmax(0) for each in (other.start_logits, other.end_logits))
    scores = (begins[:, None] + ends).triu() + torch.full((4, 4), -1e9).tril(-1)
    first, last = divmod(int(scores.argmax()), 4)
    assert answer.text == " ".join(["the", "red", "cat", "sees"][first : last + 1])
    export(run, tmp_path / "out", onnx=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForQuestionAnswering"]
    assert isinstance(regard.load(tmp_path / "out"), QuestionAnswering)
