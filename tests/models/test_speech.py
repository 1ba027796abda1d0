"""Speech: features, CTC, streaming recognition, and step-by-step synthesis."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.models import SpeechConfig, SpeechRecognizer, SpeechSynthesizer, SpeechSynthesizerConfig
from regard.models.audio import griffin_lim, log_mel, mel_bands
from regard.models.ctc import greedy, min_frames, prefix_beam
from regard.models.speech_synthesis import guided_attention
from regard.view import capture

SMALL = {"labels": 7, "d_model": 24, "layers": 3, "heads": 2, "d_hidden": 40, "features": 11}


def recognizer(**more: int) -> SpeechRecognizer:
    torch.manual_seed(0)
    return SpeechRecognizer(SpeechConfig(**(SMALL | more))).eval()


def sound(*lengths: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(n, 11, generator=draw) for n in lengths]


@pytest.mark.parametrize("hertz", [200.0, 1000.0, 5000.0])
def test_a_tone_is_loudest_in_its_own_band(hertz: float) -> None:
    wave = torch.sin(2 * math.pi * hertz * torch.arange(16000) / 16000)
    bins = torch.linspace(0, 8000, 201)
    bands = mel_bands(40)
    centres = (bands * bins).sum(1) / bands.sum(1)
    loudest = log_mel(wave, 40)[20:80].mean(0).argmax()
    assert abs(float(centres[loudest]) - hertz) < 0.1 * hertz + 40


def test_mel_features_match_their_definition() -> None:
    wave = torch.randn(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    n = torch.arange(400, dtype=torch.float64)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * n / 400)
    padded = F.pad(wave[None, None], (200, 200), mode="reflect")[0, 0]
    turn = torch.exp(-2j * math.pi * (torch.arange(201)[:, None] * n) / 400)
    frames = torch.stack([turn @ (padded[160 * t : 160 * t + 400] * window).to(turn.dtype) for t in range(3000 // 160)])
    expected = (frames.abs() ** 2 @ mel_bands(20).double().mT).clamp(min=1e-6).log10()
    torch.testing.assert_close(log_mel(wave, 20), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("samples", [1, 159, 400, 401])
def test_short_waves_have_features(samples: int) -> None:
    values = log_mel(torch.ones(samples))
    assert values.isfinite().all()
    assert len(values) == max(samples, 400) // 160


def test_silence_is_the_floor() -> None:
    torch.testing.assert_close(log_mel(torch.zeros(1600)), torch.full((10, 80), -6.0))


def test_griffin_lim_reproduces_the_features() -> None:
    t = torch.arange(8000) / 16000
    wave = torch.sin(2 * math.pi * 440 * t) * (t * 8).sin() + 0.3 * torch.sin(2 * math.pi * 2000 * t)
    values = log_mel(wave)
    result = griffin_lim(values)
    assert result.shape == wave.shape
    loud = values > values.max() - 3
    assert float((log_mel(result) - values)[loud].abs().mean()) < 0.12
    assert torch.equal(result, griffin_lim(values))


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label)


@pytest.mark.parametrize("seed", range(6))
def test_prefix_beam_search_finds_the_most_probable_labels(seed: int) -> None:
    logits = 2 * torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    shares, sums = logits.softmax(-1), dict[tuple[int, ...], float]()
    for path in itertools.product(range(3), repeat=5):
        share = math.prod(float(shares[n, label]) for n, label in enumerate(path))
        sums[collapse(path)] = sums.get(collapse(path), 0.0) + share
    best = max(sums, key=lambda each: sums[each])
    result = prefix_beam(logits, width=1000)
    assert tuple(result.labels) == best
    assert math.isclose(result.score, math.log(sums[best]), rel_tol=1e-9)
    alone = -F.ctc_loss(
        logits.log_softmax(-1)[:, None], torch.tensor([result.labels]), [5], [len(best)], reduction="sum"
    )
    assert math.isclose(result.score, float(alone), rel_tol=1e-9)


def test_greedy_merges_repeats_unless_separated_by_a_blank() -> None:
    frames = F.one_hot(torch.tensor([0, 2, 2, 0, 2, 1, 1, 0]), 3) * 9.0
    assert greedy(frames).labels == prefix_beam(frames).labels == [2, 2, 1]
    assert greedy(frames[:0]).labels == prefix_beam(frames[:0]).labels == []
    assert min_frames([2, 2, 1]) == 4
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        prefix_beam(frames, width=0)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 0), (4, 2), (50, 1)])
@pytest.mark.parametrize("sizes", [(1,) * 61, (7, 1, 20, 33), (61,), (0, 30, 0, 31, 0)])
def test_a_stream_matches_the_full_pass(before: int, after: int, sizes: tuple[int, ...]) -> None:
    model, (whole,) = recognizer(before=before, after=after), sound(61)
    stream, pieces = model.stream(), whole.split(sizes)
    generated = [stream(piece, last=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
    with torch.no_grad():
        expected = model(whole[None])[0]
    torch.testing.assert_close(torch.cat(generated), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="the stream has ended"):
        stream(whole[:1])


def test_emitted_logits_do_not_depend_on_later_frames() -> None:
    model, (whole,) = recognizer(before=4, after=2), sound(80)
    first, other = model.stream(), model.stream()
    emitted = first(whole[:60])
    assert len(emitted) == 15 - 3 * 2  # the last frame needs one more input, and every layer two frames
    torch.testing.assert_close(emitted, other(whole[:60]))
    ends = torch.cat([whole[:60], 9 * whole[60:]])
    with torch.no_grad():
        torch.testing.assert_close(model(ends[None])[0, : len(emitted)], emitted, rtol=1e-4, atol=1e-5)
    rest = first(whole[60:], last=True)
    assert len(emitted) + len(rest) == 20


def test_attention_is_limited_to_the_window() -> None:
    model, (whole,) = recognizer(before=2, after=1, layers=1), sound(80)
    with capture(model) as record:
        model(whole[None])
    weights = record.weights(0, head=0)
    i, j = torch.arange(20)[:, None], torch.arange(20)
    assert torch.equal(weights > 0, (j >= i - 2) & (j <= i + 1))


def test_padded_packed_and_single_inputs_agree() -> None:
    model, parts = recognizer(before=5, after=2), sound(41, 12, 1)
    with torch.no_grad():
        alone = [model(part[None])[0] for part in parts]
        listed, packed = model(parts), model(rg.pack(parts))
        batch = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=torch.nan)
        mask = torch.arange(41) < torch.tensor([41, 12, 1])[:, None]
        padded = model(batch, mask)
    assert packed.lengths == (11, 3, 1)
    for n, (one, other) in enumerate(zip(listed, rg.unpack(packed), strict=True)):
        torch.testing.assert_close(one, alone[n], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other, alone[n], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(padded[n, : len(one)], alone[n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((2, 0, 11), None, r"at least one frame of 11 features, \(B, N, 11\), got \(2, 0, 11\)"),
        ((2, 5, 10), None, "at least one frame of 11 features"),
        ((1, 3, 11), [[True, False, True]], "True for the first frames of each row"),
        ((1, 3, 11), [[False, False, False]], "True for the first frames of each row"),
        ((1, 3, 11), [[True, True]], r"mask must be .*\(1, 3\).*, got \(1, 2\)"),
        ((1, 3, 11), [[1, 1, 0]], r"mask must be a \(B, N\) bool tensor.*torch.int64"),
    ],
)
def test_invalid_inputs_raise(shape: tuple[int, ...], mask: list | None, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        recognizer()(torch.zeros(shape), None if mask is None else torch.tensor(mask))


def test_an_invalid_configuration_raises() -> None:
    with pytest.raises(ValueError, match="before and after must be at least 0"):
        recognizer(before=-1)


def synthesizer() -> SpeechSynthesizer:
    torch.manual_seed(0)
    return SpeechSynthesizer(
        SpeechSynthesizerConfig(vocabulary=9, d_model=16, layers=2, heads=2, d_hidden=24, features=5, reduction=3)
    ).eval()


def test_saved_speech_models_load_unchanged(tmp_path: Path) -> None:
    for model, inputs in (
        (recognizer(before=3), (torch.randn(1, 30, 11),)),
        (synthesizer(), (torch.tensor([[1, 2, 3]]), torch.randn(1, 6, 5))),
    ):
        rg.save(model, tmp_path / type(model).__name__)
        again = rg.load(tmp_path / type(model).__name__)
        assert again.config == model.config
        assert torch.equal(again(*inputs), model(*inputs))


def test_generation_matches_teacher_forcing() -> None:
    model, text = synthesizer(), torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        model.end.bias.fill_(-9.0)
    generated = model.generate([text], max_frames=21)[0]
    assert (generated.frames.shape, generated.score) == ((21, 5), 0.0)  # max_frames was reached
    with torch.no_grad():
        torch.testing.assert_close(model(text[None], generated.frames[None])[0], generated.frames, rtol=1e-4, atol=1e-5)
        model.end.bias.fill_(9.0)
    ended = model.generate([text], max_frames=21)[0]
    assert len(ended.frames) == 3
    assert ended.score > 0.9


def test_padding_letters_have_no_effect() -> None:
    model, text, frames = synthesizer(), torch.tensor([[3, 1, 4, 0, 0]]), torch.randn(1, 6, 5)
    mask = torch.tensor([[True, True, True, False, False]])
    torch.testing.assert_close(model(text, frames, mask), model(text[:, :3], frames), rtol=1e-4, atol=1e-5)


def test_a_step_depends_on_earlier_frames_only() -> None:
    model, text, frames = synthesizer(), torch.tensor([[3, 1, 4]]), torch.randn(1, 12, 5)
    other = frames.clone()
    other[:, 6:] = 0
    torch.testing.assert_close(model(text, other)[:, :9], model(text, frames)[:, :9])
    with pytest.raises(ValueError, match=r"target must be \(B, N, 5\) with N a multiple of 3, got \(1, 7, 5\)"):
        model(text, frames[:, :7])


def test_guided_attention_matches_its_definition_and_has_gradients() -> None:
    model, frames = synthesizer(), torch.randn(2, 12, 5)
    text, mask = torch.tensor([[3, 1, 4], [5, 2, 0]]), torch.tensor([[True, True, True], [True, True, False]])
    seen = model.predict_frames(text, frames, mask, weights=True).weights
    assert [tuple(each.shape) for each in seen] == [(2, 2, 4, 3)] * 2
    steps, letters = torch.tensor([4, 2]), torch.tensor([3, 2])
    weights = seen[0].detach()
    expected = sum(
        float(weights[b, h, i, j]) * (1 - math.exp(-((j / int(letters[b]) - i / int(steps[b])) ** 2) / 0.08)) / 2
        for b, h, i, j in itertools.product(range(2), range(2), range(4), range(3))
        if i < steps[b] and j < letters[b]
    )
    actual = guided_attention(seen[0], steps, letters)
    assert math.isclose(float(actual.detach()), expected, rel_tol=1e-5)
    actual.backward()
    assert float(model.decoder.layers[0].cross.qkv.weight.grad.abs().max()) > 0
