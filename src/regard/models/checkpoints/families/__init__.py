"""All families: those that the modules of this package list in `FAMILIES`. A new family is a new module."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from regard.models.checkpoints.family import Family

FIRST = ("text", "language", "translation", "vision", "speech")
"""Modules whose families are tried first for saving a model without an origin; the others follow by name."""


def _collect() -> tuple[Family, ...]:
    others = sorted({module.name for module in iter_modules(__path__)} - {*FIRST})
    modules = (import_module(f"{__name__}.{name}") for name in (*FIRST, *others))
    return tuple(family for module in modules for family in getattr(module, "FAMILIES", ()))


FAMILIES = _collect()


def family_of(model_type: object) -> Family | None:
    """Return the family of a model_type, or None."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)
