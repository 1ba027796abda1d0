"""Small configurations of every family: those that the modules of this package list in `CASES`.

A new family adds a module here; the tests of checkpoints run on all cases.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.models.tiny_configs.case import Case

CASES: dict[str, Case] = {}
for _module in sorted(module.name for module in iter_modules(__path__)):
    CASES |= getattr(import_module(f"{__name__}.{_module}"), "CASES", {})
