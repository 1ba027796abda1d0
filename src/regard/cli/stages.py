"""Progress of the stages of a command on standard error: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regard.cli.console import stderr
from regard.progress import report_to

if TYPE_CHECKING:
    from rich.console import Console

FIRST = 2.0  # seconds until the first line of a stage, if the output is not a terminal
EVERY = 15.0  # seconds between lines
SHOWN = 0.1  # seconds between updates of a bar


@contextmanager
def reporting_stages() -> Iterator[None]:
    """Show stages on standard error while the context is active; only rank 0 shows them."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    stages = Stages(stderr)
    try:
        with report_to(stages):
            yield
    finally:
        stages.close()


class Stages:
    """A `Reporter` for a console. A stage shorter than `FIRST` seconds prints nothing."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._stages: list[_Stage] = []
        self._bar: Any = None

    def start(self, label: str) -> None:
        if self.console.is_interactive:
            if self._bar is None:
                self._bar = _bar(self.console)
                self._bar.start()
            self._stages.append(_Stage(label, self._bar.add_task(label, total=None)))
        else:
            self._stages.append(_Stage(label, timer=threading.Timer(FIRST, self._print, (f"{label} ...",))))

    def count(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not self._stages or now < self._stages[-1].next:
            return
        stage = self._stages[-1]
        if stage.task is not None:
            stage.next = now + SHOWN
            self._bar.update(stage.task, completed=done, total=total, description=stage.label)
            if total is None:
                self._bar.update(stage.task, description=f"{stage.label}: {done:,}")
        else:
            if stage.next:
                self._print(f"{stage.label}: {done:,}" if total is None else f"{stage.label}: {done / total:.0%}")
            stage.next = now + EVERY

    def end(self) -> None:
        if not self._stages:  # already closed
            return
        stage = self._stages.pop()
        if stage.timer is not None:
            stage.timer.cancel()
        if stage.task is not None:
            self._bar.remove_task(stage.task)
            if not self._stages:
                self._bar.stop()
                self._bar = None

    def close(self) -> None:
        """End all stages, including those of generators that were not exhausted."""
        while self._stages:
            self.end()

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)


class _Stage:
    def __init__(self, label: str, task: Any = None, timer: threading.Timer | None = None) -> None:
        self.label, self.task, self.timer = label, task, timer
        self.next = 0.0  # time of the next update
        if timer is not None:
            timer.daemon = True
            timer.start()


def _bar(console: Console) -> Any:
    """A progress bar that disappears when it stops. It does not redirect standard output, which may be a file."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
