"""Create clips of spoken digits and letters, concatenated at random from recordings of one voice, and their tables.

    python examples/spoken_digits.py --sounds /usr/share/asterisk/sounds/en_US_f_Allison --out spoken

writes spoken/train.tsv, spoken/valid.tsv and the clips that they list. The recordings are in the Debian package
asterisk-core-sounds-en-wav: digits/0.wav ... letters/z.wav. Every sequence is in one table only. Speed and loudness of
each word vary at random, and words are separated by pauses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import resample_poly

SAMPLE_RATE = 16000
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def read_words(folder: Path, letters: bool) -> dict[str, np.ndarray]:
    """Return the recording of each word at 16 kHz, without leading and trailing silence."""
    files = {word: folder / "digits" / f"{n}.wav" for n, word in enumerate(DIGITS)}
    if letters:
        files |= {letter: folder / "letters" / f"{letter}.wav" for letter in "abcdefghijklmnopqrstuvwxyz"}
    return {word: cut(*soundfile.read(path)) for word, path in files.items()}


def cut(samples: np.ndarray, rate: int) -> np.ndarray:
    common = np.gcd(rate, SAMPLE_RATE)
    wave = resample_poly(samples, SAMPLE_RATE // common, rate // common)
    loud = np.flatnonzero(np.abs(wave) > 0.02 * np.abs(wave).max())
    return wave[max(0, loud[0] - 320) : loud[-1] + 320]


def speak(words: list[str], sounds: dict[str, np.ndarray], chance: np.random.Generator, vary: float) -> np.ndarray:
    """Concatenate words to a clip; `vary` is the relative variation of speed and loudness."""
    gain = 10 ** (vary * chance.uniform(-1, 0.5))
    parts = [np.zeros(int(chance.uniform(0.05, 0.2) * SAMPLE_RATE))]
    for word in words:
        speed = 100 + round(100 * vary * chance.uniform(-1, 1))
        wave = resample_poly(sounds[word], 100, speed) * gain * 10 ** (0.3 * vary * chance.uniform(-1, 1))
        parts += [wave, np.zeros(int(chance.uniform(0.03, 0.25) * SAMPLE_RATE))]
    clip = np.concatenate(parts)
    clip = clip + chance.normal(0, 0.002 * vary, len(clip))
    return (clip / max(1.0, np.abs(clip).max() / 0.95)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sounds", required=True, type=Path, help="folder of the recordings of a voice")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--train", type=int, default=1500, help="training clips")
    parser.add_argument("--validation", type=int, default=200, help="validation clips")
    parser.add_argument("--words", type=int, default=6, help="most words per clip")
    parser.add_argument("--vary", type=float, default=0.15, help="relative variation of speed and loudness")
    parser.add_argument("--digits", action="store_true", help="digits only, no letters")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, sounds = np.random.default_rng(options.seed), read_words(options.sounds, not options.digits)
    known = list(sounds)
    (options.out / "clips").mkdir(parents=True)
    seen: set[str] = set()
    for name, count in (("train", options.train), ("valid", options.validation)):
        lines, seconds = [], 0.0
        while len(lines) < count:
            words = [known[n] for n in chance.integers(0, len(known), chance.integers(2, options.words + 1))]
            text = " ".join(words)
            if text in seen:
                continue
            seen.add(text)
            clip, path = speak(words, sounds, chance, options.vary), f"clips/{name}-{len(lines):05}.flac"
            soundfile.write(options.out / path, clip, SAMPLE_RATE)
            lines.append(f"{path}\t{text}\n")
            seconds += len(clip) / SAMPLE_RATE
        (options.out / f"{name}.tsv").write_text("audio\ttext\n" + "".join(lines))
        print(f"{options.out / name}.tsv: {count} clips, {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
