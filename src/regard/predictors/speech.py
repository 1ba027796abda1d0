"""Speech models: transcripts of any length, with timestamps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.data.audio import load_waveform, normalize_transcript, read_clips, spectrogram
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.models.audio import HOP, SAMPLE_RATE, normalize_waveform, whisper_features
from regard.models.checkpoints.families.speech import WHISPER_TYPES
from regard.models.checkpoints.generation import GenerationSettings
from regard.models.whisper import Segment
from regard.predictors.checkpoint import GENERATION, PREPROCESSOR, Checkpoint
from regard.predictors.predictor import Predictor
from regard.progress import track
from regard.training import metrics
from regard.training.task import Metrics, Prediction

PAUSE, LONGEST_LINE = 0.6, 6.0  # seconds: silence that ends a subtitle of Wav2Vec2, and the longest subtitle
CHUNK, MARGIN = 30, 4  # seconds: a window of Wav2Vec2, and how much of it at each side is only context


class SpokenText(NamedTuple):
    """A part of a transcript, with start and end in seconds."""

    start: float
    end: float
    text: str


class SpeechPredictor(Predictor):
    """A predictor whose inputs are sound files."""

    streams: ClassVar[bool] = True
    file_suffixes: ClassVar[tuple[str, ...]] = (".srt",)
    input_kind = "audio"
    columns = ("audio", "text")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name, self.model, self.checkpoint = checkpoint.name, checkpoint.model, checkpoint

    def read(self, source: str, bad: BadRows) -> list[Row]:
        return read_clips(source, {"audio": "", "text": ""}, bad)

    def transcribe(self, wave: Tensor, on_part: Callable[[SpokenText], object]) -> dict[str, Any]:
        """Call `on_part` with the parts of a transcript as they are recognised; return further details."""
        raise NotImplementedError

    def stream(self, row: Row, bad: BadRows, emit: Callable[[str], object]) -> None:
        separator = ""

        def emit_part(part: SpokenText) -> None:
            nonlocal separator
            emit(separator + self._line(part))
            separator = "\n" if self.options.timestamps else " "

        wave = load_waveform(row, bad)
        if wave is not None:
            self.transcribe(torch.from_numpy(wave), emit_part)

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        for row in track(rows):
            wave = load_waveform(row, bad)
            if wave is None:
                continue
            started, seconds, parts = time.perf_counter(), len(wave) / SAMPLE_RATE, list[SpokenText]()
            details = self.transcribe(torch.from_numpy(wave), parts.append)
            factor = (time.perf_counter() - started) / seconds
            more = {"seconds": seconds, "real_time_factor": factor} | details
            more["segments"] = [part._asdict() for part in parts]
            output = ("\n" if self.options.timestamps else " ").join(map(self._line, parts))
            yield Prediction(row.values[0], output, None, more, f"{factor:.3f} x real time", place=row.place)

    def _line(self, part: SpokenText) -> str:
        """Return the text of a part, after its times if they are requested."""
        times = f"[{_clock(part.start)} - {_clock(part.end)}] " if self.options.timestamps else ""
        return times + part.text

    def write_file(self, prediction: Prediction, suffix: str) -> bytes:
        """Return the transcript as subtitles in the format SubRip."""
        return "\n".join(
            f"{n}\n{_clock(part['start'], ',')} --> {_clock(part['end'], ',')}\n{part['text']}\n"
            for n, part in enumerate(prediction.more["segments"], 1)
        ).encode()

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure character and word error rates, in lower case and without punctuation."""
        references = {row.place: normalize_transcript(row.values[1]) for row in rows}
        outputs = list(self.predict([row for row in rows if references[row.place]], bad))
        if not outputs:
            raise UserError("there is no clip with a transcript to evaluate on")
        texts = [normalize_transcript(each.output) for each in outputs]
        duration = sum(each.more["seconds"] for each in outputs)
        elapsed = sum(each.more["seconds"] * each.more["real_time_factor"] for each in outputs)
        return metrics.transcription(texts, [references[each.place] for each in outputs]) | {
            "real_time_factor": elapsed / duration, "rows": len(outputs),
        }  # fmt: skip

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        values, seconds = spectrogram(Path(prediction.input).read_bytes())
        record.set_spectrogram(values, seconds)


