"""Implementations of the `regard` commands. Their signatures and help texts are in `regard_cli`."""

from regard_cli import app, main

__all__ = ["app", "main"]
