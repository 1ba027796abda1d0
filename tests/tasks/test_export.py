"""Exported folders: encoder and decoder in onnxruntime against torch, and the commands that read them like runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnxruntime

from regard.models import LanguageConfig, LanguageModel, PointerTransformer, Transformer, TransformerConfig
from regard.models.position_embeddings import SinusoidalPositions
from regard.models.speech_synthesis import SpeechSynthesizer, SpeechSynthesizerConfig
from regard.nn import Rotary
from regard.tasks import Run, UserError, tasks, train
from regard.training.export import _write_graphs, export
from regard.training.onnx_graphs import pair_graphs, speaker_graphs, text_graph
from tests.conftest import Command
from tests.tasks.tiny_runs import classes, new_run, pairs

Graphs = dict[str, Any]
SIZES = [(1, 1), (1, 9), (3, 5), (4, 90), (2, 300)]  # batch and source; positions beyond any cached table


def export_graphs(graphs: tuple[Any, ...], folder: Path) -> Graphs:
    assert _write_graphs(graphs, folder) == ""
    return {graph.name: session(folder / f"{graph.name}.onnx") for graph in graphs}


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def sources(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids and padding mask; the first row has no padding."""
    generator = torch.Generator().manual_seed(1000 * batch + length)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    lengths[0] = length
    return torch.randint(4, vocabulary, (batch, length), generator=generator), torch.arange(length) < lengths


def writers() -> dict[str, Transformer]:
    shape = {"vocabulary": 60, "d_model": 16, "layers": 2, "heads": 2, "d_hidden": 32, "suppress_tokens": (0, 1, 3)}
    torch.manual_seed(0)
    models = {
        "translator": Transformer(TransformerConfig(**shape)),
        "two vocabularies": Transformer(TransformerConfig(**shape, target_vocabulary=50, tied=False, logits_bias=True)),
        "summariser": PointerTransformer(TransformerConfig(**shape, window=3)),
    }
    return {name: model.eval() for name, model in models.items()}


@pytest.fixture(scope="module", params=writers())
def writer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Graphs]:
    model = writers()[request.param]
    model(*[torch.tensor([[5, 6]])] * 2)  # values cached by a call must not become part of the graph
    return model, export_graphs(pair_graphs(model), tmp_path_factory.mktemp("pair"))


def decoder_inputs(graphs: Graphs, ids: Tensor, mask: Tensor) -> dict[str, np.ndarray]:
    inputs = {"source_ids": ids.numpy(), "source_mask": mask.numpy()}
    (encoded,) = graphs["encoder"].run(None, inputs)
    names = {each.name for each in graphs["decoder"].get_inputs()}
    return {name: value for name, value in (inputs | {"encoded": encoded}).items() if name in names}


@pytest.mark.parametrize(("batch", "length"), SIZES)
def test_a_pair_of_graphs_computes_what_the_model_does(
    writer: tuple[Transformer, Graphs], batch: int, length: int
) -> None:
    model, graphs = writer
    ids, mask = sources(batch, length, model.config.vocabulary)
    inputs = decoder_inputs(graphs, ids, mask)
    for count in (1, 2, 130):
        target = torch.randint(4, 50, (batch, count))
        (actual,) = graphs["decoder"].run(None, inputs | {"target_ids": target.numpy()})
        with torch.no_grad():
            expected = model(ids, target, mask).clone()
        expected[..., list(model.config.suppress_tokens)] = -np.inf
        torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "length"), SIZES)
def test_a_greedy_loop_in_onnxruntime_writes_what_generate_does(
    writer: tuple[Transformer, Graphs], batch: int, length: int
) -> None:
    model, graphs = writer
    ids, mask = sources(batch, length, model.config.vocabulary)
    inputs, config = decoder_inputs(graphs, ids, mask), model.config
    target = np.full((batch, 1), config.start)
    while target.shape[1] <= 12 and not (target == config.stop).any(1).all():
        (logits,) = graphs["decoder"].run(None, inputs | {"target_ids": target})
        target = np.concatenate((target, logits[:, -1:].argmax(-1)), 1)
    generated = [row[1 : np.argmax(row == config.stop) if config.stop in row else None].tolist() for row in target]
    expected = [row.tolist() for row in model.generate(ids, mask, max_new_tokens=12)]
    assert generated == expected
    assert any(expected)


