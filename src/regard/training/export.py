"""Export of a run: safetensors, configuration, tokenizer, and ONNX if the model can be traced."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from regard.engines.select import exclude_engine
from regard.errors import UserError
from regard.files import check_writable, write_text_atomically
from regard.models.checkpoints import save
from regard.models.translation import Transformer
from regard.progress import stage
from regard.training.onnx_graphs import Graph
from regard.training.runs import Run

KEYS = ("format", "task", "options", "recipe", "sources", "split", "rows", "machine", "results")  # copied from run.json


def export(run: Run, folder: Path, *, onnx: bool = True) -> list[str]:
    """Write a run to a directory that can replace it in every command that reads runs. Return a line per file.

    If it fails, nothing is left behind.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty; choose another directory")
    check_writable(folder / "run.json", parents=True)
    model, step = run.model()
    about = {key: run.about[key] for key in KEYS if key in run.about}
    about["exported"] = {"step": step, "minutes": run.minutes()}
    if isinstance(model, Transformer):
        about["generation"] = {"start": model.config.start, "stop": model.config.stop}
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save(model, folder)
        run.processor.save(folder)
        why_not = _write_graphs(run.task.graphs(model, run.processor), folder) if onnx else ""
        # last: its presence marks a complete export
        write_text_atomically(folder / "run.json", json.dumps(about, indent=1, ensure_ascii=False))
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if created:
            folder.rmdir()
        raise
    notes = [f"{path.name} ({path.stat().st_size / 1e6:.2f} MB)" for path in sorted(folder.iterdir())]
    return notes + ([f"no ONNX: {why_not}"] if why_not else [])


def _write_graphs(graphs: tuple[Graph, ...], folder: Path) -> str:
    """Write one ONNX file per graph, using torch operators only; return why there is none, or an empty string."""
    if not graphs:
        return "this model cannot be traced"
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        return "pip install 'regard[export]' is needed"
    with _quiet(), torch.no_grad(), exclude_engine("native"):
        for graph in graphs:
            with stage(f"writing {graph.name}.onnx"):
                _write_onnx(graph, folder / f"{graph.name}.onnx")
    return ""


def _write_onnx(graph: Graph, path: Path) -> None:
    names = [dict(enumerate(axes)) for _, axes in graph.inputs.values()]
    shapes = [dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in names]
    example = tuple(value for value, _ in graph.inputs.values())
    program = torch.export.export(graph.module, example, dynamic_shapes=(tuple(shapes)), strict=True)
    torch.onnx.export(
        program, (), str(path), dynamo=True, external_data=False, verbose=False, dynamic_shapes=tuple(names),
        input_names=list(graph.inputs), output_names=list(graph.outputs),
    )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch's exporter about optional packages and its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
