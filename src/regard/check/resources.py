"""Properties of side effects: inputs, global state, threads and memory."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from regard.check.case import Case
from regard.check.oracle import error, peak_bytes
from regard.check.property import Attend, conformance_property

SMALL = (Case(Q=1, K=1, D=1), Case(B=2, H=2, Q=3, K=5, D=4), Case(B=2, H=2, Q=33, K=65, D=8))


@conformance_property(cases=SMALL)
def inputs_untouched(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A call does not write to its inputs: keys and values are caches that the next call reads."""
    before = [x.clone() for x in (q, k, v)]
    attend(q, k, v)
    for name, was, now in zip("qkv", before, (q, k, v), strict=True):
        assert torch.equal(was, now), f"the call changed {name} from {was.flatten()[0]:.5g} to {now.flatten()[0]:.5g}"


@conformance_property(cases=SMALL)
def own_output(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The output belongs to the caller: no later call changes it, and writing to it changes no input."""
    first = attend(q, k, v)
    kept, values = first.clone(), v.clone()
    attend(-q, k, -v)
    assert torch.equal(first, kept), "a second call changed the output of the first"
    first.zero_()
    assert torch.equal(v, values), "the output shares memory with the values"


@conformance_property(cases=SMALL[:2])
def global_state(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A call does not change torch's settings: default dtype, threads, gradients, determinism."""
    settings = {
        "default dtype": torch.get_default_dtype,
        "number of threads": torch.get_num_threads,
        "grad mode": torch.is_grad_enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    }
    before = {name: setting() for name, setting in settings.items()}
    attend(q, k, v)
    for name, setting in settings.items():
        assert setting() == before[name], f"the call changed torch's {name} from {before[name]} to {setting()}"


@conformance_property("threads", cases=(Case(Q=4, K=8), Case(H=2, Q=33, K=65, D=8)))
def threads(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Concurrent calls from several threads, as in a server, do not affect each other."""
    inputs = [(q * n, k, v * n) for n in (1, 2, 3, 4)]
    alone = [attend(*each) for each in inputs]

    def work(n: int) -> float:
        far = [error(attend(*inputs[n]), alone[n]) for _ in range(20)]
        return max(far) if all(map(math.isfinite, far)) else math.nan

    with ThreadPoolExecutor(4) as pool:
        for n, far in enumerate(pool.map(work, range(4))):
            assert far < 8, f"thread {n} next to three others differs from a single thread by {far:.3g} roundings"


@conformance_property("memory", cases=(Case(Q=6144, K=6144, D=8),), shrinks=False)
def memory(attend: Attend, q: Tensor, k: Tensor, v: Tensor, growth: float) -> str:
    """Memory grows with length as promised: n for n keys if weights are never materialised, n² if they are."""
    n = q.shape[2]
    attend(q[:, :, :64], k[:, :, :64], v[:, :, :64])  # warm-up
    half = peak_bytes(lambda: attend(q[:, :, : n // 2], k[:, :, : n // 2], v[:, :, : n // 2]))
    whole = peak_bytes(lambda: attend(q, k, v))
    power = math.log2(max(whole, 1e5) / max(half, 1e5))
    summary = f"{n // 2} keys take {half / 1e6:.1f} MB, {n} take {whole / 1e6:.1f} MB: n^{power:.1f}"
    assert whole < 16e6 or power < growth + 0.5, f"{summary}, promised n^{growth:g}"
    return summary if whole >= 1e6 else f"under 1 MB for {n} keys"
