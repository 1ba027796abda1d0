"""The reference: one sequence per call, with attention written out in dense torch, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tests.definition import Reader, dense, output_of, parts_of
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES, exclude_engine
from regard.nn import (
    CrossLayerAttention,
    DifferentialAttention,
    Experts,
    LatentAttention,
    LayerContext,
    LayerScale,
    MultiHeadAttention,
    OutputNorm,
    ProbePooling,
    RelativeEmbedding,
    TalkingHeadsAttention,
)
from regard.nn.recurrent import RecurrentLayer
from tools.differential.recurrent import recurrent


@contextmanager
def use_reference() -> Iterator[None]:
    """Replace attention and the modules below by the functions of this file, inside the context."""
    with ExitStack() as stack:
        for name in list(ENGINES):
            stack.enter_context(exclude_engine(name))
        for owner, name, function in (
            (rg.Attention, "forward", attend), (rg.Attention, "forward_local", attend),
            (rg.Attention, "weights", weights), (MultiHeadAttention, "forward", multi_head),
            (RelativeEmbedding, "forward", relative_positions), (RecurrentLayer, "forward", recurrent),
            (Experts, "forward", experts), (ProbePooling, "forward", probe_pooling),
            (OutputNorm, "forward", output_norm), (LayerScale, "forward", layer_scale),
            (DifferentialAttention, "forward", differential), (TalkingHeadsAttention, "forward", talking_heads),
            (CrossLayerAttention, "forward", cross_layer), (LatentAttention, "forward", latent),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


class Exact(Reader):
    """Reads the tensors of a description as they are, so that gradients reach them."""

    def leaf(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@dataclass
class Sum:
    """Biases that are added, as `tests.definition` reads them."""

    terms: tuple[Any, ...]


def attend(self: rg.Attention, query: Tensor, key: Tensor, value: Tensor, *, extra: Tensor | None = None) -> Tensor:
    """Attention of a description; `extra` (B, H, Q, K) is added to the scores.

    The gradients of a softmax are those of weights that are computed again from the log-sum-exp, as every kernel with
    O(N) memory does. In float32 it is moved by one rounding, upwards or downwards: see "Log-sum-exp" in
    docs/inside/rounding.md.
    """
    dtype, axes = torch.promote_types(query.dtype, torch.float32), query.dim()
    parts = [x.to(dtype).reshape((1,) * (4 - axes) + x.shape) for x in (query, key, value)]
    batch = max(len(x) for x in parts)
    parts = [x.expand(batch, *x.shape[1:]) for x in parts]
    read = Exact(dtype)
    bias = self.bias if extra is None else Sum((*parts_of(self.bias), extra))
    names = ("score", "mask", "offset", "temperature", "sink", "normalization")
    description = {name: getattr(self, name) for name in names} | {"bias": bias}
    exact = dense(parts[0], parts[1], parts[2], description, read)
    if type(self.normalization) is not rg.Softmax:
        return exact.output.to(query.dtype).reshape(exact.output.shape[4 - axes :])
    lse = exact.lse[..., None]
    empty = lse.isinf()  # nothing is visible
    again = (exact.logits - lse.masked_fill(empty, 0)).exp().masked_fill(empty, 0)
    if dtype == torch.float32:
        signs = torch.randint(0, 2, lse.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        again = again * (1 + torch.finfo(dtype).eps / 2 * signs * lse.detach().masked_fill(empty, 0))
    output = output_of(again, exact.value, bias, read, exact.at)
    output = exact.output.detach() + (output - output.detach())
    return output.to(query.dtype).reshape(output.shape[4 - axes :])


def weights(self: rg.Attention, query: Tensor, key: Tensor) -> Tensor:
    """The weights (B, H, Q, K) of `attend`: its output for values that are the unit vectors."""
    units = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    return attend(self, query, key, units)


def multi_head(
    self: MultiHeadAttention,
    x: Tensor,
    source: Tensor | None = None,
    *,
    mask: Any = None,
    bias: Any = None,
    positions: Tensor | None = None,
    context: LayerContext | None = None,
    cache: None = None,
) -> Tensor:
    """`MultiHeadAttention.forward` with every projection, norm and rotation on its own line, and no cache."""
    assert cache is None, "the yardstick knows no cache"
    context = LayerContext(mask, bias, positions) if context is None else context
    q, k, v, extra = project_inputs(self, x, source, context)
    if self.readers:
        context.share(self, (k, v), None, self.readers)
    return output(self, x, attend(context.combine(self.attend), q, k, v, extra=extra))


def project_inputs(
    self: MultiHeadAttention, x: Tensor, source: Tensor | None, context: LayerContext
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values (B, H or G, N, ...), and what disentangled attention adds to the scores."""
    keys = x if source is None else source
    weight, offset = self.qkv.weight, self.qkv.bias
    w_key, b_key = (weight, offset) if self.source is None else (self.source.weight, self.source.bias)
    first = self.widths[0] if self.source is None else 0
    middle, last = first + self.widths[1], first + self.widths[1] + self.widths[2]

    def project(inputs: Tensor, w: Tensor, b: Tensor | None, start: int, stop: int, heads: int) -> Tensor:
        return F.linear(inputs, w[start:stop], None if b is None else b[start:stop]).unflatten(-1, (heads, -1))

    q_input = x if context.query_position is None else x + context.query_position
    k_input = keys if context.key_position is None else keys + context.key_position
    q = project(q_input, weight, offset, 0, self.widths[0], self.heads)
    k = project(k_input, w_key, b_key, first, middle, self.kv_heads)
    v = project(keys, w_key, b_key, middle, last, self.kv_heads)
    q = q if self.query_norm is None else self.query_norm(q)
    k = k if self.key_norm is None else self.key_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, N, D)
    q, k = rotate(self, q, context.positions), rotate(self, k, context.positions if source is None else None)
    extra = None
    if context.relative is not None:  # DeBERTa: from tokens to positions, and from positions to tokens
        vectors, rows = context.relative
        p_query = project(vectors, weight, offset, 0, self.widths[0], self.heads)[rows]  # (N, N, H, D): of i and j
        p_key = project(vectors, weight, offset, first, middle, self.kv_heads)[rows]
        extra = torch.einsum("bhid,ijhd->bhij", q, p_key) + torch.einsum("bhjd,ijhd->bhij", k, p_query)
        extra = extra * scale_of(self)
    return q, k, v, extra


