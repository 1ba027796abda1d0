"""Check `generate`: the logits of a left-padded batch are those of one call with each text alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from regard.check.model.layout import Row, padded_rows
from regard.check.model.measure import difference
from regard.check.model.reproduce import Program
from regard.errors import first_line

if TYPE_CHECKING:
    from regard.check.model.runner import Finding, ModelCheck

STEPS = 4
WHOLE = "whole model"
PROMISED = "logits of one call with each text alone"


def check_generation(check: ModelCheck) -> Iterator[Finding]:
    """Judge the greedy generation of a causal model; encoder-decoders start in ways of their own."""
    if not (check.is_causal and check.has_cache and check.driver.model.can_generate()):
        yield check.finding(WHOLE, "generate", "measured for causal language models only", "", "not measured")
        return
    rows, row = padded_rows(check.tokens, "left"), 0
    try:
        far, row = _difference(check, rows)
        measured = f"logits differ by {far:.2g}"
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        far, measured = float("inf"), f"raises {type(error).__name__}: {first_line(error)}"
    if far <= check.model_tolerance:
        yield check.finding(WHOLE, "generate", PROMISED, "as promised", "passed")
    elif (reason := check.driver.why_no_left_padding) and far < float("inf"):
        yield check.finding(WHOLE, "generate", reason, measured, "not promised")
    else:
        program = Program(check.driver, check.setup, check.implementation, check.scenarios()[0])
        finding = check.finding(WHOLE, "generate", PROMISED, measured, "failed")
        yield replace(finding, code=program.generation(rows, row, STEPS))


def _difference(check: ModelCheck, rows: tuple[Row, ...]) -> tuple[float, int]:
    """The largest difference between logits of generation and of one call, and its row."""
    driver = check.driver
    ids, real = driver.ids(list(rows)), torch.stack([row.real for row in rows]).long()
    with torch.no_grad():
        result = driver.model.generate(
            ids.to(driver.device), attention_mask=real.to(driver.device), max_new_tokens=STEPS, min_new_tokens=STEPS,
            do_sample=False, num_beams=1, pad_token_id=driver.pad, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logits = torch.stack(result.logits, dim=1).float()  # (B, STEPS, V)
        differences = []
        for n, row in enumerate(rows):
            text = result.sequences[n, int((~row.real).sum()) : -1][None]
            own = driver.model(input_ids=text).logits[:, -STEPS:].float()
            differences.append((difference(logits[n : n + 1], own), n))
    return max(differences)
