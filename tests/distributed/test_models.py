"""A model over many ranks is the model over one."""

from __future__ import annotations

import pytest

from tests.distributed import sharded_models
from tests.distributed.world import all_well, run


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return all_well(run(sharded_models.all_models, 4))


@pytest.mark.parametrize("name", sharded_models.MODELS)
def test_a_model_gives_the_results_and_gradients_of_one_process(found: list[dict], name: str) -> None:
    for rank in range(4):
        assert found[rank][name]["output"] < 1e-12
        assert found[rank][name]["gradients"] < 1e-11


def test_a_rank_computes_its_own_tokens(found: list[dict]) -> None:
    assert sum(found[rank]["gpt"]["rows"][0] for rank in range(4)) == sharded_models.N


def test_layers_outside_of_a_stack_take_the_tokens_of_the_rank(found: list[dict]) -> None:
    for rank in range(4):
        assert max(found[rank]["bare"].values()) < 1e-12


def test_caches_and_looks_are_refused(found: list[dict]) -> None:
    for rank in range(4):
        generated, unparted, cached, *looks = found[rank]["cached"]
        assert "a cache belongs to one process: generate outside of regard.distributed.sequence" in generated
        assert "a layer takes `context.to_local()` and own tokens" in unparted
        assert "a cache belongs to one process" in cached
        assert len(looks) == 2
        assert all("weights, map and statistics need whole sequences" in look for look in looks)
