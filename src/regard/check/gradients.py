"""Properties of derivatives: those of the definition, in both modes, with no influence of masked keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.check.case import Case, with_float64
from regard.check.masks import LONG
from regard.check.oracle import error, exact, gradients, tangent
from regard.check.property import Attend, conformance_property

TINY = (Case(Q=1, D=1), Case(Q=1, K=6, D=4), Case(Q=6, K=6, D=4))
SIZES = (Case(Q=1, K=1, D=1), Case(), Case(B=2, H=2, Q=3, K=5, D=4), Case(H=2, Q=33, K=65, D=8))


@conformance_property("gradients", cases=(Case(), Case(B=2, H=2, Q=33, K=65, D=8)))
def gradient_determinism(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The backward pass is deterministic to the bit: sums over threads keep their order."""
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    first = gradients(attend(q, k, v), q, k, v)
    for _ in range(3):
        for name, was, now in zip("qkv", first, gradients(attend(q, k, v), q, k, v), strict=True):
            assert torch.equal(was, now), f"the gradient of {name} differs by {error(now, was):.3g} roundings"


@conformance_property(
    "mask", "gradients", cases=(Case(Q=1, K=1, D=1), Case(Q=2, K=3), Case(B=2, H=2, Q=9, K=33, D=4), *LONG)
)
def masked_row_gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """A row without visible keys has finite gradients: one NaN, and the whole model is NaN after a step."""
    mask[..., [i for i in range(q.shape[2]) if i % 64 == 0], :] = False
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = attend(q, k, v, mask=mask)
    out = torch.where(mask.any(-1, keepdim=True), out, 0.0)  # the property masked-rows checks these rows
    for name, grad in zip("qkv", gradients(out, q, k, v), strict=True):
        assert grad.isfinite().all(), f"the gradient of {name} is not finite if a row has no visible key"


@conformance_property("mask", "gradients", cases=(Case(Q=1), Case(Q=3, K=5), Case(B=2, H=2, Q=9, K=33, D=4), *LONG))
def nan_gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """NaN and infinity in masked keys and values do not reach any gradient."""
    hidden = [j for j in range(1, k.shape[2]) if j == k.shape[2] - 1 or j % 64 in (0, 63)]  # also at edges of tiles
    mask[..., hidden] = False
    for bad in (float("nan"), float("inf")):
        for name in ("key", "value"):
            leaves = [x.clone() for x in (q, k, v)]
            leaves[1 if name == "key" else 2][:, :, hidden] = bad
            leaves = [x.requires_grad_() for x in leaves]
            grads = gradients(attend(*leaves, mask=mask), *leaves)
            for other, grad in zip("qkv", grads, strict=True):
                assert grad.isfinite().all(), f"{bad} in a masked {name} makes the gradient of {other} {bad}"


@conformance_property("mask", "gradients", cases=(*SIZES, *LONG))
def mask_gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """With a mask, gradients are those of the definition, and 0 for keys that no query may attend to."""
    mask[..., 1:2] = False
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    actual, expected = gradients(attend(q, k, v, mask=mask), q, k, v), gradients(exact(q, k, v, mask), q, k, v)
    for name, grad, right in zip("qkv", actual, expected, strict=True):
        far = error(grad, right)
        assert far < 64, f"the gradient of {name} differs from the definition's by {far:.3g} roundings"
    assert (actual[1][:, :, 1:2] == 0).all(), "a key that no query may attend to has a gradient"
    assert (actual[2][:, :, 1:2] == 0).all(), "a value that no query may attend to has a gradient"


@conformance_property("gradients", "grouped", cases=(Case(H=2, G=1), Case(B=2, H=6, G=3, Q=3, K=5, D=4)))
def grouped_gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The gradient of a key head is the sum over the query heads that share it."""
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    repeats = q.shape[1] // k.shape[1]
    repeated = [x.detach().repeat_interleave(repeats, 1).requires_grad_() for x in (k, v)]
    actual = gradients(attend(q, k, v), k, v)
    for name, grad, each in zip("kv", actual, gradients(attend(q, *repeated), *repeated), strict=True):
        far = error(grad, each.unflatten(1, (-1, repeats)).sum(2))
        assert far < 64, f"the gradient of {name} differs from the sum over its query heads by {far:.3g} roundings"


@conformance_property("gradients", cases=with_float64(SIZES))
def gradient(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Gradients of q, k and v are those of the definition in float64: with a wrong factor training is worse."""
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    actual, expected = gradients(attend(q, k, v), q, k, v), gradients(exact(q, k, v), q, k, v)
    for name, grad, right in zip("qkv", actual, expected, strict=True):
        far = error(grad, right)
        assert far < 64, f"the gradient of {name} differs from the definition's by {far:.3g} roundings"


