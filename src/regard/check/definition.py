"""Properties of the definition: each output is a weighted mean of the values of its batch row and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.check.case import Case, with_float64
from regard.check.oracle import error, exact
from regard.check.property import Attend, conformance_property

SIZES = (
    Case(Q=1, K=1, D=1),
    Case(),
    Case(B=2, H=2, Q=3, K=5, D=4),
    Case(B=2, H=3, Q=17, K=33, D=8),
    Case(H=2, Q=65, K=130, D=16),
)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257)


@conformance_property(cases=SIZES)
def output_shape(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Query (B, H, Q, D), key and value (B, H, K, D) give an output of (B, H, Q, D)."""
    out = attend(q, k, v)
    assert out.shape == q.shape, f"the output is {tuple(out.shape)}, expected {tuple(q.shape)}"


@conformance_property("value-width", cases=(Case(D=1, E=2), Case(D=4, E=2), Case(H=2, Q=5, K=9, D=8, E=24)))
def value_width(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Values may be wider or narrower than keys, as latent attention needs."""
    out, columns = attend(q, k, v), v.split(1, -1)
    assert out.shape == (*q.shape[:-1], v.shape[-1]), f"the output is {tuple(out.shape)}"
    alone = torch.cat([attend(q, k, column.expand_as(k))[..., :1] for column in columns], -1)
    far = error(out, alone)
    assert far < 32, f"values computed column by column differ by {far:.3g} roundings"


@conformance_property(cases=SIZES[1:])
def query_independence(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The output of a query does not depend on the other queries: softmax runs over keys."""
    together = attend(q, k, v)
    alone = torch.cat([attend(q[:, :, i : i + 1], k, v) for i in range(q.shape[2])], 2)
    far = error(together, alone)
    assert far < 32, f"queries computed one by one differ from all at once by {far:.3g} roundings"


@conformance_property(cases=(Case(B=2), Case(H=2), Case(B=2, H=3, Q=3, K=5, D=4), Case(B=3, H=5, Q=9, K=33, D=8)))
def batch_and_heads(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Batch rows and heads are independent: otherwise one user's text leaks into the answer to another."""
    together = attend(q, k, v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            at = (slice(b, b + 1), slice(h, h + 1))
            far = error(together[at], attend(q[at], k[at], v[at]))
            assert far < 32, f"batch row {b}, head {h} alone differs by {far:.3g} roundings"


@conformance_property(cases=(Case(Q=1, K=1), Case(Q=1), *SIZES[2:], Case(Q=3, K=1000)))
def row_sums(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The weights of a row sum to 1: if all values are 1, so is the output."""
    far = error(attend(3 * q, 3 * k, torch.ones_like(v)), torch.ones_like(q))
    assert far < 64, f"the mean of ones is off by {far:.3g} roundings"


@conformance_property(cases=[Case(Q=n, K=n, D=4) for n in LENGTHS])
def odd_lengths(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """All keys count, also if their number is not a multiple of a tile or a vector register."""
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[:, :, 0] = k[:, :, -1] = 20.0  # the first and the last key have all the weight
    far = (attend(q, k, v) - (v[:, :, :1] + v[:, :, -1:]) / 2).abs().max().item()
    assert far < 0.05, (
        f"the first and the last of {k.shape[2]} keys have all weight, but the output is off by {far:.3g}"
    )


@conformance_property(cases=(Case(Q=1), Case(Q=3, K=5), Case(H=2, Q=5, K=130, D=4), Case(Q=130, K=300, D=4)))
def permutation(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The order of keys and their values does not matter: without positions, attention reads a set."""
    out = attend(q, k, v)
    rising = (q.mean((0, 1, 2)) * k).sum(-1)[0, 0].argsort()  # rising logits, then falling ones
    orders = {"rising": rising, "falling": rising.flip(0), "reversed": torch.arange(k.shape[2]).flip(0)}
    for name, order in orders.items():
        far = error(attend(q, k[:, :, order], v[:, :, order]), out)
        assert far < 64, f"keys in another order ({name}) change the output by {far:.3g} roundings"
    far = error(attend(q.flip(2), k, v), out.flip(2))
    assert far < 32, f"queries in another order change their rows by {far:.3g} roundings"


@conformance_property(cases=(Case(Q=1, D=1), Case(Q=1, D=2), Case(Q=1, D=4), Case(B=2, H=2, Q=3, D=64)))
def default_scale(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The default scale of q kᵀ is 1 / sqrt(D): trained weights are wrong with another scale."""
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 1, 1, 1  # two keys with products 1 and 0: the output is sigmoid(scale)
    actual, expected = torch.logit(attend(q, k, v).flatten()[-1].double()).item(), q.shape[-1] ** -0.5
    assert abs(actual - expected) < 1e-4, f"the scale for D = {q.shape[-1]} is {actual:.5g}, expected {expected:.5g}"


@conformance_property("scale", cases=(Case(Q=1, D=1), Case(Q=1, D=4), Case(B=2, H=2, Q=3, D=64)))
def scale(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """An explicit scale replaces 1 / sqrt(D); it is not multiplied with it."""
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 1, 1, 1
    for given in (0.3, 1.0, 2.0):
        actual = torch.logit(attend(q, k, v, scale=given).flatten()[-1].double()).item()
        assert abs(actual - given) < 1e-4, f"scale={given} for D = {q.shape[-1]} works as {actual:.5g}"


@conformance_property(
    "grouped", cases=(Case(H=2, G=1), Case(H=4, G=2), Case(B=2, H=6, G=3, Q=3, K=5, D=4), Case(H=6, G=2, Q=33, K=65))
)
def grouped_heads(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Query head h attends to key head h // (H / G), as in checkpoints with grouped queries, not to h % G."""
    repeats = q.shape[1] // k.shape[1]
    grouped = attend(q, k, v)
    repeated = attend(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
    other = attend(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1))
    far = error(grouped, repeated)
    which = "; head h attends to key head h % G" if error(grouped, other) < 32 else ""
    assert far < 32, f"differs from keys and values repeated for each query head by {far:.3g} roundings{which}"


@conformance_property(cases=(Case(Q=1, D=1), Case(B=2, H=2, Q=3, K=5, D=4), Case(B=2, H=3, Q=33, K=65, D=16)))
def strides(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Tensors are read by their strides: projections return transposed, sliced and expanded views."""
    layouts = {
        "heads stored after positions": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "width stored before positions": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        "every second column": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
        "a slice of something longer": lambda x: F.pad(x, (3, 2, 1, 4), value=7.0)[..., 1:-4, 3:-2],
    }
    out = attend(q, k, v)
    for name, layout in layouts.items():
        far = error(attend(layout(q), layout(k), layout(v)), out)
        assert far < 32, f"{name}: differs from contiguous tensors by {far:.3g} roundings"
    shared = [x[:1, :1].expand_as(x) for x in (k, v)]
    far = error(attend(q, *shared), attend(q, *(x.contiguous() for x in shared)))
    assert far < 32, f"expanded keys and values (stride 0): differ from contiguous ones by {far:.3g} roundings"


@conformance_property(
    cases=with_float64((Case(Q=1, D=1), Case(B=2, H=2, Q=3, K=5, D=4), Case(B=2, H=3, Q=33, K=65, D=16)))
)
def negative_bit(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A view with torch's negative bit is read with its sign, such as the imaginary part of a conjugate."""
    out = attend(q, k, v)
    for names in ("q", "k", "v", "qkv"):
        given = zip("qkv", (q, k, v), strict=True)
        views = [torch.complex(x, -x).conj().imag if name in names else x for name, x in given]
        far = error(attend(*views), out)
        assert far < 32, f"the imaginary part of a conjugate as {names} differs from its copy by {far:.3g} roundings"


@conformance_property("empty", cases=(Case(K=0), Case(Q=0), Case(B=0), Case(B=2, H=3, Q=4, K=0, D=8)))
def empty_axes(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Empty batches, queries or keys are not errors: the output has its shape, and is 0 if there are no keys."""
    out = attend(q, k, v)
    assert out.shape == q.shape, f"the output is {tuple(out.shape)}, expected {tuple(q.shape)}"
    assert (out == 0).all(), f"without keys the output is {out.flatten()[0].item()}, expected 0"


@conformance_property(cases=with_float64(SIZES))
def definition(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The output is softmax(q kᵀ / sqrt(D)) v, as close to float64 as the rounding of its dtype allows."""
    far = error(attend(q, k, v), exact(q, k, v))
    assert far < 32, f"differs from the definition in float64 by {far:.3g} roundings of {q.dtype}"
