"""Linear attention by its definition: dense weights in float64."""

import torch

from regard.linear import favor
from regard.linear.features import _directions
from regard.masks import causal, padding

FEATURES = ["elu", favor(24, seed=3)]
MASKS = [None, causal(), padding([5, 0]), causal() & padding([70, 3])]


def kernel(features, q, k):
    """Return f(q)·f(k) for all pairs, (..., Q, K)."""
    if features == "elu":
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    else:
        directions = _directions(features.count, q.shape[-1], features.seed).to(q)
        q, k = (x / q.shape[-1] ** 0.25 for x in (q, k))
        q, k = (torch.exp(x @ directions.T - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
    return q @ k.mT


def naive(features, mask, q, k, v):
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    Q, K = q.shape[2], k.shape[2]
    allowed = torch.ones(q.shape[0], 1, Q, K, dtype=torch.bool)
    mask = None if mask is None else mask.snapshot()
    for part in getattr(mask, "parts", (mask,)):
        if part == causal():
            allowed &= torch.arange(K) <= torch.arange(Q)[:, None] + K - Q
        elif part is not None:
            allowed &= torch.arange(K) < torch.as_tensor(part.lengths).reshape(-1, 1, 1, 1)
    weights = torch.where(allowed, kernel(features, q, k), 0)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1, total)) @ torch.where(allowed.any(2)[..., None], v, 0)


def draw(B, H, G, Q, K, D, E, dtype=torch.float64, seed=0, grad=False):
    random = torch.Generator().manual_seed(seed)
    shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]
