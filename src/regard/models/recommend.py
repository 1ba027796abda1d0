"""Sequential recommendation: a causal model over the items of a history (SASRec)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.inputs import Inputs, prepare_inputs
from regard.models.language import LanguageModel
from regard.nn import Last, Packed
from regard.nn.loss import restricted_loss


class Recommender(LanguageModel):
    """A causal language model over items: histories (B, N) to next-item logits (B, N, items).

    >>> import torch
    >>> from regard.models import LanguageConfig, Recommender
    >>> model = Recommender(LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=2, d_hidden=64)).eval()
    >>> model.next_item_logits([torch.tensor([5, 6, 7]), torch.tensor([8])]).shape
    torch.Size([2, 100])
    """

    def next_item_logits(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor:
        """Return logits (B, items) of the item that follows each history."""
        rows = prepare_inputs(inputs, mask)
        hidden = self.hidden(rows.values, rows.positions, rows.context)
        return self.logits(rows.pool(Last(), hidden))

    def loss(
        self, inputs: Packed, labels: Tensor, *, smoothing: float = 0.0, negatives: Tensor | None = None
    ) -> Tensor:
        """Sum of the cross entropies of the labels (N,), the next item of each item; -1 is ignored.

        negatives: (n,) uniformly sampled items that the softmax is restricted to, together with the label; by default
            all items. Negatives equal to the label are left out, and `smoothing` is spread over the remaining ones.
        """
        rows = prepare_inputs(inputs, None)
        hidden = self.hidden(rows.values, rows.positions, rows.context).flatten(0, -2)
        has_label = labels >= 0
        hidden, labels = hidden[has_label], labels[has_label]
        if negatives is None:
            return self.token_loss(hidden, labels, smoothing)
        table = self.output_layer.weight
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, table.dtype), torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(dtype)
            label_logits = (hidden * F.embedding(labels, table).to(dtype)).sum(-1, keepdim=True)
            negative_logits = hidden @ F.embedding(negatives, table).to(dtype).mT
        logits = self.apply_softcap(torch.cat((label_logits, negative_logits), -1))
        is_negative = F.pad(labels[:, None] != negatives, (1, 0), value=True)
        return restricted_loss(logits, torch.zeros_like(labels), is_negative, smoothing=smoothing)
