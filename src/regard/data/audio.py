"""Audio data: clips listed in tables or directories, decoded once to log-mel features."""

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
MIN_DEVIATION = 0.5  # of a band, 5 dB: a band that is silent in training must not dominate when it is not
RATES = (1000, 768_000)  # samples per second
MAX_SAMPLES = 1 << 29  # per clip: three hours at 48 kHz
SAMPLE = 200  # clips used to estimate mean and deviation


@dataclass(frozen=True)
class AudioFormat:
    """Number of mel bands, and the mean and standard deviation that normalize them.

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
        """Read and check the settings that `fit_audio_format` saved."""
        form = processor.settings_as(AudioFormat)
        if not len(form.mean) == len(form.deviation) == form.features or min(form.deviation, default=0) <= 0:
            raise UserError("config must have as many means and positive deviations as features")
        return form

    def normalize(self, values: Tensor) -> Tensor:
        """Standardize log-mel features (..., features)."""
        return (values - torch.tensor(self.mean)) / torch.tensor(self.deviation)

    def denormalize(self, values: Tensor) -> Tensor:
        """Invert `normalize`."""
        return values * torch.tensor(self.deviation) + torch.tensor(self.mean)


def fit_audio_format(rows: Sequence[Row], features: int) -> dict[str, Any]:
    """Estimate the audio format of the data, as settings of a processor."""
    step = max(1, len(rows) // SAMPLE)
    waves = (load_waveform(row, BadRows(skip=True)) for row in track(rows[::step]))
    sample = [log_mel_features(wave, features) for wave in waves if wave is not None]
    if not sample:
        raise UserError(f"{rows[0].place}: no audio file can be read; is it the right data?")
    values = np.concatenate(sample).astype(np.float64)
    deviation = np.maximum(values.std(0), MIN_DEVIATION)
    return asdict(AudioFormat(features, tuple(values.mean(0).round(4).tolist()), tuple(deviation.round(4).tolist())))


def log_mel_features(wave: np.ndarray, features: int) -> np.ndarray:
    """Log-mel features (frames, features) of a wave at 16 kHz, in half precision: 58 MB per hour with 80 features."""
    return log_mel(torch.from_numpy(wave), features).half().numpy()


def load_waveform(row: Row, bad: BadRows) -> np.ndarray | None:
    """Load the audio file at the first value of a row, as mono float32 at 16 kHz; None if it is bad."""
    path, reader = Path(row.values[0]), _soundfile()
    try:
        with reader.SoundFile(str(require_file(path))) as file:
            rate = file.samplerate
            if not RATES[0] <= rate <= RATES[1]:
                raise ValueError(f"its sample rate is {rate} Hz, but must be {RATES[0]} to {RATES[1]}")
            if file.frames * file.channels > MAX_SAMPLES:
                raise ValueError(f"it has {file.frames} samples in {file.channels} channels; cut it into parts")
            samples = file.read(dtype="float32", always_2d=True)
    except FileNotFoundError:
        bad.add(f"{row.at}: no such file")
        return None
    except Exception as error:  # damaged files raise many types
        reason = first_line(error).rsplit(": ", 1)[-1].rstrip(".")
        bad.add(f"{row.at}: cannot be read as audio ({reason}); save it again as WAV or FLAC")
        return None
    wave = resample(samples.mean(1), rate)
    if not len(wave):
        bad.add(f"{row.at}: has no samples; record it again")
        return None
    if not np.isfinite(wave).all():
        bad.add(f"{row.at}: has samples that are not finite; record it again")
        return None
    return wave


def resample(wave: np.ndarray, rate: int) -> np.ndarray:
    """Resample a wave from `rate` to 16 kHz, float32."""
    if rate != SAMPLE_RATE and len(wave):
        from scipy.signal import resample_poly

        common = int(np.gcd(rate, SAMPLE_RATE))
        wave = resample_poly(wave, SAMPLE_RATE // common, rate // common)
    return np.ascontiguousarray(wave, np.float32)


def spectrogram(file: bytes, features: int = 80) -> tuple[Tensor, float]:
    """Log-mel spectrogram (frames, features) of an audio file, and its length in seconds."""
    samples, rate = _soundfile().read(io.BytesIO(file), dtype="float32", always_2d=True)
    wave = resample(samples.mean(1), rate)
    return log_mel(torch.from_numpy(wave), features), len(wave) / SAMPLE_RATE


def _soundfile() -> Any:
    try:  # import everything needed later, so that nothing is missing at the end of training
        import jiwer  # noqa: F401
        import scipy.signal  # noqa: F401
        import soundfile
    except ImportError as error:
        raise UserError(f"audio needs {error.name}: pip install 'regard[speech]'") from None
    return soundfile


def read_clips(source: str, columns: Mapping[str, str], bad: BadRows) -> list[Row]:
    """Read the rows of a table, or of the table in a directory; paths are relative to the table."""
    table = find_table(source)
    return list(resolve_paths(table, read_rows(str(table), columns, bad)))


def find_table(source: str) -> Path:
    """Return the table of clips: the source itself, or the table in a directory."""
    table = Path(source)
    if table.is_dir():
        if parts := find_splits(table):
            raise UserError(f"{source}: contains {' and '.join(part.name for part in parts)}; pass one of them")
        candidate = next((table / name for name in TABLES if (table / name).is_file()), None)
        if candidate is None:
            raise UserError(f"{source}: expected a table of the clips ({', '.join(TABLES[:3])}), found none")
        table = candidate
    return table


def find_splits(folder: Path) -> tuple[Path, Path] | None:
    """Find training and held-out data in a directory: tables train.tsv and valid.tsv, or directories of these names."""
    if not folder.is_dir():
        return None
    known = {".tsv", ".csv", ".jsonl"}
    names = {path.stem.lower(): path for path in sorted(folder.iterdir()) if path.is_dir() or path.suffix in known}
    train, valid = (next((names[name] for name in part if name in names), None) for part in (TRAIN, VALID))
    return (train, valid) if train and valid else None


def normalize_transcript(text: str) -> str:
    """Lowercase a transcript and remove punctuation.

    >>> from regard.data.audio import normalize_transcript
    >>> normalize_transcript("Kdo by to řekl?!  Don't - ask.")
    "kdo by to řekl don't ask"
    """
    text = unicodedata.normalize("NFC", text).lower().replace("’", "'")
    return " ".join("".join(letter if letter.isalnum() or letter == "'" else " " for letter in text).split())


def collect_letters(rows: Sequence[Row], texts: Sequence[str]) -> tuple[str, ...]:
    """Return all distinct letters of the texts, sorted."""
    letters = sorted(set().union(*map(set, texts)))
    if not letters:
        raise UserError(f"{rows[0].place}: no transcript has any letters; is --text the right column?")
    return tuple(letters)


class AudioClips:
    """Features of clips, in half precision."""

    def __init__(self, clips: Sequence[np.ndarray], form: AudioFormat) -> None:
        self.form, self.clips = form, clips
        self.lengths = np.array([len(clip) for clip in clips], np.int64)

    def pack(self, chosen: np.ndarray) -> Packed:
        """Pack the chosen clips, normalized, as input of a model."""
        values = np.concatenate([self.clips[n] for n in chosen]).astype(np.float32)
        return Packed(self.form.normalize(torch.from_numpy(values)), tuple(self.lengths[chosen].tolist()))


def nearest_clips(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray], slots: int = 8) -> list[int]:
    """Find the most similar training clip of each held-out one, by mean features in `slots` equal parts and length."""

    def summarize(clips: Sequence[np.ndarray]) -> np.ndarray:
        summaries = [
            np.concatenate(
                [part.mean(0) if len(part) else clip.mean(0) for part in np.array_split(clip.astype(np.float32), slots)]
                + [np.full(slots, np.log(len(clip)), np.float32)]
            )
            for clip in clips
        ]
        return np.stack(summaries)

    ours, theirs = summarize(train), summarize(held_out)
    scale = np.maximum(ours.std(0), 1e-3)
    ours, theirs = ours / scale, theirs / scale
    return [int(((ours - one) ** 2).sum(1).argmin()) for one in theirs]
