"""Audio features: waveforms to log-mel features, and log-mel features back to a waveform."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE = 16000  # samples per second
FRAME, HOP = 400, 160  # samples per frame (25 ms) and between frames (10 ms)
FLOOR = 1e-6  # minimum power, about 80 dB below speech, so that digital silence equals a quiet room


def log_mel(wave: Tensor, features: int = 80, *, floor: float = FLOOR) -> Tensor:
    """log10 of the power in `features` mel bands, (..., samples) at 16 kHz to (..., samples // 160, features).

    Frame n is centred on sample 160 n. A wave shorter than one frame is padded with silence.

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
    """Input features of Whisper: `log_mel` clipped to 8 below its maximum, of audio cut or padded to `seconds`.

    With `seconds=None` the audio keeps its length.

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
    """Normalise a wave (..., samples) to mean 0 and standard deviation 1, the input of Wav2Vec2.

    >>> import torch
    >>> from regard.models.audio import normalize_waveform
    >>> round(normalize_waveform(torch.arange(5.0)).square().mean().item(), 4)
    1.0
    """
    return (wave - wave.mean(-1, keepdim=True)) / (wave.var(-1, correction=0, keepdim=True) + 1e-7).sqrt()


def griffin_lim(values: Tensor, *, rounds: int = 60, momentum: float = 0.99) -> Tensor:
    """Reconstruct a wave from `log_mel` values (frames, features) by the fast Griffin-Lim algorithm.

    The result is deterministic: the phases are initialised from a fixed seed.

    >>> import torch
    >>> from regard.models.audio import log_mel, griffin_lim
    >>> griffin_lim(log_mel(torch.randn(16000)), rounds=2).shape
    torch.Size([16000])
    """
    amplitudes = _amplitudes(10 ** values.double().mT)
    amplitudes = torch.cat((amplitudes, amplitudes[:, -1:]), 1)  # `log_mel` drops the last frame
    samples = len(values) * HOP
    angles = torch.rand(amplitudes.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phase, previous = (
        torch.polar(torch.ones_like(amplitudes), 2 * math.pi * angles),
        torch.zeros((), dtype=torch.complex128),
    )
    for _ in range(rounds):
        estimate = _spectrum(_wave(amplitudes * phase, samples))
        phase = estimate - momentum / (1 + momentum) * previous
        phase, previous = phase / phase.abs().clamp(min=1e-12), estimate
    return _wave(amplitudes * phase, samples).float()


def _amplitudes(power: Tensor, rounds: int = 50) -> Tensor:
    """Non-negative amplitudes (FRAME // 2 + 1, frames) whose mel bands have the given power (features, frames)."""
    bands = mel_bands(len(power)).double()
    estimate = (torch.linalg.pinv(bands) @ power).clamp(min=1e-12)
    for _ in range(rounds):  # multiplicative updates keep values positive
        estimate = estimate * (bands.mT @ power) / (bands.mT @ (bands @ estimate)).clamp(min=1e-12)
    return estimate.sqrt()


def _spectrum(wave: Tensor) -> Tensor:
    window = torch.hann_window(FRAME, dtype=wave.dtype, device=wave.device)
    return torch.stft(wave, FRAME, HOP, window=window, return_complex=True)


def _wave(spectrum: Tensor, samples: int) -> Tensor:
    window = torch.hann_window(FRAME, dtype=torch.float64)
    return torch.istft(spectrum, FRAME, HOP, window=window, length=samples)


@cache
def mel_bands(features: int) -> Tensor:
    """Triangular filters of area 1 on Slaney's mel scale, 0 to 8 kHz: (features, FRAME // 2 + 1).

    >>> from regard.models.audio import mel_bands
    >>> mel_bands(80).shape
    torch.Size([80, 201])
    """
    top = _mel(np.array(SAMPLE_RATE / 2))
    edges = _hertz(np.linspace(0, float(top), features + 2))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    bands = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    with torch.inference_mode(False):
        return torch.from_numpy(bands).float()


def _mel(hertz: np.ndarray) -> np.ndarray:
    """Slaney's scale: linear to 1 kHz, which is 15 mel, then 27 mel for each factor of 6.4."""
    return np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / np.log(6.4))


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(np.log(6.4) * (np.maximum(mel, 15) - 15) / 27))
