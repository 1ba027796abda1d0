"""The command: what it prints, what it says of mistakes, and its exit codes."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from regard.models import save
from regard.tasks import Run, train
from tests.conftest import Command
from tests.tasks.tiny_runs import Signals, classes, new_run, pairs

TINY = ["--d-model", "16", "--layers", "1", "--heads", "2", "--vocabulary", "300", "--tokens", "300", "--steps", "4"]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("reviews"), "classify", steps=30, learning_rate=1e-2, tokens=600)
    train(run)
    return run


def test_a_run_is_trained_and_told_beside_its_baselines(regard: Command, tmp_path: Path) -> None:
    said = regard("train", "classify", "--data", classes(tmp_path), "--held-out", 20, "--out", tmp_path / "run", *TINY)
    assert said.code == 0
    assert "accuracy" in said.out
    assert "most frequent class" in said.out
    assert "TF-IDF + logistic regression" in said.out
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["results"]["metrics"].keys() >= {"accuracy", "f1"}
    assert about["options"]["d_model"] == 16
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_results_come_as_json(regard: Command, tmp_path: Path) -> None:
    said = regard(
        "train", "embed", "--data", pairs(tmp_path), "--held-out", 20, "--out", tmp_path / "run", "--json", *TINY
    )
    assert json.loads(said.out)["baselines"]["TF-IDF of words"].keys() == {"recall@1", "recall@10", "mrr"}


def test_evaluation_takes_other_data(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\nthe cat sees,cat\na dog hears,none\n")
    before = (reviews.folder / "run.json").read_text()
    said = regard("evaluate", reviews.folder, "--data", tmp_path / "test.csv", "--json")
    assert json.loads(said.out)["rows"]["test"] == 2
    assert (reviews.folder / "run.json").read_text() == before  # the run's own figures stay
    (tmp_path / "test.csv").write_text("text,label\nthe cat sees,cat\na dog hears,what\n")
    said = regard("evaluate", reviews.folder, "--data", tmp_path / "test.csv")
    assert said.code == 1
    assert f"{tmp_path}/test.csv:3: the label 'what' was not seen in training" in said.err
    said = regard("evaluate", reviews.folder, "--data", tmp_path / "test.csv", "--skip-bad", "--json")
    assert "1 bad lines left out" in said.err
    assert json.loads(said.out)["metrics"]["accuracy"] == 1


def test_evaluation_reads_more_or_less_of_a_text_than_training(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\nthe cat sees the dog,cat\na dog hears,none\n")
    words = "evaluate", reviews.folder, "--data", tmp_path / "test.csv", "--json", "--longest"
    assert json.loads(regard(*words, 9).out)["longest"] == 9
    said = regard(*words, 5)
    assert said.code == 1
    assert "test.csv:2: " in said.err  # two tokens more stand around a text
    assert "--longest must be 1 to 512, which is what the model of" in regard(*words, 513).err


def test_predictions_come_with_a_score(regard: Command, reviews: Run) -> None:
    said = regard("predict", reviews.folder, "the cat sees the dog", "a dog hears")
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert [row[0] for row in rows] == ["cat", "none"]
    assert all(0.5 <= float(row[1]) <= 1 for row in rows)


@pytest.mark.parametrize("command", ["predict", "view", "evaluate", "export"])
def test_models_are_frozen_where_nothing_is_trained_or_exported(
    command: str, regard: Command, reviews: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = Run.model, []
    monkeypatch.setattr(Run, "model", lambda run, **options: (asked.append(options), real(run, **options))[1])
    given = {
        "predict": ["What a film!"], "view": ["What a film!", "--out", tmp_path / "page.html"],
        "evaluate": ["--data", classes(tmp_path)], "export": [tmp_path / "out", "--no-onnx"],
    }[command]  # fmt: skip
    assert regard(command, reviews.folder, *given).code == 0
    assert asked == ([{}] if command == "export" else [{"frozen": True}])


def test_predictions_are_made_of_files_and_of_standard_input(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the cat sees\n\na dog hears\n", encoding="utf-8-sig")
    asked = regard("predict", reviews.folder, tmp_path / "in.txt", "--json").out
    piped = regard("predict", reviews.folder, "--json", given=b"the cat sees\n\na dog hears\n").out
    assert asked == piped
    first = json.loads(asked.splitlines()[0])
    assert (first["input"], first["output"]) == ("the cat sees", "cat")
    assert first["cat"] == first["score"]


def test_input_that_is_not_utf8_is_told_with_its_line(regard: Command, reviews: Run) -> None:
    said = regard("predict", reviews.folder, given=b"the cat\ncaf\xe9\n")
    assert said.code == 1
    assert "standard input:2: not valid UTF-8 (byte 0xe9 at 4)" in said.err
    first, second = regard("predict", reviews.folder, "--skip-bad", given=b"the cat\ncaf\xe9\n").out.splitlines()
    assert first
    assert second == ""


def test_nothing_to_predict_is_told(regard: Command, reviews: Run) -> None:
    assert "nothing to predict" in regard("predict", reviews.folder).err


def test_the_tasks_are_told_with_their_data(regard: Command) -> None:
    said = regard("tasks")
    for name in ("classify", "embed", "language", "masked", "translate", "I am hungry. → J'ai faim."):
        assert name in said.out
    assert json.loads(regard("tasks", "--json").out)["translate"]["columns"] == ["source", "target"]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["trian"], "train"),
        (["train", "translat"], "translate"),
        (["train", "classify", "--stpes", "3"], "--steps"),
        (["predict", "run", "--jsn"], "--json"),
    ],
)
def test_a_wrong_word_gets_the_nearest_right_one(words: list[str], right: str, regard: Command) -> None:
    said = regard(*words)
    assert said.code == 2
    assert right in said.err


@pytest.mark.parametrize(
    "words", [[], ["train"], ["train", "masked"], ["resume"], ["evaluate"], ["predict"], ["export"], ["tasks"]]
)
def test_every_command_has_help_with_an_example(words: list[str], regard: Command) -> None:
    said = regard(*words, "--help")
    assert said.code == 0
    assert "regard " + (" ".join(words) or "train") in said.out.split("Options")[0].split("Usage")[-1].split("\n", 1)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "classify", "--out", "run"], "no data; pass --data FILE"),
        (["train", "classify", "--data", "none.csv", "--out", "run"], "none.csv: no such file"),
        (["train", "classify", "--data", "empty.csv", "--out", "run"], "empty.csv:1: no line can be used"),
        (["train", "classify", "--data", "columns.csv", "--out", "run"], "columns.csv:1: no column 'label'"),
        (["train", "translate", "--data", "latin.tsv", "--out", "run"], "latin.tsv:2: not valid UTF-8"),
        (
            ["train", "classify", "--data", "good.csv", "--out", "run", "--learning-rate", "0"],
            "rate and clip must be positive",
        ),
        (
            ["train", "classify", "--data", "good.csv", "--out", "run", "--precision", "fp61"],
            "must be no, bf16 or fp16",
        ),
        (
            ["train", "classify", "--data", "good.csv", "--out", "run", "--heads", "3"],
            "d_model must be a multiple of heads = 3, but is 128",
        ),
        (
            ["train", "classify", "--data", "good.csv", "--out", "run", "--pooling", "median"],
            "pooling must be one of mean, max, first, attention, got 'median'",
        ),
        (["resume", "none"], "none: no such run"),
        (["predict", "good.csv", "x"], "not a run directory"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    words: list[str], message: str, regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("")
    Path("columns.csv").write_text("text,mood\nx,y\n")
    Path("latin.tsv").write_bytes(b"good\tbon\ncafe\tcaf\xe9\n")
    Path("good.csv").write_text(Path(classes(tmp_path)).read_text())
    said = regard(*words)
    assert said.code == 1
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err
    assert not Path("run").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_a_lack_of_memory_is_one_line(error: Exception, regard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        raise error

    monkeypatch.setattr(Run, "open", fails)
    said = regard("predict", "run", "text")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("regard: there is not enough memory")
    assert len(said.err.splitlines()) == 1


def test_a_damaged_checkpoint_to_start_from_is_one_line(regard: Command, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    for name, text in (("config.json", '{"model_type": "bert"}'), ("tokenizer.json", "{}")):
        (tmp_path / "start" / name).write_text(text)
    words = (
        "--data",
        classes(tmp_path),
        "--held-out",
        10,
        "--pretrained",
        tmp_path / "start",
        "--out",
        tmp_path / "run",
    )
    said = regard("train", "classify", *words)
    assert said.code == 1
    assert len(said.err.splitlines()) == 1
    assert "tokenizer.json is no tokenizer" in said.err


def test_bad_lines_are_counted_and_left_out_when_asked_to(regard: Command, tmp_path: Path) -> None:
    path = Path(pairs(tmp_path))
    path.write_bytes(path.read_bytes() + b"caf\xe9\tz\nonly one\n")
    said = regard("train", "translate", "--data", path, "--held-out", 5, "--out", tmp_path / "run", "--skip-bad", *TINY)
    assert said.code == 0
    assert "2 bad lines left out, the first: " in said.err
    assert f"{path}:161: not valid UTF-8" in said.err


def test_ctrl_c_saves_and_says_how_to_go_on(regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.training import progress_bar

    monkeypatch.setattr(progress_bar.ProgressBar, "step", Signals(3, signal.SIGINT).step)
    said = regard("train", "classify", "--data", classes(tmp_path), "--held-out", 20, "--out", tmp_path / "run", *TINY)
    assert said.code == 130
    assert f"Stopped and saved at step 3. Go on with: regard resume {tmp_path / 'run'}" in said.err
    monkeypatch.undo()
    assert Run.open(tmp_path / "run").checkpoints()[0].name == "step-00000003.safetensors"
    said = regard("resume", tmp_path / "run")
    assert said.code == 0
    assert "from step 3" in said.err


def test_brackets_in_a_path_are_told_as_they_are(regard: Command, reviews: Run, tmp_path: Path) -> None:
    out = tmp_path / "[red]says.json"
    assert f"{out}: 1 answers" in regard("predict", reviews.folder, "the cat sees", "--out", out).err
    assert f"{tmp_path}/[none]: no such run" in regard("resume", tmp_path / "[none]").err


def test_a_run_is_exported(regard: Command, reviews: Run, tmp_path: Path) -> None:
    said = regard("export", reviews.folder, tmp_path / "out", "--no-onnx")
    assert said.code == 0
    assert "model.safetensors" in said.out


def test_without_the_libraries_of_the_command_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[:2] == ["regard", "cli"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"the command needs typer: pip install 'regard\[command\]'"):
        importlib.import_module("regard.cli")


PLAN = ["--sequence", 4096, "--ranks", 4, "--memory", "300MB", "--flops", "40G", "--bandwidth", "1GB/s"]
WORDS = "layers=2,d_model=64,heads=4,vocabulary=1000"


def test_a_plan_says_which_layout_to_take_and_why(regard: Command) -> None:
    said = regard("plan", "--model", WORDS, *PLAN)
    assert said.code == 0
    assert "memory" in said.out
    assert "Take data 4" in said.out
    assert "not ring 4: " in said.out
    found = json.loads(regard("plan", "--model", WORDS, *PLAN, "--json").out)
    assert found["weights"] == sum(n * 64 for n in (1000, 1024)) + 2 * 49_984 + 128
    assert found["take"] == found["layouts"][0]["layout"]
    assert found["layouts"][0]["fits"] is True
    assert len(found["layouts"]) == 10


def test_a_plan_that_fits_nowhere_ends_with_1(regard: Command) -> None:
    said = regard("plan", "--model", WORDS, *[word if word != "300MB" else "1MB" for word in PLAN])
    assert said.code == 1
    assert "No layout fits" in said.out


def test_a_plan_takes_a_run_and_a_checkpoint(regard: Command, tmp_path: Path) -> None:
    run = new_run(tmp_path, "language", options={"context": 16})
    model = run.task.model(run.processor)
    save(model, tmp_path / "checkpoint")
    count = sum(weight.numel() for weight in model.parameters())
    for given in (run.folder, tmp_path / "checkpoint", tmp_path / "checkpoint" / "config.json"):
        assert json.loads(regard("plan", "--model", given, *PLAN, "--json").out)["weights"] == count


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "nowhere", *PLAN], "nowhere: there is no such run or checkpoint; or say layers=12"),
        (["--model", "layers=2,depth=3", *PLAN], "--model: 'depth' is no part of a language model; parts are voc"),
        (["--model", "layers=2,d_model=64,heads=4", *PLAN], "--model: say vocabulary=... too"),
        (["--model", "layers=two", *PLAN], "--model: layers must be a whole number of at least 1, but is 'two'"),
        (["--model", "layers=0", *PLAN], "--model: layers must be a whole number of at least 1, but is '0'"),
        (["--model", f"{WORDS},gated=maybe", *PLAN], "--model: gated must be true or false, but is 'maybe'"),
        (
            ["--model", f"{WORDS},kv_heads=3", *PLAN],
            "heads must be a positive multiple of kv_heads, got heads=4 and kv_heads=3",
        ),
        (["--model", f"{WORDS},norm=none", *PLAN], "norm must be one of layer, rms, unit_rms, got 'none'"),
        (["--model", WORDS, *PLAN[:6], "--flops", "40G"], "say --flops and --bandwidth, or let this machine be"),
        (["--model", WORDS, *PLAN, "--memory", "much"], "--memory must be a number with a unit, such as 16GB"),
        (["--model", "en-fr", *PLAN], "en-fr: there is no such run or checkpoint"),
    ],
)
def test_a_plan_tells_what_it_was_not_told(regard: Command, words: list, told: str) -> None:
    said = regard("plan", *words)
    assert said.code == 1
    assert told in said.err


def test_processes_that_share_sequences_are_told_when_a_run_goes_on(regard: Command, tmp_path: Path) -> None:
    run = new_run(tmp_path, "language", options={"context": 16})
    said = regard("resume", run.folder, "--sequence-ranks", 2)
    assert said.code == 1
    assert "--sequence-ranks 2 must divide the number of processes, which is 1" in said.err
    assert "shard must be data or fsdp, but is 'all'" in regard("resume", run.folder, "--shard", "all").err


def test_the_three_splits_are_named(regard: Command, tmp_path: Path) -> None:
    said = regard("train", "classify", "--data", classes(tmp_path), "--held-out", 12, "--out", tmp_path / "run", *TINY)
    rows = "90 train, 8 validation, 22 test"
    assert f"classify: {rows}; 4 steps" in said.err
    assert rows in said.out
    assert "step 4: validation loss" in said.err
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["rows"] == {"train": 90, "validation": 8, "test": 22}
    assert about["results"]["rows"] == about["rows"] | {"left_out": 0}
    assert rows in regard("evaluate", tmp_path / "run").out
