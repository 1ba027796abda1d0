"""Cases beyond dense attention: windows, sparse masks, biases, additive scores, linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

import regard as rg
from benchmarks import definitions as define
from benchmarks import peers
from benchmarks.case import Case, Inputs, Peer, Target, normal, qkv, torch_peer
from benchmarks.definitions import softmax_attention
from regard.data.readers import TATOEBA, BadRows, read_rows
from regard.geometry import Frame, Indices

FORWARD, BOTH = "forward", "forward + backward"


def described(**description: object) -> Callable[[Inputs], Tensor]:
    attend = rg.Attention(**description)  # type: ignore[arg-type]
    return lambda x: attend(x["q"], x["k"], x["v"])


plain = described()
_PLAIN, _CAUSAL = softmax_attention(), softmax_attention(define.causal)


def windows() -> Iterator[Case]:
    """256 keys: itself and 255 before it."""
    visible = define.window(255, 0)
    ours, reference = described(mask=rg.causal() & rg.window(255, 0)), softmax_attention(visible)
    dense = peers.sdpa(causal=True, name="SDPA causal", reference=_CAUSAL)
    for N, heads, over_flex, over_causal in ((4096, 8, 2.8, 9.0), (16384, 4, 4.0, 30.0)):
        pairs = 256 * N - 256 * 255 / 2
        yield Case(
            f"window 256 {FORWARD}, N = {N:,}", "sliding window", lambda N=N, H=heads: qkv(1, H, N, 64), ours,
            reference, (peers.flex(visible), dense), (Target(peers.FLEX, over_flex), Target(dense.name, over_causal)),
            flops=4 * heads * pairs * 64, quick=N == 4096,
        )  # fmt: skip


def window_training() -> Iterator[Case]:
    dense = peers.sdpa(name="dense SDPA", reference=_PLAIN)
    one, both = define.window(256, 0), define.window(256, 256)
    for N, heads in ((512, 8), (2048, 8), (16384, 2)):
        for name, mask, visible, peer in (
            ("before", rg.window(256, 0), one, peers.local_attention(256)),
            ("on both sides", rg.window(256, 256), both, peers.longformer(256)),
        ):
            yield Case(
                f"window training, 256 keys {name}, N = {N:,}", "window training",
                lambda N=N, H=heads: qkv(1, H, N, 64), described(mask=mask), softmax_attention(visible), (dense, peer),
                (Target(dense.name, 1.0), Target(peer.name, 1.0)), backward=True, quick=N == 512,
            )  # fmt: skip


def sparse() -> Iterator[Case]:
    """Compared with dense attention times the share of tiles that the mask leaves."""
    for N, heads, quick in ((2048, 2, True), (8192, 2, False)):
        ids = torch.arange(N) // 500
        patterns = {
            "longformer": rg.longformer(256, range(16)),
            "bigbird": rg.bigbird(64),
            "documents": rg.documents(ids),
        }
        for name, mask in patterns.items():
            yield Case(
                f"{name} {BOTH}, N = {N:,}", "sparse masks", lambda N=N, H=heads: qkv(1, H, N, 64),
                described(mask=mask), softmax_attention(_bits(mask, N)), (_share_of_dense(mask, N),),
                (Target("visited share of dense", at_most=1.25),) if N == 8192 else (), backward=True, quick=quick,
            )  # fmt: skip


def neighborhoods() -> Iterator[Case]:
    """A picture of 64 x 64 tokens, each of which attends to the 7 x 7 around it, moved inside at the borders."""
    side, width = 64, 7
    mask = rg.neighborhood((side, side), width)
    yield Case(
        f"neighborhood 7 x 7 of 64 x 64, {BOTH}", "sparse masks", lambda: qkv(1, 2, side * side, 64),
        described(mask=mask), softmax_attention(define.neighborhood(side, width)),
        (_share_of_dense(mask, side * side),), (Target("visited share of dense", at_most=1.5),), backward=True,
    )  # fmt: skip


def packed_sentences() -> Iterator[Case]:
    """1,000 sentences of the included corpus, one after another: `varlen` compared with `documents`."""
    rows = read_rows(TATOEBA, {"source": "", "target": ""}, BadRows())
    lengths = [len(row.values[0].split()) + 1 for row in islice(rows, 0, None, 50)][:1000]  # words and an end
    edges = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.repeat_interleave(torch.arange(1000), torch.tensor(lengths))
    for causal, quick in ((False, True), (True, False)):
        visible = define.same_sequence(ids, causal=causal)
        inside = rg.causal() if causal else None
        packed = rg.documents(ids) if inside is None else rg.documents(ids) & inside
        peer = torch_peer("documents", described(mask=packed), reference=softmax_attention(visible), ours=True)
        yield Case(
            f"1,000 sentences{', causal' if causal else ''}, {BOTH}, N = {len(ids):,}", "packed sentences",
            lambda: qkv(1, 4, len(ids), 64), described(mask=rg.varlen(edges, mask=inside)), softmax_attention(visible),
            (peer,), (Target(peer.name, at_most=1.05),), backward=True, quick=quick,
        )  # fmt: skip


def _share_of_dense(mask: rg.Mask, N: int) -> Peer:
    x = torch.zeros(1, 1, N, 1)
    visited, total = rg.Attention(mask=mask).explain(x, x, x).tiles
    return torch_peer("visited share of dense", plain, reference=_PLAIN, share=visited / total, ours=True)


def _bits(mask: rg.Mask, N: int) -> define.Allowed:
    """The mask's own bits, since only it knows which blocks it drew."""
    zero = torch.zeros((), dtype=torch.int64)
    return lambda i, j: mask.allows(Indices(Frame(1, 1, N, N, 0), zero, zero, i, j))


