"""No argument crashes the kernels: huge sizes, no memory, invalid arguments of the C interface."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

import regard as rg
from regard.engines import native
from regard.engines.native import binding

if native.why_missing():
    pytest.skip(native.why_missing(), allow_module_level=True)

OK, NO_MEMORY, BAD_ARGUMENT, TOO_LARGE, NO_DATA = 0, -1, -2, -3, -4
BILLION = 1 << 30


def structures() -> dict[str, type]:
    """Return the structures of csrc/regard.h, from the library's description of them."""
    types: dict[str, type] = {"P": ctypes.c_void_p, "q": ctypes.c_int64, "Q": ctypes.c_uint64, "i": ctypes.c_int32,
                              "I": ctypes.c_uint32, "d": ctypes.c_double}  # fmt: skip
    fields: dict[str, list[tuple[str, str, int]]] = {}
    for kind, name, *rest in map(str.split, DESCRIPTION.splitlines()):
        if kind == "structure":
            fields[name] = []
        elif kind == "field":
            fields[[*fields][-1]].append((name, rest[0], int(rest[1])))
    for name, structure in fields.items():
        own = [(field, types[kind] * count if count > 1 else types[kind]) for field, kind, count in structure]
        types[name] = type(name, (ctypes.Structure,), {"_fields_": own})
    return types


def described() -> str:
    library = ctypes.CDLL(native.build_info()["native"])
    library.regard_layout.restype = ctypes.c_char_p
    return library.regard_layout().decode()


DESCRIPTION = described()
TYPES = structures()
Place, Intervals, Tiles, Problem, Result, Gradient, Statistics, Columns, Pool, Product = (
    TYPES[f"regard_{name}"]
    for name in ("tensor", "intervals", "tiles", "dot", "dot_result", "dot_gradient", "dot_statistics", "dot_columns",
                 "dot_pool", "packed_linear")
)  # fmt: skip


