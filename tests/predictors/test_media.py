"""Translation, images and speech."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import regard as rg
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.models.audio import normalize_waveform
from regard.predictors import PredictOptions, Predictor, open_model
from regard.predictors.speech import CtcSpeech
from regard.predictors.vision import _target
from regard.training.task import Prediction
from tests.models.transformers_models import their_model
from tests.predictors.tiny_checkpoints import save_checkpoint

Image = pytest.importorskip("PIL.Image")
soundfile = pytest.importorskip("soundfile")


def predict(predictor: Predictor, given: object, **options: Any) -> Prediction:
    predictor.configure(PredictOptions(**options))
    (prediction,) = predictor.predict([Row("here", (str(given),))], BadRows())
    return prediction


@pytest.mark.parametrize("case", ["t5", "marian"])
def test_a_text_is_translated_as_by_transformers(case: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, case, pairs=False)
    stop = rg.load(tmp_path).config.stop
    prediction = predict(open_model(tmp_path), "the cat sat", max_new_tokens=6)
    ids = torch.tensor([[5, 6, 7, stop]])
    expected = their_model(case).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=6, use_cache=False
    )[0, 1:]
    kept = [token for token in expected.tolist() if token != stop]
    assert prediction.output == open_model(tmp_path).tokenizer.decode(kept)


def test_the_language_of_a_translation(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "m2m100", pairs=False)
    predictor = open_model(tmp_path)
    with pytest.raises(UserError, match="writes many languages; name one with --language"):
        predict(predictor, "the cat sat")
    with pytest.raises(UserError, match="has no language 'xx'"):
        predict(predictor, "the cat sat", language="xx")
    prediction, stop = predict(predictor, "the cat sat", language="red", max_new_tokens=5), predictor.model.config.stop
    ids = torch.tensor([[5, 6, 7, stop]])
    expected = their_model("m2m100").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=6, forced_bos_token_id=20
    )[0, 2:]
    assert prediction.output == predictor.tokenizer.decode([token for token in expected.tolist() if token != stop])


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_an_image_is_labelled(tmp_path: Path, picture: Path) -> None:
    settings = {
        "size": {"height": 32, "width": 48},
        "resample": 3,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4] * 3,
    }
    save_checkpoint(tmp_path / "vit", "vit-classifier", preprocessor_config=settings)
    prediction = predict(open_model(tmp_path / "vit"), picture)
    small = np.asarray(Image.open(picture).resize((48, 32), Image.Resampling.BICUBIC), np.float32) / 255
    pixels = torch.from_numpy((small - [0.1, 0.2, 0.3]) / 0.4).permute(2, 0, 1).float()
    expected = their_model("vit-classifier")(pixels[None]).logits[0].softmax(-1)
    assert prediction.output == f"LABEL_{int(expected.argmax())}"
    assert prediction.score == pytest.approx(expected.max().item(), abs=1e-5)
    assert list(prediction.more.values()) == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("case", ["bart", "m2m100", "marian", "t5"])
def test_outputs_and_sources_end_where_the_positions_do(case: str, tmp_path: Path) -> None:
    first = {"forced_bos_token_id": 20} if case == "m2m100" else {}
    predictor: Any = open_model(
        save_checkpoint(tmp_path, case, pairs=False, generation_config={"num_beams": 1, "eos_token_id": 98} | first)
    )
    for given in ("cat", "cat " * 39):
        assert predict(predictor, given, max_new_tokens=200).score is not None
    if case != "t5":
        bad = BadRows(skip=True)
        assert list(predictor.predict([Row("here", ("cat " * 40,))], bad)) == []
        assert "at most 40" in bad.first[0]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": {"shortest_edge": 30}, "do_center_crop": True, "crop_size": 24}, (24, 24)),
        ({"size": {"shortest_edge": 80, "longest_edge": 90}}, (90, 60)),
        ({"size": 20}, (20, 20)),
        ({"do_resize": False}, (60, 40)),
    ],
)
def test_images_are_resized_as_the_settings_say(settings: dict, size: tuple, tmp_path: Path, picture: Path) -> None:
    save_checkpoint(tmp_path / "vit", "vit-classifier", preprocessor_config=settings)
    predictor: Any = open_model(tmp_path / "vit")
    assert predictor.preparation.resize(Image.open(picture)).size == size


@pytest.mark.parametrize("settings", [{"size": {"height": 10**9, "width": 2}}, {"image_std": 0}, {"image_mean": [1, 2]},
                                      {"resample": "x"}, {"size": {"height": "x"}}, {"rescale_factor": "x"},
                                      {"rescale_factor": None}])  # fmt: skip
def test_bad_settings_are_refused(settings: dict, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "vit-classifier", preprocessor_config=settings)
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        open_model(tmp_path)


def test_objects_are_found_and_drawn(tmp_path: Path, picture: Path) -> None:
    save_checkpoint(tmp_path / "detr", "detr", preprocessor_config={"size": {"shortest_edge": 64, "longest_edge": 100}})
    predictor = open_model(tmp_path / "detr")
    prediction = predict(predictor, picture, threshold=0.2)
    small = np.asarray(Image.open(picture).resize((96, 64), Image.Resampling.BILINEAR), np.float32) / 255
    pixels = torch.from_numpy((small - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).permute(2, 0, 1).float()
    with torch.no_grad():
        output = their_model("detr")(pixels[None])
    scores, labels = output.logits[0].softmax(-1)[:, :-1].max(-1)
    best = int(scores.argmax())
    middle_x, middle_y, wide, high = output.pred_boxes[0, best].tolist()
    first = prediction.more["objects"][0]
    assert first["label"] == f"LABEL_{int(labels[best])}"
    assert first["score"] == pytest.approx(scores[best].item(), abs=1e-4)
    edges = [
        (middle_x - wide / 2) * 60,
        (middle_y - high / 2) * 40,
        (middle_x + wide / 2) * 60,
        (middle_y + high / 2) * 40,
    ]
    assert first["box"] == pytest.approx(edges, abs=0.2)
    assert len(prediction.more["objects"]) == int((scores >= 0.2).sum())
    drawn = predictor.write_file(prediction, ".png")
    (tmp_path / "drawn.png").write_bytes(drawn)
    assert Image.open(tmp_path / "drawn.png").size == (60, 40)
    assert (np.asarray(Image.open(tmp_path / "drawn.png")) != np.asarray(Image.open(picture))).any()


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    wave = np.random.default_rng(0).standard_normal(4000).astype(np.float32) / 4
    soundfile.write(tmp_path / "sound.wav", wave, 16000, subtype="FLOAT")
    return tmp_path / "sound.wav"


def test_whisper_transcribes_in_windows(tmp_path: Path, sound: Path) -> None:
    save_checkpoint(tmp_path / "whisper", "whisper", pairs=False)
    predictor = open_model(tmp_path / "whisper")
    prediction = predict(predictor, sound)
    wave = torch.from_numpy(soundfile.read(sound, dtype="float32")[0])
    features = rg.models.audio.whisper_features(wave, 20, seconds=0.5)
    expected = rg.load(tmp_path / "whisper").generate(features[None])[0].tolist()
    assert prediction.output == predictor.checkpoint.tokenizer.decode(expected)  # type: ignore[attr-defined]
    soundfile.write(tmp_path / "long.wav", np.tile(wave.numpy(), 5), 16000, subtype="FLOAT")  # 1.25 s: three windows
    parts = predict(predictor, tmp_path / "long.wav").more["segments"]
    assert [(part["start"], part["end"]) for part in parts] == [(0, 0.5), (0.5, 1.0), (1.0, 1.25)]
    pieces: list[str] = []
    predictor.stream(Row("here", (str(tmp_path / "long.wav"),)), BadRows(), pieces.append)
    assert "".join(pieces) == " ".join(part["text"] for part in parts)
    with pytest.raises(UserError, match="has no timestamps"):
        predict(predictor, sound, timestamps=True)
    with pytest.raises(UserError, match="language='fr' is not supported"):
        predict(predictor, sound, language="fr")


def save_wav2vec2(folder: Path) -> CtcSpeech:
    save_checkpoint(folder, "wav2vec2-large")
    (folder / "tokenizer.json").unlink()
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", "A", "B", "C", "D", "E", "F", "G"]
    (folder / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    predictor = open_model(folder)
    assert isinstance(predictor, CtcSpeech)
    return predictor


def test_wav2vec2_transcribes_as_transformers(tmp_path: Path, sound: Path) -> None:
    predictor = save_wav2vec2(tmp_path / "wav2vec2")
    wave = torch.from_numpy(soundfile.read(sound, dtype="float32")[0])
    with torch.no_grad():
        labels = their_model("wav2vec2-large")(normalize_waveform(wave)[None]).logits[0].argmax(-1).tolist()
    expected = predictor.checkpoint.tokenizer.decode(labels)
    assert predict(predictor, sound).output.split() == expected.split()
    words = predict(predictor, sound).more["words"]
    assert all(0 <= word["start"] < word["end"] <= 0.25 for word in words)


def test_wav2vec2_joins_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = save_wav2vec2(tmp_path)
    monkeypatch.setattr("regard.predictors.speech.CHUNK", 0.3)
    monkeypatch.setattr("regard.predictors.speech.MARGIN", 0.05)
    seen: list[int] = []

    class Model(torch.nn.Module):
        """A model whose label is the number of the frame, in the letters from 5 on."""

        config = predictor.model.config

        def forward(self, wave: torch.Tensor) -> torch.Tensor:
            seen.append(wave.shape[1])
            frames = wave[0, ::20][: self.config.length(wave.shape[1])].long()
            return torch.nn.functional.one_hot(5 + frames % 7, 12).float()[None]

    predictor.model = Model()
    monkeypatch.setattr("regard.predictors.speech.normalize_waveform", lambda wave: wave)
    wave = torch.arange(16000.0) // 20  # one second; sample 20 n has the number of the frame
    parts: list = []
    predictor.transcribe(wave, parts.append)
    frames = predictor.model.config.length(16000)
    assert len(seen) > 3
    assert "".join(part.text for part in parts).replace(" ", "") == "".join("ABCDEFG"[n % 7] for n in range(frames))


def test_subtitles(tmp_path: Path) -> None:
    predictor = save_wav2vec2(tmp_path)
    parts = [{"start": 0.0, "end": 1.5, "text": "one"}, {"start": 3661.25, "end": 3662.0, "text": "two"}]
    written = predictor.write_file(Prediction("", "", None, {"segments": parts}), ".srt").decode()
    assert written == "1\n00:00:00,000 --> 00:00:01,500\none\n\n2\n01:01:01,250 --> 01:01:02,000\ntwo\n"


def test_words_become_lines_at_pauses(tmp_path: Path) -> None:
    predictor = save_wav2vec2(tmp_path)
    labels = [5, 5, 0, 6, 4, 7] + [0] * 40 + [4, 8, 8, 4]
    words = predictor._words(labels, 0.02)
    assert [(word.text, round(word.start, 2), round(word.end, 2)) for word in words] == [
        ("AB", 0.0, 0.08), ("C", 0.1, 0.12), ("D", 0.94, 0.98),
    ]  # fmt: skip
    from regard.predictors.speech import _lines

    assert [[word.text for word in line] for line in _lines(words)] == [["AB", "C"], ["D"]]


def test_sound_that_is_no_sound(tmp_path: Path) -> None:
    predictor = save_wav2vec2(tmp_path / "wav2vec2")
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(UserError, match="cannot be read as audio"):
        predict(predictor, tmp_path / "text.wav")


def _their_vectors(name: str, picture: Path, texts: list[list[int]], mask: list[list[int]] | None) -> torch.Tensor:
    model = their_model(name)
    given = (
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        if name.startswith("clip")
        else transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    )
    pixels = given(Image.open(picture).convert("RGB"), return_tensors="pt")["pixel_values"]
    masks = {} if mask is None else {"attention_mask": torch.tensor(mask)}
    with torch.no_grad():
        return model(input_ids=torch.tensor(texts), pixel_values=pixels, **masks).logits_per_image[0]


def test_labels_for_images_are_those_of_clip(tmp_path: Path, picture: Path) -> None:
    settings = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True,
                "resample": 3, "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711]}  # fmt: skip
    predictor = open_model(save_checkpoint(tmp_path / "clip", "clip-largest", preprocessor_config=settings))
    prediction = predict(predictor, picture, labels='the cat,"red, big dog",mat')
    logits = _their_vectors(
        "clip-largest", picture,
        [[2, 5, 6, 3, 0, 0, 0], [2, 20, 24, 22, 11, 3, 0], [2, 9, 3, 0, 0, 0, 0]],
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]],
    )  # fmt: skip
    expected = dict(zip(("the cat", "red, big dog", "mat"), logits.softmax(-1).tolist(), strict=True))
    assert prediction.more == pytest.approx(expected, abs=1e-4)
    assert prediction.output == max(expected, key=lambda label: expected[label])


def test_labels_for_images_are_those_of_siglip(tmp_path: Path, picture: Path) -> None:
    settings = {"size": {"height": 32, "width": 32}, "resample": 3}
    folder = save_checkpoint(
        tmp_path / "siglip", "siglip", pairs=False, preprocessor_config=settings,
        tokenizer_config={"pad_token": "[PAD]"},
    )  # fmt: skip
    prediction = predict(open_model(folder), picture, labels="the cat,mat")
    texts = [[*ids, *[0] * (40 - len(ids))] for ids in ([5, 6], [9])]
    expected = _their_vectors("siglip", picture, texts, None).sigmoid().tolist()
    assert prediction.more == pytest.approx(dict(zip(("the cat", "mat"), expected, strict=True)), abs=1e-4)


def test_labels_are_needed_short_and_distinct(tmp_path: Path, picture: Path) -> None:
    predictor = open_model(save_checkpoint(tmp_path / "clip", "clip-largest"))
    for options, message in (({}, "--labels"), ({"labels": " , "}, "--labels"), ({"labels": "cat,cat"}, "distinct"),
                             ({"labels": "cat," + "dog " * 50}, "at most 40")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            predict(predictor, picture, **options)


def test_clip_is_evaluated_on_the_labels_of_the_data(tmp_path: Path, picture: Path) -> None:
    predictor = open_model(save_checkpoint(tmp_path / "clip", "clip-largest"))
    scores = predict(predictor, picture, labels="cat,dog").more
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        (tmp_path / "data" / label / "1.png").write_bytes(picture.read_bytes())
    measured = predictor.evaluate(predictor.read(str(tmp_path / "data"), BadRows()), BadRows())
    assert measured["rows"] == 2
    assert measured["accuracy"] == 0.5
    assert scores["cat"] + scores["dog"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("longest", [None, 60, 1333])
def test_images_are_resized_to_the_sides_of_transformers(longest: int | None) -> None:
    from transformers.image_transforms import get_size_with_aspect_ratio

    for width, height in [(60, 40), (50, 31), (31, 50), (640, 427), (427, 640), (33, 33), (900, 7), (32, 99), (1, 1)]:
        expected = get_size_with_aspect_ratio((height, width), 32, longest)
        sides = {"shortest_edge": 32} | ({} if longest is None else {"longest_edge": longest})
        assert _target((width, height), sides) == (max(1, expected[1]), max(1, expected[0]))
