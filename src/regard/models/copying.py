"""An encoder-decoder that may copy: what it writes comes from its vocabulary, or from its source."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.models.pairs import padded, sides_of
from regard.models.parts import Inputs
from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Packed, linear, pack
from regard.nn.generate import State


class Copying(nn.Module):
    """A pointer-generator: a token is said from the vocabulary, or copied from the source.

        p(token) = g · softmax(logits)[token] + (1 - g) · (the sum of weights of source tokens that are this token)

    with g = sigmoid(gate · hidden) and weights = softmax(query(hidden) · key(encoded) / sqrt(width)).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.gate = linear(width, width), linear(width, width), linear(width, 1)

    def weights(self, hidden: Tensor, encoded: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states (B, N, width) and encoded sources (B, K, width) to weights (B, N, K)."""
        scores = self.query(hidden) @ self.key(encoded).mT / math.sqrt(hidden.shape[-1])
        return _wide(scores if mask is None else scores.masked_fill(~mask[:, None], -math.inf)).softmax(-1)

    def forward(self, logits: Tensor, hidden: Tensor, encoded: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (B, N, vocabulary) to log-probabilities of the same shape; ids (B, K) are the source's."""
        weights, gate = self.weights(hidden, encoded, mask), _wide(self.gate(hidden))
        copied = torch.zeros_like(logits, dtype=weights.dtype)
        copied.scatter_add_(-1, ids[:, None].expand(weights.shape), weights)
        said = F.logsigmoid(gate) + _wide(logits).log_softmax(-1)
        return torch.logaddexp(said, F.logsigmoid(-gate) + _log(copied))


class PointerTransformer(Transformer):
    """A Transformer that may copy. What it returns are log-probabilities, which are logits too.

    Both sides have one vocabulary, so that a token of the source is one of the target.

    >>> import torch
    >>> from regard.models import PointerTransformer, TransformerConfig
    >>> model = PointerTransformer(TransformerConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> said = model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]]))
    >>> torch.testing.assert_close(said.exp().sum(-1), torch.ones(1, 2))
    """

    def __init__(self, config: TransformerConfig) -> None:
        if config.target_vocabulary is not None:
            raise ValueError("a model that copies has one vocabulary for both sides, but target_vocabulary is given")
        super().__init__(config)
        self.copying = Copying(config.width)

    def forward(
        self, source: Inputs, target: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Log-probabilities (B, N, vocabulary); of packed targets packed, of a list a list."""
        encoded = self.encode(source, source_mask)
        sides = sides_of(target, encoded, source_mask)
        hidden = self._decoded(sides)
        if sides.packed is None:
            return self.copying(self.logits(hidden), hidden, encoded, source, source_mask)
        hidden, ids, states, mask = _apart(hidden, sides.packed, source, encoded)
        said = self.copying(self.logits(hidden), hidden, states, ids, mask)
        rows = zip(said, sides.packed.lengths, strict=True)
        return sides.back(torch.cat([row[:length] for row, length in rows])[None])

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Not without the source: its tokens are what is copied."""
        raise TypeError("a model that copies needs its source to decode; call model(source, target, source_mask)")

    def loss(self, source: Packed, target: Packed, after: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of the cross entropies of the tokens `after` each of the target (N,).

        Of copies, only those of the wanted tokens are worked out. Smoothing is of what the vocabulary says.
        """
        encoded = self.encode(source)
        hidden = self._decoded(sides_of(target, encoded)).flatten(0, 1)
        said = _wide(self.logits(hidden)).log_softmax(-1)  # (N, vocabulary)
        gate = _wide(self.copying.gate(hidden))[:, 0]
        rows, ids, states, mask = _apart(hidden, target, source, encoded)
        wanted = pad_sequence(list(after.split(target.lengths)), batch_first=True)
        copied = (self.copying.weights(rows, states, mask) * (ids[:, None] == wanted[:, :, None])).sum(-1)
        copied = copied[torch.arange(rows.shape[1]) < torch.tensor(target.lengths)[:, None]]
        both = torch.logaddexp(
            F.logsigmoid(gate) + said.gather(-1, after[:, None])[:, 0], F.logsigmoid(-gate) + _log(copied)
        )
        return -both.sum() if not smoothing else (smoothing - 1) * both.sum() - smoothing * said.mean(-1).sum()

    def begin(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[State, Tensor]:
        """A state to generate from, and the start token of every source, (B, 1)."""
        encoded, mask = padded(self.encode(source, source_mask), source_mask)
        ids, _ = padded(source if isinstance(source, Tensor) else _packed(source), source_mask)
        return self.begin_from(encoded, mask, partial(self._say, encoded=encoded, ids=ids, mask=mask))

    def _say(self, hidden: Tensor, encoded: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        rows = hidden.view(len(encoded), -1, hidden.shape[-1])  # the beams of a source are its queries
        return self.copying(self.logits(rows), rows, encoded, ids, mask).flatten(0, 1)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log(chances: Tensor) -> Tensor:
    """The logarithm, very low where the chance is 0, so that its gradient is 0 there."""
    return chances.clamp(min=torch.finfo(chances.dtype).tiny).log()


def _apart(hidden: Tensor, target: Packed, source: Inputs, encoded: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed pairs each in a row of its own: hidden states (B, N, width); ids, states and mask of the sources (B, K).

    A target's weights on its source are N x K numbers: small, for it is short, but not over all pairs of a batch.
    """
    rows = pad_sequence(list(hidden.view(-1, hidden.shape[-1]).split(target.lengths)), batch_first=True)
    ids, mask = padded(_packed(source), None)
    assert mask is not None
    return rows, ids, padded(encoded, None)[0], mask


def _packed(source: Inputs) -> Packed:
    return source if isinstance(source, Packed) else pack(list(source))
