"""The commands on checkpoints and GGUF files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")

from regard.cli import chat
from regard.predictors import open_model
from tests.conftest import Command
from tests.models.gguf_files import write_gguf
from tests.predictors.tiny_checkpoints import CHAT, save_checkpoint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "llama", "llama", pairs=False)


def test_one_text_is_streamed_and_several_are_lines(llama: Path, regard: Command) -> None:
    one = regard("predict", llama, "the cat", "--max-new-tokens", 5)
    assert one.code == 0
    two = regard("predict", llama, "the cat", "a dog", "--max-new-tokens", 5).out.splitlines()
    assert two[0].split("\t")[0].split() == one.out.split()
    assert [len(line.split("\t")) for line in two] == [2, 2]
    record = json.loads(regard("predict", llama, "the cat", "--max-new-tokens", 5, "--json").out)
    assert len(record["tokens"]) == 5


def test_labels_do_not_replace_other_values_in_json(tmp_path: Path, regard: Command) -> None:
    names = {"id2label": {str(n): name for n, name in enumerate(("input", "output", "score", "a", "b"))}}
    save_checkpoint(tmp_path, "bert-sequence", config=names)
    assert regard("predict", tmp_path, "the cat").code == 0
    result = regard("predict", tmp_path, "the cat", "--json")
    assert result.code == 1
    assert "a label is 'input', the name of another value in JSON; omit --json" in result.err
    assert not result.out


def test_a_gguf_file_predicts_opens_in_the_viewer_and_is_evaluated(tmp_path: Path, regard: Command) -> None:
    path, page = tmp_path / "model.gguf", tmp_path / "page.html"
    write_gguf(path)
    assert regard("predict", path, "ab cd", "--no-chat", "--max-new-tokens", 3).code == 0
    about = json.loads(regard("view", path, "ab cd", "-o", page, "--json").out)
    assert len(about["attentions"]) == 2
    assert about["note"].startswith("next: ")
    assert '" cd"' in page.read_text() or '"cd"' in page.read_text()
    (tmp_path / "book.txt").write_text("ab cd\nab cd xyx\n")
    metrics = json.loads(regard("evaluate", path, "--data", tmp_path / "book.txt", "--json").out)["metrics"]
    assert metrics["perplexity"] > 1
    assert "perplexity" in regard("evaluate", path, "--data", tmp_path / "book.txt").out


@pytest.mark.parametrize(
    ("case", "given"),
    [
        ("bert-sequence", "the cat"),
        ("bert-token", "the cat"),
        ("bert-mlm", "the [MASK] sat"),
        ("bert-answer", "who sat ?\tthe cat sat"),
        ("bert", "the cat"),
        ("marian", "the cat"),
        ("vit-classifier", "image"),
        ("detr", "image"),
        ("whisper", "audio"),
    ],
)
def test_every_kind_opens_in_the_viewer(case: str, given: str, tmp_path: Path, regard: Command) -> None:
    folder, page = save_checkpoint(tmp_path / case, case, pairs=case != "marian"), tmp_path / "page.html"
    if given == "image":
        pytest.importorskip("PIL.Image").new("RGB", (64, 64), "red").save(tmp_path / "in.png")
        given = str(tmp_path / "in.png")
    if given == "audio":
        pytest.importorskip("soundfile").write(tmp_path / "in.wav", [0.1, -0.1] * 4000, 16000)
        given = str(tmp_path / "in.wav")
    result = regard("view", folder, given, "-o", page, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["attentions"]


def test_files_of_outputs(tmp_path: Path, regard: Command) -> None:
    save_checkpoint(tmp_path / "whisper", "whisper", pairs=False)
    noise = np.random.default_rng(0).standard_normal(4000) / 4
    pytest.importorskip("soundfile").write(tmp_path / "in.wav", noise, 16000, subtype="FLOAT")
    result = regard("predict", tmp_path / "whisper", tmp_path / "in.wav", "-o", tmp_path / "out.srt")
    assert result.code == 0, result.err
    assert (tmp_path / "out.srt").read_text().startswith("1\n00:00:00,000 --> 00:00:00,250\n")
    save_checkpoint(tmp_path / "detr", "detr")
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 64), "red").save(tmp_path / "in.png")
    words = ("predict", tmp_path / "detr", tmp_path / "in.png", tmp_path / "in.png", "--threshold", 0, "-o")
    assert regard(*words, tmp_path / "boxes").code == 0
    assert [path.name for path in sorted((tmp_path / "boxes").iterdir())] == ["0001.png", "0002.png"]
    assert "are written as .png or .jpg or .json" in regard(*words, tmp_path / "out.txt").err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "folder", "x"], "folder: is neither a run nor a checkpoint; expected run.json or config.json"),
        (["predict", "of_gguf", "x"], "pass the file of_gguf/a.gguf"),
        (["predict", "notes.txt", "x"], "notes.txt: is not a model"),
        (["predict", "nowhere", "x"], "nowhere: no such run or checkpoint"),
        (["predict", "./no/where", "x"], "no such run or checkpoint"),
        (["predict", "unknown", "x"], "'lama' is not supported; the nearest is llama; supported: bert"),
        (["predict", "other", "x"], "the nearest is LlamaForCausalLM"),
        (["predict", "of_gguf/a.gguf", "x"], "is not a valid GGUF file"),
        (["predict", "llama", "cat " * 50], "has 50 tokens, but the model takes at most 39; shorten it"),
        (
            ["predict", "llama", "cat", "--timestamps"],
            "--timestamps does not apply to llama, which is a language model",
        ),
        (["predict", "llama", "cat", "--chat"], "--chat: llama has no chat template"),
        (["evaluate", "llama"], "give a text file with --data"),
        (["evaluate", "llama", "--data", "notes.txt", "--longest", "3"], "--longest applies to runs"),
        (["evaluate", "llama", "--data", "empty.txt"], "empty.txt: is empty"),
        (["predict", "whisper", "notes.txt.wav"], "notes.txt.wav: cannot be read as audio"),
        (["view", "whisper", "none.wav"], "none.wav: no such file"),
        (["serve", "whisper"], "give the path of an audio file"),
    ],
)
def test_bad_input_is_one_line(words: list, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               regard: Command) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "of_gguf", "unknown", "other"):
        Path(name).mkdir()
    Path("of_gguf/a.gguf").write_text("no model")
    Path("notes.txt").write_text("notes")
    Path("notes.txt.wav").write_text("notes")
    Path("empty.txt").write_text("\n")
    if "llama" in words:
        save_checkpoint(Path("llama"), "llama", pairs=False)
    if "whisper" in words:
        save_checkpoint(Path("whisper"), "whisper", pairs=False)
    if "unknown" in words or "other" in words:
        save_checkpoint(Path("unknown"), "llama", config={"model_type": "lama"})
        save_checkpoint(Path("other"), "llama", config={"architectures": ["LlamaForCausalML"]})
    result = regard(*words)
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that a user types, each read by `input`; then the input ends."""
    lines: list[str] = []

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return lines


