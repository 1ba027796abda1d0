"""Every tensor of a checkpoint is used, verified, or reported."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard as rg
from tests.models import transformers_models as t
from tests.models.checkpoint_folders import rewrite, same, small


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("bert", ("pooler.dense.bias", "pooler.dense.weight")),
        ("bert-pretraining", ("bert.pooler.dense.weight", "cls.seq_relationship.weight")),
        ("roberta", ("pooler.dense.weight",)),
        ("albert", ("pooler.weight",)),
        ("vit", ("pooler.dense.weight",)),
        ("dinov2", ("embeddings.mask_token",)),
    ],
)
def test_unused_weights_are_listed_once(name: str, listed: tuple[str, ...], tmp_path: Path) -> None:
    t.save_their_model(name, tmp_path)
    with pytest.warns(UserWarning, match="are not used") as caught:
        rg.load(tmp_path)
    (message,) = (str(each.message) for each in caught)
    assert str(tmp_path) in message
    assert all(each in message for each in listed)
    assert caught[0].filename == __file__


def test_a_model_without_unused_tensors_loads_without_a_warning(tmp_path: Path) -> None:
    for name in ("bert-sequence", "bert-mlm", "gpt2", "llama", "t5", "marian", "vit-classifier", "detr", "whisper"):
        t.save_their_model(name, tmp_path / name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rg.load(tmp_path / name)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        ("wav2vec2", "wav2vec2.masked_spec_embed"),
        ("vit-classifier", "vit.pooler.dense.weight"),
    ],
)
def test_unused_weights_of_older_checkpoints_are_reported(case: str, name: str, tmp_path: Path) -> None:
    t.save_their_model(case, tmp_path)
    model = rg.load(tmp_path)
    rewrite(tmp_path, lambda held: held | {name: torch.randn(8, 4)})
    with pytest.warns(UserWarning, match=name):
        same(rg.load(tmp_path), model)


BASE = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
ANGLES = torch.arange(42)[:, None] * 10000.0 ** (-torch.arange(16) / 15)
FAIRSEQ = torch.cat((ANGLES.sin(), ANGLES.cos()), 1) * (torch.arange(42) != 1)[:, None]
BUFFERS = {
    "bert-mlm": ("bert.embeddings.position_ids", torch.arange(40)[None], torch.arange(40).flip(0)[None]),
    "bert-token": ("bert.embeddings.token_type_ids", torch.zeros(1, 40).long(), torch.ones(1, 40).long()),
    "roberta-mlm": ("roberta.embeddings.position_ids", torch.arange(40)[None], torch.arange(40)[None] + 2),
    "distilbert-mlm": ("distilbert.embeddings.position_ids", torch.arange(40)[None], torch.zeros(1, 40).long()),
    "albert-mlm": ("albert.embeddings.position_ids", torch.arange(40)[None], torch.arange(40)[None] * 2),
    "gpt2": ("transformer.h.1.attn.bias", torch.ones(40, 40).tril()[None, None], torch.ones(1, 1, 40, 40)),
    "llama": ("model.layers.2.self_attn.rotary_emb.inv_freq", BASE, BASE * 1.01),
    "llama-linear": ("model.layers.0.self_attn.rotary_emb.inv_freq", 1000.0 ** (-torch.arange(0, 8, 2) / 8), BASE),
    "m2m100": ("model.encoder.embed_positions.weights", FAIRSEQ, FAIRSEQ.flip(0)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_stored_buffers_are_compared_with_computed_ones(name: str, tmp_path: Path) -> None:
    buffer, right, wrong = BUFFERS[name]
    t.save_their_model(name, tmp_path)
    model = rg.load(tmp_path)

    def stored(value: Tensor) -> None:
        rewrite(tmp_path, lambda held: held | {buffer: value.clone()})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same_value in (right, right.to(torch.float16)):
            stored(same_value)
            same(rg.load(tmp_path, dtype=torch.float32), model)
    for other in (wrong, torch.zeros(0, 5), torch.full_like(right.float(), torch.nan), right[..., None].float() + 1):
        stored(other)
        with pytest.raises(ValueError, match=f"{buffer} is not the tensor that the model computes"):
            rg.load(tmp_path)


def test_two_copies_of_one_tensor_are_both_compared(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    table = "transformer.wte.weight"
    copies = ("lm_head.weight", "transformer.lm_head.weight")
    for wrong in copies:
        rewrite(tmp_path, lambda held, wrong=wrong: held | {name: held[table] + (name == wrong) for name in copies})
        with pytest.raises(ValueError, match="must be equal"):
            rg.load(tmp_path)


def test_names_in_warnings_and_errors_are_printable(tmp_path: Path) -> None:
    t.save_their_model("bert", tmp_path)
    rewrite(tmp_path, lambda held: held | {"pooler.\x1b[2J": torch.zeros(1)})
    with pytest.warns(UserWarning, match="are not used") as caught:
        rg.load(tmp_path)
    assert str(caught[0].message).isprintable()
    rewrite(tmp_path, lambda held: held | {"odd\x1b[2J\n": torch.zeros(1)})
    with pytest.raises(ValueError, match="which the model does not have") as raised:
        rg.load(tmp_path)
    assert str(raised.value).isprintable()
