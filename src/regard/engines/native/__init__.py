"""The compiled kernels: dot-product and additive scores, linear attention, products with weights."""

from regard.engines.native.binding import about, library, missing, release_free_memory
from regard.engines.native.engine import ENGINE, gradients, why_not, why_rather_not
from regard.engines.native.looking import pooled, statistics, takes_rows, weights
from regard.engines.native.products import linear_backward, linear_forward, multiply, panel_rows

__all__ = [
    "ENGINE",
    "about",
    "gradients",
    "library",
    "linear_backward",
    "linear_forward",
    "missing",
    "multiply",
    "panel_rows",
    "pooled",
    "release_free_memory",
    "statistics",
    "takes_rows",
    "weights",
    "why_not",
    "why_rather_not",
]
