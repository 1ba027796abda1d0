"""Run every `nn.MultiheadAttention` of a model with regard.

>>> import torch
>>> from regard.integrations.torch import replace
>>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
>>> model = replace(model)
replaced 1 nn.MultiheadAttention: self_attn
>>> model(torch.randn(1, 5, 16)).shape
torch.Size([1, 5, 16])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.geometry import format_shape
from regard.integrations.dense_masks import intersect, read_ignore_mask, read_key_ignore_mask
from regard.integrations.pattern import NO_MASK, Pattern, build_attention
from regard.masks import causal, padding

NESTED = (
    "a nested tensor must be query, key and value at once, in the strided layout and without masks; convert others "
    "with tensor.to_padded_tensor(0.0), and pass key_padding_mask"
)
_TOP_LEFT = Pattern(causal(), offset=0)


@dataclass(frozen=True)
class Report:
    """The names of the modules that `replace` changed, and of those that it skipped, with the reason."""

    replaced: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)} nn.MultiheadAttention: {', '.join(self.replaced) or 'none'}"]
        return "\n".join([*lines, *(f"skipped {name}: {why}" for name, why in self.left.items())])


def replace(model: nn.Module, *, report: Callable[[Report], object] = print) -> nn.Module:
    """Run every `nn.MultiheadAttention` of a model, including the model if it is one, with regard; return the model.

    report: called with a `Report` of the modules; by default it is printed.

    The modules are changed in place and keep their parameters, hooks and state_dict keys, so optimizers and checkpoints
    stay valid. Masks keep the convention of torch: True hides, numbers are added. Two things change: the attention
    output of a query without visible keys is 0 instead of NaN, and without `need_weights` the weights are not
    materialised.
    """
    replaced, left = [], {}
    for name, module in model.named_modules():
        name = name or type(model).__name__
        if isinstance(module, MultiheadAttention):
            left[name] = "already runs regard"
        elif type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            replaced.append(name)
        elif isinstance(module, nn.MultiheadAttention):
            left[name] = f"{type(module).__name__} is a subclass, which may compute something else"
    report(Report(tuple(replaced), left))
    return model


class MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that runs regard; `replace` changes the modules of a model to this class.

    >>> import torch
    >>> from regard.integrations.torch import MultiheadAttention
    >>> attend = MultiheadAttention(16, 2, batch_first=True)
    >>> x = torch.randn(1, 5, 16)
    >>> [t.shape for t in attend(x, x, x)]
    [torch.Size([1, 5, 16]), torch.Size([1, 5, 5])]
    """

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False once it is built, so that nn.TransformerEncoderLayer does not bypass it in its fast path."""
        return "out_proj" not in self._modules and self.__dict__["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, shaped like query, and the weights (B, Q, K) or (B, H, Q, K), or None.

        Masks are those of torch: True hides, numbers are added. `is_causal` is a hint that `attn_mask` is causal.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            if query is not key or key is not value or key_padding_mask is not None or attn_mask is not None:
                raise ValueError(NESTED)
            return self._attend_nested(query, need_weights, average_attn_weights)
        _check(self, query, key, value, key_padding_mask, attn_mask)
        batched = query.dim() == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._project(query, key, value)
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None  # like torch, trust the hint
        keys = key.shape[1 if batched and self.batch_first else 0]
        pattern, bias = self._masks(attn_mask, key_padding_mask, is_causal and attn_mask is None, keys)
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:  # like torch, use the returned weights for the output too
            attend, factors = build_attention(pattern, bias=bias).intervene(q, k)
            attend.notify_observers(q, k, v)
            all_weights = F.dropout(attend.weights(q, k), dropout)
            weights, output = all_weights.mean(1) if average_attn_weights else all_weights, all_weights @ v
            output = output if factors is None else output * factors[:, None, None].to(output)
        else:
            output = build_attention(pattern, dropout=dropout, bias=bias)(q, k, v)
        output = output.permute(0, 2, 1, 3) if self.batch_first or not batched else output.permute(2, 0, 1, 3)
        output = self.out_proj(output.flatten(-2))
        return (output, weights) if batched else (output[0], None if weights is None else weights[0])

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value as (B, H, N, D): views of the projections."""
        width, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            projected: tuple[Tensor, ...] = F.linear(query, weight, bias).split(width, -1)
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = separate if weight is None else weight.split(width)
            biases = (None,) * 3 if bias is None else bias.split(width)
            inputs = zip((query, key, value), weights, biases, strict=True)
            projected = tuple(F.linear(x, w, b) for x, w, b in inputs)
        if query.dim() == 2:
            projected = tuple(x.unsqueeze(0) for x in projected)
        elif not self.batch_first:
            projected = tuple(x.transpose(0, 1) for x in projected)
        q, k, v = projected  # (B, N, E)
        more_k, more_v = ([] if part is None else [part.expand(len(q), -1, -1)] for part in (self.bias_k, self.bias_v))
        if self.add_zero_attn:
            more_k.append(k.new_zeros(len(q), 1, width))
            more_v.append(v.new_zeros(len(q), 1, width))
        if more_k:
            k, v = torch.cat([k, *more_k], 1), torch.cat([v, *more_v], 1)
        return tuple(x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, causal_hint: bool, keys: int
    ) -> tuple[Pattern, Tensor | None]:
        """The pattern of both masks, and the bias to add to the scores, or None."""
        pattern, bias = _TOP_LEFT if causal_hint else NO_MASK, None
        more = (self.bias_k is not None) + bool(
            self.add_zero_attn
        )  # additional keys at the end, visible to all queries
        if more and causal_hint:
            pattern = Pattern(causal() | ~padding(keys), offset=0)
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, more)) if more else attn_mask
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
            pattern, bias = read_ignore_mask(attn_mask)
        if key_padding_mask is not None:
            parts, key_bias = read_key_ignore_mask(F.pad(key_padding_mask, (0, more)) if more else key_padding_mask)
            if parts:
                parts = parts if pattern.mask is None else (pattern.mask, *parts)
                pattern = Pattern(intersect(parts), pattern.offset)
            if key_bias is not None:
                bias = key_bias[:, None, None, :] + (0 if bias is None else bias)
        return pattern, bias

    def _attend_nested(self, x: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Compute a nested tensor of sequences of different lengths by way of a padded tensor."""
        if x.layout != torch.strided:
            raise ValueError(NESTED)
        lengths = [len(part) for part in x.unbind()]
        padded = x.to_padded_tensor(0.0)  # (B, N, E)
        hidden = torch.arange(padded.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        padded = padded if self.batch_first else padded.transpose(0, 1)
        output, weights = self(padded, padded, padded, hidden, need_weights, None, average)
        output = output if self.batch_first else output.transpose(0, 1)
        rows = [row[:length] for row, length in zip(output, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows), weights


def _check(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Raise unless shapes and dtypes match each other and the module."""
    named = {"query": (query, module.embed_dim), "key": (key, module.kdim), "value": (value, module.vdim)}
    for name, (tensor, width) in named.items():
        if tensor.dim() not in (2, 3) or tensor.dim() != query.dim() or tensor.shape[-1] != width:
            raise ValueError(
                f"{name} must be {'(B, N, E)' if module.batch_first else '(N, B, E)'}, or (N, E) if query, key and "
                f"value all are, with E = {width}, but is {format_shape(tensor)}"
            )
    one = query.dim() == 2
    batch = 1 if one else query.shape[0 if module.batch_first else 1]
    queries, keys = (x.shape[0 if one or not module.batch_first else 1] for x in (query, key))
    if key.shape[:-1] != value.shape[:-1] or (not one and key.shape[0 if module.batch_first else 1] != batch):
        raise ValueError(
            f"key and value must have the same length, and the batch of query, but query is {format_shape(query)}, "
            f"key {format_shape(key)} and value {format_shape(value)}; batch_first is {module.batch_first}"
        )
    fits = {
        "key_padding_mask": (key_padding_mask, [(keys,)] if one else [(batch, keys)]),
        "attn_mask": (attn_mask, [(queries, keys), (batch * module.num_heads, queries, keys)]),
    }
    for name, (mask, shapes) in fits.items():
        if mask is None:
            continue
        if tuple(mask.shape) not in shapes:
            raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, but is {format_shape(mask)}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"{name} must be bool, with True for hidden entries, or floating-point numbers to add to the scores, "
                f"but is {mask.dtype}; convert with .bool()"
            )
