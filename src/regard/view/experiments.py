"""Experiments on a record: another batch row, the captured call with changes, and generation under changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.nn import LogitsProcessor
from regard.nn.generate import Beam, beam_hypotheses
from regard.view.capture import capture
from regard.view.changes import Change, ablate
from regard.view.inputs import token_texts
from regard.view.model_call import ModelCall
from regard.view.record import GENERATED, Record, Stream

NO_CALL = (
    "this record cannot be run again: it needs one forward call of the whole model, without a cache; capture "
    "`model(ids)` instead of `model.generate(ids)`"
)
Edits = Mapping[str, Mapping[int, int | str]]


def select_row(record: Record, row: int) -> Record:
    """Return the record with another batch row shown."""
    if not record.attentions:
        raise ValueError("nothing was captured, so there are no batch rows")
    other = copy(record)
    other.attentions = [captured.select(row) for captured in record.attentions]
    other.row, other._tokens, other.inputs = row, {}, {}
    for name in ("head_patterns", "document"):
        other.__dict__.pop(name, None)
    for role in ("source", "target"):
        if record.call is not None and role in record.inputs and record.inputs[role].dim() == 1:
            other.inputs[role] = record.call.ids(role, row)
    if record.output is not None and record.output.kind == "tokens":
        other.next_token = record.output.top(record.output.last, row, 1)[0][0]
    return other if record.tokenizer is None else other.decode(record.tokenizer)


def ablate_record(record: Record, changes: Sequence[Change], tokens: Edits) -> Record:
    """Run the captured call again with changed attention and other tokens."""
    call, streams = require_call(record), dict(record._tokens)
    for role, edits in tokens.items():
        for position, token in edits.items():
            ids = call.ids(role, record.row).clone()
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < len(ids):
                raise ValueError(f"positions of {role} tokens are 0 ... {len(ids) - 1}, but one is {position!r}")
            ids[position] = token_id(record, token)
            call = call.replace_ids(role, ids, record.row)
            if role in streams:
                streams[role] = _rename(record, streams[role], position, int(ids[position]))
            if role == "target" and GENERATED in streams and position:
                streams[GENERATED] = _rename(record, streams[GENERATED], position - 1, int(ids[position]))
    changed = _run(record, call, (*record.changes, *resolve(record, changes)))
    _check_same(record, changed)
    changed._tokens = streams
    return changed


def resolve(record: Record, changes: Sequence[Change]) -> tuple[Change, ...]:
    """Replace layers by module names; raise if a change does not fit the attentions of the record."""
    resolved = []
    for change in changes:
        if not isinstance(change, Change):
            raise TypeError(f"changes must be Change objects, but one is {type(change).__name__}")
        chosen = [
            captured for number, captured in enumerate(record.attentions)
            if change.applies_to(captured.name, captured.layer, captured.kind)
            or (change.layer == str(number) and change.kind in (None, captured.kind))
        ]  # fmt: skip
        if not chosen:
            available = ", ".join(f"{captured.kind} {captured.layer}" for captured in record.attentions)
            raise ValueError(f"{change} applies to no attention; the record has {available}")
        for captured in chosen:
            heads = change.head
            assert not isinstance(heads, int)
            if heads is not None and max(heads) >= captured.heads:
                raise ValueError(f"head must be in 0 ... {captured.heads - 1}, but is {max(heads)}")
            for query, key in (*change.forbid, *change.force):
                if query >= captured.Q or key >= captured.K:
                    raise ValueError(
                        f"the pair ({query}, {key}) is outside of {captured.name}, which has {captured.Q} queries and "
                        f"{captured.K} keys"
                    )
            resolved.append(replace(change, layer=captured.name, kind=None))
    return tuple(resolved)


def token_id(record: Record, token: int | str) -> int:
    """Return the id of a token, given as an id or as the text of exactly one token."""
    if isinstance(token, int) and not isinstance(token, bool):
        if token < 0:
            raise ValueError(f"a token id must not be negative, but is {token}")
        return token
    if not isinstance(token, str):
        raise TypeError(f"a token must be an id or a text, but is {type(token).__name__}")
    if record.tokenizer is None:
        raise ValueError("the record has no tokenizer; pass a token id, or call record.decode(tokenizer) first")
    tokenizer: Any = getattr(record.tokenizer, "backend_tokenizer", record.tokenizer)
    known = tokenizer.token_to_id(token)
    # the name of a byte-level token is not its text: "é" is the byte E9, half a letter
    if known is not None and token_texts(tokenizer, [known])[0] == [token.replace("▁", " ")]:
        return known
    encoding = tokenizer.encode(token, add_special_tokens=False)
    ids = [id_ for id_, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
    if len(ids) != 1:
        pieces = ", ".join(repr(text) for text in token_texts(tokenizer, ids)[0]) or "no token"
        raise ValueError(f"{token!r} must be one token, but is {pieces}; for other lengths, change the text")
    return ids[0]


def generate_records(record: Record, max_new_tokens: int, beams: int) -> list[Record]:
    """Generate by running the whole call in every step, and capture one pass over each hypothesis."""
    for name, value, most in (("max_new_tokens", max_new_tokens, 1024), ("beams", beams, 32)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name} must be in 1 ... {most}, but is {value!r}")
    call = require_call(record)
    if not can_generate(record):
        raise ValueError(
            "only a language model or a translator generates tokens, from a batch of one; capture one sequence of such "
            "a model"
        )
    role = "target" if "target" in record.inputs else "source"
    prompt = call.ids(role)
    call = call.drop_masks(len(prompt))
    prompt = prompt[:1] if role == "target" else prompt
    stop = _stop_tokens(call)
    with ablate(call.model, *record.changes):
        state: Any = _UncachedState(call, role)
        suppressed = getattr(getattr(call.model, "config", None), "suppress_tokens", None) or ()
        (hypotheses,) = beam_hypotheses(
            state, prompt[None], Beam(beams), max_new_tokens=max_new_tokens, stop=stop,
            processor=LogitsProcessor(bad_words=tuple((token,) for token in suppressed)) if suppressed else None,
        )  # fmt: skip
    records = []
    for score, tokens in hypotheses:
        ids = torch.cat([prompt, tokens])
        generated = _run(record, call.replace_ids(role, ids), record.changes)
        generated.score, generated.prompt = score, len(prompt)
        if record.tokenizer is not None:
            generated.decode(record.tokenizer)
            generated.note = record.tokenizer.decode(tokens.tolist())
        records.append(generated)
    return records


class _UncachedState:
    """A state for `beam_hypotheses` that runs the captured call on all tokens in every step, one beam after another."""

    def __init__(self, call: ModelCall, role: str) -> None:
        self.call, self.role = call, role
        self.ids: Tensor | None = None

    def step(self, ids: Tensor) -> Tensor:
        from regard.view.model_output import ModelOutput

        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        last = []
        for row in self.ids:
            output = ModelOutput.read(self.call.model, self.call.replace_ids(self.role, row).run())
            assert output is not None
            last.append(output.values[0, -1])
        return torch.stack(last)

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        assert self.ids is not None
        self.ids = self.ids[rows]


def require_call(record: Record) -> ModelCall:
    """Return the call of a record; raise if running it again would not give the same result."""
    if record.call is None:
        raise ValueError(NO_CALL)
    record.call.check()
    return record.call


def _run(record: Record, call: ModelCall, changes: tuple[Change, ...]) -> Record:
    with ablate(call.model, *changes), capture(call.model, heads=record.heads) as changed:
        call.run()
    changed.title, changed.text, changed.note = record.title, record.text, ""
    changed.image, changed.spectrogram, changed.tokenizer = record.image, record.spectrogram, record.tokenizer
    names = {captured.name for captured in record.attentions}
    changed.attentions = [captured.select(record.row) for captured in changed.attentions if captured.name in names]
    changed.row = record.row
    return changed


def rerun(record: Record, changes: tuple[Change, ...]) -> Record:
    """Run the captured call of a record again under other changes than its own."""
    other = _run(record, require_call(record), changes)
    _check_same(record, other)
    other.note, other.prompt, other._tokens = record.note, record.prompt, record._tokens
    return other if record.tokenizer is None else other.decode(record.tokenizer)


def _check_same(record: Record, changed: Record) -> None:
    """Raise if running the call again computed other attentions than those of the record."""
    ours, theirs = (
        [(one.name, one.kind, one.heads, one.Q, one.K, one.calls[0].query.dtype) for one in each.attentions]
        for each in (record, changed)
    )
    if ours != theirs:
        raise ValueError(
            "running the captured call again computed other attentions than those recorded: the record holds several "
            "calls of the model, or it was captured under autocast; capture one forward call"
        )


def _rename(record: Record, stream: Stream, position: int, token: int) -> Stream:
    """Return a stream with the text of another token at a position."""
    texts, special = ([f"#{token}"], []) if record.tokenizer is None else token_texts(record.tokenizer, [token])
    others = [n for n in stream.special if n != position]
    return Stream(
        (*stream.tokens[:position], texts[0], *stream.tokens[position + 1 :]),
        tuple(sorted([*others, position])) if special else tuple(others),
    )


def can_generate(record: Record) -> bool:
    """Whether the model predicts next tokens, and its captured call can be run again."""
    decodes = any(captured.kind == "decoder" for captured in record.attentions)
    tokens = record.output is not None and record.output.kind == "tokens"
    return (
        record.call is not None and bool(record.call.roles) and tokens and decodes and record.attentions[0].batch == 1
    )


def _stop_tokens(call: ModelCall) -> tuple[int, ...]:
    for config in (getattr(call.model, name, None) for name in ("generation_config", "config")):
        for name in ("stop", "eos_token_id"):
            if (stop := getattr(config, name, None)) is not None:
                return (stop,) if isinstance(stop, int) else tuple(stop)
    return ()
