"""What the tests of all families do not reach: unsupported values, layers of further predictions, other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard as rg
import regard.view
from tests.models import transformers_models as t


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lambda name: t.save_their_model(name, tmp_path_factory.mktemp(name))


def changed(folder: Any, name: str, tmp_path: Path, **values: Any) -> Path:
    source = Path(folder(name))
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        (
            "deepseek-v3",
            {"num_key_value_heads": 2},
            "num_attention_heads = 4 and num_key_value_heads = 2 must be equal",
        ),
        ("deepseek-v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "supported are default, yarn"),
        ("deepseek-v3", {"n_group": 3}, "must be a multiple of groups"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ("deepseek-v2", {"num_experts_per_tok": None}, "must contain num_experts_per_tok"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("deepseek-v2", {"kv_lora_rank": 8}, "do not have the shapes that config.json implies"),
        ("qwen3-next", {"layer_types": ["sliding_attention"] * 3}, "expected full or linear attention per layer"),
        ("qwen3-next", {"linear_num_value_heads": 3}, "value_heads must be a multiple of heads"),
    ],
)
def test_values_that_would_change_the_result_raise(
    folder: Any, tmp_path: Path, name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rg.load(changed(folder, name, tmp_path, **values))


def test_layers_that_predict_further_tokens_are_reported(folder: Any, tmp_path: Path) -> None:
    path = changed(folder, "deepseek-v3", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.61.eh_proj.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"model.layers.61.eh_proj.weight are not used"):
        rg.load(path)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_models_that_transformers_cannot_describe_are_saved_in_the_own_format(
    folder: Any, tmp_path: Path, name: str
) -> None:
    import dataclasses

    model = rg.load(folder(name))
    other = rg.models.LanguageModel(dataclasses.replace(model.config, final_softcap=5.0)).eval()
    other.load_state_dict(model.state_dict())
    rg.save(other, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "regard"
    again = rg.load(tmp_path)
    assert again.config == other.config
    with torch.no_grad():
        torch.testing.assert_close(again(t.IDS), other(t.IDS), rtol=0, atol=0)


@torch.no_grad()
def test_a_latent_model_is_captured_while_it_generates(folder: Any) -> None:
    model = rg.load(folder("deepseek-v3"))
    with rg.view.capture(model) as record:
        (tokens,) = model.generate(t.IDS[:1], max_new_tokens=4)
    with rg.view.capture(model) as whole:
        model(torch.cat((t.IDS[0], tokens[:-1]))[None])
    for layer in range(3):
        torch.testing.assert_close(record.weights(layer, head=2), whole.weights(layer, head=2), rtol=0, atol=1e-5)
