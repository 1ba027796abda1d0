"""Claims by theme."""
