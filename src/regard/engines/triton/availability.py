"""Whether Triton's kernels can run, without importing triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from functools import cache

import torch

OLDEST = (3, 5)  # version of triton
OLDEST_CUDA = (8, 0)  # compute capability: the first with bfloat16 products


def why_missing() -> str:
    """Return why triton cannot be imported, or an empty string."""
    return _why_missing()


why_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # tracing does not look inside


@cache
def _why_missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed; install it with pip install "regard[gpu]"'
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""  # a build of a GPU vendor under another name
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"triton {version} is older than {'.'.join(map(str, OLDEST))}; upgrade it"
    return ""


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: decided when triton is first imported."""
    module = sys.modules.get("triton.language.standard")
    if module is None:
        return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    return type(module.sum).__name__ == "InterpretedFunction"


def why_not_on(device: torch.device) -> str:
    """Return why the kernels cannot run on tensors of a device, or an empty string."""
    if reason := why_missing():
        return reason
    if device.type == "cpu":
        if is_interpreted():
            return ""
        return "on a CPU its kernels run in Triton's interpreter only: set TRITON_INTERPRET=1 before triton is imported"
    if device.type not in ("cuda", "xpu"):
        return f"triton does not run on {device}"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CUDA:
            return (
                f"its kernels need compute capability {'.'.join(map(str, OLDEST_CUDA))} or higher, "
                f"but {torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
            )
    return ""


why_not_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
