"""Check a whole model: measure every layer in every scenario and compare with what the configuration promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from regard.check.model.driver import Driver, implementations
from regard.check.model.generation import WHOLE, check_generation
from regard.check.model.layout import Scenario, scenarios
from regard.check.model.measure import CERTAIN, Alone, Measurement, Meter, difference, merge
from regard.check.model.probe import Layer, attention_layers, discover
from regard.check.model.promise import Promise, read_promise, variants
from regard.check.model.reproduce import Program, text_alone
from regard.check.model.sinks import check_sinks
from regard.errors import UserError, first_line
from regard.progress import stage

TOKENS = 12  # of a text; more if a window is wider
MAX_TOKENS = 1100  # beyond which a window is not measured unless `tokens` asks for it
LAYER_TOLERANCE = 1e-4  # difference of the outputs of one layer, relative to the largest
MODEL_TOLERANCE = 1e-3  # the same after all layers

_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, NotImplementedError)  # of a broken model

Verdict = Literal["passed", "failed", "not promised", "not measured"]


@dataclass(frozen=True)
class Finding:
    """What one layer was promised to see in a scenario, and what it saw. code: a program that shows a failure."""

    layer: str
    implementation: str
    scenario: str
    promised: str
    measured: str
    verdict: Verdict
    code: str = ""


def check_model(
    model: Any,
    *,
    implementation: Sequence[str] = ("eager", "sdpa"),
    tokens: int | None = None,
    causal: bool | None = None,
    setup: str = "",
) -> list[Finding]:
    """Measure what each attention layer of a Transformers model sees, and compare with its configuration.

    implementation: attention implementations to check. tokens: length of the texts; by default enough for the windows.
    causal: whether the model is causal, if its configuration does not say. setup: code that builds `model`, for
    programs that reproduce failures.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> from regard.check import check_model
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
    >>> model = MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=2, sliding_window=4))
    >>> findings = check_model(model, implementation=["sdpa"])
    >>> findings[0].layer, findings[0].promised, findings[0].verdict
    ('model.layers.0.self_attn', 'causal, window 4, hides padding and other documents', 'passed')
    >>> {finding.verdict for finding in findings}
    {'passed'}
    """
    return list(_check(model, list(implementation), tokens, causal, setup))


def _check(model: Any, names: list[str], tokens: int | None, causal: bool | None, setup: str) -> Iterator[Finding]:
    training, before = model.training, model.config._attn_implementation
    check: ModelCheck | None = None
    try:
        for name, reason in implementations(model, names):
            if reason:
                yield Finding(WHOLE, name, "plain", "", reason, "not measured")
                continue
            with stage(f"checking {name}"):
                check = check or ModelCheck(Driver(model), tokens, causal, setup)
                check.start(name)
                yield from check.findings()
    finally:
        model.train(training)
        model.set_attn_implementation(before)


class ModelCheck:
    """The check of a model. `implementation` is the attention implementation that is set."""

    def __init__(self, driver: Driver, tokens: int | None, causal: bool | None, setup: str) -> None:
        self.driver, self.causal, self.setup = driver, causal, setup
        self.eager: dict[str, Tensor] = {}  # outputs of each layer with eager attention
        self.layer_tolerance = max(LAYER_TOLERANCE, 4 * driver.precision)
        self.model_tolerance = max(MODEL_TOLERANCE, 16 * driver.precision)
        self.layers = attention_layers(driver.model)
        if not self.layers:
            raise UserError(f"{type(driver.model).__name__} has no modules that are named attention")
        most = driver.max_length
        if tokens is not None and not 6 <= tokens <= most:
            raise UserError(f"tokens must be between 6 and {most}, the longest text of the model, got {tokens}")
        self.tokens = tokens or min(TOKENS, most)
        try:
            driver.finds_positions, driver.returns_cache  # noqa: B018 - measured once, before inputs are replaced
            self._discover()
        except _ERRORS as error:
            raise UserError(f"{type(driver.model).__name__} cannot be called: {first_line(error)}") from error
        self.promises = {layer.name: self._promise(layer) for layer in self.layers if not layer.reason}
        sizes = [(p.behind, p.chunk) for p in self.promises.values() if isinstance(p, Promise)]
        self.windows = sorted({size for pair in sizes for size in pair if size is not None})
        wanted = max((n + 6 for n in self.windows if n + 6 <= min(MAX_TOKENS, most)), default=0)
        if tokens is None and wanted > self.tokens:
            self.tokens = wanted
            self._discover()

    @property
    def encoder_tokens(self) -> int:
        if not self.driver.two_sequences:
            return 0
        return self.driver.fixed_length or self.tokens - 2  # other than that of the decoder, to tell them apart

    def start(self, implementation: str) -> None:
        """Begin to measure another implementation, which is set already."""
        self.implementation = implementation
        self.meter = Meter(self.driver, self.layers, max(self.tokens, self.encoder_tokens), self.windows)

    def scenarios(self, tokens: int | None = None, encoder: int | None = None) -> tuple[Scenario, ...]:
        return scenarios(
            tokens or self.tokens,
            self.encoder_tokens if encoder is None else encoder,
            padding=self.driver.takes_mask or self.driver.two_sequences,
            cache=self.has_cache,
            documents=bool(self.driver.position_name) and self.is_causal,
            encoder_padding=not self.driver.fixed_length,
        )

    @property
    def is_causal(self) -> bool:
        """Whether the model is known to be a causal one without an encoder."""
        promises = [each for each in self.promises.values() if isinstance(each, Promise)]
        return bool(promises) and all(each.ahead == 0 for each in promises) and not self.driver.two_sequences

    @property
    def has_cache(self) -> bool:
        return (self.is_causal or self.driver.two_sequences) and self.driver.returns_cache

    @property
    def why_no_documents(self) -> str:
        """Why positions that start again do not separate documents; empty if the model promises that they do."""
        if self.driver.two_sequences or self.driver.position_name is None:
            return "forward takes no positions that could separate documents"
        if not self.is_causal:
            return "only causal models separate documents by their positions"
        return "" if self.driver.masks_take_positions else "the masks of this model do not depend on positions"

    def _discover(self) -> None:
        for layer in self.layers:
            layer.reason = Layer.reason
        lengths = {"self": self.tokens}
        if self.driver.two_sequences:
            if self.encoder_tokens == self.tokens:
                self.tokens -= 1
            lengths = {"encoder": self.encoder_tokens, "decoder": self.tokens}
        plain = scenarios(self.tokens, self.encoder_tokens)[0]
        with discover(self.layers, lengths):
            self.driver.run(self.driver.calls(plain))

    def _promise(self, layer: Layer) -> Promise | str:
        config = getattr(layer.module, "config", None) or self.driver.config
        promise = read_promise(config, layer.role, layer.number, self.causal)
        if isinstance(promise, str):
            return promise
        masked = layer.role in ("encoder", "cross") and self.driver.fixed_length
        return replace(promise, padding=self.driver.takes_mask and not masked, sink=hasattr(layer.module, "sinks"))

    def promise(self, layer: Layer) -> Promise | str:
        """The promise of a layer, with documents if the model promises them."""
        promise = self.promises[layer.name]
        if isinstance(promise, str) or layer.role != "self":
            return promise
        return replace(promise, documents=not self.why_no_documents)

    def findings(self) -> Iterator[Finding]:
        """All findings for the implementation that is set."""
        measured: dict[tuple[str, str], Finding] = {}
        for scenario in self.scenarios():
            with stage(f"{self.implementation}: {scenario.name}"):
                for finding in self.judge(scenario):
                    measured[finding.layer, finding.scenario] = finding
        for name in dict.fromkeys(each.scenario for each in measured.values() if each.verdict == "failed"):
            with stage(f"{self.implementation}: reducing {name}"):
                self._reduce(name, measured)
        order = [layer.name for layer in self.layers] + [WHOLE]
        yield from sorted(measured.values(), key=lambda finding: order.index(finding.layer))
        yield from self._unreached_windows()
        yield from check_sinks(self)
        yield from check_generation(self)
        if not self.has_cache:
            reason = "only causal models use it" if self.driver.returns_cache else "the model has no cache"
            yield self.finding(WHOLE, "cache", reason, "", "not promised")
        if "documents" not in {scenario.name for scenario in self.scenarios()}:
            yield self.finding(WHOLE, "documents", self.why_no_documents, "", "not promised")

    def judge(self, scenario: Scenario) -> Iterator[Finding]:
        """Measure one scenario and judge every layer and the whole model."""
        try:
            seen, texts = self._measure(scenario)
        except _ERRORS as error:
            if isinstance(error, UserError):
                raise
            place, measured = self.meter.inside, f"raises {type(error).__name__}: {first_line(error)}"
            promised = next((str(self.promise(layer)) for layer in self.layers if layer.name == place), "a result")
            yield self.finding(place or WHOLE, scenario.name, promised, measured, "failed")
            return
        causes: list[str] = []  # of a difference of the whole model
        for layer in self.layers:
            if layer.name not in seen:
                reason = layer.reason or self.meter.problems.get(layer.name, "not called in this scenario")
                yield self.finding(layer.name, scenario.name, "", reason, "not measured")
                continue
            finding = self._judge_layer(layer, seen[layer.name], scenario, texts)
            if scenario.name == "plain":
                finding = self._compare_with_eager(layer, seen[layer.name].outputs, finding)
            if finding.verdict == "failed":
                causes.append("")
            elif not bool(seen[layer.name].outputs.isfinite().all()):
                causes.append(f"nor are those of {layer.name} at padding")
            yield finding
        if scenario.name != "plain":
            others = self.driver.other_layers
            where = f"positions, embeddings and {others} layers" if others else "positions and embeddings"
            causes.append(f"no attention layer differs: look at {where}")
            yield self._judge_whole(scenario, texts, causes[0])

    def _measure(self, scenario: Scenario) -> tuple[dict[str, Measurement], list[Alone]]:
        seen = self.meter.visibility(scenario)
        if any(self._is_blind(layer, seen) for layer in self.layers):
            certain = self.meter.visibility(scenario, CERTAIN)
            seen = {name: merge(each, certain[name]) for name, each in seen.items()}
        return seen, list(self.meter.alone(scenario))

    def _is_blind(self, layer: Layer, seen: dict[str, Measurement]) -> bool:
        promise = self.promise(layer) if layer.name in seen else ""
        if isinstance(promise, str):
            return False
        return any(bool((row.wrong(promise) & ~row.seen).any()) for row in seen[layer.name].rows)

    def _judge_layer(self, layer: Layer, seen: Measurement, scenario: Scenario, texts: list[Alone]) -> Finding:
        promise = self.promise(layer)
        if isinstance(promise, str):
            measured = _describe(Promise(ahead=None), seen, scenario) or "another pattern"
            return self.finding(layer.name, scenario.name, promise, measured, "not promised")
        if scenario.hides == "documents" and not promise.documents:
            measured = _describe(replace(promise, documents=True), seen, scenario) or str(promise)
            return self.finding(layer.name, scenario.name, self.why_no_documents, measured, "not promised")
        if any(bool(row.wrong(promise).any()) for row in seen.rows):
            measured = _describe(promise, seen, scenario) or _first_pairs(promise, seen)
            return self.finding(layer.name, scenario.name, str(promise), measured, "failed")
        far, _ = self._farthest(layer, seen, texts)
        if far > self.layer_tolerance:
            return self.finding(layer.name, scenario.name, str(promise), _far(far, scenario), "failed")
        return self.finding(layer.name, scenario.name, str(promise), "as promised", "passed")

    def _farthest(self, layer: Layer, seen: Measurement, texts: list[Alone]) -> tuple[float, Alone]:
        """The largest difference between the outputs for a text in a scenario and alone, and that text."""
        sequence = "decoder" if layer.role == "cross" else layer.role
        differences = [
            (difference(seen.outputs[n : n + 1, text.places[sequence]], text.layers[layer.name]), text)
            for text in texts
            for n in [text.row]
        ]
        return max(differences, key=lambda pair: pair[0])

    def _farthest_whole(self, scenario: Scenario, texts: list[Alone]) -> tuple[float, Alone, str]:
        """The same for the outputs of the model, and the name of the output; empty if it has no output per token."""
        whole, name = self.driver.run(self.driver.calls(scenario)), self.driver.output_name
        per_token = whole.dim() == 3
        differences = []
        for text in texts:
            own = whole[text.row : text.row + 1]
            own = own[:, text.places[self._main]] if per_token else own
            differences.append((difference(own, text.model), text))
        far, text = max(differences, key=lambda pair: pair[0])
        return far, text, name if per_token else ""

    def _compare_with_eager(self, layer: Layer, outputs: Tensor, finding: Finding) -> Finding:
        if self.implementation == "eager":
            self.eager[layer.name] = outputs
        eager = self.eager.get(layer.name)
        if finding.verdict != "passed" or eager is None or (far := difference(outputs, eager)) <= self.layer_tolerance:
            return finding
        (plain, *_) = self.scenarios()
        code = Program(self.driver, self.setup, self.implementation, plain).against_eager(layer)
        measured = f"sees the same, but outputs differ from eager by {far:.2g}"
        return replace(finding, measured=measured, verdict="failed", code=code)

    def _judge_whole(self, scenario: Scenario, texts: list[Alone], cause: str) -> Finding:
        promised = "outputs of one call" if scenario.name == "cache" else "outputs of each text alone"
        far, _, per_token = self._farthest_whole(scenario, texts)
        if far <= self.model_tolerance:
            return self.finding(WHOLE, scenario.name, promised, "as promised", "passed")
        if reason := self._why_not_whole(scenario, bool(per_token)):
            return self.finding(WHOLE, scenario.name, reason, _far(far, scenario), "not promised")
        measured = "; ".join(filter(None, (_far(far, scenario), cause)))
        return self.finding(WHOLE, scenario.name, promised, measured, "failed")

    def _why_not_whole(self, scenario: Scenario, per_token: bool) -> str:
        """Why the outputs of the whole model may differ in a scenario; empty if they may not."""
        if scenario.hides == "documents":
            others = self.driver.other_layers
            reason = f"its {others} layers do not separate documents" if others else ""
            return self.why_no_documents or reason or ("" if per_token else "it has one output for all documents")
        if not per_token and ("left" in scenario.name or scenario.chunks):
            return "it has one output for a text, which may be read from its first or last place"
        return self.driver.why_no_left_padding if "left" in scenario.name else ""

    @property
    def _main(self) -> str:
        return "decoder" if self.driver.two_sequences else "self"

    def _unreached_windows(self) -> Iterator[Finding]:
        for layer in self.layers:
            promise = self.promises.get(layer.name)
            if isinstance(promise, Promise):
                for size, word in ((promise.behind, "window"), (promise.chunk, "chunks")):
                    if size is not None and size >= self.tokens - 1:
                        measured = f"{self.tokens} tokens do not reach beyond it; give --tokens {size + 7}"
                        promised = f"{word} of {size + (word == 'window')}"
                        yield self.finding(layer.name, word, promised, measured, "not measured")

    def _reduce(self, name: str, measured: dict[tuple[str, str], Finding]) -> None:
        """Find the shortest text that shows each failure of a scenario, and write a program for it."""
        failed = {layer: f for (layer, each), f in measured.items() if each == name and f.verdict == "failed"}
        todo = {layer for layer, finding in failed.items() if not finding.code}
        lengths: Iterable[int] = range(2, min(self.tokens, 16)) if self.tokens <= 64 else ()
        for tokens in (*lengths, self.tokens):
            encoder = min(self.encoder_tokens, tokens) if not self.driver.fixed_length else self.encoder_tokens
            scenario = next((each for each in self.scenarios(tokens, encoder) if each.name == name), None)
            if scenario is None or not todo:
                continue
            for layer, code in self._programs(scenario, todo):
                measured[layer, name] = replace(measured[layer, name], code=code)
                todo.discard(layer)

    def _programs(self, scenario: Scenario, names: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the layers that fail in a scenario, each with a program."""
        program = Program(self.driver, self.setup, self.implementation, scenario)
        try:
            seen, texts = self._measure(scenario)
        except _ERRORS:
            if (layer_name := self.meter.inside or WHOLE) in names:
                yield layer_name, program.error()
            return
        for layer in self.layers:
            promise = self.promise(layer) if layer.name in seen and layer.name in names else ""
            if isinstance(promise, str):
                continue
            if any(bool(row.wrong(promise).any()) for row in seen[layer.name].rows):
                yield layer.name, program.visibility(layer, promise, seen[layer.name])
                continue
            far, text = self._farthest(layer, seen[layer.name], texts)
            if far > self.layer_tolerance:
                yield layer.name, program.values(layer, text, text_alone(scenario, text))
        if WHOLE in names and scenario.name != "plain":
            far, text, output = self._farthest_whole(scenario, texts)
            if far > self.model_tolerance and output:
                yield WHOLE, program.whole(text, text_alone(scenario, text), output)

    def finding(self, layer: str, scenario: str, promised: str, measured: str, verdict: Verdict) -> Finding:
        return Finding(layer, self.implementation, scenario, promised, measured, verdict)


