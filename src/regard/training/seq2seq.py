"""Sequence-to-sequence tasks: pairs of texts, and beam search over many sources."""

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
from regard.nn import Beam, Greedy, LogitsProcessor, Packed
from regard.nn.generate import Strategy
from regard.progress import track
from regard.training.pretrained import EncoderOptions
from regard.training.task import Batch


def transformer_config(processor: Processor, shape: EncoderOptions, **more: Any) -> TransformerConfig:
    """Configuration of an encoder-decoder for the tokenizer of a processor and the options of a task."""
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
    """Sources and targets; a target includes begin and end tokens."""

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
    """Encode the first two columns as sources and targets; too long ones are bad, but `cut` truncates sources.

    max_new_tokens: maximum length of targets; by default `longest`.
    """
    sources, kept = encode_sources(processor, rows, bad, longest=longest, cut=cut, more=more)
    begin, end = special_id(processor.require_tokenizer(), BEGIN), special_id(processor.require_tokenizer(), END)
    targets = [
        np.concatenate([[begin], ids, [end]])
        for ids in encode(processor.require_tokenizer(), [rows[n].values[1] for n in kept])
    ]
    good, limit = [], max_new_tokens or longest
    for n, (row, ids) in enumerate(zip(kept, targets, strict=True)):
        if len(ids) - 1 > limit:
            bad.add(
                too_long_message(
                    rows[row].place, len(ids) - 1, limit, option="max-new-tokens" if max_new_tokens else "longest"
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
    """Encode the first column with an end token, and return the indices of the rows."""
    end, sources, kept = special_id(processor.require_tokenizer(), END), [], []
    for n, ids in enumerate(encode(processor.require_tokenizer(), [row.values[0] for row in rows])):
        if len(ids) + 1 > longest:
            if not cut:
                bad.add(too_long_message(rows[n].place, len(ids) + 1, longest, more))
                continue
            ids = ids[: longest - 1]
        sources.append(np.append(ids, end))
        kept.append(n)
    return sources, kept


class GeneratedTarget(NamedTuple):
    """Output for source `number`, with the probability per token."""

    number: int
    ids: Tensor
    score: float


def generate_targets(
    model: Transformer, sources: Sequence[np.ndarray], *, strategy: Strategy, max_new_tokens: int,
    processor: LogitsProcessor | None = None, short: bool = True,
) -> Iterator[GeneratedTarget]:  # fmt: skip
    """Generate targets of at most `max_new_tokens`, in batches of similar source length.

    short: whether targets are also limited to about twice the length of the source.
    """
    ragged, device = Ragged(sources), next(model.parameters()).device
    for chosen in track(in_order(ragged.lengths, budget=512)) if len(ragged) else ():
        packed = ragged.pack(chosen)
        packed = packed.with_values(packed.values.to(device))
        most = min(max_new_tokens, 2 * max(packed.lengths) + 16) if short else max_new_tokens
        generated = model.generate(packed, max_new_tokens=most, strategy=strategy, processor=processor)
        for n, ids, score in zip(
            chosen.tolist(), generated, sequence_probabilities(model, packed, generated), strict=True
        ):
            yield GeneratedTarget(n, ids, score)


def beam_strategy(beam: int) -> Strategy:
    """Return beam search of this width, or greedy generation for one beam."""
    return Beam(beam) if beam > 1 else Greedy()


@torch.no_grad()
def sequence_probabilities(model: Transformer, source: Packed, targets: Sequence[Tensor]) -> list[float]:
    """Geometric mean of the token probabilities of each target, including the end token."""
    config = model.config
    start, stop = (
        torch.tensor(tokens, device=source.values.device) for tokens in ([config.start, *config.prompt], [config.stop])
    )
    before = [torch.cat((start, ids)) for ids in targets]
    logits = model(source, Packed(torch.cat(before), tuple(map(len, before)))).values
    after = torch.cat([torch.cat((start[1:], ids, stop)) for ids in targets])
    log_probabilities = -F.cross_entropy(logits.float(), after, reduction="none")
    parts = log_probabilities.split([len(ids) for ids in before])
    return [float(part[len(config.prompt) :].mean().exp()) for part in parts]  # the prompt is not predicted
