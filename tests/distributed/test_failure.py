"""If a rank is killed or hangs, the others raise an error in bounded time."""

from __future__ import annotations

import time

import pytest

import regard.distributed as rd
from tests.distributed import failing_ranks
from tests.distributed.world import run


@pytest.mark.parametrize(
    ("method", "moment"),
    [("ring", "between"), ("ring", "forward"), ("ring", "backward"), ("heads", "forward"), ("heads", "backward")],
)
def test_a_killed_rank_raises_on_the_others(method: str, moment: str) -> None:
    started = time.monotonic()
    results = run(failing_ranks.killed, 3 if method == "ring" else 2, method, moment, timeout=30)
    assert time.monotonic() - started < 45  # the timeout of the group, and startup
    assert results[1] is None, "rank 1 was not killed"
    for rank in (0, *range(2, len(results))):
        assert isinstance(results[rank], rd.PeerLost), results[rank]
        assert f"rank {rank} of {len(results)} failed waiting for" in str(results[rank])
        assert "check whether a rank was killed, hangs, or runs different code" in str(results[rank])


def test_a_hanging_rank_raises_after_the_timeout() -> None:
    results = run(failing_ranks.hanging, 2, "ring", timeout=60, grace=0)
    assert isinstance(results[0], rd.PeerLost)
    assert float(results[0].__notes__[0].split()[0]) < 20
    assert isinstance(results[1], TimeoutError)
