"""generation_config.json: what is generated is what transformers generates, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regard as rg
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.models.checkpoints import generation
from regard.predictors import PredictOptions, open_model
from regard.predictors.language import LanguagePredictor
from tests.predictors.tiny_checkpoints import save_checkpoint

PROMPT = [5, 6, 7, 5, 6]  # two tokens occur twice
COMMON: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "reward of repetition": {"repetition_penalty": 0.4},
    "no 1-gram twice": {"no_repeat_ngram_size": 1},
    "no 2-gram twice": {"no_repeat_ngram_size": 2},
    "no 3-gram twice": {"no_repeat_ngram_size": 3, "repetition_penalty": 0.3},
    "suppressed": {"suppress_tokens": [1, 2, 3, 50, 60, 70, 80]},
    "last token": {"forced_eos_token_id": 3, "max_new_tokens": 5},
    "last tokens": {"forced_eos_token_id": [3, 4], "max_new_tokens": 5},
    "longest in all": {"max_length": 9},
    "both lengths": {"max_length": 9, "max_new_tokens": 7},
    "beams": {"num_beams": 4},
    "beams that stop early": {"num_beams": 4, "early_stopping": True, "length_penalty": 0.0},
    "beams that never stop early": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
    "long outputs": {"num_beams": 4, "length_penalty": 3.0, "max_new_tokens": 12},
    "short outputs": {"num_beams": 4, "length_penalty": -2.0},
    "a penalty in beams": {"num_beams": 3, "repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
    "neutral values": {"typical_p": 0.3, "temperature": 0.5, "diversity_penalty": 0.0, "guidance_scale": 1.0,
                       "num_return_sequences": 1, "use_cache": False, "min_p": 0.3},
}  # fmt: skip
MORE = {
    "at least": {"min_new_tokens": 6},
    "at least in all": {"min_length": 12, "max_new_tokens": 9},
    "at least in beams": {"min_new_tokens": 6, "num_beams": 3, "early_stopping": True},
    "bad words": {"bad_words_ids": [[1, 2], [2, 3, 4], [7]]},
}


UNCHANGED = ("neutral values", "both lengths", "beams", "beams that stop early", "suppressed", "short outputs")


def _theirs(folder: Path, kind: str, ids: list[int], **options: Any) -> list[int]:
    model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()
    given = torch.tensor([ids])
    actual = model.generate(given, attention_mask=torch.ones_like(given), use_cache=False, **options)[0].tolist()
    return actual[len(ids) :] if not model.config.is_encoder_decoder else actual[1:]


def _language(folder: Path, **options: Any) -> LanguagePredictor:
    predictor = open_model(folder)
    assert isinstance(predictor, LanguagePredictor)
    predictor.configure(PredictOptions(**options))
    return predictor


def _until(tokens: list[int], stop: list[int]) -> list[int]:
    ends = [n for n, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("name", [*COMMON, *MORE])
def test_language_models_generate_as_transformers(name: str, tmp_path: Path) -> None:
    values = {"max_new_tokens": 24} | (COMMON | MORE)[name]
    if "max_length" in values and name == "longest in all":
        values.pop("max_new_tokens")
    plain = save_checkpoint(tmp_path / "plain", "llama", pairs=False)
    free = list(_language(plain, max_new_tokens=24).generate(PROMPT))
    stop = [free[3], 3, 4] if name.startswith("at least") else [3, 4]
    if "bad_words_ids" in values:
        values["bad_words_ids"] = [free[:2], free[2:5], [free[6]], [3]]
    folder = save_checkpoint(
        tmp_path / "folder", "llama", pairs=False, generation_config=values | {"eos_token_id": stop, "pad_token_id": 0}
    )
    actual = list(_language(folder).generate(PROMPT))
    assert actual == _until(_theirs(folder, "LlamaForCausalLM", PROMPT), stop)
    if name not in UNCHANGED:
        assert actual != _until(free, stop)


PAIRS = {"t5": "T5ForConditionalGeneration", "marian": "MarianMTModel", "bart": "BartForConditionalGeneration"}


@pytest.mark.parametrize("model", PAIRS)
@pytest.mark.parametrize(
    "name",
    [*(name for name in COMMON if name != "last tokens"), "at least", "at least in all", "at least in beams", "first"],
)
def test_encoder_decoders_generate_as_transformers(name: str, model: str, tmp_path: Path) -> None:
    first = {"forced_bos_token_id": 30, "num_beams": 3, "length_penalty": 1.5, "max_length": 8, "min_length": 6}
    values = {"max_new_tokens": 8} | (COMMON | MORE | {"first": first})[name]
    if name in ("longest in all", "first"):
        values.pop("max_new_tokens")
    if "forced_eos_token_id" in values:
        values["forced_eos_token_id"] = 1
    given = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "bad_words_ids": [[0]]} | values
    folder = save_checkpoint(tmp_path, model, pairs=False)
    (folder / "generation_config.json").write_text(json.dumps(given))
    (prediction,) = open_model(folder).predict([Row("", ("cat sat on cat sat",))], BadRows())
    ids = [6, 7, 8, 6, 7, 1]
    theirs = _until(_theirs(folder, PAIRS[model], ids), [1])
    words = open_model(folder).tokenizer
    assert prediction.output == words.decode(theirs[1:] if name == "first" else theirs)


def test_padding_has_no_effect_on_a_penalty(tmp_path: Path) -> None:
    model = rg.load(save_checkpoint(tmp_path, "llama", pairs=False))
    prompts = [torch.tensor([5, 6, 7, 5, 6]), torch.tensor([0, 9]), torch.tensor([8])]
    processor = rg.nn.LogitsProcessor(repetition_penalty=1.7, no_repeat_ngram_size=2, min_new_tokens=3)
    for strategy in (rg.nn.Greedy(), rg.nn.Beam(3)):
        options = {"max_new_tokens": 9, "strategy": strategy, "processor": processor, "stop": [11, 12]}
        together = model.generate(prompts, **options)
        alone = [model.generate([prompt], **options)[0] for prompt in prompts]
        assert [row.tolist() for row in together] == [row.tolist() for row in alone]


def test_the_number_of_likely_tokens_is_limited_as_in_transformers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", pairs=False, generation_config={"do_sample": True, "min_p": 0.1})
    assert _language(folder).form.generation.strategy == rg.nn.Sample(top_k=50, min_p=0.1)
    save_checkpoint(tmp_path, "llama", pairs=False, generation_config={"do_sample": True, "top_k": 0, "top_p": 0.7})
    assert _language(folder, seed=0)._strategy() == rg.nn.Sample(top_p=0.7, seed=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("values", [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_sampling_draws_from_the_tokens_of_transformers(values: dict[str, float], temperature: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)) * 2
    theirs = logits / temperature
    warpers = {"top_k": transformers.TopKLogitsWarper, "top_p": transformers.TopPLogitsWarper,
               "min_p": transformers.MinPLogitsWarper}  # fmt: skip
    for name, value in values.items():
        theirs = warpers[name](value)(None, theirs)
    expected = theirs.softmax(-1)[0]
    choose = rg.nn.Sample(temperature, **values, seed=0).chooser()  # type: ignore[arg-type]
    counts = choose(logits.expand(20000, -1)).bincount(minlength=40) / 20000
    assert (counts > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.02)


UNSUPPORTED = {
    "guidance_scale": 1.5, "sequence_bias": [[[1], 2.0]], "encoder_repetition_penalty": 2.0, "stop_strings": ["cat"],
    "encoder_no_repeat_ngram_size": 2, "exponential_decay_length_penalty": [3, 1.1], "diversity_penalty": 0.5,
    "num_beam_groups": 2, "penalty_alpha": 0.6, "dola_layers": "high", "num_return_sequences": 2, "max_time": 1.0,
    "renormalize_logits": True, "begin_suppress_tokens": [3], "watermarking_config": {"bias": 2.0},
    "constraints": [1], "force_words_ids": [[3]], "token_healing": True, "assistant_ensemble_weight": 0.5,
}  # fmt: skip
SAMPLING = {"typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.5, "num_beams": 3}


@pytest.mark.parametrize("name", [*UNSUPPORTED, *SAMPLING, "forced_bos_token_id"])
def test_values_that_change_the_output_and_are_not_supported_are_refused(name: str, tmp_path: Path) -> None:
    values = {name: (UNSUPPORTED | SAMPLING | {"forced_bos_token_id": 3})[name]}
    sampling = {"do_sample": True} if name in SAMPLING else {}
    folder = save_checkpoint(tmp_path, "llama", pairs=False, generation_config=values | sampling)
    with pytest.raises(UserError, match=f"{name} = .* is not supported") as error:
        open_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [{"repetition_penalty": "high"}, {"repetition_penalty": 0}, {"num_beams": 0}, {"do_sample": True, "temperature": 0},
     {"no_repeat_ngram_size": -1}, {"bad_words_ids": [3]}, {"bad_words_ids": [[]]}, {"early_stopping": "often"},
     {"suppress_tokens": [-1]}],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_one_clear_sentence(values: dict[str, Any], tmp_path: Path) -> None:
    early = {"num_beams": 2} if "early_stopping" in values else {}
    folder = save_checkpoint(tmp_path, "llama", pairs=False, generation_config=values | early)
    with pytest.raises(UserError, match=r"generation_config\.json: .*(must|limit)"):
        open_model(folder)


def test_every_value_of_transformers_is_supported_refused_or_without_effect() -> None:
    known = {name for name in transformers.GenerationConfig().to_dict() if not name.startswith("_")}
    ours = {*generation.TYPES, *generation.REFUSED, *generation.REFUSED_SAMPLING, *generation.NO_EFFECT}
    assert known - ours == set()


def test_a_prompt_longer_than_max_length_is_an_error(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", pairs=False, generation_config={"max_length": 3})
    bad = BadRows(skip=True)
    assert list(_language(folder).predict([Row("here", ("the cat sat on",))], bad)) == []
    assert "max_length" in bad.first[0]
    assert len(list(_language(folder, max_new_tokens=4).generate([5, 6, 7, 8]))) == 4


def test_values_of_generation_config_survive_saving(tmp_path: Path) -> None:
    values = {"repetition_penalty": 1.3, "do_sample": True, "eos_token_id": [3, 4]}
    save_checkpoint(tmp_path / "theirs", "llama", pairs=False, generation_config=values)
    rg.save(rg.load(tmp_path / "theirs"), tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert {name: saved[name] for name in values} == values


def test_older_checkpoints_have_their_values_in_config_json(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "marian", pairs=False, config={"num_beams": 3, "length_penalty": 2.0})
    (folder / "generation_config.json").unlink()
    assert open_model(folder).generation.strategy == rg.nn.Beam(3, 2.0)  # type: ignore[attr-defined]
    (folder / "generation_config.json").write_text("{}")
    assert open_model(folder).generation.strategy == rg.nn.Greedy()  # type: ignore[attr-defined]


@pytest.mark.parametrize("values", [{"num_beams": 3}, {"repetition_penalty": 1.5}, {"max_length": 7}], ids=str)
def test_whisper_refuses_values_that_it_does_not_use(values: dict[str, Any], tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "whisper", pairs=False)
    open_model(folder)
    save_checkpoint(tmp_path, "whisper", pairs=False, generation_config=values)
    with pytest.raises(UserError, match="not supported for Whisper"):
        open_model(folder)
