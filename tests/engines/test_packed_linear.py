"""Products with packed weights, against float64 and against the plain weight."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from regard.engines import native
from regard.engines.packed_linear import PackedWeight, project, why_not

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
SIZES = [(1, 1), (16, 8), (17, 33), (64, 1), (50, 33), (131, 600), (64, 1100)]


def random_problem(M, N, K, bias=True):
    generator = torch.Generator().manual_seed(M * 10000 + N * 100 + K)
    x, weight = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)
    return x, weight, torch.randn(N, generator=generator) if bias else None


def error(output, x, weight, bias):
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return (output - exact).abs().max() / exact.abs().max().clamp(min=1e-30)


@pytest.fixture
def calls(monkeypatch):
    """Record one entry per call of the kernel."""
    seen, real = [], native.multiply
    monkeypatch.setattr(native, "multiply", lambda *given: (seen.append(1), real(*given))[1])
    return seen


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 6, 7, 13, 31, 130])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_the_kernel_agrees_with_float64_as_well_as_torch_does(M, N, K, threads, calls):
    x, weight, bias = random_problem(M, N, K, bias=N % 2 == 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = project(x, PackedWeight.pack(weight), bias)
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 1
    assert error(output, x, weight, bias) <= 2 * error(F.linear(x, weight, bias), x, weight, bias) + 5e-7


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_packing_and_unpacking_preserve_all_bits(N, K):
    bits = torch.randint(-(2**31), 2**31 - 1, (N, K), dtype=torch.int32)  # NaNs of every payload among them
    weight = bits.view(torch.float32).clone()
    packed = PackedWeight.pack(weight)
    weight.zero_()
    packed.clone().zero_()
    packed.unpack().zero_()
    assert torch.equal(packed.unpack().view(torch.int32), bits)
    assert torch.equal(packed.clone().view(torch.int32), bits)
    assert packed.unpack().untyped_storage().nbytes() == 4 * N * K
    assert packed.shape == (N, K)


def test_a_weight_of_any_strides_is_packed():
    for weight in (torch.randn(20, 40).t(), torch.randn(80, 20)[::2], torch.randn(40, 1).expand(40, 20)):
        assert torch.equal(PackedWeight.pack(weight).unpack(), weight)


def test_results_are_bitwise_reproducible():
    x, weight, bias = random_problem(13, 40, 20)
    packed = PackedWeight.pack(weight)
    assert torch.equal(project(x, packed, bias), project(x, packed, bias))


def test_rows_of_a_weight_that_begin_anywhere(calls):
    x, weight, bias = random_problem(5, 80, 20)
    for taken in (weight, PackedWeight.pack(weight)):
        for first, last in ((0, 80), (0, 7), (16, 48), (32, 80), (5, 30), (33, 34), (79, 80), (40, 40)):
            output = project(x, taken, bias, rows=(first, last))
            assert output.shape == (5, last - first)
            torch.testing.assert_close(output, F.linear(x, weight[first:last], bias[first:last]))
    assert len(calls) == 8


def test_inputs_of_any_shape_and_stride(calls):
    x, weight, bias = random_problem(24, 40, 20)
    packed = PackedWeight.pack(weight)
    given = [x.view(2, 3, 4, 20), x.view(4, 6, 20).transpose(0, 1), x[::2], x[0], x[:0], x.t().contiguous().t()]
    for each in given:
        torch.testing.assert_close(F.linear(each, packed, bias), F.linear(each, weight, bias))
    assert len(calls) == len(given)


def test_outputs_do_not_follow_the_default_dtype_or_device():
    x, weight, bias = random_problem(3, 40, 20)
    packed, expected = PackedWeight.pack(weight), F.linear(x, weight, bias)
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(F.linear(x, packed, bias), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        torch.testing.assert_close(F.linear(x, packed, bias), expected)


# Only plain memory may reach the kernel.
UNUSUAL = {
    "negative view": torch._neg_view,
    "imaginary part": lambda x: torch.complex(x, -x).conj().imag,
    "expanded": lambda x: x[:1].expand(3, -1),
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_inputs_and_biases_are_read_right(kind):
    x, weight, bias = random_problem(3, 40, 20)
    packed = PackedWeight.pack(weight)
    given, added = UNUSUAL[kind](x), UNUSUAL[kind](bias[None].expand(3, -1))[0]
    torch.testing.assert_close(F.linear(given, packed), F.linear(given, weight))
    torch.testing.assert_close(F.linear(x, packed, added), F.linear(x, weight, added))


def test_other_dtypes_and_shapes_behave_as_in_torch():
    x, weight, bias = random_problem(3, 40, 20)
    packed = PackedWeight.pack(weight)
    for given in ((x.double(), bias), (x.bfloat16(), bias), (x[:, :19], bias), (x, bias[:39]), (x[0, 0], bias)):
        with pytest.raises(RuntimeError):
            F.linear(given[0], packed, given[1])
    torch.testing.assert_close(F.linear(x, packed, bias[:1]), F.linear(x, weight, bias[:1]))
    with torch.autocast("cpu"):
        output = F.linear(x, packed, bias)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, F.linear(x, weight, bias))


def both(weight):
    """Return a plain leaf and its packed form, both requiring grad."""
    plain = weight.clone().requires_grad_()
    return plain, nn.Parameter(PackedWeight.pack(weight))


def test_first_and_second_gradients():
    x, weight, bias = random_problem(3, 40, 20)
    results = []
    for each in both(weight):
        given, added = x.clone().requires_grad_(), bias.clone().requires_grad_()
        first = torch.autograd.grad(F.linear(given, each, added).pow(3).sum(), (given, each, added), create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), (given, each, added))
        results.append((*first, *second))
    for plain, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain)
    plain, packed = both(weight)
    for each in (plain, packed):
        F.linear(x, each).square().sum().backward()
    torch.testing.assert_close(packed.grad, plain.grad)


def test_tangents_of_input_and_bias():
    x, weight, bias = random_problem(3, 40, 20)
    direction, packed = torch.randn(3, 20), PackedWeight.pack(weight)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, forward_ad.dual_level():
            tangents = forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, direction), packed, bias))
            torch.testing.assert_close(tangents.tangent, direction @ weight.T)
            tangents = forward_ad.unpack_dual(F.linear(x, packed, forward_ad.make_dual(bias, bias)))
            torch.testing.assert_close(tangents.tangent, bias.expand(3, 40))
    _, tangent = torch.func.jvp(lambda x: project(x, packed, bias, rows=(5, 30)), (x,), (direction,))
    torch.testing.assert_close(tangent, direction @ weight[5:30].T)


def test_transforms():
    x, weight, bias = random_problem(3, 40, 20)
    packed = PackedWeight.pack(weight)
    torch.testing.assert_close(torch.func.vmap(lambda row: F.linear(row, packed, bias))(x), F.linear(x, weight, bias))
    jacobian = torch.func.jacrev(lambda x: F.linear(x, packed, bias))(x[0])
    torch.testing.assert_close(jacobian, weight)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: F.linear(x, packed, bias))(x[0]), weight)
    graph = make_fx(lambda x: F.linear(x, packed, bias))(x)
    torch.testing.assert_close(graph(2 * x), F.linear(2 * x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_looked_up(dtype):
    weight = torch.randn(50, 20)
    packed = PackedWeight.pack(weight)
    ids = torch.tensor([[0, 31, 32], [49, 5, 33]], dtype=dtype)
    assert torch.equal(F.embedding(ids, packed), weight[ids])
    assert torch.equal(F.embedding(ids, packed, 5), weight[ids])
    assert F.embedding(ids[:, :0], packed).shape == (2, 0, 20)
    for wrong in (-1, 50, 63, 64):  # rows 50 to 63 pad the last panel
        with pytest.raises(IndexError, match="index out of range"):
            F.embedding(torch.tensor([wrong]), packed)
    with pytest.raises(RuntimeError, match="thaw"):
        F.embedding(ids, packed, max_norm=1.0)
    grads = [torch.autograd.grad(F.embedding(ids, each).pow(3).sum(), each)[0] for each in both(weight)]
    assert torch.equal(*grads)


WRITES = {
    "zero_": lambda w: w.zero_(),
    "item": lambda w: w.__setitem__(3, 1.0),
    "data item": lambda w: w.data.__setitem__(3, 1.0),
    "detached": lambda w: w.detach().mul_(2),
    "view": lambda w: w.view(-1)[0].zero_(),
    "row": lambda w: w[3].zero_(),
    "transpose": lambda w: w.T.zero_(),
    "data": lambda w: setattr(w, "data", torch.zeros(64, 8)),
    "numpy": lambda w: w.detach().numpy().fill(0),
    "storage": lambda w: w.storage().fill_(0),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).zero_(),
    "out": lambda w: torch.add(torch.ones(64, 8), 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([1]), torch.ones(1, 8)),
    "init": lambda w: nn.init.normal_(w[:3]),
    "resize_": lambda w: w.resize_(3),
    "set_": lambda w: w.set_(torch.zeros(64, 8)),
    "share_memory_": lambda w: w.share_memory_(),
    "dtype": lambda w: w.to(torch.bfloat16),
    "device": lambda w: w.to("meta"),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_packed_weight_is_read_only(write):
    weight = torch.randn(64, 8)
    packed = nn.Parameter(PackedWeight.pack(weight), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"rg\.nn\.thaw\(model\)"):
        WRITES[write](packed)
    assert torch.equal(packed.unpack(), weight)


def test_operators_that_do_not_mark_their_writes_are_refused():
    with torch.library._scoped_library("regard_test", "DEF") as library:
        library.define("broadcast_(Tensor[] x) -> ()")  # as collectives are declared
        library.impl("broadcast_", lambda tensors: tensors[0].zero_(), "CPU")
        with pytest.raises(RuntimeError, match=r"rg\.nn\.thaw\(model\)"):
            torch.ops.regard_test.broadcast_([PackedWeight.pack(torch.randn(64, 8))])


def test_functions_read_a_plain_copy():
    weight, other = torch.randn(64, 8), torch.zeros(64, 8)
    packed = PackedWeight.pack(weight)
    assert torch.equal(packed, weight)
    assert torch.equal(packed + 1, weight + 1)
    assert packed.norm() == weight.norm()
    assert torch.equal(packed[torch.tensor([3, 4])], weight[3:5])
    assert torch.equal(torch.stack([packed, packed]), torch.stack([weight, weight]))
    assert torch.equal(other.copy_(packed), weight)
    assert packed.to("cpu") is packed
    assert packed.float() is packed
    copied = packed.clone()
    copied.zero_()
    assert torch.equal(packed, weight)
    assert repr(packed) == "PackedWeight((64, 8), requires_grad=False)"


def test_copies_and_pickles():
    weight = nn.Parameter(torch.randn(64, 8), requires_grad=False)
    packed = nn.Parameter(PackedWeight.pack(weight), requires_grad=False)
    packed.group = "decay"
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(packed), torch.load(buffer, weights_only=False)):
        assert type(other) is PackedWeight
        assert isinstance(other, nn.Parameter)
        assert other.panels is not packed.panels
        assert torch.equal(other, weight)
        assert not other.requires_grad
        assert other.group == "decay"


def test_weights_that_cannot_be_packed_report_why():
    assert why_not(torch.randn(64, 8)) == ""
    assert "bfloat16" in why_not(torch.randn(64, 8).bfloat16())
    assert "meta" in why_not(torch.empty(64, 8, device="meta"))
    assert "(64,)" in why_not(torch.randn(64))
    assert "(0, 8)" in why_not(torch.randn(0, 8))
    assert "padded" in why_not(torch.randn(native.panel_rows() + 1, 8))
    assert "PackedWeight" in why_not(PackedWeight.pack(torch.randn(64, 8)))
    weight = nn.Parameter(torch.randn(64, 8))
    weight.register_hook(lambda grad: grad)
    assert "hooks" in why_not(weight)
