"""Subjects of `regard.nn` with a recurrent state, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from regard.nn import ACTIVATIONS, LayerContext
from tools.differential.draw import Draw
from tools.differential.families.components import Described, feedforward, recurrent, residual, routing
from tools.differential.families.modules import chunks, family, hidden, stack_forms
from tools.differential.recurrent import short_convolution as reference_convolution
from tools.differential.subject import (
    Form,
    Item,
    Subject,
    alone,
    as_batch_of_one,
    forward,
    fresh,
    lengths_of,
    noise,
    sequence_forms,
    stepwise_names,
)

CAUSAL = Described(lambda: rg.Attention(mask=rg.causal()), causal=True, shifts=True)


def recurrent_forms(draw: Draw, lengths: Sequence[int]) -> dict[str, Form]:
    """Forms of what takes (B, N, d_model) and has a state."""

    def call(module: nn.Module, x: Tensor, *, context: LayerContext | None = None, cache: Any = None) -> Tensor:
        return module(x, context=context, cache=cache)

    def masked(module: nn.Module, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return module(x, mask=rg.nn.key_mask(mask))

    filler = draw.pick("filler", ["zeros", "noise", "nan"])
    with_holes = sequence_forms(
        draw, masked, lengths, kinds=["holes"], packs=False, gaps=True, filler="noise" if filler == "nan" else filler
    )
    return with_holes | stack_forms(draw, lengths, call, lambda module: module.cache(), CAUSAL)


@family
def recurrent_layer(draw: Draw) -> Subject:
    d_model, lengths = draw.pick("d_model", [8, 12, 32]), lengths_of(draw)
    plain = as_batch_of_one(forward)
    forms = {"alone": alone(plain)} | recurrent_forms(draw, lengths)
    items = [(x,) for x in hidden(draw, lengths, d_model)]
    build = partial(recurrent, draw, d_model)
    return Subject(fresh(build, draw), items, plain, forms, stepwise_names(forms), compiles=frozenset({"alone"}))


@family
def hybrid_encoder(draw: Draw) -> Subject:
    """Layers with a state among layers of attention."""
    d_model, lengths = draw.pick("d_model", [8, 12, 32]), lengths_of(draw)
    kinds = draw.pick("layers", ["s", "sa", "as", "ssa"])

    def build() -> nn.Module:
        blocks = []
        for n, kind in enumerate(kinds):
            own: nn.Module = rg.nn.MultiHeadAttention(d_model, 2, attend=CAUSAL.make())
            if kind == "s":
                own = recurrent(draw, d_model, f"layer {n}")
            blocks.append(rg.nn.Block(own, feedforward(draw, d_model), residual=residual(draw, d_model)))
        return rg.nn.Encoder(blocks, norm=nn.LayerNorm(d_model), repeat=draw.pick("repeat", [1, 1, 2]))

    plain = as_batch_of_one(forward)
    forms = {"alone": alone(plain)} | recurrent_forms(draw, lengths)
    items = [(x,) for x in hidden(draw, lengths, d_model)]
    return Subject(fresh(build, draw), items, plain, forms, stepwise_names(forms), compiles=frozenset({"alone"}))


@family
def short_convolution(draw: Draw) -> Subject:
    channels, lengths = draw.pick("channels", [1, 4, 20]), lengths_of(draw)
    kernel_size, bias = draw.pick("kernel size of the convolution", [4, 1, 2]), draw.pick("bias", [False, True])
    build = partial(rg.nn.ShortConvolution, channels, kernel_size, bias=bias)

    def plain(module: Any, item: Item) -> Tensor:
        return reference_convolution(module, item[0][None])[0]

    def call(module: nn.Module, item: Item) -> Tensor:
        return module(item[0][None])[0][0]

    def stepwise(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        result = []
        for (x,) in items:
            past, rows = None, []
            for piece in x.split(chunks(draw, len(x))):
                row, past = module(piece[None], past)
                rows.append(row[0])
            result.append(torch.cat(rows))
        return result

    def packed(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        batch = rg.pack([x for (x,) in items])
        return rg.unpack(batch.with_values(module(batch.values[None], None, batch.positions)[0][0]))

    forms: dict[str, Form] = {"alone": alone(call), "stepwise": stepwise, "packed": packed}
    return Subject(fresh(build, draw), [(x,) for x in hidden(draw, lengths, channels)], plain, forms)


@family
def experts(draw: Draw) -> Subject:
    lengths, d_model, count = lengths_of(draw), draw.pick("d_model", [8, 12]), draw.pick("experts", [3, 1, 4])
    way, shared = routing(draw, count), draw.pick("shared expert", [False, True])

    def build() -> nn.Module:
        module = rg.nn.Experts(
            d_model, draw.pick("d_hidden", [8, 24]), count=count, per_token=min(count, draw.pick("per token", [2, 1])),
            limit=draw.pick("limit", [None, 0.5]), bias=draw.pick("bias", [False, True]), routing=way,
            activation=ACTIVATIONS[draw.pick("activation", sorted(ACTIVATIONS))],
            shared=feedforward(draw, d_model) if shared else None,
            shared_gate=shared and draw.pick("shared gate", [False, True]),
        )  # fmt: skip
        if module.correction is not None:
            module.correction.copy_(0.3 * noise(draw, count, name="correction"))
        return module

    plain = as_batch_of_one(forward)

    def packed(module: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        return list(module(torch.cat([x for (x,) in items])).split([len(x) for (x,) in items]))

    items = [(x,) for x in hidden(draw, lengths, d_model)]
    forms: dict[str, Form] = {"alone": alone(plain), "packed": packed}
    return Subject(fresh(build, draw), items, plain, forms, compiles=frozenset({"packed"}))
