"""Time and memory of attention against length, and ways to reduce them."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between
from regard.lab.draw import plot_growth


def dense_cost(attend=None, lengths=(256, 512, 1024, 2048), width=64, seed=0):
    import torch

    from regard.lab.complexity import costs

    torch.manual_seed(seed)
    attend = attend or (lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v)
    with torch.device("meta"):  # shapes without memory
        stored = [torch.softmax(torch.empty(n, 8) @ torch.empty(8, n), -1).numel() for n in (1000, 10_000)]
    return {**costs(attend, lengths, width), "at_1000": stored[0], "at_10000": stored[1]}


def draw_costs(figure: Any, findings: Findings, tr: PickLabel) -> None:
    for axis, name, label in zip(
        figure.subplots(1, 3), ("flops", "bytes", "seconds"),
        (tr("operations", "运算次数"), tr("peak memory (bytes)", "内存峰值（字节）"), tr("seconds of one core", "单核时间（秒）")),
        strict=True,
    ):  # fmt: skip
        key = "time" if name == "seconds" else name
        power = findings[key + "_power"]
        plot_growth(axis, findings, [(name, f"n^{power[1] if key == 'time' else power:.2f}")], tr)
        axis.set_title(label)


def tiled_cost(attend=None, lengths=(512, 1024, 2048), width=64, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import costs

    torch.manual_seed(seed)
    attend = attend or (lambda q, k, v: rg.attention(q, k, v, engine="tiled"))  # exact, tile by tile, in plain torch
    q, k, v = torch.randn(3, 700, width).double()
    off = (attend(q, k, v) - torch.softmax(q @ k.T / width**0.5, -1) @ v).abs().max().item()
    return {**costs(attend, lengths, width), "off": off}


def window_cost(attend=None, lengths=(512, 1024, 2048, 4096), width=32, reach=32, seed=0):
    import torch
    import torch.nn.functional as F

    import regard as rg
    from regard.lab.complexity import costs, flops, growth

    def band(q, k, v, w=reach):  # every query attends to its 2w + 1 neighbours only
        keys, values = (F.pad(x, (0, 0, w, w)).unfold(0, 2 * w + 1, 1) for x in (k, v))  # (n, d, 2w + 1)
        scores = torch.bmm(q[:, None], keys)[:, 0] / q.shape[-1] ** 0.5
        place = torch.arange(len(q))[:, None] + torch.arange(-w, w + 1)
        a = torch.softmax(scores.masked_fill((place < 0) | (place >= len(q)), -torch.inf), -1)
        return torch.bmm(values, a[:, :, None])[:, :, 0]

    torch.manual_seed(seed)
    attend = attend or band
    q, k, v = torch.randn(3, 300, width)
    off = (attend(q, k, v) - rg.attention(q, k, v, mask=rg.window(reach, reach))).abs().max().item()
    wide = growth((16, 32, 64, 128), [flops(lambda w=w: band(q, k, v, w)) for w in (16, 32, 64, 128)])
    return {**costs(attend, lengths, width), "off": off, "width_power": wide.power}


def linear_cost(attend=None, lengths=(1024, 2048, 4096, 8192, 16384), width=32, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import costs, flops, growth

    torch.manual_seed(seed)
    attend = attend or rg.LinearAttention("elu")
    widths = (32, 64, 128, 256)
    wide = growth(widths, [flops(lambda d=d: attend(*torch.randn(3, 512, d))) for d in widths])
    return {**costs(attend, lengths, width), "width_power": wide.power}


def scaling_cost(scaled=None, lengths=(256, 512, 1024, 2048), width=64, seed=0):
    import torch

    from regard.lab.complexity import costs

    torch.manual_seed(seed)
    plain = costs(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, lengths, width)
    scaled = costs(scaled or (lambda q, k, v: torch.softmax(q @ k.mT / width**0.5, -1) @ v), lengths, width)
    return {
        "lengths": list(lengths), "plain": plain["seconds"], "scaled": scaled["seconds"],
        "flops_ratio": scaled["flops"][-1] / plain["flops"][-1],
        "bytes_ratio": scaled["bytes"][-1] / plain["bytes"][-1],
        "plain_power": plain["flops_power"], "scaled_power": scaled["flops_power"],
        "saved": plain["flops_power"] - scaled["flops_power"],
    }  # fmt: skip


def draw_scaling_cost(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    plot_growth(
        axis, findings, [("plain", tr("without scaling", "不缩放")), ("scaled", tr("with scaling", "缩放"))], tr
    )
    axis.set_ylabel(tr("seconds of one core", "单核时间（秒）"))


def sparse_cost(masks=None, lengths=(1024, 2048, 4096, 8192), counted=(1024, 2048, 4096), seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import growth, time_growth

    patterns = masks or {
        "dense": lambda n: None,
        "local": lambda n: rg.window(64, 64),
        "truncated": lambda n: rg.window(127, 0),
        "global": lambda n: rg.global_tokens([0, 1]),
        "Longformer": lambda n: rg.longformer(128, [0, 1]),
    }
    findings = {"lengths": list(lengths), "names": list(patterns)}
    inputs = [torch.randn(3, 1, 1, n, 64) for n in lengths]
    pairs = []
    for name, mask in patterns.items():
        with torch.no_grad():
            shown = [mask(n) for n in lengths]
            calls = [lambda x=x, m=m: rg.attention(*x, mask=m) for x, m in zip(inputs, shown)]
            timing = time_growth(calls, lengths, narrow=0.2)
        findings |= {name: timing.seconds, "power " + name: timing.power}
        seen = [int((rg.Attention(mask=mask(n)).weights(*torch.zeros(2, n, 1)) > 0).sum()) for n in counted]
        pairs.append(growth(counted, seen).power)
    sparse = list(patterns)[1:]
    findings["most"] = max((findings["power " + name] for name in sparse), key=lambda power: power[1])
    findings["pairs_power"] = max(pairs[1:])
    findings["share"] = max(findings[name][-1] for name in sparse) / findings["dense"][-1]
    findings["dense_power"] = findings["power dense"]
    return findings


def draw_sparse_cost(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = {"dense": "稠密", "local": "局部", "truncated": "截断", "global": "全局"}
    plot_growth(
        axis,
        findings,
        [
            (name, f"{tr(name, names.get(name, name))}, n^{findings['power ' + name][1]:.2f}")
            for name in findings["names"]
        ],
        tr,
    )
    axis.set_ylabel(tr("seconds of one core", "单核时间（秒）"))


def chunking(merge=None, chunks=8, length=2048, width=32, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import peak_bytes

    def by_chunks(q, k, v):  # one chunk of the keys after the other, merged by their log-sum-exp
        pieces = [
            rg.attention(q, *piece, return_lse=True, engine="reference")
            for piece in zip(k.chunk(chunks), v.chunk(chunks))
        ]
        return (merge or rg.merge)([out for out, _ in pieces], [lse for _, lse in pieces])[0]

    torch.manual_seed(seed)
    q, k, v = torch.randn(3, length, width).double()
    whole = lambda: rg.attention(q, k, v, engine="reference")
    off = ((by_chunks(q, k, v) - whole()).norm() / whole().norm()).item()
    memory = [peak_bytes(whole, q, k, v), peak_bytes(lambda: by_chunks(q, k, v), q, k, v)]
    return {"off": off, "whole": memory[0], "chunked": memory[1], "share": memory[1] / memory[0], "chunks": chunks}


def draw_chunking(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = (
        tr("all keys at once", "一次处理所有键"),
        tr(f"{findings['chunks']} chunks, merged", f"分 {findings['chunks']} 块再合并"),
    )
    axis.barh(names, [findings["whole"] / 1e6, findings["chunked"] / 1e6], 0.5, color=["C0", "C1"])
    axis.set_xlabel(tr("peak memory (MB)", "内存峰值（MB）"))


def checkpointing(flag=True, layers=6, length=256, width=32, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import saved_bytes

    def stack(checkpointing):
        torch.manual_seed(seed)
        parts = lambda: (rg.nn.MultiHeadAttention(width, heads=2), rg.nn.FeedForward(width, 4 * width))
        blocks = [rg.nn.Block(*parts(), residual=lambda: rg.nn.PreNorm(width)) for _ in range(layers)]
        return rg.nn.Encoder(blocks, checkpointing=checkpointing).train()

    x = torch.randn(1, length, width, requires_grad=True)
    kept, gradients = [], []
    for net in (stack(False), stack(flag)):
        kept.append(saved_bytes(lambda: net(x), *net.parameters()))
        gradients.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    off = max((a - b).norm() / (a.norm() + 1e-30) for a, b in zip(*gradients)).item()
    return {"plain": kept[0], "checkpointed": kept[1], "share": kept[1] / kept[0], "off": off}


def draw_checkpointing(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = (tr("all activations", "全部保留"), tr("checkpointed", "使用检查点"))
    axis.barh(names, [findings["plain"] / 1e6, findings["checkpointed"] / 1e6], 0.5, color=["C0", "C1"])
    axis.set_xlabel(tr("memory kept for the backward pass (MB)", "为反向传播保留的内存（MB）"))


POWERS = Text(
    "Counted operations grow like n^{flops_power:.2f}, peak memory like n^{bytes_power:.2f}, processor time at these lengths like "
    "n^{time_power[1]:.2f} (median of {rounds} interleaved rounds; 99%: {time_power[0]:.2f} to {time_power[2]:.2f}).",
    "运算次数（计数）按 n^{flops_power:.2f} 增长，内存峰值按 n^{bytes_power:.2f}，在这些长度上处理器时间按 n^{time_power[1]:.2f} 增长"
    "（{rounds} 轮交错计时的中位数；99% 区间：{time_power[0]:.2f} 至 {time_power[2]:.2f}）。",
)
GROWTH = Text(
    "Operations, peak memory and processor time against length; logarithmic axes, with fitted powers.",
    "运算次数、内存峰值与处理器时间随长度的变化；对数坐标，并给出拟合的幂次。",
)


def more(en: str, zh: str) -> Text:
    """Return the text of the powers, followed by another sentence."""
    return Text(f"{POWERS.en} {en}", f"{POWERS.zh}{zh}")


CLAIMS = (
    Claim(
        "dense-cost", "cost", ("claim 8",),
        Text("Attention takes O(n²d) time, and O(n²) memory when weights are stored",
        "注意力需要 O(n²d) 的时间；若保存权重，还需 O(n²) 的内存"),
        Text("A million weights at n = 1,000, and a hundred million at n = 10,000.",
        "n = 1000 时有一百万个权重，n = 10000 时有一亿个。"),
        r"T(n)=O(n^2 d),\qquad M(n)=O(n^2)",
        dense_cost,
        (
            between("flops_power", 1.88, 2.12, "power of n with which counted operations grow", "运算次数（计数）增长的幂次"),
            between("bytes_power", 1.88, 2.12, "power of n with which peak memory grows", "内存峰值增长的幂次"),
            between("at_10000", 10**8, 10**8, "weights at n = 10,000", "n = 10000 时的权重个数"),
            between("time_power", 1.5, 2.5, "power of n with which time grows: nearer to 2 than to 1 or 3", "时间增长的幂次：距 2 比距 1 或 3 更近", rule="interval"),
        ),
        more("There are {at_1000:,} and {at_10000:,} weights.", "权重分别有 {at_1000:,} 与 {at_10000:,} 个。"),
        draw_costs, GROWTH,
        {"lengths": (512, 1024, 2048)},
        repetitions=1,
    ),
    Claim(
        "linear-heading", "cost", ("claim 8",),
        Text("“Linear complexity”", "“线性复杂度”"),
        Text("A source has this heading above O(n·m). With n queries and n keys that is n²: doubling the length takes four times the work.", "有资料在 O(n·m) 上方写了这样的标题。n 个查询、n 个键时那就是 n²：长度加倍，工作量变为四倍。"),
        r"O(n\cdot m)\overset{?}{=}O(n)",
        dense_cost,
        (
            between("flops_power", 0.88, 1.12, "power of n with which counted operations grow", "运算次数（计数）增长的幂次"),
            between("time_power", 0.5, 1.5, "power of n with which time grows: nearer to 1 than to 0 or 2", "时间增长的幂次：距 1 比距 0 或 2 更近", rule="interval"),
        ),
        more("The complexity is quadratic.", "复杂度是二次的。"),
        draw_costs, GROWTH,
        {"lengths": (512, 1024, 2048)},
        repetitions=1,
    ),
    Claim(
        "tiled-cost", "cost", ("claim 8",),
        Text("Tiled attention is exact, in O(n²d) time and O(n) memory", "分块注意力是精确的：O(n²d) 时间，O(n) 内存"),
        Text("With tiles and a running softmax, the weights are never stored, and nothing is approximated.",
        "逐块计算，softmax 随之更新：从不保存权重，也没有任何近似。"),
        r"T(n)=O(n^2d),\qquad M(n)=O(n)",
        tiled_cost,
        (
            at_most("off", 1e-12, "difference from dense attention", "与稠密注意力之差"),
            between("flops_power", 1.88, 2.12, "power of n with which counted operations grow", "运算次数（计数）增长的幂次"),
            at_most("bytes_power", 1.12, "power of n with which peak memory grows", "内存峰值增长的幂次"),
            between("time_power", 1.5, 2.5, "power of n with which time grows: nearer to 2 than to 1 or 3", "时间增长的幂次：距 2 比距 1 或 3 更近", rule="interval"),
        ),
        more("It differs from dense attention by {off:.0e}.", "与稠密注意力相差 {off:.0e}。"),
        draw_costs, GROWTH,
        {"lengths": (512, 1024, 2048), "width": 32},
        repetitions=1,
    ),
    Claim(
        "window-cost", "cost", ("claim 8",),
        Text("Window attention is O(n·w) in time and memory", "窗口注意力的时间与内存都是 O(n·w)"),
        Text("A query that attends to w neighbours costs the same at any length of the text.", "每个查询只关注 w 个相邻的键，无论文本多长，代价都一样。"),
        r"T(n)=O(n\,w\,d),\qquad M(n)=O(n\,w)",
        window_cost,
        (
            at_most("off", 1e-5, "difference from the window mask (float32)", "与窗口掩码之差（float32）"),
            between("flops_power", 0.88, 1.12, "power of n with which counted operations grow", "运算次数（计数）增长的幂次"),
            between("bytes_power", 0.88, 1.12, "power of n with which peak memory grows", "内存峰值增长的幂次"),
            between("width_power", 0.88, 1.12, "power of w with which counted operations grow", "运算次数增长所依 w 的幂次"),
            between("time_power", 0.5, 1.5, "power of n with which time grows: nearer to 1 than to 0 or 2", "时间增长的幂次：距 1 比距 0 或 2 更近", rule="interval"),
        ),
        more("Operations grow with the window like w^{width_power:.2f}. The band agrees with regard's window mask to {off:.0e}.", "运算次数随窗口按 w^{width_power:.2f} 增长。带状计算与 regard 的窗口掩码相差 {off:.0e}。"),
        draw_costs, GROWTH,
        {"lengths": (512, 1024, 2048)},
        repetitions=1,
    ),
    Claim(
        "linear-cost", "cost", ("claim 8", "mechanism 9"),
        Text("Linear attention is O(n·d²)", "线性注意力为 O(n·d²)"),
        Text("Keys and values are first summed into a state of d × d numbers, which every query reads.",
        "先把键和值累加成一个 d × d 的状态，每个查询都读取这个状态。"),
        r"o_i=\frac{\phi(q_i)^\top\sum_j\phi(k_j)v_j^\top}{\phi(q_i)^\top\sum_j\phi(k_j)}",
        linear_cost,
        (
            between("flops_power", 0.88, 1.12, "power of n with which counted operations grow", "运算次数（计数）增长的幂次"),
            at_most("bytes_power", 1.12, "power of n with which peak memory grows", "内存峰值增长的幂次"),
            between("width_power", 1.88, 2.12, "power of d with which counted operations grow", "运算次数增长所依 d 的幂次"),
            between("time_power", 0.5, 1.5, "power of n with which time grows: nearer to 1 than to 0 or 2", "时间增长的幂次：距 1 比距 0 或 2 更近", rule="interval"),
        ),
        more("Operations grow with the width like d^{width_power:.2f}.", "运算次数随维度按 d^{width_power:.2f} 增长。"),
        draw_costs, GROWTH,
        {"lengths": (2048, 4096, 8192)},
        repetitions=1,
    ),
    Claim(
        "scaling-cost", "cost", ("claim 9",),
        Text("“Scaling solves the O(n²) cost”", "“缩放解决了 O(n²) 的开销”"),
        Text("Some sources present the division by √d as a solution to the quadratic cost. It changes the values of the scores, not their number.", "有些资料把“除以 √d”当作平方开销的解决办法。它改变的是数值，而不是数值的个数。"),
        r"\operatorname{cost}\!\left(\operatorname{softmax}\frac{QK^\top}{\sqrt d}V\right)\overset{?}{\ll}\operatorname{cost}\left(\operatorname{softmax}(QK^\top)V\right)",
        scaling_cost,
        (at_least("saved", 0.5, "power of n saved by scaling", "缩放所降低的幂次"), at_most("flops_ratio", 0.5, "operations with scaling over those without", "缩放与不缩放的运算次数之比")),
        Text("With scaling, operations are {flops_ratio:.2f} times and memory {bytes_ratio:.2f} times those without; operations grow like n^{scaled_power:.2f} with and n^{plain_power:.2f} without scaling. (Scaling prevents saturation.)", "缩放之后，运算次数为不缩放时的 {flops_ratio:.2f} 倍，内存为 {bytes_ratio:.2f} 倍；两者分别按 n^{scaled_power:.2f} 与 n^{plain_power:.2f} 增长。（缩放解决的是饱和问题。）"),
        draw_scaling_cost,
        Text("Processor time with and without scaling.", "缩放与不缩放时的处理器时间。"),
        {"lengths": (64, 128, 256, 512)},
        repetitions=1,
    ),
    Claim(
        "sparse-cost", "cost", ("mechanism 9",),
        Text("Sparse patterns replace O(n²) by O(n)", "稀疏模式以 O(n) 代替 O(n²)"),
        Text("Local windows, truncated windows over earlier tokens only, a few global tokens, and Longformer, which combines windows and global tokens.", "局部窗口、只关注前面词元的截断窗口、少量全局词元，以及把窗口与全局词元结合起来的 Longformer。"),
        r"\sum_i |\{j: M_{ij}=1\}| = O(n)",
        sparse_cost,
        (
            between("dense_power", 1.5, 2.5, "power of n, dense: nearer to 2 than to 1 or 3", "稠密：时间的幂次，距 2 比距 1 或 3 更近", rule="interval"),
            between("most", 0.5, 1.5, "greatest power of n of a sparse pattern: nearer to 1 than to 0 or 2", "稀疏模式中最大的幂次：距 1 比距 0 或 2 更近", rule="interval"),
            at_most("pairs_power", 1.12, "power of n with which the visible pairs grow, greatest of the patterns", "可见配对数增长的幂次，各模式中最大者"),
        ),
        Text("Processor time of the sparse patterns grows at most like n^{most[1]:.2f} (99%: {most[0]:.2f} to {most[2]:.2f}), of dense attention like n^{dense_power[1]:.2f} ({dense_power[0]:.2f} to {dense_power[2]:.2f}); at the greatest length the slowest pattern takes {share:.0%} of the dense time.", "稀疏模式的处理器时间至多按 n^{most[1]:.2f} 增长（99% 区间：{most[0]:.2f} 至 {most[2]:.2f}），稠密注意力按 n^{dense_power[1]:.2f}（{dense_power[0]:.2f} 至 {dense_power[2]:.2f}）；在最大长度处，最慢的模式用时为稠密的 {share:.0%}。"),
        draw_sparse_cost,
        Text("Processor time of regard against length, by mask.", "regard 在各种掩码下的处理器时间随长度的变化。"),
        {"lengths": (512, 1024, 2048)},
        repetitions=1,
    ),
    Claim(
        "chunking", "cost", ("mechanism 9",),
        Text("Merging chunks of keys gives the same output in less memory", "把键分块计算再合并，结果相同而内存更少"),
        Text("Each chunk of keys yields an output and a log-sum-exp, with which the outputs are merged exactly.",
        "每一块键给出一个输出和一个 log-sum-exp，用后者可以把各个输出精确地合并起来。"),
        r"o=\sum_c \frac{e^{\ell_c}}{\sum_{c'}e^{\ell_{c'}}}\,o_c",
        chunking,
        (at_most("off", 1e-12, "relative difference", "相对差"), at_most("share", 0.5, "peak memory, chunked over whole", "分块与整体的内存峰值之比")),
        Text("The merged output differs by {off:.1e} and takes {share:.0%} of the memory.",
        "合并后的输出相差 {off:.1e}；所用内存为原来的 {share:.0%}。"),
        draw_chunking,
        Text("Peak memory of 2,048 queries and keys.", "2048 个查询与键时的内存峰值。"),
        {"length": 1024},
        repetitions=3,
    ),
    Claim(
        "checkpointing", "cost", ("mechanism 9",),
        Text("Gradient checkpointing gives the same gradients in less memory", "梯度检查点：梯度相同，内存更少"),
        Text("Only the input of each block is kept; the rest is recomputed in the backward pass.",
        "只保留每个块的输入，其余在反向传播时重新计算。"),
        r"M=O(L\cdot n\,d)\ll O\left(L\cdot n\,(c\,d+h)\right)",
        checkpointing,
        (at_most("off", 1e-5, "relative difference of the gradients (float32)", "梯度的相对差（float32）"), at_most("share", 0.5, "kept memory, checkpointed over plain", "使用检查点前后保留内存之比")),
        Text("Gradients differ by {off:.1e}; the memory kept for the backward pass shrinks to {share:.0%}.",
        "梯度相差 {off:.1e}；为反向传播保留的内存缩减到 {share:.0%}。"),
        draw_checkpointing,
        Text("Memory that six blocks keep for their backward pass.", "六个块为反向传播保留的内存。"),
        repetitions=3,
    ),
)  # fmt: skip
