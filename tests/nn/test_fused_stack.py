"""Frozen stacks in one call of the kernels, against the same modules in float64."""

import pytest
import torch
from torch import nn

import regard as rg
import regard.view
from regard.engines import native
from regard.nn import fused_stack

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
ROTARY = rg.nn.Rotary()
CONFIGS = {
    "gpt2": {},
    "llama": {"rotary": ROTARY, "norm": "rms", "gated": True, "bias": False, "activation": "silu", "kv_heads": 2},
    "part rotated": {"rotary": rg.nn.Rotary(d_rotary=6), "norm": "rms", "gated": True, "activation": "gelu"},
    "interleaved": {"rotary": rg.nn.Rotary(interleaved=True), "activation": "quick_gelu", "kv_heads": 1},
    "post": {"arrangement": "post", "activation": "relu"},
    "tanh, gated": {"activation": "tanh", "gated": True, "qkv_bias": False},
}


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of the kernel."""
    calls, run = [], fused_stack.run_stack
    monkeypatch.setattr(fused_stack, "run_stack", lambda *args: calls.append(1) or run(*args))
    return calls


def build(**options):
    sizes = {"vocabulary": 96, "d_model": 64, "layers": 2, "heads": 4, "d_hidden": 96}
    torch.manual_seed(0)
    model = rg.models.LanguageModel(rg.models.LanguageConfig(**sizes | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() < 2 else 0.0, 0.3)
    return model


def tokens(*shape):
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_outputs_and_generation_are_those_of_the_modules(name, calls):
    model, ids, prompts = build(**CONFIGS[name]), tokens(2, 9), [tokens(5), tokens(9)]
    double = build(**CONFIGS[name]).double()
    rg.nn.freeze(model)
    output, expected = model(ids), double(ids)
    assert len(calls) == 1
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()
    for given in (ids, prompts, tokens(1, 70)):  # the caches grow beyond their first capacity
        for ours, theirs in zip(
            model.generate(given, max_new_tokens=8), double.generate(given, max_new_tokens=8), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert len(calls) == 25


@torch.inference_mode()
def test_masks_and_packed_sequences(calls):
    model, double, ids = build(), build().double(), tokens(2, 9)
    rg.nn.freeze(model)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    torch.testing.assert_close(model(ids, mask)[mask].double(), double(ids, mask)[mask], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(model([ids[0], ids[1, :4]]), double([ids[0], ids[1, :4]]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2


def encoder(attend, **options):
    torch.manual_seed(0)
    blocks = [
        rg.nn.Block(
            rg.nn.MultiHeadAttention(64, 4, attend=attend, **options), rg.nn.FeedForward(64, 96),
            residual=lambda: rg.nn.PreNorm(64),
        )
        for _ in range(2)
    ]  # fmt: skip
    return rg.nn.Encoder(blocks).eval()


@torch.inference_mode()
def test_positions_of_one_row_are_those_of_all_rows(calls):
    stack, x = encoder(rg.Attention(mask=rg.causal()), rotary=rg.nn.Rotary()), torch.randn(3, 5, 64)
    positions = torch.arange(5)[None] + 7
    expected = stack(x, context=rg.nn.LayerContext(positions=positions))
    rg.nn.freeze(stack)
    torch.testing.assert_close(stack(x, context=rg.nn.LayerContext(positions=positions)), expected)
    assert calls


@torch.inference_mode()
def test_every_step_reads_the_sink(calls):
    stack, x = encoder(rg.Attention(mask=rg.causal(), sink=3.0)), torch.randn(2, 12, 64)
    expected = stack(x)
    rg.nn.freeze(stack)
    cache, steps = stack.cache(), []
    for token in x.split(1, 1):
        steps.append(stack(token, cache=cache))
        torch.full((4,), 1e3)  # where a freed sink was
    torch.testing.assert_close(torch.cat(steps, 1), expected)
    assert len(calls) == 12


def set_eps(model):
    for residual in (model.stack.layers[0].attention_residual, model.stack.layers[0].feedforward_residual):
        residual.norm.eps = 1.0


CHANGES = {
    "norm": lambda model: model.stack.layers[0].attention_residual.norm.weight.mul_(2),
    "data": lambda model: setattr(model.stack.layers[0].attention_residual.norm.bias, "data", torch.ones(64)),
    "bias": lambda model: setattr(model.stack.layers[0].attention.qkv, "bias", nn.Parameter(torch.ones(192), False)),
    "activation": lambda model: setattr(model.stack.layers[0].feedforward, "activation", torch.tanh),
    "eps": set_eps,
    "module": lambda model: setattr(model.stack.layers[0], "feedforward", build().stack.layers[1].feedforward),
    "forward": lambda model: setattr(model.stack.layers[0].feedforward, "forward", torch.zeros_like),
    "fewer blocks": lambda model: setattr(model.stack, "layers", model.stack.layers[:1]),
    "order of blocks": lambda model: setattr(model.stack, "layers", nn.ModuleList([*model.stack.layers][::-1])),
    "another block": lambda model: model.stack.layers.append(build(layers=3).stack.layers[2]),
    "repeat": lambda model: setattr(model.stack, "repeat", 2),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_of_a_norm_a_bias_or_a_module_is_used(change, calls):
    model, other, ids = build(), build(), tokens(1, 5)
    rg.nn.freeze(model)
    before = model(ids)
    CHANGES[change](model)
    CHANGES[change](other)
    after = model(ids)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, other(ids), rtol=1e-4, atol=1e-4)
    assert calls


@torch.inference_mode()
def test_biases_and_gains_of_other_sizes_are_those_of_torch(calls):
    model, other, ids = build(), build(), tokens(1, 5)
    rg.nn.freeze(model)
    for each in (model, other):
        each.stack.layers[0].attention.output.bias = nn.Parameter(torch.ones(1))
    torch.testing.assert_close(model(ids), other(ids), rtol=1e-4, atol=1e-4)
    model.stack.layers[0].attention_residual.norm.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="weight"):
        model(ids)
    assert not calls


@pytest.mark.parametrize("part", ["attention_residual", "feedforward_residual", "feedforward", "attention.attend"])
@torch.no_grad()
def test_dropout_that_is_left_on_is_drawn(part, calls):
    model, ids = build(dropout=0.5), tokens(1, 5)
    rg.nn.freeze(model)
    before = model(ids)
    dropping = model.stack.layers[1].get_submodule(part)
    if part == "feedforward":  # the configuration has none there
        dropping.dropout = 0.5
    assert dropping.dropout
    for _ in range(2):
        dropping.train()  # as for Monte Carlo dropout
        assert not torch.equal(model(ids), model(ids))
        model.eval()
        torch.testing.assert_close(model(ids), before)
    assert len(calls) == 3


def test_hooks_captures_and_gradients_use_the_modules(calls):
    model, ids, seen = build(), tokens(1, 5), []
    rg.nn.freeze(model)
    handle = model.stack.layers[1].attention.register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        model(ids)
        handle.remove()
        with regard.view.capture(model) as record:
            model(ids)
    assert seen == [1]
    assert len(record) == 2
    model(ids).sum().backward()
    assert not calls
    assert model.stack.layers[0].attention_residual.norm.weight.grad is not None


@torch.inference_mode()
def test_other_blocks_and_caches_use_the_modules(calls):
    for options in ({"arrangement": "sandwich"}, {"qk_norm": True}, {"norm": "unit_rms"}):
        model, double, ids = build(**options), build(**options).double(), tokens(1, 7)
        rg.nn.freeze(model)
        torch.testing.assert_close(model(ids).double(), double(ids), rtol=1e-4, atol=1e-4)
    model, double = build(windows=(4, None)), build(windows=(4, None)).double()
    rg.nn.freeze(model)
    assert torch.equal(*(each.generate(tokens(1, 7), max_new_tokens=9)[0] for each in (model, double)))
    assert not calls


@torch.inference_mode()
def test_an_interrupted_stream_continues_with_the_thawed_weights(calls):
    model = build()
    rg.nn.freeze(model)
    stream = model.stream(tokens(5), max_new_tokens=8)
    first = [next(stream) for _ in range(4)]
    rg.nn.thaw(model)
    assert first + list(stream) == build().double().generate(tokens(1, 5), max_new_tokens=8)[0].tolist()
    assert len(calls) == 4


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@torch.inference_mode()
def test_rounded_weights(weights, calls):
    model, ids = build(**CONFIGS["llama"]), tokens(2, 9)
    assert rg.nn.freeze(model, weights=weights) == {}
    output, generated = model(ids), model.generate(ids, max_new_tokens=6)
    assert len(calls) == 7
    handle = model.stack.layers[0].register_forward_hook(lambda *_: None)  # then the modules run one by one
    modules, again = model(ids), model.generate(ids, max_new_tokens=6)
    handle.remove()
    assert len(calls) == 7
    with pytest.warns(UserWarning, match=f"rounded to .{weights}"):
        rg.nn.thaw(model)
    double = model.double()
    expected = double(ids)
    rounds = weights != "bfloat16" and native.rounds_inputs()  # inputs of products to 8 bits
    assert (output - expected).norm() < (4e-2 if rounds else 1e-5) * expected.norm()
    assert (output - modules).norm() < (1e-2 if rounds else 1e-5) * expected.norm()
    assert all(map(torch.equal, generated, again))
    assert rounds or all(map(torch.equal, generated, double.generate(ids, max_new_tokens=6)))
