"""A pointer-generator: an encoder-decoder that can copy tokens from its source."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.components import upcast
from regard.models.decoder_inputs import pad_sources, prepare_decoder_inputs
from regard.models.inputs import Inputs
from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Packed, linear, pack
from regard.nn.generate import GenerationState


class CopyMechanism(nn.Module):
    """Mixture of generating a token from the vocabulary and copying it from the source.

        p(token) = g · softmax(logits)[token] + (1 - g) · (sum of the weights of source tokens equal to it)

    with g = sigmoid(gate · hidden) and weights = softmax(query(hidden) · key(encoded) / sqrt(d_model)).
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query, self.key, self.gate = linear(d_model, d_model), linear(d_model, d_model), linear(d_model, 1)

    def weights(self, hidden: Tensor, encoded: Tensor, mask: Tensor | None) -> Tensor:
        """Copy weights (B, N, K) for hidden states (B, N, d_model) and encoded sources (B, K, d_model)."""
        scores = self.query(hidden) @ self.key(encoded).mT / math.sqrt(hidden.shape[-1])
        if mask is None:
            return upcast(scores).softmax(-1)
        weights = upcast(scores).masked_fill(~mask[:, None], -math.inf).softmax(-1)
        return weights.masked_fill(~mask[:, None], 0.0)  # an empty source has weights 0, not NaN

    def gates(self, hidden: Tensor, mask: Tensor | None, keys: int) -> tuple[Tensor, Tensor]:
        """Logarithms of g and 1 - g (B, N); g is 1 for an empty source."""
        gate = upcast(self.gate(hidden)[..., 0])
        if mask is not None:
            gate = gate.masked_fill(~mask.any(1, keepdim=True), math.inf)
        elif not keys:
            gate = torch.full_like(gate, math.inf)
        return F.logsigmoid(gate), F.logsigmoid(-gate)

    def forward(self, logits: Tensor, hidden: Tensor, encoded: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Map logits (B, N, vocabulary) to log-probabilities of the same shape; `ids` (B, K) are the source tokens."""
        weights, (generate_gate, copy_gate) = (
            self.weights(hidden, encoded, mask),
            self.gates(hidden, mask, ids.shape[1]),
        )
        copied = torch.zeros_like(logits, dtype=weights.dtype)
        copied.scatter_add_(-1, ids[:, None].expand(weights.shape), weights)
        generated = generate_gate[..., None] + upcast(logits).log_softmax(-1)
        return torch.logaddexp(generated, copy_gate[..., None] + _log(copied))


class PointerTransformer(Transformer):
    """A Transformer that can copy source tokens. It returns log-probabilities, which can be used as logits.

    Source and target share one vocabulary.

    >>> import torch
    >>> from regard.models import PointerTransformer, TransformerConfig
    >>> model = PointerTransformer(TransformerConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> generated = model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]]))
    >>> torch.testing.assert_close(generated.exp().sum(-1), torch.ones(1, 2))
    """

    def __init__(self, config: TransformerConfig) -> None:
        if config.target_vocabulary is not None:
            raise ValueError(
                "PointerTransformer has one vocabulary for source and target; leave target_vocabulary unset"
            )
        super().__init__(config)
        self.copying = CopyMechanism(config.d_model)

    def forward(
        self, source: Inputs, target: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return log-probabilities (B, N, vocabulary), in the form of the target."""
        return self.decode(target, self.encode(source, source_mask), source_mask, source=source)

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None, *, source: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return log-probabilities of a target, given the output of `encode` and the ids of its `source`."""
        if source is None:
            raise TypeError("PointerTransformer needs the source ids to decode; pass `source=`")
        inputs = prepare_decoder_inputs(target, encoded, source_mask)
        hidden = self._decode_hidden(inputs)
        if inputs.packed is None:
            return self.copying(self.logits(hidden), hidden, encoded, source, source_mask)
        unpacked = _unpack_pairs(hidden, inputs.packed, source, encoded)
        generated = self.copying(
            self.logits(unpacked.hidden), unpacked.hidden, unpacked.encoded, unpacked.ids, unpacked.mask
        )
        return inputs.to_input_form(generated[unpacked.real][None])

    def loss(self, source: Packed, target: Packed, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """Sum of the cross entropies of the labels (N,), the next token of each target token.

        Copy probabilities are computed for the labels only; smoothing applies to the vocabulary distribution.
        """
        encoded = self.encode(source)
        hidden = self._decode_hidden(prepare_decoder_inputs(target, encoded)).flatten(0, 1)
        generated = upcast(self.logits(hidden)).log_softmax(-1)  # (N, vocabulary)
        unpacked = _unpack_pairs(hidden, target, source, encoded)
        target_labels, _ = target.with_values(labels).padded()
        weights = self.copying.weights(unpacked.hidden, unpacked.encoded, unpacked.mask)
        copied = (weights * (unpacked.ids[:, None] == target_labels[:, :, None])).sum(-1)[unpacked.real]
        gates = self.copying.gates(unpacked.hidden, unpacked.mask, unpacked.ids.shape[1])
        generate_gate, copy_gate = (gate[unpacked.real] for gate in gates)
        log_probabilities = torch.logaddexp(
            generate_gate + generated.gather(-1, labels[:, None])[:, 0], copy_gate + _log(copied)
        )
        return (
            -log_probabilities.sum()
            if not smoothing
            else (smoothing - 1) * log_probabilities.sum() - smoothing * generated.mean(-1).sum()
        )

    def start_generation(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[GenerationState, Tensor]:
        """Return a state to generate from, and the start token of every source, (B, 1)."""
        encoded, mask = pad_sources(self.encode(source, source_mask), source_mask)
        ids, _ = pad_sources(source if isinstance(source, Tensor) else _as_packed(source), source_mask)
        return self.start_generation_from(
            encoded, mask, partial(self._log_probabilities, encoded=encoded, ids=ids, mask=mask)
        )

    def _log_probabilities(self, hidden: Tensor, encoded: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        rows = hidden.view(len(encoded), -1, hidden.shape[-1])  # the beams of a source are treated as its queries
        return self.copying(self.logits(rows), rows, encoded, ids, mask).flatten(0, 1)


def _log(probabilities: Tensor) -> Tensor:
    """Logarithm clamped at the smallest normal number, with gradient 0 there."""
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


class UnpackedPairs(NamedTuple):
    """Packed source-target pairs, padded to one row per pair.

    Copy weights are N x K numbers per pair, which is small, while those of a whole packed batch are not.
    """

    hidden: Tensor  # (B, N, d_model)
    real: Tensor  # (B, N): True for real target tokens
    ids: Tensor  # (B, K): source ids
    encoded: Tensor  # (B, K, d_model)
    mask: Tensor  # (B, K)


def _unpack_pairs(hidden: Tensor, target: Packed, source: Inputs, encoded: Inputs) -> UnpackedPairs:
    ids, mask = _as_packed(source).padded()
    states, _ = pad_sources(encoded, None)
    return UnpackedPairs(*target.with_values(hidden.view(-1, hidden.shape[-1])).padded(), ids, states, mask)


def _as_packed(source: Inputs) -> Packed:
    return source if isinstance(source, Packed) else pack(list(source))
