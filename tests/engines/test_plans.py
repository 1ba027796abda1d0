"""Cached problems and engines."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines.plans import Plans
from regard.engines.select import exclude_engine


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    return query, key, value


def test_a_plan_is_rebuilt_for_another_set_of_engines() -> None:
    q, k, v = inputs()
    attend = rg.Attention(mask=rg.causal())
    engine = attend._plan(q, k, v, None, False)[1].name
    with exclude_engine(engine):
        assert attend._plan(q, k, v, None, False)[1].name != engine
    assert attend._plan(q, k, v, None, False)[1].name == engine


def test_a_plan_of_an_old_mask_is_not_kept() -> None:
    bits, (q, k, v) = torch.eye(6).bool(), inputs()
    attend = rg.Attention(mask=bits)
    attend(q, k, v)
    attend(q[:1], k[:1], v[:1])
    bits.data.fill_(True)
    attend(q, k, v)
    assert len(attend.__dict__["_plans"]) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sparse_tensor_is_refused_by_a_remembered_plan(place: int) -> None:
    attend, tensors = rg.Attention(), list(inputs())
    attend(*tensors)
    tensors[place] = tensors[place].to_sparse()
    with pytest.raises(TypeError, match="layout"):
        attend(*tensors)


def test_copies_start_empty() -> None:
    attend = rg.Attention(mask=rg.causal())
    attend(*inputs())
    plans: Plans = attend.__dict__["_plans"]
    assert len(plans) == 1
    assert not copy.deepcopy(plans)
    assert not pickle.loads(pickle.dumps(plans))


def test_calls_that_differ_in_what_a_plan_depends_on_have_separate_plans() -> None:
    attend, (query, key, value) = rg.Attention(mask=rg.causal(), dropout=0.1), inputs()
    for training in (True, False):
        attend.train(training)
        attend(query, key, value)
        attend(query, key, value)
        attend(query, key, value, return_lse=True)
        attend(query.double(), key.double(), value.double())
        attend(query.requires_grad_(), key, value)
        query.requires_grad_(False)
    assert len(attend.__dict__["_plans"]) == 8
