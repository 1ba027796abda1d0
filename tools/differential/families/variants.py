"""Subjects whose heads are not those of multi-head attention: differential, talking, latent, shared by layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import regard as rg
from regard.nn import LayerContext
from tools.differential.draw import Draw
from tools.differential.families.components import (
    Described,
    attention,
    described,
    feedforward,
    output_gate,
    residual,
    rotary,
    sizes,
    without_width,
)
from tools.differential.families.modules import family, hidden, stack_forms
from tools.differential.subject import Subject, alone, as_batch_of_one, forward, fresh, lengths_of, stepwise_names


def layer(draw: Draw, d_model: int, about: Described, build: Callable[[], nn.Module]) -> Subject:
    """The subject of a layer with a mask, positions and a cache."""
    lengths, plain = lengths_of(draw), as_batch_of_one(forward)

    def call(module: nn.Module, x: Tensor, *, context: LayerContext | None = None, cache: Any = None) -> Tensor:
        return module(x, context=context, cache=cache)

    forms = stack_forms(draw, lengths, call, lambda module: module.cache(), about)
    items = [(x,) for x in hidden(draw, lengths, d_model)]
    forms = {"alone": alone(plain)} | forms
    return Subject(fresh(build, draw), items, plain, forms, stepwise_names(forms), compiles=frozenset({"alone"}))


@family
def differential_attention(draw: Draw) -> Subject:
    size = sizes(draw)
    about = described(draw, 2 * size.heads, size.d_head, 2 * size.d_head)

    def build() -> nn.Module:
        return rg.nn.DifferentialAttention(
            size.d_model, size.heads, kv_heads=size.kv_heads, d_head=size.d_head,
            lambda_init=draw.pick("lambda_init", [0.8, 0.2]), attend=without_width(about.make()),
            rotary=rotary(draw, size.d_head), gate=output_gate(draw, size.d_model, size.heads, 2 * size.d_head),
        )  # fmt: skip

    return layer(draw, size.d_model, about, build)


@family
def talking_heads_attention(draw: Draw) -> Subject:
    size = sizes(draw)
    about = described(draw, size.heads, size.d_head, size.d_value)

    def build() -> nn.Module:
        return rg.nn.TalkingHeadsAttention(
            size.d_model, size.heads, d_head=size.d_head, d_value=size.d_value, attend=without_width(about.make()),
            rotary=rotary(draw, size.d_head), gate=output_gate(draw, size.d_model, size.heads, size.d_value),
        )  # fmt: skip

    return layer(draw, size.d_model, about, build)


@family
def latent_attention(draw: Draw) -> Subject:
    size = sizes(draw)
    about = described(draw, size.heads, size.d_head, size.d_value)

    def build() -> nn.Module:
        turned = draw.pick("rotated part", [4, 2])
        interleaved = draw.pick("rotation", [True, False, None])
        return rg.nn.LatentAttention(
            size.d_model, size.heads, d_latent=draw.pick("d_latent", [4, 10]), d_head=size.d_head,
            d_query_latent=draw.pick("d_query_latent", [None, 6]), d_rotary=turned, d_value=size.d_value,
            attend=without_width(about.make()), absorb=draw.pick("absorb", [None, False, True]),
            rotary=None if interleaved is None else rg.nn.Rotary(100.0, interleaved=interleaved),
            bias=draw.pick("projection bias", [False, True]),
        )  # fmt: skip

    return layer(draw, size.d_model, about, build)


@family
def cross_layer_attention(draw: Draw) -> Subject:
    """A stack in which one or two layers read the keys and values of the first."""
    size = sizes(draw)
    about = described(draw, size.heads, size.d_head, size.d_value)

    def build() -> nn.Module:
        owner = attention(draw, size, about.make())
        layers = [owner] + [
            rg.nn.CrossLayerAttention(
                owner,
                attend=draw.pick("own description", [None, about.make()]),
                gate=output_gate(draw, size.d_model, size.heads, size.d_value),
            )
            for _ in range(draw.pick("readers", [1, 2]))
        ]
        blocks = [
            rg.nn.Block(each, feedforward(draw, size.d_model), residual=residual(draw, size.d_model)) for each in layers
        ]
        return rg.nn.Encoder(blocks, norm=nn.LayerNorm(size.d_model))

    return layer(draw, size.d_model, about, build)
