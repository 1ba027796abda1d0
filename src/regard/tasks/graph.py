"""Semi-supervised node classification on a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.labels import collect_classes, unseen_message
from regard.data.processor import Processor
from regard.data.readers import FORMATS, OPENERS, Row, first_cells, read_rows
from regard.data.splits import split
from regard.errors import BadRows, UserError
from regard.field_types import check_minimum
from regard.masks import Mask, edges
from regard.models.graph import GraphConfig, NodeClassifier
from regard.training import baselines, metrics
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task


@dataclass(frozen=True)
class Graph(Task):
    """A graph attention network: nodes attend to their neighbours with additive scores.

    Training uses all nodes and edges, but only the labels of `labelled` nodes per class. No labels are set aside for
    validation: the checkpoint with the lowest training loss is kept.
    """

    name: ClassVar[str] = "graph"
    description: ClassVar[str] = "node classification on a graph with few labelled nodes"
    example: ClassVar[str] = "a directory with edges.csv and nodes.csv:\nsource,target\nann,bob\nnode,label\nann,chess"
    columns: ClassVar[tuple[str, ...]] = ("node", "label")
    recipe: ClassVar[Recipe] = Recipe(
        steps=200,
        tokens=4096,
        learning_rate=5e-3,
        warmup=10,
        weight_decay=0.1,
        ema=0.9,
        evaluate_every=20,
        save_every=100,
    )
    held_out: ClassVar[int] = 1_000_000  # at most; by default all nodes outside the labelled ones

    node: str = option("", "column of the node in the table of nodes: its name, or its number (from 1)")
    label: str = option("", "column of the class; nodes without a label appear only in the table of edges")
    features: str = option(
        "", "column of words or numbers, separated by spaces; by default a node is described by its neighbours"
    )
    source: str = option("", "column of the first node in the table of edges")
    target: str = option("", "column of the second node")
    directed: bool = option(False, "edges are directed: a node attends to the nodes it points to, not the reverse")
    labelled: int = option(20, "labelled nodes per class to train on")
    d_model: int = option(64, "width of the hidden states")
    layers: int = option(2, "encoder layers: the distance, in edges, that a node can see")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.6, "dropout probability")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, layers=1, labelled=1)

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """Read labelled nodes from a directory, or from a table of nodes next to one of edges; each has the graph."""
        path = Path(source)
        table = _find_table(path, "nodes") if path.is_dir() else path
        columns = {"node": self.node, "label": self.label}
        features = self.features or ("features" if "features" in first_cells(str(table), BadRows(skip=True)) else "")
        rows = list(read_rows(str(table), columns | ({"features": features} if features else {}), bad))
        pairs = [
            row.values
            for row in read_rows(
                str(_find_table(table.parent, "edges")), {"source": self.source, "target": self.target}, bad
            )
        ]
        known: dict[str, str] = {}
        good = []
        for row in rows:
            node = row.values[0]
            if node in known:
                bad.add(f"{row.place}: duplicate node {node!r}, first defined in {known[node]}")
                continue
            known[node] = row.place
            good.append(row)
        number = {node: n for n, node in enumerate(dict.fromkeys([*known, *(end for pair in pairs for end in pair)]))}
        ends = np.array([[number[end] for end in pair] for pair in pairs], np.int64).reshape(-1, 2).T
        graph_data = GraphData(tuple(number), ends, {row.values[0]: row.values[2] for row in good} if features else {})
        return [Row(row.place, (*row.values[:2], graph_data)) for row in good]

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        path = Path(source)
        return super().read_inputs(str(_find_table(path, "nodes")) if path.is_dir() else source, bad)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Split into `labelled` nodes per class and the others."""
        train: list[Row] = []
        for label, count in sorted(Counter(row.values[1] for row in rows).items()):
            own = [row for row in rows if row.values[1] == label]
            if count <= self.labelled:
                raise UserError(
                    f"{own[0].place}: the class {label!r} has {count} nodes, but training takes {self.labelled} and "
                    "none would be left to evaluate on; try a lower --labelled"
                )
            train += split(own, lambda row: str(row.values[0]), self.labelled, seed)[1]
        chosen = {row.values[0] for row in train}
        rest = [row for row in rows if row.values[0] not in chosen]
        return train, rest if held_out >= len(rest) else split(rest, lambda row: str(row.values[0]), held_out, seed)[1]

    def split_validation(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return list(rows), list(rows)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        return Processor(labels=collect_classes(rows), config=rows[0].values[2].to_json())

    def model(self, processor: Processor) -> nn.Module:
        return NodeClassifier(
            GraphConfig(
                d_model=self.d_model,
                layers=self.layers,
                heads=self.heads,
                d_hidden=2 * self.d_model,
                features=Stored.of(processor).features,
                classes=len(processor.labels),
                dropout=self.dropout,
            )
        )

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> LabelledNodes:
        classes, graph = {label: n for n, label in enumerate(processor.labels)}, GraphInputs(processor, self.directed)
        good = []
        for row in rows:
            node, label = row.values[:2]
            if node not in graph.number:
                bad.add(unseen_message(row.place, "node", node, graph.nodes))
            elif label not in classes:
                bad.add(unseen_message(row.place, "label", label, processor.labels))
            else:
                good.append(row)
        return LabelledNodes(
            graph,
            np.array([graph.number[row.values[0]] for row in good], np.int64),
            np.array([classes[row.values[1]] for row in good], np.int64),
            [row.place for row in good],
        )

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        inputs, mask, chosen = batch.inputs
        logits = model(inputs, mask)[0, chosen]
        return F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        logits, targets = _predict_logits(model, items.graph)[items.nodes], torch.from_numpy(items.targets)
        return {"loss": float(F.cross_entropy(logits, targets))} | metrics.classification(logits, targets)

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        ours, theirs = (self.dataset(processor, rows, BadRows()) for rows in (train, held_out))
        classes, targets = len(processor.labels), torch.from_numpy(theirs.targets)
        first = Counter(ours.targets.tolist()).most_common(1)[0][0]
        results = {"most frequent class": baselines.most_frequent(ours.targets.tolist(), targets.tolist(), classes)}
        votes = torch.zeros(len(ours.graph.number), classes)
        votes[ours.nodes, torch.from_numpy(ours.targets)] = 1
        near = torch.zeros(len(votes), classes).index_add_(0, ours.graph.ends[0], votes[ours.graph.ends[1]])
        near[:, first] += 0.5  # the tie-breaker for nodes without votes
        results["neighbours' vote"] = metrics.classification(near[theirs.nodes], targets)
        results["label propagation"] = metrics.classification(
            baselines.propagate_labels(ours.graph.ends.numpy(), ours.nodes, ours.targets, len(votes), classes)[
                theirs.nodes
            ],
            targets,
        )
        table = ours.graph.inputs[0].numpy()
        results["logistic regression on features"] = baselines.logistic_regression(
            table[ours.nodes], ours.targets, table[theirs.nodes], theirs.targets, classes, scaled=False
        )
        return results

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield the class of each given node."""
        graph = GraphInputs(processor, self.directed)
        logits = _predict_logits(model, graph).softmax(-1)
        for row in rows:
            if row.values[0] not in graph.number:
                bad.add(unseen_message(row.place, "node", row.values[0], graph.nodes))
                continue
            chances = logits[graph.number[row.values[0]]].tolist()
            best = int(np.argmax(chances))
            more = dict(zip(processor.labels, chances, strict=True))
            yield Prediction(row.values[0], processor.labels[best], chances[best], more, place=row.place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        record.set_tokens(list(Stored.of(processor).nodes))


@dataclass(frozen=True, eq=False)
class GraphData:
    """A graph as read: names of nodes, edges (2, E) as indices of nodes, and the feature text of each node."""

    nodes: tuple[str, ...]
    ends: np.ndarray
    features: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Settings for a processor; features are rows of numbers, or of indices of words."""
        words = [self.features.get(node, "").split() for node in self.nodes]
        counts = {len(each) for each in words if each}
        numeric: list[list[float]] = []
        if len(counts) == 1:
            try:
                numeric = [[float(word) for word in each] or [0.0] * max(counts) for each in words]
            except ValueError:
                numeric = []
        numbers = bool(numeric) and bool(np.isfinite(numeric).all())
        known = {word: n for n, word in enumerate(sorted({word for each in words for word in each}))}
        return {
            "nodes": list(self.nodes),
            "edges": self.ends.tolist(),
            "features": max(counts) if numbers else len(known) or len(self.nodes),
            "numbers": numeric if numbers else None,
            "words": [[known[word] for word in each] for each in words] if known and not numbers else None,
        }


@dataclass(frozen=True)
class Stored:
    """A graph as saved in a processor, see `GraphData.to_json`."""

    nodes: tuple[str, ...]
    edges: tuple[list[int], ...]
    features: int
    numbers: tuple[list[float], ...] | None = None
    words: tuple[list[int], ...] | None = None

    @staticmethod
    def of(processor: Processor) -> Stored:
        """Read and check the graph that `Graph.fit_processor` saved."""
        stored = processor.settings_as(Stored)
        count = len(stored.nodes)
        if not count or len(set(stored.nodes)) != count or stored.features < 1:
            raise UserError("config must have nodes with distinct names, and features")
        if len(stored.edges) != 2 or len(stored.edges[0]) != len(stored.edges[1]):
            raise UserError("config.edges must be two lists of nodes, of the same length")
        if any(not 0 <= end < count for ends in stored.edges for end in ends):
            raise UserError(f"config.edges must be indices of nodes, 0 to {count - 1}")
        if stored.numbers is not None and {len(row) for row in (*stored.numbers, [0] * stored.features)} != {
            stored.features
        }:
            raise UserError(f"config.numbers must have {stored.features} numbers per node")
        if stored.words is not None and any(not 0 <= word < stored.features for row in stored.words for word in row):
            raise UserError(f"config.words must be 0 to {stored.features - 1}")
        for table in (stored.numbers, stored.words):
            if table is not None and len(table) != count:
                raise UserError(f"config must have the features of {count} nodes, but has those of {len(table)}")
        if stored.numbers is None and stored.words is None and stored.features != count:
            raise UserError(f"config.features must be {count}, the number of nodes, but is {stored.features}")
        return stored


class GraphInputs:
    """The graph of a processor as tensors for the model."""

    def __init__(self, processor: Processor, directed: bool) -> None:
        self.stored = Stored.of(processor)
        self.nodes: list[str] = list(self.stored.nodes)
        self.number = {node: n for n, node in enumerate(self.nodes)}
        ends = torch.tensor(self.stored.edges, dtype=torch.int64).reshape(2, -1)
        self.ends = torch.unique(ends if directed else torch.cat((ends, ends.flip(0)), 1), dim=1)

    @cached_property
    def mask(self) -> Mask:
        """Nodes attend to their neighbours and to themselves."""
        own = torch.arange(len(self.number)).expand(2, -1)
        return edges(torch.cat((self.ends, own), 1))

    @cached_property
    def inputs(self) -> Tensor:
        """Features (1, N, features): standardized numbers, or bags of words of unit length."""
        if self.stored.numbers is not None:
            table = torch.tensor(self.stored.numbers)
            return ((table - table.mean(0)) / table.std(0, correction=0).clamp(min=1e-6))[None]
        table = torch.zeros(len(self.number), self.stored.features)
        if self.stored.words is None:
            table[self.ends[0], self.ends[1]] = 1
            table.fill_diagonal_(1)
        for n, words in enumerate(self.stored.words or ()):
            table[n, words] = 1
        return F.normalize(table, dim=-1)[None]


class LabelledNodes:
    """Nodes (n,) of a graph with their classes (n,). Every batch has the whole graph."""

    def __init__(self, graph: GraphInputs, nodes: np.ndarray, targets: np.ndarray, places: Sequence[str]) -> None:
        self.graph, self.nodes, self.targets, self.places = graph, nodes, targets, places
        self.sizes = np.ones(len(nodes), np.int64)

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        inputs = (self.graph.inputs, self.graph.mask, torch.from_numpy(self.nodes[chosen]))
        return Batch(inputs, torch.from_numpy(self.targets[chosen]), len(self.graph.number), len(chosen))


@torch.no_grad()
def _predict_logits(model: nn.Module, graph: GraphInputs) -> Tensor:
    """Logits (N, classes)."""
    device = next(model.parameters()).device
    return model(graph.inputs.to(device), graph.mask)[0].float().cpu()


def _find_table(folder: Path, name: str) -> Path:
    """Find the table `name` in a directory, in any supported format."""
    for ending in ("", *OPENERS):
        for suffix in FORMATS[:3]:
            if (path := folder / f"{name}{suffix}{ending}").is_file():
                return path
    raise UserError(f"{folder}: expected a table {name}.csv (or .tsv, .jsonl) in this directory, found none")
