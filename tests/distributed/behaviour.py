"""Bytes moved, errors, dropout, shards and dtypes of distributed attention. Every rank runs each function."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard as rg
import regard.distributed as rd

B, H, G, N, D, E = 2, 8, 4, 96, 8, 4
MASKS = {
    "none": None,
    "causal": rg.causal(),
    "window": rg.causal() & rg.window(10, 0),
    "documents": rg.documents(torch.arange(N) // 40),
    "scattered": rg.edges(torch.tensor([[0, 50, 90], [95, 3, 91]])),
}


def own(n: int = N, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of n local tokens."""
    torch.manual_seed(dist.get_rank())
    shapes = (B, H, n, D), (B, G, n, D), (B, G, n, E)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def everything(rank: int) -> dict[str, Any]:
    return {name: part(rank) for name, part in PARTS.items()}


def moved(rank: int) -> dict:
    """Counted and predicted bytes by mask, method, layout and whether there was a backward pass."""
    results = {}
    for name, mask in MASKS.items():
        for method in ("ring", "heads", None):
            for layout in rd.LAYOUTS:
                for backward in (False, True):
                    lengths = rd.Layout.even(N, 4, layout).lengths
                    q, k, v = own(lengths[rank], torch.float64 if method is None else torch.float32)
                    with rd.traffic() as counted, torch.set_grad_enabled(backward):
                        out = rd.attention(q, k, v, mask=mask, method=method, layout=layout)
                        if backward:
                            out.sum().backward()
                    predicted = rd.bytes_moved(
                        rg.Attention(mask=mask), ranks=4, B=B, H=H, G=G, Q=N, D=D, E=E, dtype=q.dtype, layout=layout,
                        method=method, backward=backward,
                    )  # fmt: skip
                    results[name, method, layout, backward] = counted.sent, counted.received, predicted
    return results


def refused(rank: int) -> dict[str, str]:
    """Error messages if ranks make different calls."""
    q, k, v = own(8)
    given = {
        "mask": {"mask": rg.causal() if rank else None},
        "method": {"method": "ring" if rank else "heads"},
        "heads": {},
        "grad": {},
        "layout": {"layout": "balanced"},
        "sizes": {"mask": rg.documents([0, 1, 2])},
    }
    results = {}
    for name, description in given.items():
        tensors = [q, k, v]
        if name == "heads" and rank == 2:
            tensors = [q[:, :4], k, v]
        if name == "grad" and rank == 1:
            tensors = [x.detach() for x in tensors]
        if name == "layout" and rank == 3:
            tensors = [x[:, :, :5] for x in tensors]
        try:
            rd.attention(*tensors, **description)
            results[name] = "taken"
        except ValueError as error:
            results[name] = str(error)
    return results


def dropped(rank: int) -> dict[str, float]:
    """Dropout keeps the mean, is reproduced by a seed, and backward uses the same pattern as forward."""
    results = {}
    for method in ("ring", "heads"):

        def attend(q: Tensor, k: Tensor, v: Tensor, method: str = method, **given: Any) -> Tensor:
            torch.manual_seed(7)
            return rd.attention(q, k, v, dropout=0.3, method=method, mask=rg.causal(), **given)

        q, k, v = own(24, torch.float64)
        ones = torch.ones_like(v).requires_grad_()
        results[f"{method} mean"] = float(attend(q, k, ones).mean())
        results[f"{method} again"] = float((attend(q, k, v) - attend(q, k, v)).abs().max())
        results[f"{method} without"] = float((attend(q, k, v) - rd.attention(q, k, v, mask=rg.causal())).abs().mean())
        results[f"{method} heads alike"] = float((attend(q, k, ones)[:, 0] - attend(q, k, ones)[:, 4]).abs().mean())
        by = torch.randn(B, H, 24, E, dtype=torch.float64)
        grads = torch.autograd.grad((attend(q, k, v) * by).sum(), (q, k, v))
        ways = [torch.randn_like(x) for x in (q, k, v)]
        step, slope = 1e-5, 0.0
        for sign in (1, -1):
            near = [x + sign * step * way for x, way in zip((q, k, v), ways, strict=True)]
            slope += sign * float((attend(*near) * by).sum().detach()) / (2 * step)
        derivative = sum(float((grad * way).sum()) for grad, way in zip(grads, ways, strict=True))
        totals = torch.tensor([slope, derivative], dtype=torch.float64)
        dist.all_reduce(totals)
        results[f"{method} slope"] = float((totals[0] - totals[1]).abs() / totals[1].abs())
    return results