def test_axes_have_names(writer: tuple[Transformer, Graphs]) -> None:
    model, graphs = writer
    copies = isinstance(model, PointerTransformer)
    width, size = model.config.d_model, model.config.target_vocabulary or model.config.vocabulary
    source, target = ["batch", "source"], ["batch", "target"]
    assert shapes(graphs["encoder"]) == (
        {"source_ids": source, "source_mask": source},
        {"encoded": [*source, width]},
    )
    assert shapes(graphs["decoder"]) == (
        {"target_ids": target, "encoded": [*source, width], "source_mask": source}
        | ({"source_ids": source} if copies else {}),
        {"logits": [*target, size]},
    )


def shapes(graph: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    inputs, outputs = ({each.name: each.shape for each in some} for some in (graph.get_inputs(), graph.get_outputs()))
    return inputs, outputs


def test_a_speaker_says_the_same_in_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = SpeechSynthesizerConfig(vocabulary=30, d_model=16, layers=2, heads=2, d_hidden=32, features=8, reduction=3)
    model = SpeechSynthesizer(config).eval()
    graphs = export_graphs(speaker_graphs(model), tmp_path)
    assert shapes(graphs["decoder"])[1] == {"frames": ["batch", "steps", 3, 8], "end_logits": ["batch", "steps"]}
    ids, mask = sources(3, 70, config.vocabulary)
    inputs, target = decoder_inputs(graphs, ids, mask), torch.randn(3, 90, 8)
    last = np.concatenate((np.zeros((3, 1, 8), np.float32), target[:, 2:-1:3].numpy()), 1)
    frames, ends = graphs["decoder"].run(None, inputs | {"last_frames": last})
    with torch.no_grad():
        expected = model.predict_frames(ids, target, mask)
    torch.testing.assert_close(torch.from_numpy(frames).flatten(1, 2), expected.frames, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(ends), expected.ends, rtol=1e-4, atol=1e-5)

    inputs, last, result = decoder_inputs(graphs, ids[:1], mask[:1]), np.zeros((1, 1, 8), np.float32), []
    for _ in range(20):
        frames, ends = graphs["decoder"].run(None, inputs | {"last_frames": last})
        result.append(frames[0, -1])
        last = np.concatenate((last, frames[:, -1:, -1]), 1)
        if ends[0, -1] > 0:
            break
    (uttered,) = model.generate([ids[0]], max_frames=60)
    torch.testing.assert_close(torch.from_numpy(np.concatenate(result)), uttered.frames, rtol=1e-3, atol=1e-4)


def test_a_language_model_computes_the_same_in_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LanguageModel(
        LanguageConfig(
            vocabulary=60, d_model=16, layers=2, heads=2, d_hidden=32, rotary=Rotary(), norm="rms", gated=True
        )
    ).eval()
    graph = export_graphs((text_graph(model, "logits"),), tmp_path)["model"]
    assert shapes(graph)[0] == {"ids": ["batch", "length"], "mask": ["batch", "length"]}
    for batch, length in SIZES:
        ids, mask = sources(batch, length, 60)
        (actual,) = graph.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
        with torch.no_grad():
            expected = model(ids, mask)
        torch.testing.assert_close(torch.from_numpy(actual)[mask], expected[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("called", [False, True])
def test_an_exported_table_of_positions_has_any_length(called: bool) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = SinusoidalPositions(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.position(x, torch.arange(x.shape[1]))

    module = Placed()
    if called:
        module(torch.zeros(1, 5, 8))
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(module, (torch.zeros(2, 7, 8),), dynamic_shapes=({0: free, 1: free},), strict=True)
    long = torch.zeros(1, 500, 8)
    assert torch.equal(program.module()(long), module(long))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("translator"), "translate", options={"beam": 1}, steps=6)
    assert train(run).done
    return run


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    run = new_run(tmp_path_factory.mktemp("classifier"), "classify", steps=30, learning_rate=1e-2, tokens=600)
    assert train(run).done
    return run


@pytest.fixture(params=["translator", "classifier"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


def test_an_exported_folder_predicts_as_its_run_does(regard: Command, run: Run, tmp_path: Path) -> None:
    assert regard("export", run.folder, tmp_path / "out", "--no-onnx").code == 0
    words = "the red cat sees the dog", "a bird likes", "--json"
    ours, theirs = (regard("predict", folder, *words) for folder in (run.folder, tmp_path / "out"))
    assert (theirs.code, theirs.err) == (0, "")
    assert ours.out == theirs.out
    assert len(ours.out.splitlines()) == 2


def test_an_exported_folder_is_evaluated_as_its_run_is(regard: Command, run: Run, tmp_path: Path) -> None:
    regard("export", run.folder, tmp_path / "out", "--no-onnx")
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    ours, theirs = (json.loads(regard("evaluate", each, "--json").out) for each in (run.folder, tmp_path / "out"))
    assert ours == theirs
    assert theirs["baselines"]
    data = (pairs if run.task.name == "translate" else classes)(tmp_path, 30)
    ours, theirs = (
        json.loads(regard("evaluate", each, "--data", data, "--json").out) for each in (run.folder, tmp_path / "out")
    )
    assert ours == theirs
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files  # read-only


def test_where_the_training_data_is_gone_other_data_is_measured_without_baselines(
    regard: Command, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    run = new_run(tmp_path / "there", "classify")
    train(run)
    regard("export", run.folder, tmp_path / "out", "--no-onnx")
    shutil.rmtree(tmp_path / "there")
    alone = regard("evaluate", tmp_path / "out")
    assert alone.code == 1
    assert "classes.csv: missing training data" in alone.err
    assert "or evaluate on other data with --data FILE" in alone.err
    measured = regard("evaluate", tmp_path / "out", "--data", classes(tmp_path), "--json")
    assert "without baselines" in measured.err
    report = json.loads(measured.out)
    assert report["baselines"] == {}
    assert report["rows"] == {"train": 90, "validation": 8, "test": 120, "left_out": 0}
    assert regard("evaluate", tmp_path / "out", "--data", classes(tmp_path)).code == 0


@pytest.mark.parametrize("words", [("resume", "OUT"), ("train", "classify", "--data", "DATA", "--out", "OUT")])
def test_an_exported_folder_is_not_trained(
    words: tuple[str, ...], regard: Command, classifier: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    regard("export", classifier.folder, out, "--no-onnx")
    before = sorted(path.name for path in out.iterdir())
    result = regard(*({"OUT": out, "DATA": classes(tmp_path)}.get(word, word) for word in words))
    assert result.code == 1
    assert f"{out}: " in result.err
    assert sorted(path.name for path in out.iterdir()) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_exported_folder_is_one_line(name: str, regard: Command, classifier: Run, tmp_path: Path) -> None:
    regard("export", classifier.folder, tmp_path / "out", "--no-onnx")
    (tmp_path / "out" / name).write_bytes(b"{")
    result = regard("predict", tmp_path / "out", "the cat sees")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert "export the run again" in result.err


def test_an_export_that_fails_leaves_nothing(classifier: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*inputs: Any, **options: Any) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(RuntimeError, match="no graph"):
        export(classifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="no graph"):
        export(classifier, tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_an_export_prints_only_the_files_written(translator: Run, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "regard", "export", str(translator.folder), str(tmp_path / "out")]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    stages = re.compile(r"(loading the model|writing \w+\.onnx) \.\.\.")  # on a slow machine they are reported
    assert [line for line in result.stderr.splitlines() if not stages.fullmatch(line)] == []
    written_names = {line.split(": ")[1].split(" (")[0] for line in result.stdout.splitlines()}
    assert written_names == {
        "config.json",
        "decoder.onnx",
        "encoder.onnx",
        "processor.json",
        "model.safetensors",
        "run.json",
        "tokenizer.json",
    }
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["generation"] == {"start": 1, "stop": 2}
    Run.open(tmp_path / "out").model()


def test_a_task_without_graphs_reports_it(classifier: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: Callable[..., tuple[()]] = lambda task, model, processor: ()  # noqa: E731
    monkeypatch.setattr(tasks()["classify"], "graphs", graphs)
    assert export(classifier, tmp_path / "out")[-1] == "no ONNX: this model cannot be traced"


def test_a_folder_that_is_not_empty_is_left_alone(classifier: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        export(classifier, tmp_path)
