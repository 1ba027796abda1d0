"""Attention made visible: capture it from any model, look at any part of it, find heads, draw it, serve it."""

from regard.view import pictures
from regard.view.capture import capture
from regard.view.looking import look_at_image, look_at_text
from regard.view.record import Record, Stream

__all__ = ["Record", "Stream", "capture", "look_at_image", "look_at_text", "pictures"]
