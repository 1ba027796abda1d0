"""Write graphs with known communities, as folders with nodes.csv and edges.csv.

python examples/graphs.py karate --out karate            Zachary's karate club, from networkx
python examples/graphs.py miserables --out miserables --from miserables.json
                                                         co-occurrences in Les Misérables, with the groups of
                                                         data/miserables.json in vega-datasets (npm)
python examples/graphs.py cora --out cora                citations between papers, from graphdatascience:
                                                         pip install graphdatascience --no-deps; pip install pyarrow
regard train graph --data karate --labelled 2 --out runs/karate
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

Table = Iterable[Sequence[str]]


def karate(source: Path | None) -> tuple[Table, Table]:
    """Return nodes and edges of the karate club."""
    import networkx

    graph = networkx.karate_club_graph()
    nodes = [("node", "label"), *((str(node), club) for node, club in graph.nodes(data="club"))]
    return nodes, [("source", "target"), *((str(one), str(other)) for one, other in graph.edges())]


def miserables(source: Path | None) -> tuple[Table, Table]:
    """Return nodes and edges of Les Misérables; members of groups smaller than 4 have no label."""
    if source is None:
        raise SystemExit("graphs.py: miserables needs --from package/data/miserables.json (npm pack vega-datasets@2)")
    data = json.loads(source.read_text())
    names = [node["name"] for node in data["nodes"]]
    groups = [str(node["group"]) for node in data["nodes"]]
    nodes = [(name, group) for name, group in zip(names, groups, strict=True) if groups.count(group) >= 4]
    edges = [(names[link["source"]], names[link["target"]]) for link in data["links"]]
    return [("node", "label"), *nodes], [("source", "target"), *edges]


def cora(source: Path | None) -> tuple[Table, Table]:
    """Return nodes and edges of Cora; the features of a paper are its words."""
    from pyarrow.parquet import read_table

    if source is None:
        spec = find_spec("graphdatascience")
        if spec is None or spec.origin is None:
            raise SystemExit("graphs.py: cora needs pip install graphdatascience --no-deps")
        source = Path(spec.origin).parent / "resources" / "cora"
    papers = read_table(source / "cora_nodes.parquet.gzip").to_pydict()
    cited = read_table(source / "cora_rels.parquet.gzip").to_pydict()
    nodes = [("node", "label", "features")]
    for node, subject, words in zip(papers["nodeId"], papers["subject"], papers["features"], strict=True):
        nodes.append((str(node), str(subject), " ".join(f"w{n}" for n, present in enumerate(words) if present)))
    ends = zip(cited["sourceNodeId"], cited["targetNodeId"], strict=True)
    return nodes, [("source", "target"), *((str(one), str(other)) for one, other in ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("graph", choices=["karate", "miserables", "cora"])
    parser.add_argument("--from", dest="source", type=Path, help="file or folder of the source data")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    options = parser.parse_args()
    tables = {"karate": karate, "miserables": miserables, "cora": cora}[options.graph](options.source)
    options.out.mkdir(parents=True)
    for name, rows in zip(("nodes", "edges"), tables, strict=True):
        with (options.out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    print(f"{options.out}: nodes.csv and edges.csv")


if __name__ == "__main__":
    main()