@conformance_property("gradients", "double-backward", cases=SIZES[1:])
def double_backward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Second gradients are those of the definition: gradient penalties and meta-learning need them."""
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    twice = []
    for out in (attend(q, k, v), exact(q, k, v)):
        once = torch.cat([grad.flatten() for grad in gradients(out, q, k, v, again=True)])
        twice.append(gradients(once, q, k, v))
    for name, grad, right in zip("qkv", *twice, strict=True):
        far = error(grad, right)
        assert far < 256, f"the second gradient of {name} differs from the definition's by {far:.3g} roundings"


@conformance_property("gradients", "double-backward", cases=with_float64(TINY))
def second_derivatives(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Small calls have second derivatives too: they often run on another kernel."""
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    twice = []
    for out in (attend(q, k, v), exact(q, k, v)):
        once = torch.cat([grad.flatten() for grad in gradients(out, q, k, v, again=True)])
        twice.append(gradients(once, q, k, v))
    for name, grad, right in zip("qkv", *twice, strict=True):
        far = error(grad, right)
        assert far < 256, f"the second gradient of {name} differs from the definition's by {far:.3g} roundings"


@conformance_property("gradients", "forward-mode", cases=with_float64(SIZES))
def tangents(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dual tensors give the derivative along a direction of each input and of all; none is dropped."""
    inputs, along = (q, k, v), [torch.cos(3 * x) for x in (q, k, v)]
    wide, wide_along = [x.double() for x in inputs], [x.double() for x in along]
    for names in ("qkv", "q", "k", "v"):
        chosen, right = (
            [x if name in names else None for name, x in zip("qkv", each, strict=True)] for each in (along, wide_along)
        )
        far = error(tangent(attend, inputs, chosen), tangent(exact, wide, right))
        assert far < 64, f"the tangent for directions of {names} is off by {far:.3g} roundings"


@conformance_property("mask", "gradients", "forward-mode", cases=(*SIZES, *LONG))
def mask_tangents(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """With a mask, tangents are those of the definition; tangents of masked keys and values have no effect."""
    mask[..., 1:2] = False
    inputs, along = (q, k, v), [torch.cos(3 * x) for x in (q, k, v)]
    for direction in along[1:]:
        direction[:, :, 1:2] = 1e3
    actual = tangent(lambda q, k, v: attend(q, k, v, mask=mask), inputs, along)
    right = tangent(lambda q, k, v: exact(q, k, v, mask), [x.double() for x in inputs], [x.double() for x in along])
    far = error(actual, right)
    assert far < 64, f"the tangent under a mask is off by {far:.3g} roundings"


@conformance_property("gradients", "forward-mode", cases=with_float64(SIZES))
def jvp(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """torch.func.jvp returns the output and the derivative along a direction; jacfwd and hessian build on it."""
    inputs, along = (q, k, v), tuple(torch.cos(3 * x) for x in (q, k, v))
    right = tangent(exact, [x.double() for x in inputs], [x.double() for x in along])
    out, actual = torch.func.jvp(attend, inputs, along)[:2]
    far = error(out, exact(*inputs))
    assert far < 32, f"the output of jvp is off by {far:.3g} roundings"
    far = error(actual, right)
    assert far < 64, f"the derivative is off by {far:.3g} roundings"


@conformance_property("gradients", "forward-mode", "double-backward", cases=with_float64(SIZES))
def reverse_over_forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A loss that contains a tangent has gradients: consistency and flow models train with such losses."""
    along = [torch.cos(3 * x) for x in (q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    actual = gradients(tangent(attend, leaves, along), *leaves)
    right = gradients(tangent(exact, [x.double() for x in leaves], [x.double() for x in along]), *leaves)
    for name, grad, expected in zip("qkv", actual, right, strict=True):
        far = error(grad, expected)
        assert far < 256, f"the gradient of {name} of a loss of the tangent is off by {far:.3g} roundings"