def scale_of(self: MultiHeadAttention) -> Tensor:
    """The scale of the scores of each head, (H or 1, 1, 1)."""
    score: Any = self.attend.score
    scale = self.d_head**-0.5 if score.scale is None else score.scale
    return torch.as_tensor(scale, dtype=self.qkv.weight.dtype).reshape(-1, 1, 1)


def rotate(self: MultiHeadAttention | LatentAttention, x: Tensor, positions: Tensor | None) -> Tensor:
    if (rotary := self.rotary) is None:
        return x
    return rg.rotary(
        x, positions, base=rotary.base, d_rotary=rotary.d_rotary, interleaved=rotary.interleaved, scaling=rotary.scaling
    )


def output(self: MultiHeadAttention, x: Tensor, out: Tensor) -> Tensor:
    """Project the heads' outputs (B, H, N, E), after the gate."""
    out = out.transpose(1, 2)
    if self.gate is not None:  # OutputGate: one number per head, or one per channel
        gate = F.linear(x, self.gate.projection.weight, self.gate.projection.bias).sigmoid()  # type: ignore[union-attr, arg-type]
        out = out * (gate[..., None] if gate.shape[-1] == out.shape[2] else gate.view(out.shape))
    return F.linear(out.flatten(2), self.output.weight, self.output.bias)


def differential(self: DifferentialAttention, x: Tensor, *, context: LayerContext | None = None) -> Tensor:
    """`DifferentialAttention.forward`: both softmaxes of a head read the values of its two key heads side by side."""
    context = LayerContext() if context is None else context
    q, k, v, _ = project_inputs(self, x, None, context)
    share = self.heads // self.kv_heads  # query heads of a key head
    keys = k.unflatten(1, (-1, 2)).repeat_interleave(share, 1).flatten(1, 2)
    values = torch.cat(v.unflatten(1, (-1, 2)).unbind(2), -1).repeat_interleave(2 * share, 1)
    first, second = attend(context.combine(self.attend), q, keys, values).unflatten(1, (-1, 2)).unbind(2)
    a1, b1, a2, b2 = self.lambdas
    out = first - ((a1 @ b1).exp() - (a2 @ b2).exp() + self.lambda_init) * second
    return output(self, x, self.norm(out) * (1 - self.lambda_init))


def talking_heads(self: TalkingHeadsAttention, x: Tensor, *, context: LayerContext | None = None) -> Tensor:
    """`TalkingHeadsAttention.forward`: mix scores, take the weights, mix these."""
    context = LayerContext() if context is None else context
    q, k, v, _ = project_inputs(self, x, None, context)
    score: Any = self.attend.score
    scores = torch.einsum("hg,bgnd,bgkd->bhnk", self.score_mix, q, k) * scale_of(self).to(q)
    scores = scores if score.softcap is None else score.softcap * (scores / score.softcap).tanh()
    units = torch.eye(x.shape[1], dtype=x.dtype).expand(*k.shape[:3], -1)
    heads = attend(context.combine(self.attend), torch.zeros_like(q), k, units, extra=scores)
    return output(self, x, torch.einsum("hg,bgnk,bhke->bhne", self.weight_mix, heads, v))


def cross_layer(self: CrossLayerAttention, x: Tensor, *, context: LayerContext, cache: None = None) -> Tensor:
    """`CrossLayerAttention.forward`: queries of its own, keys and values of its owner."""
    shared = context.take_shared(self._owner[0])
    assert shared is not None
    q = F.linear(x, self.qkv.weight, self.qkv.bias).unflatten(-1, (self.heads, -1))
    q = rotate(self, (q if self.query_norm is None else self.query_norm(q)).transpose(1, 2), context.positions)
    return output(self, x, attend(context.combine(self.attend), q, shared.keys, shared.values))  # type: ignore[arg-type]


