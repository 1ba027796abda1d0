"""Plots with matplotlib: each function draws into `ax`, or into new axes, and returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.arguments import Index, resolve_index
from regard.geometry import Frame
from regard.masks import Mask
from regard.view.alignment import best_head
from regard.view.captured_attention import CapturedAttention, Kind
from regard.view.record import NOTHING, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 512  # most rows and columns of a picture
LABELLED = 256  # most tokens on an axis; a longer axis shows numbers
COLOURS = "magma_r"  # dark for large weights
KINDS = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}


def heatmap(
    record: Record,
    layer: int | str,
    head: int | None = None,
    *,
    kind: Kind | None = None,
    rows: Index = None,
    columns: Index = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the weights of a head, or their mean over heads, with token labels: queries down, keys across.

    rows, columns: plot a part, of at most 512 x 512. A longer sequence is pooled to exact means.

    >>> import regard as rg, regard.view, torch
    >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> with rg.view.capture(model) as record:
    ...     hidden = model(torch.tensor([[5, 6, 7]]))
    >>> rg.view.pictures.heatmap(record, 1, head=2).get_title()
    'encoder self-attention, layer 1, head 2'
    """
    captured = record.attention(layer, kind)
    queries, keys = (record.streams[name].tokens for name in record.stream_names(captured))
    i, j = resolve_index("rows", rows, captured.Q), resolve_index("columns", columns, captured.K)
    ax = _axes(ax, (min(9, 2.5 + 0.22 * len(j)), min(8, 2 + 0.22 * len(i))))
    if len(i) > LARGEST or len(j) > LARGEST:
        if rows is not None or columns is not None:
            raise ValueError(
                f"rows and columns must select at most {LARGEST} x {LARGEST} weights, but select {len(i)} x {len(j)}; "
                "select fewer, or leave both out to plot a pooled map"
            )
        maps = captured.map((LARGEST, LARGEST))
        picture = maps.mean(0) if head is None else maps[head]
        extent = (0, captured.K, captured.Q, 0)
        image = ax.imshow(picture.numpy(), cmap=COLOURS, vmin=0, aspect="auto", extent=extent, interpolation="nearest")
        ax.figure.colorbar(image, ax=ax, fraction=0.04, label="mean weight of a cell")
    else:
        weights = captured.weights(heads=None if head is None else [head], rows=i, columns=j)
        _cells(ax, weights.float().mean(0), [queries[n] for n in i], [keys[n] for n in j])
    ax.set(xlabel="key", ylabel="query", title=_title(captured, head))
    return ax


def alignment(record: Record, layer: int | None = None, head: int | None = None, *, ax: Axes | None = None) -> Axes:
    """Plot a cross-attention head with the strongest source token of each generated token framed.

    Without `head`, the head that aligns best is chosen, in `layer` or in all layers. `head` without `layer` means the
    last layer.
    """
    if head is None:
        number, head = best_head(record, layer)
        captured = record.attentions[number]
    else:
        captured = _cross(record, layer)
    ax = heatmap(record, captured.name, head, ax=ax)
    if captured.Q <= LARGEST and captured.K <= LARGEST:
        from matplotlib.patches import Rectangle

        weights = captured.weights(heads=[head])[0].float()
        for row, column in enumerate(weights.argmax(-1).tolist()):
            ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="tab:blue", linewidth=1.2))
    ax.set(
        xlabel="source",
        ylabel=record.stream_names(captured)[0],
        title=f"{ax.get_title()}\nframed: the largest weight of a row",
    )
    return ax


