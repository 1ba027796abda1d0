"""Merging results over shards of keys."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.geometry import Frame
from tests.engines.calls import INF, inputs, normal
from tests.strategies import Call, calls


class TestMerge:
    @staticmethod
    def shards(call: Call, cuts: list[int], engine: str) -> list[tuple[Tensor, Tensor]]:
        """Compute the call over shards of its keys, with mask and bias split; only the last shard has the sink."""
        query, key, value = call.query, call.key, call.value
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        at = Frame(*sizes, offset=0).indices()
        mask, bias = call.description["mask"], call.description["bias"]
        edges = [0, *cuts, sizes[3]]
        results = []
        for n, (start, stop) in enumerate(itertools.pairwise(edges)):
            part = slice(start, stop)
            sink = call.description["sink"] if n == len(edges) - 2 else None
            bits = None if mask is None else mask.allows(at).expand(sizes)[..., part]
            results.append(
                rg.attention(
                    query, key[:, :, part], value[:, :, part], mask=bits, bias=bias[..., part], sink=sink,
                    engine=engine if start < stop else None, return_lse=True,
                )
            )  # fmt: skip
        return results

    @pytest.mark.parametrize("engine", ["reference", "tiled"])
    @settings(max_examples=40)
    @given(data=st.data())
    def test_shards_merge_to_the_whole(self, engine: str, data: st.DataObject) -> None:
        call = data.draw(calls(longest=12, plain=True))
        K = call.key.shape[2]
        call.description = {
            "mask": call.description["mask"],
            "bias": normal(call.query.shape[2], K),
            "sink": data.draw(st.sampled_from([None, 0.5, normal(call.query.shape[1])])),
        }
        cuts = sorted(data.draw(st.lists(st.integers(0, K), max_size=3)))
        whole = rg.attention(
            call.query, call.key, call.value, offset=0, engine="reference", return_lse=True, **call.description
        )
        merged = rg.merge(*zip(*self.shards(call, cuts, engine), strict=True))
        for ours, theirs in zip(merged, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_a_row_that_no_shard_sees_stays_empty(self) -> None:
        tensors = inputs()
        parts = [rg.attention(*tensors, mask=rg.padding([0, 5]), return_lse=True) for _ in range(2)]
        output, lse = rg.merge(*zip(*parts, strict=True))
        assert (output[0] == 0).all()
        assert (lse[0] == -INF).all()
        assert output.isfinite().all()

    def test_gradients_go_through_it(self) -> None:
        def merged(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            parts = [
                rg.attention(query, key[:, :, part], value[:, :, part], return_lse=True)
                for part in (slice(0, 4), slice(4, 9))
            ]
            return rg.merge(*zip(*parts, strict=True))

        assert torch.autograd.gradcheck(merged, [t.requires_grad_() for t in inputs()], fast_mode=True)

    def test_an_empty_row_gives_finite_gradients(self) -> None:
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        parts = [
            rg.attention(
                tensors[0], tensors[1][:, :, part], tensors[2][:, :, part], return_lse=True,
                mask=rg.padding([0, 2]),
            )
            for part in (slice(0, 4), slice(4, 9))
        ]  # fmt: skip
        output, _ = rg.merge(*zip(*parts, strict=True))
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), tensors))

    def test_one_shard_is_itself_in_its_own_dtype(self) -> None:
        tensors = [tensor.bfloat16() for tensor in inputs()]
        output, lse = rg.attention(*tensors, return_lse=True)
        merged = rg.merge([output], [lse])
        assert merged[0].dtype == torch.bfloat16
        assert torch.equal(merged[0], output)
        torch.testing.assert_close(merged[1], lse)
