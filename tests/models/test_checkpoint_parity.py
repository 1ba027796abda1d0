"""Every family compared with transformers: outputs, attention, generation, gradients, and saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import regard as rg
from regard.models.checkpoints.families import family_of
from regard.models.checkpoints.tensor_names import tensor_mappings
from tests.models import transformers_models as t


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in kept:
            kept[name] = t.save_their_model(name, tmp_path_factory.mktemp(name))
        return kept[name]

    return of


UNEVEN = [name for name in t.TEXTS if name.startswith(("modernbert", "deberta"))]


def close(ours: Any, theirs: Any, tolerance: float = 1e-4) -> None:
    if isinstance(ours, tuple):
        for own, other in zip(ours, theirs, strict=True):
            close(own, other, tolerance)
    else:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", t.CASES)
def test_a_loaded_model_matches_the_outputs_of_transformers(name: str, folder: Any) -> None:
    model, other = rg.load(folder(name)), t.their_model(name)
    with torch.no_grad(), t.recording(model) as seen:
        seen.result = t.ours(name, model)
        outputs = t.theirs(name, other, output_hidden_states=True, output_attentions=True)
    expected = t.result(outputs)
    if isinstance(expected, tuple):
        close(seen.result, expected)
    else:
        close(t.real(name, seen.result), t.real(name, expected))
    for own, theirs in zip(*hidden_states(name, seen, outputs), strict=True):
        close(t.real(name, own), t.real(name, theirs))
    for own, theirs in zip(*attentions(name, seen, outputs), strict=True):
        rows = own.transpose(1, 2), theirs.transpose(1, 2)  # (B, Q, H, K)
        if name in t.DECODERS or name in UNEVEN:  # padding may see no key at all
            rows = rows[0][t.mask_of(name)], rows[1][t.mask_of(name)]
        close(*rows)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-long"])
def test_dynamic_scaling_of_a_padded_row_matches_transformers_on_that_row_alone(name: str, folder: Any) -> None:
    ours, other = rg.load(folder(name))(t.IDS, t.LEFT), t.their_model(name)
    for row in t.LEFT.sum(1).argsort():  # the shortest first: theirs keeps the longest length so far
        mask = t.LEFT[row]
        close(ours[row][mask], other(input_ids=t.IDS[row][mask][None]).logits[0])


def hidden_states(name: str, seen: t.Recording, outputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states of every layer; theirs include a final norm after the last one."""
    if name in (*t.PAIRS, "detr", "whisper"):
        encoder, decoder = outputs.encoder_hidden_states[1:], outputs.decoder_hidden_states[1:]
        own = [*seen.hidden[: len(encoder) - 1], seen.last[0], *seen.hidden[len(encoder) :]]
        assert len(seen.hidden) == len(encoder) + len(decoder)
        if name != "detr":
            own[-1] = seen.last[1]
            return own, [*encoder, *decoder]
        return own[:-1], [*encoder, *decoder[:-1]]  # the last one is taken after the final norm
    if name in t.DUALS:
        towers = outputs.vision_model_output, outputs.text_model_output
        return seen.hidden, [hidden for tower in towers for hidden in tower.hidden_states[1:]]
    expected = list(outputs.hidden_states[1:])
    assert len(seen.hidden) == len(expected)
    if name.startswith(("vit", "wav2vec2", "dinov2")):
        return seen.hidden, expected
    return [*seen.hidden[:-1], seen.last[0]], expected


