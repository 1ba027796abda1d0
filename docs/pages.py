"""Pages that mkdocs.yml does not name: applications, which have a section of their own, and the calculator."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Put them into the navigation, by name, before what is measured; mkdocs calls this."""
    folder = Path(config.docs_dir)
    named = set(paths(config.nav))
    result = sorted(str(page.relative_to(folder)) for page in folder.rglob("*.md"))
    left = [page for page in result if page not in named]
    for title, pages in (
        ("More", [page for page in left if not page.startswith("applications/")]),
        ("Applications", [page for page in left if page.startswith("applications/")]),
    ):
        if pages:
            config.nav.insert(-1, {title: pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the calculator, which the package writes; mkdocs calls this."""
    from mkdocs.structure.files import File

    from regard.lab.calculator import calculator

    files.append(File.generated(config, "calculator.html", content=calculator()))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Set the language of Chinese pages, which decides the shapes of their letters; mkdocs calls this."""
    if not page.file.src_uri.startswith("zh/"):
        return output
    return output.replace('<html lang="en"', '<html lang="zh-CN"', 1)


def paths(nav: Any) -> list[str]:
    """The pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        return [nav]
    return [path for part in (nav.values() if isinstance(nav, dict) else nav) for path in paths(part)]
