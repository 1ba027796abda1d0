"""The training loop of all tasks, based on accelerate.

Its only state is the weights, the optimizer, the weight average and `Progress`: the order of examples is a function of
(seed, epoch), and the randomness of a step one of (seed, step, process). A run that was killed therefore continues from
its last checkpoint with bitwise identical results.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.data.batches import in_order, plan, shards
from regard.errors import UserError
from regard.progress import stage
from regard.training.lock import lock_run
from regard.training.nonfinite import find_nonfinite_gradient, find_nonfinite_layer
from regard.training.recipe import Recipe
from regard.training.runs import Log, Progress, Run, environment, has_steps, load, reserve_folder
from regard.training.sources import Examples, Sources, read_examples, reread_examples
from regard.training.task import Batch, Dataset, Task, tasks, to_device

SequenceContext = Callable[[], AbstractContextManager[Any]]
"""Creates a context in which processes share the sequences of a batch."""


class Step(NamedTuple):
    """Report of a step: loss, learning rate, gradient norm, tokens without padding, and duration."""

    step: int
    loss: float
    learning_rate: float
    norm: float
    tokens: int
    seconds: float


class Callback(Protocol):
    """Receives the events of a training."""

    def on_start(self, run: Run, progress: Progress, examples: Examples) -> None: ...
    def step(self, step: Step) -> None: ...
    def on_evaluate(self, step: int, loss: float, best: bool) -> None: ...
    def on_message(self, line: str) -> None: ...
    def on_end(self) -> None: ...


class NoCallback:
    """Ignores all events."""

    def on_start(self, run: Run, progress: Progress, examples: Examples) -> None: ...
    def step(self, step: Step) -> None: ...
    def on_evaluate(self, step: int, loss: float, best: bool) -> None: ...
    def on_message(self, line: str) -> None: ...
    def on_end(self) -> None: ...


class Objective(nn.Module):
    """Maps a batch to the sum of its losses. DDP and FSDP wrap it, so that a task may call any method of its model."""

    def __init__(
        self, task: Task, model: nn.Module, smoothing: float, sequence_context: SequenceContext = nullcontext
    ) -> None:
        super().__init__()
        self.model = model
        self._task, self._smoothing, self._sequence_context = task, smoothing, sequence_context

    def forward(self, batch: Batch, smoothing: float | None = None) -> Tensor:
        with self._sequence_context():
            return self._task.loss(self.model, batch, self._smoothing if smoothing is None else smoothing)


def create_run(folder: Path, task: Task, recipe: Recipe, sources: Sources) -> tuple[Run, Examples]:
    """Read the data, fit the processor and create the run directory. The main process does this; others wait."""
    if recipe.label_smoothing and not task.supports_label_smoothing:
        raise UserError(
            f"--label-smoothing {recipe.label_smoothing}: not supported by the loss of {task.name}; leave it out"
        )
    accelerator = _accelerator(task, recipe)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (folder / "run.json").exists()
    if accelerator.is_main_process and not restarted:
        with reserve_folder(folder, task.name):
            examples = read_examples(task, sources, recipe.seed)
            _set_seed(recipe.seed)
            with stage("preparing tokenizer and labels"):
                processor = task.fit_processor(examples.train)
            with stage("writing the run"):
                Run.create(folder, task, recipe, sources, processor, examples)
        accelerator.wait_for_everyone()
        return Run.open(folder), examples
    accelerator.wait_for_everyone()
    run = Run.open(folder)
    if (run.task, run.recipe) != (task, recipe):
        raise UserError(f"{folder}: contains another run ({run.about['task']}); choose another --out")
    return run, read_examples(task, sources, recipe.seed)


def train(run: Run, examples: Examples | None = None, callback: Callback | None = None) -> Progress:
    """Train a run to its end, from its last readable checkpoint if it has one. Ctrl-C saves and returns early.

    `done` of the result is True if the training is complete.
    """
    callback = callback or NoCallback()
    if run.exported:
        raise UserError(
            f"{run.folder}: is an exported run without checkpoints; resume the run that it was exported from, "
            "or start a new one with regard train"
        )
    main = _accelerator(run.task, run.recipe).is_main_process
    with lock_run(run.folder) if main else nullcontext():  # only the main process writes
        if examples is None:
            examples = reread_examples(run)
        trainer = _Trainer(run, examples, callback)
        try:
            progress = trainer.run_to_end()
            callback.on_end()
            if progress.done and main:
                run.calibrate(examples.validation)
            return progress
        finally:
            trainer.close()


class _Trainer:
    """The training in one process."""

    def __init__(self, run: Run, examples: Examples, callback: Callback) -> None:
        # Imported here because it is slow, and only training needs it.
        from regard.training import state

        run.check_checkpoint()
        self.state, self.run, self.recipe, self.callback = state, run, run.recipe, callback
        self.accelerator = _accelerator(run.task, run.recipe)
        self.main = self.accelerator.is_main_process
        # Consecutive processes form a group that shares sequences, and has the same batch.
        self.sharing = run.recipe.sequence_ranks
        self.group, self.groups = (
            n // self.sharing for n in (self.accelerator.process_index, self.accelerator.num_processes)
        )
        with stage("preparing examples"):
            self.dataset: Dataset = run.task.dataset(run.processor, examples.train, examples.bad)
            self.validation: Dataset = run.task.dataset(run.processor, examples.validation, examples.bad)
            if examples.test is not examples.validation:
                # report bad test rows before training, not at its end
                run.task.evaluable_rows(run.processor, examples.test, examples.bad)
        if not len(self.dataset.sizes) or not len(self.validation.sizes):
            raise UserError(
                f"{run.folder}: no example is left to {'train on' if not len(self.dataset.sizes) else 'hold out'}"
            )
        _set_seed(run.recipe.seed)
        model = run.task.model(run.processor)
        if not run.checkpoints():
            run.task.load_pretrained(model)
        sequence_context = (
            state.sequence_contexts(self.sharing, self.accelerator.device) if self.sharing > 1 else nullcontext
        )
        objective = Objective(run.task, model, run.recipe.label_smoothing, sequence_context)
        self.sharded = run.recipe.shard == "fsdp" and self.accelerator.num_processes > 1
        if self.sharded:
            state.shard(objective)
            objective = self.accelerator.prepare_model(objective, evaluation_mode=True)  # FSDP has already wrapped it
        else:
            objective = self.accelerator.prepare_model(objective)
        self.objective, self.optimizer = (
            objective,
            self.accelerator.prepare_optimizer(build_optimizer(model, run.recipe)),
        )
        self.average = state.WeightAverage(self.objective, run.recipe.ema) if run.recipe.ema else None
        self.progress = Progress()
        if self.main:
            run.remove_partial_files()
        checkpoint = run.latest(callback.on_message if self.main else lambda line: None, self._read)
        if checkpoint is not None:
            state.restore(checkpoint[0], *self._checkpoint_content())
            self.progress = checkpoint[1]
        elif self.main and has_steps(run.folder):
            callback.on_message(f"{run.folder}: no checkpoint to continue from; the training restarts at step 1")
        self.log = Log(run.folder, self.progress.step) if self.main else None
        now = environment()
        changed = [key for key in ("torch", "threads", "processes") if now[key] != run.about["machine"].get(key)]
        if checkpoint is not None and changed and self.main:
            callback.on_message(
                f"{' and '.join(changed)} changed since the run started: results may differ in the last bits"
            )
        if self.main:
            callback.on_start(run, self.progress, examples)
        if math.isfinite(self.progress.best):
            self._replace_lost_best()

    def run_to_end(self) -> Progress:
        if self.progress.done:
            return self.progress
        with _stop_signals(alone=self.accelerator.num_processes == 1) as signals:
            while not self.progress.done:
                batches = plan(
                    self.dataset.sizes, budget=self.recipe.tokens, seed=self.recipe.seed, epoch=self.progress.epoch
                )
                while self.progress.batch < len(batches) and not self.progress.done:
                    stop = self._step(batches[self.progress.batch], bool(signals))
                    if stop:
                        if self._saved_step != self.progress.step:
                            self._save()
                        return self.progress
                if not self.progress.done:
                    self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        return self.progress

    _saved_step = -1

    def _step(self, chosen: np.ndarray, stop: bool) -> bool:
        """Run one optimizer step, then log, evaluate and save if due. Return True if any process asks to stop."""
        started, recipe, step = time.perf_counter(), self.recipe, self.progress.step + 1
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        parts = shards(chosen, self.dataset.sizes, self.groups * recipe.accumulate)
        parts = parts[self.group * recipe.accumulate : (self.group + 1) * recipe.accumulate]
        batches = [self._batch(self.dataset, part, chosen, step, n) for n, part in enumerate(parts)]
        count, tokens, stops = self._sum(
            sum(batch.count for batch in batches) / self.sharing,
            sum(batch.tokens for batch in batches) / self.sharing,
            float(stop),
        )
        if stops:
            return True
        _set_seed(recipe.seed, step, rank)
        values, random_states = [], []
        for n, batch in enumerate(batches):
            last = n == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.objective):  # no effect with FSDP
                random_states.append(torch.get_rng_state())
                loss = self.objective(batch) * (world / max(1.0, count)) * bool(batch.count)
                values.append(float(loss.detach()))
                self.accelerator.backward(loss)
        (total,) = self._sum(sum(values) / world)
        if not math.isfinite(total):
            first = next((n for n, value in enumerate(values) if not math.isfinite(value)), len(values) - 1)
            n = min(self._all_gather(first))
            torch.set_rng_state(random_states[n])
            where = find_nonfinite_layer(self._model(), partial(self.objective, batches[n]))
            self._raise_nonfinite(
                step, parts[n], f"the loss is {values[n]}", None if math.isfinite(values[n]) else where
            )
        norm = float(self.accelerator.clip_grad_norm_(self.objective.parameters(), recipe.clip))
        if not math.isfinite(norm) and recipe.precision != "fp16":  # with fp16 the scaler skips such steps
            self._raise_nonfinite(
                step, chosen, f"the norm of the gradient is {norm}", find_nonfinite_gradient(self._model())
            )
        learning_rate = recipe.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(step)
        self.progress = replace(self.progress, step=step, batch=self.progress.batch + 1)
        report = Step(step, total, learning_rate, norm, int(tokens), time.perf_counter() - started)
        self._after(report)
        return False

    def _after(self, report: Step) -> None:
        step, recipe = report.step, self.recipe
        if self.main:
            self.callback.step(report)
            assert self.log is not None
            speed = report.tokens / report.seconds
            self.log(
                step,
                loss=report.loss,
                learning_rate=report.learning_rate,
                norm=report.norm,
                tokens_per_second=speed,
                seconds=report.seconds,
            )
        if step % recipe.evaluate_every == 0 or step == recipe.steps:
            self._evaluate()
        if step % recipe.save_every == 0 or self.progress.done:
            self._save()

    def _evaluate(self) -> None:
        """Compute the validation loss with the averaged weights, and keep the best ones."""
        with self._use_average():
            loss = self.validation_loss()
            better = math.isfinite(loss) and not loss >= self.progress.best
            stale = 0 if better else self.progress.stale + 1
            patience = self.recipe.patience
            self.progress = replace(
                self.progress,
                best=loss if better else self.progress.best,
                stale=stale,
                done=self.progress.step >= self.recipe.steps or bool(patience and stale >= patience),
            )
            if better:
                self._keep_best()
        if self.main:
            assert self.log is not None
            self.log(self.progress.step, validation_loss=loss)
            self.callback.on_evaluate(self.progress.step, loss, better)

    def _use_average(self) -> AbstractContextManager[None]:
        """A context in which the model has the averaged weights, if there are any."""
        return self.average.use_average() if self.average is not None else nullcontext()

    def _keep_best(self) -> None:
        weights = self.state.weights(self.objective)
        if self.main:
            self.run.keep_best(weights, self.progress)

    def _replace_lost_best(self) -> None:
        """If the best weights are missing or damaged, replace them by those of the checkpoint."""
        problem = self._all_gather(self.run.best_problem() if self.main else "")[0]
        if problem:
            if self.main:
                self.callback.on_message(f"{problem}; replaced by the weights of step {self.progress.step}")
            with self._use_average():
                self.progress = replace(self.progress, best=self.validation_loss(), stale=0)
                self._keep_best()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the validation examples, without label smoothing; processes share the work."""
        self.objective.eval()
        total, count = 0.0, 0.0
        batches = in_order(
            self.validation.sizes, budget=max(1, self.recipe.tokens // self.recipe.accumulate // self.groups)
        )
        batches += [batches[0][:0]] * (-len(batches) % self.groups)  # every group needs the same number of batches
        for n, chosen in enumerate(batches[self.group :: self.groups]):
            batch = self._batch(self.validation, chosen, batches[0], 0, n)
            total += float(self.objective(batch, 0.0)) * bool(batch.count)
            count += batch.count / self.sharing
        self.objective.train()
        total, count = self._sum(total, count)
        return total / max(1.0, count)

    def _model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.objective).model

    def _batch(self, items: Dataset, chosen: np.ndarray, fallback: np.ndarray, step: int, part: int) -> Batch:
        """Return a batch on the device. If no example is left for this process, take one with weight 0."""
        random = np.random.default_rng((self.recipe.seed, step, self.group, part))
        batch = items.batch(chosen if len(chosen) else fallback[:1], random)
        batch = batch if len(chosen) else replace(batch, count=0, tokens=0)
        return batch if self.accelerator.device.type == "cpu" else to_device(batch, self.accelerator.device)

    def _sum(self, *values: float) -> tuple[float, ...]:
        """Sum values over all processes."""
        if self.accelerator.num_processes == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return tuple(self.accelerator.reduce(tensor, "sum").tolist())

    def _save(self) -> None:
        if self.sharded:
            self.run.save_shard(self.state.capture(*self._checkpoint_content(), self.state.SHARDED), self.progress)
        else:
            tensors = self.state.capture(*self._checkpoint_content())
            if self.main:
                self.run.save(tensors, self.progress)
        self._saved_step = self.progress.step

    def _checkpoint_content(self) -> tuple[Any, Any, Any]:
        """The objects that a checkpoint contains."""
        return self.objective, self.optimizer.optimizer, self.average

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Read a checkpoint; from a sharded one, each process reads its shard."""
        if not path.is_dir():
            return load(path)
        from regard.training import sharded_checkpoint

        return sharded_checkpoint.load(path, self.state.capture(*self._checkpoint_content(), self.state.SHARDED))

    def _raise_nonfinite(self, step: int, chosen: np.ndarray, what: str, where: str | None) -> None:
        """Raise the same error in all processes, with the location found by the first one that knows it."""
        places = [self.dataset.places[n] for n in chosen[:3]]
        more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
        located = where and f"{what}; it comes from {where}, in the batch of {', '.join(places)}{more}"
        checkpoints = self.run.checkpoints()
        last = f"; {checkpoints[0].name} is the last checkpoint" if checkpoints else ""
        report = next((each for each in self._all_gather(located) if each), what)
        raise UserError(
            f"step {step}: {report}{last}; try a lower --learning-rate, a longer --warmup or a lower --clip"
        )

    def _all_gather(self, value: Any) -> list[Any]:
        """Gather a value from every process."""
        gathered = [value] * self.accelerator.num_processes
        if len(gathered) > 1:
            dist.all_gather_object(gathered, value)
        return gathered

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def _accelerator(task: Task, recipe: Recipe) -> Any:
    from accelerate import Accelerator

    if recipe.precision == "fp16" and not torch.accelerator.is_available():
        raise UserError(
            "precision fp16 needs a GPU or another accelerator, but none is available; try --precision bf16"
        )
    _rejoin_process_group()
    # Without cpu=True, accelerate ignores other processes on a CPU-only machine.
    accelerator = Accelerator(mixed_precision=recipe.precision, cpu=not torch.accelerator.is_available())
    if recipe.sequence_ranks > 1 and not task.supports_sequence_parallel:
        supported = ", ".join(name for name, kind in tasks().items() if kind.supports_sequence_parallel)
        raise UserError(
            f"{task.name} cannot share a sequence among processes ({supported} can); leave --sequence-ranks at 1"
        )
    if accelerator.num_processes % recipe.sequence_ranks:
        raise UserError(
            f"--sequence-ranks {recipe.sequence_ranks} must divide the number of processes, which is "
            f"{accelerator.num_processes}; choose another, or torchrun --nproc-per-node {recipe.sequence_ranks}"
        )
    return accelerator


def _rejoin_process_group() -> None:
    """After a restart by torchrun, use a new prefix: its store still has the addresses of the previous attempt."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    backend = None if torch.accelerator.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)


def _set_seed(*parts: int) -> None:
    """Seed torch from several integers; different tuples give independent seeds."""
    torch.manual_seed(
        int(np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(1, np.uint64)[0] >> 1)
    )


@contextmanager
def _stop_signals(*, alone: bool) -> Iterator[list[int]]:
    """Yield a list that collects Ctrl-C and SIGTERM; a second signal is not caught and ends the process.

    With several processes SIGTERM is not caught: the launcher sends it after one of them died, and the others could not
    agree on a step to stop at.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def remember(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM) if alone else (signal.SIGINT,):
            previous[number] = signal.signal(number, remember)
    except ValueError:  # not in the main thread, where signals cannot be handled
        pass
    try:
        yield received
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)
