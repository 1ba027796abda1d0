"""Speech synthesis."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.data.audio import (
    AudioClips,
    AudioFormat,
    collect_letters,
    find_splits,
    find_table,
    fit_audio_format,
    load_waveform,
    log_mel_features,
    normalize_transcript,
    read_clips,
    spectrogram,
)
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.splits import split
from regard.errors import BadRows, UserError
from regard.field_types import check_minimum
from regard.models.audio import HOP, SAMPLE_RATE, griffin_lim
from regard.models.speech_synthesis import SpeechSynthesizer, SpeechSynthesizerConfig, guided_attention
from regard.progress import track
from regard.training import metrics
from regard.training.onnx_graphs import Graph, speaker_graphs
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Speak(Task):
    """An autoregressive Transformer from letters to log-mel frames, and Griffin-Lim to a waveform."""

    name: ClassVar[str] = "speak"
    description: ClassVar[str] = "text to speech"
    example: ClassVar[str] = "audio\ttext\nclips/1.wav\tone two three\nclips/2.ogg\tfour"
    columns: ClassVar[tuple[str, ...]] = ("audio", "text")
    input_columns: ClassVar[tuple[str, ...]] = ("text",)
    output_kind: ClassVar[str] = "audio"
    held_out: ClassVar[int] = 50
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000,
        tokens=1500,
        learning_rate=1e-3,
        warmup=200,
        weight_decay=0.01,
        ema=0.998,
        evaluate_every=250,
        save_every=250,
    )

    audio: str = option(
        "", "column of the path of the clip, relative to the data file: its name, or its number (from 1)"
    )
    text: str = option("", "column of the transcript")
    features: int = option(80, "mel bands")
    d_model: int = option(128, "width of the hidden states")
    layers: int = option(2, "layers of the encoder and of the decoder")
    heads: int = option(2, "attention heads")
    reduction: int = option(4, "frames of 10 ms generated per step")
    dropout: float = option(0.1, "dropout probability")
    guidance_weight: float = option(1.0, "weight of the loss that guides attention along the diagonal")
    longest: float = option(15.0, "maximum length of a clip in seconds")
    transcriber: str = option("", "run directory of a transcribe model, to measure how intelligible the speech is")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, features=1, layers=1, reduction=1)
        if self.guidance_weight < 0 or not self.longest > 0:
            raise ValueError(
                "guidance_weight must not be negative and longest must be positive, but they are "
                f"{self.guidance_weight} and {self.longest}"
            )
        if self.transcriber and not (Path(self.transcriber) / "run.json").is_file():
            raise ValueError(
                f"transcriber must be a run directory of transcribe, but {self.transcriber} has no run.json"
            )

    def read(self, source: str, bad: BadRows) -> list[Row]:
        return read_clips(source, {"audio": self.audio, "text": self.text}, bad)

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        return super().read_inputs(str(find_table(source)), bad)

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        return find_splits(folder)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, lambda row: normalize_transcript(row.values[1]), held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        letters = collect_letters(rows, [normalize_transcript(row.values[1]) for row in rows])
        return Processor(_letter_tokenizer(letters), config=fit_audio_format(rows, self.features))

    def model(self, processor: Processor) -> nn.Module:
        return SpeechSynthesizer(
            SpeechSynthesizerConfig(
                vocabulary=processor.require_tokenizer().get_vocab_size(),
                d_model=self.d_model,
                layers=self.layers,
                heads=self.heads,
                d_hidden=4 * self.d_model,
                features=self.features,
                reduction=self.reduction,
                dropout=self.dropout,
            )
        )

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> Utterances:
        clips: list[np.ndarray] = []
        texts, places = list[Tensor](), list[str]()
        for row in track(rows):
            ids = self._encode(processor, row.place, row.values[1], bad)
            wave = None if ids is None else load_waveform(row, bad)
            if ids is None or wave is None:
                continue
            if len(wave) > self.longest * SAMPLE_RATE:
                bad.add(f"{row.place}: {len(wave) / SAMPLE_RATE:.1f} s is longer than --longest {self.longest:g} s")
                continue
            clip = log_mel_features(wave, self.features)
            clips.append(np.pad(clip, ((0, -len(clip) % self.reduction), (0, 0)), mode="edge"))
            texts.append(ids)
            places.append(row.place)
        return Utterances(AudioClips(clips, AudioFormat.from_processor(processor)), texts, places, self.reduction)

    def _encode(self, processor: Processor, place: str, text: str, bad: BadRows) -> Tensor | None:
        """Encode a text as ids (K,), or report it as bad."""
        if not (letters := normalize_transcript(text)):
            bad.add(f"{place}: {text!r} has no letters")
            return None
        encoded = processor.require_tokenizer().encode(letters)
        if UNKNOWN in encoded.tokens:
            bad.add(f"{place}: {letters[encoded.tokens.index(UNKNOWN)]!r} in {text!r} was not seen in training")
            return None
        return torch.tensor(encoded.ids)

    @property
    def supports_label_smoothing(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, SpeechSynthesizer)
        letters, letters_mask, frames = batch.inputs
        lengths, step = batch.targets, self.reduction
        output = model.predict_frames(letters, frames, letters_mask, weights=self.guidance_weight > 0)
        real = torch.arange(frames.shape[1], device=frames.device) < lengths[:, None]
        error = (output.frames - frames)[real]
        last = torch.arange(output.ends.shape[1], device=frames.device) == lengths[:, None] // step - 1
        ends = F.binary_cross_entropy_with_logits(
            output.ends[real[:, ::step]], last[real[:, ::step]].float(), reduction="sum", pos_weight=torch.tensor(5.0)
        )
        total = error.abs().mean(-1).sum() + error.square().mean(-1).sum() + step * ends
        if self.guidance_weight:
            guided_losses = [guided_attention(each, lengths // step, letters_mask.sum(1)) for each in output.weights]
            total = total + self.guidance_weight * step * torch.stack(guided_losses).mean()
        return total

    @torch.no_grad()
    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        waves = [speech.wave for speech in _synthesize(model, processor, items.texts, self.longest)]
        generated = [log_mel_features(wave, self.features) for wave in waves]
        results = {"mcd": metrics.cepstral_distortion(generated, items.sounds.clips)}
        return results | self._transcription_errors(
            waves, [processor.require_tokenizer().decode(ids.tolist()) for ids in items.texts]
        )

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        ours, theirs = (self.dataset(processor, rows, BadRows()) for rows in (train, held_out))
        texts, known = (
            [processor.require_tokenizer().decode(ids.tolist()) for ids in items.texts] for items in (theirs, ours)
        )
        mean = np.array(AudioFormat.from_processor(processor).mean, np.float32)
        flat = [np.tile(mean, (len(clip), 1)) for clip in theirs.sounds.clips]
        nearest = [min(range(len(known)), key=lambda n: metrics.edit_distance(known[n], text)) for text in texts]
        near = [ours.sounds.clips[n] for n in nearest]
        recorded = [wave for row in held_out if (wave := load_waveform(row, BadRows())) is not None]  # BadRows() raises
        resynthesized = [griffin_lim(torch.from_numpy(clip).float()).numpy() for clip in theirs.sounds.clips]
        copied = [log_mel_features(wave, self.features) for wave in resynthesized]
        errors = self._transcription_errors(resynthesized, texts)
        return {
            "mean of all frames": {"mcd": metrics.cepstral_distortion(flat, theirs.sounds.clips)},
            "clip of the nearest text": {"mcd": metrics.cepstral_distortion(near, theirs.sounds.clips)}
            | ({"cer": metrics.transcription([known[n] for n in nearest], texts)["cer"]} if errors else {}),
            "recording by Griffin-Lim": {"mcd": metrics.cepstral_distortion(copied, theirs.sounds.clips)} | errors,
            "recording": {"mcd": 0.0} | self._transcription_errors(recorded, texts),
        }

    def _transcription_errors(self, waves: Sequence[np.ndarray], texts: Sequence[str]) -> Metrics:
        """Character error rate of `transcriber` on waves that should say these texts; empty without one."""
        if not self.transcriber:
            return {}
        from regard.tasks.transcribe import Transcribe
        from regard.training.runs import Run

        run = Run.open(Path(self.transcriber))
        if not isinstance(run.task, Transcribe):
            raise UserError(
                f"{self.transcriber}: --transcriber must be a run of transcribe, but is one of {run.task.name}"
            )
        model, _ = run.model(frozen=True)
        transcripts = [run.task.transcribe(model, run.processor, wave)[0] for wave in waves]
        return {"cer": metrics.transcription(transcripts, texts)["cer"]}

    @torch.no_grad()
    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        for row in track(rows):
            ids = self._encode(processor, row.place, row.values[0], bad)
            if ids is None:
                continue
            (speech,) = _synthesize(model, processor, [ids], self.longest)
            seconds = len(speech.wave) / SAMPLE_RATE
            yield Prediction(
                normalize_transcript(row.values[0]),
                f"{seconds:.2f} s",
                speech.score,
                {"seconds": seconds},
                file=_wav(speech.wave),
                place=row.place,
            )

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        if not record.inputs:  # generation does not call the model as a whole
            record.inputs["source"] = torch.tensor(processor.require_tokenizer().encode(prediction.input).ids)
        record.decode(processor.tokenizer)
        record.set_spectrogram(*spectrogram(prediction.file), stream="target")

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        assert isinstance(model, SpeechSynthesizer)
        return speaker_graphs(model)


class Utterances:
    """Texts as ids with their clips, padded to a multiple of `step` frames."""

    def __init__(self, sounds: AudioClips, texts: Sequence[Tensor], places: Sequence[str], step: int) -> None:
        self.sounds, self.texts, self.places = sounds, texts, places
        self.sizes = sounds.lengths // step

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        clips, letters = self.sounds.pack(chosen), [self.texts[n] for n in chosen]
        lengths = torch.tensor(clips.lengths)
        frames = pad_sequence(list(clips.values.split(clips.lengths)), batch_first=True)
        ids = pad_sequence(letters, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(each) for each in letters])[:, None]
        return Batch((ids, mask, frames), lengths, int(self.sizes[chosen].sum()), int(lengths.sum()))


@dataclass(frozen=True)
class _Speech:
    wave: np.ndarray
    score: float


def _synthesize(model: nn.Module, processor: Processor, texts: Sequence[Tensor], longest: float) -> Iterator[_Speech]:
    """Synthesize the waveform of each text."""
    assert isinstance(model, SpeechSynthesizer)
    device, form = next(model.parameters()).device, AudioFormat.from_processor(processor)
    for ids in track(texts):
        (generated,) = model.generate([ids.to(device)], max_frames=int(longest * SAMPLE_RATE / HOP))
        wave = griffin_lim(form.denormalize(generated.frames.float().cpu())).numpy()
        yield _Speech(wave / max(1.0, float(np.abs(wave).max()) / 0.95), generated.score)


def _letter_tokenizer(letters: Sequence[str]) -> Tokenizer:
    """Build a tokenizer of single letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known: dict[str, int] = {UNKNOWN: 0} | {letter: n for n, letter in enumerate(letters, 1)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _wav(wave: np.ndarray) -> bytes:
    """Encode a wave as a 16-bit WAV file."""
    import soundfile

    buffer: Any = io.BytesIO()
    soundfile.write(buffer, wave, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()
