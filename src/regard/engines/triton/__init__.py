"""Kernels in Triton for NVIDIA, AMD and Intel GPUs, on the same lowered form as the native kernels.

Importing this package does not import triton. On a CPU the kernels run in Triton's interpreter, for tests.
"""

from regard.engines.triton import inspection
from regard.engines.triton.availability import is_interpreted, why_missing
from regard.engines.triton.engine import ENGINE, why_avoid, why_not
from regard.engines.triton.linear import recurrence_backward, recurrence_forward, why_not_recurrence

__all__ = [
    "ENGINE",
    "inspection",
    "is_interpreted",
    "recurrence_backward",
    "recurrence_forward",
    "why_avoid",
    "why_missing",
    "why_not",
    "why_not_recurrence",
]
