"""Draw the pictures of docs/applications, each from a run.

python examples/applications.py answer runs/cloze --out docs/applications
python examples/applications.py summarise runs/packages --out docs/applications
python examples/applications.py recommend runs/movielens --out docs/applications
python examples/applications.py sets runs/points --data points.jsonl --out docs/applications
python examples/applications.py graph runs/karate --out docs/applications
python examples/applications.py match runs/described --data digits/test.csv --out docs/applications
"""

from __future__ import annotations

import argparse
import csv
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.data.readers import Row
from regard.errors import BadRows
from regard.tasks import Run, Sources
from regard.training.sources import read_examples
from regard.view import capture, pictures


def predict_and_capture(run: Run, model: Any, *values: Any) -> tuple[Any, Any]:
    """Return the prediction of a run's model for one input, and the record of its attention."""
    with capture(model) as record:
        (prediction,) = run.task.predict(model, run.processor, [Row("the input", values)], BadRows())
    run.task.name_tokens(model, run.processor, record, prediction)
    return prediction, record


def held_out(run: Run) -> list[Row]:
    """Return the test examples of a run."""
    return list(read_examples(run.task, Sources.from_json(run.about["sources"], check=False), run.recipe.seed).test)


def answer(run: Run, data: Path | None) -> Any:
    """Plot the last layer for a short question and its text: the correct answer with the highest score."""
    model, _ = run.model()
    short = [row for row in held_out(run) if len(row.values[0]) + len(row.values[1]) < 300]
    answers = run.task.predict(model, run.processor, short, BadRows())
    right = [(each, row) for each, row in zip(answers, short, strict=True) if each.output in dict(row.values[2])]
    _, row = max(right, key=lambda pair: pair[0].score or 0)
    prediction, record = predict_and_capture(run, model, *row.values)
    ax = pictures.heatmap(record, record.attentions[-1].name)
    ax.set_title(f"{prediction.input}  →  {prediction.output} ({prediction.score:.2f})")
    return ax.figure


def summarise(run: Run, data: Path | None) -> Any:
    """Plot the attention that a summary pays to each word of its text."""
    model, _ = run.model()
    row = next(row for row in held_out(run) if 350 < len(row.values[0]) < 480)
    prediction, record = predict_and_capture(run, model, row.values[0])
    ax = pictures.coverage(record)
    ax.set_title(f"{prediction.output} ({prediction.score:.2f})\nreference: {row.values[1]}", fontsize=10)
    return ax.figure


def recommend(run: Run, data: Path | None) -> Any:
    """Plot attention within the history of a held-out user, and the recommended films."""
    import matplotlib.pyplot as plt

    model, _ = run.model()
    user = next(row for row in held_out(run) if len(row.values[1]) == 21 and max(map(len, row.values[1])) < 36)
    prediction, record = predict_and_capture(run, model, " | ".join(user.values[1][:-1]))
    layer = record.attentions[-1]
    figure, axes = plt.subplots(1, 2, figsize=(11, 6.2), width_ratios=(2.2, 1), layout="constrained")
    pictures.heatmap(record, layer.name, ax=axes[0])
    axes[0].set_title("attention between films (last layer)")
    names, chances = list(prediction.more["items"]), list(prediction.more["items"].values())
    colours = ["tab:red" if name == user.values[1][-1] else "tab:blue" for name in names]
    axes[1].barh(range(len(names)), chances, color=colours)
    axes[1].set(yticks=range(len(names)), yticklabels=names, xlabel="probability", title="recommended next")
    axes[1].invert_yaxis()
    return figure


def sets(run: Run, data: Path | None) -> Any:
    """Plot the attention of the pooling seed over the points of a few digits."""
    import matplotlib.pyplot as plt

    model, _ = run.model()
    figure, axes = plt.subplots(2, 5, figsize=(10, 4.4), layout="constrained")
    assert data is not None
    with data.open() as file:
        lines = [json.loads(line) for line in islice(file, 200)]
    first = [next(line for line in lines if line["label"] == str(digit)) for digit in range(10)]
    for ax, line in zip(axes.flat, first, strict=True):
        prediction, record = predict_and_capture(run, model, json.dumps(line["set"]))
        weights = record.weights(record.attentions[-1].name).mean(0)[0]
        points = np.array(line["set"])
        ax.scatter(
            points[:, 0], points[:, 1], c=weights / weights.max(), cmap="magma_r", s=14, edgecolors="0.8", lw=0.3
        )
        ax.set(xlim=(0, 28), ylim=(28, 0), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"{prediction.output} ({prediction.score:.2f})", fontsize=10)
    return figure


