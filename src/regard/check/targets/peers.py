"""Attention functions of other libraries, called as documented.

An adapter uses only its parameters and imports, because its source is printed in reproductions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from regard.check.targets.target import NotSupported, Target


def torch_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, causal: bool = False, scale: Any = None, dropout: float = 0.0
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )


def torch_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> Tensor:
    (B, H, Q, D), K = q.shape, k.shape[2]
    with torch.random.fork_rng(), torch.no_grad():  # a module with identity projections
        module = torch.nn.MultiheadAttention(H * D, H, dropout, batch_first=True, dtype=q.dtype)
        module.in_proj_weight.copy_(torch.eye(H * D).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(H * D))
    hidden = torch.ones(Q, K, dtype=torch.bool).triu(1) if causal else None  # here True means may not attend
    if mask is not None:
        masked = ~mask.expand(B, H, Q, K).reshape(B * H, Q, K)
        hidden = masked if hidden is None else masked | hidden
    flat = [x.transpose(1, 2).reshape(B, x.shape[2], H * D) for x in (q, k, v)]
    out, _ = module(*flat, attn_mask=hidden, need_weights=need_weights)
    return out.reshape(B, Q, H, D).transpose(1, 2)


def flex_compiled(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, causal: bool = False, scale: Any = None
) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (B, H, Q, _), (G, K) = q.shape, k.shape[1:3]
    torch._dynamo.config.recompile_limit = 10_000  # beyond it, torch silently runs the function uncompiled
    blocks = None
    if mask is not None or causal:
        full = torch.ones(B, H, Q, K, dtype=torch.bool) if mask is None else mask.expand(B, H, Q, K).contiguous()

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return full[b, h, i, j] & (j <= i) if causal else full[b, h, i, j]

        blocks = create_block_mask(visible, B, H, Q, K, device="cpu")
    with torch.no_grad():  # on a CPU it computes no gradients
        return torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=blocks, scale=scale, enable_gqa=G != H)


def transformers_eager(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, causal: bool = False, scale: Any = None, dropout: float = 0.0
) -> Tensor:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    (H, Q, D), (G, K) = q.shape[1:], k.shape[1:3]
    module = torch.nn.Module()
    module.num_key_value_groups = H // G  # type: ignore[assignment]
    if causal:
        below = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
        mask = below if mask is None else mask & below
    if mask is not None:  # like its eager masks: 0 or the lowest number
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    scale = D**-0.5 if scale is None else scale
    return eager_attention_forward(module, q, k, v, mask, scale, dropout)[0].transpose(1, 2)


def x_transformers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    causal: bool = False,
    scale: Any = None,
    dropout: float = 0.0,
    flash: bool = False,
) -> Tensor:
    from x_transformers.attend import Attend

    return Attend(causal=causal, scale=scale, dropout=dropout, flash=flash)(q, k, v, mask=mask)[0]


def keras_ops(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, causal: bool = False, scale: Any = None) -> Tensor:
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return keras.ops.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=causal).transpose(1, 2)


WIDTHS = "one width for queries, keys and values"
NAN = (
    "Not documented either way. Masked logits become -inf by addition, or masked weights 0, and NaN survives both; "
    "fill masked entries with 0 first."
)
NANS = dict.fromkeys(("nan-leaks", "causal-nan-leaks", "nan-gradients"), NAN)
SECOND = (
    "An error, not a wrong number: the fused kernel for CPUs has no second derivative. The dense one has: `with "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
)
FORWARD = (
    "An error, not a wrong number: the fused kernel for CPUs has no forward mode. The dense one has: `with "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
)
TWICE = dict.fromkeys(("double-backward", "second-derivatives"), SECOND)
TWICE |= dict.fromkeys(("tangents", "mask-tangents", "jvp", "reverse-over-forward"), FORWARD)
SOFTMAX = {
    "reverse-over-forward": "An error, not a wrong number: the tangent of torch's softmax is computed in place, and "
    "cannot be differentiated again."
}
LOWEST = (
    "By design: masked logits are the lowest number and not -inf, so that softmax never sees a row of -inf, and "
    "such a row is the mean of the hidden values. Harmless if such rows are discarded."
)
SINGLE = "Softmax is always computed in float32: right for bfloat16 and float16, but float64 keeps 7 digits only."
IN_FLOAT32 = dict.fromkeys(
    ("definition", "mask-definition", "gradient", "second-derivatives", "tangents", "jvp"), SINGLE
)
RANGE = {
    "half-range": "Products are kept in float16 before they are scaled, where 65504 is the largest number; fused "
    "kernels keep them in float32. A defect where float16 is meant to be used."
}


def _torch() -> Target:
    return Target(
        "torch",
        torch_sdpa,
        {"causal-and-mask": "attn_mask and is_causal are mutually exclusive, with an error"},
        alignment="top-left",
        growth=1,
        setup=_source(torch_sdpa),
        remarks=NANS | TWICE,
        version=f"torch {torch.__version__}, scaled_dot_product_attention",
    )


def _mha(name: str, need_weights: bool) -> Target:
    rows = "A defect: the same module with need_weights=False returns 0, and need_weights=True is the default."
    dense = dict.fromkeys(("masked-rows", "masked-row-gradients"), rows) | SOFTMAX
    return Target(
        name,
        partial(torch_mha, need_weights=need_weights),
        {
            "scale": "the module has no parameter scale",
            "grouped": "one number of heads for queries, keys and values",
            "value-width": WIDTHS,
            "causal-and-mask": "the adapter would combine both into one attn_mask",
            "mask-broadcast": "its masks are (Q, K) or (B * H, Q, K), built by the adapter",
        },
        alignment="top-left",
        growth=2 if need_weights else 1,
        setup=_source(torch_mha, f"need_weights={need_weights}"),
        remarks=NANS | (dense if need_weights else TWICE),
        version=f"torch {torch.__version__}, nn.MultiheadAttention, need_weights={need_weights}",
    )


QUADRATIC = (
    "torch does not promise a growth; without a block mask the compiled CPU kernel uses n² floats, also in later calls."
)


def _flex() -> Target:
    return Target(
        "flex",
        flex_compiled,
        {
            "empty": "not run: without keys its CPU kernel divides by zero and kills the process (SIGFPE)",
            "dropout": "it has no dropout",
            "gradients": "FlexAttention cannot be differentiated on a CPU",
            "forward-mode": "FlexAttention cannot be differentiated on a CPU",
            "alignment": "its mask is a function of positions: the caller chooses the alignment",
            "causal-empty-rows": "its mask is a function of positions",
            "causal-and-mask": "the adapter would combine both into one function",
            "mask-broadcast": "its mask is a function of positions",
        },
        alignment="top-left",
        growth=1,
        setup=_source(flex_compiled),
        remarks=NANS | {"memory": QUADRATIC},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_cases=1,  # it is compiled again for every shape, which takes more than ten seconds
        version=f"torch {torch.__version__}, FlexAttention under torch.compile",
    )


def _transformers() -> Target:
    return Target(
        "transformers-eager",
        transformers_eager,
        {
            "causal-and-mask": "the caller combines both into one mask",
            "alignment": "the caller builds the mask",
            "mask-broadcast": "the mask is added; torch broadcasts it",
        },
        setup=_source(transformers_eager),
        remarks=NANS | IN_FLOAT32 | RANGE | SOFTMAX | dict.fromkeys(("masked-rows", "causal-empty-rows"), LOWEST),
        version=f"transformers {version('transformers')}, eager_attention_forward of Llama",
    )


def _x_transformers(name: str, flash: bool) -> Target:
    groups = "Another convention: models trained with it are consistent, but heads of other checkpoints are mixed up."
    rows = dict.fromkeys(("grouped-heads", "grouped-gradients"), groups) | {"causal-empty-rows": LOWEST}
    return Target(
        name,
        partial(x_transformers, flash=flash),
        growth=1 if flash else 2,
        setup=_source(x_transformers, f"flash={flash}"),
        remarks=NANS | rows | (TWICE if flash else IN_FLOAT32 | RANGE | SOFTMAX),
        version=f"x-transformers {version('x-transformers')}, Attend(flash={flash})",
    )


def _keras() -> Target:
    floats = "By design: the dtype promotion of Keras turns float64 into float32 on every backend."
    return Target(
        "keras",
        keras_ops,
        {"dropout": "the function has no dropout", "value-width": "value has the shape of key"},
        alignment="top-left",
        setup=_source(keras_ops),
        remarks=NANS | TWICE | {"masked-rows": LOWEST} | dict.fromkeys(("output-dtype", "gradient"), floats),
        version=f"keras {version('keras')}, ops.dot_product_attention, torch backend",
    )


def _source(adapter: Callable[..., Tensor], options: str = "") -> str:
    """The source of an adapter, followed by the definition of `attend`."""
    name = adapter.__name__
    definition = f"attend = functools.partial({name}, {options})" if options else f"attend = {name}"
    return f"{inspect.getsource(adapter)}\n\n{definition}"


PEERS: dict[str, Callable[[], Target]] = {
    "torch": _torch,
    "torch-mha": partial(_mha, "torch-mha", False),
    "torch-mha-weights": partial(_mha, "torch-mha-weights", True),
    "flex": _flex,
    "transformers-eager": _transformers,
    "x-transformers": partial(_x_transformers, "x-transformers", False),
    "x-transformers-flash": partial(_x_transformers, "x-transformers-flash", True),
    "keras": _keras,
}


def peer(name: str) -> Target:
    """The target of another library; raise `NotSupported` if it is not installed."""
    try:
        return PEERS[name]()
    except PackageNotFoundError as error:
        raise NotSupported(f"{error.name} is not installed; pip install {error.name}") from None
