"""Targets on another device: tensors are moved there, and results back to where the properties compare them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.check.targets.target import NotSupported, Target

MOVED = "tensors are moved to {device}, so that the copies would be checked"
UNSUPPORTED = {
    "memory": "the memory of {device} is not measured", "inputs-untouched": MOVED, "own-output": MOVED,
}  # fmt: skip
SETUP = """\


attend_there = attend


def attend(*tensors, mask=None, **options):
    if mask is not None:
        options["mask"] = mask.to({device!r})
    return attend_there(*(x.to({device!r}) for x in tensors), **options).to(tensors[0].device)
"""


def available_device(name: str) -> torch.device:
    """Return the device with this name, or raise NotSupported."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).add_(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise NotSupported(f"device {name!r} is not available: {str(error).splitlines()[0]}") from None
    return device


def on_device(target: Target, device: torch.device) -> Target:
    """The same target on a device.

    >>> import torch
    >>> from regard.check import target
    >>> from regard.check.targets.devices import on_device
    >>> on_device(target("regard-reference"), torch.device("cpu")).name
    'reference'
    """
    if device.type == "cpu":
        return target
    attend = target.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: object) -> Tensor:
        given = options if mask is None else options | {"mask": mask.to(device)}
        return attend(q.to(device), k.to(device), v.to(device), **given).to(q.device)

    reasons = {name: reason.format(device=device) for name, reason in UNSUPPORTED.items()}
    return replace(
        target, name=f"{target.name} on {device}", attention=attention, unsupported=reasons | dict(target.unsupported),
        setup=target.setup_code() + SETUP.format(device=str(device)),
    )  # fmt: skip
