"""One training step for each layout, with byte counts of all communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.distributed import traffic
from regard.distributed.cost import Split
from regard.models import LanguageConfig, LanguageModel
from regard.nn import Packed, Rotary
from regard.training import state

CONFIG = LanguageConfig(
    vocabulary=51,
    d_model=24,
    layers=2,
    heads=4,
    kv_heads=2,
    d_hidden=33,
    rotary=Rotary(),
    norm="rms",
    gated=True,
    bias=False,
)
SEQUENCE, BATCH = 64, 4
SPLITS = (
    Split(data=2), Split(data=2, fsdp=True), Split(sequence=2, method="ring"),
    Split(sequence=2, method="heads", fsdp=True),
)  # fmt: skip


class _Collectives(TorchDispatchMode):
    """Sum the bytes of gathered and reduced tensors by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {"_allgather_base_": ("all-gather", 0), "_reduce_scatter_base_": ("reduce-scatter", 1)}
        if (name := func.__name__.split(".")[0]) in named:
            what, place = named[name]
            self.bytes[what] += args[place].nbytes
        return func(*args, **(kwargs or {}))


def steps(rank: int) -> dict[str, dict[str, int]]:
    """Bytes that this rank sends, by layout and kind, from the definitions of the collectives."""
    return {str(split): _step(rank, split) for split in SPLITS}


def _step(rank: int, split: Split) -> dict[str, int]:
    torch.manual_seed(0)
    objective: Any = nn.Module()
    objective.model = model = LanguageModel(CONFIG)
    objective.forward = model.loss
    together = nullcontext
    if split.sequence > 1:
        together = state.sequence_contexts(split.sequence, torch.device("cpu"), split.method)
    reduced: Counter[str] = Counter()
    if split.fsdp:
        state.shard(objective)
    else:
        objective = nn.parallel.DistributedDataParallel(objective)
        objective.register_comm_hook(reduced, _counted)
    with traffic() as own, _Collectives() as whole:
        for _ in range(BATCH // split.data):
            ids = torch.randint(CONFIG.vocabulary, (SEQUENCE + 1,))
            reduced.clear()  # only the last accumulated part is reduced
            with together():
                objective(Packed(ids[:-1], (SEQUENCE,)), ids[1:]).backward()
    share = (split.ranks - 1) / split.ranks
    sizes = {name: int(size * share) for name, size in whole.bytes.items()}
    if reduced:
        sizes["all-reduce"] = int(2 * share * reduced["bytes"])
    return sizes | ({split.method: own.sent.total()} if split.sequence > 1 else {})


def _counted(counted, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations of a hook
    counted["bytes"] += bucket.buffer().nbytes
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Bytes that autograd saves in the context, each storage once, without weights."""
    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    total = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
