"""The `regard` command: output, errors and exit codes."""

from __future__ import annotations

import importlib
import json
import re
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


def test_training_prints_metrics_and_baselines(regard: Command, tmp_path: Path) -> None:
    result = regard(
        "train", "classify", "--data", classes(tmp_path), "--held-out", 20, "--out", tmp_path / "run", *TINY
    )
    assert result.code == 0
    assert "accuracy" in result.out
    assert "most frequent class" in result.out
    assert "TF-IDF + logistic regression" in result.out
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["results"]["metrics"].keys() >= {"accuracy", "f1"}
    assert about["options"]["d_model"] == 16
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_results_are_printed_as_json(regard: Command, tmp_path: Path) -> None:
    result = regard(
        "train", "embed", "--data", pairs(tmp_path), "--held-out", 20, "--out", tmp_path / "run", "--json", *TINY
    )
    assert json.loads(result.out)["baselines"]["TF-IDF of words"].keys() == {"recall@1", "recall@10", "mrr"}


def test_evaluation_of_other_data(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\nthe cat sees,cat\na dog hears,none\n")
    before = (reviews.folder / "run.json").read_text()
    result = regard("evaluate", reviews.folder, "--data", tmp_path / "test.csv", "--json")
    assert json.loads(result.out)["rows"]["test"] == 2
    assert (reviews.folder / "run.json").read_text() == before  # the stored metrics of the run are kept
    (tmp_path / "test.csv").write_text("text,label\nthe cat sees,cat\na dog hears,what\n")
    result = regard("evaluate", reviews.folder, "--data", tmp_path / "test.csv")
    assert result.code == 1
    assert f"{tmp_path}/test.csv:3: the label 'what' was not seen in training" in result.err
    result = regard("evaluate", reviews.folder, "--data", tmp_path / "test.csv", "--skip-bad", "--json")
    assert "1 bad lines left out" in result.err
    assert json.loads(result.out)["metrics"]["accuracy"] == 1


def test_evaluation_with_another_maximum_length(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\nthe cat sees the dog,cat\na dog hears,none\n")
    words = "evaluate", reviews.folder, "--data", tmp_path / "test.csv", "--json", "--longest"
    assert json.loads(regard(*words, 9).out)["longest"] == 9
    result = regard(*words, 5)
    assert result.code == 1
    assert "test.csv:2: " in result.err  # with two special tokens
    assert "--longest must be 1 to 512, the positions of the model of" in regard(*words, 513).err


def test_predictions_have_a_score(regard: Command, reviews: Run) -> None:
    result = regard("predict", reviews.folder, "the cat sees the dog", "a dog hears")
    rows = [line.split("\t") for line in result.out.splitlines()]
    assert [row[0] for row in rows] == ["cat", "none"]
    assert all(0.5 <= float(row[1]) <= 1 for row in rows)


@pytest.mark.parametrize("command", ["predict", "view", "evaluate", "export"])
def test_models_are_frozen_unless_exported(
    command: str, regard: Command, reviews: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Run.model, []
    monkeypatch.setattr(Run, "model", lambda run, **options: (calls.append(options), real(run, **options))[1])
    given = {
        "predict": ["What a film!"], "view": ["What a film!", "--out", tmp_path / "page.html"],
        "evaluate": ["--data", classes(tmp_path)], "export": [tmp_path / "out", "--no-onnx"],
    }[command]  # fmt: skip
    assert regard(command, reviews.folder, *given).code == 0
    assert calls == ([{}] if command == "export" else [{"frozen": True}])


def test_files_and_standard_input_give_the_same_predictions(regard: Command, reviews: Run, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the cat sees\n\na dog hears\n", encoding="utf-8-sig")
    from_file = regard("predict", reviews.folder, tmp_path / "in.txt", "--json").out
    piped = regard("predict", reviews.folder, "--json", given=b"the cat sees\n\na dog hears\n").out
    assert from_file == piped
    first = json.loads(from_file.splitlines()[0])
    assert (first["input"], first["output"]) == ("the cat sees", "cat")
    assert first["cat"] == first["score"]


def test_input_that_is_not_utf8_is_an_error_with_its_line(regard: Command, reviews: Run) -> None:
    result = regard("predict", reviews.folder, given=b"the cat\ncaf\xe9\n")
    assert result.code == 1
    assert "standard input:2: not valid UTF-8 (byte 0xe9 at 4)" in result.err
    first, second = regard("predict", reviews.folder, "--skip-bad", given=b"the cat\ncaf\xe9\n").out.splitlines()
    assert first
    assert second == ""


def test_nothing_to_predict_is_an_error(regard: Command, reviews: Run) -> None:
    assert "nothing to predict" in regard("predict", reviews.folder).err


def test_tasks_are_listed_on_one_line_each(regard: Command) -> None:
    lines = regard("tasks").out.splitlines()
    about = json.loads(regard("tasks", "--json").out)
    assert about["translate"]["columns"] == ["source", "target"]
    assert [line.split()[0] for line in lines[: len(about)]] == list(about)
    assert max(map(len, lines)) <= 80


def test_one_task_is_described_with_its_data_and_defaults(regard: Command) -> None:
    out = regard("tasks", "translate").out
    assert "I am hungry. → J'ai faim." in out
    assert "--learning-rate" in out
    assert "did you mean translate?" in regard("tasks", "translat").err


def test_commands_are_listed_in_the_order_of_use(regard: Command) -> None:
    lines = regard("--help").out.split("Commands")[1].splitlines()
    names = [line[2:].split()[0] for line in lines if re.match(r"│ [a-z]", line)]
    order = "train resume evaluate predict view serve export tasks info check lab plan"
    assert names == order.split()


def test_examples_are_on_lines_of_their_own(regard: Command) -> None:
    lines = [line.strip() for line in regard("lab", "--help").out.splitlines()]
    assert "regard lab -o lab.html" in lines
    assert "regard lab variance saturation" in lines


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["trian"], "train"),
        (["train", "translat"], "translate"),
        (["train", "classify", "--stpes", "3"], "--steps"),
        (["predict", "run", "--jsn"], "--json"),
    ],
)
def test_a_misspelt_word_suggests_the_nearest_one(words: list[str], right: str, regard: Command) -> None:
    result = regard(*words)
    assert result.code == 2
    assert right in result.err


@pytest.mark.parametrize(
    "words", [[], ["train"], ["train", "masked"], ["resume"], ["evaluate"], ["predict"], ["export"], ["tasks"]]
)
def test_every_command_has_help_with_an_example(words: list[str], regard: Command) -> None:
    result = regard(*words, "--help")
    assert result.code == 0
    assert (
        "regard " + (" ".join(words) or "train") in result.out.split("Options")[0].split("Usage")[-1].split("\n", 1)[1]
    )


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
        (["predict", "good.csv", "x"], "is not a model; pass a GGUF file"),
    ],
)
def test_a_user_error_is_one_line(
    words: list[str], message: str, regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("")
    Path("columns.csv").write_text("text,mood\nx,y\n")
    Path("latin.tsv").write_bytes(b"good\tbon\ncafe\tcaf\xe9\n")
    Path("good.csv").write_text(Path(classes(tmp_path)).read_text())
    result = regard(*words)
    assert result.code == 1
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert "Traceback" not in result.err
    assert not Path("run").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_out_of_memory_is_one_line(error: Exception, regard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        raise error

    monkeypatch.setattr(Run, "open", fails)
    result = regard("predict", "en-fr", "text")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("regard: there is not enough memory")
    assert len(result.err.splitlines()) == 1


def test_a_damaged_pretrained_checkpoint_is_one_line(regard: Command, tmp_path: Path) -> None:
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
    result = regard("train", "classify", *words)
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert "tokenizer.json is not a valid tokenizer" in result.err


def test_skip_bad_counts_and_skips_bad_lines(regard: Command, tmp_path: Path) -> None:
    path = Path(pairs(tmp_path))
    path.write_bytes(path.read_bytes() + b"caf\xe9\tz\nonly one\n")
    result = regard(
        "train", "translate", "--data", path, "--held-out", 5, "--out", tmp_path / "run", "--skip-bad", *TINY
    )
    assert result.code == 0
    assert "2 bad lines left out, the first: " in result.err
    assert f"{path}:161: not valid UTF-8" in result.err


def test_ctrl_c_saves_the_run(regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.training import progress_bar

    monkeypatch.setattr(progress_bar.ProgressBar, "step", Signals(3, signal.SIGINT).step)
    result = regard(
        "train", "classify", "--data", classes(tmp_path), "--held-out", 20, "--out", tmp_path / "run", *TINY
    )
    assert result.code == 130
    assert f"Stopped and saved at step 3. Resume with: regard resume {tmp_path / 'run'}" in result.err
    monkeypatch.undo()
    assert Run.open(tmp_path / "run").checkpoints()[0].name == "step-00000003.safetensors"
    result = regard("resume", tmp_path / "run")
    assert result.code == 0
    assert "from step 3" in result.err


def test_brackets_in_a_path_are_printed_unchanged(regard: Command, reviews: Run, tmp_path: Path) -> None:
    out = tmp_path / "[red]says.json"
    assert f"{out}: 1 answers" in regard("predict", reviews.folder, "the cat sees", "--out", out).err
    assert f"{tmp_path}/[none]: no such run" in regard("resume", tmp_path / "[none]").err


def test_a_run_is_exported(regard: Command, reviews: Run, tmp_path: Path) -> None:
    result = regard("export", reviews.folder, tmp_path / "out", "--no-onnx")
    assert result.code == 0
    assert "model.safetensors" in result.out


def test_a_missing_typer_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "regard_cli"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"the command needs typer: pip install 'regard\[command\]'"):
        importlib.import_module("regard_cli")


PLAN = ["--sequence", 4096, "--ranks", 4, "--memory", "300MB", "--flops", "40G", "--bandwidth", "1GB/s"]
WORDS = "layers=2,d_model=64,heads=4,vocabulary=1000"


def test_plan_recommends_a_layout_with_reasons(regard: Command) -> None:
    result = regard("plan", "--model", WORDS, *PLAN)
    assert result.code == 0
    assert "memory" in result.out
    assert "Take data 4" in result.out
    assert "not ring 4: " in result.out
    report = json.loads(regard("plan", "--model", WORDS, *PLAN, "--json").out)
    assert report["weights"] == sum(n * 64 for n in (1000, 1024)) + 2 * 49_984 + 128
    assert report["take"] == report["layouts"][0]["layout"]
    assert report["layouts"][0]["fits"] is True
    assert len(report["layouts"]) == 10


def test_plan_exits_with_1_if_no_layout_fits(regard: Command) -> None:
    result = regard("plan", "--model", WORDS, *[word if word != "300MB" else "1MB" for word in PLAN])
    assert result.code == 1
    assert "No layout fits" in result.out


def test_plan_reads_a_run_and_a_checkpoint(regard: Command, tmp_path: Path) -> None:
    run = new_run(tmp_path, "language", options={"context": 16})
    model = run.task.model(run.processor)
    save(model, tmp_path / "checkpoint")
    count = sum(weight.numel() for weight in model.parameters())
    for given in (run.folder, tmp_path / "checkpoint", tmp_path / "checkpoint" / "config.json"):
        assert json.loads(regard("plan", "--model", given, *PLAN, "--json").out)["weights"] == count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere", *PLAN], "nowhere: there is no such run or checkpoint; or give layers=12"),
        (
            ["--model", "layers=2,depth=3", *PLAN],
            "--model: 'depth' is not an option of a language model; ",
        ),
        (["--model", "layers=2,d_model=64,heads=4", *PLAN], "--model: vocabulary is missing; add vocabulary=..."),
        (["--model", "layers=two", *PLAN], "--model: layers must be a whole number of at least 1, but is 'two'"),
        (["--model", "layers=0", *PLAN], "--model: layers must be a whole number of at least 1, but is '0'"),
        (["--model", f"{WORDS},gated=maybe", *PLAN], "--model: gated must be true or false, but is 'maybe'"),
        (
            ["--model", f"{WORDS},kv_heads=3", *PLAN],
            "heads must be a positive multiple of kv_heads, got heads=4 and kv_heads=3",
        ),
        (["--model", f"{WORDS},norm=none", *PLAN], "layer, rms, unit_rms, layer_no_bias, got 'none'"),
        (["--model", WORDS, *PLAN[:6], "--flops", "40G"], "give --flops and --bandwidth, or let this machine be"),
        (["--model", WORDS, *PLAN, "--memory", "much"], "--memory must be a number with a unit, such as 16GB"),
        (["--model", "en-fr", *PLAN], "en-fr: there is no such run or checkpoint"),
    ],
)
def test_plan_errors(regard: Command, words: list, message: str) -> None:
    result = regard("plan", *words)
    assert result.code == 1
    assert message in result.err


def test_resume_checks_sequence_ranks_and_shard(regard: Command, tmp_path: Path) -> None:
    run = new_run(tmp_path, "language", options={"context": 16})
    result = regard("resume", run.folder, "--sequence-ranks", 2)
    assert result.code == 1
    assert "--sequence-ranks 2 must divide the number of processes, which is 1" in result.err
    assert "shard must be data or fsdp, but is 'all'" in regard("resume", run.folder, "--shard", "all").err


def test_the_sizes_of_the_three_splits_are_printed(regard: Command, tmp_path: Path) -> None:
    result = regard(
        "train", "classify", "--data", classes(tmp_path), "--held-out", 12, "--out", tmp_path / "run", *TINY
    )
    rows = "90 train, 8 validation, 22 test"
    assert f"classify: {rows}; 4 steps" in result.err
    assert rows in result.out
    assert "step 4: validation loss" in result.err
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["rows"] == {"train": 90, "validation": 8, "test": 22}
    assert about["results"]["rows"] == about["rows"] | {"left_out": 0}
    assert rows in regard("evaluate", tmp_path / "run").out
