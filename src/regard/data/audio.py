"""Sounds as data: files in tables or folders, decoded once, to log-mel features."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.processor import Processor
from regard.data.readers import Row, read_rows, resolve_paths
from regard.errors import BadRows, UserError, first_line
from regard.files import require_file
from regard.models.audio import SAMPLE_RATE, log_mel
from regard.nn import Packed
from regard.progress import track

TABLES = tuple(f"{name}.{form}" for name in ("transcripts", "metadata") for form in ("tsv", "csv", "jsonl"))
TRAIN, VALID = ("train",), ("valid", "test", "dev")
LEAST = 0.5  # deviation of a band, 5 dB: one that is silent in training must not be all that counts where it is not
RATES = (1000, 768_000)  # samples a second
MOST_SAMPLES = 1 << 29  # of a clip: three hours at 48 kHz
SAMPLE = 200  # clips that mean and deviation are taken of


@dataclass(frozen=True)
class AudioFormat:
    """What sounds are brought to before a model hears them: how many mel bands, and their mean and deviation.

    >>> import torch
    >>> from regard.data.audio import AudioFormat
    >>> AudioFormat(2, (1.0, 1.0), (0.5, 0.5)).normalize(torch.full((1, 2), 2.0))
    tensor([[2., 2.]])
    """

    features: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @staticmethod
    def from_processor(processor: Processor) -> AudioFormat:
        """What `fit_audio_format` left in a kit."""
        form = processor.settings_as(AudioFormat)
        if not len(form.mean) == len(form.deviation) == form.features or min(form.deviation, default=0) <= 0:
            raise UserError("config must have as many means and positive deviations as features")
        return form

    def normalize(self, values: Tensor) -> Tensor:
        """log-mel (..., features) as numbers around 0."""
        return (values - torch.tensor(self.mean)) / torch.tensor(self.deviation)

    def denormalize(self, values: Tensor) -> Tensor:
        """What `normalize` was given."""
        return values * torch.tensor(self.deviation) + torch.tensor(self.mean)


def fit_audio_format(rows: Sequence[Row], features: int) -> dict[str, Any]:
    """The form of sounds for a kit."""
    step = max(1, len(rows) // SAMPLE)
    waves = (load_waveform(row, BadRows(skip=True)) for row in track(rows[::step]))
    found = [log_mel_features(wave, features) for wave in waves if wave is not None]
    if not found:
        raise UserError(f"{rows[0].place}: is no sound that can be read, nor are others; is it the right data?")
    values = np.concatenate(found).astype(np.float64)
    deviation = np.maximum(values.std(0), LEAST)
    return asdict(AudioFormat(features, tuple(values.mean(0).round(4).tolist()), tuple(deviation.round(4).tolist())))


def log_mel_features(wave: np.ndarray, features: int) -> np.ndarray:
    """log-mel (frames, features) of a wave at 16 kHz, in half precision: an hour is 58 MB for 80 features."""
    return log_mel(torch.from_numpy(wave), features).half().numpy()


def load_waveform(row: Row, bad: BadRows) -> np.ndarray | None:
    """The sound of a row, whose first value is a path: one channel at 16 kHz, float32; none if it is bad."""
    path, reader = Path(row.values[0]), _soundfile()
    try:
        with reader.SoundFile(str(require_file(path))) as file:
            rate = file.samplerate
            if not RATES[0] <= rate <= RATES[1]:
                raise ValueError(f"it has {rate} samples a second, but must have {RATES[0]} to {RATES[1]}")
            if file.frames * file.channels > MOST_SAMPLES:
                raise ValueError(f"it has {file.frames} samples in {file.channels} channels; cut it into parts")
            samples = file.read(dtype="float32", always_2d=True)
    except FileNotFoundError:
        bad.add(f"{row.at}: there is no such file")
        return None
    except Exception as error:  # damaged files make the library raise of any kind
        why = first_line(error).rsplit(": ", 1)[-1].rstrip(".")
        bad.add(f"{row.at}: is no sound that can be read ({why}); save it again as WAV or FLAC")
        return None
    wave = resample(samples.mean(1), rate)
    if not len(wave):
        bad.add(f"{row.at}: has no samples; record it again")
        return None
    if not np.isfinite(wave).all():
        bad.add(f"{row.at}: has samples that are no numbers; record it again")
        return None
    return wave


def resample(wave: np.ndarray, rate: int) -> np.ndarray:
    """A wave of another rate at 16 kHz, float32."""
    if rate != SAMPLE_RATE and len(wave):
        from scipy.signal import resample_poly

        common = int(np.gcd(rate, SAMPLE_RATE))
        wave = resample_poly(wave, SAMPLE_RATE // common, rate // common)
    return np.ascontiguousarray(wave, np.float32)


def spectrogram(file: bytes, features: int = 80) -> tuple[Tensor, float]:
    """What the sound of a file looks like: log-mel (frames, features), and how many seconds it has."""
    samples, rate = _soundfile().read(io.BytesIO(file), dtype="float32", always_2d=True)
    wave = resample(samples.mean(1), rate)
    return log_mel(torch.from_numpy(wave), features), len(wave) / SAMPLE_RATE


def _soundfile() -> Any:
    try:  # all that will be needed, so that none is missed at the end of a training
        import jiwer  # noqa: F401
        import scipy.signal  # noqa: F401
        import soundfile
    except ImportError as error:
        raise UserError(f"sounds need {error.name}: pip install 'regard[speech]'") from None
    return soundfile


def read_clips(source: str, columns: Mapping[str, str], bad: BadRows) -> list[Row]:
    """Rows of a table, or of the table in a folder; paths are those beside the table."""
    table = find_table(source)
    return list(resolve_paths(table, read_rows(str(table), columns, bad)))


def find_table(source: str) -> Path:
    """A table of clips: the source itself, or the one in a folder."""
    table = Path(source)
    if table.is_dir():
        if parts := find_splits(table):
            raise UserError(f"{source}: holds {' and '.join(part.name for part in parts)}; say which of them it is")
        found = next((table / name for name in TABLES if (table / name).is_file()), None)
        if found is None:
            raise UserError(f"{source}: expected a table of its clips, {', '.join(TABLES[:3])}, but there is none")
        table = found
    return table


def find_splits(folder: Path) -> tuple[Path, Path] | None:
    """Where a folder holds what to train on and what is held out: tables train.tsv and valid.tsv, or such folders."""
    if not folder.is_dir():
        return None
    known = {".tsv", ".csv", ".jsonl"}
    names = {path.stem.lower(): path for path in sorted(folder.iterdir()) if path.is_dir() or path.suffix in known}
    train, valid = (next((names[name] for name in part if name in names), None) for part in (TRAIN, VALID))
    return (train, valid) if train and valid else None


def normalize_transcript(text: str) -> str:
    """Words in small letters, without punctuation: what a recognizer can be held to.

    >>> from regard.data.audio import normalize_transcript
    >>> normalize_transcript("Kdo by to řekl?!  Don't - ask.")
    "kdo by to řekl don't ask"
    """
    text = unicodedata.normalize("NFC", text).lower().replace("’", "'")
    return " ".join("".join(letter if letter.isalnum() or letter == "'" else " " for letter in text).split())


def collect_letters(rows: Sequence[Row], texts: Sequence[str]) -> tuple[str, ...]:
    """All letters of the texts, in order; too many are no letters."""
    found = sorted(set().union(*map(set, texts)))
    if not found:
        raise UserError(f"{rows[0].place}: no text has a letter, nor have others; is --text the right column?")
    return tuple(found)


class AudioClips:
    """Features of clips end to end, in half precision."""

    def __init__(self, clips: Sequence[np.ndarray], form: AudioFormat) -> None:
        self.form, self.clips = form, clips
        self.lengths = np.array([len(clip) for clip in clips], np.int64)

    def pack(self, chosen: np.ndarray) -> Packed:
        """The chosen clips as a model takes them."""
        values = np.concatenate([self.clips[n] for n in chosen]).astype(np.float32)
        return Packed(self.form.normalize(torch.from_numpy(values)), tuple(self.lengths[chosen].tolist()))


def nearest_clips(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray], slots: int = 8) -> list[int]:
    """Which training clip is most like each held-out one: by its mean features in equal slots of time, and length."""

    def summed(clips: Sequence[np.ndarray]) -> np.ndarray:
        made = [
            np.concatenate(
                [part.mean(0) if len(part) else clip.mean(0) for part in np.array_split(clip.astype(np.float32), slots)]
                + [np.full(slots, np.log(len(clip)), np.float32)]
            )
            for clip in clips
        ]
        return np.stack(made)

    ours, theirs = summed(train), summed(held_out)
    scale = np.maximum(ours.std(0), 1e-3)
    ours, theirs = ours / scale, theirs / scale
    return [int(((ours - one) ** 2).sum(1).argmin()) for one in theirs]
