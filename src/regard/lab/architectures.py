"""Attention, convolution and recurrence with equal numbers of parameters, trained on the same recall tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lab.complexity import one_thread
from regard.nn import Block, Encoder, FeedForward, MultiHeadAttention, PreNorm
from regard.positions import sinusoidal

KINDS = ("attention", "CNN", "RNN", "GRU")
SYMBOLS = 8
KERNEL, LAYERS = 5, 2


class AttentionBody(nn.Module):
    """Two self-attention blocks, with sinusoidal positions added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stack = Encoder(
            Block(MultiHeadAttention(width, 2), FeedForward(width, 2 * width), residual=lambda: PreNorm(width))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x + sinusoidal(x.shape[1], x.shape[2], dtype=x.dtype))


class ConvolutionBody(nn.Module):
    """Two residual convolution layers of kernel size 5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, KERNEL, padding=KERNEL // 2) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x.mT)).mT
        return x


class RecurrentBody(nn.Module):
    """Two layers of a recurrent network."""

    def __init__(self, kind: Callable[..., nn.RNNBase], width: int) -> None:
        super().__init__()
        self.cells = kind(width, width, LAYERS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


BODIES: dict[str, Callable[[int], nn.Module]] = {
    "attention": AttentionBody,
    "CNN": ConvolutionBody,
    "RNN": lambda width: RecurrentBody(nn.RNN, width),
    "GRU": lambda width: RecurrentBody(nn.GRU, width),
    "LSTM": lambda width: RecurrentBody(nn.LSTM, width),
}


class Reader(nn.Module):
    """A classifier with any body: symbols (B, N) to logits (B, answers), read at the last position."""

    def __init__(self, body: Callable[[int], nn.Module], width: int, symbols: int, answers: int) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(symbols, width), body(width)
        self.answer = nn.Linear(width, answers)
        self.loss = math.nan  # of the training

    def forward(self, symbols: Tensor) -> Tensor:
        return self.answer(self.body(self.embedding(symbols))[:, -1])


def parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def build(kind: str, size: int, symbols: int = 2 * SYMBOLS, answers: int = SYMBOLS) -> Reader:
    """Build a reader of a kind with a width that brings its number of parameters closest to `size`."""
    return Reader(BODIES[kind], _width(kind, size, symbols, answers), symbols, answers)


@lru_cache(maxsize=64)
def _width(kind: str, size: int, symbols: int, answers: int) -> int:
    def difference(width: int) -> int:
        with torch.device("meta"):  # no memory is needed to count parameters
            return abs(parameters(Reader(BODIES[kind], width, symbols, answers)) - size)

    return min(range(8, 128, 2), key=difference)


def recall(count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows of symbols with one marked; return the rows, the marked symbols and their distances from the end."""
    rows = torch.randint(SYMBOLS, (count, length), generator=draw)
    place = torch.randint(length, (count,), generator=draw)
    answer = torch.randint(SYMBOLS, (count,), generator=draw)
    rows[torch.arange(count), place] = SYMBOLS + answer
    return rows, answer, length - 1 - place


def train(
    model: nn.Module,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    *,
    steps: int,
    rate: float = 3e-3,
    until: float = 0.0,
) -> float:
    """Train with Adam, with warm-up and linear decay of the learning rate, for `steps` steps; return the running loss.

    until: stop earlier, once the running mean of the loss is below this.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    running = math.inf
    with one_thread():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
            rows, answers = batches(step)
            loss = F.cross_entropy(model(rows), answers)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            running = loss.item() if step == 0 else 0.9 * running + 0.1 * loss.item()
            if running < until:
                break
    model.eval()
    return running


def local_recall(count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows with a marker near the end; return the rows, the symbols after the marker and its distances."""
    rows = torch.randint(SYMBOLS, (count, length), generator=draw)
    distance, each = torch.randint(1, KERNEL, (count,), generator=draw), torch.arange(count)
    rows[each, length - 1 - distance] = SYMBOLS
    return rows, rows[each, length - distance], distance


def train_and_test(
    kind: str, task: Callable[..., tuple[Tensor, Tensor, Tensor]], seed: int, until: float = 0.0, **options: int
) -> tuple[Reader, Tensor, Tensor]:
    """Train a reader on a task; return it, whether it is right on each of 2,000 new rows, and their distances.

    options: `size` in parameters, `length` of the rows, `steps` of `rows` rows each, and optionally `count`, the size
    of the training set; without it, every step draws new rows. until: the loss at which training stops.
    """
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = build(kind, options["size"])
    dataset = task(options["count"], options["length"], draw) if "count" in options else None

    def batches(step: int) -> tuple[Tensor, Tensor]:
        if dataset is None:
            return task(options["rows"], options["length"], draw)[:2]
        chosen = torch.randint(options["count"], (options["rows"],), generator=draw)
        return dataset[0][chosen], dataset[1][chosen]

    model.loss = train(model, batches, steps=options["steps"], until=until)
    rows, answers, distances = task(2000, options["length"], draw)
    with torch.no_grad():
        return model, model(rows).argmax(-1) == answers, distances
