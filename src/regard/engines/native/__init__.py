"""The compiled CPU kernels: dot-product and additive attention, linear attention, products with packed weights."""

from regard.engines.native.binding import (
    build_info,
    library,
    multiplies_bfloat16,
    release_free_memory,
    rounds_inputs,
    why_missing,
)
from regard.engines.native.engine import ENGINE, find_packed_call, gradients, run_quantized, why_avoid, why_not
from regard.engines.native.inspection import pooled_weights, statistics, weights
from regard.engines.native.linear import linear_backward, linear_forward, multiply, panel_rows
from regard.engines.native.packed_call import PackedCall
from regard.engines.native.recurrence import recurrence_backward, recurrence_forward

__all__ = [
    "ENGINE",
    "PackedCall",
    "build_info",
    "find_packed_call",
    "gradients",
    "library",
    "linear_backward",
    "linear_forward",
    "why_missing",
    "multiplies_bfloat16",
    "multiply",
    "panel_rows",
    "pooled_weights",
    "recurrence_backward",
    "recurrence_forward",
    "release_free_memory",
    "rounds_inputs",
    "run_quantized",
    "statistics",
    "weights",
    "why_not",
    "why_avoid",
]
