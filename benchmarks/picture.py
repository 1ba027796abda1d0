"""Draw a run: for every case, the time of each peer divided by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.cases import PEAK, READS

COLOURS = {
    "torch SDPA": "#d1495b", peers.ONNXRUNTIME: "#edae49", peers.OPENVINO: "#7a5195", peers.JAX: "#30a46c",
    "torch.compile": "#00798c", "others": "#5c6b73",
}  # fmt: skip
INK, GRID, BAND = "#22303c", "#d9dee3", "#f5f7f9"


def _family(peer: str) -> str:
    if "SDPA" in peer:
        return "torch SDPA"
    if "compile" in peer:
        return "torch.compile"
    return peer if peer in COLOURS else "others"


def _shown(case: dict[str, Any]) -> dict[str, float]:
    return {peer: r for peer, r in case["ratios"].items() if peer not in (PEAK, READS, *case["own"])}


def draw(run: dict[str, Any], path: Path) -> None:
    """One panel for each number of threads; dots are peers, ticks are targets, right of 1 we are faster."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {n: [c for c in w["cases"] if not c["wrong"] and _shown(c)] for n, w in run["times"].items()}
    names = list(dict.fromkeys(case["name"] for cases in panels.values() for case in cases))
    rows = {case["name"]: case["row"] for cases in panels.values() for case in cases}
    if not names:
        return
    place, y, last = {}, 0.0, rows[names[0]]
    for name in names:
        y += 0.45 if rows[name] != last else 0.0
        place[name], last = y, rows[name]
        y += 1.0
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 + 4.6 * len(panels), 1.4 + 0.25 * y), sharey=True, squeeze=False
    )
    plt.rcParams.update({"font.family": "DejaVu Sans"})
    every = [ratio for cases in panels.values() for case in cases for ratio in _shown(case).values()]
    every += [t["at_least"] for cases in panels.values() for c in cases for t in c["targets"] if t["at_least"]]
    low, high = min([0.5, *every]) * 0.85, max([4.0, *every]) * 1.3
    for axis, (threads, cases) in zip(axes[0], panels.items(), strict=True):
        _bands(axis, place, rows)
        axis.axvspan(low, 1, color="#d1495b", alpha=0.06, lw=0)
        axis.axvline(1, color=INK, lw=1)
        for case in cases:
            at = place[case["name"]]
            for target in case["targets"]:
                if target["peer"] in _shown(case):
                    bound = target["at_least"] or 1 / target["at_most"]
                    colour = COLOURS[_family(target["peer"])]
                    axis.plot([bound, bound], [at - 0.42, at + 0.42], color=colour, lw=2, zorder=2)
            peers = _shown(case)
            for n, (peer, ratio) in enumerate(peers.items()):  # a little below each other, so that none hides another
                aside = (n - (len(peers) - 1) / 2) * 0.2
                axis.plot(ratio, at + aside, "o", ms=6.5, color=COLOURS[_family(peer)], mec="white", mew=0.7, zorder=3)
        axis.set_xscale("log")
        axis.set_xlim(low, high)
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= t <= high]
        axis.set_xticks(ticks, [f"{t:g}x" for t in ticks])
        axis.minorticks_off()
        axis.set_title(f"{threads} thread{'s' * (int(threads) > 1)}", fontsize=11, color=INK, loc="left")
        axis.set_ylim(y - 0.3, -0.7)
        axis.grid(axis="x", color=GRID, lw=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(length=0, labelsize=9, colors=INK)
        for side in axis.spines.values():
            side.set_visible(False)
    axes[0][0].set_yticks([place[name] for name in names], names, fontsize=8.5)
    _legend(figure, panels)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def _bands(axis: Any, place: dict[str, float], rows: dict[str, str]) -> None:
    """A light background behind every other group of cases."""
    groups = list(dict.fromkeys(rows.values()))
    for n, group in enumerate(groups):
        inside = [place[name] for name, row in rows.items() if row == group]
        if n % 2 == 0:
            axis.axhspan(min(inside) - 0.6, max(inside) + 0.6, color=BAND, lw=0, zorder=0)


def _legend(figure: Any, panels: dict[str, list[dict[str, Any]]]) -> None:
    from matplotlib.lines import Line2D

    families = {_family(peer) for cases in panels.values() for case in cases for peer in _shown(case)}
    marks = [
        Line2D([], [], ls="", marker="o", ms=7, color=colour, label=name)
        for name, colour in COLOURS.items()
        if name in families
    ]
    marks.append(Line2D([], [], ls="", marker="|", ms=11, mew=2, color=INK, label="target, in the peer's colour"))
    height = figure.get_figheight()
    figure.suptitle(
        "Peer time / our time: right of 1x, regard is faster", x=0.015, y=1 - 0.12 / height, ha="left", va="top",
        fontsize=13, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.legend(
        handles=marks, loc="upper left", bbox_to_anchor=(0.008, 1 - 0.38 / height), ncols=len(marks), frameon=False,
        fontsize=9, labelcolor=INK, handletextpad=0.3, columnspacing=1.4,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.45 / height))
