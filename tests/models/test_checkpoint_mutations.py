"""Every value of a configuration: after a change, a model computes what transformers computes, or is refused."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regard as rg
from regard.models.checkpoints.families import FAMILIES
from tests.models import transformers_models as t
from tests.models.tiny_configs import CASES

EVERY = bool(os.environ.get("REGARD_EVERY_MUTATION"))
UNUSED = {"transformers_version", "_name_or_path", "dtype", "model_type", "architectures", "output_hidden_states",
          "output_attentions", "id2label", "label2id", "use_cache", "return_dict"}  # fmt: skip
"""Values that do not matter, or that say how the test is run."""
ACTIVATIONS = ["relu", "sigmoid", "laplace", "gelu_new", "silu"]
ROTARY: dict[str, dict[str, Any]] = {
    "base": {"rope_type": "default", "rope_theta": 50.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn-original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "mscale": 0.7,
                      "mscale_all_dim": 0.9},
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 20, "beta_slow": 2},
    "yarn-truncate": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20, "truncate": False,
                      "original_max_position_embeddings": 10},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "long": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0],
             "original_max_position_embeddings": 6, "factor": 3.0},
    "proportional": {"rope_type": "proportional"},
}  # fmt: skip
ROTATED = [
    "llama",
    "mistral",
    "qwen2",
    "gemma2",
    "qwen3",
    "gemma3",
    "gpt-oss",
    "smollm3",
    "olmo2",
    "phi3",
    "modernbert",
]


def changes(name: str, value: Any) -> list[Any]:
    """Return other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if name.endswith(("hidden_act", "activation", "activation_function")):
        return [act for act in ACTIVATIONS if act != value]
    if isinstance(value, int):
        return [value + 1, 2 * value, 0] if value else [1, 2]
    if isinstance(value, float):
        return [1.7 * value + 0.1, 0.0]
    if value is None:
        return [1, 2, True]
    if isinstance(value, str):
        return ["none"]
    return [value[::-1]] if isinstance(value, list) else []


def built(name: str, values: dict[str, Any]) -> Any:
    """Return their model for changed values, or None if transformers does not accept them."""
    case = CASES[name]
    kind = getattr(transformers, case.architecture)
    try:
        torch.manual_seed(0)
        model = kind._from_config(kind.config_class(**copy.deepcopy(values)), attn_implementation="eager")
        case.after(model)
        t.randomize(model)
        with torch.no_grad():
            t.theirs(name, model)
    except Exception:  # configurations and models fail in any way
        return None
    return model


def check(name: str, model: Any, folder: Path) -> str | None:
    """Return how our model differs from theirs; None if it is equal or refused."""
    try:
        ours = rg.load(folder)
        with torch.no_grad():
            actual = t.ours(name, ours)
    except ValueError:
        return None
    with torch.no_grad():
        expected = t.result(t.theirs(name, model))
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    for own, other in pairs:
        own, other = t.real(name, own), t.real(name, other)
        if own.shape != other.shape:
            return f"the shape is {tuple(own.shape)}, not {tuple(other.shape)}"
        if not torch.allclose(own, other, rtol=1e-4, atol=2e-4):
            return f"outputs differ by {float((own - other).abs().max()):.2g}"
    return None


