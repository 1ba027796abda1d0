"""Attention with a normalisation other than softmax, in plain torch: blocks of whole rows of logits.

A block has so few queries that its memory does not grow with Q · K. Its weights are computed at once, so that a
normalisation is nothing but a function of rows. Backward recomputes a block and lets autograd differentiate it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.engines import tiled
from regard.engines.derivatives import Tensors, active_transforms, apply
from regard.engines.dropout import RandomState, dropout_factors
from regard.engines.problem import Problem
from regard.engines.reference import logits
from regard.engines.tiled import Motion, Tile, TiledInputs, TileRow, replace_leaves, tile_rows
from regard.geometry import pad_leading


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Tensor, None]:
    inputs, running = (query, key, value), active_transforms()
    if problem.torch_only or (running and (problem.custom or problem.dropout or "Grad" not in running)):
        return attend_by_rows(problem, *inputs, seed), None
    if problem.closes_over_trainable():
        return attend_by_rows(problem, *inputs, seed, save=problem.grad and not problem.tangent), None
    if not problem.grad and not running:  # tangents pass through torch's operators
        return attend_by_rows(problem, *inputs, seed, once=not problem.tangent), None
    random_state = RandomState(query.device) if problem.custom else None
    (output,) = apply(RowsOperator(problem, seed, random_state), *inputs, *problem.tensors)
    return output, None


def blocks(problem: Problem, pieces: TiledInputs) -> Iterator[tuple[TileRow, Tile | None]]:
    """Iterate over blocks of rows with their inputs, from the first to the last visible key; None if there is none."""
    for row in tile_rows(problem):
        yield row, pieces.join(row) if row.columns else None


def block_weights(problem: Problem, tile: Tile, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits and weights (b, h, q, k) of a block, and its values (b, h, k, E).

    once: the weights need no more than gradients.
    """
    key, value, bad = tile.expand_heads(problem)
    scores = logits(problem, tile.query.to(problem.compute_dtype), key, tile.at, tile.bias, bad, tile.full)
    normalize = problem.normalization.once_differentiable if once else problem.normalization.weights
    return scores, normalize(scores, tile.at), value


def attend_by_rows(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, save: bool = False,
    once: bool = False,
) -> Tensor:  # fmt: skip
    """Return the output; with `save`, every block is a checkpoint for autograd. `once`: as in `block_weights`."""
    query, key, value = (t.to(problem.compute_dtype) for t in (query, key, value))
    if own := problem.tensors:
        own = tuple(t.to(torch.promote_types(t.dtype, problem.compute_dtype)) for t in own)
        problem = tiled.with_tensors(problem, own)
    pieces = TiledInputs(problem, query, key, value)
    rows = []
    for row, tile in blocks(problem, pieces):
        if tile is None:
            part = pieces.query(row)[..., :1].masked_fill(query.new_ones((), dtype=torch.bool), 0.0)
            rows.append(part * part.new_zeros(problem.E))
        elif save:
            rows.append(checkpoint(
                _attend_block, problem, tile, seed, use_reentrant=False, preserve_rng_state=problem.custom
            ))  # fmt: skip
        else:
            rows.append(_attend_block(problem, tile, seed, once))
    return tiled.join_rows(problem, pieces, rows).to(problem.dtype)


def _attend_block(problem: Problem, tile: Tile, seed: Tensor | None, once: bool = False) -> Tensor:
    _, weights, value = block_weights(problem, tile, once)
    if seed is not None:
        weights = weights * dropout_factors(seed, problem.dropout, tile.at).to(weights)
    output = weights @ value
    if tile.bias is not None and (more := tile.bias.aggregate(tile.at, weights)) is not None:
        output = output + more
    return output


@dataclass(frozen=True, eq=False)
class RowsOperator(tiled.TiledOperator):
    """The computation by rows without a graph, as an operator on query, key, value and the description's tensors."""

    outputs = 1

    def compute(self, tensors: Tensors) -> tuple[Tensor]:  # type: ignore[override]
        query, key, value, *_ = tensors
        return (attend_by_rows(self._problem_with(tensors), query, key, value, self.seed, once=True),)

    def _gradients(
        self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool], motion: Motion | None
    ) -> Tensors:
        if self.problem.mask is not None:
            self.problem.mask.check_unchanged()
        if grads[0] is None:
            return [torch.zeros_like(tensor) if want else None for tensor, want in zip(tensors, wanted, strict=True)]
        with self._replay_random():
            return gradients(
                self._problem_with(tensors), self.seed, list(tensors), list(wanted), results[0], grads[0], motion
            )

    def curvature(
        self, tensors: Tensors, tangents: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]
    ) -> Tensors:
        return self._gradients(tensors, results[:1], grads, wanted, Motion(tangents, results[0], results[0]))

    def _attend(self, tensors: Tensors, save: bool) -> tuple[Tensor]:  # type: ignore[override]
        query, key, value, *_ = tensors
        return (attend_by_rows(self._problem_with(tensors), query, key, value, self.seed, save),)