def coverage(record: Record, *, letters: int = 90, ax: Axes | None = None) -> Axes:
    """Plot the source text, each token shaded by the cross-attention it receives.

    That is its weight summed over the target tokens, averaged over heads and layers. letters: characters per line.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Rectangle

    from regard.view.token_labels import display_width, drawable, font_families, put_title

    last = _cross(record, None)
    across = [captured for captured in record.attentions if captured.kind == last.kind]
    received = torch.stack([captured.weights().float().sum(1).mean(0) for captured in across]).mean(0)
    tokens = [token.replace("\n", "⏎") for token in record.streams[record.stream_names(last)[1]].tokens]
    places, row, column = [], 0, 0
    for token in tokens:
        if column and column + display_width(token) > letters:
            row, column = row + 1, 0
        places.append((column, row))
        column += display_width(token)
    ax = _axes(ax, (max(5.0, letters * 0.08), 1.4 + 0.22 * (row + 1)))
    fonts = ["monospace", *font_families(frozenset("".join(tokens)))]
    light = ListedColormap(colormaps[COLOURS](np.linspace(0, 0.75, 256)))
    colours = ScalarMappable(Normalize(0, float(received.max())), light)
    shown = zip(tokens, drawable(tokens), places, received.tolist(), strict=True)
    for token, text, (left, top), weight in shown:
        ax.add_patch(
            Rectangle((left, top - 0.5), display_width(token), 0.95, color=colours.to_rgba(weight), linewidth=0)
        )
        ax.text(
            left,
            top,
            text,
            family=fonts,
            fontsize=9,
            va="center",
            parse_math=False,
            color="white" if weight > 0.6 * float(received.max()) else "black",
        )
    ax.set(xlim=(0, letters), ylim=(row + 0.6, -0.6))
    put_title(ax, record.note, fontsize=10)
    ax.axis("off")
    words = f"cross-attention summed over {last.Q} target tokens"
    ax.figure.colorbar(colours, ax=ax, location="bottom", shrink=0.5, aspect=40, label=words)
    return ax


def head_grid(record: Record, kind: Kind | None = None, *, side: int = 48, ax: Axes | None = None) -> Axes:
    """Plot every head as a small map, layers down and heads across, each scaled to its largest weight."""
    from regard.view.token_labels import put_title

    attentions = _of_kind(record, kind)
    across, gap = max(len(record.displayed_heads(captured)) for captured in attentions), max(1, side // 16)
    whole = np.full((len(attentions) * (side + gap), across * (side + gap)), np.nan, np.float32)
    for n, captured in enumerate(attentions):
        maps = captured.map((side, side))
        for m, head in enumerate(record.displayed_heads(captured)):
            small = maps[head].float()
            small = torch.nn.functional.interpolate(small[None, None], size=(side, side), mode="nearest")[0, 0]
            top, left = n * (side + gap), m * (side + gap)
            whole[top : top + side, left : left + side] = small / small.max().clamp(min=1e-12)
    ax = _axes(ax, (2.8 + 0.8 * across, 1 + 0.8 * len(attentions)))
    image = ax.imshow(whole, cmap=COLOURS, vmin=0, vmax=1, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, fraction=0.04, label="weight / largest weight of the head")
    middle = side / 2 - 0.5
    ax.set_xticks(
        [middle + m * (side + gap) for m in range(across)], [str(m) for m in record.heads or range(across)][:across]
    )
    ax.set_yticks(
        [middle + n * (side + gap) for n in range(len(attentions))], [f"{s.kind} {s.layer}" for s in attentions]
    )
    ax.set(xlabel="head", ylabel="layer")
    put_title(ax, record.title)
    ax.tick_params(length=0)
    for edge in ax.spines.values():
        edge.set_visible(False)
    return ax


MEASURES = {
    "entropy": ("entropy (nats)", lambda captured: captured.statistics.entropy),
    "distance": ("mean distance (tokens)", lambda captured: captured.statistics.distance),
    "max_logit": ("largest logit", lambda captured: captured.statistics.max_logit),
    "first": ("mass on the first key", lambda captured: captured.statistics.mass),
}


def profile(record: Record, measure: str = "entropy", kind: Kind | None = None, *, ax: Axes | None = None) -> Axes:
    """Plot a table of layers and heads: the mean of `measure` over the queries that have a visible key.

    measure: "entropy", "distance", "max_logit" or "first".
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, but is {measure!r}")
    words, take = MEASURES[measure]
    attentions = _of_kind(record, kind)
    if measure == "distance":
        attentions = [captured for captured in attentions if captured.kind != "cross"]
        if not attentions:
            raise ValueError("cross-attention has no distance, since its queries and keys come from two sequences")
    heads = sorted({head for captured in attentions for head in record.displayed_heads(captured)})
    across = len(heads)
    table = np.full((len(attentions), across), np.nan)
    for n, captured in enumerate(attentions):
        has_keys = captured.statistics.max_logit[captured.row].isfinite()
        means = take(captured)[captured.row].float().masked_fill(~has_keys, torch.nan).nanmean(-1)
        for head in record.displayed_heads(captured):
            table[n, heads.index(head)] = means[head]
    ax = _axes(ax, (2.5 + 0.55 * across, 1.5 + 0.4 * len(attentions)))
    image = ax.imshow(table, cmap="viridis", aspect="auto")
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for (n, m), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if value < middle else "black"
            ax.text(m, n, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)
    ax.set_xticks(range(across), [str(head) for head in heads])
    ax.set_yticks(range(len(attentions)), [f"{captured.kind} {captured.layer}" for captured in attentions])
    ax.set(xlabel="head", ylabel="layer", title=words)
    ax.figure.colorbar(image, ax=ax, fraction=0.04)
    return ax


