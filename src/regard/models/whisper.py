"""Whisper: an encoder-decoder whose source is sound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.audio import HOP, SAMPLE_RATE, whisper_features
from regard.models.decoder_inputs import pad_sources
from regard.models.inputs import Inputs, prepare_inputs
from regard.models.position_embeddings import LearnedPositions
from regard.models.speech_recognition import ConvSubsampling
from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Packed
from regard.nn.context import LayerContext
from regard.nn.dropout import dropout
from regard.nn.generate import Beam, GenerationState, Greedy, Strategy, generate
from regard.positions import sinusoidal

FRAME_SECONDS, STEP_SECONDS = HOP / SAMPLE_RATE, 2 * HOP / SAMPLE_RATE  # from one frame, and one timestamp, to the next


@dataclass(frozen=True)
class WhisperConfig(TransformerConfig):
    """A Transformer that listens: what `TransformerConfig` says, and of the sound:

    features: mel bands of a frame. frames: positions of the encoder, each two frames of the input.
    prompt: tokens after `start` that every target begins with, where neither language nor task is chosen.
    begin_suppress_tokens: tokens, other than those of `suppress_tokens`, that are not generated right after the prompt.
    languages: the token of each language, by its code, as ("en", 50259); none for a model of English alone.
    tasks: the token of each task, by its name.
    no_timestamps: the token that asks for text without timestamps. The next one is the timestamp of 0 s, and each after
        it is 0.02 s later. max_first_timestamp: the latest that the first one of a window may be, in such steps.

    >>> from regard.models.whisper import WhisperConfig
    >>> WhisperConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64).position
    'learned'
    """

    position: str = "learned"
    positions: int = 448
    activation: str = "gelu"
    embedding_scale: float | None = 1.0
    features: int = 80
    frames: int = 1500
    prompt: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    languages: tuple[tuple[str, int], ...] = ()
    tasks: tuple[tuple[str, int], ...] = ()
    no_timestamps: int | None = None
    max_first_timestamp: int | None = None


class Segment(NamedTuple):
    """A stretch of speech: seconds from the start of the sound, and its tokens without timestamps."""

    start: float
    end: float
    tokens: list[int]


class Transcript(NamedTuple):
    """What `Whisper.transcribe` heard: segments, and the language (None where the checkpoint names no languages)."""

    segments: list[Segment]
    language: str | None

    @property
    def tokens(self) -> list[int]:
        """Those of all segments, for a tokenizer to decode."""
        return [token for segment in self.segments for token in segment.tokens]


class Whisper(Transformer):
    """Features and target ids to the logits of the token that follows each: (B, N, features), (B, M) to (B, M, words).

    Sources are what `regard.models.audio.whisper_features` gives, at most 2 * config.frames frames; the original is
    always given 30 seconds. source_mask (B, N): True for real frames, which come first. `generate` gives the text of
    sounds that fit, `transcribe` that of a sound of any length.

    >>> import torch
    >>> from regard.models.whisper import Whisper, WhisperConfig
    >>> model = Whisper(WhisperConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64, frames=50)).eval()
    >>> model(torch.randn(1, 100, 80), torch.tensor([[1, 8]])).shape
    torch.Size([1, 2, 100])
    >>> len(model.generate(torch.randn(2, 100, 80), max_new_tokens=5))
    2
    """

    config: WhisperConfig

    def __init__(self, config: WhisperConfig) -> None:
        if config.window:
            raise ValueError(f"the encoder of Whisper sees every frame: window must be 0, but is {config.window}")
        super().__init__(config)
        self.front = ConvSubsampling(config.features, config.d_model, (1, 2))
        self.position = LearnedPositions(config.frames, config.d_model)
        table = self.position.embedding.weight.requires_grad_(False)
        if not table.is_meta:
            waves = sinusoidal(config.frames, config.d_model)
            table.copy_(torch.cat((waves[:, 0::2], waves[:, 1::2]), -1))

    def encode(self, source: Inputs, source_mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Hidden states (B, (N + 1) // 2, d_model) of the sound; of packed sources packed, of a list a list."""
        rows = prepare_inputs(*self.front(source, source_mask))
        x = self.position(rows.values, rows.positions)
        x = dropout(x, self.config.dropout) if self.config.dropout and self.training else x
        return rows.to_input_form(self.encoder(x, context=rows.context))

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        return super().decode(target, encoded, None if source_mask is None else source_mask[:, ::2])

    def start_generation(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[GenerationState, Tensor]:
        mask = None if source_mask is None else source_mask[:, ::2]
        return self.start_generation_from(self.encode(source, source_mask), mask)

    def generate(
        self,
        source: Inputs,
        source_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        strategy: Strategy | None = None,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        prompt: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The target of each source, at most `max_new_tokens` tokens, without start, prompt and stop.

        language: its code, such as "en"; None detects that of each source. task: "transcribe", or "translate" into
        English. timestamps: whether timestamp tokens are generated, too. prompt: tokens to begin with in place of
        those that language, task and timestamps ask for. max_new_tokens: None is as many as there are positions for.
        """
        if timestamps and isinstance(strategy, Beam):
            raise ValueError("timestamps need a Greedy() or Sample() strategy: their rules follow one sequence per row")
        with torch.inference_mode():
            encoded = self.encode(source, source_mask)
            mask = None if source_mask is None else source_mask[:, ::2]
            first = self._prompt(encoded, mask, language, task, timestamps, prompt)
            state, _ = self.start_generation_from(encoded, mask)
            self._suppress(state, first.shape[1], timestamps)
            room = self.config.positions - first.shape[1]
            max_new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
            return generate(
                state, first, strategy=strategy or Greedy(), max_new_tokens=max_new_tokens, stop=(self.config.stop,)
            )

    def detect_language(self, source: Inputs, source_mask: Tensor | None = None) -> list[str]:
        """The code of the language that each source is most likely in."""
        with torch.inference_mode():
            mask = None if source_mask is None else source_mask[:, ::2]
            found = self._detect(self.encode(source, source_mask), mask).tolist()
        codes = {token: code for code, token in self.config.languages}
        return [codes[token] for token in found]

    def transcribe(
        self,
        wave: Tensor,
        *,
        language: str | None = None,
        task: str = "transcribe",
        on_segment: Callable[[Segment], object] | None = None,
    ) -> Transcript:
        """The text of a sound (samples,) at 16 kHz, of any length, with timestamps.

        Windows of 30 seconds (2 * config.frames frames), each from where the last whole segment of the one before
        ends. The language is detected in the first. `on_segment` is called with every segment as it is found.
        """
        if wave.dim() != 1:
            raise ValueError(f"wave must be one sound (samples,), but is {tuple(wave.shape)}; mix its channels down")
        size, segments = 2 * self.config.frames, list[Segment]()
        seconds, like = size * HOP / SAMPLE_RATE, next(self.parameters())
        whole = wave.shape[0] > size * HOP
        features = whisper_features(wave, self.config.features, seconds=None if whole else seconds).to(like)
        frames = len(features) if whole else min(size, max(1, wave.shape[0] // HOP))
        at = 0
        while at < frames:
            window = features[at : at + size]
            frame_count, window = min(len(window), frames - at), F.pad(window, (0, 0, 0, size - len(window)))
            if language is None and self.config.languages:
                language = self.detect_language(window[None])[0]
            tokens = self.generate(window[None], language=language, task=task, timestamps=True)[0].tolist()
            found, step = self._segments(tokens, frame_count)
            for segment in (Segment(at * FRAME_SECONDS + a, at * FRAME_SECONDS + b, ids) for a, b, ids in found):
                segments.append(segment)
                if on_segment is not None:
                    on_segment(segment)
            at += max(step, 1)
        return Transcript(segments, language)

    def _segments(self, tokens: list[int], frame_count: int) -> tuple[list[Segment], int]:
        """The segments of a window of so many frames, and after how many frames the next window starts.

        Two timestamps next to each other end one segment and start the next. A window that ends within a segment is
        continued from its last timestamp.
        """
        assert self.config.no_timestamps is not None
        zero = self.config.no_timestamps + 1
        is_time = [token >= zero for token in tokens]

        def segment(part: list[int], start: int, end: int) -> Segment:
            text = [token for token in part if token < zero]
            return Segment((start - zero) * STEP_SECONDS, (end - zero) * STEP_SECONDS, text)

        cuts = [n for n in range(1, len(tokens)) if is_time[n - 1] and is_time[n]]
        if not cuts:
            last = max((token for token in tokens if token > zero), default=zero + frame_count // 2)
            return [segment(tokens, zero, last)], frame_count
        ended = len(tokens) > 1 and is_time[-1] and not is_time[-2]
        edges = [0, *cuts, *([len(tokens)] if ended else [])]
        parts = [tokens[a:b] for a, b in pairwise(edges)]
        found = [segment(part, part[0], part[-1]) for part in parts]
        return found, frame_count if ended else 2 * (tokens[cuts[-1] - 1] - zero)

    def _prompt(
        self, encoded: Inputs, mask: Tensor | None, language: str | None, task: str, timestamps: bool,
        prompt: Sequence[int] | None,
    ) -> Tensor:  # fmt: skip
        """The tokens (B, n) that targets begin with."""
        config, rows = self.config, len(encoded)
        device = next(self.parameters()).device
        if prompt is None and not config.languages and language not in (None, "en"):
            raise ValueError(f"language {language!r}: this checkpoint names no languages")
        if prompt is None and not config.tasks and task != "transcribe":
            raise ValueError(f"task {task!r}: this checkpoint names no tasks")
        columns = [torch.full((rows,), config.start, device=device)]
        if prompt is not None:
            columns += [torch.full((rows,), token, device=device) for token in prompt]
            return torch.stack(columns, 1)
        if config.languages:
            known = dict(config.languages)
            if language is not None and language not in known:
                raise ValueError(f"language must be one of {', '.join(sorted(known))}, but is {language!r}")
            found = self._detect(encoded, mask) if language is None else torch.full((rows,), known[language])
            columns.append(found.to(device))
        elif config.prompt:
            columns += [torch.full((rows,), token, device=device) for token in config.prompt]
        if config.tasks and config.languages:
            if task not in dict(config.tasks):
                raise ValueError(f"task must be one of {', '.join(dict(config.tasks))}, but is {task!r}")
            columns.append(torch.full((rows,), dict(config.tasks)[task], device=device))
        ids = torch.stack(columns, 1)
        if timestamps:
            if config.no_timestamps is None:
                raise ValueError("this checkpoint has no timestamps: its generation_config.json names none")
            return ids[:, :-1] if ids[0, -1] == config.no_timestamps else ids
        if config.no_timestamps is None or ids[0, -1] == config.no_timestamps:
            return ids
        return torch.cat((ids, ids.new_full((rows, 1), config.no_timestamps)), 1)

    def _detect(self, encoded: Inputs, mask: Tensor | None) -> Tensor:
        """The token (B,) of the language that follows the start token with the largest logit."""
        if not self.config.languages:
            raise ValueError("this checkpoint names no languages: its generation_config.json has no lang_to_id")
        encoded, mask = pad_sources(encoded, mask)
        first = torch.full((len(encoded), 1), self.config.start, device=encoded.device)
        logits = super().decode(first, encoded, mask)
        assert isinstance(logits, Tensor)
        tokens = torch.tensor([token for _, token in self.config.languages], device=first.device)
        return tokens[logits[:, -1, tokens].argmax(-1)]

    def _suppress(self, state: GenerationState, prompt: int, timestamps: bool) -> None:
        """Have a state leave out the tokens that may not come next."""
        forward, config = state.forward, self.config
        history: list[Tensor] = []

        def suppressed(ids: Tensor, context: LayerContext) -> Tensor:
            history.append(ids)
            logits = forward(ids, context)
            if len(history) == 1 and config.begin_suppress_tokens:
                logits = logits.index_fill(-1, torch.tensor(config.begin_suppress_tokens, device=ids.device), -math.inf)
            return (
                self._apply_timestamp_rules(torch.cat(history, 1)[:, prompt:], logits.clone()) if timestamps else logits
            )

        state.forward = suppressed

    def _apply_timestamp_rules(self, generated: Tensor, logits: Tensor) -> Tensor:
        """Logits without timestamps that break their rules, by the tokens (R, n) after the prompt.

        They come in pairs, except for the first, and never go back; a window starts with one; and where they are more
        likely together than every other token, one is taken.
        """
        config = self.config
        assert config.no_timestamps is not None
        zero = config.no_timestamps + 1
        logits[:, config.no_timestamps] = -math.inf
        for row, tokens in enumerate(generated.tolist()):
            if not tokens:
                logits[row, :zero] = -math.inf
                if config.max_first_timestamp is not None:
                    logits[row, zero + config.max_first_timestamp + 1 :] = -math.inf
                continue
            last = tokens[-1] >= zero
            before = len(tokens) < 2 or tokens[-2] >= zero
            if last and before:
                logits[row, zero:] = -math.inf
            elif last:
                logits[row, : config.stop] = -math.inf
            if times := [token for token in tokens if token >= zero]:
                logits[row, zero : times[-1] if last and not before else times[-1] + 1] = -math.inf
        likely = logits.float().log_softmax(-1)
        together = likely[:, zero:].logsumexp(-1) > likely[:, :zero].amax(-1)
        logits[together, :zero] = -math.inf
        return logits
