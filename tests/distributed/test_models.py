"""A sharded model equals the model in one process."""

from __future__ import annotations

import pytest

from tests.distributed import sharded_models
from tests.distributed.world import all_well, run


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return all_well(run(sharded_models.all_models, 4))


@pytest.mark.parametrize("name", sharded_models.MODELS)
def test_results_and_gradients_match_one_process(results: list[dict], name: str) -> None:
    for rank in range(4):
        assert results[rank][name]["output"] < 1e-12
        assert results[rank][name]["gradients"] < 1e-11


def test_a_rank_computes_its_local_tokens(results: list[dict]) -> None:
    assert sum(results[rank]["gpt"]["rows"][0] for rank in range(4)) == sharded_models.N


def test_layers_outside_of_a_stack_take_local_tokens(results: list[dict]) -> None:
    for rank in range(4):
        assert max(results[rank]["bare"].values()) < 1e-12


def test_caches_and_inspection_raise(results: list[dict]) -> None:
    for rank in range(4):
        generated, unparted, cached, *looks = results[rank]["cached"]
        assert "a cache cannot be sharded; generate outside of regard.distributed.sequence" in generated
        assert "a layer takes the local tokens and `context.to_local()`" in unparted
        assert "a cache cannot be sharded" in cached
        assert len(looks) == 2
        assert all("weights, map and statistics need whole sequences" in look for look in looks)
