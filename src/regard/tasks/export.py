"""A run as a folder that others can use: safetensors, config, tokenizer, and ONNX where the model allows it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.engines.select import without
from regard.files import check_writable, whole_text
from regard.models.checkpoints import save
from regard.tasks.runs import Run
from regard.tasks.trouble import Trouble


def export(run: Run, folder: Path, *, onnx: bool = True) -> list[str]:
    """Write the folder; a note for each thing that was written, or could not be."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Trouble(f"{folder}: is there and not empty; choose another folder")
    check_writable(folder / "task.json", parents=True)
    model, step = run.model()
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder)
    run.kit.save(folder)
    about = {key: run.about[key] for key in ("task", "options", "recipe", "machine", "results")} | {"step": step}
    whole_text(folder / "task.json", json.dumps(about, indent=1, ensure_ascii=False))
    sample, why_not = run.task.sample(run.kit), ""
    if onnx and sample is None:
        why_not = f"what {run.task.name} computes is no single graph of ids, or of pixels, to one output"
    elif onnx and sample is not None:
        why_not = _onnx(model, sample, folder / "model.onnx", run.task.takes)
    notes = [f"{path.name} ({path.stat().st_size / 1e6:.2f} MB)" for path in sorted(folder.iterdir())]
    return notes + ([f"no model.onnx: {why_not}"] if why_not else [])


def _onnx(model: nn.Module, sample: tuple[Any, ...], path: Path, takes: str) -> str:
    """Write a graph: of token ids or sounds and their mask, of any batch and length, or of pixels; else why not."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        return "it needs pip install onnx onnxscript"
    free = torch.export.Dim.DYNAMIC
    named, axes = {
        "text": (["ids", "mask"], {0: free, 1: free}),
        "audio": (["features", "mask"], {0: free, 1: free}),
        "image": (["pixels"], {0: free}),
    }[takes]
    with warnings.catch_warnings(), torch.no_grad(), without("native"):
        warnings.simplefilter("ignore")
        outputs = ["logits", "boxes"] if isinstance(model(*sample), tuple) else ["output"]
        graph = torch.export.export(model, sample, dynamic_shapes=(axes,) * len(sample), strict=True)
        torch.onnx.export(
            graph, (), str(path), dynamo=True, external_data=False, verbose=False,
            input_names=named, output_names=outputs,
        )  # fmt: skip
    return ""
