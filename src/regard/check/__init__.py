"""A conformance suite for any implementation of attention."""

from regard.check.case import Case
from regard.check.demand import Property
from regard.check.runner import PROPERTIES, Outcome, check, examine
from regard.check.targets import PEERS, Refused, Target, UnknownTarget, installation, target

__all__ = [
    "PEERS", "PROPERTIES", "Case", "Outcome", "Property", "Refused", "Target", "UnknownTarget", "check", "examine",
    "installation", "target",
]  # fmt: skip
