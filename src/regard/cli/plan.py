"""`regard plan`: recommend how to split the training of a model over many ranks."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import typer

from regard.cli.console import print_json, stderr, stdout
from regard.cli.plan_report import PlanReport, parse_amount
from regard.distributed.cost import Machine, ModelShape
from regard.distributed.speed import measure_communication, measure_compute
from regard.tasks import Run, UserError


def plan(
    model: str, sequence: int, ranks: int, memory: str, *, bandwidth: str | None, flops: str | None, measure: bool,
    batch: int | None, per_machine: int, cores: int | None, threads: int, as_json: bool,
) -> None:  # fmt: skip
    """Print the cost of every layout and recommend one; exit with 1 if none fits."""
    if not measure and (flops is None or bandwidth is None):
        raise UserError("give --flops and --bandwidth, or let this machine be measured: --measure")
    try:
        shape = ModelShape.of(_meta_model(model))
        machine = Machine(memory=parse_amount("memory", memory), cores=cores or os.cpu_count() or 1, ranks=per_machine)
        machine = replace(machine, threads=threads)
        with stderr.status("measuring"):
            machine = (
                measure_compute(shape, machine, sequence)
                if flops is None
                else machine.with_flops(parse_amount("flops", flops))
            )
            machine = measure_communication(machine) if bandwidth is None and ranks > 1 else machine
        if bandwidth is not None:
            machine = replace(machine, bandwidth=parse_amount("bandwidth", bandwidth))
        report = PlanReport.of(shape, machine, sequence=sequence, ranks=ranks, batch=batch or ranks)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{error}") from error
    if as_json:
        print_json(report.as_json())
    else:
        stdout.print(report.table())
        for line in (report.recommendation(), *report.reasons()):
            stdout.print(line, soft_wrap=True)
    if report.best is None:
        raise typer.Exit(1)


def _meta_model(model: str) -> Any:
    """Build the model of `--model` on the meta device, without weights."""
    from regard.models import LanguageConfig, LanguageModel
    from regard.models.meta import build_on_meta
    from regard.nn import Rotary

    path = Path(model)
    if (path / "run.json").exists():
        run = Run.open(path)
        return build_on_meta(lambda: run.task.model(run.processor))
    if path.exists():
        from regard.models.checkpoints import loading

        return loading.meta_model(path)
    if "=" not in model:
        raise UserError(
            f"{model}: there is no such run or checkpoint; or give layers=12,d_model=768,heads=12,vocabulary=50257"
        )
    values: dict[str, Any] = {}
    field_types = {each.name: str(each.type).removesuffix(" | None") for each in fields(LanguageConfig)}
    field_types = {name: kind for name, kind in field_types.items() if kind in ("int", "bool", "str", "Rotary")}
    for word in model.split(","):
        name, _, value = word.partition("=")
        kind = field_types.get(name)
        if kind is None:
            raise UserError(
                f"--model: {name!r} is not an option of a language model; options are {', '.join(field_types)}"
            )
        if kind == "int" and not (value.isdecimal() and int(value)):
            raise UserError(f"--model: {name} must be a whole number of at least 1, but is {value!r}")
        if kind in ("bool", "Rotary") and value not in ("true", "false"):
            raise UserError(f"--model: {name} must be true or false, but is {value!r}")
        values[name] = int(value) if kind == "int" else value if kind == "str" else value == "true"
    for name in ("vocabulary", "d_model", "layers", "heads"):
        if name not in values:
            raise UserError(f"--model: {name} is missing; add {name}=...")
    values["rotary"] = Rotary() if values.get("rotary") else None
    values.setdefault("d_hidden", 4 * values["d_model"])
    with torch.device("meta"):
        return LanguageModel(LanguageConfig(**values))
