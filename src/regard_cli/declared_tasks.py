"""The options of all tasks, read from their source files without importing torch."""

from __future__ import annotations

import ast
from abc import ABC
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

NAMESPACE = {"ABC": ABC, "Any": Any, "ClassVar": ClassVar, "dataclass": dataclass, "field": field}


@cache
def declared_tasks() -> dict[str, type[Any]]:
    """Every task by name: a dataclass with the fields and class variables of the real one, without its methods.

    The declarations in `regard/tasks/*.py` are executed as they are, so they cannot differ from the tasks. Tasks of
    other packages (entry points `regard.tasks`) are read in the same way. They may be written in any way, though: if
    one cannot be read without its imports, all tasks are imported.
    """
    names = _declarations()
    task = names["Task"]
    built_in: set[Any] = {each for each in names.values() if isinstance(each, type) and issubclass(each, task)} - {task}
    others: set[Any] = set()
    for entry in entry_points(group="regard.tasks"):
        if not (declared := _declared_by(entry, task)):
            from regard.tasks import tasks

            return tasks()
        others |= declared
    ordered = (*sorted(built_in, key=lambda kind: kind.name), *sorted(others, key=lambda kind: kind.name))
    return {kind.name: kind for kind in ordered}


def declared_recipe() -> type[Any]:
    """`regard.training.Recipe` without its methods."""
    return _declarations()["Recipe"]


@cache
def _declarations() -> dict[str, Any]:
    """The classes `Recipe`, `Task` and all tasks, by name of the class."""
    root = source_file("regard").parent
    names = NAMESPACE | {"__name__": __name__}  # dataclasses look up `ClassVar` in this module
    for path in (root / "training" / "recipe.py", root / "training" / "task.py", *sorted(root.glob("tasks/*.py"))):
        _execute_declarations(path, root, names)
    return names


def source_file(name: str) -> Path:
    """The source file of a module, found without importing it or its package."""
    package, *rest = name.split(".")
    spec = find_spec(package)
    if spec is None or not spec.origin:
        raise ModuleNotFoundError(name)
    if not rest:
        return Path(spec.origin)
    folder = Path(spec.origin).parent.joinpath(*rest)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _declared_by(entry: EntryPoint, task: type[Any]) -> set[type[Any]]:
    """The tasks in the module of an entry point; none if its source cannot be read without its imports."""
    before = _declarations()
    names = dict(before)
    try:
        _execute_declarations(source_file(entry.module), source_file(entry.module.split(".")[0]).parent, names)
    except Exception:  # the file may contain any code
        return set()
    new = [each for key, each in names.items() if each is not before.get(key) and isinstance(each, type)]
    return {each for each in new if issubclass(each, task) and "name" in vars(each)}


def _execute_declarations(path: Path, root: Path, names: dict[str, Any]) -> None:
    """Add the constants and classes that a source file declares to `names`."""
    module = ast.parse(path.read_text("utf-8"))
    body = [kept for node in module.body for kept in _declaration(node)]
    used = {node.id for each in body for node in ast.walk(each) if isinstance(node, ast.Name)}
    body = _imported_constants(root, module, used - set(names)) + body
    exec(compile(ast.Module(body, type_ignores=[]), str(path), "exec"), names)


def _declaration(node: ast.stmt) -> list[ast.stmt]:
    """A statement of a module if it declares options: a constant, the function `option`, or a class without methods."""
    if isinstance(node, ast.FunctionDef) and node.name == "option":
        return [node]
    if isinstance(node, ast.ClassDef):
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if node.name in ("Recipe", "Task") or "Task" in bases:
            node.body = [each for each in node.body if isinstance(each, ast.AnnAssign | ast.Assign)] or [ast.Pass()]
            return [node]
    return [node] if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) else []


def _imported_constants(root: Path, module: ast.Module, used: set[str]) -> list[ast.stmt]:
    """The assignments of constants among the names `used` that the module imports from other modules of regard."""
    constants: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and used & {alias.name for alias in node.names}:
            path = root.joinpath(*(node.module or "").split(".")[1:]).with_suffix(".py")
            if path.is_file():
                constants += (each for each in ast.parse(path.read_text("utf-8")).body if isinstance(each, ast.Assign)
                          and isinstance(each.value, ast.Constant))  # fmt: skip
    return constants
