"""The problem and the engine of a call, cached per description: planning would dominate small calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.cache import CACHE
from regard.engines.derivatives import transform_state
from regard.engines.native import PackedCall
from regard.engines.problem import Engine, Problem
from regard.engines.select import ENGINES, select
from regard.masks import Mask

MAX_PLANS = 256  # kept per description
PLAN_BYTES = 4096  # rough size of one plan
Plan = tuple[Problem, Engine]


class Plans(dict[tuple, Plan]):
    """The plans of one description. Copies start empty: plans hold addresses and tensors with a history."""

    def __init__(self) -> None:
        self.epoch = 0  # epoch of the cache when a plan was last used
        self.last: PackedCall | None = None  # the last call, if it can be repeated without looking for its plan

    def clear(self) -> None:
        super().clear()
        self.last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Plans:
        return Plans()

    def __reduce__(self) -> Any:
        return Plans, ()

    def find(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        own: tuple[Tensor, ...],
        mask: Mask | None,
        settings: tuple,
        engine: str | None,
        build: Callable[[], Problem],
        *,
        owner: object,
    ) -> Plan:
        """Return the plan of a call; build the problem and select an engine if there is none.

        inputs: query, key and value. own: the tensors of the description. mask: its mask as it is now. settings: other
        properties of the call that the plan depends on.
        """
        key = plan = None
        self.last = None
        try:
            key = _plan_key(*inputs, own, engine, settings)
            plan = self.get(key)
        except (AttributeError, TypeError, RuntimeError):
            key = None  # non-tensors and nested tensors, which the check rejects, or symbolic sizes
        if plan is not None and plan[0].mask is mask and _are_same(plan[0].tensors, own):
            self._touch()
            return plan
        problem = build()
        plan = problem, select(problem, engine)
        if len(self) >= MAX_PLANS or any(other.mask is not mask for other, _ in list(self.values())):
            self.clear()  # too many, or the mask has changed
        if key is not None:
            self[key] = plan
            CACHE.put(("plans", id(self)), self, PLAN_BYTES * len(self), owner=owner, drop=Plans.clear)
        self.epoch = CACHE.epoch
        return plan

    def repeat_last(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, lse: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Repeat the last call with new addresses and values; None if it differs in anything else.

        Only for calls without an engine by name, observers and other contexts, on the calling thread.
        """
        last = self.last
        if last is None or last.problem.lse is not lse or "native" not in ENGINES:
            return None
        if mask is not None and mask.snapshot() is not last.problem.mask:
            return None
        if self.epoch != CACHE.epoch:
            self._touch()
        return last.repeat(query, key, value)

    def _touch(self) -> None:
        """Mark the plans as used, for the cache."""
        if self.epoch != CACHE.epoch:
            CACHE.touch(("plans", id(self)))
            self.epoch = CACHE.epoch


def _are_same(before: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> bool:
    """Whether a description still holds the same tensors."""
    return not now or all(a is b for a, b in zip(before, now, strict=True))


def _plan_key(
    query: Tensor, key: Tensor, value: Tensor, own: tuple[Tensor, ...], engine: str | None, settings: tuple
) -> tuple:  # fmt: skip
    """Return everything that a plan depends on."""
    return (
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.is_cpu or query.device, key.is_cpu or key.device, value.is_cpu or value.device, engine, settings,
        torch.is_grad_enabled() and tuple([tensor.requires_grad for tensor in (query, key, value, *own)]),
        own and tuple([(t.shape, t.dtype, t.device, type(t), t.is_neg()) for t in own]),
        type(query) is type(key) is type(value) is Tensor or (type(query), type(key), type(value)),
        query.is_neg() or key.is_neg() or value.is_neg(), torch._C._len_torch_dispatch_stack(),
        query.layout is key.layout is value.layout is torch.strided,
        transform_state((query, key, value, *own)), tuple(ENGINES),
    )  # fmt: skip
