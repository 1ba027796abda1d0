from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.view.page import page
from tests.view import documents
from tests.view.browser import Tab, launch_browser, write


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with launch_browser() as started:
        yield started


@pytest.fixture(scope="session")
def samples() -> dict[str, documents.Sample]:
    return {
        "translation": documents.translation(),
        "picture": documents.picture(),
        "sound": documents.sound(),
        "long": documents.long(256, 2, 3, side=32, tops=4),
        "even": documents.even(151),
    }


@pytest.fixture(scope="session")
def addresses(samples: dict[str, documents.Sample], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("pages")
    return {name: write(folder / f"{name}.html", page(document)) for name, document in samples.items()}


@pytest.fixture(scope="session")
def window(browser: Any) -> Tab:
    return Tab(browser)


@pytest.fixture
def tab(browser: Any, window: Tab, addresses: dict[str, str]) -> Iterator[Callable[..., Tab]]:
    """Open a document by name; fail at the end if a page reported errors."""
    used = [window]

    def open_(name: str, address: str = "", **context: Any) -> Tab:
        if context:
            used.append(Tab(browser, **context))
        return used[-1].open(addresses.get(name, name), address)

    yield open_
    errors = [each for opened in used for each in opened.errors]
    window.errors.clear()
    for opened in used[1:]:
        opened.context.close()
    assert errors == []
