"""Distributed attention equals attention in one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import cases
from tests.distributed.world import all_well, run

ALL = [(name, ranks, *way) for name in cases.CASES for ranks in cases.LENGTHS for way in cases.ways(name, ranks)]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return all_well(run(cases.all_cases, 4))


@pytest.mark.parametrize("key", ALL, ids=lambda key: " ".join(map(str, key)))
def test_ranks_match_one_process(results: list[dict], key: tuple) -> None:
    most = 1e-5 if key[-1] == torch.float32 else 1e-12
    for rank in range(key[1]):
        errors = results[rank][key]
        assert len(errors) >= 5
        assert max(errors.values()) <= most, f"rank {rank}: {errors}"
