"""Who may import whom, and what `import regard` costs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import regard

SOURCE = Path(regard.__file__).parent
ROOT = SOURCE.parent.parent

LAYERS = [
    {
        "arguments",
        "cache",
        "description",
        "field_types",
        "files",
        "fingerprint",
        "geometry",
        "hashing",
        "printable",
        "sharding",
    },
    {"scores", "masks", "positions"},
    {"engines"},
    {"attention"},
    {"nn"},
    {"models"},
    {"data"},
    {"training"},
    {"tasks"},
    {"cli"},
]
BOTTOM = LAYERS[0]
APART = LAYERS[1]  # these never import one another
BESIDE = {"view", "lab", "check", "integrations", "distributed"}  # beside models, imported by cli only,
TRAINED_WITH = {"distributed"}  # but for this, which training needs
BESIDE_ATTENTION = {"linear", "info"}
READERS = {"lab"}  # stand on models and import regard as its users do, because their code is shown to users
FRONT = {"__init__", "__main__"}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
LEVEL |= dict.fromkeys(BESIDE, LEVEL["models"]) | dict.fromkeys(BESIDE_ATTENTION, LEVEL["attention"])
LEVEL |= dict.fromkeys(READERS, LEVEL["models"] + 0.5)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(tree: ast.AST, package: str) -> set[str]:
    """All that a module imports, in functions too, by full name; names of a `from` import behind their module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imported_by(path: Path) -> set[str]:
    package = ".".join(["regard", *path.relative_to(SOURCE).parent.parts])
    return imports(ast.parse(path.read_text()), package)


def rooms_imported(names: set[str]) -> set[str]:
    """The rooms of regard among imported names; regard itself is the room `__init__`."""
    found = set()
    for name in names:
        first, *rest = name.split(".")
        if first == "regard":
            inside = rest and ((SOURCE / rest[0]).is_dir() or (SOURCE / f"{rest[0]}.py").exists())
            found.add(rest[0] if inside else "__init__")
    return found


