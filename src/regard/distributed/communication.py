"""What goes between ranks: bytes, counted, and awaited no longer than a limit."""

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
    """Another rank did not answer: it was killed, it hangs, or it does something else than this one."""


@dataclass
class Traffic:
    """Bytes of keys, values, gradients and hidden states that went to and came from each other rank of the group.

    One card of 104 bytes that every rank sends to all at each call, so that they agree on sizes, is not counted.
    """

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)


_COUNTING: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what this rank sends and receives within.

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

    The group is held weakly: the graph of a result that lives on must not keep it open once it is destroyed, since it
    would then be closed while the process ends, which aborts where another rank has gone.
    """

    group_ref: ReferenceType[Group]
    rank: int
    ranks: int
    timeout: timedelta | None

    @staticmethod
    def of(group: Group | None, timeout: float | None = None) -> Communicator:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "there is no process group: start the program by torchrun and call "
                "torch.distributed.init_process_group('gloo', timeout=...) first"
            )
        own = dist.group.WORLD if group is None else group
        if own is None or (rank := dist.get_rank(own)) < 0:
            raise ValueError("this rank does not belong to the group")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, but is {timeout}")
        return Communicator(
            ref(own), rank, dist.get_world_size(own), None if timeout is None else timedelta(seconds=timeout)
        )

    @property
    def group(self) -> Group:
        """The process group, as long as it is there."""
        group = self.group_ref()
        if group is None or not dist.is_initialized():
            raise RuntimeError("the process group was destroyed; call backward before destroy_process_group()")
        return group

    def all_gather_ints(self, card: Sequence[int], device: torch.device) -> list[list[int]]:
        """What every rank says of itself: a few whole numbers each."""
        own = torch.tensor(card, dtype=torch.int64, device=device)
        if self.ranks == 1:
            return [list(card)]
        found, group = [torch.empty_like(own) for _ in range(self.ranks)], self.group
        self._wait(self._start(lambda: dist.all_gather(found, own, group=group, async_op=True)), "all other ranks")
        return [tensor.tolist() for tensor in found]

    def all_to_all(self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list]:
        """Send `parts[r]` to rank r; what came from each rank, of the dtype of what was sent and of these shapes."""
        like = parts[self.rank][0]
        out = torch.cat([part.reshape(-1) for some in parts for part in some]).view(torch.uint8)
        sent = [sum(part.numel() for part in some) * like.element_size() for some in parts]
        sizes = [sum(prod(shape) for shape in some) * like.element_size() for some in shapes]
        room = out.new_empty(sum(sizes))
        if self.ranks > 1:
            group = self.group
            self._wait(
                self._start(lambda: dist.all_to_all_single(room, out, sizes, sent, group=group, async_op=True)),
                "all other ranks",
            )
        else:
            room = out
        self._count("sent", dict(enumerate(sent)))
        self._count("received", dict(enumerate(sizes)))
        return [
            split_flat(piece.view(like.dtype), some) for piece, some in zip(room.split(sizes), shapes, strict=True)
        ]  # fmt: skip

    def post(
        self, target: int, out: Sequence[Tensor], source: int, room: Sequence[Tensor], tag: int
    ) -> PendingTransfer:
        """Begin to send tensors to one rank, and to receive others from one; those that are empty do not travel."""
        operations, out = [], [x.contiguous() for x in out if x.numel()]
        for way, peer, tensors in ((dist.isend, target, out), (dist.irecv, source, [x for x in room if x.numel()])):
            for n, tensor in enumerate(tensors):
                operations.append(dist.P2POp(way, tensor, group=self.group, group_peer=peer, tag=tag + n))
                self._count("sent" if way is dist.isend else "received", {peer: tensor.nbytes})
        works = self._start(lambda: dist.batch_isend_irecv(operations)) if operations else []
        peers = " and ".join(f"rank {peer}" for peer in sorted({operation.group_peer for operation in operations}))
        return PendingTransfer(self, works, peers, (*out, *room))

    def _count(self, way: str, moved: dict[int, int]) -> None:
        for counted in _COUNTING:
            for peer, size in moved.items():
                if size and peer != self.rank:
                    getattr(counted, way)[peer] += size

    def _start(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except RuntimeError as error:
            raise self._peer_lost("the other ranks", error) from error

    def _wait(self, work: dist.Work, whom: str) -> None:
        try:
            done = work.wait() if self.timeout is None else work.wait(self.timeout)
        except RuntimeError as error:
            raise self._peer_lost(whom, error) from error
        if done is False:
            raise self._peer_lost(whom, RuntimeError("timed out"))

    def _peer_lost(self, whom: str, error: Exception) -> PeerLost:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return PeerLost(
            f"rank {self.rank} of {self.ranks} waited for {whom} in vain: was one killed, does it hang, or does it run "
            f"other code? ({first})"
        )


@dataclass(frozen=True, eq=False)
class PendingTransfer:
    """What is on its way; the tensors are kept until it is there."""

    comm: Communicator
    works: list[dist.Work]
    peers: str
    tensors: tuple

    def wait(self) -> None:
        for work in self.works:
            self.comm._wait(work, self.peers)


def split_flat(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, one behind the other in a flat one."""
    return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]
