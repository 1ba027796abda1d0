"""Compute one attention on several processes; print its error against a single process, its traffic and its time.

torchrun --standalone --nproc-per-node 4 examples/ring.py
torchrun --standalone --nproc-per-node 4 examples/ring.py --mask window --length 8192
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import regard as rg
import regard.distributed as rd

MASKS = {"none": None, "causal": rg.causal(), "window": rg.causal() & rg.window(255, 0)}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # if a rank dies, the others stop
    rank, ranks, mask = dist.get_rank(), dist.get_world_size(), MASKS[options.mask]
    torch.manual_seed(0)  # every rank draws the whole tensors, to compute the expected result
    whole = [torch.randn(1, options.heads, options.length, options.d_head) for _ in range(4)]
    expected = results(whole, lambda q, k, v: rg.attention(q, k, v, mask=mask))
    layout = rd.Layout.even(options.length, ranks, options.layout)
    own = [layout.own(x, 2, rank) for x in whole]

    def sharded(method: str) -> Callable[..., Tensor]:
        return lambda q, k, v: rd.attention(q, k, v, mask=mask, method=method, layout=options.layout)

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The simple alternative: gather all keys on every rank, then attend."""
        k, v = (rd.gather(x, 2, layout=options.layout) for x in (k, v))
        first = 0
        parts = []
        for a, b in layout.spans[rank]:
            parts.append(rg.attention(q[:, :, first : first + b - a], k, v, mask=mask, offset=a))
            first += b - a
        return torch.cat(parts, 2)

    ways = {"ring": sharded("ring"), "gather": gathered}
    if options.heads % ranks == 0:
        ways["heads"] = sharded("heads")
    if rank == 0:
        print(f"{ranks} ranks, {options.length} tokens, {options.heads} heads of {options.d_head}, mask {options.mask}")
        print("method  error     sent by the busiest rank   predicted   forward   forward and backward")
    for method, attend in ways.items():
        with rd.traffic() as moved:
            actual = results(own, attend)
        error = max(float((a - layout.own(b, 2, rank)).abs().max()) for a, b in zip(actual, expected, strict=True))
        predicted_bytes = 0
        if method != "gather":
            predicted_bytes = max(
                rd.bytes_moved(
                    rg.Attention(mask=mask), ranks=ranks, B=1, H=options.heads, Q=options.length, D=options.d_head,
                    layout=options.layout, method=method,
                ).sent
            )  # fmt: skip
        forward = best(options.repeat, lambda attend=attend: attend(*own[:3]))
        both = best(options.repeat, lambda attend=attend: results(own, attend))
        metrics = torch.tensor([error, moved.sent.total(), forward, both], dtype=torch.float64)
        dist.all_reduce(metrics, dist.ReduceOp.MAX)
        if rank == 0:
            error, sent, forward, both = metrics.tolist()
            predicted = f"{predicted_bytes / 1e6:8.2f} MB" if predicted_bytes else "          -"
            print(f"{method:7s} {error:.1e}   {sent / 1e6:20.2f} MB   {predicted}   {forward:6.2f} s   {both:6.2f} s")
    dist.destroy_process_group()


def results(tensors: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    *inputs, grad_output = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_output)]


def best(repeat: int, attend: Callable[[], object]) -> float:
    """Return the shortest time of several runs that all ranks start together."""
    times = []
    for _ in range(repeat):
        dist.barrier()
        started = time.perf_counter()
        attend()
        times.append(time.perf_counter() - started)
    return min(times)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--d-head", type=int, default=64)
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--layout", choices=rd.LAYOUTS, default="contiguous")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
