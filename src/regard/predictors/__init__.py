"""Models that are ready to predict: of a run, an exported folder, a checkpoint, a GGUF file or the Hub."""

from regard.predictors.predictor import PredictOptions, Predictor
from regard.predictors.resolve import find_run, open_model

__all__ = ["PredictOptions", "Predictor", "find_run", "open_model"]
