"""The translator included in the package can be used anywhere a run directory is expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard
from regard.data.readers import EMBEDDED, Row
from regard.errors import BadRows
from regard.tasks import Run, UserError, train

FOLDER = EMBEDDED / "en-fr"


@pytest.fixture(scope="module")
def run() -> Run:
    return Run.open("en-fr")


def test_it_translates(run: Run) -> None:
    model, step = run.model()
    rows = [Row(text, (text,)) for text in ("I am hungry.", "Thank you very much.", "Where is the station?")]
    predictions = list(run.task.predict(model, run.processor, rows, BadRows()))
    assert [each.output for each in predictions[:2]] == ["J'ai faim.", "Merci beaucoup."]
    assert "gare" in predictions[2].output
    assert all(0.2 < each.score <= 1 for each in predictions)
    assert 0 < step <= run.recipe.steps


def test_it_is_small_and_documents_its_origin() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 15e6
    card = (FOLDER / "README.md").read_text()
    for word in ("regard train translate", "CC-BY 2.0", "tatoeba.org", "bleu", "copy of the source"):
        assert word in card


def test_it_loads_as_a_checkpoint_too(run: Run) -> None:
    ours, theirs = run.model()[0], regard.load(FOLDER, dtype=torch.float32)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def test_it_is_never_written_to(run: Run) -> None:
    with pytest.raises(UserError, match="en-fr: is an exported run without checkpoints"):
        train(run)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("en-fr").mkdir()
    with pytest.raises(UserError, match="not a run directory"):
        Run.open("en-fr")
