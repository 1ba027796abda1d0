"""Call a Transformers model as a scenario asks: token numbers, masks, positions, chunks with a cache."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.check.model.layout import Row, Scenario, full
from regard.errors import UserError

_MASK_WITH_POSITIONS = re.compile(r"mask\w*\([^)]*\bposition_ids|mask_kwargs = \{[^}]*\bposition_ids")
_POSITION_TABLE = re.compile(r"(^|[._])(pos|position|positions|wpe|positional)(_|$|e)", re.IGNORECASE)


class Driver:
    """A Transformers model and how it is called."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.config = model.config
        text = model.config.get_text_config()
        self.parameters = set(inspect.signature(model.forward).parameters)
        self.input_name = model.main_input_name
        self.two_sequences = bool(getattr(model.config, "is_encoder_decoder", False))
        if self.input_name not in ("input_ids", "input_features"):
            raise UserError(
                f"{type(model).__name__} takes {self.input_name}; the check calls models of text (input_ids) and of "
                "speech with a decoder (input_features)"
            )
        self.vocabulary = getattr(text, "vocab_size", None) or 0
        if "input_ids" in self.parameters and self.vocabulary < 8:
            raise UserError(
                f"{type(model).__name__} must have a vocabulary of at least 8 tokens, got {self.vocabulary}"
            )
        special = [getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start", "sep")]
        special = [each for one in special for each in (one if isinstance(one, list) else [one])]
        self.pad = special[0] if isinstance(special[0], int) and 0 <= special[0] < self.vocabulary else 0
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randperm(max(min(self.vocabulary, 100_000), 1), generator=generator)
        usual = numbers[~torch.isin(numbers, torch.tensor([each for each in special if each is not None] + [self.pad]))]
        self.numbers = usual if len(usual) else numbers
        self.output_name = ""  # of the outputs of the last call

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def precision(self) -> float:
        """The relative rounding error of the dtype of the model."""
        return torch.finfo(next(self.model.parameters()).dtype).eps

    @property
    def fixed_length(self) -> int:
        """The number of tokens of an encoder of audio or images, which the input does not choose; 0 if it does."""
        if self.input_name == "input_features":
            return int(self.config.max_source_positions)
        return 0

    @property
    def max_length(self) -> int:
        text = self.config.get_text_config()
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        return min(
            (int(n) for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), default=2**30
        )

    @cached_property
    def returns_cache(self) -> bool:
        """Whether the model returns a cache that it takes as well."""
        if not {"past_key_values", "use_cache"} <= self.parameters:
            return False
        try:
            with torch.no_grad():
                return self.model(**self._short_call() | {"use_cache": True}).get("past_key_values") is not None
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return True  # the scenario with a cache reports the error

    @property
    def masks_take_positions(self) -> bool:
        """Whether the code of the model passes positions to the functions of Transformers that build masks."""
        modules = {type(module).__module__ for module in self.model.modules() if hasattr(module, "config")}
        return any(_MASK_WITH_POSITIONS.search(_source(sys.modules[name])) for name in modules)

    @property
    def other_layers(self) -> str:
        """The kinds of layers that are not attention, as the configuration names them."""
        text = self.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
        return " and ".join(sorted({kind for kind in kinds if "attention" not in kind or "linear" in kind}))

    @property
    def takes_mask(self) -> bool:
        return "attention_mask" in self.parameters

    @property
    def position_name(self) -> str | None:
        """The argument for positions; None if there is none, or if the model counts in another way, as RoBERTa does."""
        name = "decoder_position_ids" if self.two_sequences else "position_ids"
        return name if name in self.parameters and not self.finds_positions else None

    @cached_property
    def finds_positions(self) -> bool:
        """Whether positions 0, 1, 2... are not those that the model uses if it is given none."""
        name = "decoder_position_ids" if self.two_sequences else "position_ids"
        if name not in self.parameters:
            return False
        call = self._short_call()
        given = self.run([call | {name: torch.arange(4, device=self.device)[None]}])
        return not torch.allclose(given, self.run([call]), rtol=1e-3, atol=1e-3)

    def _short_call(self) -> dict[str, Any]:
        """A call with four tokens."""
        encoder = (full(self.fixed_length or 4),) if self.two_sequences else ()
        return self.calls(Scenario("plain", (full(4),), encoder))[0]

    @property
    def why_no_left_padding(self) -> str:
        """Why left padding moves the tokens of the model; empty if it does not."""
        if self.finds_positions or (self.position_name and not self.two_sequences):
            return ""
        for name, module in self.model.named_modules():
            table = isinstance(module, nn.Embedding) and _POSITION_TABLE.search(name)
            if (table or "PositionalEmbedding" in type(module).__name__) and "relative" not in name:
                return f"positions are absolute ({name}), and forward takes none for them"
        return ""

    def calls(self, scenario: Scenario, repeats: int = 1) -> list[dict[str, Any]]:
        """The arguments of each call. Every row of the scenario is repeated."""
        rows = [row for row in scenario.rows for _ in range(repeats)]
        given: dict[str, Any] = {}
        if self.two_sequences:
            encoder = [row for row in scenario.encoder for _ in range(repeats)]
            given |= self._source(encoder, scenario)
        names = (
            ("decoder_input_ids", "decoder_attention_mask") if self.two_sequences else ("input_ids", "attention_mask")
        )
        ids, real = self.ids(rows), torch.stack([row.real for row in rows]).long()
        positions = torch.stack([row.positions for row in rows])
        outputs, start = [], 0
        for length in scenario.chunks or (ids.shape[1],):
            end = start + length
            call = given | {names[0]: ids[:, start:end]}
            if scenario.mask and names[1] in self.parameters:
                call[names[1]] = real[:, :end]
            if scenario.positions and self.position_name:
                call[self.position_name] = positions[:, start:end]
            if "use_cache" in self.parameters:
                call["use_cache"] = bool(scenario.chunks)
            outputs.append(
                {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in call.items()}
            )
            start = end
        return outputs

    def run(self, calls: list[dict[str, Any]], before: Callable[[int], None] = lambda start: None) -> Tensor:
        """Call the model, with a cache if there are several calls, and return its output (B, N, C).

        before: called with the first position of each call.
        """
        start, outputs = 0, []
        state: dict[str, Any] = {}
        key = "decoder_input_ids" if self.two_sequences else self.input_name
        with torch.no_grad():
            for call in calls:
                before(start)
                result = self.model(**(without_source(call) if state.get("encoder_outputs") else call), **state)
                self.output_name, output = _main_output(result)
                outputs.append(output)
                state = {"past_key_values": result.get("past_key_values")} if len(calls) > 1 else {}
                if len(calls) > 1 and state["past_key_values"] is None:
                    raise UserError(f"{type(self.model).__name__} returns no past_key_values with use_cache=True")
                if self.two_sequences and len(calls) > 1:
                    from transformers.modeling_outputs import BaseModelOutput

                    state["encoder_outputs"] = BaseModelOutput(last_hidden_state=result.encoder_last_hidden_state)
                start += call[key].shape[1]
        return torch.cat(outputs, dim=1) if outputs[0].dim() == 3 else outputs[-1]

    def _source(self, rows: list[Row], scenario: Scenario) -> dict[str, Any]:
        if self.input_name == "input_features":
            shape = self.config.num_mel_bins, 2 * self.config.max_source_positions
            features = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            return {"input_features": features.expand(len(rows), *shape)}
        given = {"input_ids": self.ids(rows)}
        if scenario.mask and self.takes_mask:
            given["attention_mask"] = torch.stack([row.real for row in rows]).long()
        return given

    def ids(self, rows: list[Row]) -> Tensor:
        """The token ids (B, N) of rows."""
        ids = [torch.where(row.real, self.numbers[row.tokens % len(self.numbers)], self.pad) for row in rows]
        return torch.stack(ids)


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def without_source(call: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key not in ("input_ids", "input_features")}


def _main_output(result: Any) -> tuple[str, Tensor]:
    for name in ("logits", "last_hidden_state", *result):
        if isinstance(value := result.get(name), Tensor) and value.is_floating_point():
            return name, value.float()
    raise UserError(f"{type(result).__name__} has no tensor of outputs")


def implementations(model: Any, names: list[str]) -> Iterator[tuple[str, str]]:
    """Set each attention implementation in turn and yield its name, and why it cannot be measured, or nothing."""
    for name in names:
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError, NotImplementedError) as error:
            yield name, str(error).splitlines()[0].split(". ")[0]
            continue
        used = model.config._attn_implementation
        yield name, "" if used == name else f"the model computes its attention itself (as {used})"