def broken_rules(room: str, others: set[str]) -> list[str]:
    """What is wrong with a module of `room` that imports from the rooms `others`."""
    broken = []
    for other in sorted(others - {room}):
        if room in FRONT or (room in READERS and other == "__init__"):
            continue
        if other in FRONT:
            broken.append(f"{room} imports the whole of regard")
        elif other in BESIDE and room != "cli" and not (other in TRAINED_WITH and room == "training"):
            broken.append(f"{room} imports {other}, which only cli may")
        elif room in BOTTOM and other not in BOTTOM:
            broken.append(f"{room} stands at the bottom and imports {other}")
        elif room in APART and other in APART:
            broken.append(f"{room} imports {other}, and they stand apart")
        elif LEVEL[other] > LEVEL[room] or (LEVEL[other] == LEVEL[room] and room not in BOTTOM):
            broken.append(f"{room} imports {other}, which stands above or beside it")
    return broken


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_stands_below_it(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL or room in FRONT, f"{path.name} is in no room of the design"
    assert broken_rules(room, rooms_imported(imported_by(path))) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("masks", "from regard.scores import Dot"),
        ("positions", "import regard.masks.tiles"),
        ("scores", "from regard import masks"),
        ("geometry", "from regard.masks import Mask"),
        ("engines", "from regard.attention import Attention"),
        ("engines", "def f():\n    from regard.attention import Attention"),
        ("masks", "from ..engines import tiled"),
        ("masks", "from .. import scores"),
        ("models", "from regard.view import capture"),
        ("tasks", "import regard.lab"),
        ("data", "from regard.training import Run"),
        ("training", "from regard.tasks import translate"),
        ("view", "import regard.lab"),
        ("models", "from regard.distributed import sequence"),
        ("lab", "import regard.tasks"),
        ("lab", "import regard.view"),
        ("nn", "import regard as rg"),
        ("attention", "from regard.linear import LinearAttention"),
    ],
)
def test_the_walk_sees_a_forbidden_import(
    room: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LEVEL:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert broken_rules(room, rooms_imported(imports(ast.parse(line), f"regard.{room}"))) != []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("masks", "from regard.masks.algebra import Mask"),
        ("masks", "from .algebra import Mask"),
        ("hashing", "from regard.geometry import At"),
        ("engines", "from regard.scores import Dot"),
        ("cli", "from regard.view import serve"),
        ("tasks", "from regard.models import text"),
        ("training", "from regard.data.readers import Row"),
        ("tasks", "from regard.geometry import Frame"),
        ("training", "from regard.distributed import sequence"),
        ("view", "from regard.attention import Attention"),
        ("lab", "import regard as rg"),
        ("__init__", "from regard.attention import Attention"),
    ],
)
def test_the_walk_lets_a_permitted_import_pass(
    room: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LEVEL:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert broken_rules(room, rooms_imported(imports(ast.parse(line), f"regard.{room}"))) == []


def names_the_library(tree: ast.AST) -> list[str]:
    """Where a module loads compiled code, or names what does."""
    words = {"ctypes", "CDLL", "LoadLibrary", "cffi", "load_library", "cpp_extension"}
    found = []
    for node in ast.walk(tree):
        name = {ast.Attribute: "attr", ast.Name: "id"}.get(type(node))
        if name and getattr(node, name) in words:
            found.append(getattr(node, name))
    return found + [name for name in imports(tree, "regard") if words & set(name.split("."))]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_native_engine_knows_the_compiled_library(path: Path) -> None:
    if path != SOURCE / "engines" / "native" / "binding.py":
        assert names_the_library(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "line",
    ["import ctypes", "from ctypes import CDLL", "torch.ops.load_library('x')", "lib = numpy.ctypeslib.CDLL('x')",
     "from torch.utils import cpp_extension"],
)  # fmt: skip
def test_the_walk_sees_a_loaded_library(line: str) -> None:
    assert names_the_library(ast.parse(line)) != []


def test_the_front_page_only_imports() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    for node in tree.body:
        assert isinstance(node, allowed), ast.dump(node)[:80]
        if isinstance(node, ast.Assign):
            assert all(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), "a docstring and nothing else"


PROBE = """
import json, os, sys, threading, time
import torch
def threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()
known, before, started = set(sys.modules), threads(), time.process_time()
import regard
seconds = time.process_time() - started
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - known), "threads": threads() - before}))
"""


def probe() -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
    )  # fmt: skip
    assert done.stderr.strip() == "", "import regard warns"
    assert done.stdout.count("\n") == 1, "import regard prints"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def started() -> dict:
    return probe()


def test_importing_regard_costs_at_most_a_third_of_a_second_over_torch(started: dict) -> None:
    seconds = [started["seconds"]]  # of processor time; the least counts, since a busy machine stretches that too
    while min(seconds) > 0.3 and len(seconds) < 10:
        seconds.append(probe()["seconds"])
    assert min(seconds) <= 0.3


def test_importing_regard_starts_no_thread(started: dict) -> None:
    assert started["threads"] == 0


def test_importing_regard_imports_no_optional_dependency(started: dict) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {import_name(line) for lines in extras.values() for line in lines}
    optional = declared | {
        "matplotlib", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets", "accelerate",
        "sacrebleu", "jiwer", "torchmetrics", "anywidget", "typer", "rich", "tensorboard", "IPython", "pandas",
    }  # fmt: skip
    assert sorted(optional & {name.split(".")[0] for name in started["new"]}) == []


def import_name(requirement: str) -> str:
    """The import name that a requirement line most likely has."""
    for n, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            requirement = requirement[:n]
            break
    return requirement.replace("-", "_")


def test_importing_regard_does_not_load_the_compiler(started: dict) -> None:
    compiler = {"torch._inductor", "torch._dynamo"}
    assert sorted(compiler & set(started["new"])) == []


public = regard.__all__


def is_described(name: str) -> bool:
    """Whether a name is neither a string, as __version__, nor a submodule that is public by name."""
    return not isinstance(getattr(regard, name), str | type(sys))


@pytest.mark.parametrize("name", sorted(filter(is_described, public)))
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    thing = getattr(regard, name)
    assert thing.__doc__, f"{name} has no docstring"
    assert ">>>" in thing.__doc__, f"the docstring of {name} has no example"


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert len(public) == len(set(public))
    assert [name for name in public if not hasattr(regard, name)] == []
