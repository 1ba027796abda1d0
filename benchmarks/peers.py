"""The other libraries. Each is imported when it is built, and gets its inputs in its preferred layout.

A library that is not installed raises ImportError from `build`: it is left out and named in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.case import Inputs, Peer, Reference, torch_peer

SDPA = "SDPA"
ONNXRUNTIME = "onnxruntime"
OPENVINO = "OpenVINO"
JAX = "JAX"
FLEX = "compiled FlexAttention"
BROADCAST = "broadcast"
COMPILED = "torch.compile'd"
LOCAL = "local-attention"
LONGFORMER = "transformers' Longformer"
LINEAR = "linear-attention-transformer"
BLIND = "linear-attention-transformer, blind to the last 64"
PERFORMER = "performer-pytorch"
DELTA_RULE = "Transformers, Qwen3-Next in torch"
MODULE = "nn.MultiheadAttention"
XTRANSFORMERS = "x-transformers"
ENTMAX = "entmax"


def sdpa(*, causal: bool = False, dropout: float = 0.0, name: str = SDPA, reference: Reference | None = None) -> Peer:
    """torch's own kernel."""
    return torch_peer(
        name,
        lambda x: F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal, dropout_p=dropout),
        reference=reference,
    )


def sdpa_biased(bias: Callable[[Inputs], Tensor], name: str = "SDPA, materialised bias") -> Peer:
    """torch's kernel with a bias (H, N, N) that the call builds."""
    return torch_peer(name, lambda x: F.scaled_dot_product_attention(x["q"], x["k"], x["v"], attn_mask=bias(x)))


def sdpa_given(bias: Callable[[Inputs], Tensor], name: str = "SDPA, materialised bias") -> Peer:
    """The same with a bias that is built before the call."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        ready = bias(x).detach()
        return lambda: F.scaled_dot_product_attention(x["q"], x["k"], x["v"], attn_mask=ready)

    return Peer(name, build)


def tangent(call: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    """The tangent of a call's result, for inputs `q`, `k`, `v` and tangents `dq`, `dk`, `dv` of those that have one."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x[name], x[f"d{name}"]) if f"d{name}" in x else x[name] for name in "qkv"}
        return forward_ad.unpack_dual(call(duals)).tangent


def sdpa_math_tangent() -> Peer:
    """torch's dense path, the only one of its kernels with a forward mode."""

    def call(x: Inputs) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x["q"], x["k"], x["v"])

    return torch_peer("SDPA's math path", lambda x: tangent(call, x))


def _tokens(x: Inputs, names: str = "qkv") -> list[Tensor]:
    """(B, N, H, D) of each."""
    return [x[name].detach().transpose(1, 2).contiguous() for name in names]


