"""Targets of `regard check`: the engines of this installation, other libraries, and any function."""

from regard.check.targets.engines import installed_engines
from regard.check.targets.lookup import UnknownTarget, of_function, target
from regard.check.targets.peers import PEERS
from regard.check.targets.target import CAPABILITIES, NotSupported, Target

__all__ = [
    "CAPABILITIES",
    "PEERS",
    "NotSupported",
    "Target",
    "UnknownTarget",
    "installed_engines",
    "of_function",
    "target",
]
