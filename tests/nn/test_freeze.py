"""Packed weights: unfrozen models use every weight change, frozen models allow none, thaw restores all bits."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

import regard as rg
from regard.engines import native
from regard.engines.packed_linear import PackedWeight
from regard.nn import fused_stack

needs_kernels = pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
CONFIG = rg.models.LanguageConfig(vocabulary=5000, d_model=64, layers=2, heads=4, d_hidden=96, positions=16)
IDS = torch.arange(12).view(2, 6) * 400
THAW = r"rg\.nn\.thaw\(model\)"


def language_model(config=CONFIG):
    torch.manual_seed(0)
    return rg.models.LanguageModel(config).eval()


def frozen(model=None):
    model = language_model() if model is None else model
    rg.nn.freeze(model)
    return model


@torch.no_grad()
def expected_logits(state, ids=IDS):
    """Logits of a float64 model, whose weights are never packed."""
    model = rg.models.LanguageModel(CONFIG).eval().double()
    model.load_state_dict(state)
    return model(ids)


def write_data(model):
    model.embedding.weight.data[4999] = torch.arange(64.0)


def write_through_numpy(model):
    model.stack.layers[0].feedforward.up.weight.detach().numpy()[3] = 5


def initialise_rows(model):
    nn.init.ones_(model.embedding.weight[4990:])


def load_state(model):
    model.load_state_dict({name: tensor * 1.1 for name, tensor in language_model().state_dict().items()})


def swap(model):
    weight = model.stack.layers[0].feedforward.up.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(weight.shape)))


def replace_by_vector(model):
    count = sum(parameter.numel() for parameter in model.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-0.1, 0.1, count), model.parameters())


def step(model, kind, **options):
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    model.embedding.weight.grad[4999] = torch.arange(64.0) - 20  # one row of 5,000
    kind(model.parameters(), lr=1.0, **options).step()


def step_sgd(model):
    step(model, torch.optim.SGD, fused=True)


def step_adam(model):
    step(model, torch.optim.Adam, fused=True)


def step_foreach(model):
    step(model, torch.optim.AdamW, foreach=True, weight_decay=0.0)


def step_loop(model):
    step(model, torch.optim.RMSprop, foreach=False)


CHANGES = [
    write_data, write_through_numpy, initialise_rows, load_state, swap, replace_by_vector, step_sgd, step_adam,
    step_foreach, step_loop,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_an_unfrozen_model_uses_every_change_of_a_weight(change):
    model = language_model()
    before = model(IDS)
    change(model)
    output = model(IDS)
    assert (output - before).abs().max() > 1e-3
    torch.testing.assert_close(output.double(), expected_logits(model.state_dict()), atol=1e-3, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("change", [change for change in CHANGES if change is not swap])
@torch.no_grad()
def test_a_frozen_model_allows_no_change_of_a_weight(change):
    model = frozen()
    state, before = model.state_dict(), model(IDS)
    with pytest.raises(RuntimeError, match=THAW):
        change(model)
    for name, tensor in model.state_dict().items():
        if isinstance(model.get_parameter(name), PackedWeight):
            assert torch.equal(tensor, state[name])
    rg.nn.thaw(model)
    model.load_state_dict(state)
    torch.testing.assert_close(model(IDS), before)
    change(model)
    torch.testing.assert_close(model(IDS).double(), expected_logits(model.state_dict()), atol=1e-3, rtol=1e-4)


@needs_kernels
@torch.no_grad()
def test_a_packed_weight_can_be_swapped_for_another():
    model = frozen()
    swap(model)
    torch.testing.assert_close(model(IDS).double(), expected_logits(model.state_dict()), atol=1e-3, rtol=1e-4)


@needs_kernels
@torch.no_grad()
def test_an_alias_of_the_released_memory_changes_nothing():
    model = language_model()
    alias, data = model.embedding.weight.numpy(), model.stack.layers[0].feedforward.up.weight.data
    state = copy.deepcopy(model.state_dict())
    rg.nn.freeze(model)
    before = model(IDS)
    alias[:] = 7
    data.fill_(7)
    assert torch.equal(model(IDS), before)
    rg.nn.thaw(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@needs_kernels
def test_an_existing_optimizer_cannot_write_to_a_frozen_model_and_updates_a_thawed_one():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rg.nn.freeze(model)
    model(IDS).square().mean().backward()
    with pytest.raises(RuntimeError, match=THAW):
        optimizer.step()
    rg.nn.thaw(model)
    before = model.embedding.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.embedding.weight, before)


@needs_kernels
def test_the_kernel_is_used_by_frozen_models_only(monkeypatch):
    calls, blocks = [], []
    for place, name, calls_of in ((native, "multiply", calls), (fused_stack, "run_stack", blocks)):
        real = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *given, calls_of=calls_of, real=real: (calls_of.append(1), real(*given))[1]
        )
    model = language_model()
    with torch.inference_mode():
        model(IDS)
        assert not calls
        rg.nn.freeze(model)
        model(IDS)
        assert (len(blocks), len(calls)) == (1, 1)  # all blocks, and the output layer
        handle = model.stack.layers[0].register_forward_hook(lambda *_: None)
        model(IDS)
        assert (len(blocks), len(calls)) == (1, 1 + 4 * 2 + 1)  # module by module
        handle.remove()
        rg.nn.thaw(model)
        model(IDS)
    assert (len(blocks), len(calls)) == (1, 1 + 4 * 2 + 1)


@needs_kernels
def test_thaw_restores_bits_and_flags():
    model = language_model()
    model.stack.layers[1].feedforward.up.weight.requires_grad_(False)
    model.embedding.weight.no_decay = True
    with torch.no_grad():
        model.embedding.weight[0, 0] = torch.tensor(float("nan"))
        model.embedding.weight[0, 1] = -0.0
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    assert rg.nn.freeze(model) == {}
    assert rg.nn.freeze(model) == {}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert isinstance(model.embedding.weight, nn.Parameter)
    rg.nn.thaw(model)
    rg.nn.thaw(model)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == flags[name]
        assert torch.equal(parameter.view(torch.int32), state[name].view(torch.int32))
    assert model.embedding.weight.no_decay
    model.load_state_dict(state)


@needs_kernels
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 32), (33, 32), (7, 300), (600, 131 * 8), (5, 64)])
def test_freeze_and_thaw_restore_bits_at_odd_sizes(inputs, outputs):
    layer = nn.Linear(inputs, outputs)
    bits = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs), dtype=torch.int32)
    layer.weight.data = bits.view(torch.float32)
    assert rg.nn.freeze(layer) == {}
    assert torch.equal(layer.state_dict()["weight"].view(torch.int32), bits)
    rg.nn.thaw(layer)
    assert torch.equal(layer.weight.view(torch.int32), bits)


@needs_kernels
def test_a_model_frozen_and_thawed_in_inference_mode_can_be_trained():
    layer, x = rg.nn.FeedForward(64, 96), torch.randn(2, 64)
    for change in (rg.nn.freeze, rg.nn.thaw):
        with torch.inference_mode():
            change(layer)
        assert not layer.up.weight.is_inference()
        layer(x).sum().backward()


def test_weights_that_cannot_be_packed_are_returned():
    model = nn.ModuleDict({
        "wide": nn.Linear(8, 64).double(), "narrow": nn.Linear(8, 64).bfloat16(), "small": nn.Linear(8, 1),
        "meta": nn.Linear(8, 64, device="meta"), "embedding": nn.Embedding(64, 8), "convolution": nn.Conv1d(8, 64, 1),
        "attention": nn.MultiheadAttention(64, 2),
    })  # fmt: skip
    left = rg.nn.freeze(model)
    assert left.keys() == {"wide.weight", "narrow.weight", "small.weight", "meta.weight"}
    assert not any(isinstance(each, PackedWeight) for each in model.parameters())
    if not native.why_missing():
        assert "float64" in left["wide.weight"]
        assert "padded" in left["small.weight"]


@needs_kernels
@pytest.mark.parametrize(
    "change", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_are_computed_from_others_are_returned(change):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    change(model[0])
    x = torch.randn(2, 64)
    expected = model(x).detach()
    assert rg.nn.freeze(model).keys() == {"0.weight"}
    torch.testing.assert_close(model(x), expected)


@needs_kernels
def test_weights_of_experts_are_returned():
    experts = rg.nn.Experts(64, 64, count=64, per_token=2)
    assert rg.nn.freeze(experts, weights="int8").keys() == {"up", "output"}
    assert rg.nn.freeze(nn.Sequential(experts)).keys() == {"0.up", "0.output"}
    assert experts.router.weight.format == "int8"


@needs_kernels
def test_an_interrupted_freeze_packs_nothing(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    pack = PackedWeight.pack

    def interrupt(weight, *rest):
        if weight.data_ptr() == second:
            raise KeyboardInterrupt
        return pack(weight, *rest)

    second = model[1].weight.data_ptr()
    monkeypatch.setattr(PackedWeight, "pack", staticmethod(interrupt))
    with pytest.raises(KeyboardInterrupt):
        rg.nn.freeze(model, weights="int8")
    assert not any(isinstance(each, PackedWeight) for each in model.parameters())


@needs_kernels
def test_a_weight_that_cannot_change_its_format_is_unpacked():
    layer = nn.Linear(64, 90)  # 90 rows are padded to 96 or 128, which int8 allows and float32 may not
    assert rg.nn.freeze(layer, weights="int8") == {}
    rounded = layer.weight.clone()
    left = rg.nn.freeze(layer, weights="float32")
    assert isinstance(layer.weight, PackedWeight) == (not left)
    assert not left or type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight.clone(), rounded)


@needs_kernels
def test_shared_parameters_stay_shared():
    model = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False))
    model[2].weight = model[0].weight
    ids, expected = torch.tensor([3, 95, 0]), model[0].weight.detach().clone()
    with torch.no_grad():
        before = model(ids)
        assert rg.nn.freeze(model) == {}
        assert model[2].weight is model[0].weight
        assert torch.equal(model[0](ids), expected[ids])
        torch.testing.assert_close(model(ids), before)
        state = model.state_dict()
        assert torch.equal(state["0.weight"], expected)
        assert torch.equal(state["2.weight"], expected)
        rg.nn.thaw(model)
        assert torch.equal(model[0].weight, expected)
        rg.nn.freeze(model, weights="int4")
        rounded = model[0].weight.clone()
        rg.nn.freeze(model, weights="int4")
        assert model[0].weight.format == "int8"  # as that of an embedding that is the output layer
        assert torch.equal(model[0].weight.clone(), rounded)
    assert model[2].weight is model[0].weight


MODELS = {
    "language": lambda: (language_model(), (IDS,)),
    "untied": lambda: (
        rg.models.LanguageModel(
            rg.models.LanguageConfig(
                320, 64, 2, 4, 96, kv_heads=2, rotary=rg.nn.Rotary(), norm="rms", gated=True, bias=False, tied=False
            )
        ),
        (IDS // 20,),
    ),
    "masked": lambda: (rg.models.MaskedLanguageModel(rg.models.TextConfig(320, 64, 2, 4, 96)), (IDS // 20,)),
    "translation": lambda: (
        rg.models.Transformer(rg.models.TransformerConfig(320, 64, 2, 4, 96)), (IDS // 20, IDS // 30)
    ),
    "two vocabularies": lambda: (
        rg.models.Transformer(rg.models.TransformerConfig(320, 64, 2, 4, 96, target_vocabulary=352)),
        (IDS // 20, IDS // 30),
    ),
    "copying": lambda: (
        rg.models.PointerTransformer(rg.models.TransformerConfig(320, 64, 2, 4, 96)), (IDS // 20, IDS // 30)
    ),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_frozen_models_have_the_same_values_and_gradients(name):
    torch.manual_seed(0)
    plain, inputs = MODELS[name]()
    plain.eval()
    model = copy.deepcopy(plain)
    left = rg.nn.freeze(model)
    assert not any("embedding" in each or "attention" in each for each in left)
    assert isinstance(model.output_layer.weight, PackedWeight)
    with torch.inference_mode():
        torch.testing.assert_close(model(*inputs), plain(*inputs), atol=1e-4, rtol=1e-4)
    for each in (model, plain):
        each(*inputs).square().mean().backward()
    for (key, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            actual.grad, expected.grad, atol=1e-4, rtol=1e-4, msg=lambda text, key=key: key + text
        )


@needs_kernels
def test_generation_and_loss_of_a_frozen_model_are_unchanged():
    plain, model = language_model(), frozen()
    for actual, theirs in zip(
        model.generate(IDS, max_new_tokens=5), plain.generate(IDS, max_new_tokens=5), strict=True
    ):
        assert torch.equal(actual, theirs)
    packed = rg.pack(list(IDS))
    torch.testing.assert_close(model.loss(packed, IDS.flatten()), plain.loss(packed, IDS.flatten()))
    with pytest.raises(ValueError, match="token ids must be in 0"):
        model(IDS + 4999)


@needs_kernels
def test_cross_attention_uses_rows_of_a_packed_weight():
    for options in ({}, {"d_source": 48}, {"d_head": 12, "kv_heads": 1}):
        plain = rg.nn.MultiHeadAttention(64, 4, **options)
        layer = frozen(copy.deepcopy(plain))
        x, source = torch.randn(2, 5, 64), torch.randn(2, 7, options.get("d_source", 64))
        with torch.inference_mode():
            torch.testing.assert_close(layer(x, source), plain(x, source))


@needs_kernels
def test_forward_mode_works_through_a_frozen_module():
    plain = rg.nn.FeedForward(64, 96)
    layer = frozen(copy.deepcopy(plain))
    x, direction = torch.randn(3, 64), torch.randn(3, 64)
    expected = torch.autograd.functional.jvp(plain, x, direction)[1]
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (direction,))[1], expected)
    with torch.no_grad(), forward_ad.dual_level():
        tangents = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction)))
        torch.testing.assert_close(tangents.tangent, expected)


@needs_kernels
def test_functional_call_uses_the_given_weights():
    model = frozen()
    state = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        output = torch.func.functional_call(model, state, (IDS,))
    torch.testing.assert_close(output.double(), expected_logits(state), atol=1e-3, rtol=1e-4)
    with pytest.raises(RuntimeError, match=THAW):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, (IDS,)).sum())(
            dict(model.named_parameters())
        )
