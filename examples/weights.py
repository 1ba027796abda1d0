"""Tour of the operator: one call, its mask, the engine that computes it, statistics and a heat map of its weights."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
heads, length, width = 4, 512, 64

# Every head attends to the token at a fixed distance, a different one for each head, so that the maps have structure.
key, value = torch.randn(2, 1, heads, length, width)
query = torch.stack([0.9 * key[:, h].roll(24 * (h + 1) ** 2 // 2, 1) for h in range(heads)], 1)

attend = rg.Attention(mask=rg.causal() & rg.window(255, 0), bias=rg.alibi(heads=heads))
output, lse = attend(query, key, value, return_lse=True)
print(f">>> {attend}\n{tuple(query.shape)} -> {tuple(output.shape)}, log-sum-exp {tuple(lse.shape)}\n")

print(">>> print(attend.mask)")
print(attend.mask, "\n")

print(">>> print(attend.explain(query, key, value))")
print(attend.explain(query, key, value), "\n")

statistics = attend.statistics(query, key)
print(">>> attend.statistics(query, key)")
print("head   entropy   mean distance   top keys of the last token")
for head in range(heads):
    keys = ", ".join(str(int(k)) for k in statistics.top_keys[0, head, -1])
    print(
        f"{head:4d}   {statistics.entropy[0, head].mean():7.2f}   {statistics.distance[0, head].mean():13.1f}   {keys}"
    )

folder = Path("demo")
folder.mkdir(exist_ok=True)
pooled = attend.map(query, key, size=(64, 64))[0]
figure, axes = plt.subplots(1, heads, figsize=(3.1 * heads, 3.7), layout="constrained", sharey=True)
for head, axis in enumerate(axes):
    axis.imshow(pooled[head].sqrt(), cmap="magma", extent=(0, length, length, 0), interpolation="nearest")
    axis.set(title=f"head {head}", xlabel="key")
axes[0].set_ylabel("query")
figure.suptitle(f"{attend!r}: weights of {length} tokens, pooled to 64 x 64")
figure.savefig(folder / "weights.png", dpi=110)
print(f"\nheat map: {folder / 'weights.png'}")
