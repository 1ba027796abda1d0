"""Copies, files, conversion, export and memory of frozen models."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard.engines.packed_linear import PackedWeight
from tests.nn.test_freeze import IDS, THAW, expected_logits, frozen, language_model, needs_kernels, write_data


@needs_kernels
@torch.no_grad()
def test_copies_and_pickles_are_independent_frozen_models():
    model, buffer = frozen(), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(IDS), model(IDS))
        with pytest.raises(RuntimeError, match=THAW):
            write_data(other)
        rg.nn.thaw(other)
        write_data(other)
        torch.testing.assert_close(other(IDS).double(), expected_logits(other.state_dict()), atol=1e-3, rtol=1e-4)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    language_model().load_state_dict(torch.load(buffer))


@needs_kernels
def test_state_and_saved_files_have_the_original_weights(tmp_path):
    model, plain = frozen(), language_model()
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, plain.get_parameter(name))
    assert nn.Sequential(model).state_dict().keys() == {f"0.{name}" for name in plain.state_dict()}
    assert type(nn.Sequential(model).state_dict()["0.embedding.weight"]) is torch.Tensor
    rg.save(model, tmp_path)
    for name, tensor in rg.load(tmp_path).state_dict().items():
        assert torch.equal(tensor, plain.get_parameter(name))


@needs_kernels
@pytest.mark.parametrize("convert", ["bfloat16", "double", "half"])
def test_dtype_conversion_of_a_frozen_model_raises(convert):
    model = frozen()
    assert isinstance(model.float().to("cpu").embedding.weight, PackedWeight)
    with pytest.raises(RuntimeError, match=THAW):
        getattr(model, convert)()
    rg.nn.thaw(model)
    getattr(model, convert)()


@needs_kernels
def test_a_failed_conversion_changes_nothing():
    model = frozen(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 3)))
    outer = nn.Sequential(model)
    for converted in (model, outer, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=THAW):
            converted.double()
        assert {tensor.dtype for tensor in converted.state_dict().values()} == {torch.float32}
        assert converted.float().to("cpu") is converted
    rg.nn.thaw(model)
    assert {tensor.dtype for tensor in outer.double().state_dict().values()} == {torch.float64}


@needs_kernels
def test_a_frozen_model_is_garbage_collected():
    model = frozen()
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


@needs_kernels
@torch.no_grad()
def test_state_dict_of_a_module_that_shares_a_packed_weight_is_plain():
    model = language_model()
    head, before = nn.Linear(64, 5000, bias=False), model.embedding.weight.detach().clone()
    head.weight = model.embedding.weight
    rg.nn.freeze(model)
    assert isinstance(head.weight, PackedWeight)
    (weight,) = head.state_dict().values()
    assert type(weight) is torch.Tensor
    assert torch.equal(weight, before)
    assert head.state_dict(keep_vars=True)["weight"] is head.weight
    rg.nn.thaw(model)
    assert torch.equal(head.weight, before)


@needs_kernels
def test_export_of_a_frozen_model_raises():
    layer, x = frozen(rg.nn.FeedForward(64, 96)), torch.randn(2, 64)
    with pytest.raises(RuntimeError, match=THAW):
        torch.export.export(layer, (x,))
    with pytest.raises(RuntimeError, match=THAW), warnings.catch_warnings(action="ignore"):
        torch.jit.trace(layer, (x,))
    rg.nn.thaw(layer)
    torch.export.export(layer, (x,))


@needs_kernels
def test_a_frozen_model_can_be_compiled_and_thawed():
    layer, x = frozen(rg.nn.FeedForward(64, 96)), torch.randn(2, 64)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
        rg.nn.thaw(layer)
        layer.up.weight.data[3] = 5
        torch.testing.assert_close(compiled(x), layer(x))


@needs_kernels
def test_autocast_matches_plain_weights():
    plain = rg.nn.FeedForward(64, 96)
    layer, x = frozen(copy.deepcopy(plain)), torch.randn(2, 64)
    with torch.inference_mode(), torch.autocast("cpu"):
        assert torch.equal(layer(x), plain(x))
    with pytest.raises(RuntimeError):
        layer(x.bfloat16())


@needs_kernels
def test_a_weight_used_by_a_live_graph_is_not_packed():
    model = language_model()
    held = model(IDS)
    with pytest.raises(RuntimeError, match="in use elsewhere"):
        rg.nn.freeze(model)
    assert not any(isinstance(each, PackedWeight) for each in model.parameters())
    held.sum().backward()
    del held
    assert rg.nn.freeze(model) == {}


@needs_kernels
def test_every_weight_is_stored_once():
    model = language_model()
    expected = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    rg.nn.freeze(model)
    with torch.inference_mode():
        model(IDS)
    gc.collect()
    own = {id(each) for parameter in model.parameters() for each in (parameter, getattr(parameter, "panels", None))}
    left = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and id(each) not in before | own]
    held = sum(getattr(each, "panels", each).nbytes for each in model.parameters())
    assert held <= 1.1 * expected
    assert sum(each.nbytes for each in left) < 0.01 * expected
    assert F.linear(torch.ones(64), model.embedding.weight).shape == (5000,)


MEMORY = """
import gc, sys, torch, regard as rg

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))

rg.nn.freeze(torch.nn.Linear(64, 64))
before = resident()
model = build()
rg.nn.freeze(model)
with torch.inference_mode():
    model(torch.ones(2, 1024))
gc.collect()
frozen = (resident() - before) / sum(each.nbytes for each in model.parameters())
rg.nn.thaw(model)
print(frozen, (resident() - before) / sum(each.nbytes for each in model.parameters()))
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_frozen_model_needs_no_extra_memory():
    completed = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=120)
    frozen, thawed = map(float, completed.stdout.split())
    assert frozen <= 1.1
    assert thawed <= 1.1


@needs_kernels
def test_load_can_return_a_frozen_model(tmp_path):
    rg.save(language_model(), tmp_path)
    model = rg.load(tmp_path, frozen=True)
    assert isinstance(model.embedding.weight, PackedWeight)
    assert rg.nn.freeze(model) == {}
    assert not isinstance(rg.load(tmp_path).embedding.weight, PackedWeight)
    narrow = rg.load(tmp_path, frozen=True, dtype=torch.bfloat16)
    assert "bfloat16" in rg.nn.freeze(narrow)["embedding.weight"]
