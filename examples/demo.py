"""Demo of `make demo`: train a translator for two minutes, translate, and plot the alignment of a translation."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from regard.tasks import Run
from regard.view import capture_text, pictures

SENTENCES = (
    "I am hungry.", "Where is the station?", "She doesn't like coffee.", "We have to go home now.",
    "He told me that he would help us tomorrow.",
)  # fmt: skip
OUT = Path("demo")


def regard(*words: str) -> None:
    """Print and run a command."""
    print(f"\n$ regard {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "regard", *words], check=True)


def main() -> None:
    run = OUT / "run"
    shutil.rmtree(run, ignore_errors=True)  # from an earlier demo
    regard(
        "train",
        "translate",
        "--d-model",
        "128",
        "--layers",
        "2",
        "--vocabulary",
        "4000",
        "--held-out",
        "500",
        "--steps",
        "900",
        "--warmup",
        "100",
        "--learning-rate",
        "4e-3",
        "--tokens",
        "3072",
        "--ema",
        "0.99",
        "--out",
        str(run),
    )
    regard("predict", str(run), *SENTENCES)
    print("\nThe same sentences with the translator that ships with the package, which was trained for longer:")
    regard("predict", "en-fr", *SENTENCES)

    translator = Run.open("en-fr")
    record = capture_text(translator.model()[0], translator.processor.tokenizer, SENTENCES[-1])
    axes = pictures.alignment(record)
    axes.figure.savefig(OUT / "alignment.png", dpi=120)
    record.save(OUT / "alignment.html")
    print(f"\n{SENTENCES[-1]} -> {record.note}\nSoft alignment: {OUT}/alignment.png and {OUT}/alignment.html")


if __name__ == "__main__":
    main()
