"""Layers with a recurrent state instead of cached keys and values: what the layers of all models have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.linear import LinearAttention, LinearState
from regard.masks import Mask, causal
from regard.masks.algebra import And, Not
from regard.masks.by_position import Documents
from regard.masks.explicit import Dense
from regard.masks.patterns import Causal, Padding
from regard.nn.cache import Cache
from regard.nn.context import LayerContext, check_not_in_context
from regard.sharding import current_sharding


class RecurrentCache:
    """The state of a recurrent layer after the tokens so far: its size does not depend on their number.

    state: of the linear attention. inputs: the last inputs of the short convolution, (B, width - 1, channels).

    >>> import regard as rg, torch
    >>> layer = rg.nn.GatedDeltaNet(16, heads=2)
    >>> cache = layer.cache()
    >>> layer(torch.randn(1, 5, 16), cache=cache).shape, cache.seen_tokens
    (torch.Size([1, 5, 16]), 5)
    """

    dropped = 0  # the state depends on all tokens

    def __init__(self) -> None:
        self.seen_tokens = 0
        self.state: LinearState | None = None
        self.inputs: Tensor | None = None

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Make batch row b continue row `rows[b]`."""
        if self.state is not None:
            self.state = LinearState(self.state.sums[rows])
        if self.inputs is not None:
            self.inputs = self.inputs[rows]


LayerCache = Cache | RecurrentCache
"""The cache of a layer: of keys and values, or of a recurrent state."""


@dataclass(frozen=True)
class Tokens:
    """What a recurrent layer reads from the context of a call: real tokens (B, N) and packed documents."""

    real: Tensor | None = None
    documents: Mask | None = None
    positions: Tensor | None = None  # (N,) or (B, N), within the document

    def clear_padding(self, x: Tensor) -> Tensor:
        """Replace padding tokens of x (B, N, ...) by 0."""
        return x if self.real is None else torch.where(self.real.reshape(*self.real.shape, *(1,) * (x.dim() - 2)), x, 0)


def read_tokens(context: LayerContext, x: Tensor, cache: RecurrentCache | None) -> Tokens:
    """Read masks of a context that a recurrent layer can apply; raise for all others."""
    if current_sharding() is not None:
        raise ValueError("recurrent layers cannot be sharded along the sequence; use them outside of sequence()")
    if context.bias is not None:
        raise ValueError(f"recurrent layers have no scores to which a bias could be added, got {context.bias!r}")
    (B, N), device, start = x.shape[:2], x.device, 0 if cache is None else cache.seen_tokens
    at = torch.arange(start, start + N, device=device)
    real, documents = None, None
    mask = None if context.mask is None else context.mask.snapshot()
    for part in mask.parts if isinstance(mask, And) else () if mask is None else (mask,):
        if isinstance(part, Causal):
            continue
        if cache is not None:
            raise ValueError(f"a recurrent cache supports prompts with left padding, but no mask {part!r}")
        if isinstance(part, Documents) and documents is None:
            documents = part
            continue
        padding = part.negated if isinstance(part, Not) else part
        if isinstance(padding, Padding):
            lengths = torch.as_tensor(padding.lengths, device=device).reshape(-1, 1)
            valid = (at < lengths) != isinstance(part, Not)
        elif isinstance(part, Dense) and part.tensor.shape[1:3] == (1, 1) and part.tensor.shape[3] == N:
            valid = part.tensor[:, 0, 0].to(device)
        else:
            raise ValueError(
                f"recurrent layers are causal and support padding and packed documents, but not the mask {part!r}"
            )
        real = valid if real is None else real & valid
    if context.left_padding is not None:
        valid = at >= context.left_padding[:, None]
        real = valid if real is None else real & valid
    real = None if real is None else real.expand(B, N)
    return Tokens(real, documents, None if documents is None else _positions(documents, N, device))


def _positions(documents: Documents, N: int, device: torch.device) -> Tensor:
    ids = documents.ids.to(device)
    if ids.shape[-1] != N:
        raise ValueError(f"documents must have one id per token, {N}, but have {ids.shape[-1]}")
    at = torch.arange(N, device=device)
    first = torch.nn.functional.pad(ids[..., 1:] != ids[..., :-1], (1, 0), value=True)
    return at - torch.where(first, at, 0).cummax(-1).values


@dataclass
class Inputs:
    """Query, key (B, N, heads, D), value (B, N, heads, E), decay (B, N, H) or (B, N, H, D), and beta (B, N, H)."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    skip: Tensor | None = None  # what the output projection adds to the output, and multiplies it by, if needed
    gate: Tensor | None = None


class RecurrentLayer(nn.Module):
    """Base class: projects tokens to `Inputs`, runs the recurrence, and projects its outputs."""

    attend: LinearAttention

    def project_inputs(self, x: Tensor, tokens: Tokens, context: LayerContext, cache: RecurrentCache | None) -> Inputs:
        raise NotImplementedError

    def project_output(self, x: Tensor, inputs: Inputs, output: Tensor) -> Tensor:
        """Map outputs (B, N, H, E) to (B, N, d_model)."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        context: LayerContext | None = None,
        cache: RecurrentCache | None = None,
    ) -> Tensor:
        """Map x (B, N, d_model) to (B, N, d_model). A token depends on itself and on earlier tokens.

        mask: padding or packed documents. context: replaces `mask` inside a stack.
        cache: from `cache()`; the tokens of x follow those of earlier calls.
        """
        if context is None:
            context = LayerContext(mask)
        else:
            check_not_in_context(mask=mask)
        if cache is not None and not isinstance(cache, RecurrentCache):
            raise TypeError(f"cache must be a RecurrentCache, got {type(cache).__name__}; use the one of `cache()`")
        tokens = read_tokens(context, x, cache)
        x = tokens.clear_padding(x)
        inputs = self.project_inputs(x, tokens, context, cache)
        clear = tokens.clear_padding
        key, value = clear(inputs.key).transpose(1, 2), clear(inputs.value).transpose(1, 2)
        decay = None if inputs.decay is None else clear(inputs.decay).transpose(1, 2)
        beta = None if inputs.beta is None else clear(inputs.beta).transpose(1, 2)
        attend = self.attend
        if tokens.documents is not None:
            attend = replace(attend, mask=causal() & tokens.documents)
        state = None if cache is None else cache.state
        result = attend(
            inputs.query.transpose(1, 2), key, value, decay=decay, beta=beta, state=state, return_state=True
        )
        output, final = result
        if cache is not None:
            assert isinstance(final, LinearState)
            cache.state, cache.seen_tokens = final, cache.seen_tokens + x.shape[1]
        return self.project_output(x, inputs, output.transpose(1, 2))

    def cache(self) -> RecurrentCache:
        """Return an empty cache for this layer."""
        return RecurrentCache()


def convolve(convolution: nn.Module, x: Tensor, tokens: Tokens, cache: RecurrentCache | None) -> Tensor:
    """Apply a short convolution to x (B, N, channels), which follows the inputs in the cache."""
    output, past = convolution(x, None if cache is None else cache.inputs, tokens.positions)
    if cache is not None:
        cache.inputs = past
    return output
