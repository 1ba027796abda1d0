"""Linear attention: a state instead of all keys and values, in O(N) time and memory."""

from regard.linear.attention import LinearAttention
from regard.linear.checks import LinearState
from regard.linear.features import Favor, favor

__all__ = ["Favor", "LinearAttention", "LinearState", "favor"]
