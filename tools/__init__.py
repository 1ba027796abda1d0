"""Tools for those who work on the library: each is a package that runs by `python -m tools.<name>`."""