def biases() -> Iterator[Case]:
    """Biases and softcap cost little more than plain dot products."""
    N, H, R = 2048, 8, 32
    dot = torch_peer("ours, plain dot", plain, reference=_PLAIN, ours=True)

    def shaw_bias(x: Inputs) -> Tensor:
        steps = torch.arange(N)
        given = x["q"] @ x["keys"].T / x["q"].shape[-1] ** 0.5
        return given.gather(-1, define.clip_distance(steps[:, None], steps, R).expand(1, H, N, N))

    table = {"table": normal(32, H, seed=4)}
    shaw = {"keys": normal(2 * R + 1, 64, seed=4, std=0.3), "values": normal(2 * R + 1, 64, seed=5, std=0.3)}
    softcap = described(score=rg.Dot(softcap=20.0))
    for backward in (False, True):
        expand = peers.sdpa_biased if backward else peers.sdpa_given  # a learned bias is expanded in every call
        for name, extra, ours, reference, other, most in (
            ("ALiBi", {}, described(bias=rg.alibi(H)), softmax_attention(bias=define.alibi),
             peers.sdpa_given(define.whole(define.alibi)), 1.25),
            ("T5 table", table, lambda x: rg.attention(x["q"], x["k"], x["v"], bias=rg.t5(x["table"])),
             softmax_attention(bias=define.t5), expand(define.whole(define.t5)), 1.25),
            ("Shaw", shaw, lambda x: rg.attention(x["q"], x["k"], x["v"], bias=rg.shaw(x["keys"], x["values"])),
             softmax_attention(shaw=True), None, 1.6),
            ("Shaw, keys only", {"keys": shaw["keys"]},
             lambda x: rg.attention(x["q"], x["k"], x["v"], bias=rg.shaw(x["keys"])),
             softmax_attention(bias=_shaw_rows), peers.sdpa_biased(shaw_bias), 1.6),
            ("softcap", {}, softcap, softmax_attention(softcap=20.0), None, 1.25),
        ):  # fmt: skip
            yield Case(
                f"{name} {BOTH if backward else FORWARD}, N = 2,048", "biases",
                lambda extra=extra: qkv(1, H, N, 64) | extra, ours, reference, (dot, *((other,) if other else ())),
                (Target(dot.name, at_most=most), *((Target(other.name, 1.0),) if other else ())), backward=backward,
                quick=name in ("ALiBi", "softcap") and not backward,
            )  # fmt: skip


