"""Tools for contributors, each run by `python -m tools.<name>`."""
