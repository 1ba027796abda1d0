"""Communication between ranks, with byte counts and timeouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import TypeVar
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
T = TypeVar("T")


class PeerLost(ConnectionError):
    """Another rank did not answer: it was killed, it hangs, or it runs different code."""


@dataclass
class Traffic:
    """Bytes of keys, values, gradients and hidden states sent to and received from each other rank of the group.

    The 104 bytes of metadata that every rank sends to all others in each call are not counted.
    """

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)


_COUNTING: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the bytes that this rank sends and receives in the context.

    >>> import regard.distributed
    >>> with regard.distributed.traffic() as moved:
    ...     pass
    >>> moved.sent.total()
    0
    """
    counted = Traffic()
    _COUNTING.append(counted)
    try:
        yield counted
    finally:
        _COUNTING[:] = [other for other in _COUNTING if other is not counted]


@dataclass(frozen=True, eq=False)
class Communicator:
    """A process group, the index of this rank in it, and the timeout of its messages.

    The group is held by a weak reference: otherwise the autograd graph of a result could keep a destroyed group open
    until the process exits, and closing it then aborts if another rank is gone.
    """

    group_ref: ReferenceType[Group]
    rank: int
    ranks: int
    timeout: timedelta | None

    @staticmethod
    def of(group: Group | None, timeout: float | None = None) -> Communicator:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "there is no process group: start the program with torchrun and call "
                "torch.distributed.init_process_group('gloo', timeout=...) first"
            )
        group = dist.group.WORLD if group is None else group
        if group is None or (rank := dist.get_rank(group)) < 0:
            raise ValueError("this rank does not belong to the group")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, but is {timeout}")
        return Communicator(
            ref(group), rank, dist.get_world_size(group), None if timeout is None else timedelta(seconds=timeout)
        )

    @property
    def group(self) -> Group:
        """The process group; raise if it was destroyed."""
        group = self.group_ref()
        if group is None or not dist.is_initialized():
            raise RuntimeError("the process group was destroyed; call backward before destroy_process_group()")
        return group

    def all_gather_ints(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather a few integers from every rank."""
        local = torch.tensor(values, dtype=torch.int64, device=device)
        if self.ranks == 1:
            return [list(values)]
        gathered, group = [torch.empty_like(local) for _ in range(self.ranks)], self.group
        self._wait(self._start(lambda: dist.all_gather(gathered, local, group=group, async_op=True)), "all other ranks")
        return [tensor.tolist() for tensor in gathered]

    def all_to_all(self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list]:
        """Send `parts[r]` to rank r, and return the tensors received from each rank, with the given shapes."""
        like = parts[self.rank][0]
        out = torch.cat([part.reshape(-1) for some in parts for part in some]).view(torch.uint8)
        sent = [sum(part.numel() for part in some) * like.element_size() for some in parts]
        sizes = [sum(prod(shape) for shape in some) * like.element_size() for some in shapes]
        received = out.new_empty(sum(sizes))
        if self.ranks > 1:
            group = self.group
            self._wait(
                self._start(lambda: dist.all_to_all_single(received, out, sizes, sent, group=group, async_op=True)),
                "all other ranks",
            )
        else:
            received = out
        self._count("sent", dict(enumerate(sent)))
        self._count("received", dict(enumerate(sizes)))
        return [
            split_flat(piece.view(like.dtype), some) for piece, some in zip(received.split(sizes), shapes, strict=True)
        ]  # fmt: skip

    def post(
        self, target: int, out: Sequence[Tensor], source: int, buffers: Sequence[Tensor], tag: int
    ) -> PendingTransfer:
        """Start to send tensors to one rank and to receive others from one; empty tensors are not sent."""
        operations, out = [], [x.contiguous() for x in out if x.numel()]
        for operation, peer, tensors in (
            (dist.isend, target, out),
            (dist.irecv, source, [x for x in buffers if x.numel()]),
        ):
            for n, tensor in enumerate(tensors):
                operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer, tag=tag + n))
                self._count("sent" if operation is dist.isend else "received", {peer: tensor.nbytes})
        works = self._start(lambda: dist.batch_isend_irecv(operations)) if operations else []
        peers = " and ".join(f"rank {peer}" for peer in sorted({each.group_peer for each in operations}))
        return PendingTransfer(self, works, peers, (*out, *buffers))

    def _count(self, direction: str, moved: dict[int, int]) -> None:
        for counted in _COUNTING:
            for peer, size in moved.items():
                if size and peer != self.rank:
                    getattr(counted, direction)[peer] += size

    def _start(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except RuntimeError as error:
            raise self._peer_lost("the other ranks", error) from error

    def _wait(self, work: dist.Work, peers: str) -> None:
        try:
            done = work.wait() if self.timeout is None else work.wait(self.timeout)
        except RuntimeError as error:
            raise self._peer_lost(peers, error) from error
        if done is False:
            raise self._peer_lost(peers, RuntimeError("timed out"))

    def _peer_lost(self, peers: str, error: Exception) -> PeerLost:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return PeerLost(
            f"rank {self.rank} of {self.ranks} failed waiting for {peers}: check whether a rank was killed, "
            f"hangs, or runs different code ({first})"
        )


@dataclass(frozen=True, eq=False)
class PendingTransfer:
    """A transfer in progress; it holds its tensors until it is complete."""

    comm: Communicator
    works: list[dist.Work]
    peers: str
    tensors: tuple

    def wait(self) -> None:
        for work in self.works:
            self.comm._wait(work, self.peers)


def split_flat(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split a flat tensor into consecutive tensors of these shapes."""
    return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]