def _shaw_rows(x: Inputs, i: Tensor, j: Tensor) -> Tensor:
    given = x["q"][:, :, i.reshape(-1)] @ x["keys"].T / x["q"].shape[-1] ** 0.5
    index = define.clip_distance(i, j, len(x["keys"]) // 2)
    return given.gather(-1, index.expand(*given.shape[:2], -1, -1))


def learned_biases() -> Iterator[Case]:
    N, H = 2048, 8
    yield Case(
        f"learned dense bias, {BOTH}, N = 2,048", "learned biases",
        lambda: qkv(1, H, N, 64) | {"bias": normal(H, N, N, seed=4)},
        lambda x: rg.attention(x["q"], x["k"], x["v"], bias=x["bias"]), softmax_attention(bias=define.dense),
        (peers.sdpa_biased(lambda x: x["bias"], peers.SDPA),), (Target(peers.SDPA, 1.8),), backward=True,
    )  # fmt: skip
    yield Case(
        f"learned table bias, {BOTH}, N = 2,048", "learned biases",
        lambda: qkv(1, H, N, 64) | {"table": normal(257, H, seed=4)},
        lambda x: rg.attention(x["q"], x["k"], x["v"], bias=rg.relative(x["table"])),
        softmax_attention(bias=define.relative), (peers.sdpa_biased(define.whole(define.relative), peers.SDPA),),
        (Target(peers.SDPA, 1.8),), backward=True, linear_memory=True,
    )  # fmt: skip


def normalizations() -> Iterator[Case]:
    softmax = torch_peer("our softmax", plain, reference=_PLAIN, ours=True)
    bias = -math.log(2048)
    for backward in (False, True):
        yield Case(
            f"sigmoid, {BOTH if backward else FORWARD}, N = 2,048", "sigmoid", lambda: qkv(1, 8, 2048, 64),
            described(normalization=rg.Sigmoid(bias)), define.sigmoid_attention(bias), (softmax,),
            (Target(softmax.name, at_most=1.05),), backward=backward, linear_memory=True,
        )  # fmt: skip
    for alpha in (1.5, 2.0):
        theirs = peers.entmax(alpha)
        yield Case(
            f"entmax, alpha = {alpha:g}, {FORWARD}, N = 2,048", "entmax", lambda: qkv(1, 2, 2048, 64),
            described(normalization=rg.Entmax(alpha)), define.entmax_attention(alpha), (theirs,),
            (Target(theirs.name, 5.0),), linear_memory=True,
        )  # fmt: skip


def additive() -> Iterator[Case]:
    def inputs() -> Inputs:
        return qkv(1, 1, 1024, 64) | {"weight": normal(64, seed=4)}

    def ours(x: Inputs) -> Tensor:
        return rg.attention(x["q"], x["k"], x["v"], score=rg.Additive(x["weight"]))

    for backward, targets in (
        (False, (Target(peers.BROADCAST, 45.0), Target(peers.COMPILED, 18.0))),
        (True, (Target(peers.BROADCAST, 20.0),)),
    ):
        yield Case(
            f"additive {BOTH if backward else FORWARD}, N = 1,024", "additive", inputs, ours, define.additive,
            (peers.additive_broadcast(), peers.additive_compiled()), targets, backward=backward, linear_memory=True,
            quick=not backward,
        )  # fmt: skip


def statistics() -> Iterator[Case]:
    """Compared with half the time of the forward pass, since there are scores and no values."""
    half = torch_peer("half of our forward", plain, reference=_PLAIN, share=0.5, ours=True)
    narrow = torch_peer("our forward with values of width 1", _narrow, reference=_narrow_rows, ours=True)

    def ours(x: Inputs) -> Tensor:
        statistics = rg.Attention().statistics(x["q"], x["k"])
        return torch.stack([statistics.lse, statistics.entropy, statistics.max_logit, statistics.distance], -1)

    for N, quick in ((2048, True), (8192, False)):
        yield Case(
            f"statistics, N = {N:,}", "statistics", lambda N=N: qkv(1, 2, N, 64), ours, define.statistics,
            (half, narrow), (Target(half.name, at_most=1.3),) if N == 8192 else (), linear_memory=True, quick=quick,
        )  # fmt: skip


def _narrow(x: Inputs) -> Tensor:
    return rg.attention(x["q"], x["k"], x["v"][..., :1])


def _narrow_rows(x: Inputs, rows: Tensor) -> Tensor:
    return _PLAIN(x | {"v": x["v"][..., :1]}, rows)


def forward_mode() -> Iterator[Case]:
    """The tangent of the output: six products with tangents of query, key and value, against two of the forward."""
    N, H = 2048, 8
    forward = torch_peer("our forward", plain, reference=_PLAIN, ours=True)

    def inputs(names: str) -> Inputs:
        moved = {f"d{name}": normal(1, H, N, 64, seed=4 + n) for n, name in enumerate(names)}
        return qkv(1, H, N, 64) | moved

    for described, names in (("query, key and value", "qkv"), ("the query", "q")):
        math = peers.sdpa_math_tangent()
        yield Case(
            f"forward mode, tangent of {described}, N = 2,048", "forward mode", lambda names=names: inputs(names),
            lambda x: peers.tangent(plain, x), define.tangent(_PLAIN), (math, forward),
            (Target(math.name, 3.0), Target(forward.name, at_most=2.6)), linear_memory=True,
            flops=4 * (3 if names == "qkv" else 2) * H * N * N * 64, quick=names == "q",
        )  # fmt: skip


def linear() -> Iterator[Case]:
    def softmax_features(x: Tensor) -> Tensor:
        return x.softmax(-1) * x.shape[-1] ** -0.5

    exact = peers.linear_transformer(1, define.linear_attention(softmax_features, torch.exp, floor=1e-3))
    blind = peers.linear_transformer(64, define.linear_attention(softmax_features, torch.exp, bucket=64, floor=1e-3))
    elu = rg.LinearAttention("elu", mask=rg.causal())
    for N, quick in ((1024, True), (16384, False)):
        yield Case(
            f"linear attention, causal, {BOTH}, N = {N:,}", "linear attention", lambda N=N: qkv(1, 2, N, 64),
            lambda x: elu(x["q"], x["k"], x["v"]), define.linear_attention(define.elu, define.elu), (exact, blind),
            (Target(exact.name, 2.0), Target(blind.name, 2.0)) if N == 16384 else (), backward=True, quick=quick,
        )  # fmt: skip
    features = 128
    favor = rg.LinearAttention(rg.favor(features), mask=rg.causal())
    vectors = normal(features, 64, seed=9)
    theirs = define.linear_attention(
        define.favor(vectors, over=(-1,), floor=1e-4), define.favor(vectors, over=(-1, -2), floor=1e-4), epsilon=1e-6
    )
    performer = peers.performer(lambda: vectors, theirs)
    for N, quick in ((1024, True), (16384, False)):
        yield Case(
            f"Performer, causal, {features} features, {BOTH}, N = {N:,}", "linear attention",
            lambda N=N: {name: t * 0.3 for name, t in qkv(1, 2, N, 64).items()},
            lambda x: favor(x["q"], x["k"], x["v"]), _favor_rows(features), (performer,),
            (Target(performer.name, 10.0),) if N == 16384 else (), backward=True, quick=quick, tolerance=1e-4,
        )  # fmt: skip


def delta_rule() -> Iterator[Case]:
    """The gated delta rule of Qwen3-Next: keys of length 1, a decay and a beta per head and token."""

    def inputs(N: int) -> Inputs:
        x = qkv(1, 4, N, 128)
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
        gates = {
            "decay": torch.nn.functional.logsigmoid(normal(1, 4, N, seed=5)),
            "beta": normal(1, 4, N, seed=6).sigmoid(),
        }
        return x | gates

    attend, theirs = rg.LinearAttention.gated_deltanet(), peers.transformers_delta_rule()
    for N, quick in ((1024, True), (8192, False)):
        yield Case(
            f"gated delta rule, {BOTH}, N = {N:,}, D = 128", "gated delta rule", lambda N=N: inputs(N),
            lambda x: attend(x["q"] * 128**-0.5, x["k"], x["v"], decay=x["decay"], beta=x["beta"]),
            define.gated_delta_rule, (theirs,), (Target(theirs.name, 3.0),) if N == 8192 else (), backward=True,
            linear_memory=True, quick=quick,
        )  # fmt: skip


def _favor_rows(count: int) -> Callable[[Inputs, Tensor], Tensor]:
    """Reference rows with the random directions that `favor` draws."""
    from regard.linear.features import _directions

    features = define.favor(_directions(count, 64, 0))
    return define.linear_attention(features, features)


MAKERS = (
    windows,
    window_training,
    sparse,
    neighborhoods,
    packed_sentences,
    biases,
    learned_biases,
    normalizations,
    additive,
    statistics,
    forward_mode,
    linear,
    delta_rule,
)
