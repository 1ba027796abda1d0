"""The cross-attention head that aligns a generated text with its source best."""

from __future__ import annotations

from torch import Tensor

from regard.view.record import Record


def best_head(record: Record, layer: int | None = None) -> tuple[int, int]:
    """Return (index in `record.attentions`, head) of the cross-attention head that aligns best.

    layer: search one layer only; all layers by default.

    The score of a head is the mean over rows of the largest weight times the mean over columns of the largest weight:
    it is 1 where generated and source tokens attend one to one. Special tokens are left out, since idle heads put
    their weight on them.
    """
    chosen = [
        n
        for n, captured in enumerate(record.attentions)
        if captured.kind == "cross" and layer in (None, captured.layer)
    ]
    if not chosen:
        where = "the record" if layer is None else f"layer {layer}"
        raise ValueError(f"alignment needs cross-attention, but there is no cross-attention in {where}")
    scores = {
        (n, head): score
        for n in chosen
        for head, score in enumerate(_scores(record, n).tolist())
        if head in record.displayed_heads(record.attentions[n])
    }
    return max(scores, key=lambda each: scores[each])


def _scores(record: Record, number: int) -> Tensor:
    """Return the alignment score of each head, (H,)."""
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
