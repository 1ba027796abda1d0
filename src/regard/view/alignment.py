"""Which head of the cross-attention aligns a text with its source."""

from __future__ import annotations

from torch import Tensor

from regard.view.record import Record


def best_head(record: Record, layer: int | None = None) -> tuple[int, int]:
    """The number of the cross-attention, and its head, that align best; of all layers, or of one.

    An alignment is good where every generated word looks at one word of the source, and every word of the source is
    looked at by one: the mean over rows of the largest weight, times the mean over columns of the largest weight.
    Special tokens count in neither, since heads with nothing to look at rest on them.
    """
    chosen = [
        n
        for n, captured in enumerate(record.attentions)
        if captured.kind == "cross" and layer in (None, captured.layer)
    ]
    if not chosen:
        raise ValueError(f"there is no cross-attention in {'the record' if layer is None else f'layer {layer}'}")
    scores = {
        (n, head): score
        for n in chosen
        for head, score in enumerate(_scores(record, n).tolist())
        if head in record.displayed_heads(record.attentions[n])
    }
    return max(scores, key=lambda each: scores[each])


def _scores(record: Record, number: int) -> Tensor:
    """(H,)"""
    captured = record.attentions[number]
    queries, keys = (record.streams[name] for name in record.stream_names(captured))
    rows, columns = (
        [n for n in range(len(stream.tokens)) if n not in stream.special] or list(range(len(stream.tokens)))
        for stream in (queries, keys)
    )
    if len(rows) * len(columns) <= 1 << 20:
        weights = captured.weights(rows=rows, columns=columns).float()
    else:
        weights = captured.map((512, 512))
    return weights.amax(-1).mean(-1) * weights.amax(-2).mean(-1)
