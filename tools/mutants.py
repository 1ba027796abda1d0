"""Mutation testing: `make mutants` plants one bug after the other and checks that the tests detect each.

Every bug is written into a copy of the project, and the tests that should fail run there. A bug that no test detects is
printed, and the command fails. Words on the command line select the bugs whose description contains all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MASKS = "tests/masks/test_patterns.py"
TILES = "tests/masks/test_tiles.py"
NATIVE = "tests/engines/test_native.py"
INSPECTION = "tests/engines/test_inspection.py"
INPUTS = "tests/engines/test_inputs.py tests/engines/test_broadcasting.py"
SAFETY = "tests/engines/test_safety.py tests/engines/test_processes.py"
ENGINE_CACHES = "tests/test_cache.py"
PACKED = "tests/engines/test_packed_linear.py"
FREEZE = "tests/nn/test_freeze.py tests/nn/test_frozen_copies.py"
LOSS = "tests/nn/test_loss.py"
MODEL_MASKS = "tests/models/test_masks.py"
POOLING = "tests/nn/test_pooling.py"
FORWARD_MODE = "tests/engines/test_forward_mode.py tests/engines/test_nested_derivatives.py"
SDPA = "tests/engines/test_sdpa.py"
SECOND = "tests/engines/test_second_derivatives.py"
CACHES = "tests/nn/test_positions_and_caches.py tests/models/test_cached_decoding.py"
# The finder of an editable install precedes all paths; without it, the copy is imported.
RUN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "scikit" not in type(finder).__module__.lower()
                 and "Editable" not in type(finder).__name__ and "ScikitBuild" not in type(finder).__name__]
sys.path[:0] = ["src", "."]
import pytest, regard
assert regard.__file__.startswith(sys.argv[1]), regard.__file__
sys.exit(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


class Mutant(NamedTuple):
    """A bug: its description, its place, the right and the wrong code, and the tests that should detect it."""

    bug: str
    file: str
    right: str
    wrong: str
    tests: str


MUTANTS = (
    Mutant(
        "a mask is read once and never again", "masks/from_tensors.py",
        "if mask is None or now is None or now != known:", "if mask is None:", ENGINE_CACHES,
    ),
    Mutant(
        "the fingerprint reads the shape and not the content", "fingerprint.py",
        "return value.dtype, tuple(value.shape), repeated, _digest(array)",
        "return value.dtype, tuple(value.shape), repeated", ENGINE_CACHES,
    ),
    Mutant(
        "what a function closes over does not count", "fingerprint.py",
        "yield name, cell.cell_contents", "yield name, type(cell.cell_contents)", ENGINE_CACHES,
    ),
    Mutant(
        "the cache drops what was used last", "cache.py",
        "evicted += self._pop(next(iter(self._entries)))", "evicted += self._pop(next(reversed(self._entries)))",
        ENGINE_CACHES,
    ),
    Mutant(
        "an entry outlives its owner", "cache.py",
        "owner if nbytes > SHARED_BYTES and size_of(owner) else None", "None", ENGINE_CACHES,
    ),
    Mutant(
        "a plan of an old mask is used", "engines/plans.py", "plan[0].mask is mask and ", "", ENGINE_CACHES,
    ),
    Mutant(
        "a mask tensor that is unfrozen stays without a gradient", "integrations/dense_masks.py",
        "has_bias = has_bias or mask.requires_grad", "has_bias = bool(has_bias)", "tests/integrations/test_torch.py",
    ),
    Mutant(
        "a compiled graph does not check the masks that it has read", "masks/compiled.py",
        "if repr([fingerprint(tensor) for tensor in tensors]) != before:", "if False:", ENGINE_CACHES,
    ),
    Mutant(
        "a document sees the first token of the next", "masks/by_position.py",
        "np.repeat(edges[1:], np.diff(edges))", "np.repeat(edges[1:] + 1, np.diff(edges))", MASKS,
    ),
    Mutant(
        "a range includes the key behind it", "masks/by_position.py",
        "(at.j < stop[row, q])", "(at.j <= stop[row, q])", MASKS,
    ),
    Mutant(
        "a box that two documents share counts as full", "masks/by_position.py",
        "one = (query_low == query_high) & (key_low == key_high)", "one = (key_low == key_high)", TILES,
    ),
    Mutant(
        "the table of ranges forgets its second half", "masks/by_position.py",
        "np.maximum(stop[at] - (1 << k), start[at])", "start[at]", TILES,
    ),
    Mutant(
        "masks that are equal by value have different hashes", "masks/algebra.py",
        "hash((type(self).__name__, *kept))", "id(self)", MASKS,
    ),
    Mutant(
        "a tile that a row's interval only touches counts as full", "masks/tiles.py",
        "full_first = -(-inner_low // width)", "full_first = inner_low // width", TILES,
    ),
    Mutant(
        "the last tile of a row of tiles is cut off where it is not whole", "masks/tiles.py",
        "first, last = low // width, -(-high // width)", "first, last = low // width, high // width", TILES,
    ),
    Mutant(
        "neighbouring runs of different kinds are joined", "masks/tiles.py",
        "(start[1:] != stop[:-1]) | (full[1:] != full[:-1])", "(start[1:] != stop[:-1])", TILES,
    ),
    Mutant(
        "positions of batch rows with offsets of their own are those of the first", "masks/tiles.py",
        "offsets[b if len(offsets) > 1 else np.zeros_like(b)]", "offsets[np.zeros_like(b)]", TILES,
    ),
    Mutant(
        "bits of a partial tile are packed from the other end", "engines/mask_layout.py",
        'np.packbits(allowed.numpy(), -1, bitorder="little")', 'np.packbits(allowed.numpy(), -1, bitorder="big")',
        NATIVE,
    ),
    Mutant(
        "heads of a tile table share the first head's tiles", "engines/mask_layout.py",
        "rows if table.extent[1] > 1 else 0)", "0)", NATIVE,
    ),
    Mutant(
        "some rows are numbered as if they were the first", "engines/lowering.py",
        "diagonal = select_head(diagonal)[..., Q - first - count : Q - first + K - 1]",
        "diagonal = select_head(diagonal)[..., Q - count : Q + K - 1]", INSPECTION,
    ),
    Mutant(
        "the kernel gets the strides of an axis of size 1", "engines/native/binding.py",
        "[0 if n == 1 else step for", "[step for", NATIVE,
    ),
    Mutant(
        "a negated view is taken for plain memory", "engines/tensor_memory.py",
        " or tensor.is_neg()", "", INPUTS,
    ),
    Mutant(
        "a subclass is taken for plain memory", "engines/tensor_memory.py",
        "(type(tensor) not in _TYPES or tensor.is_neg()", "(tensor.is_neg()", INPUTS,
    ),
    Mutant(
        "modes do not see the call", "engines/tensor_memory.py",
        "if torch._C._len_torch_dispatch_stack():", "if False:", INPUTS,
    ),
    Mutant(
        "a view of freed memory has an address", "engines/tensor_memory.py",
        "address == tensor.storage_offset() * tensor.element_size()", "address == 0", INPUTS,
    ),
    Mutant(
        "a mode around the backward pass does not see it", "engines/native/jvp.py",
        "if not is_direct((*tensors, *results, *grads)):", "if False:", INPUTS,
    ),
    Mutant(
        "a batch of one is read past its end", "attention.py",
        "broadcasts=any(t is not None and", "broadcasts=any(t is None and", INPUTS,
    ),
    Mutant(
        "the order of a structure's fields is not compared", "engines/native/binding.py",
        "if names != self.fields:", "if False:", SAFETY,
    ),
    Mutant(
        "a field's place is not compared", "engines/native/binding.py",
        'if struct.calcsize("@" + self.format) != field.offset + field.size:', "if False:", SAFETY,
    ),
    Mutant(
        "dropout's rescaling is left out", "engines/native/attention.py",
        "threshold, DTYPES[key.dtype], dropout_scale,", "threshold, DTYPES[key.dtype], 1.0,", NATIVE,
    ),
    Mutant(
        "the gradient of the log-sum-exp is dropped", "engines/native/attention.py",
        "        tensor_fields(d_lse),\n", "        ABSENT,\n", NATIVE,
    ),
    Mutant(
        "a packed weight drops tangents", "engines/packed_linear.py",
        "or forward_ad._current_level >= 0", "", PACKED,
    ),
    Mutant(
        "a packed weight is read by the kernel with inputs of the opposite sign", "engines/packed_linear.py",
        "and not x.is_neg()", "", PACKED,
    ),
    Mutant(
        "rows that fill up the last panel are looked up", "engines/packed_linear.py",
        "int(input.max()) < weight.shape[0]", "int(input.max()) < weight.panels.shape[0] * 32", PACKED,
    ),
    Mutant(
        "a view of a packed weight is a copy that can be written to", "engines/packed_linear.py",
        "if argument.alias_info is not None and any(",
        "if argument.alias_info is not None and argument.alias_info.is_write and any(", PACKED,
    ),
    Mutant(
        "a packed weight of one column is an alias of what it unpacks to", "engines/weight_formats.py",
        "x.clone(memory_format=torch.contiguous_format)", "x.contiguous()", PACKED,
    ),
    Mutant(
        "a frozen weight is another parameter than the one that optimizers hold", "nn/freeze.py",
        "parameter = nn.Parameter(replacement, weight.requires_grad)",
        "parameter, weight = nn.Parameter(replacement, weight.requires_grad), weight.detach()", FREEZE,
    ),
    Mutant(
        "a thawed weight requires grad where it did not", "nn/freeze.py",
        "parameter = nn.Parameter(replacement, weight.requires_grad)", "parameter = nn.Parameter(replacement)", FREEZE,
    ),
    Mutant(
        "a list of pairs is read as queries over keys", "masks/explicit.py",
        'check_int_tensor("edges: pairs", pairs, form).T if pairs',
        'check_int_tensor("edges: pairs", pairs, form) if pairs', MASKS,
    ),
    Mutant(
        "the scale of dropout is that of the share that was asked for", "nn/dropout.py",
        "LEVELS / (LEVELS - threshold)", "1 / (1 - p)", "tests/nn/test_dropout.py",
    ),
    Mutant(
        "the first token is filler where rows are padded on the left", "nn/pooling.py",
        "_tokens(values, mask, mask.int().argmax(1))", "values[:, 0]", POOLING,
    ),
    Mutant(
        "a row without a real token gives a token of filler", "nn/pooling.py",
        "index].masked_fill(~mask.any(1, keepdim=True), 0.0)", "index]", POOLING,
    ),
    Mutant(
        "holes in a mask are no positions", "models/inputs.py",
        "return (indices.minimum(last) - first).clamp(min=0)", "return (mask.long().cumsum(1) - 1).clamp(min=0)",
        MODEL_MASKS,
    ),
    Mutant(
        "the gradient of the weights of a loss is added up in their dtype", "nn/loss.py",
        "torch.zeros_like(weight, dtype=wide)", "torch.zeros_like(weight)", LOSS,
    ),
    Mutant(
        "smoothing of a loss among some classes counts all of them", "nn/loss.py",
        "/ allowed.sum(-1)", "/ allowed.shape[-1]", LOSS,
    ),
    Mutant(
        "a model that copies may copy from an empty source", "models/pointer.py",
        "gate.masked_fill(~mask.any(1, keepdim=True), math.inf)", "gate", MODEL_MASKS,
    ),
    Mutant(
        "a dropped token shifts the positions of a cache", "nn/cached_attention.py",
        "slice(0, count), slice(dropped, seen)", "slice(0, count), slice(0, seen - dropped)", CACHES,
    ),
    Mutant(
        "an offset of the description ignores what the cache has seen", "nn/cached_attention.py",
        "first: int | Tensor = seen - count + (", "first: int | Tensor = (", CACHES,
    ),
    Mutant(
        "keys of a source are rotated by the positions of the queries", "nn/context.py",
        "self.key_positions if of_source else self.positions", "self.positions", CACHES,
    ),
    Mutant(
        "the repeats of a layer share the first cache", "nn/stacks.py",
        "None if cache is None else cache[n])", "None if cache is None else cache[n - n % self.repeat])", CACHES,
    ),
    Mutant(
        "a block that is drawn does not see the one that drew it", "masks/explicit.py",
        " | (self._draw(column) == row.unsqueeze(-1)).any(-1)", "", MASKS,
    ),
    Mutant(
        "the kernel does not get the tangent of the keys", "engines/native/jvp.py",
        "tensor_fields(dq), tensor_fields(dk), tensor_fields(dv)", "tensor_fields(dq), ABSENT, tensor_fields(dv)",
        FORWARD_MODE,
    ),
    Mutant(
        "the tangent of the sink is dropped", "engines/native/jvp.py",
        "of_sink = (0, 0) if sink is None else (data_address(sink), 1)", "of_sink = (0, 0)", FORWARD_MODE,
    ),
    Mutant(
        "a gradient drops the tangents of what it is computed from", "engines/derivatives.py",
        "elif not _is_plain((*tensors, *given)):", "elif False:", FORWARD_MODE,
    ),
    Mutant(
        "a second derivative counts a tensor twice of which another was computed", "engines/derivatives.py",
        "return tensor.view_as(tensor) if again", "return tensor if again", FORWARD_MODE,
    ),
    Mutant(
        "the kernel is given an offset that a transform wraps", "engines/native/engine.py",
        "with outside_transforms():\n            offset =", "if True:\n            offset =", FORWARD_MODE,
    ),
    Mutant(
        "the kernels are given a tangent that only torch's operators can read", "engines/derivatives.py",
        "return tracing or any(", "return any(", FORWARD_MODE,
    ),
    Mutant(
        "a row of NaN that torch's kernel takes for empty is accepted", "engines/sdpa.py",
        "good = (largest > 0) & (largest < math.inf)", "good = largest < math.inf", SDPA,
    ),
    Mutant(
        "gradients that masked numbers made NaN are accepted", "engines/derivatives.py",
        "if tensors[0].is_cpu and not all(", "if not all(True or ", SDPA,
    ),
    Mutant(
        "a second derivative drops the tangent of the log-sum-exp", "engines/tiled.py",
        ", -1) - pairing * lse_moves", ", -1)", SECOND,
    ),
    Mutant(
        "a second derivative drops the tangent of the output", "engines/tiled.py",
        "rest_moves = -(grad_output", "rest_moves = 0 * (grad_output", SECOND,
    ),
)  # fmt: skip


def is_caught(mutant: Mutant, copy: Path, library: str) -> bool:
    """Whether the tests fail with the bug; the copy is restored afterwards."""
    file = copy / "src" / "regard" / mutant.file
    text = file.read_text()
    if text.count(mutant.right) != 1:
        raise SystemExit(
            f"{mutant.file}: the code of {mutant.bug!r} occurs {text.count(mutant.right)} times, expected once"
        )
    file.write_text(text.replace(mutant.right, mutant.wrong))
    command = [sys.executable, "-c", RUN, str(copy), *mutant.tests.split()]
    environment = os.environ | {"REGARD_LIBRARY": library, "REGARD_EXAMPLES": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    finally:
        file.write_text(text)
    if result.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 1


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.bug for word in sys.argv[1:])]
    from regard.engines import native

    if reason := native.why_missing():
        print(f"no mutants: {reason}")
        return 1
    library, missed = native.build_info()["native"], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "embedded"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant in chosen:
            caught = is_caught(mutant, copy, library)
            missed += not caught
            print(f"{'caught' if caught else 'MISSED'}  {mutant.bug}  ({mutant.tests})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} bugs caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
