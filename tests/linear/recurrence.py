"""The recurrence of linear attention token by token, as its definition says."""

import torch


def recurrence(q, k, v, decay=None, beta=None, state=None, normalize=False):
    """Return output and state. query, key and value may have fewer heads; decay is (B, H, N) or (B, H, N, D)."""
    heads = max(x.shape[1] for x in (q, k, v))
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    if normalize:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    S = q.new_zeros(q.shape[0], heads, q.shape[-1], v.shape[-1]) if state is None else state
    outputs = [q.new_zeros(q.shape[0], heads, 0, v.shape[-1])]
    for t in range(q.shape[2]):
        if decay is not None:
            factor = decay[:, :, t].exp()
            factor = factor[..., None, None] if decay.dim() == 3 else factor[..., None]
            S = torch.where(factor == 0, 0, factor * S)
        written = v[:, :, t]
        if beta is not None:
            written = beta[:, :, t, None] * (written - (S * k[:, :, t, :, None]).sum(-2))
        S = S + k[:, :, t, :, None] * written[:, :, None]
        outputs.append((S * q[:, :, t, :, None]).sum(-2)[:, :, None])
    output = torch.cat(outputs, 2)
    if normalize:
        value, weight = output[..., :-1], output[..., -1:]
        output = torch.where(weight == 0, 0, value / torch.where(weight == 0, 1, weight))
    return output, S


def draw_recurrence(
    B, N, D, E, heads=(2, 2, 2), decay=None, beta=False, state=False, seed=0, dtype=torch.float64, resets=()
):
    """Return query, key, value, decay, beta and state. decay: None, "head" or "channel", -inf at `resets`."""
    random = torch.Generator().manual_seed(seed)
    H, draw = max(heads), lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)
    q, k, v = (draw(B, h, N, width) for h, width in zip(heads, (D, D, E), strict=True))
    k = torch.nn.functional.normalize(k, dim=-1)
    shape = {None: None, "head": (B, H, N), "channel": (B, H, N, D)}[decay]
    g = None if shape is None else -draw(*shape).abs() * 4 ** draw(*shape[:2], *(1,) * (len(shape) - 2))
    for t in resets:
        g[:, :, t] = -torch.inf
    b = draw(B, H, N).sigmoid() if beta else None
    S = draw(B, H, D, E) if state else None
    real = torch.promote_types(dtype, torch.float32)
    return [*(x.to(dtype) for x in (q, k, v)), *(None if x is None else x.to(real) for x in (g, b, S))]