def graph(run: Run, data: Path | None) -> Any:
    """Plot a graph with edges as wide as the attention along them, and nodes coloured by their predicted label."""
    import matplotlib.pyplot as plt
    import networkx

    model, _ = run.model()
    assert run.processor.config is not None
    nodes = run.processor.config["nodes"]
    _, record = predict_and_capture(run, model, nodes[0])
    predictions = list(run.task.predict(model, run.processor, [Row("", (node,)) for node in nodes], BadRows()))
    examples = read_examples(run.task, Sources.from_json(run.about["sources"], check=False), run.recipe.seed)
    known = {row.values[0] for row in examples.train}
    true = {row.values[0]: row.values[1] for row in (*examples.train, *examples.test)}
    web = networkx.Graph(zip(*run.processor.config["edges"], strict=True))
    place = networkx.spring_layout(web, seed=4, k=0.35)
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), width_ratios=(1.1, 1), layout="constrained")
    weights = record.weights(0).mean(0)
    wide = [4 * float(weights[a, b] + weights[b, a]) for a, b in web.edges()]
    networkx.draw_networkx_edges(web, place, width=wide, edge_color="0.45", ax=axes[0])
    colours, labels = plt.get_cmap("tab10"), run.processor.labels
    for n, prediction in enumerate(predictions):
        wrong = true.get(nodes[n], prediction.output) != prediction.output
        axes[0].scatter(
            *place[n], s=260 if nodes[n] in known else 130, color=colours(labels.index(prediction.output)),
            edgecolors="red" if wrong else "black" if nodes[n] in known else "white", linewidths=2, zorder=2,
        )  # fmt: skip
        axes[0].annotate(nodes[n], place[n], ha="center", va="center", fontsize=7, color="white", zorder=3)
    axes[0].set_title(
        "large: labelled; colour: prediction; red: wrong\nedges as wide as the attention of layer 0", fontsize=10
    )
    axes[0].axis("off")
    pictures.heatmap(record, 0, ax=axes[1])
    return figure


def match(run: Run, data: Path | None) -> Any:
    """Plot the attention of the words of a matching text over the patches of the image."""
    import matplotlib.pyplot as plt

    model, _ = run.model()
    assert data is not None
    with data.open() as file:
        right = [row for row in csv.DictReader(file) if row["label"] == "yes"]
    figure, axes = plt.subplots(3, 5, figsize=(10, 6.4), layout="constrained")
    for row, line in zip(axes, right[:3], strict=True):
        prediction, record = predict_and_capture(run, model, f"{data.parent / line['image']} {line['text']}")
        across = [captured for captured in record.attentions if captured.kind == "cross"][::2][
            -1
        ]  # from words to patches
        words = record.streams[record.stream_names(across)[0]].tokens
        row[0].imshow(plt.imread(data.parent / line["image"]), cmap="gray")
        row[0].set(xticks=[], yticks=[])
        row[0].set_title(f"{line['text']}: {prediction.output} ({prediction.score:.2f})", fontsize=9)
        shown = [n for n, word in enumerate(words) if word not in ("<s>", "</s>", "a", "of")]
        for ax, n in zip(row[1:], [*shown, 0][:4], strict=False):
            pictures.patches(record, across.name, query=n, ax=ax)
            ax.set_title(words[n], fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    plots = {plot.__name__: plot for plot in (answer, summarise, recommend, sets, graph, match)}
    parser.add_argument("what", choices=plots)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, help="examples to show, for sets and match")
    parser.add_argument("--out", type=Path, required=True, help="folder of the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figure = plots[options.what](Run.open(options.run), options.data)
    path = options.out / f"{options.what}.png"
    figure.savefig(path, dpi=90, bbox_inches="tight")
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
