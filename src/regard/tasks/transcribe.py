"""Speech recognition."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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
    nearest_clips,
    normalize_transcript,
    read_clips,
    spectrogram,
)
from regard.data.processor import Processor
from regard.data.readers import Row, resolve_paths
from regard.data.splits import split
from regard.errors import BadRows
from regard.field_types import check_minimum
from regard.models.audio import HOP, SAMPLE_RATE
from regard.models.ctc import greedy, min_frames, prefix_beam
from regard.models.speech_recognition import SpeechConfig, SpeechRecognizer
from regard.nn import Packed, unpack
from regard.progress import track
from regard.training import metrics
from regard.training.onnx_graphs import Graph, sound_graph
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

BLANK = ""


@dataclass(frozen=True)
class Transcribe(Task):
    """An encoder with truncated self-attention over log-mel features, trained with CTC over letters."""

    name: ClassVar[str] = "transcribe"
    description: ClassVar[str] = "speech recognition"
    example: ClassVar[str] = "audio\ttext\nclips/1.wav\tone two three\nclips/2.ogg\tfour"
    columns: ClassVar[tuple[str, ...]] = ("audio", "text")
    input_kind: ClassVar[str] = "audio"
    held_out: ClassVar[int] = 200
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000,
        tokens=1500,
        learning_rate=2e-3,
        warmup=200,
        weight_decay=0.05,
        ema=0.998,
        evaluate_every=250,
        save_every=250,
    )

    audio: str = option(
        "", "column of the path of the clip, relative to the data file: its name, or its number (from 1)"
    )
    text: str = option("", "column of the transcript")
    exact: bool = option(False, "keep capitals and punctuation of the transcripts")
    features: int = option(80, "mel bands")
    d_model: int = option(144, "width of the hidden states")
    layers: int = option(4, "encoder layers")
    heads: int = option(4, "attention heads")
    before: int = option(64, "frames of 40 ms before the current one that a layer attends to")
    after: int = option(16, "frames after the current one that a layer attends to; they add to the latency of streams")
    dropout: float = option(0.1, "dropout probability")
    mask_ratio: float = option(0.3, "maximum fraction of the frames, and of the mel bands, masked in training")
    longest: float = option(30.0, "maximum length of a clip in seconds")
    beam: int = option(8, "beam width of the search; 1 for greedy decoding")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, features=1, layers=1, beam=1, before=0, after=0)
        if self.d_model // self.heads % 2:
            raise ValueError(f"d_model / heads must be even, but is {self.d_model // self.heads}")
        if not 0 <= self.mask_ratio < 1 or not self.longest > 0:
            raise ValueError(
                "mask_ratio must be in [0, 1) and longest must be positive, but they are "
                f"{self.mask_ratio} and {self.longest}"
            )

    def read(self, source: str, bad: BadRows) -> list[Row]:
        return read_clips(source, {"audio": self.audio, "text": self.text}, bad)

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        table = find_table(source)
        return resolve_paths(table, super().read_inputs(str(table), bad))

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        return find_splits(folder)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, lambda row: self.normalize(row.values[1]), held_out, seed)

    def normalize(self, text: str) -> str:
        """Normalize a transcript as the model should predict it."""
        return " ".join(text.split()) if self.exact else normalize_transcript(text)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        letters = collect_letters(rows, [self.normalize(row.values[1]) for row in rows])
        return Processor(labels=(BLANK, *letters), config=fit_audio_format(rows, self.features))

    def config(self, processor: Processor) -> SpeechConfig:
        """Configuration of the model."""
        return SpeechConfig(
            labels=len(processor.labels),
            d_model=self.d_model,
            layers=self.layers,
            heads=self.heads,
            d_hidden=4 * self.d_model,
            features=self.features,
            before=self.before,
            after=self.after,
            dropout=self.dropout,
        )

    def model(self, processor: Processor) -> nn.Module:
        return SpeechRecognizer(self.config(processor))

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> Clips:
        known, config = {letter: n for n, letter in enumerate(processor.labels)}, self.config(processor)
        clips: list[np.ndarray] = []
        targets, places = list[list[int]](), list[str]()
        for row in track(rows):
            text = self.normalize(row.values[1])
            if not text:
                bad.add(f"{row.place}: {row.values[1]!r} has no letters")
                continue
            if unknown := next((letter for letter in text if letter not in known), ""):
                bad.add(f"{row.place}: {unknown!r} in {row.values[1]!r} was not seen in training")
                continue
            clip, labels = self._load_features(row, bad), [known[letter] for letter in text]
            if clip is None:
                continue
            if (frames := config.length(len(clip))) < (needed := min_frames(labels)):
                bad.add(
                    f"{row.place}: {len(text)} letters need {needed * 2**config.halvings * HOP / SAMPLE_RATE:.2f} s, "
                    f"but the clip has {frames * 2**config.halvings * HOP / SAMPLE_RATE:.2f} s; is it the right text?"
                )
                continue
            clips.append(clip)
            targets.append(labels)
            places.append(row.place)
        return Clips(self, AudioClips(clips, AudioFormat.from_processor(processor)), config, targets, places)

    def _load_features(self, row: Row, bad: BadRows) -> np.ndarray | None:
        wave = load_waveform(row, bad)
        if wave is None:
            return None
        if len(wave) > self.longest * SAMPLE_RATE:
            bad.add(f"{row.place}: {len(wave) / SAMPLE_RATE:.1f} s is longer than --longest {self.longest:g} s")
            return None
        return log_mel_features(wave, self.features)

    @property
    def supports_label_smoothing(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        packed, visible = batch.inputs
        if model.training:
            packed = packed.with_values(packed.values * visible)
        logits = unpack(model(packed))
        frames, labels = (
            torch.tensor([len(part) for part in logits]),
            torch.tensor([len(part) for part in batch.targets]),
        )
        shares = pad_sequence(list(logits)).float().log_softmax(-1)  # (frames, B, labels)
        return F.ctc_loss(shares, torch.cat(batch.targets), frames, labels, reduction="sum", zero_infinity=True)

    def _clips(self, rows: Sequence[Row], bad: BadRows) -> Iterator[tuple[Row, np.ndarray, str]]:
        """Yield rows with their waveform and transcript; rows that lack one are bad."""
        for row in track(rows):
            text = self.normalize(row.values[1])
            if not text:
                bad.add(f"{row.place}: {row.values[1]!r} has no letters")
            elif (wave := load_waveform(row, bad)) is not None:
                yield row, wave, text

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """Keep rows with letters not seen in training: they count as errors of the model and the baselines."""
        return [row for row, _, _ in self._clips(rows, bad)]

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        texts = [text for _, _, text in self._clips(rows, BadRows())]
        predictions = list(self.predict(model, processor, rows, BadRows()))
        elapsed = sum(prediction.more["seconds"] * prediction.more["real_time_factor"] for prediction in predictions)
        duration = sum(prediction.more["seconds"] for prediction in predictions)
        return metrics.transcription([prediction.output for prediction in predictions], texts) | {
            "real_time_factor": elapsed / duration
        }

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        clips, held_out_clips = (
            [(log_mel_features(wave, self.features), text) for _, wave, text in self._clips(rows, BadRows())]
            for rows in (train, held_out)
        )
        known, references = [text for _, text in clips], [text for _, text in held_out_clips]
        most_frequent, _ = Counter(known).most_common(1)[0]
        nearest = nearest_clips([clip for clip, _ in clips], [clip for clip, _ in held_out_clips])
        return {
            "most frequent transcript": metrics.transcription([most_frequent] * len(references), references),
            "nearest training clip": metrics.transcription([known[n] for n in nearest], references),
        }

    @torch.no_grad()
    def transcribe(self, model: nn.Module, processor: Processor, wave: np.ndarray) -> tuple[str, float]:
        """Transcribe a wave at 16 kHz; the score is the geometric mean of the probabilities of the letters."""
        values = AudioFormat.from_processor(processor).normalize(
            torch.from_numpy(log_mel_features(wave, self.features)).float()
        )
        logits = model(values[None].to(next(model.parameters()).device))[0]
        best = greedy(logits) if self.beam == 1 else prefix_beam(logits, width=self.beam)
        return "".join(processor.labels[n] for n in best.labels), math.exp(best.score / max(1, len(best.labels)))

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        for row in track(rows):
            wave = load_waveform(row, bad)
            if wave is None:
                continue
            started = time.perf_counter()
            text, score = self.transcribe(model, processor, wave)
            elapsed = (time.perf_counter() - started) / (len(wave) / SAMPLE_RATE)
            more = {"seconds": len(wave) / SAMPLE_RATE, "real_time_factor": elapsed}
            yield Prediction(row.values[0], text, score, more, f"{elapsed:.3f} x real time", place=row.place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        record.set_spectrogram(*spectrogram(Path(prediction.input).read_bytes()))

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (sound_graph(model, self.features),)


class Clips:
    """Clips with their transcripts as labels."""

    def __init__(
        self,
        task: Transcribe,
        sounds: AudioClips,
        config: SpeechConfig,
        targets: Sequence[list[int]],
        places: Sequence[str],
    ) -> None:
        self.task, self.sounds, self.targets, self.places = task, sounds, targets, places
        self.sizes = np.array([config.length(int(n)) for n in sounds.lengths], np.int64)

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed = self.sounds.pack(chosen)
        targets = [torch.tensor(self.targets[n]) for n in chosen]
        visible = torch.from_numpy(spec_augment_mask(packed, self.task.mask_ratio, random))
        return Batch((packed, visible), targets, int(self.sizes[chosen].sum()), sum(map(len, targets)))


def spec_augment_mask(packed: Packed, most: float, random: np.random.Generator, parts: int = 2) -> np.ndarray:
    """SpecAugment mask (N, features), False where masked.

    `parts` spans of time and of mel bands are masked, together at most the fraction `most` of each.
    """
    visible = np.ones(packed.values.shape, bool)
    for start, length in zip(packed.cu_seqlens, packed.lengths, strict=False):
        clip = visible[start : start + length]
        for axis, size in enumerate(clip.shape):
            for _ in range(parts):
                wide = int(random.integers(0, int(size * most / parts) + 1))
                at = int(random.integers(0, size - wide + 1))
                clip[(slice(at, at + wide), slice(None)) if axis == 0 else (slice(None), slice(at, at + wide))] = False
    return visible
