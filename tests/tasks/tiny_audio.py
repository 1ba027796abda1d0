"""Tiny clips: each letter is a tone, and a word is a sequence of tones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

LETTERS = {"a": 300.0, "b": 700.0, "c": 1500.0, "d": 3200.0}


def tones(word: str, chance: np.random.Generator, rate: int = 16000) -> np.ndarray:
    """A wave (samples,): 0.16 s per letter, silence for a space, and a little noise."""
    t = np.arange(int(0.16 * rate)) / rate
    fade = np.minimum(1, 20 * np.minimum(t, t[::-1]) / t[-1])
    parts = [np.sin(2 * np.pi * LETTERS[letter] * t) * fade if letter != " " else 0 * t for letter in word]
    wave = np.concatenate([np.zeros(rate // 20), *parts, np.zeros(rate // 20)])
    return (0.4 * wave + chance.normal(0, 0.002, len(wave))).astype(np.float32)


def words(count: int, seed: int = 1) -> list[str]:
    chance, words = np.random.default_rng(seed), dict[str, None]()
    while len(words) < count:
        words["".join(chance.choice(list(LETTERS), chance.integers(2, 5)))] = None
    return list(words)


def folder_of(
    folder: Path, transcripts: list[str], *, form: str = "tsv", suffix: str = ".wav", rate: int = 16000
) -> Path:
    """Write a table of clips, and the clips next to it."""
    chance = np.random.default_rng(7)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    lines = []
    for n, word in enumerate(transcripts):
        soundfile.write(folder / "clips" / f"{n:03}{suffix}", tones(word, chance, rate), rate)
        lines.append((f"clips/{n:03}{suffix}", word))
    table = folder / f"transcripts.{form}"
    if form == "jsonl":
        table.write_text("".join(f'{{"audio": "{path}", "text": "{word}"}}\n' for path, word in lines))
    else:
        between = "\t" if form == "tsv" else ","
        table.write_text(f"audio{between}text\n" + "".join(f"{path}{between}{word}\n" for path, word in lines))
    return table