def test_a_conversation_at_a_terminal(
    tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "llama", "llama", pairs=False, tokenizer_config={"chat_template": CHAT})
    predictor = open_model(tmp_path / "llama")
    prompts: list[str] = []
    monkeypatch.setattr(predictor, "pieces", lambda ids: prompts.append(predictor.tokenizer.decode(ids)) or ["re", "d"])
    typed += ["a cat", "", "a dog", "/new", "the mat", "cat " * 50]
    chat.interact(predictor)
    assert prompts == ["a cat . who", "a cat . red . a dog . who", "the mat . who"]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["red", "red", "red", ""]
    assert "the conversation has 57 tokens" in printed.err


def test_lines_at_a_terminal(tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "bert", "bert-mlm")
    typed += ["the [MASK] sat", "no mask"]
    chat.interact(open_model(tmp_path / "bert"))
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()[0].split("\t")) == 3
    assert "expected [MASK]" in printed.err


def test_clip_labels_an_image_and_opens_in_the_viewer(tmp_path: Path, regard: Command) -> None:
    image = pytest.importorskip("PIL.Image")
    model, picture, page = (
        save_checkpoint(tmp_path / "clip", "clip-largest"),
        tmp_path / "in.png",
        tmp_path / "page.html",
    )
    image.new("RGB", (40, 30), "red").save(picture)
    record = json.loads(regard("predict", model, picture, "--labels", "the cat,a dog", "--json").out)
    assert record["output"] in ("the cat", "a dog")
    assert record["the cat"] + record["a dog"] == pytest.approx(1, abs=1e-5)
    assert "--labels" in regard("predict", model, picture).err
    assert (
        "--labels does not apply"
        in regard("predict", save_checkpoint(tmp_path / "b", "bert-mlm"), "a", "--labels", "a").err
    )
    about = json.loads(regard("view", model, picture, "-o", page, "--json").out)
    assert len(about["attentions"]) == 3


def test_a_text_longer_than_the_model_takes_is_not_captured(llama: Path, tmp_path: Path, regard: Command) -> None:
    run = regard("view", llama, "cat " * 100, "-o", tmp_path / "page.html")
    assert run.code == 1
    assert "100 tokens" in run.err
    assert "at most 40" in run.err
