"""Ranks that are killed or hang during a step."""

from __future__ import annotations

import os
import signal
import time

import torch

import regard as rg
import regard.distributed as rd


def step(rank: int, method: str, backward: bool) -> float:
    """One training step."""
    torch.manual_seed(rank)
    q, k, v = torch.randn(3, 1, 4, 32, 8, requires_grad=True)
    out = rd.attention(q, k, v, mask=rg.causal(), method=method)
    if backward:
        out.sum().backward()
    return float(out.sum().detach())


def killed(rank: int, method: str, moment: str) -> float:
    """Kill rank 1 between two steps, or during forward or backward after its first transfer."""
    step(rank, method, True)
    if rank == 1:
        if moment == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        communicator = rd.communication.Communicator
        name = "all_to_all" if method == "heads" else "post"
        real, left = getattr(communicator, name), {"forward": 1, "backward": 3 if method == "heads" else 4}[moment]

        def dying(*args: object, **given: object) -> object:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **given)

        setattr(communicator, name, dying)
    return step(rank, method, True)


def hanging(rank: int, method: str) -> float:
    """Rank 1 does nothing for a long time; the others wait two seconds."""
    step(rank, method, False)
    if rank == 1:
        time.sleep(600)
    q = torch.randn(1, 4, 32, 8)
    started = time.monotonic()
    try:
        rd.attention(q, q, q, method=method, timeout=2)
    except rd.PeerLost as error:
        error.add_note(f"{time.monotonic() - started:.1f} s")
        raise
    return 0.0
