"""`LinearAttention`: features, a normaliser, a mask, decays and the delta rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines.problem import broadcast_batch
from regard.geometry import Frame, pad_leading
from regard.linear import logs
from regard.linear.checks import (
    LinearState,
    check_same_length,
    check_state,
    check_tensors,
    expand_beta,
    expand_decay,
)
from regard.linear.features import Favor, apply_features, check_features, count_features
from regard.linear.recurrence import head_count, run_recurrence
from regard.masks.algebra import And, Mask
from regard.masks.by_position import Documents
from regard.masks.patterns import Causal, Padding


@dataclass(frozen=True, repr=False)
class LinearAttention:
    """Attention in O(N) time and memory: a state that every key and value is written to, and every query reads.

        S_t   = exp(decay_t) S_{t-1}                          without decay: S_{t-1}
        S_t  += f(k_t) v_tᵀ                                   without beta
        S_t  += beta_t f(k_t) (v_t - S_tᵀ f(k_t))ᵀ            with beta: the delta rule
        out_t = S_tᵀ f(q_t)                                   divided by the sum of the weights if normalize

    features: `"elu"`, f(x) = elu(x) + 1 of the Linear Transformer; `favor(count, seed)`, which approximates softmax; or
        `"identity"`.
    mask: None, or `causal()`, `padding(lengths)` and `documents(ids)` combined with `&`. Decays, beta, documents and
        states need `causal()`. A document starts from an empty state.
    normalize: whether outputs are divided by the sum of the weights of their keys; a query with a sum of 0 gets 0.
    decay: log-decays of the heads, if they are constants, as in RetNet. needs: arguments that every call must have.

    `retnet`, `gla`, `mamba2`, `deltanet` and `gated_deltanet` build the attention of these models.

    >>> import regard as rg
    >>> attend = rg.LinearAttention("elu", mask=rg.causal())
    >>> attend(torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 32)).shape
    torch.Size([2, 8, 100, 32])
    """

    features: str | Favor = "elu"
    mask: Mask | None = None
    normalize: bool = True
    decay: tuple[float, ...] | None = None
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_features(self.features)
        if not isinstance(self.normalize, bool):
            raise TypeError(f"normalize must be True or False, but is {self.normalize!r}")
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise TypeError(
                f"mask must be a mask or None, but is {type(self.mask).__name__}; use causal(), padding(lengths) "
                "or both with &"
            )
        unfit = [part for part in self._masks if not isinstance(part, Causal | Padding | Documents)]
        if unfit:
            raise ValueError(
                "mask must be composed of causal(), padding(lengths) and documents(ids) for linear attention, but has "
                f"{unfit[0]!r}; regard.attention supports every mask"
            )
        if self.decay is not None and not all(isinstance(x, float | int) and x <= 0 for x in self.decay):
            raise ValueError(f"decay must be a tuple of log-decays, at most 0, one per head, but is {self.decay!r}")
        if unknown := set(self.needs) - {"decay", "beta"}:
            raise ValueError(f"needs may contain 'decay' and 'beta', but has {sorted(unknown)[0]!r}")

    @classmethod
    def retnet(cls, heads: int) -> LinearAttention:
        """RetNet's retention: head h decays by 1 - 2^(-5 - h) per token.

        >>> import regard as rg
        >>> rg.LinearAttention.retnet(4)(*torch.randn(3, 1, 4, 10, 8)).shape
        torch.Size([1, 4, 10, 8])
        """
        decay = tuple(math.log1p(-(2.0 ** (-5 - head))) for head in range(heads))
        return cls("identity", Causal(), normalize=False, decay=decay)

    @classmethod
    def gla(cls) -> LinearAttention:
        """Gated linear attention: a `decay` (B, H, N, D) per channel, computed from the tokens.

        >>> import regard as rg
        >>> q, k, v, gate = torch.randn(4, 1, 2, 10, 8)
        >>> rg.LinearAttention.gla()(q, k, v, decay=torch.nn.functional.logsigmoid(gate) / 16).shape
        torch.Size([1, 2, 10, 8])
        """
        return cls("identity", Causal(), normalize=False, needs=("decay",))

    @classmethod
    def mamba2(cls) -> LinearAttention:
        """Mamba-2's state space: query C, key B, value dt·x, and a `decay` dt·A (B, H, N) per head, with A < 0.

        Query and key usually have one head, shared by the heads of the value.

        >>> import regard as rg
        >>> (C, B), x, dt = torch.randn(2, 1, 1, 10, 16), torch.randn(1, 4, 10, 8), torch.rand(1, 4, 10)
        >>> rg.LinearAttention.mamba2()(C, B, dt[..., None] * x, decay=-dt).shape
        torch.Size([1, 4, 10, 8])
        """
        return cls("identity", Causal(), normalize=False, needs=("decay",))

    @classmethod
    def deltanet(cls) -> LinearAttention:
        """DeltaNet: with `beta` (B, H, N), a key replaces part of the value that it had. Keys should have length 1.

        >>> import regard as rg
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> rg.LinearAttention.deltanet()(q, k, v, beta=torch.rand(1, 2, 10)).shape
        torch.Size([1, 2, 10, 8])
        """
        return cls("identity", Causal(), normalize=False, needs=("beta",))

    @classmethod
    def gated_deltanet(cls) -> LinearAttention:
        """Gated DeltaNet: the delta rule with `beta` (B, H, N) and a `decay` (B, H, N) per head, or per channel.

        >>> import regard as rg
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> rg.LinearAttention.gated_deltanet()(q, k, v, decay=-torch.rand(1, 2, 10), beta=torch.rand(1, 2, 10)).shape
        torch.Size([1, 2, 10, 8])
        """
        return cls("identity", Causal(), normalize=False, needs=("decay", "beta"))

    def __repr__(self) -> str:
        given = {"features": self.features} | {
            name: value for name, value in vars(self).items() if value != _DEFAULTS[name]
        }
        return f"LinearAttention({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        state: LinearState | None = None,
        return_state: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        state: LinearState | None = None,
        return_state: Literal[True],
    ) -> tuple[Tensor, LinearState]: ...
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Map query (B, H, Q, D), key (B, G, K, D) and value (B, G, K, E) to (B, H, Q, E).

        Tensors of two and three axes work too. The last query is at the last key. Sums are at least float32.

        decay: log-decays, at most 0: (B, H, N), or (B, H, N, D) for a decay per channel; -inf clears the state.
        beta: (B, H, N). With decay, beta, documents or features that are not normalized, query, key and value may each
            have fewer heads than H, the largest number; axes of 1 in decay and beta are expanded.
        state: from an earlier call, which these tokens follow. return_state: also return the state after them.
        """
        for name, given in (("decay", decay), ("beta", beta)):
            if given is None and name in self.needs:
                raise ValueError(f"{self!r} needs {name}; pass {name}= of shape (B, H, N)")
        masks = self._masks
        causal = any(isinstance(part, Causal) for part in masks)
        packed = any(isinstance(part, Documents) for part in masks)
        gated = decay is not None or beta is not None or self.decay is not None or packed
        if not causal and (gated or state is not None):
            raise ValueError(
                f"mask must contain causal() with decay, beta, documents or a state, but is {self.mask!r}; "
                "they depend on the order of the tokens"
            )
        by_logs = self.normalize and self.features != "identity" and not gated
        check_tensors(query, key, value, recurrent=not by_logs)
        if state is not None or return_state or (not by_logs and causal):
            check_same_length(query, key)
        q, k, v = (pad_leading(x) for x in broadcast_batch(query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            if by_logs and not return_state and state is None:
                output, final = logs.attend(self.features, q, k, v, self._real(q, k), causal), None
            elif by_logs:
                output, final = self._by_logs(q, k, v, state, causal)
            elif causal:
                output, final = self._recurrent(query.dim(), q, k, v, decay, beta, state)
            else:
                output, final = self._unmasked(q, k, v)
        output = output.reshape(output.shape[4 - query.dim() :])
        return (output, final) if return_state else output  # type: ignore[return-value]

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: LinearState | None = None,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        """Continue a causal call: return the output for the next tokens, and the new state.

        Shapes are those of a call with Q = K = 1, or more for a whole prompt. Starting from `None`, the outputs are
        those of the causal call on all tokens.

        >>> import regard as rg
        >>> attend, (q, k, v) = rg.LinearAttention(mask=rg.causal()), torch.randn(3, 1, 2, 5, 4)
        >>> out, state = attend.step(q[:, :, :4], k[:, :, :4], v[:, :, :4])
        >>> out, state = attend.step(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state)
        >>> torch.allclose(out, attend(q, k, v)[:, :, 4:], atol=1e-6)
        True
        """
        if any(isinstance(part, Padding | Documents) for part in self._masks):
            raise ValueError(f"mask must be None or causal() for step, but is {self.mask!r}; pass the real tokens only")
        attend = self if self.mask is not None else replace(self, mask=Causal())
        return attend(query, key, value, decay=decay, beta=beta, state=state, return_state=True)

    @property
    def _masks(self) -> tuple[Mask, ...]:
        if self.mask is None:
            return ()
        mask = self.mask.snapshot()
        return mask.parts if isinstance(mask, And) else (mask,)

    def _by_logs(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, causal: bool
    ) -> tuple[Tensor, LinearState]:
        B, G, _, D = k.shape
        check_state(state, (B, G, count_features(self.features, D), v.shape[-1] + 1), True, q)
        past = None if state is None or state.scale is None else logs.LogState(state.scale, state.sums)
        output, after = logs.attend_after(self.features, q, k, v, self._real(q, k), past)
        if not causal:
            output = logs.attend(self.features, q, k, v, self._real(q, k), False)
        return output, LinearState(after.sums, after.scale)

    def _recurrent(
        self,
        dims: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        state: LinearState | None,
    ) -> tuple[Tensor, LinearState]:
        heads, real = head_count(q, k, v), self._real(q, k)
        M, E = count_features(self.features, q.shape[-1]), v.shape[-1] + self.normalize
        check_state(state, (q.shape[0], heads, M, E), False, q)
        if self.decay is not None:
            if decay is not None:
                raise ValueError(f"decay must be None, because {self!r} has constant decays")
            if len(self.decay) != heads:
                raise ValueError(f"{self!r} has decays of {len(self.decay)} heads, but this call has {heads}")
            decay = q.new_tensor(self.decay, dtype=torch.promote_types(q.dtype, torch.float32))
            decay = pad_leading(decay[:, None], dims - 1) if dims > 2 else decay
        decay = None if decay is None else expand_decay(decay, q, dims, heads, M)
        beta = None if beta is None else expand_beta(beta, q, dims, heads)
        if real is not None:  # before further computation, so that a NaN reaches no gradient
            k, v = torch.where(real, k, 0), torch.where(real, v, 0)
        dtype = q.dtype
        if self.features != "identity":
            q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        q, k = apply_features(self.features, q, k, self.normalize)
        if real is not None:  # padding leaves the state as it is
            k, token = torch.where(real, k, 0), real[..., 0]
            beta = None if beta is None else torch.where(token, beta, 0)
            if decay is not None:
                decay = torch.where(token if decay.dim() == 3 else real, decay, 0)
        decay = self._with_resets(decay, q, heads)
        if self.normalize:
            v = F.pad(v, (0, 1), value=1.0)
        output, final = run_recurrence(q, k, v, decay, beta, None if state is None else state.sums)
        return self._normalize(output).to(dtype), LinearState(final)

    def _unmasked(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, LinearState]:
        """Every query reads all keys."""
        heads, dtype, real = head_count(q, k, v), q.dtype, self._real(q, k)
        if real is not None:
            k, v = torch.where(real, k, 0), torch.where(real, v, 0)
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        q, k = apply_features(self.features, q, k, self.normalize)
        k = k if real is None else torch.where(real, k, 0)
        v = F.pad(v, (0, 1), value=1.0) if self.normalize else v
        shared = max(k.shape[1], v.shape[1])
        sums = k.repeat_interleave(shared // k.shape[1], 1).mT @ v.repeat_interleave(shared // v.shape[1], 1)
        sums = sums.repeat_interleave(heads // shared, 1)
        output = q.repeat_interleave(heads // q.shape[1], 1) @ sums
        return self._normalize(output).to(dtype), LinearState(sums)

    def _normalize(self, output: Tensor) -> Tensor:
        if not self.normalize:
            return output
        value, weight = output[..., :-1], output[..., -1:]
        return torch.where(weight == 0, 0, value / torch.where(weight == 0, 1, weight))

    def _with_resets(self, decay: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
        """Return the decays with -inf at the first token of every document but the first, which follows the state."""
        for part in self._masks:
            if not isinstance(part, Documents):
                continue
            if part.intervals(Frame(q.shape[0], heads, q.shape[2], q.shape[2], 0)) is None:
                raise ValueError(
                    f"the tokens of a document must be adjacent for linear attention, but mask is {self.mask!r}"
                )
            ids = pad_leading(part.ids, 2).to(q.device)
            first = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))[:, None]  # (B or 1, 1, N)
            if decay is None:
                decay = q.new_zeros(q.shape[0], heads, q.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))
            decay = torch.where(first if decay.dim() == 3 else first[..., None], -math.inf, decay)
        return decay

    def _real(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return which keys are not padding, (B or 1, 1, K, 1)."""
        real = None
        frame = Frame(q.shape[0], q.shape[1], q.shape[2], k.shape[2], k.shape[2] - q.shape[2])
        for part in self._masks:
            part.check(frame)
            if isinstance(part, Padding):
                lengths = torch.as_tensor(part.lengths, device=k.device).reshape(-1, 1, 1, 1)
                below = torch.arange(k.shape[2], device=k.device)[:, None] < lengths
                real = below if real is None else real & below
        return real


_DEFAULTS = {name: field.default for name, field in LinearAttention.__dataclass_fields__.items()}
