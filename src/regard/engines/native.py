"""The compiled kernels: dot-product and additive scores, and linear attention. Nobody else knows the library."""

from __future__ import annotations

import ctypes
import operator
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.engines import sdpa
from regard.engines.lowering import Fixed, Lowered, differentiable, lower, part_of
from regard.engines.problem import Engine, Problem
from regard.engines.visible import visible_keys, visible_to
from regard.positions.biases import DenseBias, Diagonal, Shaw
from regard.scores import Additive, Bilinear, Cosine, Dot

INTERFACE = 5  # of csrc/regard.h
SMALL = 1 << 15  # multiplications below which training is all set-up
BITS_BYTES = 1 << 28  # what the bits of partial tiles may take
LONGEST = 2**31 - 1 - 1024  # the kernels number keys and queries with 32 bits

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_ERRORS = {
    -1: (MemoryError, "the native engine found no memory to work in; fewer threads or shorter sequences need less"),
    -2: (ValueError, "the native engine was given what its interface does not allow"),
    -3: (ValueError, "the native engine cannot address so large a problem"),
}
_TENSOR = "P4q"
_PROBLEM = struct.Struct("@7q2i3d" + 3 * _TENSOR + "2P3q" + "5P2q" + 3 * _TENSOR + "2iq2PQ2Id" + _TENSOR)
_RESULT = struct.Struct("@" + 3 * _TENSOR)
_GRADIENT = struct.Struct("@" + 14 * _TENSOR)
_STATISTICS = struct.Struct("@" + 4 * _TENSOR + "q2P" + _TENSOR + "2Pq")
_COLUMNS = struct.Struct("@" + _TENSOR + "Pq")
_POOL = struct.Struct("@" + _TENSOR + "2q")
_PRODUCT = struct.Struct("@5q4P2i")
_LINEAR = struct.Struct("@6q4i" + 3 * _TENSOR)
_LINEAR_RESULT = struct.Struct("@" + 2 * _TENSOR)
_LINEAR_GRADIENT = struct.Struct("@" + 6 * _TENSOR)
_ABSENT = (0, 0, 0, 0, 0)
_ADDRESS = struct.Struct("@P").pack


# The library


@cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none. `REGARD_LIBRARY` names another file."""
    named = os.environ.get("REGARD_LIBRARY")
    folders = [Path(__file__).parents[1], *(Path(entry) / "regard" for entry in sys.path if entry)]
    files = [Path(named)] if named else [file for folder in folders for file in sorted(folder.glob("_native.*"))]
    files = [file for file in files if file.suffix in (".so", ".dylib", ".dll", ".pyd")]
    if not files:
        return "the compiled library is missing: no C++ compiler was found when regard was installed"
    try:
        found = ctypes.CDLL(str(files[0]))
        version = found.regard_interface()
    except (OSError, AttributeError) as error:
        return f"the compiled library does not load: {error}"
    if version != INTERFACE:
        return f"the compiled library has interface {version}, but {INTERFACE} is needed; reinstall regard"
    for name in ("regard_isa", "regard_isas_compiled", "regard_version"):
        getattr(found, name).restype = ctypes.c_char_p
    names = ("dot_forward", "dot_backward", "dot_look", "dot_weights", "dot_map", "linear_forward", "linear_backward")
    for name in (f"regard_{name}" for name in names):
        getattr(found, name).argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    long, pointer = ctypes.c_int64, ctypes.c_void_p
    found.regard_packed_size.restype, found.regard_packed_size.argtypes = long, [long, long]
    found.regard_pack_weight.argtypes = [pointer, long, long, long, pointer]
    found.regard_multiply.argtypes = [ctypes.c_char_p]
    return found


def missing() -> str:
    """Why there is no library, or nothing."""
    found = library()
    return found if isinstance(found, str) else ""


def about() -> dict[str, str]:
    """What one would paste into a bug report."""
    found = library()
    if isinstance(found, str):
        return {"native": found}
    return {
        "native": found._name,
        "instruction set": found.regard_isa().decode(),
        "compiled for": found.regard_isas_compiled().decode(),
        "threads": str(torch.get_num_threads()) if found.regard_has_threads() else "1 (built without OpenMP)",
    }


def _call(name: str, *arguments: bytes | int) -> None:
    if status := getattr(library(), name)(*arguments):
        raise _error(status, arguments[0])


def _error(status: int, given: bytes | int = b"") -> Exception:
    kind, message = _ERRORS.get(status, (RuntimeError, f"the native engine failed with status {status}"))
    if isinstance(given, bytes) and len(given) == _PROBLEM.size:
        sizes = zip("BHGQKDE", struct.unpack_from("@7q", given), strict=True)
        message += f": {', '.join(f'{axis}={n}' for axis, n in sizes)}, {torch.get_num_threads()} threads"
    return kind(message)


# What the kernel is given


def _constant(function: Any) -> None:
    """What torch.compiler.assume_constant_result does, without loading the compiler: tracing does not enter it."""
    function._dynamo_marked_constant = True


_constant(missing)
_constant(visible_keys)


def _place(tensor: Tensor | None) -> tuple[int, ...]:
    """Address and strides, 0 along an axis of size 1."""
    if tensor is None:
        return _ABSENT
    strides = [0 if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.data_ptr(), *strides, *(0,) * (4 - len(strides))


def _rows(tensor: Tensor | None) -> tuple[int, ...]:
    """The same for rows that lie close."""
    return _ABSENT if tensor is None else (*_place(tensor)[:4], 1)


def _packed(x: Lowered, fixed: Fixed) -> bytes:
    (B, H, Q, D), (_, G, K, E) = x.query.shape, x.value.shape
    scale, softcap, temperature, dropout = fixed.numbers
    radius, wants, *strides = fixed.sizes
    intervals: tuple[int, ...] = (0,) * 5
    table: tuple[int, ...] = (0,) * 7
    if len(fixed.visible) == 2:
        start, stop = fixed.visible
        intervals = start.data_ptr(), stop.data_ptr(), *_place(start)[1:4]
    elif fixed.visible:
        table = *(tensor.data_ptr() for tensor in fixed.visible), *strides
    return _PROBLEM.pack(
        B, H, G, Q, K, D, E, _DTYPES[x.query.dtype], torch.get_num_threads(), scale, softcap, temperature,
        x.query.data_ptr(), *x.query.stride(), x.key.data_ptr(), *x.key.stride(), x.value.data_ptr(), *x.value.stride(),
        *intervals, *table, *_rows(x.diagonal), *_rows(x.row_table), *_place(x.bias),
        0 if x.bias is None else _DTYPES[x.bias.dtype], wants, radius,
        0 if fixed.offset is None else fixed.offset.data_ptr(), 0 if x.sink is None else x.sink.data_ptr(),
        0 if fixed.seed is None else int(fixed.seed) & 0xFFFFFFFFFFFFFFFF,
        int(dropout * 2**32), 0, 1 / (1 - dropout), *_rows(x.weight),
    )  # fmt: skip


# Forward and backward


def _like(query: Tensor, width: int) -> Tensor:
    """Room for the output, laid out as the query is: heads that lie inside a token stay there."""
    return torch.empty_like(query if width == query.shape[3] else query[..., :1].expand(*query.shape[:3], width))


def _results(query: Tensor, value: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for output, log-sum-exp and mass by distance."""
    real = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows, device = query.shape[:3], query.device
    output = _like(query, value.shape[3])
    lse = torch.empty(rows, dtype=real, device=device)
    return output, lse, torch.empty((*rows, 2 * sizes[0] + 1) if sizes[1] else (0,), dtype=real, device=device)


def _forward(x: Lowered, fixed: Fixed) -> tuple[Tensor, Tensor, Tensor]:
    output, lse, mass = _results(x.query, x.value, fixed.sizes)
    by_distance = _rows(mass) if fixed.sizes[1] else _ABSENT
    places = output.data_ptr(), *output.stride(), lse.data_ptr(), *lse.stride(), 0, *by_distance
    _call("regard_dot_forward", _packed(x, fixed), _RESULT.pack(*places))
    return output, lse, mass


def _output(x: Lowered, fixed: Fixed) -> Tensor:
    """The output alone: at a few tokens, making room for more takes longer than the kernel."""
    output = _like(x.query, x.value.shape[3])
    places = output.data_ptr(), *output.stride(), *_ABSENT, *_ABSENT
    _call("regard_dot_forward", _packed(x, fixed), _RESULT.pack(*places))
    return output


