"""Masks with tensors in compiled functions.

torch.compile reads a mask once, while tracing. The graph checks in every call that its tensors are unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.fingerprint import fingerprint

if TYPE_CHECKING:
    from regard.masks.algebra import Mask


def _snapshot_now(mask: Mask) -> str:
    """Take a snapshot, which the mask keeps, and return the fingerprints of its tensors."""
    mask.read()
    return repr([fingerprint(tensor) for tensor in mask.tensors()])


_snapshot_now._dynamo_marked_constant = True  # type: ignore[attr-defined]
_CHECKED = torch.zeros(0)  # declared as written by the check, so that no compiler removes the check


@torch.library.custom_op("regard::check_mask", mutates_args=("checked",))
def _check_mask(checked: Tensor, tensors: list[Tensor], before: str) -> None:
    if repr([fingerprint(tensor) for tensor in tensors]) != before:
        raise RuntimeError(
            "a tensor of a mask was changed after torch.compile read it; build the mask inside the compiled function "
            "from a tensor that is an argument, or call torch.compiler.reset() after the change"
        )


@_check_mask.register_fake
def _(checked: Tensor, tensors: list[Tensor], before: str) -> None:
    return None


def snapshot_in_graph(mask: Mask) -> Mask:
    """Return the snapshot of a mask that was built before the graph."""
    if not mask.tensors():
        return mask
    torch.ops.regard.check_mask(_CHECKED, list(mask.tensors()), _snapshot_now(mask))
    return mask._snapshot  # type: ignore[attr-defined]
