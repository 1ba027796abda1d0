"""How it is computed."""

from regard.engines.look import Statistics
from regard.engines.merge import merge, merge_into
from regard.engines.problem import Engine, Problem
from regard.engines.select import ENGINES, Explanation, explain, select
from regard.engines.within import gradients_within

__all__ = [
    "ENGINES",
    "Engine",
    "Explanation",
    "Problem",
    "Statistics",
    "explain",
    "gradients_within",
    "merge",
    "merge_into",
    "select",
]
