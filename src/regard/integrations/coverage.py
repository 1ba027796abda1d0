"""Which attention modules of a Hugging Face model run regard, and why the others do not."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

NAME = "regard"
ITSELF = "computes its attention itself"
_UNCALLED = "not called with these inputs"
_ATTENTION_NAME = re.compile(r"Att(entio)?n(\d+d?|Pool\w*|Subsample)?$")
_INTERFACE_CALL = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[self\.config)")
_USES_INTERFACE: dict[type, bool] = {}  # cache of `_uses_interface`
_SOFTMAX = {torch.softmax, nn.functional.softmax, Tensor.softmax}


@dataclass(frozen=True)
class AttentionPart:
    """One attention module of a model.

    calls: number of forward calls. computed: number of attention calls that regard computed.
    reason: why regard did not compute all of them; None if it did.
    """

    name: str
    kind: str
    calls: int
    computed: int
    reason: str | None


@dataclass(frozen=True)
class Coverage:
    """The attention modules of a model in one forward pass. `print` shows them, with one line for equal modules."""

    model: str
    parts: tuple[AttentionPart, ...]

    @property
    def covered(self) -> tuple[AttentionPart, ...]:
        """The modules whose attention regard computed."""
        return tuple(part for part in self.parts if part.reason is None)

    @property
    def missed(self) -> tuple[AttentionPart, ...]:
        """The modules that were called and computed their attention without regard."""
        return tuple(part for part in self.parts if part.reason is not None and part.calls)

    @property
    def uncalled(self) -> tuple[AttentionPart, ...]:
        """The modules that the inputs did not reach."""
        return tuple(part for part in self.parts if part.reason is not None and not part.calls)

    def __str__(self) -> str:
        if not self.parts:
            return f"{self.model} has no attention modules"
        rows = [
            ("regard" if part.reason is None else "other" if part.calls else "-", _layers(part.name), part.kind, part)
            for part in self.parts
        ]
        rows.sort(key=lambda row: ("regard", "other", "-").index(row[0]))
        lines = [f"{self.model}: regard computed the attention of {len(self.covered)} of {len(self.parts)} modules"]
        for (status, name, kind, reason), group in groupby(rows, lambda row: (*row[:3], row[3].reason)):
            count = len(list(group))
            lines.append(f"  {status:6}  {name} ({kind}{f', {count} modules' if count > 1 else ''})")
            lines[-1] += f": {reason}" if reason else ""
        return "\n".join(lines)


def coverage(model: PreTrainedModel, **inputs: Any) -> Coverage:
    """Run one forward pass of a model and report which of its attention modules regard computed.

    The pass runs in evaluation mode and without gradients; `inputs` are passed to the model.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from regard.integrations.transformers import coverage, enable
    >>> enable()
    >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> model = BertModel._from_config(config, attn_implementation="regard")
    >>> print(coverage(model, input_ids=torch.tensor([[1, 2, 3]])))
    BertModel: regard computed the attention of 2 of 2 modules
      regard  encoder.layer.*.attention.self (BertSelfAttention, 2 modules)
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    expected = {id(module): (name, module, reason) for name, module, reason in attention_modules(model)}
    names = {id(module): name for name, module in model.named_modules()}
    recorder = _Recorder(set(expected))
    with (
        _eval_mode(model),
        _count_computed(recorder),
        _count_calls(model, recorder),
        torch.compiler.set_stance("force_eager"),  # calls are counted in Python
        torch.no_grad(),
        recorder,
    ):
        model(**inputs)
    parts = []
    for key, (name, module, reason) in expected.items():
        calls, computed = recorder.calls[key], recorder.computed[key]
        if computed >= max(calls, 1):
            reason = None
        elif not calls:
            reason = _UNCALLED if reason is None else f"{_UNCALLED}, and {reason}"
        elif reason is None:
            reason = f"used regard in {computed} of {calls} calls"
        parts.append(AttentionPart(name, type(module).__name__, calls, computed, reason))
    for module in recorder.elsewhere.values():
        parts.append(AttentionPart(names[id(module)], type(module).__name__, recorder.calls[id(module)], 0, ITSELF))
    return Coverage(type(model).__name__, tuple(parts))


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield the attention modules of a model: name, module, and the reason why it cannot run regard, or None.

    These are the modules that get their attention function from Transformers, and those that are named attention and
    contain no other such module.
    """
    modules = {
        name: m for name, m in model.named_modules() if _uses_interface(m) or _ATTENTION_NAME.search(type(m).__name__)
    }
    reached, owners = _configs(model), _owners(model)
    for name, module in modules.items():
        if _uses_interface(module):
            config = module.config
            yield name, module, _other_implementation(config, id(config) in reached, owners[name])
        elif not any(other.startswith(f"{name}." if name else "") for other in modules if other != name):
            yield name, module, _why_not(type(module))


def unreached_configs(model: PreTrainedModel) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """Copies of configurations that `set_attn_implementation` does not reach, each with that of the model around it.

    Some models build a part from a changed copy of their configuration (the decoders of VideoMAE, ViTMAE and CLIPSeg).
    """
    known, owners = _configs(model), _owners(model)
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if _uses_interface(module) and isinstance(config, PreTrainedConfig) and id(config) not in known:
            yield config, owners[name].config


def missing_parts(model: PreTrainedModel) -> str | None:
    """One sentence on the attention modules that cannot run regard; None if there are none."""
    modules = list(attention_modules(model))
    missed = [(f"{_layers(name)} ({type(module).__name__}", reason) for name, module, reason in modules if reason]
    if not missed:
        return None
    parts = [f"{where} {reason})" for where, reason in dict.fromkeys(missed)]
    if len(missed) == len(modules):
        start = f"No attention module of {type(model).__name__} runs"
    else:
        start = f"{len(missed)} of the {len(modules)} attention modules of {type(model).__name__} do not run"
    return (
        f'{start} attn_implementation="{NAME}": {"; ".join(parts)}. Their results are the same as without '
        "regard; regard.integrations.transformers.coverage(model, **inputs) lists every module."
    )


def _other_implementation(config: Any, reached: bool, owner: PreTrainedModel | None) -> str | None:
    implementation = getattr(config, "_attn_implementation", None)
    if implementation == NAME:
        return None
    reason = f"is set to attn_implementation={implementation!r}"
    if not reached and owner is not None and owner.config._attn_implementation == NAME:
        reason += " in a copy of the configuration; call model.set_attn_implementation again"
    return reason


def _why_not(kind: type[nn.Module]) -> str:
    if issubclass(kind, nn.MultiheadAttention):
        return "is a module of torch, which regard.integrations.torch.replace changes"
    for name, classes in vars(sys.modules[kind.__module__]).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(classes, dict) and kind in classes.values():
            return f"{ITSELF}, chosen from {name}"
    return ITSELF


def _uses_interface(module: nn.Module) -> bool:
    """Whether the source of a module gets the attention function from Transformers."""
    kind = type(module)
    if kind not in _USES_INTERFACE:
        bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
        methods = [value for base in bases for value in vars(base).values() if inspect.isfunction(value)]
        builtin = kind.__module__.startswith(("torch.", "regard."))
        _USES_INTERFACE[kind] = not builtin and any(_INTERFACE_CALL.search(_source(method)) for method in methods)
    return _USES_INTERFACE[kind]


def _source(function: Callable) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _configs(model: nn.Module) -> set[int]:
    """The ids of the configurations that `set_attn_implementation` reaches."""
    todo = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    ids: set[int] = set()
    while todo:
        config = todo.pop()
        if config is not None and id(config) not in ids:
            ids.add(id(config))
            todo += [getattr(config, key, None) for key in config.sub_configs]
    return ids


def _owners(model: nn.Module) -> dict[str, Any]:
    """The innermost PreTrainedModel that contains each module, by module name."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        around = owners.get(name.rpartition(".")[0]) if name else None
        owners[name] = module if isinstance(module, PreTrainedModel) else around
    return owners


