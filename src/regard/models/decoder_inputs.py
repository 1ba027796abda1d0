"""Inputs of encoder-decoders: targets with their encoded sources, as tensors or packed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard.geometry import format_shape
from regard.models.inputs import Inputs, prepare_inputs
from regard.nn import LayerContext, Packed, key_mask, pack, unpack


class DecoderInputs(NamedTuple):
    """Targets and encoded sources in the form that a decoder takes."""

    ids: Tensor  # (B, N)
    positions: Tensor  # (N,)
    context: LayerContext
    encoded: Tensor  # (B, K, d_model)
    cross_context: LayerContext
    target: Inputs
    packed: Packed | None = None  # the packed target, if the source is packed

    def to_input_form(self, logits: Tensor) -> Tensor | Packed | list[Tensor]:
        """Convert logits (B, N, vocabulary) to the form of the target: a tensor, packed, or a list."""
        if self.packed is None:
            return logits
        if isinstance(self.target, Tensor):
            return logits.view(*self.target.shape, -1)
        packed = self.packed.with_values(logits.flatten(0, 1))
        return packed if isinstance(self.target, Packed) else unpack(packed)


def prepare_decoder_inputs(target: Inputs, encoded: Inputs, source_mask: Tensor | None = None) -> DecoderInputs:
    """Combine a target with its encoded source: tensors with a (B, K) source mask, or both packed or lists."""
    if isinstance(encoded, Tensor):
        if not isinstance(target, Tensor):
            raise TypeError(
                f"a packed target needs a packed source, but the source is a tensor {format_shape(encoded)}; "
                "pass both packed, both as lists, or both as tensors"
            )
        if len(target) != len(encoded):
            raise ValueError(f"source and target must have equal batch sizes, got {len(encoded)} and {len(target)}")
        rows = prepare_inputs(target)
        return DecoderInputs(
            target, rows.positions, rows.context, encoded, LayerContext(key_mask(source_mask, encoded)), target
        )
    if source_mask is not None:
        raise ValueError("packed sources and lists take no source_mask: their lengths are known; omit it")
    source = encoded if isinstance(encoded, Packed) else pack(encoded)
    packed = target if isinstance(target, Packed) else pack(list(target))
    cross_mask = packed.cross_mask(source)
    if len(set(packed.lengths)) == 1 == len(set(source.lengths)) and packed.lengths[0] and source.lengths[0]:
        rows = prepare_inputs(packed, batched=True)  # sequences of equal lengths form a plain batch
        states = source.values.unflatten(0, (len(source), -1))
        return DecoderInputs(rows.values, rows.positions, rows.context, states, LayerContext(), target, packed)
    context = LayerContext(packed.mask, positions=packed.positions)
    return DecoderInputs(
        packed.values[None], packed.positions, context, source.values[None], LayerContext(cross_mask), target, packed
    )


def pad_sources(encoded: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return encoded sources as one tensor (B, K, d_model) and its mask."""
    if isinstance(encoded, Tensor):
        return encoded, mask
    return (encoded if isinstance(encoded, Packed) else pack(encoded)).padded()
