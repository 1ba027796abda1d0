"""The theory's claims, measured: `regard lab`."""

from regard.lab.claim import FULL, QUICK, Budget, Claim, Result, Text, Verdict
from regard.lab.runner import CLAIMS, chosen, measure, run
from regard.lab.theory import ITEMS, THEMES

__all__ = [
    "CLAIMS",
    "FULL",
    "ITEMS",
    "QUICK",
    "THEMES",
    "Budget",
    "Claim",
    "Result",
    "Text",
    "Verdict",
    "chosen",
    "measure",
    "run",
]
