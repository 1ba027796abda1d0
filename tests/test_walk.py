"""docs/inside/index.md follows four calls: its files and functions exist, and the calls really pass through them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import regard as rg

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/inside/index.md"
PACKAGE = Path(rg.__file__).parent


def references(text: str) -> list[tuple[str, str]]:
    """Return the (file, name) pairs of the second column: `file`: `name`, `name`, `file`: `name`."""
    results = []
    for row in re.findall(r"^\|[^|]*\| (`[^|]*/?[^|]*`) \|$", text, re.MULTILINE):
        path = ""
        for word in re.findall(r"`([^`]+)`", row):
            if re.search(r"\.(py|cpp|h)$", word):
                path = word
            else:
                results.append((path, word))
    return results


@pytest.mark.parametrize(("path", "name"), references(PAGE.read_text("utf-8")), ids="-".join)
def test_names_of_the_walk_exist(path: str, name: str) -> None:
    file = ROOT / path if path.startswith("csrc/") else ROOT / "src/regard" / path
    text = file.read_text("utf-8")
    *owner, last = name.split(".")
    if path.startswith("csrc/"):
        assert re.search(rf"^[^/\n]*\b{last}\b *[({{]", text, re.MULTILINE), f"{path} does not define {name}"
        return
    if owner:
        match = re.search(rf"^class {owner[0]}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert match, f"{path} has no class {owner[0]}"
        assert re.search(rf"^    def {last}\b", match[0], re.MULTILINE), f"{path} does not define {name}"
        return
    assert re.search(rf"^(def|class) {last}\b|^{last}\b.*=", text, re.MULTILINE), f"{path} does not define {name}"


def test_every_walk_has_steps() -> None:
    assert len(references(PAGE.read_text("utf-8"))) > 60


def called(run: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return the file and qualified name of every function of the package that `run` calls."""
    codes = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    paths = ((Path(code.co_filename), code.co_qualname) for code in codes)
    return {(str(path.relative_to(PACKAGE)), name) for path, name in paths if path.is_relative_to(PACKAGE)}


def steps(title: str) -> list[tuple[str, str]]:
    """Return the Python functions that a section names."""
    section = PAGE.read_text("utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    return [(path, name) for path, name in references(section) if re.search(r"\.py .*\b[a-z_]+$", f"{path} {name}")]


def may_be_skipped(path: str, name: str) -> bool:
    """Whether a call on this machine need not take a step: it runs on GPUs only, or once in a process."""
    if path.startswith("engines/triton/"):
        return True
    module = importlib.import_module("regard." + path.removesuffix(".py").replace("/", "."))
    return hasattr(getattr(module, name, None), "cache_info")


def untaken(title: str, run: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return the steps of a section that `run` does not take."""
    return sorted(step for step in set(steps(title)) - called(run) if not may_be_skipped(*step))


def attend() -> None:
    q, k, v = torch.randn(3, 1, 2, 70, 8)
    rg.attention(q, k, v, mask=rg.causal())
    described = rg.Attention(mask=rg.causal())
    described.explain(q, k, v)
    for _ in range(3):
        described(q, k, v)
    q.requires_grad_()
    rg.attention(q, k, v, mask=rg.causal()).sum().backward()
    biased = rg.Attention(score=rg.Cosine(), bias=torch.zeros(70, 70), mask=rg.global_tokens([3]))
    biased(q.detach(), k, v)
    biased(q, k, v).sum().backward()


def test_a_call_of_attention_takes_the_steps_of_its_walk() -> None:
    rg.clear_cache()
    assert untaken("One call of `rg.attention`", attend) == []


def test_a_training_takes_the_steps_of_its_walk(regard: Any, tmp_path: Path) -> None:
    rows = [f"{word} {n},{word}" for n in range(30) for word in ("good", "bad")]
    (tmp_path / "reviews.csv").write_text("text,label\n" + "\n".join(rows))
    words = "--held-out 20 --d-model 8 --layers 1 --heads 1 --vocabulary 100 --steps 3 --warmup 1 --tokens 64"
    options = ["--data", tmp_path / "reviews.csv", "--out", tmp_path / "run", "--evaluate-every", 2, "--save-every", 2]
    assert untaken("One `regard train`", lambda: regard("train", "classify", *options, *words.split())) == []


def test_a_model_of_transformers_takes_the_steps_of_its_walk() -> None:
    transformers = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ids = torch.tensor([[5, 6, 7]])

    def run() -> None:
        enable()
        config = transformers.BertConfig(**sizes, vocab_size=10)
        model = transformers.BertModel._from_config(config, attn_implementation="regard").eval()
        model(ids, attention_mask=torch.ones_like(ids), output_attentions=True)
        model(ids, attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())
        from regard.integrations.transformers import coverage

        coverage(model, input_ids=ids)

    assert untaken('One `attn_implementation="regard"`', run) == []


def test_a_capture_takes_the_steps_of_its_walk(tmp_path: Path) -> None:
    from regard.view import Change, capture

    config = rg.models.LanguageConfig(20, d_model=8, layers=1, heads=2, d_hidden=8)
    model, ids = rg.models.LanguageModel(config).eval(), torch.tensor([[5, 6, 7]])

    def run() -> None:
        with torch.no_grad(), capture(model) as record:
            model(ids)
        record.weights(0)
        record.ablate(Change(layer=0, head=[0], factor=0.0))
        record.save(tmp_path / "page.html")
        with torch.no_grad(), capture(model):
            model.generate(ids, max_new_tokens=2)
        q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)
        rg.Attention(score=lambda score, b, h, i, j: score.tanh()).weights(q, k)

    assert untaken("One `capture`", run) == []
