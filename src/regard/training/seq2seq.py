"""What tasks share that write a text for a text: pairs, and beam search over many sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batches import Ragged, in_order
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.text import too_long_message
from regard.data.tokenizer import BEGIN, END, MASK, PAD, encode, special_id
from regard.errors import BadRows
from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Beam, Packed
from regard.nn.generate import Strategy
from regard.progress import track
from regard.training.pretrained import EncoderOptions
from regard.training.task import Batch


def transformer_config(processor: Processor, shape: EncoderOptions, **more: Any) -> TransformerConfig:
    """An encoder-decoder over the tokens of a kit, of the size that the options of a task say."""
    tokenizer = processor.require_tokenizer()
    return TransformerConfig(
        vocabulary=tokenizer.get_vocab_size(),
        d_model=shape.d_model,
        layers=shape.layers,
        heads=shape.heads,
        d_hidden=4 * shape.d_model,
        start=special_id(tokenizer, BEGIN),
        stop=special_id(tokenizer, END),
        suppress_tokens=tuple(special_id(tokenizer, name) for name in (PAD, BEGIN, MASK)),
        dropout=shape.dropout,
        **more,
    )


class SourceTargetPairs:
    """Sources and targets; a target has the tokens for begin and end around it."""

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.sources, self.places = Ragged(sources), places
        self.before, self.after = Ragged([ids[:-1] for ids in targets]), Ragged([ids[1:] for ids in targets])
        self.sizes = self.sources.lengths + self.before.lengths

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        source, before = self.sources.pack(chosen), self.before.pack(chosen)
        after = self.after.pack(chosen).values
        return Batch((source, before), after, len(source.values) + len(after), len(after))


def encode_pairs(
    processor: Processor,
    rows: Sequence[Row],
    bad: BadRows,
    *,
    longest: int,
    max_new_tokens: int | None = None,
    cut: bool = False,
    more: str = "",
) -> SourceTargetPairs:
    """The first two columns of rows; what is too long is bad, or cut where it is a source. max_new_tokens: of
    targets."""
    sources, kept = encode_sources(processor, rows, bad, longest=longest, cut=cut, more=more)
    begin, end = special_id(processor.require_tokenizer(), BEGIN), special_id(processor.require_tokenizer(), END)
    targets = [
        np.concatenate([[begin], ids, [end]])
        for ids in encode(processor.require_tokenizer(), [rows[n].values[1] for n in kept])
    ]
    good, most = [], max_new_tokens or longest
    for n, (row, ids) in enumerate(zip(kept, targets, strict=True)):
        if len(ids) - 1 > most:
            bad.add(
                too_long_message(
                    rows[row].place, len(ids) - 1, most, option="max-new-tokens" if max_new_tokens else "longest"
                )
            )
        else:
            good.append(n)
    return SourceTargetPairs(
        [sources[n] for n in good], [targets[n] for n in good], [rows[kept[n]].place for n in good]
    )


def encode_sources(
    processor: Processor, rows: Sequence[Row], bad: BadRows, *, longest: int, cut: bool = False, more: str = ""
) -> tuple[list[np.ndarray], list[int]]:
    """Ids of the first column with the token for the end, and which rows they are of."""
    end, found, kept = special_id(processor.require_tokenizer(), END), [], []
    for n, ids in enumerate(encode(processor.require_tokenizer(), [row.values[0] for row in rows])):
        if len(ids) + 1 > longest:
            if not cut:
                bad.add(too_long_message(rows[n].place, len(ids) + 1, longest, more))
                continue
            ids = ids[: longest - 1]
        found.append(np.append(ids, end))
        kept.append(n)
    return found, kept


class GeneratedTarget(NamedTuple):
    """What a model wrote for source `number`, and how sure it is."""

    number: int
    ids: Tensor
    score: float


def generate_targets(
    model: Transformer, sources: Sequence[np.ndarray], *, beam: int, max_new_tokens: int
) -> Iterator[GeneratedTarget]:
    """The targets of sources, those of like length together; at most `max_new_tokens` tokens, and about twice the
    source's."""
    ragged, device = Ragged(sources), next(model.parameters()).device
    strategy: Strategy | None = Beam(beam) if beam > 1 else None
    for chosen in track(in_order(ragged.lengths, budget=512)) if len(ragged) else ():
        packed = ragged.pack(chosen)
        packed = packed.with_values(packed.values.to(device))
        generated = model.generate(
            packed, max_new_tokens=min(max_new_tokens, 2 * max(packed.lengths) + 16), strategy=strategy
        )
        for n, ids, score in zip(
            chosen.tolist(), generated, sequence_probabilities(model, packed, generated), strict=True
        ):
            yield GeneratedTarget(n, ids, score)


@torch.no_grad()
def sequence_probabilities(model: Transformer, source: Packed, targets: Sequence[Tensor]) -> list[float]:
    """The probability of each target, token for token: the geometric mean, its end included."""
    start, stop = (
        torch.tensor([token], device=source.values.device) for token in (model.config.start, model.config.stop)
    )
    before = [torch.cat((start, ids)) for ids in targets]
    logits = model(source, Packed(torch.cat(before), tuple(map(len, before)))).values
    after = torch.cat([torch.cat((ids, stop)) for ids in targets])
    log_probabilities = -F.cross_entropy(logits.float(), after, reduction="none")
    return [float(part.mean().exp()) for part in log_probabilities.split([len(ids) for ids in before])]
