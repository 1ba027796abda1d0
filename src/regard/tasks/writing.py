"""What tasks share that write a text for a text: pairs, and beam search over many sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Beam, Packed
from regard.nn.generate import Strategy
from regard.tasks.batches import Ragged, in_order
from regard.tasks.data import Row
from regard.tasks.stages import track
from regard.tasks.task import Batch, Kit
from regard.tasks.texts import Shape, too_long
from regard.tasks.tokens import BEGIN, END, MASK, PAD, encode, special
from regard.tasks.trouble import Bad


def config_of(kit: Kit, shape: Shape, **more: Any) -> TransformerConfig:
    """An encoder-decoder over the tokens of a kit, of the size that the options of a task say."""
    tokenizer = kit.texts()
    return TransformerConfig(
        vocabulary=tokenizer.get_vocab_size(),
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        hidden=4 * shape.width,
        start=special(tokenizer, BEGIN),
        stop=special(tokenizer, END),
        never=tuple(special(tokenizer, name) for name in (PAD, BEGIN, MASK)),
        dropout=shape.dropout,
        **more,
    )


class Pairs:
    """Sources and targets; a target has the tokens for begin and end around it."""

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.sources, self.places = Ragged(sources), places
        self.before, self.after = Ragged([ids[:-1] for ids in targets]), Ragged([ids[1:] for ids in targets])
        self.sizes = self.sources.lengths + self.before.lengths

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        source, before = self.sources.pack(chosen), self.before.pack(chosen)
        after = self.after.pack(chosen).values
        return Batch((source, before), after, len(source.values) + len(after), len(after))


def paired(
    kit: Kit,
    rows: Sequence[Row],
    bad: Bad,
    *,
    longest: int,
    limit: int | None = None,
    cut: bool = False,
    more: str = "",
) -> Pairs:
    """The first two columns of rows; what is too long is bad, or cut where it is a source. limit: of targets."""
    sources, kept = sources_of(kit, rows, bad, longest=longest, cut=cut, more=more)
    begin, end = special(kit.texts(), BEGIN), special(kit.texts(), END)
    targets = [np.concatenate([[begin], ids, [end]]) for ids in encode(kit.texts(), [rows[n].values[1] for n in kept])]
    good, most = [], limit or longest
    for n, (row, ids) in enumerate(zip(kept, targets, strict=True)):
        if len(ids) - 1 > most:
            bad(too_long(rows[row].place, len(ids) - 1, most, option="limit" if limit else "longest"))
        else:
            good.append(n)
    return Pairs([sources[n] for n in good], [targets[n] for n in good], [rows[kept[n]].place for n in good])


def sources_of(
    kit: Kit, rows: Sequence[Row], bad: Bad, *, longest: int, cut: bool = False, more: str = ""
) -> tuple[list[np.ndarray], list[int]]:
    """Ids of the first column with the token for the end, and which rows they are of."""
    end, found, kept = special(kit.texts(), END), [], []
    for n, ids in enumerate(encode(kit.texts(), [row.values[0] for row in rows])):
        if len(ids) + 1 > longest:
            if not cut:
                bad(too_long(rows[n].place, len(ids) + 1, longest, more))
                continue
            ids = ids[: longest - 1]
        found.append(np.append(ids, end))
        kept.append(n)
    return found, kept


class Written(NamedTuple):
    """What a model wrote for source `number`, and how sure it is."""

    number: int
    ids: Tensor
    score: float


def written(model: Transformer, sources: Sequence[np.ndarray], *, beam: int, limit: int) -> Iterator[Written]:
    """The targets of sources, those of like length together; at most `limit` tokens, and about twice the source's."""
    ragged, device = Ragged(sources), next(model.parameters()).device
    strategy: Strategy | None = Beam(beam) if beam > 1 else None
    for chosen in track(in_order(ragged.lengths, budget=512)) if len(ragged) else ():
        packed = ragged.pack(chosen)
        packed = packed.holding(packed.values.to(device))
        made = model.generate(packed, limit=min(limit, 2 * max(packed.lengths) + 16), strategy=strategy)
        for n, ids, score in zip(chosen.tolist(), made, sureness(model, packed, made), strict=True):
            yield Written(n, ids, score)


@torch.no_grad()
def sureness(model: Transformer, source: Packed, targets: Sequence[Tensor]) -> list[float]:
    """The probability of each target, token for token: the geometric mean, its end included."""
    start, stop = (
        torch.tensor([token], device=source.values.device) for token in (model.config.start, model.config.stop)
    )
    before = [torch.cat((start, ids)) for ids in targets]
    logits = model(source, Packed(torch.cat(before), tuple(map(len, before)))).values
    after = torch.cat([torch.cat((ids, stop)) for ids in targets])
    said = -F.cross_entropy(logits.float(), after, reduction="none")
    return [float(part.mean().exp()) for part in said.split([len(ids) for ids in before])]
