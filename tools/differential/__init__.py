"""A differential tester: every module and model, run in many ways, compared with one plain path in float64."""

from tools.differential.search import FAMILIES, Finding, check, is_confirmed, replay, search, simplify
from tools.differential.ways import WAYS

__all__ = ["FAMILIES", "WAYS", "Finding", "check", "is_confirmed", "replay", "search", "simplify"]
