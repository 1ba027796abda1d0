"""SmolLM2-135M from its GGUF file: the weights, tokens and greedy continuations of transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import regard as rg

WEIGHTS = Path(os.environ.get("REGARD_WEIGHTS", "weights"))
FOLDER, FILES = WEIGHTS / "smollm2", sorted(WEIGHTS.glob("*.gguf"))
pytestmark = pytest.mark.skipif(not FOLDER.exists() or not FILES, reason=f"needs smollm2/ and *.gguf in {WEIGHTS}")
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n",
)


@pytest.fixture(scope="module")
def model() -> rg.models.LanguageModel:
    return rg.load(FILES[0], weights="float32")  # type: ignore[return-value]


def test_weights_and_configuration_are_those_of_the_folder() -> None:
    ours, folder = rg.load(FILES[0]), rg.load(FOLDER)
    assert ours.config == folder.config
    expected = folder.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize(
    "text", ["It's 2024-05-17, isn't it?", "\n\n1. a\n  22  ", "naïve 日本語 🙂", "<|im_start|>user\n"]
)
def test_tokens_are_those_of_transformers(text: str) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoTokenizer.from_pretrained(FOLDER)(text, add_special_tokens=False).input_ids
    assert rg.models.tokenizer(FILES[0]).encode(text).ids == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuations_are_those_of_transformers(prompt: str, model: rg.models.LanguageModel) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    ids = torch.tensor(rg.models.tokenizer(FILES[0]).encode(prompt).ids)
    expected = theirs.generate(ids[None], attention_mask=torch.ones_like(ids[None]), do_sample=False, max_new_tokens=32)
    expected = [token for token in expected[0, len(ids) :].tolist() if token != 2]
    assert list(model.stream(ids, max_new_tokens=32, stop=2)) == expected