def _room(x: Lowered) -> tuple[Tensor | None, ...]:
    """Room for the gradients of what the kernel differentiates, in its order; those that are absent are None."""
    real = torch.float64 if x.query.dtype == torch.float64 else torch.float32
    made: list[Tensor | None] = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3]]
    made += [None if t is None else torch.empty_like(t) for t in (x.diagonal, x.row_table)]
    made.append(None if x.bias is None else x.bias.new_zeros(x.bias.shape, dtype=real))
    made.append(None if x.sink is None else x.query.new_empty(x.query.shape[:3], dtype=real))
    per_head = (*x.query.shape[:2], 1, x.query.shape[3])
    made.append(None if x.weight is None else x.query.new_empty(per_head, dtype=real))
    return tuple(made)


def _backward(
    x: Lowered, fixed: Fixed, results: Sequence[Tensor], grads: Sequence[Tensor | None], wants_bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients in the order of `Lowered`."""
    output, lse, mass = results[0], results[1], results[2] if fixed.sizes[1] else None
    d_output, d_lse, d_mass = grads
    if d_output is None:
        d_output = torch.zeros_like(output)
    dq, dk, dv, d_diagonal, d_table, d_bias, delta, d_weight = _room(x._replace(bias=x.bias if wants_bias else None))
    d_mass = None if mass is None or d_mass is None else d_mass.contiguous()
    places = (
        _place(output), _place(lse), _rows(mass), _place(d_output), _place(d_lse), _rows(d_mass), _place(dq),
        _place(dk), _place(dv), _rows(d_diagonal), _rows(d_table), _place(d_bias), _place(delta),
        _place(d_weight),
    )  # fmt: skip
    _call("regard_dot_backward", _packed(x, fixed), _GRADIENT.pack(*(n for place in places for n in place)))
    d_sink = None
    if x.sink is not None and delta is not None:
        share = (x.sink[:, None] - lse).exp()  # what the sink takes of each row
        d_sink = -torch.where(share > 0, share * delta, 0.0).sum((0, 2))
    if d_bias is not None and x.bias is not None:
        d_bias = d_bias.to(x.bias.dtype)
    if d_weight is not None and x.weight is not None:
        d_weight = d_weight.sum_to_size(x.weight.shape)
    return dq, dk, dv, d_diagonal, d_table, d_bias, d_sink, d_weight


class _Attend(torch.autograd.Function):
    """The kernel in eager mode."""

    @staticmethod
    def forward(ctx: Any, fixed: Fixed, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        x = Lowered(*tensors)  # type: ignore[arg-type]
        results = _forward(x, fixed)
        ctx.save_for_backward(*tensors, *results)
        ctx.fixed = fixed
        ctx.set_materialize_grads(False)
        if not fixed.sizes[1]:
            ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, output, lse, mass = ctx.saved_tensors
        x = Lowered(*tensors)
        if torch.is_grad_enabled():
            return None, *differentiable(x, ctx.fixed, grads, ctx.needs_input_grad[1:])
        found = _backward(x, ctx.fixed, (output, lse, mass), grads, ctx.needs_input_grad[6])
        return None, *(grad if wanted else None for grad, wanted in zip(found, ctx.needs_input_grad[1:], strict=True))


# The same as operators, for torch.compile and torch.export

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? diagonal, Tensor? row_table, Tensor? bias, Tensor? sink, "
    "Tensor? weight, "
    "Tensor[] visible, Tensor? offset, Tensor? seed, float[] numbers, int[] sizes"
)
_OUTPUTS = "Tensor output, Tensor lse, Tensor mass"
_TENSORS = len(Lowered._fields)  # these come first


@torch.library.custom_op("regard::dot", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)")
def _dot(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(Lowered(*arguments[:_TENSORS]), Fixed(*arguments[_TENSORS:]))


@_dot.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(arguments[0], arguments[2], arguments[_TENSORS + 4])


@torch.library.custom_op(
    "regard::dot_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OUTPUTS}, Tensor? d_output, Tensor? d_lse, Tensor? d_mass) -> Tensor[]",
)
def _dot_backward(*arguments: Any) -> list[Tensor]:
    x, rest = Lowered(*arguments[:_TENSORS]), arguments[_TENSORS:]
    found = _backward(x, Fixed(*rest[:5]), rest[5:8], rest[8:], x.bias is not None)
    return [grad for grad in found if grad is not None]


@_dot_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in arguments[:_TENSORS]
        if tensor is not None
    ]


def _remember(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    visible, offset, seed, *ctx.rest = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *visible, offset, seed, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple:
    saved = ctx.saved_tensors
    x, visible, (offset, seed), results = saved[:_TENSORS], saved[_TENSORS:-5], saved[-5:-3], saved[-3:]
    found = iter(torch.ops.regard.dot_backward(*x, visible, offset, seed, *ctx.rest, *results, *grads))
    return *(None if tensor is None else next(found) for tensor in x), [None] * len(visible), None, None, None, None


_dot.register_autograd(_differentiate, setup_context=_remember)


# Causal linear attention


def _packed_linear(query: Tensor, key: Tensor, value: Tensor, elu: bool) -> bytes:
    (B, H, N, M), (_, G, _, E) = query.shape, value.shape
    places = (n for tensor in (query, key, value) for n in _place(tensor))
    return _LINEAR.pack(B, H, G, N, M, E, _DTYPES[query.dtype], torch.get_num_threads(), elu, 0, *places)


def linear_forward(query: Tensor, key: Tensor, value: Tensor, elu: bool) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and its denominator (B, H, N) of query (B, H, N, M), key (B, G, N, M), value (B, G, N, E).

    Query and key are features, or with `elu` what is to become them.
    """
    output, norm, _ = _results(query, value, (0, 0))
    places = _LINEAR_RESULT.pack(*_place(output), *_place(norm))
    _call("regard_linear_forward", _packed_linear(query, key, value, elu), places)
    return output, norm


def linear_backward(
    query: Tensor, key: Tensor, value: Tensor, elu: bool, output: Tensor, norm: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given that of the output."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    places = (n for tensor in (output, norm, grad, dq, dk, dv) for n in _place(tensor))
    _call("regard_linear_backward", _packed_linear(query, key, value, elu), _LINEAR_GRADIENT.pack(*places))
    return dq, dk, dv


# The engine


def run(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    tracing = torch.compiler.is_compiling()
    plain = seed is None and problem.bias is None and problem.sink is None and isinstance(problem.score, Dot)
    if plain and not problem.grad and not problem.score.tensors() and not tracing:
        return _plain_forward(problem, query, key, value)
    x, shaw, fixed = _prepared(problem, query, key, value, seed)
    if tracing:
        output, lse, mass = torch.ops.regard.dot(*x, *fixed[:-1])
    elif torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in x):
        output, lse, mass = _Attend.apply(fixed, *x)
    elif not problem.lse and not fixed.sizes[1]:
        return _output(x, fixed), None
    else:
        output, lse, mass = _forward(x, fixed)
    if shaw is not None and shaw.values is not None:
        output = (output.to(mass) + mass @ shaw.values.to(mass)).to(problem.dtype)
    return output, lse


def _prepared(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[Lowered, Shaw | None, Fixed]:
    x, shaw, scale = lower(problem, query, key, value)
    frame = problem.frame
    visible: tuple[Tensor, ...] = ()
    strides = 0, 0
    if problem.mask is not None:
        *axes, offsets = frame.key()
        # Sizes as plain numbers: where they are symbols, tracing fixes them, since what is visible depends on them.
        visible, strides = visible_keys(problem.mask, (*map(operator.index, axes), tuple(map(operator.index, offsets))))
    offset, radius, wants = None, 0, 0
    if shaw is not None:
        offset = torch.tensor(frame.offsets()).expand(frame.B).contiguous()
        radius, wants = shaw.reach, int(shaw.values is not None)
    softcap = problem.score.softcap if isinstance(problem.score, Dot) else None
    numbers = (scale, softcap or 0.0, problem.temperature, problem.dropout)
    return x, shaw, Fixed(visible, offset, seed, numbers, (radius, wants, *strides), problem)


def _plain_forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """What was packed before, but for the addresses: a small call is all packing."""
    layout = (query.stride(), key.stride(), value.stride(), torch.get_num_threads())
    known = problem.memo.get(layout)
    frame = problem.frame
    if known is None:
        x, _, fixed = _prepared(problem, query, key, value, None)
        packed, at = _packed(x, fixed), struct.calcsize("@7q2i3d")
        step = struct.calcsize(_TENSOR)
        cuts = [
            packed[:at],
            *(packed[at + n * step + 8 : at + (n + 1) * step] for n in range(3)),
            packed[at + 3 * step :],
        ]
        known = problem.memo[layout] = cuts, fixed.visible  # the addresses of what is visible are packed
    (head, q, k, v, tail), _ = known
    output = _like(query, problem.E)
    lse = torch.empty((frame.B, frame.H, frame.Q), dtype=problem.arithmetic) if problem.lse else None
    _call(
        "regard_dot_forward",
        head + _ADDRESS(query.data_ptr()) + q + _ADDRESS(key.data_ptr()) + k + _ADDRESS(value.data_ptr()) + v + tail,
        _RESULT.pack(output.data_ptr(), *output.stride(), *_place(lse), *_ABSENT),
    )
    return output, lse


# What `look` gives, for the problems that the kernels know


def weights(problem: Problem, query: Tensor, key: Tensor, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """As `look.weights`, but not differentiable."""
    (some, row_at), (picked, column_at) = (part.unique(return_inverse=True) for part in (rows, columns))
    frame, whole = problem.frame, len(some) == problem.frame.Q
    x, _, fixed = _prepared(problem if whole else replace(problem, mask=None), query, key, key[..., :0], None)
    if not whole and problem.mask is not None:
        visible, strides = visible_to(problem.mask, frame, some)
        fixed = fixed._replace(visible=visible, sizes=(*fixed.sizes[:2], *strides))
    every = len(heads) == frame.H and bool((heads == torch.arange(frame.H)).all())
    found = torch.empty((frame.B, len(heads), len(some), len(picked)), dtype=problem.arithmetic)
    for n, head in enumerate([None] if every else heads.tolist()):
        one, own = part_of(x, fixed, head, some)
        place = found if head is None else found[:, n : n + 1]
        _call("regard_dot_weights", _packed(one, own), _COLUMNS.pack(*_rows(place), picked.data_ptr(), len(picked)))
    for axis, asked, at in ((2, rows, row_at), (3, columns, column_at)):
        if not torch.equal(asked, (some, picked)[axis - 2]):
            found = found.index_select(axis, at)
    return found.to(problem.dtype)


def takes_rows(problem: Problem, rows: Tensor) -> bool:
    """Whether `weights` can be asked for these rows: biases of distance are read along neighbouring rows."""
    apart = bool((rows.unique().diff() > 1).any())
    return not apart or problem.bias is None or all(isinstance(part, DenseBias) for part in problem.bias.parts())


def pooled(problem: Problem, query: Tensor, key: Tensor, size: tuple[int, int]) -> Tensor:
    """As `look.pooled`, in one pass."""
    x, _, fixed = _prepared(problem, query, key, key[..., :0], None)
    found = torch.empty((*query.shape[:2], *size), dtype=problem.arithmetic)
    _call("regard_dot_map", _packed(x, fixed), _POOL.pack(*_rows(found), *size))
    return found.to(problem.dtype)


def statistics(
    problem: Problem, query: Tensor, key: Tensor, top: int, chosen: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """As `look.statistics`."""
    x, _, fixed = _prepared(problem, query, key, key[..., :0], None)
    rows = query.shape[:3]
    numbers = [torch.empty(rows, dtype=problem.arithmetic) for _ in range(4)]
    keys, weights = torch.empty((*rows, top), dtype=torch.int64), torch.empty((*rows, top), dtype=problem.arithmetic)
    offset = torch.tensor(problem.frame.offsets()).expand(problem.frame.B).contiguous()
    places = [n for tensor in numbers for n in _place(tensor)]
    mass, runs = None, torch.empty((2, 0), dtype=torch.int64)
    if chosen is not None:
        mass, runs = torch.empty(rows, dtype=problem.arithmetic), _runs(chosen)
    _call(
        "regard_dot_look",
        _packed(x, fixed._replace(offset=offset)),
        _STATISTICS.pack(
            *places, top, keys.data_ptr(), weights.data_ptr(), *_place(mass), runs[0].data_ptr(), runs[1].data_ptr(),
            runs.shape[1],
        ),
    )  # fmt: skip
    return *numbers, keys, weights, mass


def _runs(places: Tensor) -> Tensor:
    """Starts and stops of the runs of neighbours among places, (2, runs)."""
    places = places.unique()
    edge = torch.ones(len(places) + 1, dtype=torch.bool)
    edge[1:-1] = places.diff() > 1
    edge[0] = edge[-1] = len(places) > 0
    return torch.stack([places[edge[:-1]], places[edge[1:]] + 1])


# Products with weights


@cache
def panel_rows() -> int:
    """How many rows of a weight lie side by side: parts of a weight begin at multiples of it."""
    found = library()
    return 1 if isinstance(found, str) else found.regard_packed_size(1, 1)


def lay_out(weight: Tensor) -> Tensor:
    """A float32 weight (N, K) as `multiply` reads it."""
    found, (N, K) = library(), weight.shape
    assert not isinstance(found, str)
    if (size := found.regard_packed_size(N, K)) < 0:
        raise _error(size)
    numbers = torch.empty(size)
    _call("regard_pack_weight", weight.data_ptr(), weight.stride(0), N, K, numbers.data_ptr())
    return numbers


def multiply(x: Tensor, laid: Tensor, bias: Tensor | None, out: Tensor, first: int) -> None:
    """out (..., N) = x (M, K) times the rows of a weight from `first` on, plus the bias of these rows."""
    (M, K), N = x.shape, out.shape[-1]
    given = _PRODUCT.pack(
        M, N, K, x.stride(0) if M > 1 else K, N, x.data_ptr(), laid.data_ptr() + 4 * first * K,
        0 if bias is None else bias.data_ptr() + 4 * first, out.data_ptr(), torch.get_num_threads(), 0,
    )  # fmt: skip
    _call("regard_multiply", given)


def why_not(problem: Problem) -> list[str]:
    reasons, score = [], problem.score
    if reason := missing():
        reasons.append(reason)
    if problem.device.type != "cpu":
        reasons.append(f"its kernels run on a CPU, not on {problem.device}")
    if problem.empty:
        reasons.append("an axis is empty")
    frame = problem.frame
    sizes = {"B": frame.B, "H": frame.H, "Q": frame.Q, "K": frame.K, "D": problem.D, "E": problem.E}
    for axis, n in sizes.items():
        if n > LONGEST:
            reasons.append(f"its kernels count to {LONGEST:,} along an axis, but {axis} is {n:,}")
    if not isinstance(score, Dot | Cosine | Bilinear | Additive):
        reasons.append(f"its kernels know dot products and the additive score, not {score!r}")
    if problem.bias is not None:
        parts = problem.bias.parts()
        if any(not isinstance(part, Diagonal | Shaw | DenseBias) for part in parts):
            reasons.append(f"its kernels do not know {problem.bias!r}")
        if sum(isinstance(part, Shaw) for part in parts) > 1:
            reasons.append("its kernels take one shaw")
    if torch.compiler.is_compiling():
        if isinstance(problem.frame.offset, Tensor):
            reasons.append("torch.compile cannot tell what a tensor of offsets leaves visible")
        if problem.mask is not None and problem.mask.traced:
            reasons.append("torch.compile cannot read a mask that is made inside the compiled function")
    elif problem.functional:
        reasons.append("a torch.func transform is running")
    return reasons


def why_rather_not(problem: Problem) -> list[str]:
    frame = problem.frame
    work = frame.B * frame.H * frame.Q * frame.K * (problem.D + problem.E)
    lays_out = sdpa.peak_bytes(problem) > 0
    if problem.grad and work < SMALL and not lays_out and not sdpa.why_not(problem) + sdpa.why_rather_not(problem):
        return ["so small a call to train takes longer to set up than to compute, and torch sets up less"]
    if problem.mask is None or problem.empty or not problem.mask.opaque:
        return []
    batch, heads = problem.mask.extent(frame)
    if (needed := batch * heads * frame.Q * frame.K // 8) > BITS_BYTES:
        return [f"the bits of the mask may take {needed / 1e6:,.0f} MB"]
    return []


def peak_bytes(problem: Problem) -> int:
    frame, width = problem.frame, 8 if problem.arithmetic == torch.float64 else 4
    return width * torch.get_num_threads() * frame.K * (problem.D + problem.E)


ENGINE = Engine("native", why_not, why_rather_not, run, peak_bytes, dense=lambda problem: False)
