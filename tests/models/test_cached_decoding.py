"""Models decode with caches as in a full pass."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.models import LanguageConfig, LanguageModel, Transformer, TransformerConfig, Whisper, WhisperConfig
from regard.nn import (
    Rotary,
)
from tests.nn.test_positions_and_caches import STEPS, N, close, spans, table

SIZE = {"vocabulary": 20, "d_model": 16, "layers": 2, "heads": 4, "d_hidden": 16}
LANGUAGE = {
    "learned": {},
    "rotary": {"rotary": Rotary()},
    "windows": {"rotary": Rotary(), "windows": (4, None)},
    "llama": {"rotary": Rotary(scaling=rg.positions.Linear(2.0)), "norm": "rms", "gated": True, "kv_heads": 2},
    "gemma": {
        "rotary": Rotary(d_rotary=2),
        "qk_norm": True,
        "windows": (3,),
        "softcap": 5.0,
        "arrangement": "sandwich",
    },
}


@pytest.mark.parametrize("kind", LANGUAGE)
@torch.no_grad()
def test_a_language_model_decodes_the_same_as_a_full_pass(kind: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(**SIZE, **LANGUAGE[kind])).double().eval()
    ids = torch.randint(20, (2, N))
    expected = model(ids)
    for steps in STEPS:
        state, _ = model.start_generation(ids)
        for at in spans(steps):
            close(state.step(ids[:, at]), expected[:, at.stop - 1])
    prompts = [ids[0, :7], ids[1, :2]]
    state, first = model.start_generation(prompts)
    state.step(first)
    for at in (slice(0, 1), slice(1, 4), slice(4, 5)):
        decoded = state.step(ids[:, 7:][:, at])
        for row, prompt in enumerate(prompts):
            close(decoded[row], model(torch.cat((prompt, ids[row, 7 : 7 + at.stop]))[None])[0, -1])
    state.reorder(torch.tensor([1, 0, 0]))
    decoded = state.step(ids[[1, 0, 0], :1])
    for row, source in enumerate((1, 0, 0)):
        full = torch.cat((prompts[source], ids[source, 7:12], ids[source, :1]))
        close(decoded[row], model(full[None])[0, -1])


@pytest.mark.parametrize("position", ["sinusoidal", "halves", "learned", "relative"])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)])
@torch.no_grad()
def test_a_transformer_decodes_the_same_as_a_full_pass(position: str, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZE, position=position)).double().eval()
    source, target, mask = (
        torch.randint(20, (2, 5)),
        torch.randint(20, (2, N)),
        torch.arange(5) < torch.tensor(lengths)[:, None],
    )
    expected = model(source, target, mask)
    for steps in STEPS:
        state, _ = model.start_generation(source, mask)
        for at in spans(steps):
            close(state.step(target[:, at]), expected[:, at.stop - 1])
    beams = target[[0, 1, 0, 1]].flip(1)
    beams[:, 0] = target[[0, 0, 1, 1], 0]
    expected = model(source[[0, 0, 1, 1]], beams, mask[[0, 0, 1, 1]])
    state, _ = model.start_generation(source, mask)
    state.step(target[:, :1])
    state.reorder(torch.tensor([0, 0, 1, 1]))
    for at in (slice(1, 4), slice(4, 5)):
        close(state.step(beams[:, at]), expected[:, at.stop - 1])
    state.reorder(torch.tensor([1, 1, 2, 3]), 1)
    close(state.step(beams[:, 5:6])[1:], model(source[[0, 0, 1, 1]], beams[[1, 1, 2, 3]], mask[[0, 0, 1, 1]])[1:, 5])
    with pytest.raises(ValueError, match="a row of the same source"):
        state.reorder(torch.tensor([2, 1, 2, 3]))


@torch.no_grad()
def test_whisper_decodes_the_same_as_a_full_pass() -> None:
    torch.manual_seed(0)
    model = Whisper(WhisperConfig(**SIZE, frames=8, features=6)).double().eval()
    sound, target = table(2, 9, 6), torch.randint(20, (2, N))
    mask = torch.arange(9) < torch.tensor([9, 4])[:, None]
    expected = model(sound, target, mask)
    state, _ = model.start_generation(sound, mask)
    for at in spans(STEPS[1]):
        close(state.step(target[:, at]), expected[:, at.stop - 1])
