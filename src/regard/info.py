"""What one would paste into a bug report: `python -m regard.info`."""

from __future__ import annotations

import platform
from importlib.metadata import version

import numpy
import torch

from regard.engines import native
from regard.engines.select import ENGINES


def info() -> dict[str, str]:
    """Versions, engines, instruction set and threads.

    >>> from regard.info import info
    >>> "torch" in info()
    True
    """
    return {
        "regard": version("regard"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "engines": ", ".join(ENGINES),
        **native.about(),
    }


if __name__ == "__main__":
    for name, value in info().items():
        print(f"{name:16} {value}")