def onnxruntime(*, causal: bool = False) -> Peer:
    """Its fused MultiHeadAttention, on (B, N, H * D)."""

    def build(x: Inputs, threads: int) -> Callable[[], Any]:
        import onnxruntime as ort
        from onnx import TensorProto, helper

        heads = x["q"].shape[1]
        given = {name: t.flatten(2).numpy() for name, t in zip("qkv", _tokens(x), strict=True)}
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name, a in given.items()]
        result = helper.make_tensor_value_info("o", TensorProto.FLOAT, given["q"].shape)
        node = helper.make_node(
            "MultiHeadAttention",
            list("qkv"),
            ["o"],
            domain="com.microsoft",
            num_heads=heads,
            unidirectional=int(causal),
        )
        model = helper.make_model(
            helper.make_graph([node], "attention", ends, [result]),
            opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
            ir_version=9,
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.force_spinning_stop", "1")  # or its threads run into others' turns
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return lambda: (session.run(None, given)[0], heads)

    def view(result: tuple[Any, int]) -> Tensor:
        return torch.from_numpy(result[0]).unflatten(2, (result[1], -1)).transpose(1, 2)

    return Peer(ONNXRUNTIME, build, view)


def openvino(*, causal: bool = False) -> Peer:
    """Its ScaledDotProductAttention, on (B, H, N, D)."""

    def build(x: Inputs, threads: int) -> Callable[[], Any]:
        import openvino as ov
        from openvino import opset13

        ends = [opset13.parameter(list(x[name].shape), ov.Type.f32, name) for name in "qkv"]
        model = ov.Model([opset13.scaled_dot_product_attention(*ends, causal=causal)], ends)
        settings = {
            "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY", "ENABLE_HYPER_THREADING": True,
        }  # fmt: skip
        compiled = ov.Core().compile_model(model, "CPU", settings)
        given = [x[name].detach().numpy() for name in "qkv"]
        return lambda: compiled(given, share_inputs=True, share_outputs=True)[0]

    return Peer(OPENVINO, build, lambda output: torch.from_numpy(output).clone())


def jax(*, causal: bool = False) -> Peer:
    """jax.nn.dot_product_attention under jit, on (B, N, H, D). Its threads are set by the environment."""

    def build(x: Inputs, threads: int) -> Callable[[], Any]:
        import jax as library

        call = library.jit(lambda q, k, v: library.nn.dot_product_attention(q, k, v, is_causal=causal))
        given = [library.numpy.asarray(t.numpy()) for t in _tokens(x)]
        return lambda: call(*given).block_until_ready()

    def view(output: Any) -> Tensor:
        import numpy

        return torch.from_numpy(numpy.array(output)).transpose(1, 2)

    return Peer(JAX, build, view, tolerance=1e-4)


def flex(allowed: Callable[..., Tensor]) -> Peer:
    """FlexAttention through torch.compile, with a block mask that is built before the call."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        blocks = create_block_mask(
            lambda b, h, i, j: allowed(i, j), None, None, x["q"].shape[2], x["k"].shape[2], device="cpu"
        )
        call = torch.compile(flex_attention, dynamic=False)
        return lambda: call(x["q"], x["k"], x["v"], block_mask=blocks)

    return Peer(FLEX, build)


def _additive(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return ((q.unsqueeze(-2) + k.unsqueeze(-3)).tanh() @ weight).softmax(-1) @ v


def additive_broadcast() -> Peer:
    return torch_peer(BROADCAST, lambda x: _additive(x["q"], x["k"], x["v"], x["weight"]))


def additive_compiled() -> Peer:
    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        call = torch.compile(_additive, dynamic=False)
        return lambda: call(x["q"], x["k"], x["v"], x["weight"])

    return Peer(COMPILED, build)


def local_attention(window: int) -> Peer:
    """Each query sees itself and `window` keys before it."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from local_attention import LocalAttention

        attend = LocalAttention(window, causal=True, exact_windowsize=True, use_rotary_pos_emb=False)
        return lambda: attend(x["q"], x["k"], x["v"])

    return Peer(LOCAL, build)


def entmax(alpha: float) -> Peer:
    """The mapping of the package entmax between two products."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from entmax import entmax15, sparsemax

        mapping = {1.5: entmax15, 2.0: sparsemax}[alpha]
        return lambda: mapping(x["q"] @ x["k"].mT / x["q"].shape[-1] ** 0.5, dim=-1) @ x["v"]

    return Peer(ENTMAX, build)


def longformer(window: int) -> Peer:
    """Each query sees `window` keys on both sides: the sliding chunks of the model, without its projections."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

        heads, width = x["q"].shape[1], x["q"].shape[3]
        sizes = {"hidden_size": heads * width, "num_attention_heads": heads, "attention_window": [2 * window]}
        layer = LongformerSelfAttention(LongformerConfig(**sizes, num_hidden_layers=1), layer_id=0)

        def call() -> Tensor:
            q, k, v = (x[name].transpose(1, 2) for name in "qkv")
            scores = layer._sliding_chunks_query_key_matmul(q / width**0.5, k, window)
            return layer._sliding_chunks_matmul_attn_probs_value(scores.softmax(-1), v, window).transpose(1, 2)

        return call

    return Peer(LONGFORMER, build)


def linear_transformer(bucket: int, reference: Reference) -> Peer:
    """Causal linear attention with softmax and exp as features; a query sees the keys of earlier buckets."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

        return lambda: causal_linear_attn(x["q"], x["k"], x["v"], bucket_size=bucket)

    return Peer(LINEAR if bucket == 1 else BLIND, build, reference=reference, tolerance=1e-4)


def transformers_delta_rule() -> Peer:
    """The gated delta rule of Transformers' Qwen3-Next, in torch."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        return lambda: torch_chunk_gated_delta_rule(
            *(x[name].transpose(1, 2) for name in ("q", "k", "v", "decay", "beta"))
        )[0].transpose(1, 2)

    return Peer(DELTA_RULE, build)


def performer(directions: Callable[[], Tensor], reference: Reference) -> Peer:
    """Causal FAVOR+, with the same random directions as ours."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from contextlib import redirect_stdout
        from io import StringIO

        from performer_pytorch.performer_pytorch import FastAttention

        matrix = directions().float()
        with redirect_stdout(StringIO()):  # it prints that there is no CUDA
            attend = FastAttention(matrix.shape[1], nb_features=matrix.shape[0], causal=True)
        attend.projection_matrix.copy_(matrix)
        return lambda: attend(x["q"], x["k"], x["v"])

    return Peer(PERFORMER, build, reference=reference, tolerance=1e-3)


def torch_module(heads: int) -> Peer:
    """nn.MultiheadAttention on tokens (1, B, N, d_model), weights `inward` (3 * width, width) and `outward`."""

    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        layer = torch.nn.MultiheadAttention(x["tokens"].shape[-1], heads, bias=False, batch_first=True)
        if not x["inward"].requires_grad:
            layer.eval()
        _tie(layer, "in_proj_weight", x["inward"])
        _tie(layer.out_proj, "weight", x["outward"])
        return lambda: layer(*[x["tokens"][0]] * 3, need_weights=False)[0].unsqueeze(0)

    return Peer(MODULE, build)


def x_transformers(heads: int) -> Peer:
    def build(x: Inputs, threads: int) -> Callable[[], Tensor]:
        from x_transformers.x_transformers import Attention

        width = x["tokens"].shape[-1]
        layer = Attention(width, dim_head=width // heads, heads=heads, flash=True)

        def call() -> Tensor:
            for part, weight in zip((layer.to_q, layer.to_k, layer.to_v), x["inward"].chunk(3), strict=True):
                _tie(part, "weight", weight)
            return layer(x["tokens"][0]).unsqueeze(0)

        _tie(layer.to_out, "weight", x["outward"])
        return call

    return Peer(XTRANSFORMERS, build)


def _tie(module: torch.nn.Module, name: str, weight: Tensor) -> None:
    """Let a module use our weight, so that all compute one function and gradients go to one place."""
    module._parameters.pop(name, None)
    setattr(module, name, weight)
