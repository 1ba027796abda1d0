"""Conformance suites: for any implementation of attention, and for what the layers of a whole model see."""

from regard.check.case import Case
from regard.check.model import Finding, check_model
from regard.check.property import Property
from regard.check.runner import PROPERTIES, Outcome, check, examine
from regard.check.targets import PEERS, NotSupported, Target, UnknownTarget, installed_engines, target

__all__ = [
    "PEERS", "PROPERTIES", "Case", "Finding", "Outcome", "Property", "NotSupported", "Target", "UnknownTarget", "check",
    "check_model", "examine", "installed_engines", "target",
]  # fmt: skip
