"""What comes next for somebody: a causal encoder over the items of a history (SASRec)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.language import LanguageModel
from regard.models.parts import Inputs, rows_of
from regard.nn import Last, Packed
from regard.nn.loss import loss_among


class Recommender(LanguageModel):
    """A language model whose tokens are items: histories (B, N) to the logits of the item that follows each item.

    >>> import torch
    >>> from regard.models import LanguageConfig, Recommender
    >>> model = Recommender(LanguageConfig(vocabulary=100, width=32, layers=2, heads=2, hidden=64)).eval()
    >>> model.following([torch.tensor([5, 6, 7]), torch.tensor([8])]).shape
    torch.Size([2, 100])
    """

    def following(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor:
        """Logits (B, items) of what comes after the last item of each history."""
        rows = rows_of(inputs, mask)
        hidden = self.hidden(rows.values, rows.positions, rows.shared)
        return self.logits(rows.pooled(Last(), hidden))

    def loss(self, inputs: Packed, after: Tensor, *, smoothing: float = 0.0, others: Tensor | None = None) -> Tensor:
        """The sum of the cross entropies of the items `after` each (N,); -1 is not asked for.

        others: (n,) items drawn evenly from all, to tell those after from; from all items unless told otherwise. Where
        one of them is the item after, it does not count, and `smoothing` is spread evenly over those that do.
        """
        rows = rows_of(inputs, None)
        hidden = self.hidden(rows.values, rows.positions, rows.shared).flatten(0, -2)
        asked = after >= 0
        hidden, after = hidden[asked], after[asked]
        if others is None:
            return self.token_loss(hidden, after, smoothing)
        table = self.output_layer.weight
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, table.dtype), torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(dtype)
            own = (hidden * F.embedding(after, table).to(dtype)).sum(-1, keepdim=True)
            theirs = hidden @ F.embedding(others, table).to(dtype).mT
        logits = self.capped(torch.cat((own, theirs), -1))
        others_differ = F.pad(after[:, None] != others, (1, 0), value=True)
        return loss_among(logits, torch.zeros_like(after), others_differ, smoothing=smoothing)
