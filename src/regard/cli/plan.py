"""`regard plan`: how many processes best share the training of a model."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from regard.cli.console import print_json, stderr, stdout
from regard.cli.options import Json
from regard.tasks import Run, UserError


def plan(
    model: Annotated[
        str,
        typer.Option(help="A run of language, a checkpoint or its config.json, or layers=12,d_model=768,heads=12,..."),
    ],
    sequence: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")],
    memory: Annotated[str, typer.Option(help="Of each rank, such as 16GB.")],
    bandwidth: Annotated[
        str | None, typer.Option(help="That a rank sends with, such as 1GB/s or 10Gbit/s; --measure finds it.")
    ] = None,
    flops: Annotated[str | None, typer.Option(help="FLOP/s of a rank in products of matrices, such as 50G.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine: the speeds that are not told.")
    ] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; as many as ranks unless told.")] = None,
    per_machine: Annotated[int, typer.Option("--ranks-per-machine", min=1, help="That share its cores.")] = 1,
    cores: Annotated[int | None, typer.Option(min=1, help="Of a machine; those of this one unless told.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1,
    as_json: Json = False,
) -> None:
    """Which layout to train with on many ranks, and why: memory, FLOPs, bytes moved and seconds of each.

    Ends with 0 if a layout fits, 1 if none does.

    regard plan --model layers=24,d_model=1024,heads=16,vocabulary=32000 --sequence 131072 --ranks 64 --memory 32GB \
        --bandwidth 10Gbit/s --measure
    """
    from regard.cli.plan_report import PlanReport, parse_amount
    from regard.distributed.cost import Machine, ModelShape
    from regard.distributed.speed import measure_communication, measure_compute

    if not measure and (flops is None or bandwidth is None):
        raise UserError("say --flops and --bandwidth, or let this machine be measured: --measure")
    try:
        costs = ModelShape.of(_meta_model(model))
        machine = Machine(memory=parse_amount("memory", memory), cores=cores or os.cpu_count() or 1, ranks=per_machine)
        machine = replace(machine, threads=threads)
        with stderr.status("measuring"):
            machine = (
                measure_compute(costs, machine, sequence)
                if flops is None
                else machine.with_flops(parse_amount("flops", flops))
            )
            machine = measure_communication(machine) if bandwidth is None and ranks > 1 else machine
        if bandwidth is not None:
            machine = replace(machine, bandwidth=parse_amount("bandwidth", bandwidth))
        found = PlanReport.of(costs, machine, sequence=sequence, ranks=ranks, batch=batch or ranks)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{error}") from error
    if as_json:
        print_json(found.as_json())
    else:
        stdout.print(found.table())
        for line in (found.recommendation(), *found.reasons()):
            stdout.print(line, soft_wrap=True)
    if found.best is None:
        raise typer.Exit(1)


def _meta_model(model: str) -> Any:
    """The model that `regard plan` is asked about, without its weights."""
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
            f"{model}: there is no such run or checkpoint; or say layers=12,d_model=768,heads=12,vocabulary=50257"
        )
    values: dict[str, Any] = {}
    field_types = {each.name: str(each.type).removesuffix(" | None") for each in fields(LanguageConfig)}
    field_types = {name: kind for name, kind in field_types.items() if kind in ("int", "bool", "str", "Rotary")}
    for word in model.split(","):
        name, _, value = word.partition("=")
        kind = field_types.get(name)
        if kind is None:
            raise UserError(f"--model: {name!r} is no part of a language model; parts are {', '.join(field_types)}")
        if kind == "int" and not (value.isdecimal() and int(value)):
            raise UserError(f"--model: {name} must be a whole number of at least 1, but is {value!r}")
        if kind in ("bool", "Rotary") and value not in ("true", "false"):
            raise UserError(f"--model: {name} must be true or false, but is {value!r}")
        values[name] = int(value) if kind == "int" else value if kind == "str" else value == "true"
    for name in ("vocabulary", "d_model", "layers", "heads"):
        if name not in values:
            raise UserError(f"--model: say {name}=... too")
    values["rotary"] = Rotary() if values.get("rotary") else None
    values.setdefault("d_hidden", 4 * values["d_model"])
    with torch.device("meta"):
        return LanguageModel(LanguageConfig(**values))
