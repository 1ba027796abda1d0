"""Attention layers, compared with torch.nn.MultiheadAttention and with their definitions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import regard as rg
from regard.nn import AdditiveAttention, LayerContext, MultiHeadAttention, Rotary, SelfAttention


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_self_attention_matches_its_definition() -> None:
    layer, x = SelfAttention(d_model=12, d_key=5, d_value=7), torch.randn(2, 9, 12)
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    weights = (q @ k.mT / math.sqrt(5)).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
    close(layer(x, mask=rg.causal()), layer.output(weights @ v))


def torch_module(layer: MultiHeadAttention, width: int, heads: int) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(width, heads, batch_first=True)
    module.load_state_dict(
        {
            "in_proj_weight": layer.qkv.weight,
            "in_proj_bias": layer.qkv.bias,
            "out_proj.weight": layer.output.weight,
            "out_proj.bias": layer.output.bias,
        }
    )
    return module


@pytest.mark.parametrize("cross", [False, True])
def test_multi_head_attention_matches_torch_forward_and_backward(cross: bool) -> None:
    layer = MultiHeadAttention(24, heads=4)
    nn.init.normal_(layer.qkv.bias)
    theirs = torch_module(layer, 24, 4)
    x, source = torch.randn(2, 7, 24, requires_grad=True), torch.randn(2, 9, 24)
    attended = source if cross else x
    ours, other = layer(x, source if cross else None), theirs(x, attended, attended)[0]
    close(ours, other)
    (actual,) = torch.autograd.grad(ours.square().sum(), layer.qkv.weight)
    (their,) = torch.autograd.grad(other.square().sum(), theirs.in_proj_weight)
    close(actual, their, 1e-4)


def test_shared_kv_heads_equal_repeated_kv_heads() -> None:
    layer, x = MultiHeadAttention(24, heads=6, kv_heads=2, d_head=5, d_value=3), torch.randn(2, 8, 24)
    q, k, v = layer.qkv(x).split(layer.widths, -1)
    q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, 6), (k, 2), (v, 2)))
    k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    expected = ((q @ k.mT / math.sqrt(5)).softmax(-1) @ v).transpose(1, 2).flatten(2)
    close(layer(x), layer.output(expected))


def test_rotary_rotates_queries_and_keys_by_their_positions() -> None:
    layer, x = MultiHeadAttention(16, heads=2, rotary=Rotary(base=500.0)), torch.randn(1, 6, 16)
    at = torch.tensor([3, 4, 5, 0, 1, 2])
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    expected = rg.attention(rg.rotary(q, at, base=500.0), rg.rotary(k, at, base=500.0), v)
    close(layer(x, positions=at), layer.output(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    "rotary", [Rotary(), Rotary(d_rotary=4), Rotary(interleaved=True), Rotary(d_rotary=6, interleaved=True)]
)
def test_rotary_module_matches_the_rotary_function(rotary: Rotary) -> None:
    x, at = torch.randn(2, 5, 3, 8), torch.randint(0, 99, (2, 5))
    expected = rg.rotary(x.transpose(1, 2), at, d_rotary=rotary.d_rotary, interleaved=rotary.interleaved).transpose(
        1, 2
    )
    close(rotary(x, rotary.table(at, 8, x.dtype)), expected)


def test_query_and_key_norms_are_applied_before_rotation() -> None:
    norms = nn.RMSNorm(8), nn.RMSNorm(8)
    nn.init.normal_(norms[0].weight)
    layer = MultiHeadAttention(16, heads=2, rotary=Rotary(), query_norm=norms[0], key_norm=norms[1])
    x = torch.randn(1, 6, 16)
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    expected = rg.attention(rg.rotary(norms[0](q)), rg.rotary(norms[1](k)), v)
    close(layer(x), layer.output(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("cross", [False, True])
def test_query_and_key_positions_do_not_change_values(cross: bool) -> None:
    layer, x, source = MultiHeadAttention(24, heads=4), torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    of_query, of_key = torch.randn(5, 24), torch.randn(7 if cross else 5, 24)
    attended = source if cross else x
    expected = torch_module(layer, 24, 4)(x + of_query, attended + of_key, attended)[0]
    shared = LayerContext(query_position=of_query, key_position=of_key)
    close(layer(x, source if cross else None, context=shared), expected)


def test_a_source_of_another_width_has_a_separate_weight() -> None:
    layer = MultiHeadAttention(16, heads=2, d_source=10)
    assert layer(torch.randn(2, 3, 16), torch.randn(2, 5, 10)).shape == (2, 3, 16)
    assert layer.source is not None
    assert layer.source.weight.shape == (32, 10)


def test_additive_attention_matches_its_definition() -> None:
    layer, x, source = AdditiveAttention(6, 8, 10), torch.randn(2, 3, 6), torch.randn(2, 5, 8)
    scores = (layer.query(x)[:, :, None] + layer.key(source)[:, None]).tanh() @ layer.weight
    close(layer(x, source), scores.softmax(-1) @ source)


def test_dropout_is_applied_in_training_only() -> None:
    layer, x = MultiHeadAttention(16, heads=2, attend=rg.Attention(dropout=0.5)), torch.randn(2, 6, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_layers_that_share_a_description_share_its_plans() -> None:
    attend = rg.Attention(mask=rg.causal())
    first, second = (MultiHeadAttention(16, heads=2, attend=attend) for _ in range(2))
    shared = LayerContext(rg.padding([6, 4]))
    assert shared.combine(first.attend) is shared.combine(second.attend)
    assert LayerContext().combine(attend) is attend


def test_a_copied_module_has_separate_plans() -> None:
    layer, x = MultiHeadAttention(16, heads=2, attend=rg.Attention(mask=rg.causal())).eval(), torch.randn(2, 6, 16)
    with torch.no_grad():
        expected = layer(x)
        twin = copy.deepcopy(layer)
        assert twin.attend is not layer.attend
        close(twin(x), expected, 0)


def test_the_output_has_the_memory_layout_of_the_query() -> None:
    q, k, v = (t.transpose(1, 2) for t in torch.randn(3, 2, 7, 4, 8))
    with torch.no_grad():
        assert rg.attention(q, k, v, engine="native").transpose(1, 2).is_contiguous()
        assert rg.attention(*(t.contiguous() for t in (q, k, v)), engine="native").is_contiguous()


def test_d_model_must_be_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match="d_model = 10 is not a multiple of heads = 3"):
        MultiHeadAttention(10, heads=3)
    with pytest.raises(ValueError, match="multiple of kv_heads, got heads=4 and kv_heads=3"):
        MultiHeadAttention(12, heads=4, kv_heads=3)
