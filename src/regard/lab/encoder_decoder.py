"""A recurrent encoder-decoder that copies symbols, with one vector between the two or with additive attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.lab.complexity import one_thread
from regard.masks import padding
from regard.scores import Additive

SYMBOLS = 8


class Copier(nn.Module):
    """A GRU reads a row of symbols, another writes it down.

    attend: the writer also attends to the states of the reader, with additive attention; otherwise the last state of
        the reader is all that it knows of the row. Both get the number of the place as an input.
    """

    def __init__(self, width: int, longest: int, attend: bool) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS + 1, width), nn.Embedding(longest, width)
        self.reader, self.writer = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.vector = nn.Parameter(torch.randn(width) / width**0.5)
        self.answer, self.attend = nn.Linear(2 * width, SYMBOLS), attend

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return logits (B, N, SYMBOLS); the writer reads the right symbol before each place, as in training."""
        places = self.place(torch.arange(rows.shape[1]))
        states, _ = self.reader(self.symbol(rows) + places)
        last = states[torch.arange(len(rows)), lengths - 1]  # the fixed vector
        before = F.pad(rows, (1, 0), value=SYMBOLS)[:, :-1]
        written, _ = self.writer(self.symbol(before) + places, last[None].contiguous())
        context = torch.zeros_like(written)
        if self.attend:
            additive = Attention(score=Additive(self.vector), mask=padding(lengths.tolist()))
            heads = (x[:, None] for x in (self.query(written), self.key(states), states))
            context = additive(*heads)[:, 0]
        answer: Tensor = self.answer(torch.cat((written, context), -1))
        return answer


def accuracies(attend: bool, lengths: Sequence[int], *, width: int, steps: int, seed: int) -> list[float]:
    """Train a copier on rows of 1 to `max(lengths)` symbols; return its accuracy on new rows of each length."""
    torch.manual_seed(seed)
    draw, longest = torch.Generator().manual_seed(seed), max(lengths)
    model = Copier(width, longest, attend)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with one_thread():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 5e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            rows = torch.randint(SYMBOLS, (32, longest), generator=draw)
            sizes = torch.randint(1, longest + 1, (32,), generator=draw)
            real = torch.arange(longest) < sizes[:, None]
            loss = F.cross_entropy(model(rows, sizes)[real], rows[real])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        shares = []
        with torch.no_grad():
            for length in lengths:
                rows = torch.randint(SYMBOLS, (200, length), generator=draw)
                right = model(rows, torch.full((200,), length)).argmax(-1) == rows
                shares.append(right.float().mean().item())
    return shares
