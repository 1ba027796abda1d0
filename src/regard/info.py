"""System information for bug reports: `python -m regard.info`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy
import torch

from regard.engines import native
from regard.engines.select import ENGINES


def info() -> dict[str, str]:
    """Return versions, engines, instruction set and threads.

    >>> from regard.info import info
    >>> "torch" in info()
    True
    """
    return {
        "regard": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "engines": ", ".join(ENGINES),
        **native.build_info(),
    }


def _version() -> str:
    try:
        return version("regard")
    except PackageNotFoundError:
        return f"not installed, run from {Path(__file__).parent}"


if __name__ == "__main__":
    for name, value in info().items():
        print(f"{name:16} {value}")
