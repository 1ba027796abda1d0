"""Tasks, one per file: reading data, training, evaluation and prediction."""

from regard.errors import UserError
from regard.training.loop import create_run, train
from regard.training.recipe import Recipe
from regard.training.runs import Run
from regard.training.sources import Sources
from regard.training.task import Task, tasks

__all__ = ["Recipe", "Run", "Sources", "Task", "UserError", "create_run", "tasks", "train"]
