"""A task that needs positions, learned on short rows and tested on longer ones, with six kinds of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.functional import attention
from regard.lab.complexity import one_thread
from regard.masks import causal
from regard.positions import alibi, relative, rotary, sinusoidal

SCHEMES = ("sinusoidal", "learned", "rotary", "ALiBi", "relative", "causal mask alone")
SYMBOLS, WIDTH, HEADS, REACH, BACK = 8, 32, 4, 8, 2


class Reader(nn.Module):
    """Two causal attention blocks that answer, at each place, which symbol is `BACK` places before it."""

    def __init__(self, scheme: str, longest: int) -> None:
        super().__init__()
        self.scheme, self.embedding = scheme, nn.Embedding(SYMBOLS, WIDTH)
        self.table = nn.Parameter(torch.randn(longest, WIDTH) * 0.3)  # learned: a vector for each place
        self.distances = nn.Parameter(
            torch.zeros(2 * REACH + 1, HEADS)
        )  # relative: farther distances share the last entry
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.answer = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, rows: Tensor) -> Tensor:
        x, length = self.embedding(rows), rows.shape[1]
        if self.scheme == "sinusoidal":
            x = x + sinusoidal(length, WIDTH)
        if self.scheme == "learned":
            x = x + self.table[:length]
        bias = {"ALiBi": alibi(heads=HEADS), "relative": relative(self.distances)}.get(self.scheme)
        for norm, project, mixer in zip(self.norms, self.projections, self.mixers, strict=True):
            q, k, v = project(norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            if self.scheme == "rotary":
                q, k = (rotary(t, torch.arange(length)) for t in (q, k))
            x = x + attention(q, k, v, mask=causal(), bias=bias).transpose(1, 2).flatten(2)
            x = x + mixer(x)
        answer: Tensor = self.answer(x)
        return answer


def accuracies(scheme: str, lengths: Sequence[int], *, trained: int, steps: int, seed: int) -> list[float]:
    """Train on rows of `trained` symbols; return the accuracy on the last quarter of new rows of each length."""
    torch.manual_seed(seed)
    draw, model = torch.Generator().manual_seed(seed), Reader(scheme, max(lengths))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    with one_thread():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            rows = torch.randint(SYMBOLS, (32, trained), generator=draw)
            logits = model(rows)[:, BACK:]
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, :-BACK].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        shares = []
        with torch.no_grad():
            for length in lengths:
                rows, late = torch.randint(SYMBOLS, (64, length), generator=draw), length - length // 4
                right = model(rows)[:, late:].argmax(-1) == rows[:, late - BACK : -BACK]
                shares.append(right.float().mean().item())
    return shares
