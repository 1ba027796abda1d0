"""Folders that are wrong, hostile, in pieces or half written; and those of older releases."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard as rg
from regard.models import (
    Detr,
    DetrConfig,
    LanguageConfig,
    LanguageModel,
    ResNetConfig,
    SentenceEmbedder,
    TextConfig,
    TextEncoder,
    Transformer,
    TransformerConfig,
)
from regard.models.checkpoints import files
from tests.models import theirs as t

SMALL = LanguageConfig(vocabulary=50, width=16, layers=2, heads=2, hidden=32, positions=20)
IDS = torch.tensor([[5, 6, 7, 8]])


def small(config: LanguageConfig = SMALL) -> LanguageModel:
    return t.randomised(LanguageModel(config))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    held = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(held), folder / "model.safetensors")


def same(model: nn.Module, other: nn.Module) -> None:
    for (name, tensor), (_, expected) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(tensor, expected), name


# Safety


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "tf_model.h5"])
def test_weights_that_can_run_code_are_refused_with_advice(file: str, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    with pytest.raises(FileNotFoundError, match=rf"{file} only, which is not read.*convert"):
        rg.load(tmp_path)


def test_a_folder_without_weights_or_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        rg.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        rg.load(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "\\x", "", "a\0b", 3]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(file: Any, tmp_path: Path) -> None:
    rg.save(small(), tmp_path / "a", limit=2000)
    path = tmp_path / "a" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"leads out of the folder|which is no name"):
        rg.load(tmp_path / "a")


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "\xff\xfe", "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused_by_name(text: str, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json") as error:
        rg.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_file_gives_one_line_with_its_name(share: float, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file") as error:
        rg.load(tmp_path)
    assert "\n" not in str(error.value)


def test_bytes_that_were_changed_in_a_header_never_end_in_another_error(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        broken = bytearray(whole)
        for place, value in torch.randint(0, 256, (3, 2), generator=draw).tolist():
            broken[place * 4 % 900] = value
        path.write_bytes(broken)
        with suppress(ValueError):
            rg.load(tmp_path)


def test_a_tensor_that_a_header_names_twice_is_refused(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + size].decode()
    entry = json.loads(header)["transformer.ln_f.bias"]
    twice = header.rstrip()[:-1] + f',"transformer.ln_f.bias":{json.dumps(entry)}}}'
    path.write_bytes(struct.pack("<Q", len(twice)) + twice.encode() + whole[8 + size :])
    with pytest.raises(ValueError, match=r"model\.safetensors .* 'transformer\.ln_f\.bias' comes twice"):
        rg.load(tmp_path)


def test_shards_that_disagree_with_their_index_are_refused(tmp_path: Path) -> None:
    rg.save(small(), tmp_path, limit=2000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    moved = next(name for name, file in index["weight_map"].items() if file == first)
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {moved: last}}))
    with pytest.raises(ValueError, match=rf"disagree: {moved}"):
        rg.load(tmp_path)
    path.write_text(json.dumps(index))
    held = load_file(tmp_path / last)
    save_file(held | {moved: torch.zeros(1)}, tmp_path / last)  # the same tensor in two files
    with pytest.raises(ValueError, match=rf"disagree: {moved}"):
        rg.load(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(FileNotFoundError, match=last):
        rg.load(tmp_path)


def test_a_configuration_of_absurd_size_is_refused_at_once(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    started = time.perf_counter()
    for changes in ({"n_layer": 10**9}, {"n_layer": 2, "vocab_size": 10**12}, {"vocab_size": -1}, {"n_embd": "wide"}):
        edit(tmp_path, **changes)
        with pytest.raises(ValueError, match=str(tmp_path)):
            rg.load(tmp_path)
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("name", ["auto_map", "quantization_config"])
def test_models_with_code_or_numbers_of_their_own_are_refused(name: str, tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    edit(tmp_path, **{name: {"AutoModel": "modeling.Mine"}})
    with pytest.raises(ValueError, match=name):
        rg.load(tmp_path)


# Names, shapes, values


def test_missing_and_unknown_tensors_are_listed(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    rewrite(
        tmp_path, lambda held: {("odd" if name == "transformer.ln_f.bias" else name): x for name, x in held.items()}
    )
    with pytest.raises(ValueError, match=r"lacks transformer\.ln_f\.bias and has odd, which the model does not know"):
        rg.load(tmp_path)


def test_other_shapes_are_listed_with_both(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    edit(tmp_path, n_positions=30)
    with pytest.raises(ValueError, match=r"transformer\.wpe\.weight is \(20, 16\), not \(30, 16\)"):
        rg.load(tmp_path)


def test_a_tied_tensor_may_come_twice_and_under_either_name_but_not_with_two_values(tmp_path: Path) -> None:
    model = small()
    rg.save(model, tmp_path)
    table = "transformer.wte.weight"
    rewrite(tmp_path, lambda held: held | {"lm_head.weight": held[table].clone()})
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda held: {name: tensor for name, tensor in held.items() if name != table})
    same(rg.load(tmp_path), model)
    rewrite(tmp_path, lambda held: held | {table: held["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight and transformer\.wte\.weight must be equal"):
        rg.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"hidden_act": "mish"}, "hidden_act = 'mish' is not supported; supported are 'gelu'"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"architectures": ["BertForMultipleChoice"]}, "supported: BertModel, BertForMaskedLM"),
        ("bert", {"architectures": None}, "architectures"),
        ("bert", {"model_type": "mamba"}, "model_type = 'mamba' is not supported; supported: bert"),
        ("bert", {"hidden_size": None}, "must say hidden_size"),
        ("albert", {"inner_group_num": 2}, "inner_group_num"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "odd of rope_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj"),
        ("t5", {"eos_token_id": [1, 2]}, "eos_token_id"),
        ("marian", {"decoder_ffn_dim": 64}, "encoder_ffn_dim = 48 and decoder_ffn_dim = 64 must be the same"),
        ("marian", {"bad_words_ids": [[1, 2]]}, "bad_words_ids"),
        ("vit", {"patch_size": [8, 4]}, "patch_size"),
        ("detr", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("detr", {"use_timm_backbone": True, "backbone": "convnext"}, "backbone"),
    ],
)
def test_a_value_that_our_models_cannot_follow_is_an_error(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    t.stored(name, tmp_path)
    edit(tmp_path, **changes)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        rg.load(tmp_path)


# Older and other names


def test_bert_with_the_first_release_s_names_loads(tmp_path: Path) -> None:
    t.stored("bert-mlm", tmp_path)
    expected = rg.load(tmp_path)

    def older(held: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
               for name, tensor in held.items()}  # fmt: skip
        extra = {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.seq_relationship.bias": torch.zeros(2)}
        return old | extra | {"cls.predictions.decoder.bias": held["cls.predictions.bias"].clone()}

    rewrite(tmp_path, older)
    same(rg.load(tmp_path), expected)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("bert", "bert.")])
def test_a_base_model_s_names_may_have_their_prefix_or_not(name: str, prefix: str, tmp_path: Path) -> None:
    t.stored(name, tmp_path)
    expected = rg.load(tmp_path)

    def turned(held: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {key.removeprefix(prefix) if key.startswith(prefix) else prefix + key: x for key, x in held.items()}
        return held | ({"h.0.attn.bias": torch.ones(1, 1, 40, 40)} if name == "gpt2" else {})

    rewrite(tmp_path, turned)
    same(rg.load(tmp_path), expected)


def test_detr_with_the_names_of_timm_loads(tmp_path: Path) -> None:
    t.stored("detr", tmp_path)
    expected = rg.load(tmp_path)

    def timm(held: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {}
        for name, tensor in held.items():
            name = name.replace("embedder.embedder.convolution", "conv1").replace(
                "embedder.embedder.normalization", "bn1"
            )
            for n in range(4):
                name = name.replace(f"encoder.stages.{n}.layers", f"layer{n + 1}")
            for n in range(3):
                name = name.replace(f"layer.{n}.convolution", f"conv{n + 1}")
                name = name.replace(f"layer.{n}.normalization", f"bn{n + 1}")
            name = name.replace("shortcut.convolution", "downsample.0").replace(
                "shortcut.normalization", "downsample.1"
            )
            named[name] = tensor
        return named

    rewrite(tmp_path, timm)
    assert "model.backbone.conv_encoder.model.layer1.0.bn2.weight" in load_file(tmp_path / "model.safetensors")
    same(rg.load(tmp_path), expected)


def test_rotary_positions_are_read_under_the_older_names(tmp_path: Path) -> None:
    t.stored("llama-yarn", tmp_path)
    expected = rg.load(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    scaling = said.pop("rope_parameters")
    base = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(said | {"rope_theta": base, "rope_scaling": scaling}))
    assert rg.load(tmp_path).config == expected.config


# Writing


def test_large_models_are_written_in_shards_that_transformers_reads(tmp_path: Path) -> None:
    model = rg.load(t.stored("llama", tmp_path / "whole"))
    rg.save(model, tmp_path, limit=10_000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert all((tmp_path / shard).stat().st_size < 15_000 for shard in shards[1:-1])
    same(rg.load(tmp_path), model)
    other = type(t.made("llama")).from_pretrained(tmp_path)
    for name, tensor in t.made("llama").state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_what_an_earlier_save_left_is_removed(tmp_path: Path) -> None:
    rg.save(small(), tmp_path, limit=2000)
    rg.save(small(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    rg.save(small(), tmp_path, limit=2000)
    assert not (tmp_path / "model.safetensors").exists()
    same(rg.load(tmp_path), small())


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    rg.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with torch.no_grad():
        model.embedding.weight.zero_()
    with pytest.raises(OSError, match="no space left"):
        rg.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_gets_its_name_only_after_it_reached_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (order.append(name), real(*args))[1])
    files.write_json(tmp_path / "a.json", {})
    assert order[:2] == ["fsync", "replace"]
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_kept_unless_another_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small().to(dtype)
    rg.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    same(rg.load(tmp_path), model)
    same(rg.load(tmp_path, dtype=torch.float32), small().to(dtype).float())


def test_tensors_of_several_types_ask_for_one(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    rewrite(tmp_path, lambda held: held | {"transformer.wpe.weight": held["transformer.wpe.weight"].half()})
    with pytest.raises(ValueError, match="float16 and float32; give the one that you want"):
        rg.load(tmp_path)
    assert rg.load(tmp_path, dtype=torch.float32).position.weight.dtype == torch.float32


def test_a_file_that_changes_after_loading_does_not_reach_the_model(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    model, path = rg.load(tmp_path), tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    same(model, small())


def test_a_loaded_model_is_in_eval_mode_trains_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    rg.save(small(), tmp_path)
    before = torch.get_rng_state()
    model = rg.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_what_a_configuration_says_beside_ours_is_kept(tmp_path: Path) -> None:
    t.stored("bert-sequence", tmp_path)
    edit(tmp_path, id2label={str(n): f"kind {n}" for n in range(5)}, classifier_dropout=0.3)
    rg.save(rg.load(tmp_path), tmp_path / "again")
    said = json.loads((tmp_path / "again" / "config.json").read_text())
    assert said["id2label"]["4"] == "kind 4"
    assert said["classifier_dropout"] == 0.3


# Our own models


GROUPED = ResNetConfig(stem=32, widths=(32, 64), depths=(1, 1), bottleneck=False, norm="group")
OWN: list[tuple[nn.Module, str]] = [
    (Transformer(TransformerConfig(vocabulary=50, width=16, layers=2, heads=2, hidden=32)), "Transformer"),
    (LanguageModel(LanguageConfig(50, 16, 2, 2, 32, arrangement="post", windows=(3, None))), "LanguageModel"),
    (
        LanguageModel(LanguageConfig(
            50, 16, 2, 2, 32, qk_norm=True, norm="rms", rotary=rg.nn.Rotary(scaling=rg.positions.Linear(2.0)))),
        "LanguageModel",
    ),
    (TextEncoder(TextConfig(50, 16, 2, 2, 32, arrangement="pre")), "TextEncoder"),
    (SentenceEmbedder(TextConfig(50, 16, 2, 2, 32, pooling="attention")), "SentenceEmbedder"),
    (Detr(DetrConfig(3, 4, 16, 1, 2, 32, backbone=GROUPED)), "Detr"),
    (Detr(DetrConfig(3, 4, 16, 1, 2, 32, backbone=replace(GROUPED, norm="batch"))), "Detr"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), OWN, ids=[f"{name}{n}" for n, (_, name) in enumerate(OWN)])
def test_a_model_that_no_other_library_has_comes_back_as_it_was(model: Any, name: str, tmp_path: Path) -> None:
    rg.save(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["model_type"], said["architectures"]) == ("regard", [name])
    again = rg.load(tmp_path)
    assert type(again) is type(model)
    assert again.config == model.config
    same(again, model)


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["Linear"]}, {"architectures": ["load"]}, {"architectures": []}, {"config": 3},
     {"config": {"is": "Popen", "args": "x"}}, {"config": {"is": "LanguageConfig", "odd": 1}}],
)  # fmt: skip
def test_our_own_format_names_nothing_but_models_and_configurations(changes: dict[str, Any], tmp_path: Path) -> None:
    rg.save(OWN[1][0], tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json|LanguageModel|int"):
        rg.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (SMALL, "GPT2LMHeadModel"),
        (LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", rotary=rg.nn.Rotary()),
         "LlamaForCausalLM"),
        (LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", rotary=rg.nn.Rotary(),
                        windows=(4,)), "MistralForCausalLM"),
        (LanguageConfig(50, 16, 2, 2, 32, norm="rms", gated=True, bias=False, activation="silu", qkv_bias=True,
                        tied=False, rotary=rg.nn.Rotary(50.0, scaling=rg.positions.Yarn(2.0, 64))), "Qwen2ForCausalLM"),
    ],
)  # fmt: skip
def test_a_model_of_ours_is_written_as_the_family_that_can_say_all_of_it(
    config: LanguageConfig, architecture: str, tmp_path: Path
) -> None:
    import transformers

    model = small(config)
    rg.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    assert rg.load(tmp_path).config == config
    other = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), other(IDS).logits, rtol=1e-4, atol=1e-4)


def test_what_is_no_model_of_ours_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"one of regard\.models"):
        rg.save(nn.Linear(2, 2), tmp_path)


# The Hub


def test_a_name_goes_through_the_hub_and_asks_for_nothing_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    rg.save(small(), tmp_path)
    asked: dict[str, Any] = {}

    def fetched(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    same(rg.load("someone/small", revision="v2", local_files_only=True), small())
    assert (asked["name"], asked["revision"], asked["local_files_only"]) == ("someone/small", "v2", True)
    assert all(pattern.endswith((".json", ".txt", ".safetensors")) for pattern in asked["allow_patterns"])


def test_a_name_that_was_never_fetched_says_so_when_offline(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"someone/nothing is no folder, and was not found among the files"):
        rg.load("someone/nothing", local_files_only=True)


def test_without_the_library_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"regard\[hub\]"):
        rg.load("someone/small")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "../x/y", "a b"])
def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder; give a folder"):
        rg.load(name)


def test_without_safetensors_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rg.save(small(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"regard\[checkpoints\]"):
        rg.load(tmp_path)
