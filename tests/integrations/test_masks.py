"""Mask tensors: built from the mask functions of Transformers and from tensors, and materialised when read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as hf

import regard as rg
from regard.integrations.dense_masks import key_masks, read_keep_mask
from regard.integrations.mask_tensor import MaskTensor
from regard.integrations.pattern import Pattern, build_attention
from regard.integrations.transformers import build_mask

LENGTHS = [
    (7, 7, 0, 0),
    (1, 9, 8, 0),
    (4, 12, 8, 0),
    (3, 6, 9, 6),
    (5, 16, 0, 0),
    (5, 16, 6, 0),
]  # Q, K, offsets of both
BLOCKS = torch.tensor([[0, 0, -1, 1, 1, 1, -1, -1, 2, 2, -1, -1, 3, 3, -1, 0]])
FUNCTIONS = {
    "causal": hf.causal_mask_function,
    "all": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(3),
    "window both ways": hf.sliding_window_bidirectional_mask_function(2),
    "chunks": hf.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "packed": hf.and_masks(
        hf.causal_mask_function, hf.packed_sequence_mask_function(torch.arange(32).expand(2, -1) // 3)
    ),
    "blocks": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(BLOCKS.expand(2, -1))),
    "unknown": lambda b, h, q, k: (q + k) % 3 != 1,
    "unknown and": hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k != 2),
}
PADDING = {
    "none": None,
    "left": torch.arange(20) >= torch.tensor([[0], [3]]),
    "right": torch.arange(20) < torch.tensor([[20], [5]]),
    "holes": torch.arange(20) % torch.tensor([[20], [3]]) != 1,
    "nothing": torch.tensor([[True], [False]]).expand(2, 20),
}


def both(sizes: tuple[int, ...], function: str, padding: str, skip: bool) -> tuple[Tensor | None, Tensor]:
    queries, keys, q_offset, kv_offset = sizes
    given = {
        "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function], "attention_mask": PADDING[padding],
    }  # fmt: skip
    expected = hf.sdpa_mask(**given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert expected is not None
    return build_mask(**given, allow_is_bidirectional_skip=skip), expected.expand(2, 1, queries, keys)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("sizes", LENGTHS)
def test_a_mask_function_equals_its_mask(sizes: tuple[int, ...], function: str, padding: str) -> None:
    mask, expected = both(sizes, function, padding, skip=True)
    if mask is None:
        assert expected.all()
        mask, expected = both(sizes, function, padding, skip=False)
    assert isinstance(mask, MaskTensor)
    assert torch.equal(mask == 0, expected)
    query, key = torch.randn(2, 2, 2, max(sizes[:2]), 8)
    described = build_attention(mask.pattern).weights(query[:, :, : sizes[0]], key[:, :, : sizes[1]]) > 0
    assert torch.equal(described, expected.expand(-1, 2, -1, -1))


@pytest.mark.parametrize(
    ("function", "padding", "sizes", "expected"),
    [
        ("causal", "none", (7, 7, 0, 0), "causal()"),
        ("causal", "left", (7, 7, 0, 0), "causal() & ~padding([0, 3])"),
        ("causal", "right", (7, 7, 0, 0), "causal() & padding([7, 5])"),
        ("causal", "none", (1, 9, 8, 0), "None"),
        ("window", "none", (7, 7, 0, 0), "window(2, 0)"),
        ("window both ways", "none", (7, 7, 0, 0), "window(2, 2)"),
        ("packed", "none", (7, 7, 0, 0), "causal() & documents((2, 7))"),
        ("all", "right", (7, 7, 0, 0), "padding([7, 5])"),
    ],
)
def test_mask_functions_become_descriptions(function: str, padding: str, sizes: tuple[int, ...], expected: str) -> None:
    mask, _ = both(sizes, function, padding, skip=False)
    assert isinstance(mask, MaskTensor)
    assert repr(mask.pattern.mask) == expected
    assert repr(mask).startswith(f"MaskTensor({expected}")


def test_an_offset_may_be_a_tensor_as_in_static_caches() -> None:
    mask = build_mask(batch_size=1, q_length=2, kv_length=9, q_offset=torch.tensor([4]))
    assert isinstance(mask, MaskTensor)
    assert mask.pattern.offset == 4
    assert (mask == 0).sum() == 5 + 6


def mask_tensor() -> MaskTensor:
    return MaskTensor(Pattern(rg.causal(), offset=0), (2, 1, 5, 5), torch.float32, torch.device("cpu"))


def dense_mask() -> Tensor:
    return torch.full((5, 5), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 5, 5)


@pytest.mark.parametrize(
    "read",
    [
        lambda m: m + 1,
        lambda m: m[:, :, 1:3, :4],
        lambda m: m[0],
        lambda m: m.to(torch.float64),
        lambda m: m.expand(2, 3, 5, 5),
        lambda m: m.repeat(1, 2, 1, 1),
        lambda m: torch.cat([m, m], 1),
        lambda m: torch.where(m == 0, 1.0, 2.0),
        lambda m: torch.nn.functional.pad(m, (0, 1)),
        lambda m: torch.zeros(2, 3, 5, 5) + m,
        lambda m: m.clone(),
        lambda m: m.squeeze(1).unsqueeze(1),
        lambda m: m.transpose(-1, -2).contiguous(),
        lambda m: m.bool(),
        copy.deepcopy,
    ],
)
def test_reading_materialises_the_expected_tensor(read) -> None:  # type: ignore[no-untyped-def]
    mask = mask_tensor()
    assert torch.equal(read(mask), read(dense_mask().clone()))


@pytest.mark.parametrize(
    "pass_on",
    [lambda m: m, lambda m: m[:, :, :, :5], lambda m: m.contiguous(), lambda m: m.detach(), lambda m: m.to("cpu")],
)
def test_passing_it_on_does_not_materialise_it(pass_on) -> None:  # type: ignore[no-untyped-def]
    mask = pass_on(mask_tensor())
    assert isinstance(mask, MaskTensor)
    assert mask._dense_state.tensor is None
    assert mask.intact
    assert (mask.dtype, mask.shape, mask.device.type) == (torch.float32, (2, 1, 5, 5), "cpu")


@pytest.mark.parametrize(
    "write", [lambda m: m.add_(1.0), lambda m: m[:, :, 0].fill_(0.0), lambda m: m.masked_fill_(m == 0, 3.0)]
)
def test_writes_replace_the_description(write) -> None:  # type: ignore[no-untyped-def]
    mask, expected = mask_tensor(), dense_mask().clone()
    alias = mask.detach()
    write(mask)
    write(expected)
    assert not mask.intact
    assert not alias.intact
    assert torch.equal(mask.dense, expected)
    assert "modified" in repr(mask)


def test_computing_keeps_the_description() -> None:
    mask = mask_tensor()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            _ = mask + 1
            assert mask.intact
            assert isinstance(copy.deepcopy(mask), MaskTensor)


def test_it_is_materialised_in_a_compiled_graph() -> None:
    compiled = torch.compile(lambda mask, x: x + mask, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(mask_tensor(), torch.ones(5)), dense_mask() + 1)


def test_tensors_become_patterns() -> None:
    square = torch.ones(5, 5, dtype=torch.bool)
    for tensor, mask, offset in (
        (square.tril(), "causal()", 0),
        (square.tril(2)[:3], "causal()", 2),
        (square, "None", None),
        (torch.zeros(5, 5).masked_fill(~square.tril(), float("-inf")), "causal()", 0),
        (square.tril().expand(2, 3, 5, 5), "causal()", 0),
        (square.triu(), "dense((1, 1, 5, 5))", None),
        (square.tril() & (torch.arange(5) != 2), "dense((1, 1, 5, 5))", None),
    ):
        pattern, added = read_keep_mask(tensor)
        assert (repr(pattern.mask), pattern.offset) == (mask, offset)
        assert added is None


def test_additive_numbers_become_a_bias_and_hidden_entries_a_mask() -> None:
    tensor = torch.tensor([[0.5, float("-inf")], [1.5, torch.finfo(torch.float32).min]], requires_grad=True)
    pattern, added = read_keep_mask(tensor)
    assert isinstance(pattern.mask, rg.Mask)
    assert added is not None
    assert added.tolist() == [[0.5, 0.0], [1.5, 0.0]]
    added.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_visible_keys_become_intervals_if_possible() -> None:
    rows = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    assert key_masks(rows) == (rg.padding([4, 5, 0]), ~rg.padding([1, 0, 0]))
    assert key_masks(rows[1:2]) == ()
    assert repr(key_masks(torch.tensor([[True, False, True]]))) == "(dense([[[[True, False, True]]]]),)"
