"""Training throughput: real tokens a second of whole steps, next to torch's and transformers' models of equal size.

    python -m benchmarks.run --only training

Both start from the same weights and must give the same loss without dropout, or no time is printed. Then they take
turns on the same sentences, dropout 0.1, forward, backward, clipping and AdamW: torch pads its batches, we pack ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.timing import clock
from regard.data.batches import Ragged, plan
from regard.data.readers import Row
from regard.errors import BadRows
from regard.models import LanguageConfig, LanguageModel, save
from regard.positions import sinusoidal
from regard.tasks.language import Language, Windows, token_stream
from regard.tasks.translate import Translate
from regard.training.loop import Objective, build_optimizer
from regard.training.recipe import Recipe
from regard.training.seq2seq import SourceTargetPairs

DROPOUT, SMOOTHING = 0.1, 0.1
TOKENS = 4096  # in a batch


class TorchTranslator(nn.Module):
    """torch's own Transformer, with embeddings, positions and a tied output layer added."""

    def __init__(self, vocabulary: int, task: Translate) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, task.d_model)
        self.register_buffer("positions", sinusoidal(task.longest, task.d_model))
        self.body = nn.Transformer(
            task.d_model, task.heads, task.layers, task.layers, 4 * task.d_model, DROPOUT,
            batch_first=True, norm_first=True,
        )  # fmt: skip

    def embedded(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.embedding.embedding_dim**0.5 + self.positions[: ids.shape[1]]
        return F.dropout(x, DROPOUT, self.training)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        filler, n = source == 0, target.shape[1]
        hidden = self.body(
            self.embedded(source), self.embedded(target),
            tgt_mask=torch.ones(n, n, dtype=torch.bool).triu(1), tgt_is_causal=True, tgt_key_padding_mask=target == 0,
            src_key_padding_mask=filler, memory_key_padding_mask=filler,
        )  # fmt: skip
        return F.linear(hidden, self.embedding.weight)


def same_weights(ours: nn.Module, theirs: TorchTranslator) -> None:
    """Copy the weights of our Transformer."""
    weights = ours.state_dict()
    theirs.embedding.weight.data.copy_(weights["embedding.weight"])
    places = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.output."}
    places |= {"multihead_attn.in_proj_": "cross.qkv.", "multihead_attn.out_proj.": "cross.output."}
    places |= {"linear1.": "feedforward.up.", "linear2.": "feedforward.output.", "norm1.": "attention_residual.norm."}
    for side in ("encoder", "decoder"):
        for name, value in getattr(theirs.body, side).named_parameters():
            if not name.startswith("layers."):
                value.data.copy_(weights[f"{side}.{name}"])
                continue
            _, layer, rest = name.split(".", 2)
            norms = {"norm2.": "cross_residual.norm." if side == "decoder" else "feedforward_residual.norm."}
            for old, new in (places | norms | {"norm3.": "feedforward_residual.norm."}).items():
                rest = new + rest.removeprefix(old) if rest.startswith(old) else rest
            value.data.copy_(weights[f"{side}.layers.{layer}.{rest}"])


def padded(rows: Ragged, chosen: np.ndarray) -> Tensor:
    return pad_sequence([torch.from_numpy(rows[n]) for n in chosen], batch_first=True)


Loss = Callable[[np.ndarray], Tensor]


def step_of(model: nn.Module, loss: Loss, recipe: Recipe) -> Callable[[np.ndarray], None]:
    optimizer = build_optimizer(model, recipe)

    def step(chosen: np.ndarray) -> None:
        loss(chosen).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(
    name: str, peer: str, target: float | None, sides: list[tuple[nn.Module, Loss]], batches: list[np.ndarray],
    sizes: np.ndarray, steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Check the losses, then take turns; real tokens a second of both, and what they should be apart."""
    for model, _ in sides:
        model.eval()
    with torch.no_grad():
        ours, other = (float(loss(batches[0])) for _, loss in sides)
    if abs(ours - other) > 1e-4 * abs(other):
        raise AssertionError(f"{name}: the losses differ, {ours} and {other}: a wrong result is not timed")
    step_by_step = [step_of(model.train(), loss, Recipe()) for model, loss in sides]
    spent = [0.0, 0.0]
    for n, chosen in enumerate(batches[: steps + 1]):
        for which, step in enumerate(step_by_step):
            spent[which] += clock(lambda: step(chosen)) * (n > 0)  # noqa: B023  the first is for warming up
    tokens = sum(int(sizes[chosen].sum()) for chosen in batches[1 : steps + 1])
    ratio = spent[1] / spent[0]
    return {
        "name": name, "peer": peer, "ours": tokens / spent[0], "theirs": tokens / spent[1], "ratio": ratio,
        "at_least": target, "met": target is None or ratio >= target,
    }  # fmt: skip


def sentences(count: int) -> list[Row]:
    """Some of the sentences that come with the package, and their translations."""
    rows = Translate().read(Translate.data, BadRows(skip=True))
    return [rows[n] for n in np.random.default_rng(1).permutation(len(rows))[:count]]


def translate(steps: int) -> Iterator[dict[str, Any]]:
    """3 + 3 layers, 256 wide."""
    task, bad, rows = Translate(dropout=DROPOUT), BadRows(skip=True), sentences(20000)
    processor = task.fit_processor(rows)
    items: SourceTargetPairs = task.dataset(processor, rows, bad)
    ours = Objective(task, task.model(processor), SMOOTHING)
    theirs = TorchTranslator(processor.require_tokenizer().get_vocab_size(), task)
    same_weights(ours.model, theirs)

    def our_loss(chosen: np.ndarray) -> Tensor:
        batch = items.batch(chosen, np.random.default_rng(0))
        return ours(batch) / batch.count

    def their_loss(chosen: np.ndarray) -> Tensor:
        logits = theirs(padded(items.sources, chosen), padded(items.before, chosen))
        after = padded(items.after, chosen).flatten()
        return F.cross_entropy(logits.flatten(0, 1), after, ignore_index=0, label_smoothing=SMOOTHING)

    like = plan(items.sizes, budget=TOKENS, seed=1, epoch=0)
    mixed = np.array_split(np.random.default_rng(2).permutation(len(items.sizes)), len(like))
    sides: list[tuple[nn.Module, Loss]] = [(ours, our_loss), (theirs, their_loss)]
    for name, target, batches in (("at random", None, mixed), ("of like lengths", 1.4, like)):
        same_weights(ours.model, theirs)
        yield compare(f"translate, batches {name}", "torch nn.Transformer", target, sides, batches, items.sizes, steps)


def language(steps: int) -> Iterator[dict[str, Any]]:
    """6 layers, 384 wide, context 256."""
    from transformers import GPT2LMHeadModel

    task, rows = Language(context=256), [Row(row.place, row.values[:1]) for row in sentences(60000)]
    processor = task.fit_processor(rows)
    windows = Windows(token_stream(processor, rows), 256, 256)
    ours = LanguageModel(
        LanguageConfig(
            processor.require_tokenizer().get_vocab_size(),
            d_model=384,
            layers=6,
            heads=6,
            d_hidden=1536,
            dropout=DROPOUT,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        save(ours, folder)
        theirs = GPT2LMHeadModel.from_pretrained(
            folder, attn_implementation="sdpa", embd_pdrop=DROPOUT, attn_pdrop=DROPOUT, resid_pdrop=DROPOUT
        )

    def our_loss(chosen: np.ndarray) -> Tensor:
        batch = windows.batch(chosen, np.random.default_rng(0))
        return ours.loss(batch.inputs, batch.targets) / batch.count

    def their_loss(chosen: np.ndarray) -> Tensor:
        batch = windows.batch(chosen, np.random.default_rng(0))
        logits = theirs(batch.inputs.values.view(len(chosen), -1)).logits
        return F.cross_entropy(logits.flatten(0, -2), batch.targets)

    full = np.flatnonzero(windows.sizes == 256)
    batches = [full[n : n + 16] for n in range(0, len(full) - 16, 16)]
    sides: list[tuple[nn.Module, Loss]] = [(ours, our_loss), (theirs, their_loss)]
    yield compare("language, context 256", "transformers GPT-2 (sdpa)", 1.25, sides, batches, windows.sizes, steps)


def training(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for each in (translate, language):
        yield from each(2 if quick else 6)