def gradients(
    problem: Problem, seed: Tensor | None, tensors: list[Tensor], wanted: list[bool], output: Tensor,
    grad_output: Tensor, motion: Motion | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return gradients of query, key, value and the description's tensors; with a `motion`, their change along it."""
    query, key, value, *_ = tensors
    grads = [torch.zeros_like(t, dtype=problem.compute_dtype) for t in tensors]
    grad_output, moved = grad_output.to(problem.compute_dtype), [False] * len(tensors)
    if motion is not None:
        motion = motion.without_nonfinite(problem, key, value)
        moved = [tangent is not None for tangent in motion.tensors]
    varied = [want or moves for want, moves in zip(wanted, moved, strict=True)]
    leaves: dict[int, Tensor] = {}
    for tensor, want in zip(problem.tensors, varied[3:], strict=True):
        leaves.setdefault(id(tensor), tensor.detach().requires_grad_(want))
    problem = replace(
        problem, score=replace_leaves(problem.score, leaves), bias=replace_leaves(problem.bias, leaves),
        normalization=replace_leaves(problem.normalization, leaves),
    )  # fmt: skip
    pieces = TiledInputs(problem, query.detach(), key.detach(), value.detach())
    for row, tile in blocks(problem, pieces):
        if tile is None:
            continue
        given: list[Any] = [t.detach().to(problem.compute_dtype) for t in (tile.query, tile.key, tile.value)]
        for leaf, varies in zip(given, varied, strict=False):
            leaf.requires_grad_(varies)
        with torch.enable_grad():
            bias = None if problem.bias is None else problem.bias.cut(tile.at)
            own = replace(tile, query=given[0], key=given[1], value=given[2], bias=bias)
            part = _attend_block(problem, own, seed, once=motion is None)
        if problem.unpredictable and not _agrees(part.to(output.dtype), output[row.box]):
            raise tiled.mismatch_error(problem)
        given += [*problem.score.tensors(), *(() if bias is None else bias.tensors())]
        given += problem.normalization.tensors()
        shared, columns = pieces.kv_head_slice(row), tile.at.box[3] if tile.at.box is not None else slice(None)
        inside = [row.box, *[(row.batch, shared, columns)] * 2]
        first = {id(tensor): n for n, tensor in reversed(list(enumerate(given)))}  # a tensor may be used twice
        indices = [n for n, tensor in enumerate(given) if tensor.requires_grad and first[id(tensor)] == n]
        if not indices or not part.requires_grad:
            continue
        chosen = [given[n] for n in indices]
        derivatives = torch.autograd.grad(
            part, chosen, grad_output[row.box], create_graph=motion is not None, allow_unused=True
        )
        if motion is not None:
            along = [motion.inside(n, given[n], inside[min(n, 2)], tile.at) for n in indices]
            pairs = [(x, t) for x, t in zip(derivatives, along, strict=True) if x is not None and t is not None]
            pairs = [(x, t) for x, t in pairs if x.requires_grad]
            if not pairs:
                continue
            derivatives = torch.autograd.grad([x for x, _ in pairs], chosen, [t for _, t in pairs], allow_unused=True)
        for n, grad in zip(indices, derivatives, strict=True):
            if grad is not None:
                cut = n >= 3 and grad.shape != grads[n].shape
                target = tile.at.take(pad_leading(grads[n])) if cut else grads[n][inside[n]] if n < 3 else grads[n]
                target += grad
    if problem.mask is not None:  # non-finite values were replaced by a constant
        for n, tensor in ((1, key), (2, value)):
            grads[n].masked_fill_(~tensor.isfinite(), 0.0)
    return [grad.to(tensor.dtype) if want else None for grad, tensor, want in zip(grads, tensors, wanted, strict=True)]


def _agrees(computed: Tensor, known: Tensor) -> bool:
    """Whether a recomputed block is the one of the forward pass."""
    return torch.allclose(computed.detach(), known, rtol=1e-3, atol=1e-3, equal_nan=True)
