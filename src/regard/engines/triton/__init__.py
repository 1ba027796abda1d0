"""Kernels in Triton for NVIDIA, AMD and Intel GPUs, on the same lowered form as the native kernels.

Importing this package does not import triton. On a CPU the kernels run in Triton's interpreter, for tests.
"""

from regard.engines.triton.availability import is_interpreted, why_missing
from regard.engines.triton.engine import ENGINE, why_avoid, why_not

__all__ = ["ENGINE", "is_interpreted", "why_avoid", "why_missing", "why_not"]
