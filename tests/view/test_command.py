"""`regard view` and `regard serve`, of runs of every text task, and of checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import regard as rg
from regard import cli
from regard.tasks import train
from regard.tasks.tokens import learn
from regard.view import server
from tests.tasks.toy import DATA, begun
from tests.view.models import PAIR

TEXTS = {"masked": "the <mask> cat"}


def regard(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Runs the command as the shell would; its exit code."""
    monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", DATA)
def test_a_run_of_any_text_task_becomes_a_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path, name, steps=1)
    train(run, None)
    text = TEXTS.get(name, "the red cat")
    assert regard(monkeypatch, "view", run.folder, text, "-o", tmp_path / "page.html", "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["note"]
    written = (tmp_path / "page.html").read_text()
    assert written.startswith("<!doctype html>")
    assert '" cat"' in written or '"cat"' in written or '"c"' in written
    if name == "translate":
        assert ["encoder" in line or "decoder" in line or "cross" in line for line in about["attentions"]] == [True] * 3


def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path, "masked", steps=1)
    train(run, None)
    for words, said in (
        (("view", run.folder, "no hidden word"), "expected <mask>"),
        (("view", run.folder, "the <mask> cat", "-o", tmp_path / "no" / "page.html"), "there is no such folder"),
        (("view", run.folder, "the <mask> cat", "--lang", "xx"), "--lang must be en or zh"),
        (("view", tmp_path / "nowhere", "text"), "there is no such run"),
    ):
        assert regard(monkeypatch, *words) == 1
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_with_its_tokenizer_becomes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    tokenizer = learn(["the cat sat on the mat"] * 5, 300)
    config = rg.models.TransformerConfig(**{**vars(PAIR), "vocabulary": tokenizer.get_vocab_size()})
    rg.save(rg.models.Transformer(config), tmp_path / "model")
    assert regard(monkeypatch, "view", tmp_path / "model", "the cat", "-o", tmp_path / "page.html") == 1
    assert "has no tokenizer.json" in " ".join(capsys.readouterr().err.split())
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    assert regard(monkeypatch, "view", tmp_path / "model", "the cat", "-o", tmp_path / "page.html", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["attentions"]) == 6


def test_a_checkpoint_of_a_vision_transformer_takes_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    config = rg.models.VisionConfig(width=16, layers=1, heads=2, hidden=16, image=(16, 24), patch=8, classes=3)
    rg.save(rg.models.ImageClassifier(config), tmp_path / "model")
    image.new("RGB", (30, 20), "red").save(tmp_path / "in.png")
    out = tmp_path / "page.html"
    assert regard(monkeypatch, "view", tmp_path / "model", tmp_path / "in.png", "-o", out) == 0
    assert "data:image/png;base64," in out.read_text()
    assert regard(monkeypatch, "view", tmp_path / "model", out, "-o", out) == 1
    assert "cannot identify image file" in " ".join(capsys.readouterr().err.split())


def test_serve_looks_at_a_first_text_and_tells_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path, "masked", steps=1)
    train(run, None)
    served: list[server.Session] = []

    def serve(session: server.Session, *, port: int, lang: str, told: object) -> None:
        served.append(session)

    monkeypatch.setattr(server, "serve", serve)
    assert regard(monkeypatch, "serve", run.folder, "--port", 9001) == 0
    assert "<mask>" in served[0].record.streams["source"].tokens
    with pytest.raises(ValueError, match="expected <mask>"):
        served[0].run("nothing hidden")
