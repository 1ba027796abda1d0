"""Capture the attention of a model, inspect any part of it, classify heads, plot it and serve it in a browser."""

from regard.view import pictures
from regard.view.capture import capture
from regard.view.capture_inputs import capture_image, capture_text
from regard.view.record import Record, Stream

__all__ = ["Record", "Stream", "capture", "capture_image", "capture_text", "pictures"]