def patches(
    record: Record, layer: int | str, head: int | None = None, *, query: int = 0, ax: Axes | None = None
) -> Axes:
    """Plot the weights of one query over the image; query 0 is the class token of a Vision Transformer."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    from regard.view.token_labels import put_title

    if record.image is None:
        raise ValueError("the record has no image; add one with record.set_image(pixels, grid, first=1)")
    captured, image = record.attention(layer, None), _image(record.image["href"])
    (rows, columns), first = record.image["grid"], record.image["first"]
    weights = captured.weights(heads=None if head is None else [head], rows=[query]).float().mean(0)[0]
    over = weights[first : first + rows * columns].reshape(rows, columns)
    ax = _axes(ax, (5, 5 * image.shape[0] / image.shape[1] + 0.4))
    extent = (0, columns, rows, 0)
    ax.imshow(image, extent=extent, cmap="gray")
    shade = (over / over.max().clamp(min=1e-12)).numpy()
    veil = 0.75 * (1 - np.sqrt(shade))  # darken the image where weights are small
    ax.imshow(np.zeros_like(shade), cmap="gray", extent=extent, alpha=veil, interpolation="nearest")
    if query >= first and record.stream_names(captured)[0] == record.image["stream"]:
        from matplotlib.patches import Rectangle

        at = query - first
        ax.add_patch(Rectangle((at % columns, at // columns), 1, 1, fill=False, edgecolor="tab:red", linewidth=2))
    ax.set(xticks=[], yticks=[])
    put_title(
        ax,
        f"{_title(captured, head)}, query {record.streams[record.stream_names(captured)[0]].tokens[query]}",
        fontsize=10,
    )
    greys = LinearSegmentedColormap.from_list("greys", ["0.25", "1"])
    norm = PowerNorm(0.5, 0, max(float(over.max()), 1e-12))
    ax.figure.colorbar(ScalarMappable(norm, greys), ax=ax, fraction=0.04, label="weight")
    return ax


def spectrogram(record: Record, layer: int | None = None, head: int | None = None, *, ax: Axes | None = None) -> Axes:
    """Plot the cross-attention between the tokens of a transcript and time, below the spectrogram."""
    if record.spectrogram is None:
        raise ValueError("the record has no spectrogram; add one with record.set_spectrogram(values, seconds)")
    captured, seconds = _cross(record, layer), record.spectrogram["seconds"]
    maps = captured.map((LARGEST, LARGEST)) if max(captured.Q, captured.K) > LARGEST else captured.weights().float()
    picture, (queries, keys) = maps.mean(0) if head is None else maps[head], record.stream_names(captured)
    text_stream = queries
    if record.spectrogram["stream"] == queries:  # speech synthesis: frames attend to the text
        picture, text_stream = picture.mT, keys
    tokens = record.streams[text_stream].tokens
    ax = _axes(ax, (8, 3 + 0.22 * min(len(tokens), 40)))
    extent = (0, seconds, len(tokens) - 0.5, -0.5)
    image = ax.imshow(picture.numpy(), cmap=COLOURS, vmin=0, aspect="auto", extent=extent, interpolation="nearest")
    _names(ax, "y", tokens)
    ax.figure.colorbar(image, ax=ax, fraction=0.04, label="weight")
    low = -0.5 - 0.03 * len(tokens)  # both share one pair of axes, so that their times line up
    high = low - 0.4 * len(tokens)
    spectrum = _image(record.spectrogram["href"])
    ax.imshow(spectrum, aspect="auto", extent=(0, seconds, low, high), cmap="gray_r", interpolation="nearest")
    ax.set(xlabel="seconds", ylabel="token", xlim=(0, seconds), ylim=(len(tokens) - 0.5, high))
    ax.set_title(_title(captured, head), fontsize=10)
    return ax


def mask(
    pattern: Mask, queries: int | None = None, keys: int | None = None, *, offset: int | None = None,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Plot a mask, dark where a query may attend to a key. Above 512 queries or keys, a cell is the fraction allowed.

    >>> import regard as rg, regard.view
    >>> rg.view.pictures.mask(rg.causal() & rg.window(3, 0), 16).get_title()
    'causal() & window(3, 0)'
    """
    if not isinstance(pattern, Mask):
        raise TypeError(
            f"pattern must be a mask such as causal(), but is {type(pattern).__name__}; "
            "for a bool tensor, try dense(tensor)"
        )
    expected = pattern.expected_size()
    queries = queries or (expected[0] if expected else pattern.preview_size())
    keys = keys or (expected[1] if expected else queries)
    frame = Frame(1, 1, queries, keys, keys - queries if offset is None else offset)
    pattern.check(frame)
    tall, wide = min(queries, LARGEST), min(keys, LARGEST)
    shares = torch.zeros(tall, wide)
    edges = [[n * size // count for n in range(count + 1)] for size, count in ((queries, tall), (keys, wide))]
    across = torch.repeat_interleave(torch.arange(wide), torch.tensor(edges[1]).diff())
    for n in range(tall):
        at = frame.indices(rows=slice(edges[0][n], edges[0][n + 1]))
        share = pattern.allows(at).expand(1, 1, edges[0][n + 1] - edges[0][n], keys)[0, 0].float().mean(0)
        shares[n].index_add_(0, across, share)
    shares /= torch.bincount(across)
    ax = _axes(ax, (4.5, 4.5 * min(2, max(0.5, queries / keys))))
    image = ax.imshow(
        shares.numpy(),
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0, keys, queries, 0),
        interpolation="nearest",
        aspect="auto",
    )
    ax.set(xlabel="key", ylabel="query")
    ax.locator_params(integer=True)
    if max(queries, keys) > LARGEST:
        ax.figure.colorbar(image, ax=ax, fraction=0.04, label="fraction of pairs allowed")
    title = repr(pattern)
    ax.set_title(title if len(title) <= 60 else title[:57] + "...", fontsize=9)
    return ax


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("regard.view.pictures needs matplotlib: pip install 'regard[view]'") from None
    return plt.figure(figsize=size, layout="constrained").add_subplot()


def _cells(ax: Axes, weights: Tensor, queries: list[str], keys: list[str]) -> None:
    image = ax.imshow(weights.numpy(), cmap=COLOURS, vmin=0, aspect="auto", interpolation="nearest")
    _names(ax, "y", queries)
    _names(ax, "x", keys)
    ax.figure.colorbar(image, ax=ax, fraction=0.04, label="weight")


def _names(ax: Axes, axis: str, tokens: Any) -> None:
    from regard.view.token_labels import name

    if len(tokens) <= LABELLED:
        name(ax, axis, tokens)


def _title(captured: CapturedAttention, head: int | None) -> str:
    return f"{KINDS[captured.kind]}, layer {captured.layer}, " + ("mean over heads" if head is None else f"head {head}")


def _of_kind(record: Record, kind: Kind | None) -> list[CapturedAttention]:
    if not record.attentions:
        raise ValueError(NOTHING)
    matching = [captured for captured in record.attentions if kind in (None, captured.kind)]
    if not matching:
        kinds = ", ".join(sorted({captured.kind for captured in record.attentions}))
        raise ValueError(f"no attention of kind {kind!r} was captured; the record has {kinds}")
    return matching


def _cross(record: Record, layer: int | None) -> CapturedAttention:
    cross = [captured for captured in record.attentions if captured.kind == "cross"]
    if not cross:
        raise ValueError("there is no cross-attention in the record; use heatmap(record, layer) for self-attention")
    return cross[-1] if layer is None else record.attention(layer, "cross")


def _image(href: str) -> np.ndarray:
    import base64
    import io

    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(href.partition(",")[2]))) as image:
        return np.array(image)
