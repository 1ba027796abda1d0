"""The claims, by theme."""
