"""The dense cases and their targets: every row of the table is data. The others are in `cases_more`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import regard as rg
from benchmarks import definitions as define
from benchmarks import peers
from benchmarks.case import Case, Inputs, Peer, Target, normal, qkv, torch_peer
from benchmarks.definitions import softmax_attention
from regard.engines import native

PEAK, READS = "FMA peak", "read bandwidth"
FORWARD, BOTH = "forward", "forward + backward"


def attention_flops(B: int, H: int, pairs: float, D: int, backward: bool) -> float:
    """Two products forward, five more backward, on the pairs that the mask allows."""
    return (14 if backward else 4) * B * H * pairs * D


def plain(x: Inputs) -> Tensor:
    return rg.attention(x["q"], x["k"], x["v"])


def causal(x: Inputs) -> Tensor:
    return rg.attention(x["q"], x["k"], x["v"], mask=rg.causal())


_CAUSAL = softmax_attention(define.causal)
_PLAIN = softmax_attention()


def dense() -> Iterator[Case]:
    others = (peers.sdpa(), peers.onnxruntime(), peers.openvino(), peers.jax())
    for N in (512, 2048, 4096):
        yield Case(
            f"dense {FORWARD}, N = {N:,}", "dense", lambda N=N: qkv(1, 8, N, 64), plain, _PLAIN, others,
            (Target(peers.SDPA, 1.2), Target(peers.ONNXRUNTIME, 1.08), Target(PEAK, 0.85)),
            flops=attention_flops(1, 8, N * N, 64, False), quick=N == 512,
        )  # fmt: skip
    for N, D in ((512, 64), (2048, 64), (512, 128), (2048, 128)):
        yield Case(
            f"dense {BOTH}, N = {N:,}, D = {D}", "dense", lambda N=N, D=D: qkv(1, 8, N, D), plain, _PLAIN,
            (peers.sdpa(),), (Target(peers.SDPA, 1.3 if D == 64 else 1.15),), backward=True,
            flops=attention_flops(1, 8, N * N, D, True), quick=N == 512,
        )  # fmt: skip


def causals() -> Iterator[Case]:
    forward = (peers.onnxruntime(causal=True), peers.openvino(causal=True), peers.jax(causal=True))
    for N, least in ((512, 2.2), (2048, 1.5), (4096, 1.4)):
        for backward in (False, True):
            yield Case(
                f"causal {BOTH if backward else FORWARD}, N = {N:,}", "causal", lambda N=N: qkv(1, 8, N, 64), causal,
                _CAUSAL, (peers.sdpa(causal=True), *(() if backward else forward)), (Target(peers.SDPA, least),),
                backward=backward, flops=attention_flops(1, 8, N * (N + 1) / 2, 64, backward), quick=N == 512,
            )  # fmt: skip


def short() -> Iterator[Case]:
    for shape in ((8, 12, 128, 64), (32, 12, 64, 32)):
        B, H, N, D = shape
        for backward in (False, True):
            yield Case(
                f"short sequences {shape}, {BOTH if backward else FORWARD}", "short sequences",
                lambda shape=shape: qkv(*shape), plain, _PLAIN,
                (peers.sdpa(), *(() if backward else (peers.onnxruntime(),))), (Target(peers.SDPA, 1.4),),
                backward=backward, flops=attention_flops(B, H, N * N, D, backward), quick=True,
            )  # fmt: skip


def decode() -> Iterator[Case]:
    for K in (4096, 65536):
        yield Case(
            f"decode, 1 query on {K:,} keys", "decode", lambda K=K: qkv(1, 8, K, 64, Q=1), plain, _PLAIN,
            (peers.sdpa(), peers.onnxruntime()), (Target(peers.SDPA, 2.0), Target(READS, 0.8)), reads=True,
            quick=K == 4096,
        )  # fmt: skip


def half_precision() -> Iterator[Case]:
    # With the CPU's own products of bfloat16 numbers, which torch uses too.
    own = native.multiplies_bfloat16()
    for backward, least, of_float32 in ((False, 1.9 if own else 1.3, 1.6), (True, 4.0, 1.5)):
        targets = [Target(peers.SDPA, least), *([Target(_FLOAT32.name, of_float32)] if own else [])]
        yield Case(
            f"bfloat16 {BOTH if backward else FORWARD}, N = 2,048", "bfloat16",
            lambda: qkv(1, 8, 2048, 64, dtype=torch.bfloat16), plain, _PLAIN, (peers.sdpa(), _FLOAT32),
            tuple(targets), backward=backward, tolerance=2e-2,
            flops=attention_flops(1, 8, 2048**2, 64, backward), quick=not backward,
        )  # fmt: skip


def _build_float32(x: Inputs, threads: int) -> Callable[[], Tensor]:
    wide = {name: tensor.float() for name, tensor in x.items() if name in ("q", "k", "v")}
    return lambda: plain(wide)


_FLOAT32 = Peer("ours in float32", _build_float32, ours=True)


def caches() -> Iterator[Case]:
    """Decoding with keys and values in fewer bytes."""

    def inputs(dtype: torch.dtype) -> Inputs:
        x = qkv(1, 8, 65536, 64, Q=1)
        for name in "kv":
            stored = rg.QuantizedTensor.quantize(x[name], dtype)
            x[f"{name}_data"] = stored.data
            if stored.scale is not None:
                x[f"{name}_scale"] = stored.scale
        return x

    def ours(x: Inputs) -> Tensor:
        key, value = (rg.QuantizedTensor(x[f"{n}_data"], x.get(f"{n}_scale"), torch.float32) for n in "kv")
        return rg.attention(x["q"], key, value)

    for dtype, least, tolerance in ((torch.bfloat16, 1.8, 1e-2), (torch.int8, 3.0, 2e-2)):
        yield Case(
            f"decode, 1 query on 65,536 keys, {str(dtype).removeprefix('torch.')} cache", "cache in fewer bytes",
            lambda dtype=dtype: inputs(dtype), ours, _PLAIN, (_FLOAT32,), (Target(_FLOAT32.name, least),),
            tolerance=tolerance,
        )  # fmt: skip


def dropped() -> Iterator[Case]:
    without = torch_peer("ours without dropout", plain, ours=True, tolerance=2.0)
    for backward, least in ((False, 5.0), (True, 2.5)):
        yield Case(
            f"dropout 0.1 {BOTH if backward else FORWARD}, N = 2,048", "dropout", lambda: qkv(1, 8, 2048, 64),
            lambda x: rg.attention(x["q"], x["k"], x["v"], dropout=0.1), _PLAIN, (peers.sdpa(dropout=0.1), without),
            (Target(peers.SDPA, least), Target(without.name, at_most=1.2)), backward=backward, tolerance=0.1,
            dropout=0.1, flops=attention_flops(1, 8, 2048**2, 64, backward),
        )  # fmt: skip


def eager() -> Iterator[Case]:
    for name, call, reference, is_causal in (("", plain, _PLAIN, False), (", causal", causal, _CAUSAL, True)):
        yield Case(
            f"whole eager call{name}, N = 16", "eager call", lambda: qkv(1, 1, 16, 64), call, reference,
            (peers.sdpa(causal=is_causal),), (Target(peers.SDPA, 0.9),), quick=True, smallest=True,
        )  # fmt: skip


def layers() -> Iterator[Case]:
    heads, width = 8, 512

    def ours(x: Inputs) -> Tensor:
        q, k, v = (define.split_heads(t, heads) for t in (x["tokens"][0] @ x["inward"].T).chunk(3, -1))
        return (plain({"q": q, "k": k, "v": v}).transpose(1, 2).flatten(2) @ x["outward"].T).unsqueeze(0)

    def inputs(B: int, N: int) -> Inputs:
        return {
            "tokens": normal(1, B, N, width, seed=1),
            "inward": normal(3 * width, width, seed=2, std=width**-0.5),
            "outward": normal(width, width, seed=3, std=width**-0.5),
        }

    for B, N in ((8, 128), (1, 2048)):
        for backward in (False, True):
            yield Case(
                f"layer with projections (B, N) = ({B}, {N:,}), {BOTH if backward else FORWARD}", "layer",
                lambda B=B, N=N: inputs(B, N), ours, define.layer(heads),
                (peers.torch_module(heads), peers.x_transformers(heads)), backward=backward,
                quick=B == 8 and not backward,
            )  # fmt: skip


def cases() -> list[Case]:
    """All cases, in the order of the report."""
    from benchmarks import cases_models, cases_more

    makers = (dense, causals, short, decode, caches, *cases_more.MAKERS, half_precision, dropped, eager, layers)
    makers += cases_models.MAKERS
    return [case for maker in makers for case in maker()]
