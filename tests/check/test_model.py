"""What the layers of a model see: planted bugs are found and named, clean models pass, programs reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import regard as rg
from regard.check import Finding, check_model
from regard.check.model import reports
from regard.check.model.layout import Row, chunks, packed_rows, padded_rows
from regard.check.model.loading import load_model
from regard.check.model.promise import Promise
from regard.errors import UserError
from regard_cli.commands import app
from tests.check.planted_models import PLANTED
from tests.check.tiny_models import MODELS, build
from tests.models.gguf_files import write_gguf

pytest_plugins = "pytester"
SIX = {"plain", "right padding", "left padding", "cache", "cache, left padding", "documents"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    hf.logging.set_verbosity_error()


@pytest.mark.parametrize("name", MODELS)
def test_a_clean_model_keeps_its_promises(name: str) -> None:
    model = build(name)
    findings = check_model(model, implementation=["eager", "sdpa"])
    assert [each for each in findings if each.verdict == "failed"] == []
    passed = {(each.layer, each.scenario) for each in findings if each.verdict == "passed"}
    layers = {each.layer for each in findings} - {"whole model"}
    assert len(layers) == len([m for m in model.modules() if type(m).__name__.endswith("Attention") and not _outer(m)])
    cached = (
        SIX if name not in ("bert", "roberta", "distilbert", "modernbert") else SIX - {"cache", "cache, left padding"}
    )
    expected = {(layer, scenario) for layer in layers for scenario in cached - {"documents"}}
    assert expected <= passed, "something was not measured"
    if model.config.model_type in ("llama", "gpt2", "gemma2", "mistral", "qwen3", "phi3", "llama4_text"):
        assert {(layer, "documents") for layer in layers} <= passed


def _outer(module: torch.nn.Module) -> bool:
    return any("Attention" in type(part).__name__ for part in module.modules() if part is not module)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_named_and_reproduced(name: str) -> None:
    bug = PLANTED[name]
    names = ["eager"] if bug.implementation == "eager" else ["eager", bug.implementation]
    setup = f"from tests.check.planted_models import PLANTED\n\nmodel = PLANTED[{name!r}].build()"
    findings = check_model(bug.build(), implementation=names, setup=setup)
    failed = [each for each in findings if each.verdict == "failed" and each.implementation == bug.implementation]
    assert {each.layer for each in failed} - {"whole model"} == set(bug.layers) - {"whole model"}
    shown = [each for each in failed if each.scenario == bug.scenario and each.layer in bug.layers]
    assert {each.layer for each in shown} == set(bug.layers)
    for each in shown:
        assert bug.words in f"promised {each.promised}; measured {each.measured}"
    assert all(each.code for each in failed)
    with pytest.raises((AssertionError, RuntimeError)):
        exec(compile(shown[0].code, "<reproduction>", "exec"), {})


def test_a_program_is_small_and_passes_without_the_bug() -> None:
    bug = PLANTED["window off by one"]
    clean = "from tests.check.tiny_models import build\n\nmodel = build('mistral')"
    findings = check_model(bug.build(), implementation=["eager"], setup=clean)
    code = next(each.code for each in findings if each.verdict == "failed" and each.layer == bug.layers[0])
    assert "tokens = torch.tensor([[0, 1, 2, 3, 4]])" in code, "the least that shows a window of five"
    exec(code, {})


def test_a_window_beyond_the_texts_is_not_measured() -> None:
    kind, config = MODELS["mistral"]
    wide = type(config)(**(config.to_dict() | {"sliding_window": 5000}))
    findings = check_model(kind._from_config(wide), implementation=["sdpa"])
    unmeasured = [each for each in findings if each.verdict == "not measured"]
    assert {each.layer for each in unmeasured} == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert unmeasured[0].promised == "window of 5000"
    assert "--tokens 5006" in unmeasured[0].measured


def test_a_longer_window_is_reached_with_some_keys() -> None:
    kind, config = MODELS["mistral"]
    wide = type(config)(**(config.to_dict() | {"sliding_window": 40}))
    findings = check_model(kind._from_config(wide), implementation=["sdpa"])
    assert {each.verdict for each in findings} == {"passed"}
    assert findings[0].promised.startswith("causal, window 40")


def test_the_state_of_the_model_is_restored() -> None:
    model = build("gpt_oss").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_model(model, implementation=["eager"])
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_unknown_direction_is_not_promised_unless_given() -> None:
    config = hf.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = hf.CLIPTextModel._from_config(config)
    first = check_model(model, implementation=["eager"])[0]
    assert (first.verdict, first.measured) == ("not promised", "causal, hides padding")
    assert check_model(model, implementation=["eager"], causal=True)[0].verdict == "passed"
    assert check_model(model, implementation=["eager"], causal=False)[0].verdict == "failed"


def test_several_passes_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = PLANTED["cross-attention ignores padding"]
    once = check_model(bug.build(), implementation=["eager"])
    monkeypatch.setattr("regard.check.model.measure.TOKENS_PER_PASS", 150)
    assert check_model(bug.build(), implementation=["eager"]) == once


def test_low_precision_is_not_a_failure() -> None:
    findings = check_model(build("llama").bfloat16(), implementation=["eager", "sdpa"])
    assert {each.verdict for each in findings} == {"passed"}


def test_what_a_model_does_not_promise_is_no_failure() -> None:
    bert = hf.BertForSequenceClassification._from_config(MODELS["bert"][1])
    findings = {
        each.scenario: each for each in check_model(bert, implementation=["eager"]) if each.layer == "whole model"
    }
    assert findings["left padding"].verdict == "not promised", "the first token, which is padding, gives the class"
    assert findings["right padding"].verdict == "passed"
    documents = [
        each for each in check_model(build("gpt_oss"), implementation=["eager"]) if each.scenario == "documents"
    ]
    assert {each.verdict for each in documents} == {"not promised"}
    assert "sees other documents" in documents[0].measured


def test_a_model_that_cannot_be_called_is_a_user_error() -> None:
    model = build("gpt2")
    model.transformer.h[0].attn.c_proj = torch.nn.Linear(3, 3)
    with pytest.raises(UserError, match="GPT2LMHeadModel cannot be called"):
        check_model(model)


def test_layouts() -> None:
    assert [row.texts for row in padded_rows(4, "left")] == [(0, 0, 0, 0), (-1, -1, 0, 0), (-1, -1, 0, 0)]
    assert padded_rows(6, "right")[1].tokens.tolist() == [0, 1, 2, 9, 10, 11]
    assert packed_rows(8)[0].positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert packed_rows(8)[0].tokens.tolist() == list(range(8))
    assert [sum(chunks(n)) for n in range(1, 20)] == list(range(1, 20))


def test_promises() -> None:
    row = Row((-1, 0, 0, 0, 0))
    assert Promise(behind=1, ahead=0).visible(row, row).int().tolist() == [
        [0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert str(Promise(behind=2, ahead=2, padding=False)) == "window of 2 to each side"
    assert str(Promise(cross=True)) == "every token of the encoder, hides padding"


def test_equal_findings_share_a_row() -> None:
    differing = [
        Finding(f"layers.{n}.attn", implementation, scenario, "causal", "as promised", "passed")
        for n in range(3)
        for implementation in ("eager", "sdpa")
        for scenario in ("plain", "cache")
    ]
    differing.append(Finding("layers.1.attn", "sdpa", "documents", "causal", "every token", "failed", "code"))
    lines = reports.lines(differing)
    assert [line.cells for line in lines] == [
        ("layers.1.attn", "sdpa", "documents", "causal", "every token", "failed"),
        ("layers.{0-2}.attn", "eager, sdpa", "plain; cache", "causal", "as promised", "passed"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("gpt2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["check", *map(str, words)])


def test_the_command_checks_a_folder(folder: Path, tmp_path: Path) -> None:
    result = run("--model", folder, "--implementation", "eager", "--json", "--junit", tmp_path / "report.xml")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"]
    assert report["findings"][0]["promised"] == "causal, hides padding and other documents"
    assert 'name="transformer.h.0.attn: plain"' in (tmp_path / "report.xml").read_text()


def test_the_command_shows_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["from tests.check.planted_models import PLANTED", "", "build = PLANTED['causal lost'].build"]
    (tmp_path / "broken_gpt2.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    result = run("--model", "broken_gpt2:build", "--implementation", "eager", "--markdown")
    assert result.exit_code == 1, result.output
    assert "| transformer.h.1.attn | eager | plain" in result.stdout
    assert "model = build()" in result.stdout


def test_random_weights_need_only_a_configuration(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no weights in model.safetensors; give --random-weights"):
        load_model(str(folder))
    model, code = load_model(str(folder), random_weights=True)
    scope: dict[str, Any] = {"torch": torch}
    exec(code, scope)
    same = zip(model.parameters(), scope["model"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "must be a folder with config.json"),
        ("empty", {}, "has no config.json"),
        ("torn", {"config.json": "{"}, "is not the configuration of a model"),
        ("list", {"config.json": "[]"}, "is not the configuration of a model"),
        ("odd", {"config.json": '{"model_type": "lama"}'}, "'lama' is not known .* the nearest is llama"),
        ("pickle", {"config.json": '{"model_type": "gpt2"}', "a.bin": ""}, "a.bin is a pickle"),
        ("bad", {"config.json": '{"model_type": "gpt2"}', "model.safetensors": "x"}, "the weights cannot be read"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, name: str, content: dict[str, str] | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).mkdir()
        for file, text in content.items():
            (tmp_path / name / file).write_text(text)
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path / name))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "json:loads_not"], "cannot be imported"),
        (["--model", "math:pi"], "must be a function that returns a model"),
        (["--model", "os:getcwd"], "must be a transformers.PreTrainedModel"),
        (["--model", "x", "--implementation", "magic"], "must be eager, sdpa, flex or regard"),
    ],
)
def test_a_bad_request_is_an_error_in_one_line(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--tokens", "9"], ["--model", "x", "--only", "row-sums"]])
def test_options_that_do_not_fit(words: list[str]) -> None:
    assert run(*words).exit_code == 2


def test_images_are_refused() -> None:
    config = hf.ViTConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(UserError, match="takes pixel_values"):
        check_model(hf.ViTModel._from_config(config))


def test_the_plugin_fails_with_the_layer(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from tests.check.planted_models import PLANTED
        from tests.check.tiny_models import build

        def test_clean(model_conformance):
            model_conformance(build("gpt2"), implementation=["sdpa"])

        def test_broken(model_conformance):
            model_conformance(PLANTED["causal lost"].build(), implementation=["eager"])
        """
    )
    result = pytester.runpytest("-p", "pytest_regard")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*transformer.h.1.attn, eager, plain: promised causal*measured every token*"])


