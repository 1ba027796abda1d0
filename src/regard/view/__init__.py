"""Attention made visible."""
