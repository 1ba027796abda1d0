"""`regard view` and `regard serve`, of runs of every text task, and of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from socket import socket

import pytest
import torch

pytest.importorskip("typer")

import regard as rg
from regard.data.tokenizer import train_tokenizer
from regard.tasks import train
from regard.view import server
from tests.conftest import Command
from tests.tasks.tiny_runs import DATA, new_run
from tests.view.models import PAIR

TEXTS = {"masked": "the <mask> cat"}


@pytest.mark.parametrize("name", DATA)
def test_view_writes_a_page_for_every_text_task(name: str, tmp_path: Path, regard: Command) -> None:
    run = new_run(tmp_path, name, steps=1)
    train(run, None)
    text = TEXTS.get(name, "the red cat")
    about = json.loads(regard("view", run.folder, text, "-o", tmp_path / "page.html", "--json").out)
    assert about["note"]
    written = (tmp_path / "page.html").read_text()
    assert written.startswith("<!doctype html>")
    assert '" cat"' in written or '"cat"' in written or '"c"' in written
    if name == "translate":
        assert ["encoder" in line or "decoder" in line or "cross" in line for line in about["attentions"]] == [True] * 3


def test_user_errors_are_one_line(tmp_path: Path, regard: Command) -> None:
    run = new_run(tmp_path, "masked", steps=1)
    train(run, None)
    for words, message in (
        (("view", run.folder, "no hidden word"), "expected <mask>"),
        (("view", run.folder, "the <mask> cat", "-o", tmp_path / "no" / "page.html"), "there is no folder"),
        (("view", run.folder, "the <mask> cat", "-o", tmp_path / "page.png"), "name the file page.html"),
        (("view", run.folder, "the <mask> cat", "--lang", "xx"), "--lang must be en or zh"),
        (("view", tmp_path / "nowhere", "text"), "no such run"),
    ):
        done = regard(*words)
        assert done.code == 1
        assert message in done.err


def test_view_writes_a_page_for_a_checkpoint(tmp_path: Path, regard: Command) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 5, 300)
    config = rg.models.TransformerConfig(**{**vars(PAIR), "vocabulary": tokenizer.get_vocab_size()})
    rg.save(rg.models.Transformer(config), tmp_path / "model")
    result = regard("view", tmp_path / "model", "the cat", "-o", tmp_path / "page.html")
    assert result.code == 1
    assert "has no tokenizer.json" in result.err
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    result = regard("view", tmp_path / "model", "the cat", "-o", tmp_path / "page.html", "--json")
    assert len(json.loads(result.out)["attentions"]) == 6


def test_a_checkpoint_of_a_vision_transformer_takes_an_image(tmp_path: Path, regard: Command) -> None:
    image = pytest.importorskip("PIL.Image")
    config = rg.models.VisionConfig(d_model=16, layers=1, heads=2, d_hidden=16, image=(16, 24), patch=8, classes=3)
    rg.save(rg.models.ImageClassifier(config), tmp_path / "model")
    image.new("RGB", (30, 20), "red").save(tmp_path / "in.png")
    out = tmp_path / "page.html"
    assert regard("view", tmp_path / "model", tmp_path / "in.png", "-o", out).code == 0
    assert "data:image/png;base64," in out.read_text()
    result = regard("view", tmp_path / "model", out, "-o", out)
    assert result.code == 1
    assert "cannot be read as an image" in result.err


def test_serve_shows_a_first_text_and_prints_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regard: Command
) -> None:
    run = new_run(tmp_path, "masked", steps=1)
    train(run, None)
    served: list[server.Session] = []

    def serve(session: server.Session, listener: socket, *, lang: str, report: object) -> None:
        served.append(session)
        listener.close()

    monkeypatch.setattr(server, "serve", serve)
    with server.listen(0) as free:  # a port that nothing else uses
        port = free.getsockname()[1]
    assert regard("serve", run.folder, "--port", port).code == 0
    assert "<mask>" in served[0].record.streams["source"].tokens
    with pytest.raises(ValueError, match="expected <mask>"):
        served[0].run("nothing hidden")