def place(array: np.ndarray) -> Place:
    strides = [step // array.itemsize for step in array.strides] + [0] * (4 - array.ndim)
    return Place(array.ctypes.data, (ctypes.c_int64 * 4)(*strides), 1)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


Q, K, D = 5, 7, 4
QUERY, KEY, VALUE, OUT, LSE = (
    random(1, 2, Q, D),
    random(1, 1, K, D),
    random(1, 1, K, 3),
    random(1, 2, Q, 3),
    random(1, 2, Q),
)
ROOM = [random(*QUERY.shape), random(*KEY.shape), random(*VALUE.shape)]
OFFSET = np.zeros(1, np.int64)


def problem(**changes: object) -> Problem:
    structure = Problem(
        1, 2, 1, Q, K, D, 3, 1, 1, 0, 0, 0.5, 0.0, 1.0, place(QUERY), place(KEY), place(VALUE), dropout_scale=1.0,
        kv_dtype=1,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(structure, name, value)
    return structure


def call(name: str, *arguments: ctypes.Structure | None) -> int:
    function = getattr(ctypes.CDLL(native.build_info()["native"]), name)
    function.argtypes = [ctypes.c_void_p] * 2
    return function(*(None if x is None else ctypes.addressof(x) for x in arguments))


def forward(given: Problem | None, result: Result | None = None) -> int:
    return call("regard_dot_forward", given, Result(place(OUT), place(LSE)) if result is None else result)


def gradient(**changes: Place) -> Gradient:
    structure = Gradient(out=place(OUT), lse=place(LSE), d_out=place(OUT))
    structure.d_q, structure.d_k, structure.d_v = map(place, ROOM)
    for name, value in changes.items():
        setattr(structure, name, value)
    return structure


def statistics(**changes: object) -> Statistics:
    structure = Statistics(*(place(LSE) for _ in range(4)))
    for name, value in changes.items():
        setattr(structure, name, value)
    return structure


def inspection_problem(**changes: object) -> Problem:
    return problem(**{"E": 0, "v": Place(), "offset": OFFSET.ctypes.data, **changes})


def test_the_structures_are_packed_as_the_compiler_lays_them_out() -> None:
    """ctypes uses the layout rules of C, not the offsets that the library describes."""
    sizes = {line.split()[1]: int(line.split()[2]) for line in DESCRIPTION.splitlines() if line.startswith("structure")}
    assert set(sizes) == set(binding.Structure.known)
    for name, structure in binding.Structure.known.items():
        assert ctypes.sizeof(TYPES[name]) == structure.size == sizes[name]
        assert {field: getattr(TYPES[name], field).offset for field, _ in TYPES[name]._fields_} == structure.offsets
    assert forward(problem()) == OK
    assert call("regard_dot_backward", problem(), gradient()) == OK
    assert call("regard_dot_row_statistics", inspection_problem(), statistics()) == OK


CHANGED = {
    "a field under another name": ("field softcap d", "field cap d", "regard_dot has the fields"),
    "a field that is missing": ("field temperature d 1 88 8\n", "", "regard_dot has the fields"),
    "a field of another type": ("field threads i 1 60 4", "field threads q 1 60 4", "threads of regard_dot"),
    "a field elsewhere": ("field threads i 1 60 4", "field threads i 1 64 4", "threads of regard_dot"),
    "more strides": ("field stride q 4 8 32", "field stride q 5 8 40", "regard_tensor has the fields"),
    "a structure that is missing": ("structure regard_linear ", "structure regard_other ", "regard_linear is missing"),
    "a structure of another size": ("structure regard_tensor 48", "structure regard_tensor 56", "has 56 bytes"),
    "a number": ("number REGARD_TILE 64", "number REGARD_TILE 128", "TILE is 128, but 64 is needed"),
    "a number that is missing": ("number REGARD_NO_DATA -4\n", "", "NO_DATA is None, but -4 is needed"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_library_with_another_layout_is_refused(name: str) -> None:
    was, now, reason = CHANGED[name]
    assert was in DESCRIPTION
    try:
        assert reason in binding._read_layout(DESCRIPTION.replace(was, now, 1))
    finally:
        assert not binding._read_layout(DESCRIPTION)


def test_a_library_with_another_layout_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(binding._NUMBERS, "TILE", 32)
    native.library.cache_clear()
    try:
        assert "another layout of structures: TILE is 64, but 32 is needed; reinstall regard" in native.why_missing()
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert not native.why_missing()


def test_inspection_rejects_invalid_columns_and_sizes() -> None:
    out = place(random(1, 2, Q, 4))
    for columns, count, status in (
        ([0, 1, 4, 6], 4, OK), ([0, 1, 4, 7], 4, BAD_ARGUMENT), ([0, 4, 4, 6], 4, BAD_ARGUMENT),
        ([-1, 1, 4, 6], 4, BAD_ARGUMENT), ([0, 1, 4, 6], -1, BAD_ARGUMENT),
    ):  # fmt: skip
        indices = np.array(columns, np.int64)
        assert call("regard_dot_weights", inspection_problem(), Columns(out, indices.ctypes.data, count)) == status
    assert call("regard_dot_weights", inspection_problem(), Columns(out, None, 4)) == BAD_ARGUMENT
    assert call("regard_dot_weights", inspection_problem(), None) == BAD_ARGUMENT
    for rows, columns, status in ((3, 4, OK), (0, 4, BAD_ARGUMENT), (3, -4, BAD_ARGUMENT), (2**40, 4, TOO_LARGE)):
        assert call("regard_dot_map", inspection_problem(), Pool(place(random(1, 2, 3, 4)), rows, columns)) == status
    assert call("regard_dot_map", inspection_problem(), Pool(Place(), 3, 4)) == BAD_ARGUMENT


def test_products_reject_invalid_sizes_and_null_pointers() -> None:
    library = ctypes.CDLL(native.build_info()["native"])
    library.regard_packed_bytes.restype = ctypes.c_int64
    library.regard_packed_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    assert library.regard_packed_bytes(-1, 4, 0) == BAD_ARGUMENT
    assert library.regard_packed_bytes(4, 4, 5) == BAD_ARGUMENT
    assert library.regard_packed_bytes(2**62, 4, 0) == TOO_LARGE
    assert library.regard_packed_bytes(2**63 - 1, 1, 0) == TOO_LARGE
    x, out = (np.ones(64, np.float32) for _ in range(2))
    packed = np.ones(library.regard_packed_bytes(5, 3, 0) // 4, np.float32)
    sizes = {"M": 2, "N": 5, "K": 3, "x_row": 3, "out_row": 5, "factor": 1.0, "threads": 1}
    given = Product(**sizes, x=x.ctypes.data, packed=packed.ctypes.data, out=out.ctypes.data)
    library.regard_multiply.argtypes = [ctypes.c_void_p]
    assert library.regard_multiply(ctypes.addressof(given)) == OK
    assert (out[:10] == 3).all()
    assert (out[10:] == 1).all()
    for name, value in (
        ("M", -1), ("N", -1), ("threads", 0), ("x", None), ("packed", None), ("out", None), ("format", 9),
        ("activation", 9),
    ):  # fmt: skip
        wrong = Product.from_buffer_copy(given)
        setattr(wrong, name, value)
        assert library.regard_multiply(ctypes.addressof(wrong)) == BAD_ARGUMENT
    given.has_bias = 1
    assert library.regard_multiply(ctypes.addressof(given)) == NO_DATA
    assert library.regard_multiply(None) == BAD_ARGUMENT


WRONG = {
    "a negative axis": {"Q": -1},
    "a negative width": {"D": -(2**63)},
    "heads in no whole groups": {"H": 3, "G": 2},
    "no key heads": {"G": 0},
    "an unknown dtype": {"dtype": 4},
    "a negative dtype": {"dtype": -1},
    "an unknown dtype of keys": {"kv_dtype": 5},
    "keys of another dtype than float64": {"kv_dtype": 0},
    "int8 without scales": {"dtype": 0, "kv_dtype": 4},
    "scales without int8": {"k_scale": place(LSE), "v_scale": place(LSE)},
    "no threads": {"threads": 0},
    "no query": {"q": Place()},
    "no key": {"k": Place()},
    "no value": {"v": Place()},
    "an interval without the flag": {"intervals": Intervals(start=OFFSET.ctypes.data, stop=OFFSET.ctypes.data)},
    "tiles without the flag": {"tiles": Tiles(pointer=OFFSET.ctypes.data)},
    "an unknown mask": {"mask": 3},
    "a sink without the flag": {"sink": OFFSET.ctypes.data},
    "a flag that is neither": {"has_sink": 2, "sink": OFFSET.ctypes.data},
    "a bias without the flag": {"bias": Place(OFFSET.ctypes.data)},
    "a weight of an unknown presence": {"weight": Place(OFFSET.ctypes.data, present=2), "scale": 1.0},
    "a diagonal with gaps": {"diagonal": place(random(1, 1, 1, 2 * (Q + K))[..., ::2])},
    "a table without positions": {"row_table": place(random(1, 2, Q, 1))},
    "a bias of an unknown dtype": {"bias": place(random(1, 2, Q, K)), "bias_dtype": 9},
    "a negative radius": {"radius": -1},
    "no temperature": {"temperature": 0.0},
    "a temperature that is no number": {"temperature": math.nan},
    "a negative cap": {"softcap": -1.0},
}
NO_MEMORY_BEHIND = {
    "query": {"q": Place(present=1)},
    "key": {"k": Place(present=1)},
    "value": {"v": Place(present=1)},
    "bias": {"bias": Place(present=1)},
    "diagonal": {"diagonal": Place(None, (ctypes.c_int64 * 4)(0, 0, 0, 1), 1)},
    "table": {"row_table": Place(None, (ctypes.c_int64 * 4)(0, 0, 0, 1), 1), "offset": OFFSET.ctypes.data},
    "weight": {"weight": Place(present=1), "scale": 1.0},
    "sink": {"has_sink": 1},
    "starts": {"mask": 1, "intervals": Intervals(stop=OFFSET.ctypes.data)},
    "stops": {"mask": 1, "intervals": Intervals(start=OFFSET.ctypes.data)},
    "tiles": {"mask": 2},
}
LARGE = {
    "a key axis past 32 bits": {"K": 2**31},
    "the longest axis there is": {"Q": 2**63 - 1},
    "K * D past 64 bits": {"K": BILLION, "D": BILLION, "B": 8},
    "B * H * Q past 64 bits": {"B": BILLION, "H": BILLION, "Q": 64},
    "a radius past 32 bits": {"radius": 2**40},
    "Q * radius past 64 bits": {"Q": BILLION, "B": BILLION // 1024, "D": 1, "E": 1, "K": 1, "radius": BILLION},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_c_interface_refuses(name: str) -> None:
    assert forward(problem(**WRONG[name])) == BAD_ARGUMENT
    assert call("regard_dot_backward", problem(**WRONG[name]), gradient()) == BAD_ARGUMENT
    if "v" not in WRONG[name] and "row_table" not in WRONG[name]:
        assert call("regard_dot_row_statistics", inspection_problem(**WRONG[name]), statistics()) == BAD_ARGUMENT


@pytest.mark.parametrize("name", NO_MEMORY_BEHIND)
def test_a_tensor_that_is_present_has_memory(name: str) -> None:
    assert forward(problem(**NO_MEMORY_BEHIND[name])) == NO_DATA
    assert call("regard_dot_backward", problem(**NO_MEMORY_BEHIND[name]), gradient()) == NO_DATA
    if name != "value":
        assert call("regard_dot_row_statistics", inspection_problem(**NO_MEMORY_BEHIND[name]), statistics()) == NO_DATA


@pytest.mark.parametrize("part", ["out", "lse", "d_out", "d_lse", "d_q", "d_k", "d_v", "d_bias", "delta", "d_weight"])
def test_a_result_that_is_present_has_memory(part: str) -> None:
    nothing = Place(None, (ctypes.c_int64 * 4)(0, 0, 0, 1), 1)
    assert call("regard_dot_backward", problem(), gradient(**{part: nothing})) == NO_DATA
    if part in ("out", "lse"):
        assert forward(problem(), Result(**{"out": place(OUT), part: nothing})) == NO_DATA


@pytest.mark.parametrize("name", LARGE)
def test_the_c_interface_says_that_this_is_too_large(name: str) -> None:
    assert forward(problem(**LARGE[name])) == TOO_LARGE
    assert call("regard_dot_backward", problem(**LARGE[name]), gradient()) == TOO_LARGE
    assert call("regard_dot_row_statistics", inspection_problem(**LARGE[name] | {"E": 0}), statistics()) == TOO_LARGE


def test_the_c_interface_refuses_null_pointers() -> None:
    for name, good in (("forward", Result(place(OUT))), ("backward", gradient()), ("row_statistics", statistics())):
        assert call(f"regard_dot_{name}", None, good) == BAD_ARGUMENT
        assert call(f"regard_dot_{name}", problem(), None) == BAD_ARGUMENT
    assert forward(problem(), Result()) == BAD_ARGUMENT
    assert forward(problem(), Result(place(OUT), out_table=place(OUT))) == BAD_ARGUMENT
    for part in ("out", "lse", "d_out", "d_q", "d_k", "d_v"):
        assert call("regard_dot_backward", problem(), gradient(**{part: Place()})) == BAD_ARGUMENT
    for part in ("d_diagonal", "d_row_table", "d_out_table"):
        assert call("regard_dot_backward", problem(), gradient(**{part: place(OUT)})) == BAD_ARGUMENT
    for part in ("lse", "entropy", "max_logit", "distance"):
        assert call("regard_dot_row_statistics", inspection_problem(), statistics(**{part: Place()})) == BAD_ARGUMENT
    assert call("regard_dot_row_statistics", inspection_problem(), statistics(top=3)) == BAD_ARGUMENT
    assert call("regard_dot_row_statistics", inspection_problem(), statistics(top=-1)) == BAD_ARGUMENT
    assert call("regard_dot_row_statistics", inspection_problem(), statistics(top=2**62)) == TOO_LARGE
    assert call("regard_dot_row_statistics", inspection_problem(offset=None), statistics()) == BAD_ARGUMENT


@pytest.mark.parametrize(
    "empty", [{"B": 0}, {"H": 0, "G": 0}, {"Q": 0}, {"K": 0}, {"D": 0}, {"E": 0}, {"D": 0, "E": 0}], ids=str
)
def test_the_c_interface_takes_empty_axes(empty: dict[str, int]) -> None:
    assert forward(problem(**empty)) == OK
    assert call("regard_dot_backward", problem(**empty), gradient()) == OK
    assert call("regard_dot_row_statistics", inspection_problem(**empty | {"E": 0}), statistics()) == OK


def test_the_c_interface_takes_more_threads_than_there_can_be() -> None:
    assert forward(problem(threads=2**31 - 1)) == OK
    assert call("regard_dot_backward", problem(threads=2**31 - 1), gradient()) == OK


def test_strides_may_be_negative_or_zero() -> None:
    backwards = [array[:, :, ::-1, ::-1] for array in (random(1, 1, 9, D, seed=1), random(1, 1, 9, 3, seed=2))]
    same = np.broadcast_to(random(1, 1, 1, D), (1, 1, Q, D))
    out = np.full((1, 1, Q, 3), math.nan)
    given = problem(H=1, K=9, q=place(same), k=place(backwards[0]), v=place(backwards[1]))
    assert forward(given, Result(place(out[:, :, ::-1]))) == OK
    tensors = (torch.from_numpy(array.copy()) for array in (same, *backwards))
    expected = rg.attention(*tensors, score=rg.Dot(scale=0.5), engine="reference")
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("far", [2**63 - 1, -(2**63), 2**40, -(2**40)])
def test_positions_far_away_read_the_ends_of_a_table(far: int) -> None:
    table = random(1, 2, Q, 5)
    one, other = np.empty_like(OUT), np.empty_like(OUT)
    for out, at in ((one, far), (other, 1000 if far > 0 else -1000)):
        offset = np.array([at], np.int64)
        given = problem(row_table=place(table), radius=2, offset=offset.ctypes.data)
        assert forward(given, Result(place(out))) == OK
    np.testing.assert_array_equal(one, other)


# Through Python


def spread(*shape: int) -> torch.Tensor:
    """Return a tensor of any shape that takes four bytes."""
    return torch.zeros(1).expand(shape)


HUGE = {
    "K past 32 bits": (spread(1, 1, 1, 4), spread(1, 1, 2**31, 4), "K is 2,147,483,648"),
    "Q past 32 bits": (spread(1, 1, 2**33, 4), spread(1, 1, 3, 4), "Q is 8,589,934,592"),
    "B past 32 bits": (spread(2**31, 1, 1, 4), spread(2**31, 1, 1, 4), "B is 2,147,483,648"),
}


@pytest.mark.parametrize("name", HUGE)
def test_an_axis_past_32_bits_is_a_reason_against_the_engine(name: str) -> None:
    query, key, words = HUGE[name]
    assert words in native.why_not(rg.Attention().problem(query, key, key))[0]
    with pytest.raises(ValueError, match=f"{words}.*Engines that can: "):
        rg.attention(query, key, key, engine="native")


@pytest.mark.parametrize("engine", ["native", None])
@pytest.mark.parametrize(
    ("query", "key"),
    [
        (spread(1, 1, BILLION, 2**12), spread(1, 1, 3, 2**12)),
        (spread(2**20, 2**10, 2**12, 64), spread(2**20, 1, 4, 64)),
        (spread(1, 1, 64, 2**20), spread(1, 1, BILLION, 2**20)),
    ],
    ids=["rows", "batches", "keys"],
)
def test_sizes_beyond_memory_raise_instead_of_crashing(
    query: torch.Tensor, key: torch.Tensor, engine: str | None
) -> None:
    if engine is None and key.shape[2] == BILLION:
        pytest.skip("other engines copy the keys, and this machine may have the room")
    with pytest.raises((MemoryError, RuntimeError, ValueError), match=r"\d{4,}") as raised:
        rg.attention(query, key, key, engine=engine)
    assert "alloc" in str(raised.value) or "memory" in str(raised.value) or "large" in str(raised.value)


@pytest.mark.parametrize("width", [512, 513, 1000, 5000])
def test_any_width_agrees_with_the_reference(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, width, generator=generator, dtype=torch.float64) for n in (30, 40, 40))
    for rows in (30, 1):
        q = q[:, :, :rows].requires_grad_()
        results = []
        for engine in ("native", "reference"):
            output = rg.attention(q, k, v[..., :-1], mask=rg.causal(), engine=engine)
            results.append((output, torch.autograd.grad(output.sin().sum(), q)[0]))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_an_axis_of_one_may_have_any_stride() -> None:
    q, k, v = torch.randn(3, 2, 3, 1, 8, dtype=torch.float64).unbind()
    wild = [t.as_strided(t.shape, (24, 8, 2**60, 1)) for t in (q, k, v)]
    for rows in (wild, [wild[0].expand(2, 3, 9, 8), *wild[1:]]):
        torch.testing.assert_close(rg.attention(*rows, engine="native"), v.expand(rows[0].shape))
