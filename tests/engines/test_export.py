"""Export with dynamic lengths, and a refused trace of TorchScript."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from tests.engines.test_inputs import D, H, N, normal


class Attend(nn.Module):
    def __init__(self, description: dict) -> None:
        super().__init__()
        self.attend = rg.Attention(**description)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


DYNAMIC = {
    "no mask": {},
    "causal": {"mask": rg.causal()},
    "window": {"mask": rg.causal() & rg.window(9, 0)},
    "where": {"mask": rg.where(lambda b, h, p, j: j <= p)},
    "causal and where": {"mask": rg.causal() & rg.where(lambda b, h, p, j: j % 2 == 0)},
    "alibi": {"bias": rg.alibi(H)},
    "causal, alibi": {"mask": rg.causal(), "bias": rg.alibi(H)},
    "causal, relative": {"mask": rg.causal(), "bias": rg.relative(normal(9, H))},
    "causal, t5": {"mask": rg.causal(), "bias": rg.t5(normal(32, H), bidirectional=False)},
    "causal, offsets": {"mask": rg.causal(), "bias": rg.alibi(H), "offset": torch.tensor([3])},
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_export_takes_dynamic_lengths(name: str) -> None:
    length = torch.export.Dim("length", min=2, max=4096)
    x = normal(3, 1, H, 12, D).unbind()
    exported = torch.export.export(Attend(DYNAMIC[name]), tuple(x), dynamic_shapes=({2: length},) * 3).module()
    other = normal(3, 1, H, N, D, seed=2).unbind()
    torch.testing.assert_close(exported(*other), rg.attention(*other, engine="reference", **DYNAMIC[name]))


def test_a_trace_of_torchscript_is_refused() -> None:
    q = normal(1, H, 12, D)
    with pytest.raises(RuntimeError, match=r"use torch\.export\.export"):
        torch.jit.trace(Attend({}), (q, q, q))


# A batch axis of 1