class WhisperSpeech(SpeechPredictor):
    """Whisper: any language, or translated to English."""

    kind: ClassVar[str] = "a speech recogniser"
    accepts: ClassVar[tuple[str, ...]] = ("language", "translate", "timestamps")

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        settings = checkpoint.generation_settings(ignored=WHISPER_TYPES)
        longest = settings.max_new_tokens or settings.max_length
        if settings != GenerationSettings(max_length=settings.max_length) or (
            longest is not None and longest < self.model.config.positions
        ):
            raise UserError(
                f"{self.name}: {GENERATION} changes how tokens are chosen ({settings}), which is not supported for "
                "Whisper; remove those values"
            )

    def transcribe(self, wave: Tensor, on_part: Callable[[SpokenText], object]) -> dict[str, Any]:
        config, options = self.model.config, self.options
        task = "translate" if options.translate else "transcribe"

        def on_segment(segment: Segment) -> None:
            if text := self.checkpoint.tokenizer.decode(segment.tokens).strip():
                on_part(SpokenText(segment.start, segment.end, text))

        try:
            if config.no_timestamps is not None:
                transcript = self.model.transcribe(wave, language=options.language, task=task, on_segment=on_segment)
                return {} if transcript.language is None else {"language": transcript.language}
            if options.timestamps:
                raise UserError(f"--timestamps: {self.name} has no timestamps; leave it out")
            samples = 2 * config.frames * HOP
            for first in range(0, len(wave), samples):
                window, seconds = wave[first : first + samples], samples / SAMPLE_RATE
                features = whisper_features(window, config.features, seconds=seconds)
                (tokens,) = self.model.generate(features[None], language=options.language, task=task)
                start = first / SAMPLE_RATE
                on_segment(Segment(start, start + len(window) / SAMPLE_RATE, tokens.tolist()))
        except ValueError as error:  # an unknown language or task
            raise UserError(f"{self.name}: {error}") from error
        return {}

    @torch.inference_mode()
    def examine(self, row: Row, bad: BadRows) -> Prediction | None:
        """Transcribe the first window, and run the model once over it and its transcript."""
        wave = load_waveform(row, bad)
        if wave is None:
            return None
        config = self.model.config
        seconds = 2 * config.frames * HOP / SAMPLE_RATE
        features = whisper_features(torch.from_numpy(wave), config.features, seconds=seconds)
        prompt = self._prompt(features)
        (tokens,) = self.model.generate(features[None], prompt=prompt)
        self.model(features[None], torch.tensor([[config.start, *prompt, *tokens.tolist()]]))
        output = self.checkpoint.tokenizer.decode(tokens.tolist())
        return Prediction(row.values[0], output, None, {"features": features, "seconds": seconds}, place=row.place)

    def _prompt(self, features: Tensor) -> list[int]:
        """Return the tokens before a transcript without timestamps: language, task and form."""
        config = self.model.config
        if not config.languages:
            return list(config.prompt)
        tokens = [dict(config.languages)[self.model.detect_language(features[None])[0]]]
        tokens += [token for name, token in config.tasks if name == "transcribe"]
        return [*tokens, *([] if config.no_timestamps is None else [config.no_timestamps])]

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        record.decode(self.checkpoint.tokenizer)
        record.set_spectrogram(prediction.more["features"], prediction.more["seconds"])


class CtcSpeech(SpeechPredictor):
    """Wav2Vec2: one label per frame of 20 ms."""

    kind: ClassVar[str] = "a speech recogniser"
    accepts: ClassVar[tuple[str, ...]] = ("timestamps",)

    @torch.inference_mode()
    def transcribe(self, wave: Tensor, on_part: Callable[[SpokenText], object]) -> dict[str, Any]:
        if self.checkpoint.settings(PREPROCESSOR).get("do_normalize", True):
            wave = normalize_waveform(wave)
        step = math.prod(self.model.config.strides)  # samples per frame
        chunk, margin = (int(seconds * SAMPLE_RATE // step) for seconds in (CHUNK, MARGIN))  # frames
        labels: list[int] = []
        while len(labels) * step < len(wave):
            first = max(0, len(labels) - margin)
            part = wave[first * step : (first + chunk) * step]
            if not self.model.config.length(len(part)):
                break
            new = self.model(part[None])[0].argmax(-1).tolist()[len(labels) - first :]
            is_last = (first + chunk) * step >= len(wave)
            labels += new if is_last else new[: len(new) - margin]
            if is_last:
                break
        words = self._words(labels, step / SAMPLE_RATE)
        for part_words in _lines(words):
            on_part(SpokenText(part_words[0].start, part_words[-1].end, " ".join(word.text for word in part_words)))
        return {"words": [word._asdict() for word in words]}

    def _words(self, labels: Sequence[int], seconds: float) -> list[SpokenText]:
        """Return the words with their times, from the labels of frames of this duration."""
        tokenizer = self.checkpoint.tokenizer
        delimiter = tokenizer.token_to_id(self.checkpoint.special_token("word_delimiter_token") or "|")
        blank = tokenizer.token_to_id(self.checkpoint.special_token("pad_token") or "<pad>")
        words, first = [], 0
        for last in range(len(labels) + 1):
            if last == len(labels) or labels[last] == delimiter:
                spoken = [n for n in range(first, last) if labels[n] != blank]
                if text := tokenizer.decode(list(labels[first:last])).strip() if spoken else "":
                    words.append(SpokenText(spoken[0] * seconds, (spoken[-1] + 1) * seconds, text))
                first = last + 1
        return words


def _lines(words: Sequence[SpokenText]) -> list[list[SpokenText]]:
    """Split words into lines at pauses, of at most a few seconds."""
    lines: list[list[SpokenText]] = []
    for word in words:
        if not lines or word.start - lines[-1][-1].end > PAUSE or word.end - lines[-1][0].start > LONGEST_LINE:
            lines.append([])
        lines[-1].append(word)
    return lines


def _clock(seconds: float, point: str = ".") -> str:
    """Format a time as 00:01:02.500."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"
