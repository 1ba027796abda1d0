"""How it is computed."""

from regard.engines.look import Statistics
from regard.engines.merge import merge
from regard.engines.problem import Engine, Problem
from regard.engines.select import ENGINES, Explanation, explain, select

__all__ = ["ENGINES", "Engine", "Explanation", "Problem", "Statistics", "explain", "merge", "select"]
