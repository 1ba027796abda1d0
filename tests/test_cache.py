"""The cache of descriptions: limited in bytes, entries dropped with their mask, never out of date."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.cache import Cache

N = 70  # more than a tile


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    before = rg.cache_info().limit
    rg.clear_cache()
    yield
    rg.set_cache_limit(before)


def attended(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Dense attention in float64; rows without visible keys are 0."""
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v.double()


def inputs(B: int = 2, length: int = N) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, 2, length, 8, generator=random) for _ in range(3))


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual.double() - expected).abs().max() < 1e-5)


P, J = torch.arange(N)[:, None], torch.arange(N)


def _documents(ids: Tensor) -> Tensor:
    return ids[:, None] == ids


def _edges(pairs: Tensor) -> Tensor:
    allowed = torch.zeros(N, N, dtype=torch.bool)
    allowed[pairs[0].long(), pairs[1].long()] = True
    return allowed


def _block(layout: Tensor) -> Tensor:
    return layout.repeat_interleave(10, 0).repeat_interleave(10, 1)


RANDOM = torch.Generator().manual_seed(1)
HALF, OTHER = torch.rand(2, N, N, generator=RANDOM) > 0.5
MASKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    # constructor from a tensor, what it allows, and two contents
    "dense": (rg.dense, lambda t: t, HALF, OTHER),
    "a bool tensor": (lambda t: t, lambda t: t, torch.eye(N).bool(), torch.ones(N, N).tril().bool()),
    "a view": (lambda t: t[None, None], lambda t: t, torch.eye(N).bool(), torch.ones(N, N).tril().bool()),
    "an expanded tensor": (lambda t: t.expand(N, N), lambda t: t.expand(N, N), J < 9, J > 30),
    "padding": (rg.padding, lambda t: t[:, None, None, None] > J, torch.tensor([9, 70]), torch.tensor([60, 3])),
    "prefix": (rg.prefix, lambda t: (t > J) | (J <= P), torch.tensor([9]), torch.tensor([50])),
    "ranges": (lambda t: rg.ranges(t, torch.full_like(t, N)), lambda t: t[:, None] <= J,
               torch.arange(N), torch.arange(N).flip(0)),
    "documents": (rg.documents, _documents, torch.arange(N) // 20, torch.arange(N) // 33),
    "edges": (rg.edges, _edges, torch.tensor([[0, 1, 69], [5, 6, 7]]), torch.tensor([[3, 1, 69], [8, 60, 7]])),
    "blocks": (lambda t: rg.blocks(t, 10), _block, torch.eye(7).bool(), torch.ones(7, 7).tril().bool()),
    "global tokens": (rg.global_tokens, lambda t: (t[0] == P) | (t[0] == J), torch.tensor([3]), torch.tensor([66])),
    "composed": (lambda t: ~(rg.causal() & rg.documents(t)), lambda t: ~((J <= P) & _documents(t)),
                 torch.arange(N) // 20, torch.arange(N) // 33),
    "where": (lambda t: rg.where(lambda b, h, p, j: j - p <= t), lambda t: t >= J - P,
              torch.tensor(3), torch.tensor(9)),
}  # fmt: skip


def by_data(tensor: Tensor, content: Tensor) -> None:
    tensor.data.copy_(content)


def by_numpy(tensor: Tensor, content: Tensor) -> None:
    tensor.numpy()[...] = content.numpy()


def by_dlpack(tensor: Tensor, content: Tensor) -> None:
    torch.from_dlpack(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).copy_(content)


def in_inference_mode(tensor: Tensor, content: Tensor) -> None:
    with torch.inference_mode():
        tensor.copy_(content)


def by_replacing_storage(tensor: Tensor, content: Tensor) -> None:
    tensor.data = content.clone()


WRITES = (by_data, by_numpy, by_dlpack, in_inference_mode)


class TestAMaskWhoseTensorChanged:
    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("name", MASKS)
    def test_is_seen_as_changed_however_it_was_written(self, name: str, write: Callable) -> None:
        make, allowed, first, second = MASKS[name]
        tensor, (q, k, v) = first.clone(), inputs()
        mask = make(tensor)
        attend = rg.Attention(mask=mask)
        for content in (first, second, first):
            write(tensor, content)
            expected = attended(q, k, v, allowed(content))
            assert close(attend(q, k, v), expected)
            assert close(rg.attention(q, k, v, mask=mask), expected)

    @pytest.mark.parametrize("name", [name for name in MASKS if "view" not in name and "expanded" not in name])
    def test_is_seen_as_changed_when_its_storage_was_replaced(self, name: str) -> None:
        make, allowed, first, second = MASKS[name]
        tensor, (q, k, v) = first.clone(), inputs()
        attend = rg.Attention(mask=make(tensor))
        attend(q, k, v)
        by_replacing_storage(tensor, second)
        assert close(attend(q, k, v), attended(q, k, v, allowed(second)))

    @pytest.mark.parametrize("engine", ["native", "sdpa", "flex", "reference", "tiled"])
    def test_is_seen_by_every_engine(self, engine: str) -> None:
        tensor, (q, k, v) = torch.tensor([9, 70]), inputs()
        attend = rg.Attention(mask=rg.causal() & rg.padding(tensor))
        for lengths in ([9, 70], [60, 3]):
            tensor.data.copy_(torch.tensor(lengths))
            allowed = (J <= P) & (torch.tensor(lengths)[:, None, None, None] > J)
            assert close(attend(q, k, v, engine=engine), attended(q, k, v, allowed))

    @pytest.mark.parametrize("look", ["weights", "map", "statistics", "explain"])
    def test_is_seen_by_inspection(self, look: str) -> None:
        bits, (q, k, v) = torch.eye(N).bool(), inputs()
        attend = rg.Attention(mask=bits)
        ask = {
            "weights": lambda a: a.weights(q, k),
            "map": lambda a: a.map(q, k, size=(5, 5)),
            "statistics": lambda a: a.statistics(q, k).entropy,
            "explain": lambda a: a.explain(q, k, v).flops,
        }[look]
        ask(attend)
        bits.data.copy_(J <= P)
        assert torch.as_tensor(ask(attend)).equal(torch.as_tensor(ask(rg.Attention(mask=bits.clone()))))

    def test_is_checked_again(self) -> None:
        lengths, (q, k, v) = torch.tensor([9, 70]), inputs()
        attend = rg.Attention(mask=rg.padding(lengths))
        attend(q, k, v)
        lengths.data[0] = 71
        with pytest.raises(ValueError, match="the longest is 71"):
            attend(q, k, v)
        lengths.data[0] = -1
        with pytest.raises(ValueError, match="must not be negative"):
            attend(q, k, v)

    def test_keeps_its_gradients_when_it_changes_before_backward(self) -> None:
        bits, (q, k, v) = torch.ones(N, N).tril().bool(), inputs()
        for engine in ("native", "tiled", "reference", "sdpa"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            doubles = [x.double().requires_grad_() for x in (q, k, v)]
            out = rg.Attention(mask=bits)(*leaves, engine=engine)
            expected = torch.autograd.grad(attended(*doubles, bits.clone()).sum(), doubles)
            bits.data.logical_not_()
            grads = torch.autograd.grad(out.sum(), leaves)
            bits.data.logical_not_()
            assert all(close(a, b) for a, b in zip(grads, expected, strict=True)), engine

    def test_offsets_are_read_in_every_call(self) -> None:
        offset, (q, k, v) = torch.tensor([0, 40], dtype=torch.int32), inputs()
        q = q[:, :, :20]
        attend = rg.Attention(mask=rg.causal(), offset=offset)
        for content in ([0, 40], [50, 3]):
            offset.data.copy_(torch.tensor(content))
            allowed = torch.arange(20)[:, None] + torch.tensor(content)[:, None, None, None] >= J
            assert close(attend(q, k, v), attended(q, k, v, allowed))

    def test_a_bias_is_read_in_every_call(self) -> None:
        bias, (q, k, v) = torch.zeros(N, N), inputs()
        attend = rg.Attention(bias=bias)
        for content in (torch.zeros(N, N), torch.randn(N, N)):
            bias.data.copy_(content)
            assert close(attend(q, k, v), attended(q, k, v, torch.ones(N, N).bool(), content.double()))

    def test_lists_are_read_once(self) -> None:
        lengths = [9, 70]
        mask = rg.padding(lengths)
        lengths[0] = 50
        assert mask == rg.padding([9, 70])

    def test_a_numpy_array_is_held_too(self) -> None:
        array, (q, k, v) = np.array([9, 70]), inputs()
        attend = rg.Attention(mask=rg.padding(array))
        for lengths in ([9, 70], [60, 3]):
            array[:] = lengths
            assert close(attend(q, k, v), attended(q, k, v, torch.tensor(lengths)[:, None, None, None] > J))


class TestAFunctionOfAMask:
    def test_may_read_anything(self) -> None:
        class Rule:
            reach = 3

            def allows(self, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
                return j - p <= self.reach

        rule, (q, k, v) = Rule(), inputs()
        attend = rg.Attention(mask=rg.where(rule.allows))
        for reach in (3, 9):
            rule.reach = reach
            assert close(attend(q, k, v), attended(q, k, v, reach >= J - P))

    def test_may_read_numbers_arrays_and_other_functions(self) -> None:
        (q, k, v), number, array, default = inputs(), 1, np.array([2]), torch.tensor(4)

        def inner(p: Tensor, j: Tensor) -> Tensor:
            return j - p <= number + int(array[0])

        def rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor, more: Tensor = default) -> Tensor:
            return inner(p - more, j)

        attend = rg.Attention(mask=rg.where(rule))
        assert close(attend(q, k, v), attended(q, k, v, J - P <= 1 + 2 - 4))
        number = 7
        assert close(attend(q, k, v), attended(q, k, v, J - P <= 7 + 2 - 4))
        array[0] = 20
        assert close(attend(q, k, v), attended(q, k, v, J - P <= 7 + 20 - 4))
        default.data.fill_(1)
        assert close(attend(q, k, v), attended(q, k, v, J - P <= 7 + 20 - 1))

    def test_of_the_same_code_and_state_shares_cache_entries(self) -> None:
        q, k, v = inputs()
        for _ in range(3):
            rg.attention(q, k, v, mask=rg.where(lambda b, h, p, j: j - p <= 3))
        entries = rg.cache_info().entries
        rg.attention(q, k, v, mask=rg.where(lambda b, h, p, j: j - p <= 4))
        assert rg.cache_info().entries > entries
        assert entries <= 6

    def test_that_changes_before_backward_raises(self) -> None:
        reach, (q, k, v) = torch.tensor(3), inputs()
        leaf = q.clone().requires_grad_()
        out = rg.attention(leaf, k, v, mask=rg.where(lambda b, h, p, j: j - p <= reach), engine="tiled")
        reach.data.fill_(5)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            out.sum().backward()

    def gradient_after_a_change(
        self, mask: rg.Mask, change: Callable[[], object], engine: str
    ) -> tuple[Tensor, Tensor]:
        """The gradient before a value that the mask reads changes, and after it."""
        q, k, v = inputs()
        leaf = q.clone().requires_grad_()
        out = rg.attention(leaf, k, v, mask=mask, engine=engine).square().sum()
        (before,) = torch.autograd.grad(out, leaf, retain_graph=True)
        change()
        return before, torch.autograd.grad(out, leaf)[0]

    @pytest.mark.parametrize("limit", [0, 256 * 2**20])
    def test_that_changes_before_backward_of_the_kernels_does_not_matter(self, limit: int) -> None:
        rg.set_cache_limit(limit)
        reach = torch.tensor(3)
        mask = rg.where(lambda b, h, p, j: j - p <= reach)
        before, after = self.gradient_after_a_change(mask, lambda: reach.data.fill_(5), "native")
        assert torch.equal(before, after)

    def test_that_changes_before_backward_raises_where_its_layout_was_evicted(self) -> None:
        reach, (q, k, v) = torch.tensor(3), inputs()
        attend = rg.Attention(mask=rg.where(lambda b, h, p, j: j - p <= reach))

        def change() -> None:
            reach.data.fill_(5)
            rg.clear_cache()

        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            self.gradient_after_a_change(attend.mask, change, "native")
        reach.data.fill_(3)
        assert close(attend(q, k, v), attended(q, k, v, J - P <= 3))

    @pytest.mark.parametrize("engine", ["native", "tiled"])
    def test_that_reads_unknown_objects_may_not_change_before_backward(self, engine: str) -> None:
        class Reach:
            keys = 3

            def __call__(self, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
                return j - p <= self.keys

        reach = Reach()
        expectation = contextlib.nullcontext() if engine == "native" else pytest.raises(RuntimeError, match="different")
        with expectation:
            before, after = self.gradient_after_a_change(rg.where(reach), lambda: setattr(reach, "keys", 1), engine)
            assert torch.equal(before, after)


class TestTheLimit:
    def test_fresh_masks_leave_nothing_behind(self) -> None:
        q, k, v = inputs(1, 1400)
        rg.Attention(mask=torch.rand(1400, 1400) > 0.5)(q, k, v)
        base = rg.cache_info().nbytes
        for _ in range(3):
            rg.Attention(mask=torch.rand(1400, 1400) > 0.5)(q, k, v)
            rg.attention(q, k, v, mask=rg.causal() & rg.dense(torch.rand(1400, 1400) > 0.5))
        assert rg.cache_info().nbytes - base < 50_000

    def test_it_holds_for_living_objects(self) -> None:
        q, k, v = inputs(1, 640)
        rg.set_cache_limit(300_000)
        held = [rg.Attention(mask=torch.rand(640, 640) > 0.5) for _ in range(8)]
        for attend in held * 2:
            output = attend(q, k, v)
            assert rg.cache_info().nbytes <= 300_000
            assert isinstance(attend.mask, rg.Mask)
            assert close(output, attended(q, k, v, attend.mask.tensors()[0]))
        assert rg.cache_info().nbytes > 50_000

    def test_what_was_used_last_stays(self) -> None:
        cache = Cache(limit=4 * (800 + 512))
        for name in "abcd":
            cache.get_or_build(name, lambda: np.zeros(100))
        cache.get_or_build("a", lambda: np.ones(100))
        cache.get_or_build("e", lambda: np.zeros(100))
        assert cache.get_or_build("a", lambda: np.ones(100)).max() == 0
        assert cache.get_or_build("b", lambda: np.ones(100)).max() == 1

    def test_nothing_is_kept_at_a_limit_of_0_and_all_is_right(self) -> None:
        rg.set_cache_limit(0)
        q, k, v = inputs()
        attend = rg.Attention(mask=rg.documents(torch.arange(N) // 20) & rg.causal())
        for _ in range(2):
            assert close(attend(q, k, v), attended(q, k, v, _documents(torch.arange(N) // 20) & (J <= P)))
        assert rg.cache_info().entries == 0

    @pytest.mark.parametrize("limit", [-1, 1.5, True, "1 GB", None])
    def test_a_limit_is_a_number_of_bytes(self, limit: Any) -> None:
        with pytest.raises(ValueError, match="whole number of bytes"):
            rg.set_cache_limit(limit)

    def test_clearing_drops_plans_too(self) -> None:
        q, k, v = inputs()
        attend = rg.Attention(mask=rg.causal())
        attend(q, k, v)
        assert rg.cache_info().entries > 0
        rg.clear_cache()
        assert rg.cache_info() == rg.CacheInfo(0, rg.cache_info().limit, 0, 0, 0)
        assert not attend.__dict__["_plans"]
        assert close(attend(q, k, v), attended(q, k, v, J <= P))

    def test_an_attention_takes_its_plans_with_it(self) -> None:
        q, k, v = inputs()
        attend = rg.Attention(mask=rg.causal())
        attend(q, k, v)
        plans = attend.__dict__["_plans"]
        del attend
        gc.collect()
        rg.cache_info()
        assert not plans

    def test_an_entry_goes_with_its_owner_unless_it_is_small(self) -> None:
        class Owner:
            pass

        cache, owner = Cache(limit=10**8), Owner()
        cache.put("theirs", "value", 10, owner=owner)
        cache.put("ours", "value", 10)
        del owner
        gc.collect()
        assert cache.info().entries == 1

    def test_threads_may_share_it(self) -> None:
        rg.set_cache_limit(60_000)
        q, k, v = inputs()
        masks = [torch.rand(N, N, generator=RANDOM) > 0.5 for _ in range(6)]
        attentions = [rg.Attention(mask=mask) for mask in masks]
        expected = [attended(q, k, v, mask) for mask in masks]
        wrong: list[Any] = []

        def work(start: int) -> None:
            try:
                for n in range(60):
                    at = (start + n) % len(masks)
                    if not close(attentions[at](q, k, v), expected[at]):
                        wrong.append(at)
                    if n % 20 == 0:
                        rg.clear_cache()
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert 0 <= rg.cache_info().nbytes <= 60_000

    def test_memory_of_60_steps_with_fresh_masks_stays_near_it(self) -> None:
        code = """
import psutil, torch, regard as rg
limit = 8 * 2**20
rg.set_cache_limit(limit)
q, k, v = (torch.randn(8, 1, 512, 8, requires_grad=True) for _ in range(3))
def step():
    rg.attention(q, k, v, mask=rg.dense(torch.rand(8, 1, 512, 512) > 0.5)).sum().backward()
    rg.Attention(mask=torch.rand(8, 1, 512, 512) > 0.5)(q, k, v)
    assert rg.cache_info().nbytes <= limit, rg.cache_info()
for _ in range(4):
    step()
before = psutil.Process().memory_info().rss
for _ in range(60):
    step()
grown = (psutil.Process().memory_info().rss - before) / 1e6
assert grown < 40, grown  # the masks of all steps are 250 MB, their layouts 31 MB
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


class TestCompiled:
    """A graph has read the mask once: it must not use old values after the tensor has changed."""

    @pytest.mark.parametrize("name", ["dense", "padding", "edges", "composed"])
    def test_a_mask_from_outside_raises_after_a_change(self, name: str) -> None:
        torch.compiler.reset()
        make, allowed, first, second = MASKS[name]
        tensor, (q, k, v) = first.clone(), inputs()
        attend = rg.Attention(mask=make(tensor))
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert close(compiled(q, k, v), attended(q, k, v, allowed(first)))
        tensor.data.copy_(second)
        with pytest.raises(RuntimeError, match=r"changed after torch\.compile"):
            compiled(q, k, v)
        torch.compiler.reset()
        assert close(compiled(q, k, v), attended(q, k, v, allowed(second)))

    def test_a_function_that_reads_a_tensor_is_called_in_every_call(self) -> None:
        torch.compiler.reset()
        reach, (q, k, v) = torch.tensor(3), inputs()
        attend = rg.Attention(mask=rg.where(lambda b, h, p, j: j - p <= reach))
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for n in (3, 9):
            reach.data.fill_(n)
            assert close(compiled(q, k, v), attended(q, k, v, n >= J - P))

    def test_a_mask_from_inside_follows_its_argument(self) -> None:
        torch.compiler.reset()
        q, k, v = inputs()
        compiled = torch.compile(
            lambda bits: rg.attention(q, k, v, mask=rg.causal() & rg.dense(bits)), fullgraph=True, backend="aot_eager"
        )
        bits = torch.ones(N, N).bool()
        assert close(compiled(bits), attended(q, k, v, J <= P))
        bits.data.copy_(J > P - 3)
        assert close(compiled(bits), attended(q, k, v, (J <= P) & (J > P - 3)))


def test_a_mask_is_copied_only_when_it_changes() -> None:
    bits, (q, k, v) = torch.rand(N, N) > 0.5, inputs()
    attend = rg.Attention(mask=bits)
    attend(q, k, v)
    assert isinstance(attend.mask, rg.Mask)
    snapshot = attend.mask.snapshot()
    misses = rg.cache_info().misses
    attend(q, k, v)
    assert attend.mask.snapshot() is snapshot
    assert rg.cache_info().misses == misses
