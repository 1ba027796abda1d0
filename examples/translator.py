"""Export a run as the translator that ships with the package.

    regard train translate --vocabulary 6000 --steps 3000 --warmup 300 --seed 1 --out runs/en-fr
    python examples/translator.py runs/en-fr src/regard/data/embedded/en-fr

Weights are stored in half precision; the other files that predictions need are copied.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from regard.models import save
from regard.tasks import Run

CARD = """# en-fr

Translates everyday English sentences to French: `regard predict en-fr "I am hungry."`

Transformer with {layers} + {layers} layers, d_model {d_model}, {heads} heads, a shared vocabulary of {vocabulary:,}
tokens, {parameters:.1f} million weights in half precision.

Trained on the {train:,} pairs of Tatoeba (CC-BY 2.0, tatoeba.org and manythings.org/anki) that are not held out, with

    {command}
    python examples/translator.py runs/en-fr src/regard/data/embedded/en-fr

with torch {torch}, {threads} thread, {date}; {minutes:.0f} minutes on one core of a busy machine.

Results on {sentences:,} held-out English sentences, {pairs:,} pairs (step {step} of {steps}, beam {beam}):

| | this model | copy of the source |
| --- | --- | --- |
{rows}

`bleu` and `chrf` are against the first translation of each sentence, `bleu_all_references` against all of them
(sacrebleu). The model is for short everyday sentences: names, numbers and long sentences are often wrong, and it may
repeat the biases of its sources. Licence of the weights: CC-BY 2.0, like the data.
"""


def main(run: Path, out: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    for name in ("processor.json", "tokenizer.json"):
        shutil.copyfile(run / name, out / name)
    model, step = Run.open(run).model()
    save(model.half(), out)  # config.json and model.safetensors: `regard.load` reads the folder too
    about["command"] = ["regard", *about["command"][1:-1], "runs/en-fr"]
    about["exported"] = {"step": step, "minutes": about["results"]["minutes"]}
    (out / "run.json").write_text(json.dumps(about, indent=1, ensure_ascii=False))
    results, options = about["results"], about["options"]
    (copy,) = results["baselines"].values()
    card = CARD.format(
        **{name: options[name] for name in ("layers", "d_model", "heads", "vocabulary", "beam")},
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        train=results["rows"]["train"], sentences=about["sources"]["held_out"], pairs=results["rows"]["test"],
        command=" ".join(about["command"]), torch=about["machine"]["torch"],
        threads=about["machine"]["threads"], date=about["began"][:10], minutes=results["minutes"], step=step,
        steps=about["recipe"]["steps"],
        rows="\n".join(f"| {name} | {value:.1f} | {copy[name]:.1f} |" for name, value in results["metrics"].items()),
    )  # fmt: skip
    (out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
