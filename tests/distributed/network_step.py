"""One training step over a network: prints its error, and the counted and predicted bytes of this rank."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

import regard as rg
import regard.distributed as rd


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 2048, 64) for _ in range(4)]
    mask = rg.causal() & rg.window(600, 0)
    inputs = [x.requires_grad_() for x in whole[:3]]
    output = rg.attention(*inputs, mask=mask)
    expected = [output, *torch.autograd.grad(output, inputs, whole[3])]
    own = [rd.shard(x.detach(), 2).requires_grad_() for x in inputs]
    with rd.traffic() as moved:
        output = rd.attention(*own, mask=mask, method="ring")
        actual = [output, *torch.autograd.grad(output, own, rd.shard(whole[3], 2))]
    error = max(float((a - rd.shard(b, 2)).detach().abs().max()) for a, b in zip(actual, expected, strict=True))
    predicted = rd.bytes_moved(rg.Attention(mask=mask), ranks=ranks, B=1, H=4, Q=2048, D=64, method="ring")
    dist.barrier()
    print(json.dumps({"error": error, "sent": moved.sent.total(), "predicted": predicted.sent[rank]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
