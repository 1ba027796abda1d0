"""Import rules between packages, and the cost of `import regard`."""

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
        "errors",
        "field_types",
        "files",
        "fingerprint",
        "geometry",
        "hashing",
        "launch",
        "printable",
        "progress",
        "quantized",
        "sharding",
    },
    {"scores", "masks", "positions", "normalizations"},
    {"engines"},
    {"attention"},
    {"functional"},
    {"nn"},
    {"models"},
    {"data"},
    {"training"},
    {"tasks"},
    {"predictors"},
    {"cli"},
]
BOTTOM = LAYERS[0]
APART = LAYERS[1]  # these never import one another
OPTIONAL = {"view", "lab", "check", "integrations", "distributed"}  # at the level of models, imported by cli only,
TRAINED_WITH = {"distributed"}  # except for this, which training needs
SAME_LEVEL_AS_ATTENTION = {"linear", "info"}
READERS = {"lab"}  # use models and import regard as users do, because their code is shown to users
FRONT = {"__init__", "__main__"}
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
LEVEL |= dict.fromkeys(OPTIONAL, LEVEL["models"]) | dict.fromkeys(SAME_LEVEL_AS_ATTENTION, LEVEL["attention"])
LEVEL |= dict.fromkeys(READERS, LEVEL["models"] + 0.5)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(tree: ast.AST, package: str) -> set[str]:
    """Return the full names of all imports of a module, also inside functions."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            imported |= {f"{base}.{alias.name}" for alias in node.names}
    return imported


def imported_by(path: Path) -> set[str]:
    package = ".".join(["regard", *path.relative_to(SOURCE).parent.parts])
    return imports(ast.parse(path.read_text()), package)


def packages_imported(names: set[str]) -> set[str]:
    """Return the packages of regard among imported names; regard itself is `__init__`."""
    stored = set()
    for name in names:
        first, *rest = name.split(".")
        if first == "regard":
            inside = rest and ((SOURCE / rest[0]).is_dir() or (SOURCE / f"{rest[0]}.py").exists())
            stored.add(rest[0] if inside else "__init__")
    return stored


def broken_rules(package: str, others: set[str]) -> list[str]:
    """Return the rules that a module of `package` breaks by importing from `others`."""
    broken = []
    for other in sorted(others - {package}):
        if package in FRONT or (package in READERS and other == "__init__"):
            continue
        if other in FRONT:
            broken.append(f"{package} imports the whole of regard")
        elif other in OPTIONAL and package != "cli" and not (other in TRAINED_WITH and package == "training"):
            broken.append(f"{package} imports {other}, which only cli may")
        elif package in BOTTOM and other not in BOTTOM:
            broken.append(f"{package} is at the bottom and imports {other}")
        elif package in APART and other in APART:
            broken.append(f"{package} imports {other}, but the two must be independent")
        elif LEVEL[other] > LEVEL[package] or (LEVEL[other] == LEVEL[package] and package not in BOTTOM):
            broken.append(f"{package} imports {other}, which is at the same or a higher level")
    return broken


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_lower_levels(path: Path) -> None:
    package = package_of(path)
    assert package in LEVEL or package in FRONT, f"{path.name} is in no package of the design"
    assert broken_rules(package, packages_imported(imported_by(path))) == []


@pytest.mark.parametrize(
    ("package", "line"),
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
def test_a_forbidden_import_is_found(package: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEVEL:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert broken_rules(package, packages_imported(imports(ast.parse(line), f"regard.{package}"))) != []


@pytest.mark.parametrize(
    ("package", "line"),
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
def test_a_permitted_import_passes(package: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEVEL:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert broken_rules(package, packages_imported(imports(ast.parse(line), f"regard.{package}"))) == []


def names_the_library(tree: ast.AST) -> list[str]:
    """Return the lines in which a module loads compiled code, or names it."""
    words = {"ctypes", "CDLL", "LoadLibrary", "cffi", "load_library", "cpp_extension"}
    results = []
    for node in ast.walk(tree):
        name = {ast.Attribute: "attr", ast.Name: "id"}.get(type(node))
        if name and getattr(node, name) in words:
            results.append(getattr(node, name))
    return results + [name for name in imports(tree, "regard") if words & set(name.split("."))]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_native_engine_loads_the_compiled_library(path: Path) -> None:
    if path != SOURCE / "engines" / "native" / "binding.py":
        assert names_the_library(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "line",
    ["import ctypes", "from ctypes import CDLL", "torch.ops.load_library('x')", "lib = numpy.ctypeslib.CDLL('x')",
     "from torch.utils import cpp_extension"],
)  # fmt: skip
def test_a_loaded_library_is_found(line: str) -> None:
    assert names_the_library(ast.parse(line)) != []


def test_the_package_init_only_imports() -> None:
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


def probe(bytecode: Path) -> dict:
    """Import regard in a new process, with the bytecode that an installed package has."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    assert done.stderr.strip() == "", "import regard warns"
    assert done.stdout.count("\n") == 1, "import regard prints"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytecode")
    probe(folder)
    return folder


@pytest.fixture(scope="module")
def started(bytecode: Path) -> dict:
    return probe(bytecode)


def test_importing_regard_costs_at_most_a_third_of_a_second_over_torch(started: dict, bytecode: Path) -> None:
    seconds = [started["seconds"]]  # processor time; the minimum counts, since a busy machine stretches it too
    while min(seconds) > 0.3 and len(seconds) < 10:
        seconds.append(probe(bytecode)["seconds"])
    assert min(seconds) <= 0.3


def test_importing_regard_starts_no_thread(started: dict) -> None:
    assert started["threads"] == 0


def test_importing_regard_imports_no_optional_dependency(started: dict) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = (project["project"]["optional-dependencies"] | project["dependency-groups"]).values()
    declared = {import_name(line) for lines in lists for line in lines} - {"regard"}  # which `all` names
    optional = declared | {
        "matplotlib", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets", "accelerate",
        "sacrebleu", "jiwer", "torchmetrics", "anywidget", "typer", "rich", "tensorboard", "IPython", "pandas",
    }  # fmt: skip
    assert sorted(optional & {name.split(".")[0] for name in started["new"]}) == []


def import_name(requirement: str) -> str:
    """Return the most likely import name of a requirement line."""
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
    """Whether a name is neither a string, such as __version__, nor a public submodule."""
    return not isinstance(getattr(regard, name), str | type(sys))


@pytest.mark.parametrize("name", sorted(filter(is_described, public)))
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    thing = getattr(regard, name)
    assert thing.__doc__, f"{name} has no docstring"
    assert ">>>" in thing.__doc__, f"the docstring of {name} has no example"


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert len(public) == len(set(public))
    assert [name for name in public if not hasattr(regard, name)] == []