def test_models_that_only_regard_computes_are_refused_with_the_reason(tmp_path: Path) -> None:
    config = rg.models.LanguageConfig(vocabulary=99, d_model=32, layers=1, heads=4, d_hidden=48, sinks=True, bias=True)
    rg.save(rg.models.LanguageModel(config), tmp_path / "own")
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    for name, kind in (("own", "in the format of regard"), ("model.gguf", "a GGUF file"), ("run", "a run")):
        result = CliRunner().invoke(app, ["check", "--model", str(tmp_path / name)])
        assert result.exit_code == 2
        assert kind in result.stderr
        assert "the checkpoint that the model came from" in " ".join(result.stderr.split())


def test_a_layer_without_a_promise_does_not_hide_that_the_model_is_causal() -> None:
    config = hf.MiniMaxConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, layer_types=["full_attention", "linear_attention"],
    )  # fmt: skip
    findings = check_model(hf.MiniMaxForCausalLM._from_config(config), implementation=["eager"])
    verdicts = {name: {f.scenario: f.verdict for f in findings if f.layer == name} for name in
                ("model.layers.0.self_attn", "model.layers.1.self_attn", "whole model")}  # fmt: skip
    assert verdicts["model.layers.0.self_attn"] == dict.fromkeys(SIX, "passed")
    assert verdicts["model.layers.1.self_attn"] == dict.fromkeys(SIX, "not promised")
    passed = (SIX - {"plain", "documents"}) | {"generate"}
    assert verdicts["whole model"] == dict.fromkeys(passed, "passed") | {"documents": "not promised"}
