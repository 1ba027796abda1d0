"""What a diagram says about a module: its title, its sizes, and for attention its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard.attention import Attention
from regard.linear import LinearAttention
from regard.nn import ACTIVATIONS, Block, Encoder, Experts, FeedForward, GatedFeedForward, RelativeBias
from regard.normalizations import Softmax
from regard.scores import Additive, Bilinear, Cosine, Dot
from regard.view.diagrams.words import Say

Row = tuple[str, str]
"""A label and its text."""
MOST_TENSORS = 12  # listed in the details of a module


def kind_of(module: nn.Module) -> str:
    """Return what a module is: attention, feed-forward, norm, embedding or other; this is also its colour."""
    name = type(module).__name__
    if isinstance(attend_of(module), Attention | LinearAttention) or "Attention" in name:
        return "attention"
    if isinstance(module, FeedForward | GatedFeedForward | Experts) or name.endswith("MLP"):
        return "feed-forward"
    if "Norm" in name:
        return "norm"
    return "embedding" if isinstance(module, nn.Embedding) or "Position" in name else "other"


def attend_of(module: nn.Module) -> Any:
    """Return the description that a module attends with, or None."""
    return getattr(module, "attend", None)


def title_of(module: nn.Module, name: str, say: Say) -> str:
    """Return the title of a module, given its name in the module that contains it."""
    if isinstance(module, Block):
        return say("layer")
    words = say(name)
    return words if words != name else name.replace("_", " ").capitalize()


def box_lines(module: nn.Module, say: Say) -> tuple[str, ...]:
    """Return the sizes of a module, in one or two short lines."""
    if kind_of(module) == "attention" and hasattr(module, "heads"):
        return _attention_lines(module, say)
    if isinstance(module, FeedForward | GatedFeedForward):
        inputs, hidden = module.up.in_features, module.output.in_features
        return (f"{inputs} → {hidden} → {module.output.out_features}, {activation_name(module)}",)
    if isinstance(module, nn.Linear):
        return (f"{module.in_features} → {module.out_features}",)
    if isinstance(module, nn.Embedding):
        return (f"{module.num_embeddings} × {module.embedding_dim}",)
    if kind_of(module) == "norm":
        sizes = [str(tensor.numel()) for _, tensor in (*module.named_parameters(), *module.named_buffers())][:1]
        return (" ".join([type(module).__name__, *sizes]),)
    return (type(module).__name__,)


def _attention_lines(module: Any, say: Say) -> tuple[str, ...]:
    width = getattr(module, "d_head", None)
    heads = {"heads": module.heads, "width": width, "kv_heads": getattr(module, "kv_heads", module.heads)}
    first = say("heads" if heads["kv_heads"] == module.heads else "kv", **heads)
    if width is None:
        first = f"{module.heads} {say('row.heads')}"
    attend = attend_of(module)
    parts = []
    if attend is not None:
        parts.append(say("mask.none") if attend.mask is None else repr(attend.mask))
        if getattr(attend, "bias", None) is not None:
            parts.append(repr(attend.bias))
        if getattr(attend, "sink", None) is not None:
            parts.append(say("sink"))
    if getattr(module, "rotary", None) is not None:
        parts.append(say("rotary"))
    return (first, " · ".join(parts)) if parts else (first,)


def describe(module: nn.Module, path: str, say: Say) -> tuple[Row, ...]:
    """Return the details of a module: where it is, what it computes, and its tensors."""
    rows = [(say("row.module"), path or "model"), (say("row.class"), _full_name(module))]
    attend = attend_of(module)
    if isinstance(attend, Attention):
        rows += _attention_rows(module, attend, say)
    elif attend is not None:
        rows.append((say("row.description"), repr(attend)))
    if isinstance(module, FeedForward | GatedFeedForward):
        rows.append((say("row.activation"), activation_name(module)))
    if isinstance(module, Encoder) and module.repeat > 1:
        rows.append((say("row.copies"), say("runs", times=module.repeat)))
    if isinstance(module, RelativeBias):
        rows.append((say("row.bias"), repr(module())))
    return (*rows, *tensor_rows(dict(module.named_parameters()), say("row.parameters"), say))


def tensor_rows(tensors: Mapping[str, Tensor], label: str, say: Say) -> list[Row]:
    """Return the names, shapes and sizes of tensors; of many, only the first."""
    rows = [(label, say("none"))] if not tensors else []
    for name, tensor in list(tensors.items())[:MOST_TENSORS]:
        rows.append((label, f"{name} ({', '.join(map(str, tensor.shape))}): {tensor.numel():,}"))
        label = ""
    if len(tensors) > MOST_TENSORS:
        rows.append(("", say("more", count=len(tensors) - MOST_TENSORS)))
    return rows


def _attention_rows(module: Any, attend: Attention, say: Say) -> list[Row]:
    rows: list[Row] = []
    rotary = getattr(module, "rotary", None)
    if hasattr(module, "heads"):
        rows.append((say("row.heads"), _attention_lines(module, say)[0]))
    weights = formula(attend, getattr(module, "d_head", None), rotated=rotary is not None)
    rows.append((say("row.weights"), f"w = {weights}"))
    rows.append((say("row.result"), "dropout(w) v" if attend.dropout else "w v"))
    rows.append((say("row.mask"), say("mask.call") if attend.mask is None else repr(attend.mask)))
    if attend.bias is not None:
        rows.append((say("row.bias"), repr(attend.bias)))
    if rotary is not None:
        rows.append((say("row.rotary"), repr(rotary)))
    if attend.sink is not None:
        shape = getattr(attend.sink, "shape", None)
        rows.append((say("row.sink"), repr(attend.sink) if shape is None else f"({', '.join(map(str, shape))})"))
    if attend.dropout:
        rows.append((say("row.dropout"), f"{attend.dropout:g}"))
    return [*rows, (say("row.description"), repr(attend))]


def formula(attend: Attention, d_head: int | None, *, rotated: bool = False) -> str:
    """Return how a description computes weights.

    >>> import regard as rg
    >>> from regard.view.diagrams.describe import formula
    >>> formula(rg.Attention(mask=rg.causal(), bias=rg.alibi(heads=2), temperature=2.0), 64)
    'softmax((q·k / √64 + bias) / 2), 0 where masked'
    """
    q, k = ("Rq", "Rk") if rotated else ("q", "k")
    score, product = attend.score, f"{q}·{k}"
    if isinstance(score, Dot):
        scale = score.scale
        if scale is None:
            logits = f"{product} / √{d_head if d_head is not None else 'D'}"
        elif isinstance(scale, Tensor):
            logits = f"scale × {product}"
        else:
            logits = product if scale == 1 else f"{scale:g} × {product}"
        if score.softcap is not None:
            logits = f"{score.softcap:g} tanh({logits} / {score.softcap:g})"
    elif isinstance(score, Cosine):
        logits = f"scale × {product} / (|{q}| |{k}|)"
    elif isinstance(score, Additive):
        logits = f"weight · tanh({q} + {k})"
    elif isinstance(score, Bilinear):
        logits = f"{q} · matrix · {k}"
    else:
        logits = f"{score!r}({q}, {k})"
    if attend.bias is not None:
        logits = f"{logits} + bias"
    if attend.temperature != 1:
        logits = f"({logits}) / {attend.temperature:g}"
    name = "softmax" if isinstance(attend.normalization, Softmax) else repr(attend.normalization)
    sink = ", sink" if attend.sink is not None else ""
    return f"{name}({logits}{sink})" + ("" if attend.mask is None else ", 0 where masked")


def activation_name(module: Any) -> str:
    """Return the name of an activation in configurations, or its own."""
    known = (name for name, function in ACTIVATIONS.items() if function is module.activation)
    return next(known, getattr(module.activation, "__name__", type(module.activation).__name__))


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what two layers that are drawn as one have in common: classes, sizes and descriptions of all parts."""
    return tuple(
        (name, type(each), *(tuple(tensor.shape) for tensor in each.parameters(recurse=False)), repr(attend_of(each)),
         repr(getattr(each, "rotary", None)))
        for name, each in module.named_modules()
    )  # fmt: skip


def _full_name(module: nn.Module) -> str:
    kind = type(module)
    packages = {
        "regard.nn": "regard.nn",
        "regard": "regard.models",
        "torch": "torch.nn",
        "transformers": "transformers",
    }
    package = next((public for start, public in packages.items() if f"{kind.__module__}.".startswith(f"{start}.")), "")
    return f"{package}.{kind.__qualname__}" if package else kind.__qualname__
