"""How a checkpoint generates: the values of generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.field_types import check_value, short_repr
from regard.nn import Beam, Greedy, LogitsProcessor, Sample
from regard.nn.generate import Strategy

TYPES: dict[str, Any] = {
    "do_sample": bool, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "num_beams": int,
    "length_penalty": float, "early_stopping": bool | str, "repetition_penalty": float, "no_repeat_ngram_size": int,
    "min_new_tokens": int, "min_length": int, "max_new_tokens": int, "max_length": int,
    "bad_words_ids": list[list[int]], "suppress_tokens": list[int], "forced_bos_token_id": int,
    "forced_eos_token_id": int | list[int], "eos_token_id": int | list[int], "decoder_start_token_id": int,
}  # fmt: skip
"""Types of the values that are supported; null means the default."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "num_return_sequences": (1,), "guidance_scale": (1,), "sequence_bias": (), "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,), "begin_suppress_tokens": ([],), "renormalize_logits": (False,),
    "exponential_decay_length_penalty": (), "diversity_penalty": (0,), "num_beam_groups": (1,), "penalty_alpha": (0,),
    "dola_layers": (), "constraints": (), "force_words_ids": (), "stop_strings": ([],), "max_time": (),
    "watermarking_config": (), "token_healing": (False,), "assistant_ensemble_weight": (),
}  # fmt: skip
"""Values that change what is generated and are not supported, each with the values that do not, besides null."""

REFUSED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,), "epsilon_cutoff": (0, 1), "eta_cutoff": (0, 1), "top_h": (),
}  # fmt: skip
"""The same for values that matter in sampling only."""

NO_EFFECT = frozenset({
    "use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "remove_invalid_values",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "speculation_type", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "transformers_version",
})  # fmt: skip
"""Values about speed, memory, other outputs and padding."""


GREEDY = Greedy()


@dataclass(frozen=True)
class GenerationSettings:
    """How tokens are chosen and how long outputs are.

    processor: without `min_length`. min_length, max_length: of prompt and output together.
    """

    strategy: Strategy = GREEDY
    processor: LogitsProcessor | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int = 0

    def limit(self, prompt: int, default: int, *, forced: int = 0) -> int:
        """Return the most new tokens after a prompt of this length; below 1 if there is no room for one.

        forced: how many tokens of the prompt count as new, as the language of a translation does.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens - forced
        return default if self.max_length is None else self.max_length - prompt

    def processor_after(self, prompt: int, *, forced: int = 0) -> LogitsProcessor | None:
        """Return the processor for a prompt of this length. forced: as in `limit`."""
        processor = self.processor or LogitsProcessor()
        fewest = processor.min_new_tokens - forced if processor.min_new_tokens else self.min_length - prompt
        processor = replace(processor, min_new_tokens=max(0, fewest))
        return None if processor == LogitsProcessor() else processor


DEFAULTS = GenerationSettings()


def read_generation_settings(values: Mapping[str, Any], stop: tuple[int, ...] = ()) -> GenerationSettings:
    """Read generation_config.json as Transformers does; raise if a value that changes the output is not supported.

    stop: the tokens that end a text, which `bad_words_ids` does not suppress.

    >>> from regard.models.checkpoints.generation import read_generation_settings
    >>> read_generation_settings({"do_sample": True, "temperature": 0.6, "top_p": 0.9}).strategy
    Sample(temperature=0.6, top_k=50, top_p=0.9, seed=None, min_p=None)
    """
    for name, kind in TYPES.items():
        check_value(name, values.get(name), kind | None)
    given = {name: value for name, value in values.items() if value is not None}
    sampling = bool(given.get("do_sample"))
    for name, neutral in (REFUSED | (REFUSED_SAMPLING if sampling else {})).items():
        if name in given and given[name] not in neutral:
            raise ValueError(f"{name} = {short_repr(given[name])} is not supported; remove it to generate without it")
    beams = given.get("num_beams", 1)
    if sampling and beams > 1:
        raise ValueError(f"do_sample with num_beams = {beams} is not supported; set one of the two")
    words = {tuple(word): None for word in given.get("bad_words_ids", ()) if tuple(word) not in {(n,) for n in stop}}
    words |= {(token,): None for token in given.get("suppress_tokens", ())}
    last = given.get("forced_eos_token_id", [])
    processor = LogitsProcessor(
        repetition_penalty=given.get("repetition_penalty", 1.0),
        no_repeat_ngram_size=given.get("no_repeat_ngram_size", 0),
        bad_words=tuple(words),
        min_new_tokens=given.get("min_new_tokens", 0),
        last_tokens=tuple(last) if isinstance(last, list) else (last,),
    )
    return GenerationSettings(
        _read_strategy(given, sampling, beams),
        None if processor == LogitsProcessor() else processor,
        given.get("max_new_tokens"),
        given.get("max_length"),
        given.get("min_length", 0),
    )


def _read_strategy(given: Mapping[str, Any], sampling: bool, beams: int) -> Strategy:
    if sampling:
        top_k = given.get("top_k", 50)  # the default of Transformers; 0 means all tokens
        return Sample(given.get("temperature", 1.0), top_k or None, given.get("top_p"), min_p=given.get("min_p"))
    if beams != 1:
        return Beam(beams, float(given.get("length_penalty", 1.0)), given.get("early_stopping", False))
    return Greedy()