def latent(self: LatentAttention, x: Tensor, *, context: LayerContext | None = None, cache: None = None) -> Tensor:
    """`LatentAttention.forward` with the keys and values of every head."""
    context = LayerContext() if context is None else context
    q = x
    if self.query_down is not None and self.query_norm is not None:
        q = self.query_norm(F.linear(x, self.query_down.weight, self.query_down.bias))
    q = F.linear(q, self.query.weight).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, D)
    q, q_rotated = q.split((self.d_head, self.d_rotary), -1)
    c, rotated = F.linear(x, self.down.weight, self.down.bias).split((self.d_latent, self.d_rotary), -1)
    kv = F.linear(self.norm(c), self.up).unflatten(-1, (self.heads, -1)).transpose(1, 2)
    k, v = kv.split((self.d_head, self.d_value), -1)
    rotated = rotate(self, rotated[:, None], context.positions).expand(-1, self.heads, -1, -1)
    q = torch.cat((q, rotate(self, q_rotated, context.positions)), -1)
    out = attend(context.combine(self.attend), q, torch.cat((k, rotated), -1), v)
    return F.linear(out.transpose(1, 2).flatten(2), self.output.weight, self.output.bias)


def relative_positions(self: RelativeEmbedding, length: int) -> tuple[Tensor, Tensor]:
    """`RelativeEmbedding.forward`: vectors, and the row of each query i and key j."""
    row = {d: relative_row(d, self.span, self.max_distance) for d in range(1 - length, length)}
    return self.norm(self.table), torch.tensor([[row[i - j] for j in range(length)] for i in range(length)])


def relative_row(distance: int, span: int, most: int) -> int:
    """DeBERTa's row, by integers: ceil(log(distance / middle) / log((most - 1) / middle) (middle - 1)) for far ones."""
    middle, size = span // 2, abs(distance)
    if most > span and size > middle:
        step = 0
        while size ** (middle - 1) * middle**step > (most - 1) ** step * middle ** (middle - 1):
            step += 1
        distance = (middle + step) * (1 if distance > 0 else -1)
    return min(max(distance + span, 0), 2 * span - 1)


def experts(self: Experts, x: Tensor) -> Tensor:
    """`Experts.forward`, one token after the other."""
    rows = []
    for token in x.flatten(0, -2):
        logits = F.linear(token, self.router.weight, self.router.bias)
        shares = shares_of(self, logits.to(torch.promote_types(logits.dtype, torch.float32)))
        row: Any = sum(share.to(x.dtype) * expert(self, n, token) for n, share in shares.items())
        if self.shared is not None:
            gate = 1 if self.shared_gate is None else F.linear(token, self.shared_gate.weight).sigmoid()
            row = row + gate * self.shared(token)
        rows.append(row)
    return torch.stack(rows).view(x.shape) if rows else x


def shares_of(self: Experts, logits: Tensor) -> dict[int, Tensor]:
    """The experts of a token and their shares, by its logits (count,)."""
    way, size = self.routing, self.count // self.routing.groups
    scores = logits.sigmoid() if way.scores == "sigmoid" else logits.exp() / logits.exp().sum()
    ranks = (scores if self.correction is None else scores + self.correction).detach()
    every = [sorted(range(n * size, (n + 1) * size), key=lambda e: -float(ranks[e])) for n in range(way.groups)]
    best = 2 if way.group_score == "top2" else 1
    every.sort(key=lambda group: -sum(float(ranks[e]) for e in group[:best]))
    left = [e for group in every[: way.groups_per_token] for e in group]
    chosen = sorted(left, key=lambda e: -float(ranks[e]))[: self.per_token]
    total = sum(scores[e] for e in chosen) if way.normalize or way.scores == "chosen" else 1
    return {e: scores[e] / total * way.scale for e in chosen}


def expert(self: Experts, n: int, token: Tensor) -> Tensor:
    both = self.up[n] @ token + (0 if self.up_bias is None else self.up_bias[n])
    gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    if self.limit is not None:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
    return self.output[n] @ (self.activation(gate) * up) + (0 if self.output_bias is None else self.output_bias[n])


def probe_pooling(self: ProbePooling, x: Tensor, mask: Tensor | None = None) -> Tensor:
    context = LayerContext(None if mask is None else rg.dense(mask[:, None, None]))
    pooled = multi_head(self.attention, self.probe.expand(len(x), 1, -1), x, context=context)  # type: ignore[arg-type]
    return self.residual(pooled, self.feedforward)[:, 0]


def output_norm(self: OutputNorm, x: Tensor, sublayer: Any, *args: Any, **kwargs: Any) -> Tensor:
    return x + self.norm(sublayer(x, *args, **kwargs))


def layer_scale(self: LayerScale, x: Tensor, sublayer: Any, *args: Any, **kwargs: Any) -> Tensor:
    return x + self.scale * sublayer(self.norm(x), *args, **kwargs)
