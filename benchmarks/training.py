"""Training throughput: real tokens a second of whole steps, beside torch's and transformers' models of equal size.

    python -m benchmarks.training --data pairs.tsv --text corpus.txt --threads 2

Both start from the same weights and must give the same loss without dropout, or no time is printed. Then they take
turns on the same sentences, dropout 0.1, forward, backward, clipping and AdamW: torch pads its batches, we pack ours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.models import LanguageConfig, LanguageModel, save
from regard.positions import sinusoidal
from regard.tasks.batches import Ragged, plan
from regard.tasks.language import Language, Windows, _stream
from regard.tasks.loop import Objective, _optimizer
from regard.tasks.task import Recipe
from regard.tasks.translate import Pairs, Translate
from regard.tasks.trouble import Bad

DROPOUT, SMOOTHING = 0.1, 0.1


class TorchTranslator(nn.Module):
    """torch's own Transformer with what it lacks: embeddings, positions, logits by the same table."""

    def __init__(self, vocabulary: int, task: Translate) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, task.width)
        self.register_buffer("positions", sinusoidal(task.longest, task.width))
        self.body = nn.Transformer(
            task.width, task.heads, task.layers, task.layers, 4 * task.width, DROPOUT,
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
    optimizer = _optimizer(model, recipe)

    def step(chosen: np.ndarray) -> None:
        loss(chosen).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(
    name: str, peer: str, sides: list[tuple[nn.Module, Loss]], batches: list[np.ndarray], sizes: np.ndarray, given: Any
) -> float:
    """Check the losses, then take turns; the ratio of real tokens a second, ours to theirs."""
    for model, _ in sides:
        model.eval()
    with torch.no_grad():
        mine, other = (float(loss(batches[0])) for _, loss in sides)
    if abs(mine - other) > 1e-4 * abs(other):
        sys.exit(f"{name}: the losses differ, {mine} and {other}: no time is printed for a wrong result")
    clock = time.process_time if given.cpu_time else time.perf_counter
    steps = [step_of(model.train(), loss, Recipe()) for model, loss in sides]
    spent = [0.0, 0.0]
    for n, chosen in enumerate(batches[: given.steps + 1]):
        for which, step in enumerate(steps):
            started = clock()
            step(chosen)
            spent[which] += (clock() - started) * (n > 0)  # the first is for warming up
    tokens = sum(int(sizes[chosen].sum()) for chosen in batches[1 : given.steps + 1])
    ratio = spent[1] / spent[0]
    print(
        f"{name}: regard {tokens / spent[0]:,.0f} tokens/s, {peer} {tokens / spent[1]:,.0f}: {ratio:.2f}x", flush=True
    )
    return ratio


def translate(given: Any) -> None:
    task, bad = Translate(dropout=DROPOUT), Bad(skip=True)
    rows = task.read(given.data, bad)
    rows = [rows[n] for n in np.random.default_rng(1).permutation(len(rows))[:20000]]
    kit = task.learn(rows)
    items: Pairs = task.items(kit, rows, bad)
    ours = Objective(task, task.model(kit), SMOOTHING)
    theirs = TorchTranslator(kit.texts().get_vocab_size(), task)
    same_weights(ours.model, theirs)

    def our_loss(chosen: np.ndarray) -> Tensor:
        batch = items.batch(chosen, np.random.default_rng(0))
        return ours(batch) / batch.count

    def their_loss(chosen: np.ndarray) -> Tensor:
        logits = theirs(padded(items.sources, chosen), padded(items.before, chosen))
        after = padded(items.after, chosen).flatten()
        return F.cross_entropy(logits.flatten(0, 1), after, ignore_index=0, label_smoothing=SMOOTHING)

    like = plan(items.sizes, budget=given.tokens, seed=1, epoch=0)
    mixed = np.array_split(np.random.default_rng(2).permutation(len(items.sizes)), len(like))
    sides: list[tuple[nn.Module, Loss]] = [(ours, our_loss), (theirs, their_loss)]
    compare("translate, batches at random", "torch nn.Transformer", sides, mixed, items.sizes, given)
    same_weights(ours.model, theirs)
    compare("translate, batches of like lengths", "torch nn.Transformer", sides, like, items.sizes, given)


def language(given: Any) -> None:
    from transformers import GPT2LMHeadModel

    task = Language(context=256)
    rows = task.read(given.text, Bad(skip=True))[:4000]
    kit = task.learn(rows)
    windows = Windows(_stream(kit, rows), 256, 256)
    ours = LanguageModel(
        LanguageConfig(kit.texts().get_vocab_size(), width=384, layers=6, heads=6, hidden=1536, dropout=DROPOUT)
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
    compare(
        "language, context 256",
        "transformers GPT-2 (sdpa)",
        [(ours, our_loss), (theirs, their_loss)],
        batches,
        windows.sizes,
        given,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="sentences and translations")
    parser.add_argument("--text", help="text for the language model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096, help="in a batch")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: for 1 thread on a busy machine")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.data:
        translate(given)
    if given.text:
        language(given)


if __name__ == "__main__":
    main()
