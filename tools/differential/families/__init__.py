"""Families of subjects that can be drawn, by name."""

from tools.differential.families import media, recurrent, variants
from tools.differential.families.modules import MODULES
from tools.differential.families.text import MODELS

FAMILIES = MODULES | MODELS

__all__ = ["FAMILIES", "media", "recurrent", "variants"]
