"""Whisper: speech recognition and translation with an encoder-decoder."""

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
from regard.models.config_fields import optional_count, token
from regard.models.decoder_inputs import pad_sources
from regard.models.inputs import Inputs, prepare_inputs
from regard.models.position_embeddings import LearnedPositions
from regard.models.speech_recognition import ConvSubsampling
from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Packed
from regard.nn.context import LayerContext
from regard.nn.dropout import dropout
from regard.nn.generate import Beam, GenerationState, Greedy, LogitsProcessor, Strategy, generate
from regard.positions import sinusoidal

FRAME_SECONDS, STEP_SECONDS = HOP / SAMPLE_RATE, 2 * HOP / SAMPLE_RATE  # between frames, and between timestamps


@dataclass(frozen=True)
class WhisperConfig(TransformerConfig):
    """Configuration of Whisper: that of `TransformerConfig`, and the following.

    features: mel bands per frame. frames: positions of the encoder, one per two input frames.
    prompt: tokens after `start` of every target, for checkpoints without languages.
    begin_suppress_tokens: tokens that are not generated right after the prompt, in addition to `suppress_tokens`.
    languages: pairs of language code and token, such as ("en", 50259); empty for English-only models.
    tasks: pairs of task name and token.
    no_timestamps: the token that selects text without timestamps. The token after it is the timestamp of 0 s, and each
        following one is 0.02 s later. max_first_timestamp: largest first timestamp of a window, in steps of 0.02 s.

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
    prompt: tuple[int, ...] = token(())
    begin_suppress_tokens: tuple[int, ...] = token(())
    languages: tuple[tuple[str, int], ...] = token(())
    tasks: tuple[tuple[str, int], ...] = token(())
    no_timestamps: int | None = token(None)
    max_first_timestamp: int | None = optional_count(None)


class Segment(NamedTuple):
    """A segment of speech: start and end in seconds, and its tokens without timestamps."""

    start: float
    end: float
    tokens: list[int]


class Transcript(NamedTuple):
    """Result of `Whisper.transcribe`: segments and language (None if the checkpoint defines no languages)."""

    segments: list[Segment]
    language: str | None

    @property
    def tokens(self) -> list[int]:
        """Tokens of all segments, for a tokenizer to decode."""
        return [token for segment in self.segments for token in segment.tokens]


class Whisper(Transformer):
    """Next-token logits (B, M, vocabulary) for targets (B, M), given audio features (B, N, features).

    Sources are computed by `regard.models.audio.whisper_features`, at most 2 * config.frames frames; the original
    models expect 30 seconds. source_mask (B, N): True for real frames, which come first. `generate` transcribes
    audio of at most that length, `transcribe` audio of any length.

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
            raise ValueError(f"Whisper has no encoder window: window must be 0, got {config.window}")
        super().__init__(config)
        self.front = ConvSubsampling(config.features, config.d_model, (1, 2))
        self.position = LearnedPositions(config.frames, config.d_model)
        table = self.position.embedding.weight.requires_grad_(False)
        if not table.is_meta:
            sines = sinusoidal(config.frames, config.d_model)
            table.copy_(torch.cat((sines[:, 0::2], sines[:, 1::2]), -1))

    def encode(self, source: Inputs, source_mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Return hidden states (B, (N + 1) // 2, d_model) of the audio, in the form of the source."""
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
        processor: LogitsProcessor | None = None,
    ) -> list[Tensor]:
        """Generate at most `max_new_tokens` target tokens for each source, without start, prompt and stop.

        language: language code such as "en"; None detects the language of each source. task: "transcribe", or
        "translate" into English. timestamps: whether to generate timestamp tokens. prompt: tokens after the start
        token, instead of those for language, task and timestamps. max_new_tokens: by default limited by
        `config.positions` only. processor: changes the logits in every step, after those rules.
        """
        if timestamps and isinstance(strategy, Beam):
            raise ValueError(
                "timestamps need the strategy Greedy() or Sample(): their rules track one sequence per row"
            )
        with torch.inference_mode():
            encoded = self.encode(source, source_mask)
            mask = None if source_mask is None else source_mask[:, ::2]
            first = self._prompt(encoded, mask, language, task, timestamps, prompt)
            state, _ = self.start_generation_from(encoded, mask)
            self._suppress(state, first.shape[1], timestamps)
            room = self.config.positions - first.shape[1]
            max_new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
            return generate(
                state, first, strategy=strategy or Greedy(), max_new_tokens=max_new_tokens, stop=(self.config.stop,),
                processor=processor,
            )  # fmt: skip

    def detect_language(self, source: Inputs, source_mask: Tensor | None = None) -> list[str]:
        """Return the code of the most likely language of each source."""
        with torch.inference_mode():
            mask = None if source_mask is None else source_mask[:, ::2]
            detected = self._detect(self.encode(source, source_mask), mask).tolist()
        codes = {token: code for code, token in self.config.languages}
        return [codes[token] for token in detected]

    def transcribe(
        self,
        wave: Tensor,
        *,
        language: str | None = None,
        task: str = "transcribe",
        on_segment: Callable[[Segment], object] | None = None,
    ) -> Transcript:
        """Transcribe audio (samples,) of any length at 16 kHz, with timestamps.

        The audio is decoded in windows of 30 seconds (2 * config.frames frames), each starting at the end of the last
        complete segment. The language is detected in the first window. `on_segment` is called with every new segment.
        """
        if wave.dim() != 1:
            raise ValueError(f"wave must be mono audio (samples,), got shape {tuple(wave.shape)}; average the channels")
        size, segments = 2 * self.config.frames, list[Segment]()
        seconds, like = size * HOP / SAMPLE_RATE, next(self.parameters())
        is_long = wave.shape[0] > size * HOP
        features = whisper_features(wave, self.config.features, seconds=None if is_long else seconds).to(like)
        frames = len(features) if is_long else min(size, max(1, wave.shape[0] // HOP))
        start = 0
        while start < frames:
            window = features[start : start + size]
            frame_count, window = min(len(window), frames - start), F.pad(window, (0, 0, 0, size - len(window)))
            if language is None and self.config.languages:
                language = self.detect_language(window[None])[0]
            tokens = self.generate(window[None], language=language, task=task, timestamps=True)[0].tolist()
            window_segments, step = self._segments(tokens, frame_count)
            for segment in (
                Segment(start * FRAME_SECONDS + a, start * FRAME_SECONDS + b, ids) for a, b, ids in window_segments
            ):
                segments.append(segment)
                if on_segment is not None:
                    on_segment(segment)
            start += max(step, 1)
        return Transcript(segments, language)

    def _segments(self, tokens: list[int], frame_count: int) -> tuple[list[Segment], int]:
        """Return the segments of a window of `frame_count` frames, and how many frames later the next window starts.

        Two adjacent timestamps end one segment and start the next. If a window ends within a segment, the next window
        starts at the last timestamp pair.
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
        is_complete = len(tokens) > 1 and is_time[-1] and not is_time[-2]
        edges = [0, *cuts, *([len(tokens)] if is_complete else [])]
        parts = [tokens[a:b] for a, b in pairwise(edges)]
        segments = [segment(part, part[0], part[-1]) for part in parts]
        return segments, frame_count if is_complete else 2 * (tokens[cuts[-1] - 1] - zero)

    def _prompt(
        self, encoded: Inputs, mask: Tensor | None, language: str | None, task: str, timestamps: bool,
        prompt: Sequence[int] | None,
    ) -> Tensor:  # fmt: skip
        """Return the start and prompt tokens (B, n) of the targets."""
        config, rows = self.config, len(encoded)
        device = next(self.parameters()).device
        if prompt is None and not config.languages and language not in (None, "en"):
            raise ValueError(f"language={language!r} is not supported: this checkpoint defines no languages")
        if prompt is None and not config.tasks and task != "transcribe":
            raise ValueError(f"task={task!r} is not supported: this checkpoint defines no tasks")
        columns = [torch.full((rows,), config.start, device=device)]
        if prompt is not None:
            columns += [torch.full((rows,), token, device=device) for token in prompt]
            return torch.stack(columns, 1)
        if config.languages:
            tokens_by_language = dict(config.languages)
            if language is not None and language not in tokens_by_language:
                raise ValueError(f"language must be one of {', '.join(sorted(tokens_by_language))}, got {language!r}")
            language_tokens = (
                self._detect(encoded, mask) if language is None else torch.full((rows,), tokens_by_language[language])
            )
            columns.append(language_tokens.to(device))
        elif config.prompt:
            columns += [torch.full((rows,), token, device=device) for token in config.prompt]
        if config.tasks and config.languages:
            if task not in dict(config.tasks):
                raise ValueError(f"task must be one of {', '.join(dict(config.tasks))}, got {task!r}")
            columns.append(torch.full((rows,), dict(config.tasks)[task], device=device))
        ids = torch.stack(columns, 1)
        if timestamps:
            if config.no_timestamps is None:
                raise ValueError(
                    "this checkpoint has no timestamps: generation_config.json lacks no_timestamps_token_id"
                )
            return ids[:, :-1] if ids[0, -1] == config.no_timestamps else ids
        if config.no_timestamps is None or ids[0, -1] == config.no_timestamps:
            return ids
        return torch.cat((ids, ids.new_full((rows, 1), config.no_timestamps)), 1)

    def _detect(self, encoded: Inputs, mask: Tensor | None) -> Tensor:
        """Return the language token (B,) with the largest logit after the start token."""
        if not self.config.languages:
            raise ValueError("this checkpoint defines no languages: generation_config.json lacks lang_to_id")
        encoded, mask = pad_sources(encoded, mask)
        first = torch.full((len(encoded), 1), self.config.start, device=encoded.device)
        logits = super().decode(first, encoded, mask)
        assert isinstance(logits, Tensor)
        tokens = torch.tensor([token for _, token in self.config.languages], device=first.device)
        return tokens[logits[:, -1, tokens].argmax(-1)]

    def _suppress(self, state: GenerationState, prompt: int, timestamps: bool) -> None:
        """Wrap `state.forward` to set the logits of suppressed tokens to -inf."""
        forward, config = state.forward, self.config
        history: list[Tensor] = []

        def suppressed(ids: Tensor, context: LayerContext) -> Tensor:
            history.append(ids)
            logits = forward(ids, context)
            if config.suppress_tokens:
                logits = logits.index_fill(-1, torch.tensor(config.suppress_tokens, device=ids.device), -math.inf)
            if len(history) == 1 and config.begin_suppress_tokens:
                logits = logits.index_fill(-1, torch.tensor(config.begin_suppress_tokens, device=ids.device), -math.inf)
            return (
                self._apply_timestamp_rules(torch.cat(history, 1)[:, prompt:], logits.clone()) if timestamps else logits
            )

        state.forward = suppressed

    def _apply_timestamp_rules(self, generated: Tensor, logits: Tensor) -> Tensor:
        """Set the logits of timestamps that violate the rules to -inf, given the tokens (R, n) after the prompt.

        Timestamps come in pairs, except for the first, and do not decrease. A window starts with one. If timestamps
        together are more likely than any other token, a timestamp is generated.
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
            last_is_time = tokens[-1] >= zero
            previous_is_time = len(tokens) < 2 or tokens[-2] >= zero
            if last_is_time and previous_is_time:
                logits[row, zero:] = -math.inf
            elif last_is_time:
                logits[row, : config.stop] = -math.inf
            if times := [token for token in tokens if token >= zero]:
                logits[row, zero : times[-1] if last_is_time and not previous_is_time else times[-1] + 1] = -math.inf
        log_probs = logits.float().log_softmax(-1)
        prefer_timestamp = log_probs[:, zero:].logsumexp(-1) > log_probs[:, :zero].amax(-1)
        logits[prefer_timestamp, :zero] = -math.inf
        return logits