def attentions(name: str, seen: t.Recording, outputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    if name in (*t.PAIRS, "detr", "whisper"):
        pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
        return seen.weights, [*outputs.encoder_attentions, *(weights for pair in pairs for weights in pair)]
    if name in t.DUALS:
        towers = outputs.vision_model_output, outputs.text_model_output
        own = [weights for weights in seen.weights if weights.shape[-2] > 1]  # theirs do not include the probe
        return own, [weights for tower in towers for weights in tower.attentions]
    return seen.weights, list(outputs.attentions)


@pytest.mark.parametrize("name", t.CASES)
def test_transformers_reads_saved_models_and_computes_the_same(name: str, folder: Any, tmp_path: Path) -> None:
    model = rg.load(folder(name))
    rg.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (written,) = config["architectures"]
    assert written == ("BertForMaskedLM" if name == "bert-pretraining" else t.CASES[name].architecture)
    other, report = getattr(transformers, written).from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert all("pooler" in key for key in report["missing_keys"]), report["missing_keys"]
    again = rg.load(tmp_path)
    assert again.config == model.config
    with torch.no_grad():
        before, after = t.theirs(name, t.their_model(name)), t.theirs(name, other.eval())
        if name == "bert-pretraining":
            before = {"logits": before.prediction_logits}
        if t.CASES[name].repeats:
            close(t.result(after), t.result(before), 1e-6)
        else:
            expected = t.their_model(name).state_dict()
            assert all(torch.equal(tensor, expected[key]) for key, tensor in other.state_dict().items())
        close(t.ours(name, again), t.ours(name, model), 1e-6)


@pytest.mark.parametrize("name", [name for name in t.DECODERS if t.CASES[name].padded])
def test_greedy_generation_of_language_models_matches_transformers(name: str, folder: Any) -> None:
    model = rg.load(folder(name))
    prompts = [row[mask] for row, mask in zip(t.IDS, t.LEFT, strict=True)]
    generated = model.generate(prompts, max_new_tokens=12)
    expected = t.their_model(name).generate(
        t.IDS, attention_mask=t.LEFT.long(), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert [row.tolist() for row in generated] == expected[:, t.IDS.shape[1] :].tolist()


@pytest.mark.parametrize("name", t.PAIRS)
def test_greedy_generation_of_encoder_decoders_matches_transformers(name: str, folder: Any) -> None:
    model = rg.load(folder(name))
    generated = model.generate(t.IDS, t.RIGHT, max_new_tokens=10)
    expected = t.their_model(name).generate(
        t.IDS, attention_mask=t.RIGHT.long(), max_new_tokens=10, do_sample=False, num_beams=1,
        use_cache=False,  # their cache counts encoder layers
    )  # fmt: skip
    ends = [[*row.tolist(), model.config.stop] for row in expected[:, 1:]]
    assert [row.tolist() for row in generated] == [row[: row.index(model.config.stop)] for row in ends]


def test_the_first_token_of_a_target_is_loaded_saved_and_chosen(folder: Any, tmp_path: Path) -> None:
    place, other = t.save_their_model("m2m100", tmp_path / "theirs"), t.their_model("m2m100")
    assert rg.load(place).config.prompt == ()
    settings = json.loads((place / "generation_config.json").read_text())
    (place / "generation_config.json").write_text(json.dumps(settings | {"forced_bos_token_id": 7}))
    rg.save(rg.load(place), tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["forced_bos_token_id"] == 7
    model = rg.load(tmp_path / "ours")
    for language, prompt in ((7, None), (9, (9,))):
        generated = model.generate(t.IDS, t.RIGHT, max_new_tokens=9, prompt=prompt)
        expected = other.generate(
            t.IDS, attention_mask=t.RIGHT.long(), max_new_tokens=10, do_sample=False, num_beams=1, use_cache=False,
            forced_bos_token_id=language,
        )  # fmt: skip
        assert expected[:, 1].tolist() == [language] * len(expected)
        ends = [[*row.tolist(), model.config.stop] for row in expected[:, 2:]]
        assert [row.tolist() for row in generated] == [row[: row.index(model.config.stop)] for row in ends]


def test_suppressed_tokens_are_loaded_and_saved(folder: Any, tmp_path: Path) -> None:
    place = t.save_their_model("marian", tmp_path / "theirs")
    free = rg.load(place).generate(t.IDS, t.RIGHT, max_new_tokens=4)
    banned = int(free[0][0])
    (place / "generation_config.json").write_text(json.dumps({"bad_words_ids": [[banned]]}))
    model = rg.load(place)
    rg.save(model, tmp_path / "ours")
    again = rg.load(tmp_path / "ours")
    assert again.config.suppress_tokens == model.config.suppress_tokens == (banned,)
    assert banned not in again.generate(t.IDS, t.RIGHT, max_new_tokens=4)[0].tolist()


@pytest.mark.parametrize("name", t.GRADIENTS)
def test_gradients_match_transformers(name: str, folder: Any) -> None:
    model, other = rg.load(folder(name)), t.their_model(name)
    loss(name, t.ours(name, model)).backward()
    other.zero_grad()
    loss(name, t.result(t.theirs(name, other))).backward()
    expected = {key: parameter.grad for key, parameter in other.named_parameters() if parameter.grad is not None}
    family = family_of(model.origin["model_type"])
    assert family is not None
    parameters, grads = dict(model.named_parameters()), {}
    for move in tensor_mappings(model, family.architectures[t.CASES[name].architecture].rules(model.config)):
        if move.ours in parameters:
            for key, gradient in move.split(parameters[move.ours].grad):
                grads[key] = grads.get(key, 0) + gradient  # rows of one stored tensor may belong to several of ours
    if t.CASES[name].experts_by_name:
        expected = dict(entry for key, gradient in expected.items() for entry in stored_experts(key, gradient))
    grads.pop("final_logits_bias", None)  # a buffer there
    assert grads.keys() == expected.keys()
    most = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        size = max(float(gradient.abs().max()), 1e-3 * most)  # the gradient of a key bias is rounding error
        assert float((grads[key] - gradient).abs().max()) <= 1e-4 * size, key


def stored_experts(key: str, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors of single experts, as they are stored, of a tensor of all experts."""
    before, _, kind = key.rpartition(".experts.")
    if not before:
        return [(key, gradient)]
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return [
        (f"{before}.experts.{n}.{name}.weight", part)
        for n, expert in enumerate(gradient)
        for name, part in zip(names, expert.chunk(len(names)), strict=True)
    ]


def loss(name: str, logits: Tensor) -> Tensor:
    if name in t.PAIRS:
        return F.cross_entropy(logits.flatten(0, 1), t.TARGETS.flatten())
    mask = t.mask_of(name)
    return F.cross_entropy(logits[mask], t.IDS[mask])


@pytest.mark.parametrize(
    "name",
    ["deberta", "deepseek-v3", "dinov2", "gemma3", "gpt-oss", "modernbert", "mpnet", "olmo2", "qwen3-next", "siglip"],
)
@torch.inference_mode()
def test_frozen_models_compute_the_same(name: str, folder: Any) -> None:
    frozen, plain = rg.load(folder(name), frozen=True), rg.load(folder(name))
    close(t.real(name, t.ours(name, frozen)), t.real(name, t.ours(name, plain)), 1e-5)


@pytest.mark.parametrize("name", sorted(t.FIRST.values()))
@torch.inference_mode()
def test_rounded_weights_of_every_family_are_saved_and_loaded(name: str, folder: Any, tmp_path: Path) -> None:
    rounded = rg.load(folder(name), weights="int4")
    rg.save(rounded, tmp_path)
    close(t.real(name, t.ours(name, rg.load(tmp_path))), t.real(name, t.ours(name, rounded)), 0)


@pytest.mark.parametrize("name", t.DUALS)
@torch.no_grad()
def test_vectors_of_images_and_texts_match_transformers(name: str, folder: Any) -> None:
    model, outputs = rg.load(folder(name)), t.theirs(name, t.their_model(name))
    close(model.embed_images(t.PIXELS[..., :32]), outputs.image_embeds)
    close(model.embed_texts(t.TEXTS_WITH_STOP, t.RIGHT), outputs.text_embeds)
    if name == "clip":
        rows = [row[mask] for row, mask in zip(t.TEXTS_WITH_STOP, t.RIGHT, strict=True)]
        close(model.embed_texts(rows), outputs.text_embeds)
        with pytest.raises(ValueError, match="every text must have the stop token 98"):
            model.embed_texts(t.IDS)


@torch.no_grad()
def test_images_of_other_sizes_match_transformers(folder: Any) -> None:
    model, other = rg.load(folder("dinov2")), t.their_model("dinov2")
    close(model(t.PIXELS), other(t.PIXELS).last_hidden_state)


def test_whisper_generation_matches_transformers(folder: Any) -> None:
    model, other = rg.load(folder("whisper")), t.their_model("whisper")
    settings = transformers.GenerationConfig.from_model_config(other.config)
    expected = transformers.GenerationMixin.generate(
        other, input_features=t.FEATURES.mT, generation_config=settings, max_new_tokens=12, do_sample=False
    )
    generated = model.generate(t.FEATURES, max_new_tokens=12)
    rows = [[*row.tolist(), model.config.stop] for row in expected[:, 1:]]
    assert [row.tolist() for row in generated] == [row[: row.index(model.config.stop)] for row in rows]
    assert model.config.suppress_tokens == (7, 8)
    assert model.config.begin_suppress_tokens == (5, 98)
    assert not any(token in (7, 8) for row in generated for token in row.tolist())


def test_whisper_continues_a_prompt(folder: Any) -> None:
    model, other = rg.load(folder("whisper")), t.their_model("whisper")
    generated = model.generate(t.FEATURES[:1], max_new_tokens=8, prompt=(11, 12))[0].tolist()
    ids = torch.tensor([[model.config.start, 11, 12, *generated[:-1]]])
    with torch.no_grad():
        logits = other(input_features=t.FEATURES[:1].mT, decoder_input_ids=ids).logits[0, 2:]
    logits[:, [7, 8]] = logits[0, [5, 98]] = -torch.inf
    assert generated == logits.argmax(-1).tolist()


def test_whisper_ignores_masked_frames(folder: Any) -> None:
    model, target = rg.load(folder("whisper")), t.TARGETS[:2]
    mask = torch.arange(50) < torch.tensor([31, 50])[:, None]
    both = model(t.FEATURES[:2], target, mask)
    close(both[:1], model(t.FEATURES[:1, :31], target[:1]), 1e-5)
    packed = model([t.FEATURES[0, :31], t.FEATURES[1]], list(target))
    close(torch.stack(packed), both, 1e-5)
    both_said = model.generate(t.FEATURES[:2], mask, max_new_tokens=6)
    assert both_said[0].tolist() == model.generate(t.FEATURES[:1, :31], max_new_tokens=6)[0].tolist()


@pytest.mark.parametrize("name", ["wav2vec2", "wav2vec2-large"])
def test_wav2vec2_transcription_matches_transformers(name: str, folder: Any, tmp_path: Path) -> None:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefg"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    other = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    place = t.save_their_model(name, tmp_path / "model")
    other.save_pretrained(place)
    model, speller = rg.load(place), rg.models.tokenizer(place)
    with torch.no_grad():
        best = model(t.WAVES).argmax(-1)
        expected = t.their_model(name)(t.WAVES).logits.argmax(-1)
    rows = [*best.tolist(), [4, 4, 5, 5, 0, 5, 4, 0, 4, 6, 4], [0, 0], [4, 0, 4]]
    assert [speller.decode(row) for row in best.tolist()] == other.batch_decode(expected)
    assert [speller.decode(row, skip_special_tokens=False) for row in rows] == [other.decode(row) for row in rows]


def test_weight_names_of_older_releases_are_read(folder: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    place = t.save_their_model("wav2vec2", tmp_path / "old")
    held = load_file(place / "model.safetensors")
    old = {key.replace("parametrizations.weight.original0", "weight_g").replace(
        "parametrizations.weight.original1", "weight_v"): tensor for key, tensor in held.items()}  # fmt: skip
    assert old.keys() != held.keys()
    save_file(old | {"wav2vec2.masked_spec_embed": torch.zeros(32)}, place / "model.safetensors", {"format": "pt"})
    close(rg.load(place)(t.WAVES), rg.load(folder("wav2vec2"))(t.WAVES), 1e-6)


def test_whisper_features_match_transformers() -> None:
    from regard.models.audio import normalize_waveform, whisper_features

    wave = torch.randn(20011, generator=torch.Generator().manual_seed(3)) * torch.linspace(0, 1, 20011)
    for features in (80, 128):
        theirs = transformers.WhisperFeatureExtractor(feature_size=features, chunk_length=2)
        expected = theirs(wave.numpy(), sampling_rate=16000, return_tensors="pt").input_features[0]
        close(whisper_features(wave, features, seconds=2), expected.mT, 1e-5)
    other = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    close(normalize_waveform(wave), other(wave.numpy(), sampling_rate=16000, return_tensors="pt").input_values[0], 1e-5)