def _layers(name: str) -> str:
    """The name with `*` instead of layer numbers."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) or "the model"


class _Recorder(TorchFunctionMode):
    """Record module calls, attention by regard, and attention outside of attention modules in a forward pass."""

    def __init__(self, expected: set[int]) -> None:
        super().__init__()
        self.expected = expected
        self.calls: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()
        self.elsewhere: dict[int, nn.Module] = {}
        self.stack: list[nn.Module] = []
        self.regard = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.regard and self.stack and not any(id(module) in self.expected for module in self.stack):
            module = next(m for m in reversed(self.stack) if not type(m).__module__.startswith("torch."))
            named = "Att" in type(module).__name__ and _is_softmax_over_keys(func, args, kwargs)
            has_listed_part = any(
                id(part) in self.expected for part in module.modules()
            )  # a submodule is listed instead
            if not has_listed_part and (named or func is nn.functional.scaled_dot_product_attention):
                self.elsewhere[id(module)] = module
        return func(*args, **kwargs)


def _is_softmax_over_keys(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is a softmax over the last of at least four axes, as of attention weights (B, H, Q, K)."""
    if func not in _SOFTMAX or not isinstance(args[0], Tensor) or args[0].dim() < 4:
        return False
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return axis in (-1, args[0].dim() - 1)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


@contextmanager
def _count_computed(recorder: _Recorder) -> Iterator[None]:
    attend = AttentionInterface._global_mapping[NAME]

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.computed[id(module)] += 1
        recorder.regard += 1
        try:
            return attend(module, *args, **kwargs)
        finally:
            recorder.regard -= 1

    AttentionInterface.register(NAME, counting)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attend)


@contextmanager
def _count_calls(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    def before(module: nn.Module, args: Any) -> None:
        recorder.calls[id(module)] += 1
        recorder.stack.append(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        recorder.stack.pop()

    hooks: list[Any] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
