"""Attention, modules, models, tasks and the viewer on a device that refuses what a GPU refuses.

The cases run in a process of their own: a registered device would change what other tests find, and has to be
registered before the first gradient.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("cases.py")


def test_nothing_depends_on_the_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=CASES.parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
