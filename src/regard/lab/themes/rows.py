"""Rows of weights: how far scores spread, sums other than 1, and other normalisations."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between


def sigmas(scores=None, pairs=160_000, width=64, seed=0):
    import math

    import torch

    torch.manual_seed(seed)
    if scores is None:
        scores = torch.cat([(torch.randn(2, pairs // 8, width).prod(0)).sum(-1) for _ in range(8)])
    counted = [(scores.abs() <= k * width**0.5).double().mean().item() for k in (1, 2, 3)]
    normal = [math.erf(k / 2**0.5) for k in (1, 2, 3)]
    off = [abs(a - b) for a, b in zip(counted, normal)]
    return {"counted": counted, "normal": normal, "first": off[0], "second": off[1], "third": off[2],
            "kurtosis": (scores.double().pow(4).mean() / scores.double().var() ** 2).item()}  # fmt: skip


def draw_sigmas(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for n, (name, label) in enumerate((("normal", tr("normal law", "正态分布")), ("counted", tr("counted", "实测")))):
        axis.bar([x + 0.38 * n for x in range(3)], findings[name], 0.36, label=label)
        for x, share in enumerate(findings[name]):
            axis.text(x + 0.38 * n, share + 0.01, f"{share:.2%}", ha="center", fontsize=8)
    axis.set_xticks([x + 0.19 for x in range(3)], ["±1σ = ±8", "±2σ = ±16", "±3σ = ±24"])
    axis.set(ylabel=tr("share of the dot products", "点积所占比例"), ylim=(0, 1.15))
    axis.legend(loc="upper left", ncols=2)


def row_sums(attend=None, layers=12, tokens=64, width=16, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    attend = attend or rg.attention
    projections = torch.randn(layers, 2, width, width).double() / width**0.5
    findings = {"layers": list(range(layers + 1))}
    for name, total in (("0.8", 0.8), ("1", 1.0), ("1.25", 1.25)):
        constant, spread = [], []
        x = torch.randn(tokens, width).double()
        x = x - x.mean(0) + 1  # every channel has the mean 1
        mean = x.mean(0).norm().item()
        for n in range(layers + 1):
            constant.append(x.mean(0).norm().item() / mean)
            spread.append(x.std(0).mean().item())
            if n < layers:
                x = total * attend(x @ projections[n, 0], x @ projections[n, 1], x)  # rows that sum to `total`
        findings |= {"mean " + name: constant, "spread " + name: [s / spread[0] for s in spread]}
    findings |= {
        "below": findings["mean 0.8"][-1] ** (1 / layers), "above": findings["mean 1.25"][-1] ** (1 / layers),
        "one": findings["mean 1"][-1] ** (1 / layers), "kept": findings["spread 1"][-1],
    }  # fmt: skip
    return findings


def draw_row_sums(figure: Any, findings: Findings, tr: PickLabel) -> None:
    for axis, kind, title in zip(
        figure.subplots(1, 2), ("mean", "spread"), (tr("mean of the tokens", "各词元的均值"), tr("difference between tokens", "词元之间的差异")),
        strict=True,
    ):  # fmt: skip
        for name in ("0.8", "1", "1.25"):
            axis.semilogy(
                findings["layers"],
                [max(y, 1e-20) for y in findings[f"{kind} {name}"]],
                "o-",
                label=tr(f"rows sum to {name}", f"行和为 {name}"),
            )
        axis.set(title=title, xlabel=tr("layers", "层数"))
    axis.legend()


def norms(weigh=None, rows=200, keys=9, seed=0):
    import math

    import torch

    torch.manual_seed(seed)
    scores, values = torch.randn(rows, keys).double(), torch.randn(keys, 2).double()
    kinds = weigh or {
        "softmax": lambda s: torch.softmax(s, -1),
        "L1": lambda s: s / s.abs().sum(-1, keepdim=True),
        "L2": lambda s: s / s.norm(dim=-1, keepdim=True),
    }
    angle = torch.arange(360).double() * math.tau / 360
    directions = torch.stack([angle.cos(), angle.sin()])
    findings = {"names": list(kinds), "values": values.tolist()}
    for name, kind in kinds.items():
        weights = kind(scores)
        outputs = weights @ values
        beyond = ((outputs @ directions) - (values @ directions).amax(0)).amax(-1)  # of each output beyond the hull
        findings |= {
            "least " + name: weights.min().item(), "sum off " + name: (weights.sum(-1) - 1).abs().max().item(),
            "shift " + name: (kind(scores + 1) - weights).abs().max().item(), "outputs " + name: outputs.tolist(),
            "outside " + name: (beyond > 1e-9).double().mean().item(),
        }  # fmt: skip
    return findings


def draw_norms(figure: Any, findings: Findings, tr: PickLabel) -> None:
    for axis, name in zip(figure.subplots(1, 3), findings["names"], strict=True):
        axis.plot(
            *zip(*findings["outputs " + name], strict=True), ".", color="C1", label=tr("outputs", "输出"), alpha=0.6
        )
        axis.plot(*zip(*findings["values"], strict=True), "o", color="C0", label=tr("values", "值"))
        axis.set_title(name)
    axis.legend()


SUMS = Text(
    "Mean of all tokens and difference between tokens against the number of layers, for three row sums.",
    "三种行和之下，全部词元的均值与词元之间的差异随层数的变化。",
)
CLAIMS = (
    Claim(
        "sigmas", "softmax", ("sigma",),
        Text("68%, 95% and 99.7% of the dot products lie within one, two and three standard deviations", "点积落在一、二、三倍标准差之内的比例为 68%、95% 与 99.7%"),
        Text("For 64 numbers of variance 1, the standard deviation is 8. The shares of a normal distribution are 68.27%, 95.45% and 99.73%; a sum of 64 products is not quite normal.", "64 个方差为 1 的分量，标准差为 8。正态分布的比例为 68.27%、95.45% 与 99.73%；64 个乘积之和并不完全服从正态分布。"),
        r"P(|q\cdot k|\le k\sigma)=\operatorname{erf}\frac{k}{\sqrt2},\qquad \sigma=\sqrt{d_k}",
        sigmas,
        (
            at_most("first", 0.01, "deviation from 68.27% within 1σ", "1σ 之内与 68.27% 之差", rule="mean"),
            at_most("second", 0.01, "deviation from 95.45% within 2σ", "2σ 之内与 95.45% 之差", rule="mean"),
            at_most("third", 0.01, "deviation from 99.73% within 3σ", "3σ 之内与 99.73% 之差", rule="mean"),
        ),
        Text("Counted: {counted[0]:.2%}, {counted[1]:.2%} and {counted[2]:.2%}. The kurtosis is {kurtosis:.2f}, not 3 (3 + 6/d): the middle and the tails are fuller than a normal distribution's.", "实测为 {counted[0]:.2%}、{counted[1]:.2%} 与 {counted[2]:.2%}。峰度为 {kurtosis:.2f} 而不是 3（理论值 3 + 6/d）：中部与尾部都比正态分布略厚。"),
        draw_sigmas,
        Text("Shares within one, two and three standard deviations.", "一、二、三倍标准差之内的比例。"),
    ),
    Claim(
        "row-sums", "symmetry", ("row sums",),
        Text("Row sums above 1 amplify, row sums below 1 attenuate, layer by layer", "行和大于 1 则逐层放大，小于 1 则逐层衰减"),
        Text("Layers of attention without residual connections, whose weights are multiplied so that every row sums to 0.8, 1 or 1.25.", "不带残差连接的多层注意力，把权重乘以常数，使每行之和为 0.8、1 或 1.25。"),
        r"\sum_j\alpha_{ij}=c\quad\Rightarrow\quad \bar x^{(L)}\approx c^{L}\,\bar x^{(0)}",
        row_sums,
        (
            between("below", 0.7, 0.9, "factor per layer, rows that sum to 0.8", "每层的倍数，行和为 0.8", rule="mean"),
            between("one", 0.9, 1.1, "factor per layer, rows that sum to 1", "每层的倍数，行和为 1", rule="mean"),
            between("above", 1.15, 1.35, "factor per layer, rows that sum to 1.25", "每层的倍数，行和为 1.25", rule="mean"),
        ),
        Text("A layer multiplies the mean of the tokens by {below:.2f}, {one:.2f} and {above:.2f}.", "每一层使各词元的均值乘以 {below:.2f}、{one:.2f} 与 {above:.2f}。"),
        draw_row_sums, SUMS,
    ),
    Claim(
        "information", "symmetry", ("row sums",),
        Text("“Row sums of 1 conserve information”", "“行和为 1 保证信息守恒”"),
        Text("A text says that the amount of information stays the same. A weighted mean keeps a constant; the differences between tokens, which are what the values tell, it averages away.", "有资料称信息总量不变。加权平均保持的只是常数；词元之间的差异才是值所携带的信息，却被平均掉了。"),
        r"\sum_j\alpha_{ij}=1\;\overset{?}{\Rightarrow}\;I(o)=I(v)",
        row_sums,
        (at_least("kept", 0.9, "difference between tokens after the last layer over that before the first", "末层之后与首层之前词元间差异之比"),),
        Text("After the last layer, tokens differ by at most {kept:.0e} of what they did before the first. Residual connections prevent this, not row sums.", "末层之后，词元之间的差异至多只剩最初的 {kept:.0e}。能防止这一点的是残差连接，而不是行和。"),
        draw_row_sums, SUMS,
    ),
    Claim(
        "norms", "symmetry", ("row sums",),
        Text("L1 and L2 normalisation make no convex combination; the softmax does", "L1 与 L2 归一化得不到凸组合，softmax 可以"),
        Text("Divided by the sum of their sizes (L1) or by their length (L2), scores keep their signs, so weights are negative and do not sum to 1. Both also change if a constant is added to all scores; the softmax does not.", "把得分除以绝对值之和（L1）或除以其长度（L2），符号仍在，于是权重有负数，且和不为 1。给所有得分加上同一个常数，两者都会改变，softmax 则不变。"),
        r"\frac{s_i}{\sum_j|s_j|},\qquad \frac{s_i}{\sqrt{\sum_j s_j^2}},\qquad \frac{e^{s_i}}{\sum_j e^{s_j}}",
        norms,
        (
            at_most("least L1", -0.01, "smallest weight, L1", "最小的权重，L1"),
            at_least("sum off L1", 0.1, "deviation of row sums from 1, L1", "行和与 1 的偏差，L1"),
            at_least("sum off L2", 0.1, "the same, L2", "同上，L2"),
            at_most("sum off softmax", 1e-12, "the same, softmax", "同上，softmax"),
            between("outside softmax", 0, 0, "share of outputs outside the hull, softmax", "越出凸包的输出比例，softmax"),
            at_least("outside L2", 0.05, "the same, L2", "同上，L2", rule="mean"),
            at_most("shift softmax", 1e-12, "change if 1 is added to all scores, softmax", "所有得分加 1 之后的变化，softmax"),
            at_least("shift L1", 0.01, "the same, L1", "同上，L1"),
        ),
        Text("The smallest weight is {least L1:.2f} with L1; row sums differ from 1 by up to {sum off L1:.1f} with L1, {sum off L2:.1f} with L2 and {sum off softmax:.0e} with the softmax. {outside L2:.0%} of the outputs lie outside the hull of the values with L2, none with the softmax.", "L1 的最小权重为 {least L1:.2f}；行和与 1 的偏差：L1 达 {sum off L1:.1f}，L2 达 {sum off L2:.1f}，softmax 为 {sum off softmax:.0e}。用 L2 时 {outside L2:.0%} 的输出在值的凸包之外，用 softmax 时一个也没有。"),
        draw_norms,
        Text("Nine values and 200 outputs with each normalisation.", "九个值，以及每种归一化下的 200 个输出。"),
    ),
)  # fmt: skip
