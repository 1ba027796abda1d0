"""`replace` keeps the contract of torch, except for rows without visible keys."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from regard.integrations.torch import MultiheadAttention, Report, replace

B, H, Q, K, E = 3, 4, 7, 9, 32
MODULES: dict[str, dict[str, Any]] = {
    "plain": {"batch_first": True},
    "length first": {},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 20, "vdim": 24, "batch_first": True},
    "learned key": {"add_bias_kv": True, "batch_first": True},
    "zero key": {"add_zero_attn": True},
    "both more keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "odd heads": {"heads": 1, "batch_first": True},
}


def module(heads: int = H, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, heads, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    return theirs


def both(theirs: nn.Module) -> tuple[Any, Any]:
    return theirs, replace(copy.deepcopy(theirs))


def report_of(model: nn.Module) -> Report:
    reports: list[Report] = []
    assert replace(model, report=reports.append) is model
    return reports[0]


def inputs(theirs: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    torch.manual_seed(1)
    tensors = [torch.randn(n, B, width) for n, width in ((Q, E), (K, theirs.kdim), (K, theirs.vdim))]
    if not batched:
        return [tensor[:, 0] for tensor in tensors]
    return [tensor.transpose(0, 1) if theirs.batch_first else tensor for tensor in tensors]


def masks(name: str, heads: int, batched: bool = True) -> dict[str, Tensor]:
    """Masks in the convention of torch, without fully hidden rows."""
    torch.manual_seed(2)
    forbid = torch.rand(Q, K) < 0.4
    forbid[:, 1] = False
    padded = torch.arange(K) >= torch.tensor([K, 5, 2])[:, None]
    padded = padded if batched else padded[1]
    each = (torch.rand(B * heads if batched else heads, Q, K) < 0.4).index_fill(-1, torch.tensor(1), False)
    return {
        "none": {},
        "forbids": {"attn_mask": forbid},
        "adds": {"attn_mask": torch.randn(Q, K)},
        "adds and forbids": {"attn_mask": torch.randn(Q, K).masked_fill(forbid, float("-inf"))},
        "of each head": {"attn_mask": each},
        "padding": {"key_padding_mask": padded},
        "added to keys": {"key_padding_mask": torch.randn(padded.shape)},
        "padding with holes": {"key_padding_mask": padded | (torch.arange(K) == 0)},
        "both": {"attn_mask": forbid, "key_padding_mask": padded},
        "both added": {
            "attn_mask": torch.randn(Q, K),
            "key_padding_mask": torch.zeros(padded.shape).masked_fill(padded, float("-inf")),
        },
    }[name]


MASKS = [
    "none", "forbids", "adds", "adds and forbids", "of each head", "padding", "added to keys", "padding with holes",
    "both", "both added",
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", MODULES)
def test_output_and_weights_are_those_of_torch(kind: str, mask: str) -> None:
    theirs, ours = both(module(**MODULES[kind]).eval())
    for batched in (True, False):
        x, given = inputs(theirs, batched), masks(mask, theirs.num_heads, batched)
        expected, weights = theirs(*x, **given, average_attn_weights=False)
        output, all_weights = ours(*x, **given, average_attn_weights=False)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(all_weights, weights, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours(*x, **given)[1], theirs(*x, **given)[1], atol=1e-5, rtol=1e-5)
        without, nothing = ours(*x, **given, need_weights=False)
        torch.testing.assert_close(without, expected, atol=1e-5, rtol=1e-5)
        assert nothing is None
        assert without.is_contiguous()


@pytest.mark.parametrize("mask", ["none", "adds and forbids", "both", "both added"])
@pytest.mark.parametrize("kind", ["plain", "other widths", "both more keys"])
def test_gradients_are_those_of_torch(kind: str, mask: str) -> None:
    theirs, ours = both(module(**MODULES[kind]).double())
    x = [tensor.double() for tensor in inputs(theirs)]
    given = {name: t.double() if t.is_floating_point() else t for name, t in masks(mask, theirs.num_heads).items()}
    results = []
    for one in (theirs, ours):
        leaves = [tensor.clone().requires_grad_() for tensor in x]
        extra = {name: tensor.clone().requires_grad_() for name, tensor in given.items() if tensor.is_floating_point()}
        one(*leaves, **(given | extra), need_weights=False)[0].square().sum().backward()
        grads = [parameter.grad for parameter in one.parameters()] + [tensor.grad for tensor in leaves]
        results.append([*grads, *(tensor.grad.nan_to_num() for tensor in extra.values())])
    for grad, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-10, rtol=1e-10)


def test_the_causal_hint_equals_the_causal_mask() -> None:
    theirs, ours = both(module(batch_first=True).eval())
    x = torch.randn(B, Q, E)
    mask = nn.Transformer.generate_square_subsequent_mask(Q)
    padded = torch.arange(Q) >= torch.tensor([Q, 5, 2])[:, None]
    for forbids in (mask, mask != 0):
        expected = theirs(x, x, x, attn_mask=forbids)[0]
        for hint in (False, True):
            for weights in (False, True):
                output = ours(x, x, x, attn_mask=forbids, is_causal=hint, need_weights=weights)[0]
                torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        expected = theirs(x, x, x, attn_mask=forbids, key_padding_mask=padded.to(forbids), is_causal=True)[0]
        if forbids.dtype == torch.bool:
            output = ours(x, x, x, attn_mask=forbids, key_padding_mask=padded, is_causal=True)[0]
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["learned key", "zero key", "both more keys"])
def test_additional_keys_are_visible_with_the_causal_hint(kind: str) -> None:
    theirs, ours = both(module(**MODULES[kind]).eval())
    x = torch.randn(Q, Q, E)
    mask = torch.ones(Q, Q, dtype=torch.bool).triu(1)
    expected = theirs(x, x, x, attn_mask=mask)[0]  # torch fails here without weights and with the hint
    output = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_query_without_visible_keys_returns_the_output_bias() -> None:
    theirs, ours = both(module(batch_first=True).eval())
    x = torch.randn(2, Q, E)
    padded = torch.zeros(2, Q, dtype=torch.bool)
    padded[0] = True
    assert theirs(x, x, x, key_padding_mask=padded, need_weights=True)[0][0].isnan().all()
    output, weights = ours(x, x, x, key_padding_mask=padded)
    torch.testing.assert_close(output[0], theirs.out_proj.bias.expand(Q, E))
    assert (weights[0] == 0).all()
    torch.testing.assert_close(output[1], theirs(x, x, x)[0][1], atol=1e-5, rtol=1e-5)


def test_dropout_is_active_in_training_only_and_reproducible() -> None:
    _, ours = both(module(dropout=0.5, batch_first=True))
    x = torch.randn(B, Q, E)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(ours(x, x, x, need_weights=False)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_parameters_keys_and_hooks_are_kept() -> None:
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2)
    parameters, keys = dict(theirs.named_parameters()), list(theirs.state_dict())
    calls = []
    theirs.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    original = copy.deepcopy(theirs)
    report = report_of(theirs)
    assert report.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert str(report) == "replaced 2 nn.MultiheadAttention: layers.0.self_attn, layers.1.self_attn"
    assert list(theirs.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in theirs.named_parameters())
    original.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(original.state_dict())
    theirs(torch.randn(B, Q, E))
    assert calls == [1]


def test_the_model_may_be_the_module_and_changes_are_reported() -> None:
    class Own(nn.MultiheadAttention):
        pass

    single = module()
    assert report_of(single).replaced == ("MultiheadAttention",)
    assert isinstance(single, MultiheadAttention)
    assert isinstance(single, nn.MultiheadAttention)
    again = report_of(nn.ModuleDict({"old": single, "own": Own(E, H), "new": module()}))
    assert again.replaced == ("new",)
    assert "skipped own: Own is a subclass" in str(again)
    assert "skipped old: already runs regard" in str(again)
    assert str(report_of(nn.Linear(2, 2))) == "replaced 0 nn.MultiheadAttention: none"


def test_a_replaced_module_can_be_copied_and_saved() -> None:
    _, ours = both(module(batch_first=True).eval())
    x = torch.randn(B, Q, E)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is MultiheadAttention
        assert torch.equal(again(x, x, x)[0], ours(x, x, x)[0])
    stored = io.BytesIO()
    torch.save(ours.state_dict(), stored)
    stored.seek(0)
    fresh = nn.MultiheadAttention(E, H, batch_first=True)
    fresh.load_state_dict(torch.load(stored))
    torch.testing.assert_close(fresh.eval()(x, x, x)[0], ours(x, x, x)[0], atol=1e-5, rtol=1e-5)


def test_a_new_module_is_initialised_like_that_of_torch() -> None:
    for options in ({}, {"kdim": 20, "vdim": 24, "add_bias_kv": True}):
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(E, H, **options).state_dict()
        torch.manual_seed(0)
        ours = MultiheadAttention(E, H, **options).state_dict()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        assert list(ours) == list(theirs)


def calls_of(model: nn.Module) -> list[int]:
    """A list that grows with every call of a replaced module."""
    calls: list[int] = []
    for part in model.modules():
        if isinstance(part, MultiheadAttention):
            project = part._project
            part._project = lambda *x, project=project: calls.append(1) or project(*x)  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
def test_an_encoder_in_eval_does_not_bypass_the_module(mask: str, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, norm_first=norm_first)
    theirs, ours = both(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval())
    calls = calls_of(ours)
    x, padded = torch.randn(B, Q, E), torch.arange(Q) >= torch.tensor([Q, 5, 2])[:, None]
    given: dict[str, Tensor] = {"src_key_padding_mask": padded} if mask in ("padding", "both") else {}
    if mask in ("causal", "both"):
        given["mask"] = torch.ones(Q, Q, dtype=torch.bool).triu(1)
    with torch.no_grad():  # torch converts padded inputs to nested tensors here
        torch.testing.assert_close(ours(x, **given), theirs(x, **given), atol=1e-5, rtol=1e-5)
    assert len(calls) == 2
    torch.testing.assert_close(ours(x, **given), theirs(x, **given), atol=1e-5, rtol=1e-5)
    assert len(calls) == 4


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_transformer_runs_unchanged(batch_first: bool) -> None:
    torch.manual_seed(0)
    theirs, ours = both(nn.Transformer(E, H, 2, 2, 16, batch_first=batch_first).eval())
    assert len(report_of(copy.deepcopy(theirs)).replaced) == 6
    source, target = torch.randn(K, B, E), torch.randn(Q, B, E)
    if batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padded = torch.arange(K) >= torch.tensor([K, 5, 2])[:, None]
    given = {
        "tgt_mask": torch.ones(Q, Q, dtype=torch.bool).triu(1), "tgt_is_causal": True,
        "src_key_padding_mask": padded, "memory_key_padding_mask": padded,
    }  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(ours(source, target, **given), theirs(source, target, **given), atol=1e-5, rtol=1e-5)
    theirs.train(), ours.train()
    for part in (theirs, ours):
        for inner in part.modules():
            if isinstance(inner, nn.Dropout):
                inner.p = 0.0
            if isinstance(inner, nn.MultiheadAttention):
                inner.dropout = 0.0
    for one in (theirs, ours):
        one(source, target, **given).square().sum().backward()
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, atol=1e-3, rtol=1e-4)


def test_nested_tensors_without_masks() -> None:
    _, ours = both(module(batch_first=True).eval())
    rows = [torch.randn(5, E), torch.randn(2, E)]
    x = torch.nested.as_nested_tensor(rows)
    with torch.no_grad():
        for output, row in zip(ours(x, x, x, need_weights=False)[0].unbind(), rows, strict=True):
            torch.testing.assert_close(output, ours(row, row, row)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="to_padded_tensor"):
        ours(x, torch.nested.as_nested_tensor(rows), x)
    with pytest.raises(ValueError, match="key_padding_mask"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(K, B, E + 1)}, r"key must be \(N, B, E\).* with E = 32, but is \(9, 3, 33\)"),
        ({"query": torch.zeros(Q, E)}, "key must be"),
        ({"value": torch.zeros(K + 1, B, E)}, "same length.*batch_first is False"),
        ({"attn_mask": torch.zeros(K, Q)}, r"attn_mask must be \(7, 9\) or \(12, 7, 9\), but is \(9, 7\)"),
        ({"key_padding_mask": torch.zeros(K, B)}, r"key_padding_mask must be \(3, 9\), but is \(9, 3\)"),
        ({"attn_mask": torch.zeros(Q, K, dtype=torch.int64)}, "True for hidden entries.*but is torch.int64"),
    ],
)
def test_errors_name_the_expected_and_the_given_shape(change: dict[str, Tensor], message: str) -> None:
    _, ours = both(module())
    query, key, value = inputs(ours)
    with pytest.raises((ValueError, TypeError), match=message):
        ours(**({"query": query, "key": key, "value": value} | change))


def test_it_compiles_to_one_graph() -> None:
    _, ours = both(module(batch_first=True).eval())
    x, padded = torch.randn(B, Q, E), torch.arange(Q) >= torch.tensor([Q, 5, 2])[:, None]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for given in ({}, {"key_padding_mask": padded}, {"attn_mask": torch.randn(Q, Q)}):
        with torch.no_grad():
            output, expected = (
                compiled(x, x, x, need_weights=False, **given),
                ours(x, x, x, need_weights=False, **given),
            )
        torch.testing.assert_close(output[0], expected[0], atol=1e-5, rtol=1e-5)


def test_jit_tracing_raises() -> None:
    _, ours = both(module(batch_first=True).eval().requires_grad_(False))
    x = torch.randn(B, Q, E)
    with pytest.raises(NotImplementedError, match="does not record the kernels of regard"):
        torch.jit.trace(lambda x: ours(x, x, x)[0], (x,))


def test_an_edited_mask_is_read_again() -> None:
    theirs, ours = both(module(batch_first=True).eval())
    x, mask = torch.randn(B, Q, E), torch.zeros(Q, Q, dtype=torch.bool)
    for _ in range(3):
        torch.testing.assert_close(ours(x, x, x, attn_mask=mask)[0], theirs(x, x, x, attn_mask=mask)[0])
        mask[:, torch.randint(1, Q, ())] = True
    with torch.inference_mode():
        mask = torch.zeros(Q, Q, dtype=torch.bool)
        before = ours(x, x, x, attn_mask=mask)[0]
        mask[:, 2:] = True
        assert not torch.allclose(before, ours(x, x, x, attn_mask=mask)[0])


def test_eval_at_8192_tokens_does_not_materialise_weights() -> None:
    _, ours = both(nn.MultiheadAttention(16, 2, batch_first=True).eval())
    x, largest = torch.randn(1, 8192, 16), 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                largest = max(largest, tensor.untyped_storage().nbytes() if isinstance(tensor, Tensor) else 0)
            return out

    with torch.no_grad(), Largest():
        ours(x, x, x, need_weights=False)
    assert 0 < largest <= 3 * x.numel() * 4


class TestAMaskThatIsWrittenInto:
    """Writes to a reused mask tensor that do not increase its version counter."""

    def modules(self) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention, Tensor]:
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(16, 2, batch_first=True).eval()
        ours = MultiheadAttention(16, 2, batch_first=True).eval()
        ours.load_state_dict(theirs.state_dict())
        return ours, theirs, torch.randn(2, 6, 16)

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("write", ["numpy", "data", "inference", "dlpack"])
    @pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_is_read_again(self, name: str, write: str, dtype: torch.dtype, need_weights: bool) -> None:
        ours, theirs, x = self.modules()
        shape = (2, 6) if name == "key_padding_mask" else (6, 6)
        array = np.zeros(shape, dtype=bool if dtype == torch.bool else np.float32)
        mask = torch.from_numpy(array)
        for n in range(3):
            content = torch.zeros(shape, dtype=dtype)
            content[:, n + 2 :] = True if dtype == torch.bool else float("-inf")
            content[:, 0] = 0.0
            if write == "numpy":
                array[:] = content.numpy()
            elif write == "data":
                mask.data.copy_(content)
            elif write == "dlpack":
                torch.from_dlpack(mask.view(torch.uint8) if dtype == torch.bool else mask).copy_(content)
            else:
                with torch.inference_mode():
                    mask.copy_(content)
            given = {name: mask, "need_weights": need_weights}
            expected = theirs(x, x, x, **(given | {name: content.clone()}))[0]
            torch.testing.assert_close(ours(x, x, x, **given)[0], expected)

    def test_by_a_collective_is_read_again(self, tmp_path: Path) -> None:
        ours, theirs, x = self.modules()
        mask = torch.zeros(2, 6, dtype=torch.bool)
        ours(x, x, x, key_padding_mask=mask)
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        try:
            gathered = [mask]  # all_gather writes to these tensors
            distributed.all_gather(gathered, torch.tensor([[False] * 4 + [True] * 2] * 2))
        finally:
            distributed.destroy_process_group()
        assert mask.any()
        expected = theirs(x, x, x, key_padding_mask=mask.clone())[0]
        torch.testing.assert_close(ours(x, x, x, key_padding_mask=mask)[0], expected)

    @pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
    @pytest.mark.parametrize("value", [0.0, 0.5])
    def test_may_be_unfrozen_after_its_first_use(self, name: str, value: float) -> None:
        ours, theirs, x = self.modules()
        mask = torch.full((2, 6) if name == "key_padding_mask" else (6, 6), value)
        ours(x, x, x, **{name: mask}, need_weights=False)
        grads = []
        mask.requires_grad_()
        for module in (ours, theirs):
            module(x, x, x, **{name: mask}, need_weights=False)[0].sin().sum().backward()
            assert mask.grad is not None
            grads.append(mask.grad)
            mask.grad = None
        torch.testing.assert_close(*grads)

    def test_does_not_change_what_equal_masks_mean(self) -> None:
        """The cache is by content: an edited mask must not change the result of an equal one."""
        ours, theirs, x = self.modules()
        first, hidden = torch.zeros(6, 6, dtype=torch.bool), torch.zeros(6, 6, dtype=torch.bool)
        for mask in (first, hidden):
            mask[1, 3] = mask[4, 0] = True
        ours(x, x, x, attn_mask=first)
        first.data[:, 2:] = True
        expected = theirs(x, x, x, attn_mask=hidden)[0]
        torch.testing.assert_close(ours(x, x, x, attn_mask=hidden)[0], expected)
