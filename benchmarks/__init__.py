"""Attention libraries side by side in one run: `python -m benchmarks.run --help`."""
