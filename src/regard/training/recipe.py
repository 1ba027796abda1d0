"""Recipes: how a model is trained, whatever the task."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from regard.field_types import check_fields


def option(default: Any, help: str) -> Any:
    """A field of a task or a recipe that the command takes as an option."""
    return field(default=default, metadata={"help": help})


def check_options(options: Any) -> None:
    """Raise unless every field of a task or a recipe has its type."""
    check_fields(type(options), {each.name: getattr(options, each.name) for each in fields(options)})


def check_maximum(options: Any, **largest: int) -> None:
    """Raise if an option is more than it may be."""
    for name, bound in largest.items():
        if getattr(options, name) > bound:
            raise ValueError(f"{name} must be at most {bound}, but is {getattr(options, name)}")


def check_minimum(options: Any, **least: int) -> None:
    """Raise if an option is less than it may be."""
    for name, bound in least.items():
        if getattr(options, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, but is {getattr(options, name)}")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever the task. AdamW, warm-up, then half a cosine down to 0.

    >>> from regard.training.recipe import Recipe
    >>> Recipe(steps=100, warmup=10).learning_rate_at(10), Recipe(steps=100, warmup=10).learning_rate_at(100)
    (0.001, 0.0)
    """

    steps: int = option(2000, "optimizer steps")
    tokens: int = option(4096, "real tokens in a step, over all processes and accumulated parts")
    accumulate: int = option(
        1,
        "parts in which a process takes its share of a step, to save memory; detect divides by the objects of a part, "
        "and embed and match compare within a part, so that what they minimise depends on it and on the processes",
    )
    learning_rate: float = option(1e-3, "highest learning rate")
    warmup: int = option(200, "steps over which the rate rises")
    weight_decay: float = option(0.01, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    label_smoothing: float = option(0.0, "label smoothing")
    ema: float = option(0.998, "decay of the moving average of the weights, which is what is evaluated; 0 for none")
    patience: int = option(0, "stop after so many evaluations without a better loss; 0 for never")
    evaluate_every: int = option(250, "steps between evaluations on validation data")
    save_every: int = option(250, "steps between checkpoints")
    precision: str = option("no", "mixed precision: no, bf16 or fp16")
    seed: int = option(1, "of weights, order and dropout")
    shard: str = option("data", "what processes share: data (each has the whole model), or fsdp (weights too)")
    sequence_ranks: int = option(1, "processes that share one sequence, for long ones; a divisor of all processes")

    def __post_init__(self) -> None:
        check_options(self)
        check_minimum(self, steps=1, tokens=1, accumulate=1, evaluate_every=1, save_every=1, sequence_ranks=1)
        check_minimum(self, warmup=0, patience=0, seed=0)
        if not 0 <= self.ema < 1 or not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"ema and label_smoothing must be in [0, 1), but are {self.ema} and {self.label_smoothing}"
            )
        if not self.learning_rate > 0 or not self.clip > 0:
            raise ValueError(f"learning_rate and clip must be positive, but are {self.learning_rate} and {self.clip}")
        if self.precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"precision must be no, bf16 or fp16, but is {self.precision!r}")
        if self.shard not in ("data", "fsdp"):
            raise ValueError(f"shard must be data or fsdp, but is {self.shard!r}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 1 ... steps."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return float(self.learning_rate * 0.5 * (1 + np.cos(np.pi * min(done, 1.0))))
