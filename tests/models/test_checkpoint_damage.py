"""Damaged checkpoints: each loads or raises one clear error, with little time and memory."""

from __future__ import annotations

import json
from pathlib import Path

import regard as rg
from regard.data.tokenizer import train_tokenizer
from regard.models import SentenceEmbedder, TextConfig
from tests import damaged_files
from tests.models import transformers_models as t

MORE = ("bert-sequence", "roberta-mlm", "albert-mlm", "llama-yarn", "qwen2-window", "vit-classifier")


def test_a_damaged_checkpoint_loads_or_raises_one_error(tmp_path: Path) -> None:
    folders = [t.save_their_model(name, tmp_path / name) for name in sorted({*t.FIRST.values(), *MORE})]
    assert damaged_files.run("checkpoint", folders, every=25) == []


def test_a_damaged_sentence_embedder_loads_or_raises_one_error(tmp_path: Path) -> None:
    config = TextConfig(
        vocabulary=300, d_model=16, layers=1, heads=2, d_hidden=32, positions=40, pooling="mean", unit=True
    )
    model = SentenceEmbedder(config)
    model.tokenizer = train_tokenizer(["the cat sat on a mat"] * 5, 300)
    model.tokenizer.enable_truncation(30)
    rg.save(model, tmp_path / "sentences")
    (tmp_path / "sentences" / "config_sentence_transformers.json").write_text('{"default_prompt_name": null}')
    (tmp_path / "sentences" / "tokenizer_config.json").write_text('{"model_max_length": 20}')
    assert damaged_files.run("sentences", [tmp_path / "sentences"], every=25) == []


def test_a_damaged_ctc_vocabulary_is_read_or_raises_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    held = {
        "config.json": {"model_type": "wav2vec2"},
        "vocab.json": {"<pad>": 0, "a": 1, "b": 2, "|": 3, "<unk>": 4},
        "tokenizer_config.json": {
            "tokenizer_class": "Wav2Vec2CTCTokenizer", "pad_token": {"content": "<pad>"}, "unk_token": "<unk>",
            "word_delimiter_token": "|",
        },
    }  # fmt: skip
    for name, content in held.items():
        (folder / name).write_text(json.dumps(content))
    assert damaged_files.run("letters", [folder], every=1) == []
