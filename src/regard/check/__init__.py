"""A conformance suite for any implementation of attention."""

from regard.check.case import Case
from regard.check.property import Property
from regard.check.runner import PROPERTIES, Outcome, check, examine
from regard.check.targets import PEERS, NotSupported, Target, UnknownTarget, installed_engines, target

__all__ = [
    "PEERS", "PROPERTIES", "Case", "Outcome", "Property", "NotSupported", "Target", "UnknownTarget", "check", "examine",
    "installed_engines", "target",
]  # fmt: skip
