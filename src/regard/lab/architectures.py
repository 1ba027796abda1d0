"""Attention, convolution and recurrence at equal parameters, on tasks that all of them can read."""

from __future__ import annotations

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
    """Two blocks of self-attention, positions added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stack = Encoder(
            Block(MultiHeadAttention(width, 2), FeedForward(width, 2 * width), residual=lambda: PreNorm(width))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x + sinusoidal(x.shape[1], x.shape[2], dtype=x.dtype))


class ConvolutionBody(nn.Module):
    """Two layers of convolution that see five neighbours each, with residuals."""

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
    """Symbols (B, N) to the logits of an answer (B, answers), read at the last place, whatever the body is."""

    def __init__(self, body: Callable[[int], nn.Module], width: int, symbols: int, answers: int) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(symbols, width), body(width)
        self.answer = nn.Linear(width, answers)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.answer(self.body(self.embedding(symbols))[:, -1])


def parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def build(kind: str, size: int, symbols: int = 2 * SYMBOLS, answers: int = SYMBOLS) -> Reader:
    """A reader of that kind whose parameters are as near as its width allows to `size`."""
    return Reader(BODIES[kind], _width(kind, size, symbols, answers), symbols, answers)


@lru_cache(maxsize=64)
def _width(kind: str, size: int, symbols: int, answers: int) -> int:
    def off(width: int) -> int:
        with torch.device("meta"):  # only to be counted
            return abs(parameters(Reader(BODIES[kind], width, symbols, answers)) - size)

    return min(range(8, 128, 2), key=off)


def recall(count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of symbols of which one is marked: the rows, the marked symbol, and how far from the end it stands."""
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
) -> nn.Module:
    """The model after `steps` steps of Adam, its rate rising at first and falling to the end."""
    learn = torch.optim.Adam(model.parameters(), lr=rate)
    with one_thread():
        for step in range(steps):
            for group in learn.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
            rows, answers = batches(step)
            loss = F.cross_entropy(model(rows), answers)
            learn.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            learn.step()
    return model.eval()


def local_recall(count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of symbols with one marker near the end: the rows, the symbol right behind it, and how far it stands."""
    rows = torch.randint(SYMBOLS, (count, length), generator=draw)
    distance, each = torch.randint(1, KERNEL, (count,), generator=draw), torch.arange(count)
    rows[each, length - 1 - distance] = SYMBOLS
    return rows, rows[each, length - distance], distance


def train_and_test(
    kind: str, task: Callable[..., tuple[Tensor, Tensor, Tensor]], seed: int, **how: int
) -> tuple[Reader, Tensor, Tensor]:
    """A reader trained on a task, whether it is right on 2,000 new rows, and the distances in them.

    how: `size` parameters, `length` of the rows, `steps` of `rows` rows each, of `count` rows in all, or ever new ones.
    """
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = build(kind, how["size"])
    held = task(how["count"], how["length"], draw) if "count" in how else None

    def batches(step: int) -> tuple[Tensor, Tensor]:
        if held is None:
            return task(how["rows"], how["length"], draw)[:2]
        chosen = torch.randint(how["count"], (how["rows"],), generator=draw)
        return held[0][chosen], held[1][chosen]

    train(model, batches, steps=how["steps"])
    rows, answers, distances = task(2000, how["length"], draw)
    with torch.no_grad():
        return model, model(rows).argmax(-1) == answers, distances
