"""All families, in the order in which a model without an origin is offered to them."""

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
    """The family of this model_type."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)
