"""Write the failure of a layer, or of a whole model, as a program that needs only torch and transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.check.model.driver import Driver, without_source
from regard.check.model.layout import Row, Scenario, alone
from regard.check.model.measure import FACTOR, Alone, Measurement
from regard.check.model.probe import Layer, Source
from regard.check.model.promise import Promise

LAYER = '''\
layer = model.get_submodule({name!r})
torch.manual_seed(0)
states = torch.randn({count}, {width}) * {scale:.3g}  # what enters the layer, by token number; padding has numbers too
states = torch.cat([states, {factor:g} * states, -{factor:g} * states])  # then the same tokens, changed


@torch.no_grad()
def run(calls, tokens{more}):
    """Call the model and return the outputs of the layer; the inputs of the layer are replaced by `states`."""
    outputs, state, start = [], {{}}, 0

    def before(module, args, kwargs):
{replace}
        return args, kwargs

    def after(module, args, output):
        outputs.append(output if torch.is_tensor(output) else output[0])

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    for call in calls:
        result = model(**call, **state)
{carry}
        start += call[{key!r}].shape[1]
    for hook in hooks:
        hook.remove()
    return torch.cat(outputs, dim=1)
'''

MODEL = '''\
@torch.no_grad()
def run(calls):
    """Call the model and return its outputs."""
    outputs, state = [], {{}}
    for call in calls:
        result = model(**call, **state)
        outputs.append({output})
{carry}
    return torch.cat(outputs, dim=1)
'''


SINKS = '''\
layer = model.get_submodule({name!r})
heads = len(layer.sinks)


@torch.no_grad()
def first_token(sinks):
    """What the first token, which sees itself only, gets from each head with these sinks (H, D)."""
    inputs = []
    hook = layer.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0].double()))
    layer.sinks.data.copy_(sinks)
    model(**calls[0])
    hook.remove()
    return inputs[-1][0, 0].unflatten(-1, (heads, -1))
'''


class Program:
    """A program for one scenario of a model."""

    def __init__(self, driver: Driver, setup: str, implementation: str, scenario: Scenario) -> None:
        self.driver, self.setup, self.implementation, self.scenario = driver, setup, implementation, scenario

    def visibility(self, layer: Layer, promise: Promise, seen: Measurement) -> str:
        """A program that changes one token and asserts that another does, or does not, change."""
        n, row = next((n, row) for n, row in enumerate(seen.rows) if row.wrong(promise).any())
        query, column = row.wrong(promise).nonzero()[0].tolist()
        key, wrongly = int(row.columns[column]), bool(row.seen[query, column])
        rows = self.scenario.rows if layer.role in ("self", "decoder", "cross") else self.scenario.encoder
        keys = self.scenario.encoder if layer.role == "cross" else rows
        count = _count(self.scenario)
        changed = "keys" if layer.role == "cross" else "tokens"
        arguments = "tokens, keys" if layer.role == "cross" else "tokens"
        other = "tokens, other" if layer.role == "cross" else "other"
        word = f"token {query} sees token {key}" if wrongly else f"token {query} does not see token {key}"
        return self._join(
            [
                f"tokens = {_literal(torch.stack([each.tokens for each in rows]))}",
                *([f"keys = {_literal(torch.stack([each.tokens for each in keys]))}"] if layer.role == "cross" else []),
                f"calls = {self._calls(self.scenario)}",
                f"base, change = run(calls, {arguments}), 0.0",
                f"for sign in (1, 2):  # times {FACTOR:g}, and times -{FACTOR:g}",
                f"    other = {changed}.clone()",
                f"    other[{n}, {key}] += sign * {count}",
                f"    change = max(change, float((run(calls, {other}) - base)[{n}, {query}].abs().max()))",
                "print(change)",
                f"assert change {'<' if wrongly else '>'} 1e-4 * float(base[{n}].abs().max()), "
                f"{f'row {n}: {word} ({promise} was promised)'!r}",
            ],
            layer,
        )

    def values(self, layer: Layer, text: Alone, single: Scenario) -> str:
        """A program that compares the outputs of a layer for a text in the scenario with those for it alone."""
        rows, own = (each.rows if layer.role != "encoder" else each.encoder for each in (self.scenario, single))
        place = text.places["encoder" if layer.role == "encoder" else _main(self.driver)]
        first = second = ""
        if layer.role == "cross":
            sources = (torch.stack([row.tokens for row in each.encoder]) for each in (self.scenario, single))
            first, second = (f", {_literal(tokens)}" for tokens in sources)
        return self._join(
            [
                f"calls = {self._calls(self.scenario)}",
                f"tokens = {_literal(torch.stack([row.tokens for row in rows]))}",
                f"together = run(calls, tokens{first})[{text.row}, {place.start}:{place.stop}]",
                f"calls = {self._calls(single)}",
                f"tokens = {_literal(torch.stack([row.tokens for row in own]))}",
                f"alone = run(calls, tokens{second})[0]",
                "print((together - alone).abs().max())",
                "torch.testing.assert_close(together, alone, atol=1e-4 * float(alone.abs().max()), rtol=0)",
            ],
            layer,
        )

    def whole(self, text: Alone, single: Scenario, output: str) -> str:
        """A program that compares the outputs of the model for a text in the scenario with those for it alone."""
        place = text.places[_main(self.driver)]
        return self._join(
            [
                f"together = run({self._calls(self.scenario)})[{text.row}, {place.start}:{place.stop}]",
                f"alone = run({self._calls(single)})[0]",
                "print((together - alone).abs().max())",
                "torch.testing.assert_close(together, alone, atol=1e-3 * float(alone.abs().max()), rtol=0)",
            ],
            output=output,
        )

    def against_eager(self, layer: Layer) -> str:
        """A program that compares the outputs of a layer with those of eager attention."""
        rows = self.scenario.encoder if layer.role == "encoder" else self.scenario.rows
        keys = f", {_literal(torch.stack([row.tokens for row in self.scenario.encoder]))}" if layer.keys else ""
        return self._join(
            [
                f"calls = {self._calls(self.scenario)}",
                f"tokens = {_literal(torch.stack([row.tokens for row in rows]))}",
                f"here = run(calls, tokens{keys})",
                'model.set_attn_implementation("eager")',
                f"eager = run(calls, tokens{keys})",
                "print((here - eager).abs().max())",
                "torch.testing.assert_close(here, eager, atol=1e-4 * float(eager.abs().max()), rtol=0)",
            ],
            layer,
        )

    def generation(self, rows: Sequence[Row], row: int, steps: int) -> str:
        """A program that compares the logits of generation with those of one call with the text alone."""
        real = torch.stack([each.real for each in rows]).long()
        lines = [
            f"ids = {_literal(self.driver.ids(list(rows)))}",
            f"mask = {_literal(real)}",
            "with torch.no_grad():",
            "    result = model.generate(",
            f"        ids, attention_mask=mask, max_new_tokens={steps}, min_new_tokens={steps}, do_sample=False,",
            f"        num_beams=1, pad_token_id={self.driver.pad}, output_logits=True, return_dict_in_generate=True,",
            "    )",
            f"    text = result.sequences[{row}, {int((~rows[row].real).sum())} : -1][None]",
            f"    alone = model(input_ids=text).logits[0, -{steps}:]",
            f"generated = torch.stack(result.logits, dim=1)[{row}]",
            "print((generated - alone).abs().max())",
            "torch.testing.assert_close(generated, alone, atol=1e-3 * float(alone.abs().max()), rtol=0)",
        ]
        return self._join(lines[2:], body="\n".join(lines[:2]))

    def error(self) -> str:
        """A program in which the model raises an error."""
        return self._join([f"run({self._calls(self.scenario)})"])

    def sinks(self, layer: Layer) -> str:
        """A program that raises the sinks of a layer and measures the weights of its heads."""
        lines = [
            f"calls = {self._calls(self.scenario)}",
            "steps = torch.linspace(0.5, 1.5, heads)",
            "value, base, raised = map(first_token, (torch.full((heads,), -1e4), torch.zeros(heads), steps))",
            "weights = [(each * value).sum(-1) / value.square().sum(-1) for each in (base, raised)]",
            "low, high = (torch.log(weight / (1 - weight)) for weight in weights)",
            "print(low - high, steps)",
            "torch.testing.assert_close(low - high, steps.double(), atol=0.01, rtol=0)  # log-odds fall as sinks rise",
        ]
        return self._join(lines, body=SINKS.format(name=layer.name))

    def _join(self, lines: list[str], layer: Layer | None = None, output: str = "logits", body: str = "") -> str:
        two = self.driver.two_sequences
        carry = ["state = {}"]
        if self.scenario.chunks:
            carry = ["state = {'past_key_values': result.past_key_values} if len(calls) > 1 else {}".replace("'", '"')]
            if two:
                carry += [
                    "if state:",
                    "    encoder = BaseModelOutput(last_hidden_state=result.encoder_last_hidden_state)",
                ]
                carry += ['    state["encoder_outputs"] = encoder']
        indent = "\n".join(f"        {line}" for line in carry)
        if body:
            pass
        elif layer is None:
            body = MODEL.format(output=f"result.{output}", carry=indent)
        else:
            main = "decoder_input_ids" if two else "input_ids"
            body = LAYER.format(
                name=layer.name, count=_count(self.scenario), width=layer.width, scale=layer.scale, factor=FACTOR,
                more=", keys" if layer.role == "cross" else "", replace=_replacement(layer), carry=indent, key=main,
            )  # fmt: skip
        imports = ["import torch"]
        if two and self.scenario.chunks:
            imports.append("from transformers.modeling_outputs import BaseModelOutput")
        setup = self.setup or "model = ...  # the model that was checked"
        ready = f"model.eval()\nmodel.set_attn_implementation({self.implementation!r})"
        if self.implementation == "regard":
            ready = f"from regard.integrations.transformers import enable\n\nenable()\n{ready}"
        parts = ["\n".join(imports), setup.strip(), ready, body.strip(), "\n".join(lines)]
        text = "\n\n".join(parts[:3]) + "\n\n\n" + "\n\n\n".join(parts[3:]) + "\n"
        return re.sub(r"\n{4,}", "\n\n\n", text)

    def _calls(self, scenario: Scenario) -> str:
        calls = self.driver.calls(scenario)
        if len(calls) > 1 and self.driver.two_sequences:
            calls = [calls[0], *map(without_source, calls[1:])]
        items = [", ".join(f"{name}={_literal(value)}" for name, value in call.items()) for call in calls]
        return "[\n" + "".join(f"    dict({item}),\n" for item in items) + "]"


def _replacement(layer: Layer) -> str:
    """The lines of the hook that replace the inputs of the layer."""
    assert layer.queries is not None
    start = "0" if layer.role == "encoder" else "start"
    lines = [f"given = {_get(layer.queries)}"]
    lines.append(f"new = states[tokens[:, {start} : {start} + given.shape[1]]].to(given)")
    lines.append(_put(layer.queries, "new"))
    if layer.keys is not None:
        lines += [f"if (given := {_get(layer.keys)}) is not None:", f"    {_put(layer.keys, 'states[keys].to(given)')}"]
    return "\n".join(f"        {line}" for line in lines)


def _get(source: Source) -> str:
    return f"kwargs.get({source.name!r})" if source.place is None else f"args[{source.place}]"


def _put(source: Source, value: str) -> str:
    if source.place is None:
        return f"kwargs = kwargs | {{{source.name!r}: {value}}}"
    return f"args = (*args[:{source.place}], {value}, *args[{source.place + 1}:])"


def _literal(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_floating_point():
        return f"torch.randn{tuple(value.shape)}"
    return f"torch.tensor({value.tolist()})"


def _count(scenario: Scenario) -> int:
    return 2 * max(len(row.texts) for row in (*scenario.rows, *scenario.encoder))


def _main(driver: Driver) -> str:
    return "decoder" if driver.two_sequences else "self"


def text_alone(scenario: Scenario, text: Alone) -> Scenario:
    """The scenario of one text alone."""
    row = scenario.rows[text.row]
    encoder: Row | None = next(scenario.encoder[text.row].slices())[1] if scenario.encoder else None
    place = text.places["decoder" if scenario.encoder else "self"]
    return alone(next(own for where, own in row.slices() if where == place), encoder)
