"""Run directories whose files were changed: each works, or is one clear error, in little time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.tasks import train
from tests import damaged
from tests.tasks import scenery, toy


def trained(folder: Path, name: str) -> Path:
    """A small run of a task, trained to its end."""
    folder.mkdir()
    if name in scenery.SMALL:
        source = (
            scenery.folder_of(folder / "data", scenery.stripes(40))
            if name == "images"
            else scenery.scenes(folder / "data", 40)
        )
        run, examples = scenery.begun(folder, name, source)
        train(run, examples)
    else:
        run = toy.begun(folder, name)
        train(run)
    return run.folder


@pytest.mark.parametrize("job", ["run", "resume"])
def test_every_change_to_a_run_works_or_is_one_error(job: str, tmp_path: Path) -> None:
    folders = [trained(tmp_path / name, name) for name in ("classify", "translate", "images")]
    assert damaged.run(job, folders, every=400) == []
