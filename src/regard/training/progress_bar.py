"""Progress bar of a training: loss, tokens per second and the remaining time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from regard.printable import printable
from regard.training.loop import Step
from regard.training.runs import Progress, Run
from regard.training.sources import Examples, splits

if TYPE_CHECKING:
    from rich.console import Console

REPORT_SECONDS = 15.0  # seconds between lines if the output is not a terminal


class ProgressBar:
    """Shows a progress bar; if the console is not a terminal, prints a line every few seconds."""

    def __init__(self, console: Console, run: Run) -> None:
        self.console, self.run = console, run
        self.main = os.environ.get("RANK", "0") == "0"
        self.examples: Examples | None = None
        self._bar: Any = None
        self._last_report = time.monotonic()
        self._loss = self._speed = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.on_end()

    def on_start(self, run: Run, progress: Progress, examples: Examples) -> None:
        self.examples = examples
        size = splits(examples.rows(), shared=examples.test is examples.validation)
        start = f", from step {progress.step}" if progress.step else ""
        self.on_message(f"{run.task.name}: {size}; {run.recipe.steps} steps{start}; {run.folder}")
        if self.console.is_interactive:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            speed = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")
            self._bar = Bars(MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn(), console=self.console)
            self._task = self._bar.add_task("", total=run.recipe.steps, completed=progress.step, loss=0.0, speed=0.0)
            self._bar.start()

    def step(self, step: Step) -> None:
        weight = 0.1 if self._speed else 1.0
        self._loss += weight * (step.loss - self._loss)
        self._speed += weight * (step.tokens / step.seconds - self._speed)
        if self._bar is not None:
            self._bar.update(self._task, completed=step.step, loss=self._loss, speed=self._speed)
        elif (now := time.monotonic()) - self._last_report > REPORT_SECONDS:
            self._last_report = now
            left = (self.run.recipe.steps - step.step) * step.tokens / self._speed
            remaining = f"about {left / 60:.0f} min left" if left >= 60 else "under a minute left"
            words = f"loss {self._loss:.3f}, {self._speed:,.0f} tokens/s, {remaining}"
            self.console.print(f"step {step.step}/{self.run.recipe.steps}: {words}")

    def on_evaluate(self, step: int, loss: float, best: bool) -> None:
        self.console.print(f"step {step}: validation loss {loss:.4f}{', the best so far' if best else ''}")

    def on_end(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_message(self, line: str) -> None:
        self.console.print(printable(line), soft_wrap=True, markup=False)
