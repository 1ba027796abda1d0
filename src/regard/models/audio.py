"""Sound as numbers: waves to log-mel features, and features back to a wave."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE = 16000  # samples a second
FRAME, HOP = 400, 160  # samples of a frame, 25 ms, and from one frame to the next, 10 ms
FLOOR = 1e-6  # of the power, about 80 dB below speech: digital silence is no other than a quiet room


def log_mel(wave: Tensor, features: int = 80, *, floor: float = FLOOR) -> Tensor:
    """log10 of the power in `features` mel bands, (..., samples) at 16 kHz to (..., samples // 160, features).

    Frame n is centred on sample 160 n. A wave shorter than one frame is filled up with silence.

    >>> import torch
    >>> from regard.models.audio import log_mel
    >>> log_mel(torch.randn(2, 16000)).shape
    torch.Size([2, 100, 80])
    """
    if wave.shape[-1] < FRAME:
        wave = F.pad(wave, (0, FRAME - wave.shape[-1]))
    power = _spectrum(wave).abs().square()[..., :-1]  # (..., FRAME // 2 + 1, frames)
    return (mel_bands(features).to(power) @ power).clamp(min=floor).log10().mT.contiguous()


def whisper_features(wave: Tensor, features: int = 80, *, seconds: float | None = 30) -> Tensor:
    """What Whisper listens to: `log_mel` of so many seconds, cut or filled up with silence, within 8 of its maximum.

    With `seconds=None` the sound is taken as long as it is.

    >>> import torch
    >>> from regard.models.audio import whisper_features
    >>> whisper_features(torch.randn(1, 16000), seconds=2).shape
    torch.Size([1, 200, 80])
    """
    if seconds is not None:
        length = round(seconds * SAMPLE_RATE)
        wave = F.pad(wave[..., :length], (0, max(0, length - wave.shape[-1])))
    values = log_mel(wave, features, floor=1e-10)
    return (torch.maximum(values, values.amax((-2, -1), keepdim=True) - 8) + 4) / 4


def normalize_waveform(wave: Tensor) -> Tensor:
    """What Wav2Vec2 listens to: a wave (..., samples) with mean 0 and deviation 1.

    >>> import torch
    >>> from regard.models.audio import normalize_waveform
    >>> round(normalize_waveform(torch.arange(5.0)).square().mean().item(), 4)
    1.0
    """
    return (wave - wave.mean(-1, keepdim=True)) / (wave.var(-1, correction=0, keepdim=True) + 1e-7).sqrt()


def griffin_lim(values: Tensor, *, rounds: int = 60, momentum: float = 0.99) -> Tensor:
    """A wave whose `log_mel` is about these values (frames, features): phases by Griffin and Lim, accelerated.

    The same values always give the same wave: phases begin from a fixed seed.

    >>> import torch
    >>> from regard.models.audio import log_mel, griffin_lim
    >>> griffin_lim(log_mel(torch.randn(16000)), rounds=2).shape
    torch.Size([16000])
    """
    size = _amplitudes(10 ** values.double().mT)
    size = torch.cat((size, size[:, -1:]), 1)  # the frame that `log_mel` leaves out
    samples = len(values) * HOP
    angles = torch.rand(size.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phase, before = torch.polar(torch.ones_like(size), 2 * math.pi * angles), torch.zeros((), dtype=torch.complex128)
    for _ in range(rounds):
        found = _spectrum(_wave(size * phase, samples))
        phase = found - momentum / (1 + momentum) * before
        phase, before = phase / phase.abs().clamp(min=1e-12), found
    return _wave(size * phase, samples).float()


def _amplitudes(power: Tensor, rounds: int = 50) -> Tensor:
    """Amplitudes (FRAME // 2 + 1, frames), none below 0, whose mel bands have this power (features, frames)."""
    bands = mel_bands(len(power)).double()
    found = (torch.linalg.pinv(bands) @ power).clamp(min=1e-12)
    for _ in range(rounds):  # multiplicative updates: they stay positive
        found = found * (bands.mT @ power) / (bands.mT @ (bands @ found)).clamp(min=1e-12)
    return found.sqrt()


def _spectrum(wave: Tensor) -> Tensor:
    window = torch.hann_window(FRAME, dtype=wave.dtype, device=wave.device)
    return torch.stft(wave, FRAME, HOP, window=window, return_complex=True)


def _wave(spectrum: Tensor, samples: int) -> Tensor:
    window = torch.hann_window(FRAME, dtype=torch.float64)
    return torch.istft(spectrum, FRAME, HOP, window=window, length=samples)


@cache
def mel_bands(features: int) -> Tensor:
    """Triangles on Slaney's mel scale, 0 to 8 kHz, each of area 1: (features, FRAME // 2 + 1).

    >>> from regard.models.audio import mel_bands
    >>> mel_bands(80).shape
    torch.Size([80, 201])
    """
    top = _mel(np.array(SAMPLE_RATE / 2))
    edges = _hertz(np.linspace(0, float(top), features + 2))
    at = np.linspace(0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    rising = (at - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - at) / np.diff(edges)[1:, None]
    bands = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    with torch.inference_mode(False):
        return torch.from_numpy(bands).float()


def _mel(hertz: np.ndarray) -> np.ndarray:
    """Slaney's scale: linear to 1 kHz, which is 15 mel, then 27 mel for each factor of 6.4."""
    return np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / np.log(6.4))


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(np.log(6.4) * (np.maximum(mel, 15) - 15) / 27))
