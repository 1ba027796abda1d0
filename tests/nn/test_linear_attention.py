"""Recurrent layers: published definitions, caches, padding, packing and stacks."""

import pytest
import torch
from torch import nn

import regard as rg

LAYERS = {
    "Retention": lambda: rg.nn.Retention(16, 2),
    "GatedLinearAttention": lambda: rg.nn.GatedLinearAttention(16, 2, rank=4),
    "Mamba2": lambda: rg.nn.Mamba2(16, 4, d_state=6, groups=2),
    "DeltaNet": lambda: rg.nn.DeltaNet(16, 2, d_head=4),
    "GatedDeltaNet": lambda: rg.nn.GatedDeltaNet(16, 2, value_heads=4, d_head=4, d_value=6),
}
layers = pytest.mark.parametrize("name", LAYERS)


def build(name):
    torch.manual_seed(0)
    return LAYERS[name]().double()


@layers
def test_a_cache_continues_the_sequence(name):
    layer, x = build(name), torch.randn(2, 11, 16, dtype=torch.float64)
    whole, cache = layer(x), layer.cache()
    parts = [layer(x[:, start:stop], cache=cache) for start, stop in ((0, 1), (1, 3), (3, 9), (9, 10), (10, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert cache.seen_tokens == 11
    cache.reorder(torch.tensor([1, 1, 0]))
    x = x[[1, 1, 0]]
    following = torch.randn(3, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(following, cache=cache), layer(torch.cat([x, following], 1))[:, 11:])


@layers
def test_a_token_depends_on_earlier_tokens_only(name):
    layer, x = build(name), torch.randn(1, 9, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5:] = torch.nan
    torch.testing.assert_close(layer(changed)[:, :5], layer(x)[:, :5])


@layers
def test_padding_on_either_side_and_packing_equal_separate_calls(name):
    layer, x = build(name), torch.randn(2, 8, 16, dtype=torch.float64)
    short = layer(x[1:, :5])
    padded = x.clone()
    padded[1, 5:] = torch.nan
    torch.testing.assert_close(layer(padded, mask=rg.padding([8, 5]))[1:, :5], short)
    torch.testing.assert_close(layer(x[1:, :5].repeat(1, 1, 1), mask=rg.causal()), short)
    shifted = torch.cat([torch.full_like(x[1:, :3], torch.nan), x[1:, :5]], 1)
    mask = torch.arange(8)[None] >= 3
    positions = (torch.arange(8) - 3).clamp(min=0)
    context = rg.nn.LayerContext(rg.nn.key_mask(mask), positions=positions)
    torch.testing.assert_close(layer(shifted, context=context)[:, 3:], short)
    packed = rg.pack([x[0], x[1, :5]])
    context = rg.nn.LayerContext(packed.mask, positions=packed.positions)
    both = layer(packed.values[None], context=context)[0].split(packed.lengths)
    torch.testing.assert_close(both[0], layer(x[:1])[0])
    torch.testing.assert_close(both[1], short[0])


@layers
def test_all_parameters_have_gradients_and_bfloat16_is_near(name):
    layer, x = build(name), torch.randn(1, 40, 16, dtype=torch.float64)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    exact = layer(x).detach()
    rounded = layer.bfloat16()(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_small_outputs_does_not_depend_on_the_dtype(dtype):
    layer, x = build("Retention"), torch.randn(1, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        layer.value.weight.mul_(1e-3)
        exact, actual = layer(x), layer.to(dtype)(x.to(dtype))
    assert (actual - exact).abs().max() < 8 * torch.finfo(dtype).eps * exact.abs().max()


@layers
def test_unsupported_calls_raise(name):
    layer, x = build(name), torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="causal and support padding and packed documents, but not"):
        layer(x, mask=rg.window(1, 0))
    with pytest.raises(ValueError, match="no scores to which a bias"):
        layer(x, context=rg.nn.LayerContext(bias=torch.zeros(4, 4)))
    with pytest.raises(TypeError, match="cache must be a RecurrentCache, got Cache"):
        layer(x, cache=rg.nn.Cache())


@pytest.mark.parametrize("strategy", [rg.nn.Greedy(), rg.nn.Beam(2)])
def test_a_hybrid_stack_generates_with_caches_as_without(strategy):
    torch.manual_seed(0)

    def block(attention):
        return rg.nn.Block(attention, rg.nn.FeedForward(16, 32), residual=lambda: rg.nn.PreNorm(16))

    own = rg.nn.MultiHeadAttention(16, 2, attend=rg.Attention(mask=rg.causal()))
    stack = rg.nn.Encoder([block(build("GatedDeltaNet").float()), block(own), block(build("Mamba2").float())])
    embed, prompt = nn.Embedding(12, 16), torch.randint(0, 12, (2, 6))

    def generate(left_padding, prompt):
        cache = stack.cache()

        def forward(ids, context):
            return stack(embed(ids), context=context, cache=cache)[:, -1] @ embed.weight.T

        state = rg.nn.GenerationState(forward, cache, left_padding)
        return rg.nn.generate.generate(state, prompt, strategy=strategy, max_new_tokens=5)

    result = generate(None, prompt)
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.int64), prompt], 1)
    assert [x.tolist() for x in generate(torch.tensor([2, 2]), padded)] == [x.tolist() for x in result]
    if isinstance(strategy, rg.nn.Greedy):
        ids = prompt
        with torch.no_grad():
            for _ in range(5):
                ids = torch.cat([ids, (stack(embed(ids))[:, -1] @ embed.weight.T).argmax(-1)[:, None]], 1)
        assert ids[:, 6:].tolist() == [x.tolist() for x in result]


def test_gated_deltanet_equals_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=6, num_hidden_layers=4,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    nn.init.normal_(theirs.norm.weight, 1, 0.1)
    ours = rg.nn.GatedDeltaNet(24, 2, value_heads=4, d_head=8, d_value=6, eps=config.rms_norm_eps)
    # Their rows are grouped by key head: query, key, values and gates of each.
    groups = theirs.in_proj_qkvz.weight.detach().view(2, 8 + 8 + 12 + 12, 24).split((8, 8, 12, 12), 1)
    query, key, value, gate = (part.reshape(-1, 24) for part in groups)
    beta, decay = (part.reshape(-1, 24) for part in theirs.in_proj_ba.weight.detach().view(2, 4, 24).split((2, 2), 1))
    ours.load_state_dict({
        "qkv.weight": torch.cat([query, key, value]), "gate.weight": gate, "beta.weight": beta, "decay.weight": decay,
        "convolution.weight": theirs.conv1d.weight[:, 0], "norm.weight": theirs.norm.weight, "dt_bias": theirs.dt_bias,
        "A_log": theirs.A_log, "output.weight": theirs.out_proj.weight,
    })  # fmt: skip
    x = torch.randn(2, 70, 24)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


def test_mamba2_equals_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=6, n_groups=2, chunk_size=16, num_hidden_layers=1
    )
    torch.manual_seed(0)
    theirs = Mamba2Mixer(config, 0).eval()
    for parameter in (theirs.norm.weight, theirs.D):
        nn.init.normal_(parameter, 1, 0.1)
    ours = rg.nn.Mamba2(16, 4, d_state=6, groups=2)
    ours.load_state_dict({
        "input.weight": theirs.in_proj.weight, "convolution.weight": theirs.conv1d.weight[:, 0],
        "convolution.bias": theirs.conv1d.bias, "dt_bias": theirs.dt_bias, "A_log": theirs.A_log, "D": theirs.D,
        "weight": theirs.norm.weight, "output.weight": theirs.out_proj.weight,
    })  # fmt: skip
    x = torch.randn(2, 40, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


def test_a_long_sequence_takes_memory_in_proportion_to_its_length():
    from regard.linear.recurrence import run_recurrence

    shapes = []
    for N in (1024, 4096):
        q, k, v = (torch.randn(1, 1, N, 8, requires_grad=True) for _ in range(3))
        output, _ = run_recurrence(q, k, v, -torch.rand(1, 1, N), torch.rand(1, 1, N), None)
        saved = output.grad_fn.saved_tensors
        shapes.append(sum(x.numel() for x in saved if x is not None))
    assert shapes[1] < 4.01 * shapes[0]


def test_a_capture_names_the_recurrent_layers_that_it_cannot_record():
    from regard.view import capture

    blocks = [
        rg.nn.Block(each, rg.nn.FeedForward(16, 16), residual=lambda: rg.nn.PreNorm(16))
        for each in (build("GatedDeltaNet").float(), rg.nn.MultiHeadAttention(16, 2), build("Mamba2").float())
    ]
    stack = rg.nn.Encoder(blocks)
    with (
        pytest.warns(UserWarning, match=r"not in the record: layers\.0\.attention, layers\.2\.attention$"),
        capture(stack) as record,
    ):
        stack(torch.randn(1, 5, 16))
    assert [each.name for each in record.attentions] == ["layers.1.attention"]
