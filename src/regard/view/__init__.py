"""Attention made visible: capture it from any model, look at any part of it, find heads, draw it, serve it."""

from regard.view import pictures
from regard.view.capture import capture
from regard.view.capture_inputs import capture_image, capture_text
from regard.view.record import Record, Stream

__all__ = ["Record", "Stream", "capture", "capture_image", "capture_text", "pictures"]
