"""Measurements of claims about attention: `regard lab`."""

from regard.lab.claim import FULL, QUICK, Budget, Claim, Result, Text, Verdict
from regard.lab.runner import CLAIMS, measure, run, select_claims
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
    "select_claims",
    "measure",
    "run",
]
