"""Encoder-decoders of texts: translation, and other tasks by a prefix of the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.predictors.checkpoint import Checkpoint
from regard.predictors.predictor import PredictOptions, Predictor
from regard.training import metrics
from regard.training.seq2seq import generate_targets
from regard.training.task import Metrics, Prediction

MAX_NEW_TOKENS = 256
MULTILINGUAL = ("m2m_100", "mbart")  # the first token of a target is its language


class Translator(Predictor):
    """Translates texts; T5 and others expect a prefix such as "translate English to German: "."""

    kind: ClassVar[str] = "an encoder-decoder of texts"
    accepts: ClassVar[tuple[str, ...]] = ("max_new_tokens", "language")
    columns = ("source", "target")
    examines = "text"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name, self.model, self.checkpoint = checkpoint.name, checkpoint.model, checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.generation = checkpoint.generation_settings()

    def configure(self, options: PredictOptions) -> None:
        super().configure(options)
        languages, config = self.checkpoint.config.get("model_type") in MULTILINGUAL, self.model.config
        if options.language is not None:
            names = (options.language, f"__{options.language}__")
            token = next((number for name in names if (number := self.tokenizer.token_to_id(name)) is not None), None)
            if not languages or token is None:
                raise UserError(
                    f"--language: {self.name} has no language {options.language!r}; leave it out, or see its card"
                )
            self.model.config = replace(config, prompt=(token,))
        elif languages and not config.prompt:
            raise UserError(f"{self.name}: writes many languages; name one with --language, such as fr or fra_Latn")

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        stop, config = self.model.config.stop, self.model.config
        longest = None if config.position == "relative" else config.positions
        if longest is not None and config.position == "learned":
            longest -= config.first_position
        sources, kept = [], []
        for n, row in enumerate(rows):
            ids = self.tokenizer.encode(row.values[0]).ids
            ids = ids if ids and ids[-1] == stop else [*ids, stop]
            if longest is not None and len(ids) > longest:
                bad.add(f"{row.place}: has {len(ids)} tokens, but the model takes at most {longest}; shorten it")
            else:
                sources.append(np.array(ids, np.int64))
                kept.append(n)
        first, forced = 1 + len(config.prompt), len(config.prompt)
        most = self.options.max_new_tokens or max(1, self.generation.limit(first, MAX_NEW_TOKENS, forced=forced))
        if longest is not None:
            most = min(most, longest - first)
        processor = self.generation.processor_after(first, forced=forced)
        outputs: dict[int, Prediction] = {}
        targets = generate_targets(
            self.model,
            sources,
            strategy=self.generation.strategy,
            max_new_tokens=most,
            processor=processor,
            short=False,
        )
        for n, target, score in targets:
            row = rows[kept[n]]
            output = self.tokenizer.decode(target.tolist())
            outputs[n] = Prediction(row.values[0], output, score, place=row.place)
        yield from (outputs[n] for n in range(len(kept)))

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure BLEU and chrF."""
        references = {row.place: row.values[1] for row in rows}
        outputs = list(self.predict([Row(row.place, row.values[:1]) for row in rows], bad))
        if not outputs:
            raise UserError("there is no row to evaluate on")
        scores = metrics.translation([each.output for each in outputs], [[references[each.place]] for each in outputs])
        return scores | {"rows": len(outputs)}

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        record.decode(self.tokenizer)