def mutated(name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the fields of a case, and its values with each change of the field."""
    base = CASES[name].before(CASES[name].values)
    whole = getattr(transformers, CASES[name].architecture).config_class(**copy.deepcopy(base)).to_dict()
    for side in ("", "text_config", "vision_config"):
        for key, value in (whole.get(side, {}) if side else whole).items():
            if key not in UNUSED:
                actual = []
                for change in changes(key, value):
                    values = copy.deepcopy(base)
                    (values.setdefault(side, {}) if side else values)[key] = change
                    actual.append(values)
                yield f"{side}.{key}" if side else key, actual


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", t.CASES if EVERY else sorted(t.FIRST.values()))
def test_a_changed_value_is_followed_or_refused(name: str, tmp_path: Path) -> None:
    wrong, compared = [], 0
    for field, several in mutated(name):
        for n, values in enumerate(several):
            if name.startswith("wav2vec2") and field == "conv_kernel":  # the shortest sound has no frame then
                continue
            model = built(name, values)
            if model is None:
                continue
            folder = tmp_path / f"{field}-{n}"
            try:
                model.save_pretrained(folder)
            except ValueError:  # generation values that transformers refuses to save
                continue
            compared += 1
            if (problem := check(name, model, folder)) is not None:
                wrong.append(f"{field}: {problem}")
            if not EVERY:
                break
    assert compared >= 8
    assert not wrong, "; ".join(wrong)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROTATED)
def test_every_rotary_embedding_is_followed_or_refused(name: str, form: str, tmp_path: Path) -> None:
    wrong, nested = [], name in ("gemma3", "modernbert")
    kind = getattr(transformers, CASES[name].architecture)
    for label, rotary in ROTARY.items():
        parameters: dict[str, Any] = {"rope_theta": 1000.0} | rotary
        if nested:
            parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "default"}}
        heads = {} if name == "modernbert" else {"head_dim": 8}
        model = built(name, CASES[name].values | heads | {"rope_parameters": parameters})
        if model is None:
            continue
        folder = tmp_path / label
        model.save_pretrained(folder)
        if form == "rope_scaling":  # as older releases wrote it
            written = json.loads((folder / "config.json").read_text())
            written.pop("rope_parameters")
            (folder / "config.json").write_text(json.dumps(written | {"rope_theta": 1000.0, "rope_scaling": rotary}))
            try:
                model = kind.from_pretrained(folder, attn_implementation="eager").eval()
            except Exception:  # configurations fail in any way
                continue
        ours = None
        try:
            ours = rg.load(folder)
        except ValueError:
            continue
        with torch.no_grad():
            expected = t.result(model(t.IDS))
            if not torch.allclose(ours(t.IDS), expected, rtol=1e-4, atol=2e-4):
                wrong.append(label)
    assert not wrong


DEFAULT = {"rope_type": "default"}
PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
EDITS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"is_causal": False}),
    ("bart", {"is_causal": None}),
    ("clip", {"text_config": {"is_causal": False}}),
    ("bert-mlm", {"is_causal": False}),
    ("llama-llama3", {"original_max_position_embeddings": 5}),
    ("llama-yarn", {"original_max_position_embeddings": 300}),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0,
                                                         "max_position_embeddings": 4}}),
    ("t5", {"dense_act_fn": "gelu_new"}),
    ("t5-1.1", {"dense_act_fn": "gelu_pytorch_tanh"}),
    ("mt5", {"dense_act_fn": "gelu"}),
    ("t5", {"is_gated_act": True}),
    ("gemma3", {"rope_parameters": dict.fromkeys(PATTERN, DEFAULT), "rope_theta": 33, "rope_local_base_freq": 9}),
    ("gemma3", {"rope_parameters": {"sliding_attention": DEFAULT}, "rope_theta": 5.0}),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                          "high_freq_factor": 4.0},
                "original_max_position_embeddings": 5}),
    ("modernbert", {"rope_parameters": {"full_attention": DEFAULT}, "global_rope_theta": 5.0, "local_rope_theta": 9.0}),
    ("modernbert", {"sliding_window": 4}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("phi3", {"partial_rotary_factor": 0.5, "rope_parameters": None}),
    ("phi3", {"layer_types": PATTERN, "sliding_window": 4}),
    ("smollm3", {"layer_types": PATTERN, "sliding_window": 4, "use_sliding_window": False}),
    ("qwen3-next", {"partial_rotary_factor": None, "rope_parameters": None}),
    ("qwen3-next", {"partial_rotary_factor": 1.0}),
    ("deepseek-v3", {"norm_topk_prob": None, "rope_interleave": None}),
    ("gpt2", {"num_attention_heads": 8}),
    ("distilbert", {"num_attention_heads": 2}),
    ("m2m100", {"num_attention_heads": 8}),
    ("whisper", {"num_key_value_heads": 2, "decoder_attention_heads": 2}),
]  # fmt: skip
"""Values that transformers reads from config.json but does not write."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "edits"), EDITS)
def test_an_edited_file_is_followed_or_refused(name: str, edits: dict[str, Any], tmp_path: Path) -> None:
    file = t.save_their_model(name, tmp_path) / "config.json"
    written = json.loads(file.read_text())
    for key, value in edits.items():
        written[key] = written[key] | value if key == "text_config" else value
    file.write_text(json.dumps(written))
    kind = getattr(transformers, CASES[name].architecture)
    model = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert check(name, model, tmp_path) is None


@pytest.mark.parametrize("name", t.FIRST.values())
def test_every_alias_of_transformers_is_known(name: str) -> None:
    family = next(family for family in FAMILIES if CASES[name].architecture in family.architectures)
    names = getattr(transformers, CASES[name].architecture).config_class.attribute_map
    unused = {"num_mtp_layers"}  # a layer that predicts further tokens
    assert {alias: name for alias, name in names.items() if alias not in unused} == family.aliases


def test_an_alias_is_read_but_must_not_differ(tmp_path: Path) -> None:
    file = t.save_their_model("gpt2", tmp_path) / "config.json"
    values = json.loads(file.read_text())
    values["num_attention_heads"] = values.pop("n_head")
    file.write_text(json.dumps(values))
    model = rg.load(tmp_path)
    assert model.config.heads == 4
    rg.save(model, tmp_path / "saved")
    assert "num_attention_heads" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    file.write_text(json.dumps(values | {"n_head": 8}))
    with pytest.raises(ValueError, match="num_attention_heads = 4 must equal n_head = 8"):
        rg.load(tmp_path)


def test_configurations_per_layer_are_refused(tmp_path: Path) -> None:
    file = t.save_their_model("llama", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"per_layer_config": {"1": {"hidden_act": "relu"}}}))
    with pytest.raises(ValueError, match="per_layer_config is not supported"):
        rg.load(tmp_path)


def test_a_long_rope_without_its_ratio_is_refused(tmp_path: Path) -> None:
    file = t.save_their_model("phi3-long", tmp_path) / "config.json"
    values = json.loads(file.read_text())
    del values["max_position_embeddings"]  # transformers takes its default
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="needs factor or max_position_embeddings"):
        rg.load(tmp_path)


def test_a_dilated_backbone_is_refused(tmp_path: Path) -> None:
    file = t.save_their_model("detr", tmp_path) / "config.json"
    backbone = {"model_type": "timm_backbone", "backbone": "resnet18", "output_stride": 16}
    edits = {"use_timm_backbone": True, "backbone_config": backbone}
    file.write_text(json.dumps(json.loads(file.read_text()) | edits))
    with pytest.raises(ValueError, match="output_stride = 16 of the backbone is not supported"):
        rg.load(tmp_path)
