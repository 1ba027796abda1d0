"""Parts that modules are made of: descriptions of every kind, projections, feed-forwards and residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import regard as rg
from regard.nn import ACTIVATIONS
from regard.positions.biases import Shaw
from tools.differential.draw import Draw
from tools.differential.subject import noise

RMS_NORM = partial(nn.RMSNorm, eps=1e-6)  # without eps, torch takes that of the dtype: float32 and float64 differ
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm, "rms": RMS_NORM, "unit_rms": rg.nn.UnitRMSNorm,
}  # fmt: skip
RESIDUALS: dict[str, Callable[..., rg.nn.Residual]] = {
    "pre": rg.nn.PreNorm, "post": rg.nn.PostNorm, "sandwich": rg.nn.SandwichNorm, "output": rg.nn.OutputNorm,
    "layer_scale": rg.nn.LayerScale,
}  # fmt: skip


class Described(NamedTuple):
    """A function that builds a description for each module, and the properties of that description.

    causal: no query sees a later key, so that it can be cached.
    shifts: it depends on distances only, so that it is the same wherever a sequence starts.
    """

    make: Callable[[], rg.Attention]
    causal: bool
    shifts: bool


def second_even(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k % 3 != 1) | (q == k)


MASKS: dict[str, tuple[Callable[[], Any], bool, bool]] = {  # by name: the mask, whether it is causal, whether it shifts
    "none": (lambda: None, False, True),
    "causal": (rg.causal, True, True),
    "causal window": (lambda: rg.causal() & rg.window(3, 0), True, True),
    "window": (lambda: rg.window(2, 3), False, True),
    "causal dilated": (lambda: rg.causal() & rg.dilated(9, 2), True, True),
    "causal where": (lambda: rg.causal() & rg.where(second_even), True, False),
    "causal window where": (lambda: rg.causal() & rg.window(4, 0) & rg.where(second_even), True, False),
    "causal window or global": (lambda: rg.causal() & (rg.window(3, 0) | rg.global_tokens([0, 2])), True, False),
    "causal blocks": (lambda: rg.causal() & rg.blocks(torch.ones(64, 64).tril().bool(), 4), True, False),
    "causal random blocks": (lambda: rg.causal() & rg.random_blocks(1, 4), True, False),
    "longformer": (lambda: rg.longformer(3, [0]), False, False),
    "prefix": (lambda: rg.prefix(2), False, False),
}


def described(draw: Draw, heads: int, d_head: int, d_value: int, masks: Sequence[str] = tuple(MASKS)) -> Described:
    """A description: mask, bias, score, sink, temperature, normalization; its tensors are parameters or plain."""
    mask = draw.pick("mask", masks)
    bias = draw.pick("bias", ["none", "none", "alibi", "relative", "t5", "shaw", "alibi + relative"])
    score = draw.pick("score", ["dot", "dot", "scaled", "softcap", "cosine", "bilinear", "additive", "per head"])
    normalization = draw.pick("normalization", [*["softmax"] * 5, "sigmoid", "sigmoid per head", "relu", "entmax"])
    sink = draw.pick("sink", ["none", "none", "number", "per head"]) if normalization == "softmax" else "none"
    temperature = draw.pick("temperature", [1.0, 1.0, 0.7])
    learned = draw.pick("tables", ["tensors", "parameters"]) == "parameters"
    wrap = nn.Parameter if learned else (lambda tensor: tensor)

    def table(*shape: int) -> Tensor:
        return wrap(0.5 * noise(draw, *shape, name="table"))

    def make() -> rg.Attention:
        def alibi() -> rg.Bias:
            return rg.alibi(heads)

        def distances() -> rg.Bias:
            return rg.relative(table(9, heads))

        made_bias = {
            "none": lambda: None, "alibi": alibi, "relative": distances,
            "t5": lambda: rg.t5(table(8, heads), bidirectional=not MASKS[mask][1], max_distance=16),
            "shaw": lambda: rg.shaw(table(7, d_head), table(7, d_value)),
            "alibi + relative": lambda: alibi() + distances(),
        }[bias]()  # fmt: skip
        made_score = {
            "dot": rg.Dot, "scaled": lambda: rg.Dot(0.3), "softcap": lambda: rg.Dot(softcap=2.0),
            "cosine": lambda: rg.Cosine(scale=3.0), "bilinear": lambda: rg.Bilinear(table(d_head, d_head)),
            "additive": lambda: rg.Additive(table(d_head)), "per head": lambda: rg.Dot(table(heads)),
        }[score]()  # fmt: skip
        made_sink = {"none": lambda: None, "number": lambda: 0.3, "per head": lambda: table(heads)}[sink]()
        made_normalization = {
            "softmax": rg.Softmax, "sigmoid": lambda: rg.Sigmoid(-2.0), "relu": rg.ReLU, "entmax": rg.Entmax,
            "sigmoid per head": lambda: rg.Sigmoid(table(heads)),
        }[normalization]()  # fmt: skip
        return rg.Attention(
            made_score, MASKS[mask][0](), made_bias, temperature=temperature, sink=made_sink,
            normalization=made_normalization,
        )  # fmt: skip

    return Described(make, MASKS[mask][1], MASKS[mask][2])


class Sizes(NamedTuple):
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_value: int


def sizes(draw: Draw) -> Sizes:
    heads, kv_heads = draw.pick("heads, groups", [(1, 1), (2, 2), (4, 2), (4, 1), (3, 3)])
    d_head = draw.pick("d_head", [4, 8, 16, 6])
    return Sizes(draw.pick("d_model", [8, 12, 32]), heads, kv_heads, d_head, draw.pick("d_value", [d_head, 4, 10]))


def rotary(draw: Draw, d_head: int) -> rg.nn.Rotary | None:
    if not draw.pick("rotary", [False, True]):
        return None
    scaling = draw.pick("scaling", [None, None, rg.positions.Linear(2.0), rg.positions.Yarn(4.0, 16)])
    width = draw.pick("rotary width", [None, 4])
    return rg.nn.Rotary(100.0, width, draw.pick("interleaved", [False, True]), scaling)


def attention(
    draw: Draw, size: Sizes, attend: rg.Attention, *, d_source: int | None = None
) -> rg.nn.MultiHeadAttention:
    norms = draw.pick("norms of query, key", [(False, False), (True, True), (True, False), (False, True)])
    together = draw.pick("norm of all heads", [False, True])

    def norm(heads: int) -> nn.Module:
        return rg.nn.TokenNorm(RMS_NORM(heads * size.d_head)) if together else RMS_NORM(size.d_head)

    return rg.nn.MultiHeadAttention(
        size.d_model, size.heads, kv_heads=size.kv_heads, d_head=size.d_head, d_value=size.d_value, d_source=d_source,
        attend=attend, rotary=rotary(draw, size.d_head), bias=draw.pick("projection bias", [True, False]),
        query_norm=norm(size.heads) if norms[0] else None, key_norm=norm(size.kv_heads) if norms[1] else None,
        gate=output_gate(draw, size.d_model, size.heads, size.d_value),
    )  # fmt: skip


def output_gate(draw: Draw, d_model: int, heads: int, d_value: int) -> nn.Module | None:
    width = draw.pick("gate", [0, 0, 0, heads, heads * d_value])
    return rg.nn.OutputGate(d_model, width, bias=draw.pick("gate bias", [False, True])) if width else None


def without_width(attend: rg.Attention) -> rg.Attention:
    """Return a description with a dot product, and without a bias that reads queries or values."""
    score = attend.score if isinstance(attend.score, rg.Dot) else rg.Dot()
    parts = () if attend.bias is None else attend.bias.parts()
    return attend.replace(score=score, bias=None if any(isinstance(part, Shaw) for part in parts) else attend.bias)


def feedforward(draw: Draw, d_model: int) -> nn.Module:
    activation = ACTIVATIONS[draw.pick("activation", sorted(ACTIVATIONS))]
    kind = draw.pick("feed-forward", [rg.nn.FeedForward, rg.nn.GatedFeedForward])
    return kind(
        d_model, draw.pick("d_hidden", [8, 24]), activation=activation, bias=draw.pick("ff bias", [True, False])
    )


def residual(draw: Draw, d_model: int) -> Callable[[], rg.nn.Residual]:
    norm = NORMS[draw.pick("norm", list(NORMS))]
    return partial(RESIDUALS[draw.pick("arrangement", list(RESIDUALS))], d_model, norm)


def recurrent(draw: Draw, d_model: int, name: str = "layer") -> nn.Module:
    """A layer with a recurrent state."""
    heads, kernel_size = draw.pick("heads of a state", [1, 2]), draw.pick("kernel size of the convolution", [4, 1, 2])
    d_head, d_value = draw.pick("key width", [4, 6, 16]), draw.pick("value width", [4, 10])
    values = heads * draw.pick("value heads of a key head", [1, 2])
    return {
        "retention": lambda: rg.nn.Retention(
            d_model, heads, d_value=d_value, rotary=draw.pick("rotary", [None, rg.nn.Rotary(100.0)])
        ),
        "gla": lambda: rg.nn.GatedLinearAttention(d_model, heads, d_head=d_head, d_value=d_value, rank=3),
        "mamba2": lambda: rg.nn.Mamba2(
            d_model,
            values,
            d_head=d_value,
            d_state=d_head,
            groups=draw.pick("state groups", [1, heads]),
            kernel_size=kernel_size,
        ),
        "deltanet": lambda: rg.nn.DeltaNet(
            d_model, heads, value_heads=values, d_head=d_head, d_value=d_value, kernel_size=kernel_size
        ),
        "gated deltanet": lambda: rg.nn.GatedDeltaNet(
            d_model, heads, value_heads=values, d_head=d_head, d_value=d_value, kernel_size=kernel_size
        ),
    }[draw.pick(name, ["retention", "gla", "mamba2", "deltanet", "gated deltanet"])]()


def routing(draw: Draw, count: int) -> rg.nn.Routing:
    """How a mixture of `count` experts chooses two of them, or the only one."""
    scores = draw.pick("scores of experts", ["chosen", "softmax", "sigmoid"])
    if scores == "chosen":
        return rg.nn.Routing()
    groups, score = draw.pick(
        "groups of experts", [(1, "max"), (2, "max"), (2, "top2")] if count == 4 else [(1, "max")]
    )
    return rg.nn.Routing(
        scores, draw.pick("normalized shares", [False, True]), draw.pick("scale of shares", [1.0, 1.7]), groups=groups,
        groups_per_token=draw.pick("groups per token", [1, groups]), group_score=score,
        corrected=draw.pick("corrected scores", [False, True]),
    )  # fmt: skip
