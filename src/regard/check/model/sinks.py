"""Check sinks: a logit per head that takes weight and gives no value.

The first token of a causal layer sees itself only, so its weight is w = 1 / (1 + exp(sink - logit)) and its output is
w times its value. Raising the sink by d divides the odds w / (1 - w) by exp(d) for any logit. Values are read
where the heads are still apart: at the input of the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.check.model.layout import alone, full
from regard.check.model.probe import Layer
from regard.check.model.reproduce import Program

if TYPE_CHECKING:
    from regard.check.model.runner import Finding, ModelCheck

NONE = -1e4  # a sink that takes no weight
PROMISED = "a sink logit per head, which takes weight and gives no value"


def check_sinks(check: ModelCheck) -> Iterator[Finding]:
    """Judge the sinks of all layers that have them."""
    layers = [layer for layer in check.layers if hasattr(layer.module, "sinks") and not layer.reason]
    for layer in layers:
        project = getattr(layer.module, "o_proj", None)
        promise = check.promises[layer.name]
        if project is None or isinstance(promise, str) or promise.ahead != 0:
            yield check.finding(layer.name, "sink", PROMISED, "it has no o_proj to read the heads from", "not measured")
            continue
        finding = check.finding(layer.name, "sink", PROMISED, *_judge(check, layer, project))
        if finding.verdict == "failed":
            program = Program(check.driver, check.setup, check.implementation, alone(full(2)))
            finding = replace(finding, code=program.sinks(layer))
        yield finding


def _judge(check: ModelCheck, layer: Layer, project: nn.Module) -> tuple[str, Any]:
    sinks: Tensor = layer.module.sinks.data  # type: ignore[assignment]
    heads = len(sinks)
    steps = torch.linspace(0.5, 1.5, heads).to(sinks)  # another one for each head, to find heads that are swapped

    def first_token(values: Tensor) -> Tensor:
        outputs = []
        hook = project.register_forward_pre_hook(lambda module, args: outputs.append(args[0].detach().double()))
        try:
            with _replace_sinks(sinks, values):
                check.meter.run(alone(full(2)))
        finally:
            hook.remove()
        return outputs[-1][0, 0].unflatten(-1, (heads, -1))  # (H, D)

    given = sinks.clone()
    value, base, raised = first_token(torch.full_like(given, NONE)), first_token(given * 0), first_token(steps)
    weights = [(each * value).sum(-1) / value.square().sum(-1) for each in (base, raised)]
    if any(not torch.allclose(each, w[:, None] * value, atol=1e-4 * float(value.abs().max()))
           for each, w in zip((base, raised), weights, strict=True)):  # fmt: skip
        return "the output of a token that sees itself only is not a part of its value", "failed"
    odds = [torch.log(w / (1 - w)) for w in weights]
    change = odds[0] - odds[1]
    if not bool(torch.isfinite(change).all()):
        return "the sinks take no weight" if bool(
            (weights[0] > 1 - 1e-6).all()
        ) else "weights are not in (0, 1)", "failed"
    far = float((change - steps.double()).abs().max())
    if far > 0.01:
        head = int((change - steps.double()).abs().argmax())
        expected, actual = float(steps[head]), float(change[head])
        return f"raising the sink of head {head} by {expected:.2g} lowers its log-odds by {actual:.2g}", "failed"
    return "as promised", "passed"


@contextmanager
def _replace_sinks(sinks: Tensor, values: Tensor) -> Iterator[None]:
    before = sinks.clone()
    sinks.copy_(values)
    try:
        yield
    finally:
        sinks.copy_(before)
