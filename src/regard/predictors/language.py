"""Language models: continue a text or a conversation, and measure perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from regard.data.readers import TEXT, Row, file_format, read_text
from regard.data.tokenizer import END, special_id
from regard.errors import BadRows, UserError
from regard.models.checkpoints.generation import DEFAULTS, GenerationSettings
from regard.models.inputs import prepare_inputs
from regard.models.language import LanguageModel
from regard.nn import Beam, Greedy, Sample
from regard.nn.generate import Strategy
from regard.predictors.chat import ChatTemplate, Message, read_chat_template
from regard.predictors.checkpoint import GENERATION, Checkpoint
from regard.predictors.predictor import Predictor
from regard.predictors.run import column_names
from regard.progress import track
from regard.training.runs import Run
from regard.training.task import Metrics, Prediction

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = 256
WINDOW = 1024  # tokens of a window in an evaluation, of which the first half is context
RUN_SAMPLING = GenerationSettings(Sample(0.8, top_p=0.9, seed=1))


@dataclass(frozen=True)
class TextFormat:
    """How a language model reads and writes text.

    begin: tokens before every text, in addition to those that the tokenizer adds. stop: tokens that end a text.
    positions: the most tokens of a text. generation: how tokens are chosen by default.
    """

    tokenizer: Tokenizer
    stop: tuple[int, ...]
    positions: int
    begin: tuple[int, ...] = ()
    chat: ChatTemplate | None = None
    generation: GenerationSettings = DEFAULTS

    def encode(self, text: str) -> list[int]:
        return [*self.begin, *self.tokenizer.encode(text).ids]


class LanguagePredictor(Predictor):
    """Continues texts. With a chat template it replies to them, unless `--no-chat` is given."""

    kind: ClassVar[str] = "a language model"
    streams: ClassVar[bool] = True
    accepts: ClassVar[tuple[str, ...]] = ("max_new_tokens", "temperature", "top_p", "seed", "chat", "system")
    model: LanguageModel

    def __init__(self, name: str, model: LanguageModel, form: TextFormat, run: Run | None = None) -> None:
        self.name, self.model, self.form, self.run = name, model, form, run
        self.tokenizer, self.longest = form.tokenizer, form.positions
        self.examines = "text" if run is None else "prediction"

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> LanguagePredictor:
        """Use the tokenizer, chat template and generation settings of a checkpoint."""
        model = checkpoint.model
        assert isinstance(model, LanguageModel)
        form = TextFormat(
            checkpoint.tokenizer, tuple(checkpoint.stop_tokens()), model.config.positions,
            chat=read_chat_template(checkpoint), generation=checkpoint.generation_settings(),
        )  # fmt: skip
        first = (checkpoint.settings(GENERATION) or checkpoint.config).get("forced_bos_token_id")
        if first is not None:
            raise UserError(f"{checkpoint.name}: forced_bos_token_id = {first} is not supported for a language model")
        return LanguagePredictor(checkpoint.name, model, form)

    @staticmethod
    def from_run(run: Run) -> LanguagePredictor:
        """Use the model of a run, whose texts begin and end with the same token."""
        model, _ = run.model(frozen=True)
        assert isinstance(model, LanguageModel)
        words = run.processor.require_tokenizer()
        end, positions = special_id(words, END), getattr(run.task, "context", model.config.positions)
        form = TextFormat(words, (end,), positions, (end,), generation=RUN_SAMPLING)
        return LanguagePredictor(str(run.folder), model, form, run)

    def column_names(self) -> list[str]:
        return super().column_names() if self.run is None else column_names(self.run)

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        return super().read_inputs(source, bad) if self.run is None else self.run.task.read_inputs(source, bad)

    @property
    def chats(self) -> bool:
        """Whether inputs are messages of a conversation."""
        if self.options.chat and self.form.chat is None:
            raise UserError(f"--chat: {self.name} has no chat template; leave it out to continue texts")
        if self.options.system is not None and (self.form.chat is None or self.options.chat is False):
            raise UserError(f"--system needs a chat template, but {self.name} continues texts here; leave it out")
        return self.form.chat is not None and self.options.chat is not False

    def messages(self, text: str) -> list[Message]:
        """Begin a conversation with a message of the user, after the system message if there is one."""
        system = [] if self.options.system is None else [{"role": "system", "content": self.options.system}]
        return [*system, {"role": "user", "content": text}]

    def prompt(self, given: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a text to continue, or of a conversation to reply to."""
        if isinstance(given, str):
            return self.form.encode(given)
        assert self.form.chat is not None
        return self.form.tokenizer.encode(self.form.chat.render(given), add_special_tokens=False).ids

    def generate(self, prompt: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that follow a prompt; those of a beam search all at the end."""
        settings, strategy = self.form.generation, self._strategy()
        most = min(self._limit(prompt), self.form.positions - len(prompt))
        ids = torch.tensor(prompt, device=next(self.model.parameters()).device)
        more = {"max_new_tokens": most, "stop": self.form.stop, "processor": settings.processor_after(len(prompt))}
        with torch.inference_mode():
            if isinstance(strategy, Beam):
                yield from self.model.generate([ids], strategy=strategy, **more)[0].tolist()  # type: ignore[arg-type]
            else:
                yield from self.model.stream(ids, strategy=strategy, **more)  # type: ignore[arg-type]

    def _limit(self, prompt: Sequence[int]) -> int:
        """Return the most tokens to generate after a prompt."""
        given = self.options.max_new_tokens
        return self.form.generation.limit(len(prompt), MAX_NEW_TOKENS) if given is None else given

    def pieces(self, prompt: Sequence[int]) -> Iterator[str]:
        """Yield the text that follows a prompt, in pieces of whole characters."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)
        for token in prompt[-8:]:  # spaces depend on the tokens before
            decoder.step(self.form.tokenizer, token)
        for token in self.generate(prompt):
            if piece := decoder.step(self.form.tokenizer, token):
                yield piece

    def stream(self, row: Row, bad: BadRows, emit: Callable[[str], object]) -> None:
        prompt = self._row_prompt(row, bad)
        for piece in () if prompt is None else self.pieces(prompt):
            emit(piece)

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        for row in track(rows):
            prompt = self._row_prompt(row, bad)
            if prompt is not None:
                tokens = list(self.generate(prompt))
                output = self.form.tokenizer.decode(tokens)
                score = math.exp(-self._loss([*prompt, *tokens], len(prompt)) / len(tokens)) if tokens else None
                yield Prediction(row.values[0], output, score, {"tokens": tokens}, place=row.place)

    def _row_prompt(self, row: Row, bad: BadRows) -> list[int] | None:
        text = row.values[0]
        prompt = self.prompt(self.messages(text) if self.chats else text)
        if not prompt:
            bad.add(f"{row.place}: has no tokens; give at least one word")
            return None
        if (problem := self.why_too_long(prompt)) is not None:
            bad.add(f"{row.place}: {problem}")
            return None
        return prompt

    def why_too_long(self, prompt: Sequence[int]) -> str | None:
        """Return a message if there is no room for a token after the prompt."""
        if len(prompt) >= self.form.positions:
            return f"has {len(prompt)} tokens, but the model takes at most {self.form.positions - 1}; shorten it"
        if self._limit(prompt) < 1:
            most = self.form.generation.max_length
            return (
                f"has {len(prompt)} tokens, but max_length of the model is {most}; shorten it or use --max-new-tokens"
            )
        return None

    def _strategy(self) -> Strategy:
        """Return how tokens are chosen: by the options, or else as the model's settings say."""
        options, default = self.options, self.form.generation.strategy
        if options.temperature == 0:
            return default if isinstance(default, Beam) else Greedy()
        if options.temperature is None and options.top_p is None:
            seeded = isinstance(default, Sample) and options.seed is not None
            return replace(default, seed=options.seed) if seeded else default  # type: ignore[arg-type]
        sampling = default if isinstance(default, Sample) else Sample()
        try:
            return replace(
                sampling, seed=options.seed,
                temperature=sampling.temperature if options.temperature is None else options.temperature,
                top_p=sampling.top_p if options.top_p is None else options.top_p,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(f"--temperature or --top-p: {error}") from error

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """Read a text file as one text, and the column `text` of other files."""
        if file_format(Path(source)) in TEXT:
            text = read_text(Path(source))
            if not text.strip():
                raise UserError(f"{source}: is empty; give a file with text")
            return [Row(source, (text,))]
        return super().read(source, bad)

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Measure the perplexity per token, per word and the bits per byte, in overlapping windows."""
        total, tokens, words, size = 0.0, 0, 0, 0
        window = min(WINDOW, self.form.positions)
        overlap = window - window // 2
        for row in rows:
            ids = self.form.encode(row.values[0])
            if len(ids) < 2:
                bad.add(f"{row.place}: has {len(ids)} tokens, but predictions need at least 2")
                continue
            for start in track(range(0, max(1, len(ids) - overlap), window - overlap)):
                total += self._loss(ids[start : start + window], overlap if start else 1)
            tokens, words, size = tokens + len(ids) - 1, words + len(row.values[0].split()), size + _bytes(row)
        if not tokens:
            raise UserError("there is no text to evaluate on")
        return {
            "perplexity": math.exp(total / tokens), "word_perplexity": _exp(total / max(1, words)),
            "bits_per_byte": total / math.log(2) / max(1, size), "loss": total / tokens, "tokens": tokens,
        }  # fmt: skip

    @torch.inference_mode()
    def _loss(self, ids: Sequence[int], known: int) -> float:
        """Sum of the cross entropies of the tokens from number `known` on."""
        inputs = torch.tensor(ids, device=next(self.model.parameters()).device)
        rows = prepare_inputs(inputs[None, :-1])
        hidden: Tensor = self.model.hidden(rows.values, rows.positions, rows.context)
        return float(self.model.token_loss(hidden[0, known - 1 :], inputs[known:], 0.0))

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        record.decode(self.form.tokenizer)


def _bytes(row: Row) -> int:
    return len(row.values[0].encode("utf-8", "surrogatepass"))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
