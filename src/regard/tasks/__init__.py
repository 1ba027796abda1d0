"""Tasks: data to training to metrics to prediction, one file a task."""

from regard.tasks.loop import begin, train
from regard.tasks.runs import Run
from regard.tasks.sources import Sources
from regard.tasks.task import Recipe, Task, tasks
from regard.tasks.trouble import Trouble

__all__ = ["Recipe", "Run", "Sources", "Task", "Trouble", "begin", "tasks", "train"]