def joined(rank: int) -> dict[str, Any]:
    """`shard` and `gather` are inverse, and their gradients are those of the sum of the ranks' losses."""
    results: dict[str, Any] = {}
    for layout in rd.LAYOUTS:
        whole = torch.arange(22.0).view(1, 11, 2).requires_grad_()
        part = rd.shard(whole, layout=layout)
        back = rd.gather(part, layout=layout)
        results[layout] = torch.equal(back, whole), tuple(part.shape), rd.positions(11, layout=layout).tolist()
        (back * (rank + 1)).sum().backward()
        grad = whole.grad.clone()
        dist.all_reduce(grad)
        results[f"{layout} grad"] = grad.unique().tolist()
    uneven = torch.full((1, rank, 2), float(rank))
    results["uneven"] = rd.gather(uneven)[0, :, 0].tolist()
    results["bfloat16"] = rd.gather(torch.full((1, 2), float(rank), dtype=torch.bfloat16), 0)[:, 0].tolist()
    return results


def low(rank: int) -> dict[str, Any]:
    """Other dtypes, fewer axes, autocast, no gradient, a single learned tensor."""
    results: dict[str, Any] = {}
    q, k, v = (x.detach() for x in own(24))
    whole = [rd.gather(x, 2) for x in (q, k, v)]
    expected = rd.shard(rg.attention(*whole, mask=rg.causal()), 2)
    for dtype in (torch.bfloat16, torch.float16):
        half = [x.to(dtype) for x in (q, k, v)]
        one = rd.shard(rg.attention(*(x.to(dtype) for x in whole), mask=rg.causal()), 2)
        for method in ("ring", "heads"):
            out = rd.attention(*half, mask=rg.causal(), method=method)
            apart, usual = (float((x.float() - expected).abs().max()) for x in (out, one))
            results[f"{dtype} {method}"] = out.dtype == dtype, apart / usual
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results["autocast"] = rd.attention(q, k, v, mask=rg.causal(), method="ring").dtype
    out = rd.attention(q[0], k[0], v[0], mask=rg.causal())
    results["three axes"] = tuple(out.shape), float((out - expected[0]).abs().max())
    out, lse = rd.attention(q[0, 0], k[0, 0], v[0, 0], mask=rg.causal(), return_lse=True)
    results["two axes"] = tuple(out.shape), tuple(lse.shape), float((out - expected[0, 0]).abs().max())
    table = torch.zeros(3, H, requires_grad=True)
    with rd.traffic() as counted:
        rd.attention(q, k, v, bias=rg.relative(table), method="ring").sum().backward()
    results["table alone"] = table.grad is not None, counted.sent.total() // (2 * B * G * 24 * (D + E) * 4)
    results["engine"] = float(
        (rd.attention(q, k, v, mask=rg.causal(), method="ring", engine="reference") - expected).abs().max()
    )
    return results


def twice(rank: int) -> list[str]:
    """Error messages of second derivatives."""
    results = []
    ways = (
        lambda q, k, v: rd.attention(q, k, v, method="ring"),  # the gradient has a history through q only
        lambda q, k, v: rd.attention(q, k, v, method="ring").square(),
        lambda q, k, v: rd.attention(q, k, v, method="heads").square(),
        lambda q, k, v: rd.gather(q * k.sum(), 2).square(),
    )
    for attend in ways:
        q, k, v = own(8)
        try:
            (grad,) = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
            (grad.sum() + q.sum()).backward()
            results.append("taken")
        except RuntimeError as error:
            results.append(str(error))
    return results


PARTS = {"twice": twice, "moved": moved, "refused": refused, "dropped": dropped, "joined": joined, "low": low}


def destroyed(rank: int, method: str) -> tuple[bool, str]:
    """Destroy the group while the graph of a result exists: whether it is freed, and the error of backward."""
    q, k, v = (torch.randn(1, 3, 5, 4, requires_grad=True) for _ in range(3))
    out = rd.attention(q, k, v, method=method)
    held = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    try:
        out.sum().backward()
    except RuntimeError as error:
        return held() is None, str(error)
    return held() is None, "computed"