def _far(far: float, scenario: Scenario) -> str:
    other = "one call without a cache" if scenario.name == "cache" else "each text alone"
    return f"outputs differ from {other} by {far:.2g}" if far < float("inf") else "outputs are not finite"


def _describe(promise: Promise, seen: Measurement, scenario: Scenario) -> str:
    """The promise that fits what was seen; empty if none does."""
    for each in (promise, *variants(promise, len(scenario.rows[0].texts))):
        if not any(bool(row.wrong(each).any()) for row in seen.rows):
            lost = [
                f"sees {what}"
                for what, was, now in (
                    ("padding", promise.padding, each.padding),
                    ("other documents", promise.documents, each.documents),
                )
                if was and not now
            ]
            return ", ".join([str(each), *lost])
    return ""


def _first_pairs(promise: Promise, seen: Measurement) -> str:
    """The first pairs of a query and a key that differ, in words."""
    parts = []
    for row in seen.rows:
        for word, kind in (("sees", row.seen), ("does not see", ~row.seen)):
            pairs = (row.wrong(promise) & kind).nonzero()
            if len(pairs):
                query, key = int(pairs[0][0]), int(row.columns[pairs[0][1]])
                more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
                parts.append(f"token {query} {word} token {key}{more}")
        if parts:
            break
    return ", ".join(parts)
