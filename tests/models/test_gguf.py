"""GGUF files: models and tokenizers equal those of transformers; damaged files end in one clear error."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import regard as rg
from regard.models.checkpoints.gguf import GgufFile, GgufWeights, chat_settings
from tests.models.gguf_files import CHAT, MODELS, write_gguf

IDS = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "F32") for name in MODELS] + [("llama", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1")],
)  # fmt: skip
@torch.no_grad()
def test_a_model_computes_the_logits_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    theirs = write_gguf(tmp_path / "model.gguf", name, kind)
    ours = rg.load(tmp_path / "model.gguf")
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {torch.float32}
    rg.save(ours, tmp_path / "folder")
    torch.testing.assert_close(rg.load(tmp_path / "folder")(IDS), ours(IDS))


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "Q4_0")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    with torch.no_grad():
        torch.testing.assert_close(rg.load(tmp_path / "model.gguf")(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"])
def test_blocks_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    theirs = write_gguf(tmp_path / "model.gguf", "llama", "Q4_0")
    weights = GgufWeights(GgufFile(tmp_path / "model.gguf"))
    expected = gguf.quants.quantize(theirs.state_dict()[name].numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert weights.kind(name) == "Q4_0"
    restored = gguf.quants.dequantize(weights.blocks(name).numpy(), gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(restored, theirs.state_dict()[name].numpy())
    assert weights.blocks(name).shape == expected.shape


def test_a_byte_level_tokenizer_and_the_chat_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    words = rg.models.tokenizer(tmp_path / "model.gguf")
    assert words.encode("ab cd12</s><|user|>").tokens == ["ab", "Ġ", "cd", "1", "2", "</s>", "<|user|>"]
    assert words.decode(words.encode("ab cd\nxyx</s>").ids) == "ab cd\nxyx"
    settings = chat_settings(GgufFile(tmp_path / "model.gguf"))
    assert settings == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT, "eos_token_id": [2]}


def test_a_byte_level_tokenizer_that_adds_the_first_token(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", changed={"tokenizer.ggml.pre": "llama-bpe"})
    assert rg.models.tokenizer(tmp_path / "model.gguf").encode("ab").tokens == ["<s>", "ab"]
    write_gguf(
        tmp_path / "other.gguf", changed={"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    )
    assert rg.models.tokenizer(tmp_path / "other.gguf").encode("ab").tokens == ["ab"]


def test_a_sentencepiece_tokenizer_merges_by_score(tmp_path: Path) -> None:
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c"]
    tokens = [*letters, "ab", "bc", "▁a", "abc"]
    scores = [0.0] * len(letters) + [-3.0, -1.0, -2.0, -4.0]
    changed = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    write_gguf(tmp_path / "model.gguf", changed=changed)
    words = rg.models.tokenizer(tmp_path / "model.gguf")
    assert words.encode("abc a").tokens == ["<s>", "▁a", "bc", "▁a"]
    assert words.encode("bcé").tokens == ["<s>", "▁", "bc", "<0xC3>", "<0xA9>"]
    assert words.decode(words.encode("bcé abc").ids) == "bcé abc"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"general.architecture": "mamba"},
            r"'mamba' is not supported; supported: llama, qwen2, qwen3, smollm3, olmo2, gemma2",
        ),
        ({"llama.expert_count": 8}, r"llama.expert_count is not supported"),
        ({"llama.block_count": 3}, r"lacks model.layers.2"),
        ({"llama.block_count": 1}, r"has blk.1"),
        ({"llama.block_count": 2**31 - 1}, r"2147483647 layers"),
        ({"llama.attention.head_count": 0}, r"0 heads"),
        ({"llama.attention.head_count": "four"}, r"head_count must be a whole number, but is 'four'"),
        ({"llama.embedding_length": None}, r"embedding_length must be a whole number, but is None"),
        ({"llama.rope.dimension_count": 8}, r"rope.dimension_count = 8 is not supported; expected 16"),
        ({"llama.rope.scaling.type": "longrope"}, r"'longrope' is not supported; supported: linear, yarn"),
        ({"split.count": 3}, r"one of several parts"),
    ],
)
def test_unsupported_metadata_raises(changed: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", changed=changed)
    with pytest.raises(ValueError, match=message) as raised:
        rg.load(tmp_path / "model.gguf")
    assert "model.gguf" in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre = 'klingon' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "must be distinct"),
        ({"tokenizer.ggml.merges": ["a q b"]}, "must be pairs of tokens"),
        ({"tokenizer.ggml.bos_token_id": 1000}, "must be below 97, got 1000"),
    ],
)
def test_an_unsupported_tokenizer_raises(changed: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", changed=changed)
    with pytest.raises(ValueError, match=message):
        rg.models.tokenizer(tmp_path / "model.gguf")


def header(*fields: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields) if count is None else count) + b"".join(fields)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text("t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"GGUF", "ends within the header"),
        (b"PK\3\4" + bytes(100), "does not start with GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (header(count=2**62), "ends within the header"),
        (header(tensors=2**62), "ends within the header"),
        (header(struct.pack("<Q", 2**63)), "ends within the header"),
        (header(text("a") + struct.pack("<IIQ", 9, 0, 2**60) + b"x"), "ends within the header"),  # 2**60 bytes
        (header(text("a") + struct.pack("<IIQ", 9, 8, 2**60) + b"x"), "ends within the header"),  # 2**60 strings
        (header(text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9), "nested too deeply"),
        (header(text("a") + struct.pack("<I", 99)), "unknown type 99"),
        (header(text("a") + struct.pack("<IB", 7, 1), text("a") + struct.pack("<IB", 7, 1)), "duplicate key 'a'"),
        (header(tensor(2**40, 2**40), tensors=1, count=0), "ends after the end of the file"),
        (header(tensor(4, offset=2**63), tensors=1, count=0), "ends after the end of the file"),
        (header(tensor(0), tensors=1, count=0), "has the shape"),
        (header(tensor(*[1] * 9), tensors=1, count=0), "1 to 4 axes, got 9"),
        (header(tensor(33, kind=2), tensors=1, count=0), "multiple of 32 long for Q4_0, got 33"),
        (header(tensor(32, kind=200), tensors=1, count=0), "unknown type 200"),
        (header(text("general.alignment") + struct.pack("<II", 4, 0)), "alignment must be a positive number"),
    ],
)  # fmt: skip
def test_a_damaged_file_raises(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        GgufFile(path)


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for size in range(4, len(whole), len(whole) // 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a valid GGUF file"):
            rg.load(path)
