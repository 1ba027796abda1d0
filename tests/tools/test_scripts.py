"""Benchmarks, tools and examples, most of which no test runs: the names that they use of this repository exist."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for folder in ("benchmarks", "tools", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
OWN = ("regard", "regard_cli", "tests", "tools", "benchmarks")


def missing_names(text: str) -> Iterator[str]:
    """Yield names that a script imports from modules of this repository, or reads from them, and that do not exist."""
    tree, modules = ast.parse(text), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OWN:
            module = importlib.import_module(node.module)
            for alias in node.names:
                try:
                    value = getattr(module, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    yield f"{node.module}.{alias.name}"
                    continue
                if isinstance(value, ModuleType):
                    modules[alias.asname or alias.name] = value
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in assigned:
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                yield f"{module.__name__}.{node.attr}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    assert list(missing_names(path.read_text("utf-8"))) == []


def test_missing_names_are_reported() -> None:
    assert list(missing_names("from regard.masks import nothing")) == ["regard.masks.nothing"]
    assert list(missing_names("from regard import masks\n\nmasks.nothing()")) == ["regard.masks.nothing"]
