"""x Wᵀ + b with a packed weight: a weight in the layout of the GEMM kernel, possibly in fewer bytes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from regard.engines import native
from regard.engines.weight_formats import BYTES, CHOICES, PanelLayout, Quantized, pack, read_rows, unpack, unpack_groups

LARGEST = 1e34  # size of a number that can be rounded to an integer times a scale: sums of 32 such integers stay finite
PADDING = 1.1  # largest ratio of packed bytes to those of a float32 weight
_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_SAVES_STATE = nn.Module._save_to_state_dict.__code__
# Methods that hand out or replace memory, which a packed weight does not have in its own layout.
_MEMORY = {
    Tensor.data.__set__, Tensor.data_ptr, Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.storage,  # type: ignore[attr-defined]
    Tensor.share_memory_, Tensor.__dlpack__,
}  # fmt: skip


class PackedWeight(Tensor):
    """A weight (N, K) in the layout of the GEMM kernel and in a format of `weight_formats`, read-only.

    It has the shape and `requires_grad` of the weight, and its dtype is float32. Without gradients, `F.linear` and
    `F.embedding` read it directly; every other call reads a float32 copy in the plain layout, also returned by
    `clone()`, so that all derivatives are those of the plain weight. A write, or a view that could be written to,
    raises.

    >>> import torch
    >>> from regard.engines.packed_linear import PackedWeight
    >>> weight = torch.randn(64, 8)
    >>> packed = PackedWeight.pack(weight)
    >>> torch.equal(packed.clone(), weight)
    True
    >>> torch.nn.functional.linear(torch.randn(3, 8), packed).shape
    torch.Size([3, 64])
    """

    panels: Tensor  # float32 (panels, K, rows of a panel), or bytes (panels, ...); the last one is padded with zeros
    layout_of_panels: PanelLayout

    @staticmethod
    def __new__(cls, panels: Tensor, layout: PanelLayout, requires_grad: bool = False) -> PackedWeight:
        packed: PackedWeight = Tensor._make_wrapper_subclass(
            cls, layout[1:3], dtype=torch.float32, device=panels.device, requires_grad=requires_grad
        )
        packed.panels, packed.layout_of_panels = panels, layout
        return packed

    @staticmethod
    def pack(weight: Tensor | Quantized, format: str = "float32", requires_grad: bool | None = None) -> PackedWeight:
        """Pack a float32 weight (N, K), bit for bit in float32 and rounded in other formats, or a quantised one."""
        if requires_grad is None:
            requires_grad = isinstance(weight, Tensor) and weight.requires_grad
        with torch.no_grad():
            return PackedWeight(*pack(weight, format, native.panel_rows()), requires_grad)

    def unpack(self) -> Tensor:
        """Return the weight (N, K) as plain float32; `clone()` is the same with derivatives."""
        return unpack(self.panels, self.layout_of_panels)

    @property
    def format(self) -> str:
        """The format of the numbers: "float32", "bfloat16", "int8", "int4" or "int4_minimum"."""
        return self.layout_of_panels.format

    def quantized(self) -> Quantized | None:
        """Return integers and scales, or None if the format has none."""
        plain = self.format in ("float32", "bfloat16")
        return None if plain else unpack_groups(self.panels, self.layout_of_panels)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[PanelLayout, bool]]:
        return ["panels"], (self.layout_of_panels, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: tuple[PanelLayout, bool], *_: Any) -> PackedWeight:
        return PackedWeight(inner["panels"], *context)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and type(_weight_argument(args, kwargs)) is PackedWeight:
            return _linear(*args, **kwargs)
        if func is F.embedding and type(_weight_argument(args, kwargs)) is PackedWeight:
            return _embedding(*args, **kwargs)
        # A state dict holds plain copies. Hooks do not help: it may belong to any module that shares the weight.
        if func is Tensor.detach and not torch.compiler.is_compiling() and sys._getframe(1).f_code is _SAVES_STATE:
            return args[0].unpack()
        if func in _MEMORY:
            _refuse(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args else None
        if isinstance(own, PackedWeight):
            if func in _SAME or (func is _aten.view.default and tuple(args[1]) == tuple(own.shape)):
                return PackedWeight(own.panels, own.layout_of_panels)
            if func is _aten._to_copy.default and _changes_type(own, kwargs):
                _refuse("a change of dtype or device")
        if func.namespace != "aten":  # collectives write to tensors that their schemas do not mark
            _refuse(str(func))
        for n, argument in enumerate(func._schema.arguments):
            given = args[n] if n < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and any(isinstance(each, PackedWeight) for each in tree_leaves(given)):
                _refuse(str(func))
        return func(*tree_map(_unpack_if_packed, args), **tree_map(_unpack_if_packed, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        packed = PackedWeight(self.panels.clone(), self.layout_of_panels, self.requires_grad)
        memo[id(self)] = packed
        packed.__dict__.update(copy.deepcopy(_attributes(self), memo))
        packed.grad = copy.deepcopy(self.grad, memo)
        return packed

    def __reduce_ex__(self, protocol: Any) -> Any:
        content = self.quantized() or self.unpack()
        return _rebuild, (content, self.requires_grad, _attributes(self), self.format)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        format = "" if self.format == "float32" else f", {self.format}"
        return f"PackedWeight({tuple(self.shape)}{format}, requires_grad={self.requires_grad})"


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: tuple[int, int] | None = None) -> Tensor:
    """Compute `F.linear(x, weight, bias)`, (..., K) to (..., N), or only the rows `(first, last)` of the weight.

    >>> import torch
    >>> from regard.engines.packed_linear import project
    >>> x, weight = torch.randn(3, 8), torch.randn(5, 8)
    >>> project(x, weight, rows=(0, 2)).shape
    torch.Size([3, 2])
    """
    if type(weight) is PackedWeight:
        return _linear(x, weight, bias, rows)
    if rows is not None:
        weight, bias = weight[slice(*rows)], None if bias is None else bias[slice(*rows)]
    return F.linear(x, weight, bias)


def why_not(weight: Tensor, format: str = "float32") -> str:
    """Return the reason why a weight cannot be packed in a format, or an empty string."""
    if problem := native.why_missing():
        return problem
    if type(weight) not in (Tensor, nn.Parameter):
        return f"it is a {type(weight).__name__}"
    if weight.dtype != torch.float32 or not weight.is_cpu or weight.layout != torch.strided:
        return f"it is {weight.dtype} on {weight.device}, and the kernel takes float32 on a CPU"
    if weight.dim() != 2 or not weight.numel():
        return f"its shape is {tuple(weight.shape)}, and the kernel takes matrices"
    side, N = native.panel_rows(), weight.shape[0]
    if (padded := N + -N % side) * BYTES[format] > PADDING * N * BYTES["float32"]:
        return f"its {N} rows would be padded to {padded}"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "it has gradient hooks"
    if format in ("int8", "int4") and not bool((weight.detach().abs() <= LARGEST).all()):
        return f"it has NaN or infinite numbers, or numbers above {LARGEST:g}, which {format} cannot represent"
    return ""


def check_format(format: str) -> str:
    """Return the format; raise if a weight cannot be converted to it."""
    if format not in CHOICES:
        raise ValueError(f"weights must be one of {', '.join(map(repr, CHOICES))}, got {format!r}")
    return format


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None, rows: Any = None) -> Tensor:
    if not _may_multiply(input, weight, bias):
        return project(input, weight.clone(), bias, rows=rows)
    first, last = rows or (0, weight.shape[0])
    extra = first % native.panel_rows()  # leading columns of the first panel to drop
    flat = input.reshape(-1, input.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = input.new_empty((*input.shape[:-1], last - first + extra))
    native.multiply(flat, weight.panels, weight.layout_of_panels, bias, out, first - extra)
    return out[..., extra:] if extra else out


def _embedding(
    input: Tensor, weight: PackedWeight, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **options: Any
) -> Tensor:
    if max_norm is not None:
        _refuse("an embedding with max_norm")
    reads = is_eager() and is_plain(input) and input.dtype in (torch.int32, torch.int64)
    if not reads or (torch.is_grad_enabled() and weight.requires_grad):
        return F.embedding(input, weight.clone(), padding_idx, None, *rest, **options)
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < weight.shape[0]:
        raise IndexError("index out of range in self")  # as F.embedding reports it
    return read_rows(weight.panels, weight.layout_of_panels, input)


def _may_multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> bool:
    """Whether the kernel can compute this call and no derivative is needed."""
    if not is_eager() or torch._C._is_any_autocast_enabled():
        return False
    if not is_plain(x) or x.dtype != torch.float32 or x.shape[-1:] != weight.shape[1:]:
        return False
    if bias is not None and not (
        is_plain(bias) and bias.dtype == torch.float32 and bias.shape == weight.shape[:1] and bias.is_contiguous()
    ):
        return False
    if not torch.is_grad_enabled():
        return True
    return not (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))


def is_plain(x: Tensor) -> bool:
    """Whether x is plain CPU memory."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_cpu
        and x.layout == torch.strided
        and not x.is_neg()
        and not x._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and (x.untyped_storage().nbytes() > 0 or not x.numel())
    )


