"""Engines: the ways to compute an attention."""

from regard.engines.inspection import Statistics
from regard.engines.merge import merge, merge_into
from regard.engines.problem import Engine, Problem
from regard.engines.select import ENGINES, CannotCompute, Explanation, explain, select
from regard.engines.shard_backward import shard_gradients

__all__ = [
    "ENGINES",
    "CannotCompute",
    "Engine",
    "Explanation",
    "Problem",
    "Statistics",
    "explain",
    "shard_gradients",
    "merge",
    "merge_into",
    "select",
]
