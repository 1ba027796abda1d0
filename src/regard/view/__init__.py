"""Capture the attention of a model, inspect any part of it, change it, classify heads, plot it and serve it."""

from regard.view import pictures
from regard.view.capture import capture
from regard.view.capture_inputs import capture_image, capture_text
from regard.view.changes import Change, ablate
from regard.view.diagrams import diagram
from regard.view.record import Record, Stream
from regard.view.weight_steps import WeightSteps

__all__ = [
    "Change", "Record", "Stream", "WeightSteps", "ablate", "capture", "capture_image", "capture_text", "diagram",
    "pictures",
]  # fmt: skip
