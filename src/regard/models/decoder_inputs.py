"""Sources and their targets, as an encoder-decoder takes them: in tensors, or packed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard.geometry import format_shape
from regard.models.inputs import Inputs, prepare_inputs
from regard.nn import LayerContext, Packed, key_mask, pack, unpack


class DecoderInputs(NamedTuple):
    """A target beside its encoded source, as a decoder takes them."""

    ids: Tensor  # (B, N)
    positions: Tensor  # (N,)
    context: LayerContext
    encoded: Tensor  # (B, K, d_model)
    cross_context: LayerContext
    target: Inputs
    packed: Packed | None = None  # the target's sequences, if the source is packed

    def to_input_form(self, logits: Tensor) -> Tensor | Packed | list[Tensor]:
        """(B, N, vocabulary) in the form of the target: as it is, packed, or a list."""
        if self.packed is None:
            return logits
        if isinstance(self.target, Tensor):
            return logits.view(*self.target.shape, -1)
        packed = self.packed.with_values(logits.flatten(0, 1))
        return packed if isinstance(self.target, Packed) else unpack(packed)


def prepare_decoder_inputs(target: Inputs, encoded: Inputs, source_mask: Tensor | None = None) -> DecoderInputs:
    """A target beside what an encoder made of its source: tensors with a (B, K) mask of the source, or both packed."""
    if isinstance(encoded, Tensor):
        if not isinstance(target, Tensor):
            raise TypeError(
                f"a packed target goes with a packed source, but the source is a tensor {format_shape(encoded)}; "
                "pass both packed, both as lists, or both as tensors"
            )
        if len(target) != len(encoded):
            raise ValueError(f"source and target must be as many, but are {len(encoded)} and {len(target)}")
        rows = prepare_inputs(target)
        return DecoderInputs(
            target, rows.positions, rows.context, encoded, LayerContext(key_mask(source_mask, encoded)), target
        )
    if source_mask is not None:
        raise ValueError("source_mask goes with a source (B, K); packed sources and lists say their lengths themselves")
    source = encoded if isinstance(encoded, Packed) else pack(encoded)
    packed = target if isinstance(target, Packed) else pack(list(target))
    across = packed.cross_mask(source)
    if len(set(packed.lengths)) == 1 == len(set(source.lengths)) and packed.lengths[0] and source.lengths[0]:
        rows = prepare_inputs(packed, batched=True)  # equal lengths on both sides are a plain batch
        states = source.values.unflatten(0, (len(source), -1))
        return DecoderInputs(rows.values, rows.positions, rows.context, states, LayerContext(), target, packed)
    context = LayerContext(packed.mask, positions=packed.positions)
    return DecoderInputs(
        packed.values[None], packed.positions, context, source.values[None], LayerContext(across), target, packed
    )


def pad_sources(encoded: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Encoded sources as one tensor (B, K, d_model) and its mask."""
    if isinstance(encoded, Tensor):
        return encoded, mask
    return (encoded if isinstance(encoded, Packed) else pack(encoded)).padded()
