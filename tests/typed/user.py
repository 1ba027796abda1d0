"""A user's program, which `make lint` checks as strictly as mypy can: the public signatures must carry their types."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import regard as rg
from regard.integrations.torch import replace
from regard.models import LanguageConfig, LanguageModel, TextConfig, TextEncoder
from regard.nn import Beam, MultiHeadAttention, Packed
from regard.tasks import Run, Task, tasks
from regard.view import Record, capture


def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = rg.causal() & rg.window(255, 0) | ~rg.padding([3, 4])
    assert_type(mask, rg.Mask)
    attend = rg.Attention(score=rg.Dot(softcap=30.0), mask=mask, bias=rg.alibi(heads=8), temperature=0.7)
    assert_type(attend.weights(q, k, rows=slice(0, 4)), Tensor)
    assert_type(attend.map(q, k, size=(64, 64)), Tensor)
    assert_type(attend.statistics(q, k).entropy, Tensor)
    assert_type(attend.explain(q, k, v), rg.Explanation)
    assert_type(rg.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    output, lse = attend(q, k, v, return_lse=True, engine="tiled")
    merged, _ = rg.merge([output, output], [lse, lse])
    assert_type(merged, Tensor)
    return rg.attention(q, k, v, mask=torch.ones(4, 4, dtype=torch.bool)) + attend(q, k, v)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rg.LinearAttention(rg.favor(64, seed=1), mask=rg.causal())(q, k, v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x)
        return output


def models(folder: Path) -> list[Tensor]:
    model = LanguageModel(LanguageConfig(100, d_model=32, layers=1, heads=2, d_hidden=64))
    rg.save(model, folder)
    assert_type(rg.load(folder), nn.Module)
    packed = rg.pack([torch.tensor([1, 2]), torch.tensor([3])])
    assert_type(packed, Packed)
    return model.generate([torch.tensor([1, 2])], max_new_tokens=4, strategy=Beam(2))


def record_attention() -> Record:
    model = TextEncoder(TextConfig(100, d_model=32, layers=1, heads=2, d_hidden=64))
    replace(nn.MultiheadAttention(8, 2))
    with capture(model) as record:
        model(torch.tensor([[1, 2, 3]]))
    assert_type(record.weights(0, 1), Tensor)
    assert_type(record.save("page.html"), Path)
    return record


def trained() -> Run:
    assert_type(tasks(), dict[str, type[Task]])
    return Run.open("runs/mine")
