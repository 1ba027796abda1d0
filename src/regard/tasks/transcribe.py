"""Speech to what was said."""

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

from regard.models.ctc import frames_needed, greedy, prefix_beam
from regard.models.sound import HOP, RATE
from regard.models.speech import SpeechConfig, SpeechRecognizer
from regard.nn import Packed, unpack
from regard.tasks import metrics
from regard.tasks.data import Row, beside, split
from regard.tasks.graphs import Graph, sound_graph
from regard.tasks.sounds import (
    Form,
    Sounds,
    features_of,
    learnt,
    letters_of,
    nearest,
    parts_of,
    plain,
    read_clips,
    shown,
    table_of,
    wave_of,
)
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, check_least, option
from regard.tasks.trouble import Bad

BLANK = ""


@dataclass(frozen=True)
class Transcribe(Task):
    """An encoder with truncated self-attention over log-mel features, with CTC over letters."""

    name: ClassVar[str] = "transcribe"
    does: ClassVar[str] = "speech to what was said"
    example: ClassVar[str] = "audio\ttext\nclips/1.wav\tone two three\nclips/2.ogg\tfour"
    columns: ClassVar[tuple[str, ...]] = ("audio", "text")
    takes: ClassVar[str] = "audio"
    held: ClassVar[int] = 200
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=1500, rate=2e-3, warmup=200, decay=0.05, ema=0.998, evaluate_every=250, save_every=250
    )

    audio: str = option("", "column of the path of the clip, beside the file: a name, or a number from 1")
    text: str = option("", "column of what is said in it")
    exact: bool = option(False, "capitals and punctuation are to be told, too")
    features: int = option(80, "mel bands that are listened to")
    width: int = option(144, "of the hidden states")
    layers: int = option(4, "of the encoder")
    heads: int = option(4, "of the attention")
    before: int = option(64, "frames of 40 ms that a layer sees before its own")
    after: int = option(16, "frames that it sees after its own; a stream waits for them")
    dropout: float = option(0.1, "in training")
    hide: float = option(0.3, "largest share of a clip's time, and of its mel bands, that is hidden in training")
    longest: float = option(30.0, "seconds of a clip at most")
    beam: int = option(8, "spellings that are followed at a time; 1 for the best letter of every frame")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, features=1, layers=1, beam=1, before=0, after=0)
        if self.width // self.heads % 2:
            raise ValueError(f"width / heads must be even, but is {self.width // self.heads}")
        if not 0 <= self.hide < 1 or not self.longest > 0:
            raise ValueError(f"hide must be in [0, 1) and longest positive, but are {self.hide} and {self.longest}")

    def read(self, source: str, bad: Bad) -> list[Row]:
        return read_clips(source, {"audio": self.audio, "text": self.text}, bad)

    def read_inputs(self, source: str, bad: Bad) -> Iterable[Row]:
        table = table_of(source)
        return beside(table, super().read_inputs(str(table), bad))

    def parts(self, folder: Path) -> tuple[Path, Path] | None:
        return parts_of(folder)

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, lambda row: self.spelled(row.values[1]), held, seed)

    def spelled(self, text: str) -> str:
        """What the model is to say of it."""
        return " ".join(text.split()) if self.exact else plain(text)

    def learn(self, rows: Sequence[Row]) -> Kit:
        letters = letters_of(rows, [self.spelled(row.values[1]) for row in rows])
        return Kit(labels=(BLANK, *letters), config=learnt(rows, self.features))

    def config(self, kit: Kit) -> SpeechConfig:
        """Of the model."""
        return SpeechConfig(
            labels=len(kit.labels),
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=4 * self.width,
            features=self.features,
            before=self.before,
            after=self.after,
            dropout=self.dropout,
        )

    def model(self, kit: Kit) -> nn.Module:
        return SpeechRecognizer(self.config(kit))

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Clips:
        known, config = {letter: n for n, letter in enumerate(kit.labels)}, self.config(kit)
        clips: list[np.ndarray] = []
        targets, places = list[list[int]](), list[str]()
        for row in track(rows):
            text = self.spelled(row.values[1])
            if not text:
                bad(f"{row.place}: {row.values[1]!r} has no letter")
                continue
            if unknown := next((letter for letter in text if letter not in known), ""):
                bad(f"{row.place}: {unknown!r} in {row.values[1]!r} was never seen in training")
                continue
            clip, labels = self._heard(row, bad), [known[letter] for letter in text]
            if clip is None:
                continue
            if (frames := config.length(len(clip))) < (needed := frames_needed(labels)):
                bad(
                    f"{row.place}: {len(text)} letters need {needed * 2**config.halvings * HOP / RATE:.2f} s, but the "
                    f"clip has {frames * 2**config.halvings * HOP / RATE:.2f} s; is it the right text?"
                )
                continue
            clips.append(clip)
            targets.append(labels)
            places.append(row.place)
        return Clips(self, Sounds(clips, Form.of(kit)), config, targets, places)

    def _heard(self, row: Row, bad: Bad) -> np.ndarray | None:
        wave = wave_of(row, bad)
        if wave is None:
            return None
        if len(wave) > self.longest * RATE:
            bad(f"{row.place}: {len(wave) / RATE:.1f} s is longer than --longest {self.longest:g} s")
            return None
        return features_of(wave, self.features)

    @property
    def smooths(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        heard, shown = batch.inputs
        if model.training:
            heard = heard.holding(heard.values * shown)
        said = unpack(model(heard))
        frames, labels = torch.tensor([len(part) for part in said]), torch.tensor([len(part) for part in batch.targets])
        shares = pad_sequence(list(said)).float().log_softmax(-1)  # (frames, B, labels)
        return F.ctc_loss(shares, torch.cat(batch.targets), frames, labels, reduction="sum", zero_infinity=True)

    def _clips(self, rows: Sequence[Row], bad: Bad) -> Iterator[tuple[Row, np.ndarray, str]]:
        """The rows that have a sound and a text, with both; others are bad."""
        for row in track(rows):
            text = self.spelled(row.values[1])
            if not text:
                bad(f"{row.place}: {row.values[1]!r} has no letter")
            elif (wave := wave_of(row, bad)) is not None:
                yield row, wave, text

    def measured(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
        """A letter that training never had counts as an error, of the model and of the baselines."""
        return [row for row, _, _ in self._clips(rows, bad)]

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        texts = [text for _, _, text in self._clips(rows, Bad())]
        found = list(self.predict(model, kit, rows, Bad()))
        slow = sum(made.more["seconds"] * made.more["real_time_factor"] for made in found)
        heard = sum(made.more["seconds"] for made in found)
        return metrics.transcription([made.output for made in found], texts) | {"real_time_factor": slow / heard}

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        clips, held_clips = (
            [(features_of(wave, self.features), text) for _, wave, text in self._clips(rows, Bad())]
            for rows in (train, held)
        )
        known, said = [text for _, text in clips], [text for _, text in held_clips]
        often, _ = Counter(known).most_common(1)[0]
        like = nearest([clip for clip, _ in clips], [clip for clip, _ in held_clips])
        return {
            "most frequent transcript": metrics.transcription([often] * len(said), said),
            "nearest training clip": metrics.transcription([known[n] for n in like], said),
        }

    @torch.no_grad()
    def heard(self, model: nn.Module, kit: Kit, wave: np.ndarray) -> tuple[str, float]:
        """What is said in a wave at 16 kHz, and how probable that is, letter for letter: the geometric mean."""
        values = Form.of(kit).ready(torch.from_numpy(features_of(wave, self.features)).float())
        logits = model(values[None].to(next(model.parameters()).device))[0]
        found = greedy(logits) if self.beam == 1 else prefix_beam(logits, width=self.beam)
        return "".join(kit.labels[n] for n in found.labels), math.exp(found.score / max(1, len(found.labels)))

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        for row in track(rows):
            wave = wave_of(row, bad)
            if wave is None:
                continue
            started = time.perf_counter()
            text, score = self.heard(model, kit, wave)
            slow = (time.perf_counter() - started) / (len(wave) / RATE)
            more = {"seconds": len(wave) / RATE, "real_time_factor": slow}
            yield Prediction(row.values[0], text, score, more, f"{slow:.3f} x real time", place=row.place)

    def name_tokens(self, model: nn.Module, kit: Kit, record: Any, said: Prediction) -> None:
        record.over_spectrogram(*shown(Path(said.input).read_bytes()))

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        return (sound_graph(model, self.features),)


class Clips:
    """Clips and what is said in each, as labels."""

    def __init__(
        self,
        task: Transcribe,
        sounds: Sounds,
        config: SpeechConfig,
        targets: Sequence[list[int]],
        places: Sequence[str],
    ) -> None:
        self.task, self.sounds, self.targets, self.places = task, sounds, targets, places
        self.sizes = np.array([config.length(int(n)) for n in sounds.lengths], np.int64)

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        heard = self.sounds.pack(chosen)
        targets = [torch.tensor(self.targets[n]) for n in chosen]
        shown = torch.from_numpy(hidden(heard, self.task.hide, random))
        return Batch((heard, shown), targets, int(self.sizes[chosen].sum()), sum(map(len, targets)))


def hidden(heard: Packed, most: float, random: np.random.Generator, parts: int = 2) -> np.ndarray:
    """False where a clip is hidden: `parts` spans of time and of mel bands, together at most a share; (N, features)."""
    shown = np.ones(heard.values.shape, bool)
    for start, length in zip(heard.edges, heard.lengths, strict=False):
        clip = shown[start : start + length]
        for axis, size in enumerate(clip.shape):
            for _ in range(parts):
                wide = int(random.integers(0, int(size * most / parts) + 1))
                at = int(random.integers(0, size - wide + 1))
                clip[(slice(at, at + wide), slice(None)) if axis == 0 else (slice(None), slice(at, at + wide))] = False
    return shown