def is_eager() -> bool:
    """Whether a call is executed eagerly: not compiled, recorded, transformed or differentiated in forward mode."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise RuntimeError("a frozen model cannot be exported or traced: call rg.nn.thaw(model) first")
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"a packed weight is read-only, but {what} would write to it or return a view of it; call rg.nn.thaw(model) "
        "first, or read a copy, weight.clone()"
    )


def _weight_argument(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _unpack_if_packed(value: Any) -> Any:
    return value.unpack() if isinstance(value, PackedWeight) else value


def _changes_type(weight: PackedWeight, wanted: dict[str, Any]) -> bool:
    dtype, device = wanted.get("dtype"), wanted.get("device")
    return dtype not in (None, weight.dtype) or (device is not None and torch.device(device).type != "cpu")


def _attributes(weight: PackedWeight) -> dict[str, Any]:
    """Return the attributes set on the parameter, such as `_is_param`."""
    return {name: value for name, value in weight.__dict__.items() if name not in ("panels", "layout_of_panels")}


def _rebuild(content: Tensor | Quantized, requires_grad: bool, attributes: dict[str, Any], format: str) -> Tensor:
    """Restore a pickled weight, packed for the kernels of this machine if it has them."""
    plain = content.dequantize() if isinstance(content, Quantized) else content
    weight: Tensor = nn.Parameter(plain, requires_grad)
    if not why_not(weight, format):
        weight = PackedWeight.pack(content, format, requires_grad)
    weight.__dict__.update(attributes)
    return weight
