"""Whole models with the same weights in all libraries: sentence embeddings, generation, a replaced module."""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from benchmarks import definitions as define
from benchmarks import peers, peers_llama, peers_models
from benchmarks.case import Case, Inputs, Peer, Reference, Target, normal, torch_peer

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))
GEMM = "one torch product of as many FLOPs"
SENTENCES = 1000


@cache
def sentences() -> tuple[str, ...]:
    """Real sentences of mixed length: every eighth of the film reviews, in the order of the file."""
    file = DATA / "sentiment_text_classification" / "rotten_tomatoes_8530.csv"
    with file.open(newline="", encoding="utf-8") as lines:
        return tuple(row["text"] for row in csv.DictReader(lines))[:: 8530 // SENTENCES][:SENTENCES]


@cache
def embedder(weights: str = "float32") -> Any:
    return rg.load(peers_models.minilm_folder(), weights=weights)


def as_rows(output: Any) -> Tensor:
    """(n, d_model) as the check reads it: (1, 1, n, d_model)."""
    return torch.as_tensor(output)[None, None]


def embedded(texts: Callable[[], Sequence[str]]) -> Reference:
    """Embeddings by transformers in float64, one sentence per call, so that nothing is padded."""
    return lambda x, rows: as_rows(peers_models.embed_exactly([texts()[i] for i in rows.tolist()]))


def flops_of(texts: Sequence[str]) -> float:
    """FLOPs of the products with weights; attention itself adds a few percent."""
    blocks = sum(p.numel() for name, p in embedder().named_parameters() if "embedding" not in name and p.dim() > 1)
    return 2.0 * blocks * sum(len(e.ids) for e in peers_models.tokenizer().encode_batch(list(texts)))


def product_of(flops: Callable[[], float]) -> Peer:
    """A large square product in torch, whose time is scaled to the FLOPs of a case."""
    size = 1536
    a, b = normal(size, size, seed=1), normal(size, size, seed=2)
    return torch_peer(
        GEMM,
        lambda x: (a @ b)[None, None],
        reference=lambda x, rows: (a.double()[rows] @ b.double())[None, None],
        share=lambda: flops() / (2.0 * size**3),
    )


def embeddings() -> Iterator[Case]:
    some = {"index": torch.arange(SENTENCES)[None]}

    def at_a_time(embed: Callable[[list[str]], Any], count: int) -> Any:
        texts = list(sentences())
        return torch.cat([torch.as_tensor(embed(texts[n : n + count])) for n in range(0, len(texts), count)])

    for name, count, least in (("any order", SENTENCES, (1.15, 1.1)), ("as they arrive, 32 at a time", 32, (1.7, 1.7))):
        yield Case(
            f"MiniLM embeddings of {SENTENCES:,} sentences, {name}", "models", lambda: some,
            lambda x, count=count: as_rows(at_a_time(embedder().embed, count)), embedded(sentences),
            (
                peers_models.sentence_transformers(lambda embed, count=count: as_rows(at_a_time(embed, count))),
                peers_models.onnxruntime(lambda embed, count=count: as_rows(at_a_time(embed, count))),
                product_of(lambda: flops_of(sentences())),
            ),
            (Target(peers_models.SENTENCE_TRANSFORMERS, least[0]), Target(peers_models.ONNXRUNTIME, least[1])),
            tolerance=1e-4, smallest=True, threads=2,
        )  # fmt: skip

    ids = tokens(20000, 1, 16)
    yield Case(
        "MiniLM, batch 1 of 16 tokens", "models", lambda: {"ids": ids},
        lambda x: peers_models.hidden_of(embedder().encoder)(x["ids"])[None], peers_models.hidden_exactly,
        (peers_models.transformers_encoder(), peers_models.onnxruntime_encoder()),
        (Target(peers_models.TRANSFORMERS, 1.6), Target(peers_models.ONNXRUNTIME, 1.0)), tolerance=1e-4, smallest=True,
        threads=2,
    )  # fmt: skip
    yield Case(
        "MiniLM, batch 1 of 16 tokens, int8 weights", "weights of fewer bytes", lambda: {"ids": ids},
        lambda x: peers_models.hidden_of(embedder("int8").encoder)(x["ids"])[None], peers_models.hidden_exactly,
        (peers_models.onnxruntime_encoder(int8=True),), (Target(peers_models.ONNXRUNTIME_INT8, 1.0),), tolerance=0.03,
        smallest=True, threads=2,
    )  # fmt: skip


def generation() -> Iterator[Case]:
    for batch in (1, 8):
        yield Case(
            f"GPT-2, greedy, 32 tokens after 32, batch {batch}", "models",
            lambda batch=batch: {"ids": tokens(50257, batch, 32)},
            lambda x: as_tokens(torch.stack(peers_models.our_gpt2().generate(x["ids"], max_new_tokens=32))),
            lambda x, rows: as_tokens(peers_models.their_gpt2_generates(x["ids"]))[:, :, rows].double(),
            (torch_peer(peers_models.TRANSFORMERS, lambda x: as_tokens(peers_models.their_gpt2_generates(x["ids"]))),),
            (Target(peers_models.TRANSFORMERS, 1.5),), tolerance=1e-9, smallest=True, threads=2,
        )  # fmt: skip
    yield Case(
        "Marian, beam 4, 32 tokens from 24, batch 1", "models",
        lambda: {"ids": tokens(50000, 1, 24)},
        lambda x: as_tokens(peers_models.our_marian_translates(x["ids"])),
        lambda x, rows: as_tokens(peers_models.their_marian_translates(x["ids"]))[:, :, rows].double(),
        (torch_peer(peers_models.TRANSFORMERS, lambda x: as_tokens(peers_models.their_marian_translates(x["ids"]))),),
        (Target(peers_models.TRANSFORMERS, 2.0),), tolerance=1e-9, smallest=True, threads=2,
    )  # fmt: skip


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """Ids that are no special tokens."""
    return torch.randint(1000, vocabulary, shape, generator=torch.Generator().manual_seed(0))


def as_tokens(ids: Tensor) -> Tensor:
    """(B, n) ids as the check reads them: (1, 1, n, B)."""
    return ids.T.float()[None, None]


def replaced() -> Iterator[Case]:
    heads, width = 8, 512

    @cache
    def modules() -> tuple[nn.MultiheadAttention, nn.Module]:
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(width, heads, batch_first=True).eval()  # its biases begin at 0
        ours = copy.deepcopy(theirs)
        from regard.integrations.torch import replace

        return theirs, replace(nn.ModuleList([ours]))[0]

    def call(which: int) -> Callable[[Inputs], Tensor]:
        return lambda x: modules()[which](x["tokens"], x["tokens"], x["tokens"], need_weights=False)[0][None]

    def reference(x: Inputs, rows: Tensor) -> Tensor:
        theirs = modules()[0]
        given = {"tokens": x["tokens"][None], "inward": theirs.in_proj_weight, "outward": theirs.out_proj.weight}
        return define.layer(heads)({name: t.detach().double() for name, t in given.items()}, rows)

    for N, targets in ((2048, (Target(peers.MODULE, 1.4),)), (8192, ())):
        yield Case(
            f"nn.MultiheadAttention replaced, eval, N = {N:,}", "models",
            lambda N=N: {"tokens": normal(1, N, width, seed=1)}, call(1), reference,
            (torch_peer(peers.MODULE, call(0)),), targets, linear_memory=N == 8192, threads=2,
        )  # fmt: skip


def small_weights() -> Iterator[Case]:
    """SmolLM2-135M with weights of fewer bytes, whose rounding is the tolerance."""

    def case(what: str, prompt: int, following: int, weights: str, least: dict[str, float], tolerance: float) -> Case:
        kinds = (*map(peers_llama.llama, peers_llama.KINDS), peers_llama.transformers_smollm2())
        return Case(
            f"SmolLM2-135M, {what}, {weights} weights", "weights of fewer bytes",
            lambda: {"prompt": tokens(40000, 1, prompt), "next": tokens(40000, 1, following)},
            peers_llama.last_logits(weights), peers_llama.last_logits_exactly, kinds,
            tuple(Target(peer, ratio) for peer, ratio in least.items()), tolerance=tolerance, smallest=True, threads=2,
        )  # fmt: skip

    q8, q4, q41 = map(peers_llama.llama_name, peers_llama.KINDS)
    for weights, tolerance, least in (
        ("int8", 0.03, {q8: 1.3, q41: 1.0}),
        ("int4", 0.3, {q4: 1.3, q41: 1.3}),
        ("bfloat16", 0.01, {}),
        ("float32", 1e-4, {}),
    ):
        yield case("64 tokens after 32", 32, 64, weights, least, tolerance)
    for weights, tolerance in (("int8", 0.03), ("int4", 0.3), ("float32", 1e-4)):
        same = {"int8": q8, "int4": q4, "float32": q41}[weights]
        yield case("prompt of 1,024 tokens", 1024, 0, weights, {same: 3.0, "transformers": 1.2}, tolerance)


MAKERS: tuple[Callable[[], Iterator[Case]], ...] = (embeddings, small_weights, generation, replaced)
