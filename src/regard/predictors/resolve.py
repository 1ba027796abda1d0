"""From the name of a model to its predictor: the one place that all commands use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from regard.errors import UserError
from regard.models import (
    Detr,
    DualEncoder,
    ImageClassifier,
    LanguageModel,
    MaskedLanguageModel,
    QuestionAnswering,
    SentenceEmbedder,
    SequenceClassifier,
    TokenClassifier,
    Transformer,
    Wav2Vec2,
    Whisper,
)
from regard.models.checkpoints import gguf
from regard.models.checkpoints.files import CONFIG, resolve_folder
from regard.models.checkpoints.sentence_transformers import MODULES
from regard.predictors import speech, text, translation, vision
from regard.predictors.checkpoint import Checkpoint, as_user_errors
from regard.predictors.language import LanguagePredictor
from regard.predictors.predictor import Predictor
from regard.predictors.run import RunPredictor
from regard.predictors.view_only import ViewOnly
from regard.progress import stage
from regard.training.runs import SHIPPED, Run
from regard_cli.paths import may_be_on_hub

PREDICTORS: dict[type[nn.Module], Callable[[Checkpoint], Predictor]] = {
    LanguageModel: LanguagePredictor.from_checkpoint,
    Whisper: speech.WhisperSpeech,  # before Transformer, which it is one of
    Transformer: translation.Translator,
    SequenceClassifier: text.Classifier,
    TokenClassifier: text.TokenLabels,
    MaskedLanguageModel: text.MaskFiller,
    QuestionAnswering: text.QuestionAnswerer,
    SentenceEmbedder: text.Embedder,
    ImageClassifier: vision.ImageLabels,
    DualEncoder: vision.ZeroShotLabels,
    Detr: vision.ObjectDetector,
    Wav2Vec2: speech.CtcSpeech,
}
"""What a model predicts, by its class."""


def open_model(name: str | Path) -> Predictor:
    """Open a run, an exported folder, a checkpoint folder, a GGUF file, a name on the Hub, or `en-fr`."""
    if (run := find_run(name)) is not None:
        return LanguagePredictor.from_run(run) if run.task.name == "language" else RunPredictor(run)
    checkpoint = Checkpoint(str(name), _find_checkpoint(str(name)))
    for kind, predictor in PREDICTORS.items():
        if isinstance(checkpoint.model, kind):
            return predictor(checkpoint)
    return ViewOnly(checkpoint)


def find_run(name: str | Path) -> Run | None:
    """Open a run or an exported folder; None if the name is something else."""
    path = Path(name)
    return Run.open(path) if (path / "run.json").exists() or (str(name) in SHIPPED and not path.exists()) else None


def _find_checkpoint(name: str) -> Path:
    """Return the path of a GGUF file or of a checkpoint folder, downloaded if it is on the Hub."""
    path = Path(name)
    if gguf.is_gguf(path):
        return path
    if path.is_dir():
        if not (path / CONFIG).exists() and not (path / MODULES).exists():
            files = sorted(each.name for each in path.glob("*.gguf"))
            hint = f"pass the file {path / files[0]}" if files else f"expected run.json or {CONFIG} in it"
            raise UserError(f"{name}: is neither a run nor a checkpoint; {hint}")
        return path
    if path.exists():
        raise UserError(f"{name}: is not a model; pass a GGUF file, or the folder of a run or a checkpoint")
    if not may_be_on_hub(name):
        raise UserError(
            f"{name}: no such run or checkpoint; pass a folder, a GGUF file, a name on the Hub such as org/name, or "
            f"{' or '.join(SHIPPED)}"
        )
    with as_user_errors(name), stage(f"finding {name} on the Hub"):
        return resolve_folder(name)
