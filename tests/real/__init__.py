"""Tests with real weights, outside of `make test`: `make real-weights WEIGHTS=folder`."""
