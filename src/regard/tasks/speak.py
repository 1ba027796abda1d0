"""A text to speech."""

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

from regard.models.sound import HOP, RATE, to_wave
from regard.models.speaking import Speaker, SpeakerConfig, guidance
from regard.tasks import metrics
from regard.tasks.data import Row, split
from regard.tasks.graphs import Graph, speaker_graphs
from regard.tasks.sounds import (
    Form,
    Sounds,
    features_of,
    learnt,
    letters_of,
    parts_of,
    plain,
    read_clips,
    shown,
    table_of,
    wave_of,
)
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, check_least, option
from regard.tasks.trouble import Bad, Trouble

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Speak(Task):
    """A Transformer from letters to log-mel features, frame by frame, and Griffin and Lim's way to a wave."""

    name: ClassVar[str] = "speak"
    does: ClassVar[str] = "a text to speech"
    example: ClassVar[str] = "audio\ttext\nclips/1.wav\tone two three\nclips/2.ogg\tfour"
    columns: ClassVar[tuple[str, ...]] = ("audio", "text")
    input_columns: ClassVar[tuple[str, ...]] = ("text",)
    makes: ClassVar[str] = "audio"
    held: ClassVar[int] = 50
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=1500, rate=1e-3, warmup=200, decay=0.01, ema=0.998, evaluate_every=250, save_every=250
    )

    audio: str = option("", "column of the path of the clip, beside the file: a name, or a number from 1")
    text: str = option("", "column of what is said in it")
    features: int = option(80, "mel bands that are said")
    width: int = option(128, "of the hidden states")
    layers: int = option(2, "of the encoder, and of the decoder")
    heads: int = option(2, "of the attention")
    reduction: int = option(4, "frames of 10 ms that are said at a time")
    dropout: float = option(0.1, "in training")
    guide: float = option(1.0, "how much attention is to go through the text steadily, in the loss")
    longest: float = option(15.0, "seconds of a clip at most")
    judge: str = option("", "run of transcribe that listens to what is said, for the figures")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, features=1, layers=1, reduction=1)
        if self.guide < 0 or not self.longest > 0:
            raise ValueError(f"guide must not be negative and longest positive, but are {self.guide, self.longest}")
        if self.judge and not (Path(self.judge) / "run.json").is_file():
            raise ValueError(f"judge must be the folder of a run of transcribe, but {self.judge} has no run.json")

    def read(self, source: str, bad: Bad) -> list[Row]:
        return read_clips(source, {"audio": self.audio, "text": self.text}, bad)

    def read_inputs(self, source: str, bad: Bad) -> Iterable[Row]:
        return super().read_inputs(str(table_of(source)), bad)

    def parts(self, folder: Path) -> tuple[Path, Path] | None:
        return parts_of(folder)

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, lambda row: plain(row.values[1]), held, seed)

    def learn(self, rows: Sequence[Row]) -> Kit:
        letters = letters_of(rows, [plain(row.values[1]) for row in rows])
        return Kit(_speller(letters), config=learnt(rows, self.features))

    def model(self, kit: Kit) -> nn.Module:
        return Speaker(
            SpeakerConfig(
                vocabulary=kit.texts().get_vocab_size(),
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                hidden=4 * self.width,
                features=self.features,
                reduction=self.reduction,
                dropout=self.dropout,
            )
        )

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Utterances:
        clips: list[np.ndarray] = []
        texts, places = list[Tensor](), list[str]()
        for row in track(rows):
            ids = self._letters(kit, row.place, row.values[1], bad)
            wave = None if ids is None else wave_of(row, bad)
            if ids is None or wave is None:
                continue
            if len(wave) > self.longest * RATE:
                bad(f"{row.place}: {len(wave) / RATE:.1f} s is longer than --longest {self.longest:g} s")
                continue
            clip = features_of(wave, self.features)
            clips.append(np.pad(clip, ((0, -len(clip) % self.reduction), (0, 0)), mode="edge"))
            texts.append(ids)
            places.append(row.place)
        return Utterances(Sounds(clips, Form.of(kit)), texts, places, self.reduction)

    def _letters(self, kit: Kit, place: str, text: str, bad: Bad) -> Tensor | None:
        """Ids (K,) of a text."""
        if not (spelled := plain(text)):
            bad(f"{place}: {text!r} has no letter")
            return None
        encoded = kit.texts().encode(spelled)
        if UNKNOWN in encoded.tokens:
            bad(f"{place}: {spelled[encoded.tokens.index(UNKNOWN)]!r} in {text!r} was never seen in training")
            return None
        return torch.tensor(encoded.ids)

    @property
    def smooths(self) -> bool:
        return False

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, Speaker)
        letters, letters_mask, frames = batch.inputs
        lengths, step = batch.targets, self.reduction
        said = model.say(letters, frames, letters_mask, weights=self.guide > 0)
        real = torch.arange(frames.shape[1], device=frames.device) < lengths[:, None]
        wrong = (said.frames - frames)[real]
        last = torch.arange(said.ends.shape[1], device=frames.device) == lengths[:, None] // step - 1
        ends = F.binary_cross_entropy_with_logits(
            said.ends[real[:, ::step]], last[real[:, ::step]].float(), reduction="sum", pos_weight=torch.tensor(5.0)
        )
        total = wrong.abs().mean(-1).sum() + wrong.square().mean(-1).sum() + step * ends
        if self.guide:
            astray = [guidance(each, lengths // step, letters_mask.sum(1)) for each in said.weights]
            total = total + self.guide * step * torch.stack(astray).mean()
        return total

    @torch.no_grad()
    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        items = self.items(kit, rows, Bad())
        waves = [said.wave for said in _said(model, kit, items.texts, self.longest)]
        made = [features_of(wave, self.features) for wave in waves]
        figures = {"mcd": metrics.cepstral_distortion(made, items.sounds.clips)}
        return figures | self._judged(waves, [kit.texts().decode(ids.tolist()) for ids in items.texts])

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        ours, theirs = (self.items(kit, rows, Bad()) for rows in (train, held))
        texts, known = ([kit.texts().decode(ids.tolist()) for ids in items.texts] for items in (theirs, ours))
        mean = np.array(Form.of(kit).mean, np.float32)
        flat = [np.tile(mean, (len(clip), 1)) for clip in theirs.sounds.clips]
        like = [min(range(len(known)), key=lambda n: metrics.edits(known[n], text)) for text in texts]
        near = [ours.sounds.clips[n] for n in like]
        heard = [wave for row in held if (wave := wave_of(row, Bad())) is not None]  # all, or it raises
        again = [to_wave(torch.from_numpy(clip).float()).numpy() for clip in theirs.sounds.clips]
        copied = [features_of(wave, self.features) for wave in again]
        spoken = self._judged(again, texts)
        return {
            "mean of all frames": {"mcd": metrics.cepstral_distortion(flat, theirs.sounds.clips)},
            "clip of the nearest text": {"mcd": metrics.cepstral_distortion(near, theirs.sounds.clips)}
            | ({"cer": metrics.transcription([known[n] for n in like], texts)["cer"]} if spoken else {}),
            "recording by Griffin-Lim": {"mcd": metrics.cepstral_distortion(copied, theirs.sounds.clips)} | spoken,
            "recording": {"mcd": 0.0} | self._judged(heard, texts),
        }

    def _judged(self, waves: Sequence[np.ndarray], texts: Sequence[str]) -> Figures:
        """What a run of `transcribe` hears of waves that are to say these texts, if there is one."""
        if not self.judge:
            return {}
        from regard.tasks.runs import Run
        from regard.tasks.transcribe import Transcribe

        run = Run.open(Path(self.judge))
        if not isinstance(run.task, Transcribe):
            raise Trouble(f"{self.judge}: is a run of {run.task.name}, but one of transcribe is needed to judge")
        model, _ = run.model(frozen=True)
        heard = [run.task.heard(model, run.kit, wave)[0] for wave in waves]
        return {"cer": metrics.transcription(heard, texts)["cer"]}

    @torch.no_grad()
    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        for row in track(rows):
            ids = self._letters(kit, row.place, row.values[0], bad)
            if ids is None:
                continue
            (said,) = _said(model, kit, [ids], self.longest)
            seconds = len(said.wave) / RATE
            yield Prediction(
                plain(row.values[0]), f"{seconds:.2f} s", said.score, {"seconds": seconds}, file=_wav(said.wave),
                place=row.place,
            )  # fmt: skip

    def name_tokens(self, model: nn.Module, kit: Kit, record: Any, said: Prediction) -> None:
        if not record.inputs:  # it generated, and was never called as a whole
            record.inputs["source"] = torch.tensor(kit.texts().encode(said.input).ids)
        record.decode(kit.tokenizer)
        record.over_spectrogram(*shown(said.file), stream="target")

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        assert isinstance(model, Speaker)
        return speaker_graphs(model)


class Utterances:
    """Texts as ids, and how each was said, in whole groups of frames."""

    def __init__(self, sounds: Sounds, texts: Sequence[Tensor], places: Sequence[str], step: int) -> None:
        self.sounds, self.texts, self.places = sounds, texts, places
        self.sizes = sounds.lengths // step

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        said, letters = self.sounds.pack(chosen), [self.texts[n] for n in chosen]
        lengths = torch.tensor(said.lengths)
        frames = pad_sequence(list(said.values.split(said.lengths)), batch_first=True)
        ids = pad_sequence(letters, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(each) for each in letters])[:, None]
        return Batch((ids, mask, frames), lengths, int(self.sizes[chosen].sum()), int(lengths.sum()))


@dataclass(frozen=True)
class _Said:
    wave: np.ndarray
    score: float


def _said(model: nn.Module, kit: Kit, texts: Sequence[Tensor], longest: float) -> Iterator[_Said]:
    """Texts as waves."""
    assert isinstance(model, Speaker)
    device, form = next(model.parameters()).device, Form.of(kit)
    for ids in track(texts):
        (uttered,) = model.generate([ids.to(device)], limit=int(longest * RATE / HOP))
        wave = to_wave(form.back(uttered.frames.float().cpu())).numpy()
        yield _Said(wave / max(1.0, float(np.abs(wave).max()) / 0.95), uttered.score)


def _speller(letters: Sequence[str]) -> Tokenizer:
    """A tokenizer whose tokens are letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known: dict[str, int] = {UNKNOWN: 0} | {letter: n for n, letter in enumerate(letters, 1)}
    made = Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return made


def _wav(wave: np.ndarray) -> bytes:
    """A WAV file of 16 bits."""
    import soundfile

    held: Any = io.BytesIO()
    soundfile.write(held, wave, RATE, format="WAV", subtype="PCM_16")
    return held.getvalue()
