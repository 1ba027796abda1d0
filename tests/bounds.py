"""A-priori bounds on the rounding errors of a call; derived in docs/inside/rounding.md.

Every quantity is computed in float64 from the inputs as given. A result beyond the bound is a bug: the bound holds for
sums in any order. Names: `d` bounds the errors of logits, `e_x` the error of x; `u` is the unit roundoff of the
arithmetic, `h` that of the dtype in which tensors are stored.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.definition import (
    SHORTEST,
    Dense,
    Reader,
    as_score,
    bias_of,
    dense,
    kind,
    output_of,
    parts_of,
    products,
    scale_of,
    score_kind,
    terms_of,
    weight_of,
)  # fmt: skip

TANH = 20  # roundings of 1 that the error of a tanh, or of 1 - tanh^2, may have: docs/inside/rounding.md
CAP_TANH = 14  # error of a tanh that caps a score, in roundings


@dataclass
class Judged:
    """The exact results of a call, and bounds on the rounding errors of other results: tensors of the same shapes."""

    output: Tensor
    lse: Tensor  # (B, H, Q)
    gradients: list[Tensor]  # of query, key, value and parameters
    weights: Tensor
    output_bound: Tensor
    lse_bound: Tensor
    gradient_bounds: list[Tensor]
    weights_bound: Tensor
    logit_bound: Tensor  # of visible logits, elsewhere 0
    exact: Dense


class Rounding:
    """Units of rounding of a call whose tensors are stored in `dtype`.

    pairs: whether the CPU's products of bfloat16 numbers are used.
    """

    def __init__(self, dtype: torch.dtype, pairs: bool = False) -> None:
        arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        stored = torch.finfo(dtype)
        self.u, self.h = arithmetic.eps / 2, stored.eps / 2
        if pairs and platform.machine() == "aarch64":  # BFDOT rounds sums to odd
            self.u *= 2
        self.lowered = self.h if stored.bits == 16 else 0.0  # unit vectors and scaled queries are stored once more
        self.tiny = 64 * arithmetic.tiny  # error of an underflow, with a margin
        self.smallest = stored.tiny * stored.eps / 2  # half of the least number: the error of an underflow
        self.underflow = self.smallest if self.lowered else 0.0  # of what is stored once more
        self.weight = self.h if pairs else 0.0  # weights and gradients of logits are rounded before products
        self.flush = arithmetic.tiny if pairs else 0.0  # subnormal operands of products count as zero

    def store(self, exact: Tensor, bound: Tensor) -> Tensor:
        """Return the bound after rounding to the stored dtype."""
        return bound + self.h * (exact.abs() + bound) + self.smallest


def judge(
    tensors: list[Tensor], description: dict[str, Any], learned: list[Tensor], dtype: torch.dtype,
    d_output: Tensor | None = None, d_lse: Tensor | None = None, seed: int | None = None, by_pairs: bool = False,
) -> Judged:  # fmt: skip
    """Return the exact call and its bounds; gradients are those of `(output * d_output).sum() + (lse * d_lse).sum()`.

    Tensors are query, key and value in float64, with numbers that `dtype` holds exactly. With `by_pairs`, products are
    those of the CPU's bfloat16 instructions.
    """
    read = Reader()
    inputs = [t.detach().double().requires_grad_() for t in tensors]
    query, key, value = inputs
    x = dense(query, key, value, description, read, seed)
    unit = Rounding(dtype, by_pairs)
    bounds = _Bounds(x, description, unit)
    gradients: list[Tensor] = []
    gradient_bounds: list[Tensor] = []
    if d_output is not None and d_lse is not None:
        leaves = [*inputs, *(read.leaf(t) for t in learned)]
        finite = x.lse.masked_fill(x.lse.isneginf(), 0.0)
        pairs = [(o, d) for o, d in ((x.output, d_output), (finite, d_lse)) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True)
        gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
        gradients = [g.reshape(t.shape) for g, t in zip(gradients, [*tensors, *learned], strict=True)]
        with torch.no_grad():
            gradient_bounds = bounds.gradients(inputs, learned, gradients, d_output, d_lse)
    weights_bound = torch.maximum(bounds.e_weights, bounds.e_again)
    twice = 2.0 if dtype == torch.float64 else 1.0  # then the exact results have such errors too
    return Judged(
        x.output.detach(), x.lse.detach(), gradients, x.weights.detach(), twice * bounds.output, twice * bounds.lse,
        [twice * bound for bound in gradient_bounds], twice * weights_bound, bounds.d, x,
    )  # fmt: skip


class _Bounds:
    @torch.no_grad()
    def __init__(self, x: Dense, description: dict[str, Any], unit: Rounding) -> None:
        self.x, self.unit, u = x, unit, unit.u
        self.score, self.bias = as_score(description.get("score")), description.get("bias")
        self.temperature = description.get("temperature", 1.0)
        self.sink = description.get("sink")
        self.count = x.visible.sum(-1).double()  # (B, H, Q); in float32, the product with the least number is 0
        K = x.at.shape[3]
        self.in_sum = self.count.clamp(max=K / 8) + 16.0  # roundings in the sum of the weights
        self.d, self.slope, self.e_slope = self._logits()
        empty = x.lse.isneginf()
        seen = x.visible & ~empty.unsqueeze(-1)
        # In logs, since a weight that is 0 in float64 may be large where its logit is off by more than it is away.
        log_weights = torch.where(seen, x.logits - x.lse.unsqueeze(-1), -torch.inf)
        self.away = torch.where(x.visible, (x.logits - x.lse.unsqueeze(-1)).abs(), 0.0)
        self.d_sink = 2 * u * x.sink.abs() if x.sink is not None else None

        # How far errors of logits move the log-sum-exp: the log of the mean of e^d over the weights.
        shift = log_weights + self.d
        spread = 2 * u * (x.weights * self.away).sum(-1)
        self.sink_weight = None
        if x.sink is not None and self.d_sink is not None:
            log_share = x.sink - x.lse.unsqueeze(-1)  # (B, H, Q, 1)
            self.log_sink_weight, self.sink_weight = log_share, log_share.exp()
            shift = torch.cat([shift, log_share + self.d_sink], -1)
            spread = spread + 2 * u * (self.sink_weight * log_share.abs()).squeeze(-1)
        size = x.lse.abs().masked_fill(empty, 0.0)
        moved = shift.logsumexp(-1).clamp(min=0) if shift.shape[-1] else torch.zeros_like(x.lse)
        moved = moved.masked_fill(empty, 0.0)
        self.lse = moved + spread + self.in_sum * u + 4 * u * size + unit.tiny

        theta = self.d + (moved + self.in_sum * u).unsqueeze(-1) + 2 * u * self.away
        self.e_weights = self._of_weights(theta, log_weights) * x.visible
        self.theta = self.d + (self.lse + 3 * u * size + 6 * u).unsqueeze(-1) + 2 * u * self.away
        self.e_again = self._of_weights(self.theta, log_weights) * x.visible  # from the stored log-sum-exp
        self.size = size

        self.P = x.weights if x.keep is None else x.weights * x.keep
        e_P = self.e_weights if x.keep is None else self.e_weights * x.keep + 2 * u * self.P
        e_P = e_P + unit.weight * (self.P + e_P)
        read = Reader(magnitudes=True)
        n = (self.count + 8.0).unsqueeze(-1)
        magnitude = self._values(self.P, read)
        bound = self._values(e_P, read) + n * u * magnitude + n * unit.tiny
        if any(kind(part) == "Shaw" and part.values is not None for part in parts_of(self.bias)):
            plain = self.P @ x.value  # is stored before the value half is added
            bound = bound + (2 * parts_reach(self.bias) + 8) * u * magnitude
            bound = unit.store(plain, bound) if unit.lowered else bound
        self.output = unit.store(x.output, bound)

    def _of_weights(self, theta: Tensor, log_weights: Tensor) -> Tensor:
        """The bound of weights off by a factor within e^±theta. No weight is negative, nor above 1 but for rounding."""
        near = log_weights.exp() * theta.clamp(max=1).expm1()
        far = (log_weights + theta.clamp(max=1e300)).clamp(max=1).exp()
        return torch.where(theta < 1, near, far).clamp(max=1 + 16 * self.unit.u) + self.unit.tiny

    def _values(self, weights: Tensor, read: Reader) -> Tensor:
        return output_of(weights, self.x.value.abs(), self.bias, read, self.x.at)

    def _products(self) -> Tensor:
        """Bounds of the errors of the products of queries and keys, before cap or modifier."""
        x, u, score, lowered = self.x, self.unit.u, self.score, self.unit.lowered
        name, D, read = score_kind(score), x.query.shape[-1], Reader(magnitudes=True)
        if name == "Additive":
            return self._additive(D)
        size = products(score, x.query.abs(), x.key.abs(), read)
        lengths = x.key.abs().sum(-1).unsqueeze(-2)
        if name == "Cosine":
            lengths = x.query.abs().sum(-1).unsqueeze(-1) + lengths
            d = ((2 * D + 10) * u + 3 * lowered) * size
            return d + self.unit.underflow * (1 + scale_of(score, D, read)) * lengths
        if name == "Bilinear":
            d = (2 * D + 5) * u * size + lowered * products_of_stored(score, x)
            return d + self.unit.underflow * lengths
        inner = score.score if kind(score) == "Modified" else score
        if not isinstance(inner.scale, Tensor):
            return (D + 4) * u * size
        return ((D + 4) * u + lowered) * size + self.unit.underflow * lengths

    def _logits(self) -> tuple[Tensor, Tensor, Tensor]:
        """Bounds of the errors of logits, the slope of cap or modifier, and the bound of its error."""
        x, u, score = self.x, self.unit.u, self.score
        D, read = x.query.shape[-1], Reader(magnitudes=True)
        d = self._products()
        if self.unit.flush:  # a subnormal number of one vector times any of the other
            stored = x.query @ score.matrix.detach().double() if score_kind(score) == "Bilinear" else x.query
            lengths = stored.abs().sum(-1).unsqueeze(-1) + x.key.abs().sum(-1).unsqueeze(-2)
            d = d + self.unit.flush * scale_of(score, D, read) * lengths
        slope, e_slope = torch.ones_like(d), torch.zeros_like(d)
        softcap = getattr(score, "softcap", None)
        if softcap is not None:
            t = (x.product / softcap).tanh()
            steepest = 1 - ((x.product.abs() - d).clamp(min=0) / softcap).tanh() ** 2
            e_t = d / softcap * steepest + CAP_TANH * u * t.abs()
            slope, e_slope = 1 - t * t, 2 * t.abs() * e_t + e_t**2 + 3 * u
            d = softcap * e_t + 3 * u * x.score.abs()
        if kind(score) == "Modified":
            waves = x.product.sin()
            slope, e_slope = x.product.cos().abs(), d + 4 * u
            d = d + 2 * u * waves.abs() + 4 * u * (x.score - waves).abs()
        size_of_bias = torch.zeros_like(d)
        for part in parts_of(self.bias):
            magnitude = bias_of(part, x.given[0].abs(), scale_of(score, D, read), read, x.at)
            size_of_bias = size_of_bias + magnitude
            d = d + (D + 4) * u * magnitude * (kind(part) == "Shaw")
        d = d + (len(parts_of(self.bias)) + 4) * u * (size_of_bias + x.score.abs())
        logits = torch.where(x.visible, x.logits, 0.0)
        d = d / self.temperature + 4 * u * logits.abs() + self.unit.tiny
        return torch.where(x.visible, d, 0.0), slope, e_slope

    def _additive(self, D: int) -> Tensor:
        x, u = self.x, self.unit.u
        read = Reader(magnitudes=True)
        weight = weight_of(self.score, read)
        size = (terms_of(x.query, x.key).abs() * weight).sum(-1)
        largest = weight.amax(-1)
        raised = torch.where(weight < u / 4 * largest.unsqueeze(-1), u / 4 * largest.unsqueeze(-1), 0.0).sum(-1)
        return (D + 5) * u * size + TANH * u * weight.sum(-1) + raised

    def gradients(
        self, inputs: list[Tensor], learned: list[Tensor], exact: list[Tensor], d_output: Tensor, d_lse: Tensor
    ) -> list[Tensor]:
        x, u, unit = self.x, self.unit.u, self.unit
        B, H, Q, K = x.at.shape
        E, D = x.value.shape[-1], x.query.shape[-1]
        bounds = {Reader.place(t): torch.zeros_like(t, dtype=torch.float64) for t in learned}

        # The gradient of the weights, dP, and of the logits, dS = w (dP - delta).
        read = Reader(magnitudes=True)
        with torch.enable_grad():
            ones = torch.zeros_like(x.weights).requires_grad_()
            dP = torch.autograd.grad(output_of(ones, x.value, self.bias, Reader(), x.at), ones, d_output)[0]
            size_dP = torch.autograd.grad(self._values(ones, read), ones, d_output.abs())[0]
        if x.keep is not None:
            dP, size_dP = dP * x.keep, size_dP * x.keep
        e_dP = (E + 8) * u * size_dP + unit.tiny
        if unit.flush:
            sizes = d_output.abs().sum(-1).unsqueeze(-1) + x.value.abs().sum(-1).unsqueeze(-2)
            e_dP = e_dP + unit.flush * sizes * (1.0 if x.keep is None else x.keep)
        delta = (x.weights * dP).sum(-1) - d_lse
        from_output = (d_output.abs() * self.output).sum(-1) + (E + 4) * u * (d_output * x.output).abs().sum(-1)
        shaw = 2 * parts_reach(self.bias) + self.count
        from_output = from_output + shaw * u * (x.weights * size_dP).sum(-1) * bool(parts_reach(self.bias))
        from_weights = (self.e_weights * (dP.abs() + e_dP) + x.weights * e_dP).sum(-1)
        from_weights = from_weights + (self.count + 4) * u * (x.weights * dP.abs()).sum(-1)
        e_delta = torch.maximum(from_output, from_weights) + 2 * u * (d_lse.abs() + delta.abs())
        away = (dP - delta.unsqueeze(-1)).abs()
        e_away = e_dP + e_delta.unsqueeze(-1) + 2 * u * away
        dS = x.weights * away
        e_dS = self.e_again * (away + e_away) + x.weights * e_away + 3 * u * dS
        e_dS = torch.where(x.visible, e_dS + unit.tiny, 0.0)
        G, e_G = dS / self.temperature, e_dS / self.temperature + 3 * u * dS / self.temperature
        Gs = G * self.slope.abs()
        e_Gs = e_G * (self.slope.abs() + self.e_slope) + G * self.e_slope + 2 * u * Gs
        e_Gs = e_Gs + unit.weight * (Gs + e_Gs)

        def add(tensor: tuple[int, int], bound: Tensor) -> None:
            if tensor in bounds:
                bounds[tensor] += bound.reshape(bounds[tensor].shape)

        # Values, and the value half of a relative position scheme.
        e_P = self.e_again if x.keep is None else self.e_again * x.keep + 2 * u * self.P
        e_P = e_P + unit.weight * (self.P + e_P)
        value = x.value.detach().abs().requires_grad_()
        read = Reader(magnitudes=True)
        with torch.enable_grad():
            weights = torch.stack([e_P, self.P])  # a gradient for each: the map is linear in the weights
            outs = [output_of(w, value, self.bias, read, x.at) for w in weights]
            leaves = [value, *read.leaves.values()]
            rough, sums = (torch.autograd.grad(out, leaves, d_output.abs()) for out in outs)
        e_value = rough[0] + (Q * H + 8) * u * sums[0] + Q * H * unit.flush
        for key, e, s in zip(read.leaves, rough[1:], sums[1:], strict=True):
            add(key, e + (B * H * Q + K + 8) * u * s)

        # Biases, linear in their tables, and Shaw's keys with the query.
        e_query = torch.zeros_like(inputs[0])
        given = x.given[0].detach().abs().requires_grad_()
        for part in parts_of(self.bias):
            read = Reader(magnitudes=True)
            with torch.enable_grad():
                added = bias_of(part, given, scale_of(self.score, D, read), read, x.at)
                if not added.requires_grad:
                    continue
                leaves = [given, *read.leaves.values()]
                rough, sums, counts = (
                    torch.autograd.grad(added, leaves, g, allow_unused=True, retain_graph=True)
                    for g in (e_G, G, x.visible.double())
                )
            for place, e, s, n in zip([None, *read.leaves], rough, sums, counts, strict=True):
                if e is None:
                    continue
                bound = e + (K + B * H * Q + D if kind(part) == "Shaw" else n) * u * s + 8 * u * s
                if place is None:
                    e_query = e_query + bound
                else:
                    add(place, bound)

        # The sink.
        if isinstance(self.sink, Tensor) and self.sink_weight is not None and self.d_sink is not None:
            share, log_share = self.sink_weight.squeeze(-1), self.log_sink_weight.squeeze(-1)
            theta = self.d_sink.squeeze(-1) + self.lse + (3 * self.size + 2 * log_share.clamp(min=-1e9).abs() + 6) * u
            off = self._of_weights(theta, log_share)
            e_sink = off * (delta.abs() + e_delta) + share * e_delta + (B * Q + 4) * u * share * delta.abs()
            e_sink = e_sink.sum((0, 2))
            add(Reader.place(self.sink), e_sink if self.sink.numel() > 1 else e_sink.sum())

        e_q, e_k = self._of_score(Gs, e_Gs, add)
        e_query = e_query + e_q
        if kind(self.score) == "Modified" and kind(self.score.function) == "Waves":
            distance = (x.at.p - x.at.j).abs().double()
            n = x.visible.sum((0, 2, 3)) + 8
            rough, size = ((g * distance).sum((0, 2, 3)) for g in (e_G, G))
            add(Reader.place(self.score.function.steepness), rough + n * u * size)

        def of_kv_heads(bound: Tensor) -> Tensor:
            return bound.reshape(B, -1, H // inputs[1].shape[1], *bound.shape[2:]).sum(2) if bound.numel() else bound

        tensors = [e_query, of_kv_heads(e_k), of_kv_heads(e_value)]
        tensors = [bound.reshape(t.shape) for bound, t in zip(tensors, inputs, strict=True)]
        rounded = [unit.store(g, b + unit.tiny) for g, b in zip(exact, tensors, strict=False)]
        rest = [bounds[Reader.place(t)] + unit.tiny + 2 * u * g.abs() for t, g in zip(learned, exact[3:], strict=True)]
        return [*rounded, *rest]

    def _of_score(self, Gs: Tensor, e_Gs: Tensor, add: Any) -> tuple[Tensor, Tensor]:
        """Bounds of the gradients of query and key, one for each query head; those of the score's tensors are added."""
        x, u, name, lowered = self.x, self.unit.u, score_kind(self.score), self.unit.lowered
        (B, H, Q, K), D = x.at.shape, x.query.shape[-1]
        if name == "Additive":
            return self._of_additive(Gs, e_Gs, add)
        read = Reader(magnitudes=True)
        query, key = x.query.detach().abs().requires_grad_(), x.key.detach().abs().requires_grad_()
        with torch.enable_grad():
            product = products(self.score, query, key, read)
            leaves = [query, key, *read.leaves.values()]
            rough, sums = (torch.autograd.grad(product, leaves, g, retain_graph=True) for g in (e_Gs, Gs))
        again = D if name == "Bilinear" else 2 * D if name == "Cosine" else 0
        of_tensor = K + B * H * Q * (1 if name == "Bilinear" else D) + again + 10
        depth = [K + again + 10, Q * H + again + 10, *[of_tensor] * len(read.leaves)]
        stored = 0.0 if not lowered else 4 * lowered if read.leaves or name == "Cosine" else 0.0
        apart = lowered * bool(parts_reach(self.bias))  # the query has a gradient by Shaw's keys as well
        bounds = [e + (n * u + stored + apart) * s for e, s, n in zip(rough, sums, depth, strict=True)]
        if stored:  # the gradient of the stored query underflows too; a key of ones leads it back to the query
            with torch.enable_grad():
                ones = products(self.score, query, torch.ones_like(key[..., :1, :]), read)
                targets = [query, *read.leaves.values()]
                lost = torch.autograd.grad(ones, targets, torch.full_like(ones, self.unit.underflow))
            of_key = torch.full_like(bounds[1], self.unit.underflow)
            # a learned scale of a cosine stores the gradient of the unit vector as well, after that of the scaled one
            of_unit = self.unit.underflow if name == "Cosine" and read.leaves else 0.0
            bounds = [b + e for b, e in zip(bounds, (lost[0] + of_unit, of_key, *lost[1:]), strict=True)]
        bounds[0] = bounds[0] + self.unit.underflow * bool(apart)
        if self.unit.flush:  # a subnormal query or key has no gradient
            with torch.enable_grad():
                targets = [query, *read.leaves.values()]
                lost = torch.autograd.grad(products(self.score, query, torch.ones_like(key), read), targets, Gs)
                ones = products(self.score, torch.ones_like(query), key, read)
                lost = (lost[0], torch.autograd.grad(ones, key, Gs)[0], *lost[1:])
            bounds = [b + self.unit.flush * e for b, e in zip(bounds, lost, strict=True)]
        for tensor, bound in zip(read.leaves, bounds[2:], strict=True):
            add(tensor, bound)
        if name != "Cosine":
            return bounds[0], bounds[1]
        return self._of_unit(0, bounds[0], sums[0]), self._of_unit(1, bounds[1], sums[1])

    def _of_unit(self, which: int, bound: Tensor, size: Tensor) -> Tensor:
        """From the gradient g of a unit vector n to that of the vector: (g - n (n · g)) / length."""
        vector, n = self.x.given[which], (self.x.query, self.x.key)[which].abs()
        D, u = vector.shape[-1], self.unit.u
        length = vector.square().sum(-1, keepdim=True).sqrt().clamp(min=SHORTEST)
        along, size_along = (n * bound).sum(-1, keepdim=True), (n * size).sum(-1, keepdim=True)
        return (bound + n * along + (D / 2 + 8) * u * size + (5 * D / 2 + 16) * u * n * size_along) / length

    def _of_additive(self, Gs: Tensor, e_Gs: Tensor, add: Any) -> tuple[Tensor, Tensor]:
        x, u = self.x, self.unit.u
        (B, H, Q, K), D = x.at.shape, x.query.shape[-1]
        t = terms_of(x.query, x.key)
        slope, weight = 1 - t * t, weight_of(self.score, Reader(magnitudes=True))

        def sums(over: int, n: int) -> Tensor:
            size, rough = (Gs.unsqueeze(-1) * slope).sum(over), (e_Gs.unsqueeze(-1) * slope).sum(over)
            flat = (Gs + e_Gs).sum(over).unsqueeze(-1)
            of_head = weight if weight.dim() == 1 else weight.reshape(-1, 1, D)
            return of_head * (rough + n * u * size + TANH * u * flat)

        e_query, e_key = sums(3, K + 10), sums(2, Q * H + 10)
        size = (Gs.unsqueeze(-1) * t.abs()).sum((2, 3))
        rough = (e_Gs.unsqueeze(-1) * (t.abs() + TANH * u) + TANH * u * Gs.unsqueeze(-1)).sum((2, 3))
        e_weight = (rough + (B * H * Q * K + 10) * u * size).sum(0)  # (H, D)
        given = self.score.weight
        add(Reader.place(given), e_weight if given.numel() == H * D else e_weight.sum(0))
        return e_query, e_key


def parts_reach(bias: Any) -> int:
    """The radius of Shaw's tables, 0 without them."""
    return max((part.keys.shape[-2] // 2 + 1 for part in parts_of(bias) if kind(part) == "Shaw"), default=0)


def products_of_stored(score: Any, x: Dense) -> Tensor:
    """|q M| |k|: what rounding the projected queries to the stored dtype may change."""
    return (x.query @ score.matrix.detach().double()).abs() @ x.key.abs().mT
