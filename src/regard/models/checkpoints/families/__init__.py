"""All families, in the order in which they are tried for saving a model without an origin."""

from __future__ import annotations

from regard.models.checkpoints.families import language, speech, text, translation, vision
from regard.models.checkpoints.family import Family

FAMILIES: tuple[Family, ...] = (
    *text.FAMILIES,
    *language.FAMILIES,
    *translation.FAMILIES,
    *vision.FAMILIES,
    *speech.FAMILIES,
)


def family_of(model_type: object) -> Family | None:
    """Return the family of a model_type, or None."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)
