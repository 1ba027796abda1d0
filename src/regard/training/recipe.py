"""Recipes: training settings shared by all tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.field_types import check_minimum, check_options


def option(default: Any, help: str) -> Any:
    """A field of a task or a recipe that is also a command-line option."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Recipe:
    """Training settings: AdamW, with a learning rate that warms up linearly and then decays to 0 along a cosine.

    >>> from regard.training.recipe import Recipe
    >>> Recipe(steps=100, warmup=10).learning_rate_at(10), Recipe(steps=100, warmup=10).learning_rate_at(100)
    (0.001, 0.0)
    """

    steps: int = option(2000, "optimizer steps")
    tokens: int = option(4096, "tokens per optimizer step without padding, over all processes and accumulated parts")
    accumulate: int = option(
        1,
        "parts into which each process divides its batch, to save memory; the losses of detect (normalized per part), "
        "embed and match (contrastive within a part) depend on it and on the number of processes",
    )
    learning_rate: float = option(1e-3, "peak learning rate")
    warmup: int = option(200, "steps of linear learning-rate warm-up")
    weight_decay: float = option(0.01, "weight decay, applied to matrices only")
    clip: float = option(1.0, "maximum gradient norm")
    label_smoothing: float = option(0.0, "label smoothing")
    ema: float = option(0.998, "decay of the moving average of the weights that is evaluated and saved; 0 for none")
    patience: int = option(0, "stop after this many evaluations without improvement of the loss; 0 for never")
    evaluate_every: int = option(250, "steps between evaluations on validation data")
    save_every: int = option(250, "steps between checkpoints")
    precision: str = option("no", "mixed precision: no, bf16 or fp16")
    seed: int = option(1, "random seed of weights, data order and dropout")
    shard: str = option(
        "data", "how processes share the work: data (each has the whole model) or fsdp (weights are sharded too)"
    )
    sequence_ranks: int = option(
        1, "processes that share each sequence, for long ones; must divide the number of processes"
    )

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
        """Learning rate at a step from 1 to `steps`."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return float(self.learning_rate * 0.5 * (1 + np.cos(np.pi * min(done, 1.0))))
