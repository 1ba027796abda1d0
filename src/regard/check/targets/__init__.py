"""What can be checked: the engines of this installation, attentions of other libraries, and anybody's."""

from regard.check.targets.named import UnknownTarget, of_function, target
from regard.check.targets.own import installation
from regard.check.targets.peers import PEERS
from regard.check.targets.target import CAPABILITIES, Refused, Target

__all__ = ["CAPABILITIES", "PEERS", "Refused", "Target", "UnknownTarget", "installation", "of_function", "target"]
