"""Scaling and the softmax: variance, saturation, temperature, overflow."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between


def variance(scale=None, widths=(4, 16, 64, 256, 1024), pairs=30_000, seed=0):
    import torch

    torch.manual_seed(seed)
    plain, scaled = [], []
    for width in widths:
        rows = max(pairs * 64 // width, 2000)  # equal work at every width
        q, k = torch.randn(2, rows, width)
        scores = (q * k).sum(-1)
        plain.append(scores.var().item())
        scaled.append((scores * (scale or width**-0.5)).var().item())
    off = [max(abs(p / width - 1), abs(s - 1)) for width, p, s in zip(widths, plain, scaled)]
    at = widths.index(64)
    return {"widths": list(widths), "plain": plain, "rescaled": scaled, "plain64": plain[at], "scaled64": scaled[at], "off": max(off),
            "ratio": sum(p / w for p, w in zip(plain, widths)) / len(widths), "scaled": sum(scaled) / len(widths)}  # fmt: skip


def draw_variance(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    axis.loglog(findings["widths"], findings["plain"], "o-", label=tr("q·k", "q·k"))
    axis.loglog(findings["widths"], findings["rescaled"], "o-", label="q·k / √d")
    axis.loglog(findings["widths"], findings["widths"], ":", color="gray", label=tr("variance = d", "方差 = d"))
    axis.set(xlabel=tr("width d of queries and keys", "查询与键的维度 d"), ylabel=tr("variance", "方差"))
    axis.legend()


def spread(scores=None, pairs=160_000, width=64, seed=0):
    import math

    import torch

    torch.manual_seed(seed)
    if scores is None:
        scores = torch.cat(
            [(torch.randn(pairs // 8, width) * torch.randn(pairs // 8, width)).sum(-1) for _ in range(8)]
        )
    within = {bound: (scores.abs() <= bound).float().mean().item() for bound in (8, 16, 20, 24)}
    normal = math.erf(24 / width**0.5 / 2**0.5)
    counts, edges = torch.histogram(scores.clamp(-40, 40), 80, range=(-40, 40), density=True)
    return {"within20": within[20], "within24": within[24], "normal24": normal,
            "counts": counts.tolist(), "edges": edges.tolist(), "deviation": scores.std().item()}  # fmt: skip


def draw_spread(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    axis.stairs(findings["counts"], findings["edges"], fill=True, alpha=0.55)
    for bound, style in ((20, ":"), (24, "--")):
        for side in (-bound, bound):
            axis.axvline(side, linestyle=style, color="gray", linewidth=1)
    axis.set(xlabel="q·k, d = 64", ylabel=tr("density", "概率密度"))
    axis.text(24.4, max(findings["counts"]) * 0.9, "±24")
    axis.text(20.3, max(findings["counts"]) * 0.75, "±20", ha="left")


def saturation(scale=None, widths=(4, 16, 64, 256, 1024, 4096), keys=32, rows=128, seed=0):
    import torch

    torch.manual_seed(seed)
    findings = {"widths": list(widths), "top_plain": [], "top_scaled": [], "grad_plain": [], "grad_scaled": []}
    for width in widths:
        q, k = torch.randn(rows, width), torch.randn(rows, keys, width)
        scores = torch.einsum("rd,rkd->rk", q, k)
        for name, logits in (("plain", scores), ("scaled", scores * (scale or width**-0.5))):
            a = torch.softmax(logits, -1)
            jacobian = torch.diag_embed(a) - a[:, :, None] * a[:, None, :]  # of the softmax
            findings["top_" + name].append(a.amax(-1).mean().item())
            findings["grad_" + name].append(jacobian.flatten(1).norm(dim=1).median().item())
    for name in ("plain", "scaled"):
        findings["kept_" + name] = findings["grad_" + name][-1] / findings["grad_" + name][0]
        findings["last_" + name] = findings["top_" + name][-1]
    return findings


def draw_saturation(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, right = figure.subplots(1, 2)
    for name, label in (("plain", tr("unscaled", "不缩放")), ("scaled", tr("scaled by 1/√d", "除以 √d"))):
        left.semilogx(findings["widths"], findings["top_" + name], "o-", label=label)
        right.loglog(findings["widths"], findings["grad_" + name], "o-", label=label)
    left.set(xlabel=tr("width d", "维度 d"), ylabel=tr("largest weight of a row", "每行最大的权重"), ylim=(0, 1.03))
    right.set(xlabel=tr("width d", "维度 d"), ylabel=tr("norm of the softmax Jacobian", "softmax 雅可比矩阵的范数"))
    left.legend()


def temperature(attend=None, steps=9, seed=0):
    import math

    import torch

    import regard as rg

    torch.manual_seed(seed)
    q, k = torch.randn(1, 16).double(), torch.randn(8, 16).double()
    attend = attend or (lambda T: rg.Attention(temperature=T).weights(q, k)[0])
    scores = (k @ q[0] / 16**0.5).sort(descending=True).values
    gap, spread = (scores[0] - scores[1]).item(), (scores[0] - scores[-1]).item()
    low, high = gap / 10, spread * 10  # what is cold or hot depends on how far the scores are apart
    temperatures = [low * (high / low) ** (n / (steps - 1)) for n in range(steps)]
    rows = [attend(T).tolist() for T in temperatures]
    entropy = [-sum(a * math.log(a) for a in row if a > 0) for row in rows]
    best = int((k @ q[0]).argmax())
    return {"temperatures": temperatures, "rows": rows, "entropy": entropy, "sharpest": rows[0][best],
            "flattest": max(rows[-1]) - min(rows[-1]), "uniform": math.log(8), "entropy_last": entropy[-1],
            "coldest": low, "hottest": high, "gap": gap, "spread": spread,
            "rises": int(all(b >= a - 1e-9 for a, b in zip(entropy, entropy[1:])))}  # fmt: skip


def draw_temperature(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, right = figure.subplots(1, 2)
    for n in range(0, len(findings["rows"]), 2):
        left.plot(
            range(8), sorted(findings["rows"][n], reverse=True), "o-", label=f"T = {findings['temperatures'][n]:.2g}"
        )
    left.set(xlabel=tr("keys, best first", "键（从最匹配的排起）"), ylabel=tr("weight", "权重"))
    left.legend()
    right.semilogx(findings["temperatures"], findings["entropy"], "o-")
    right.axhline(findings["uniform"], linestyle="--", color="gray", linewidth=1)
    right.set(xlabel=tr("temperature T", "温度 T"), ylabel=tr("entropy of the weights", "权重的熵"))


def normalizations(kinds=None, lengths=(16, 64, 256, 1024, 4096), rows=200, seed=0):
    import math

    import torch

    import regard as rg

    torch.manual_seed(seed)
    kinds = kinds or {"softmax": rg.Softmax(), "sigmoid": rg.Sigmoid(-math.log(lengths[0])), "sparsemax": rg.Entmax(2)}
    findings = {"lengths": list(lengths)}
    for name, kind in kinds.items():
        attend = rg.Attention(rg.Dot(scale=1.0), normalization=kind)
        own, zeros, entropy, slope = [], [], [], []
        for length in lengths:
            logits = torch.randn(rows, length, 1).double()  # of keys that do not match the query
            logits[:, 0] = 3.0  # and of one that does
            logits.requires_grad_()
            one = torch.ones(rows, 1, 1, 1).double()
            weights = attend.weights(one, logits[:, None])[:, 0, 0]  # (rows, length)
            gradient = torch.autograd.grad(weights[:, 0].sum(), logits)[0]
            shares = weights / weights.sum(-1, keepdim=True)
            own.append(weights[:, 0].mean().item())
            zeros.append((weights == 0).double().mean().item())
            entropy.append(torch.special.entr(shares).sum(-1).mean().item())
            slope.append(gradient[:, 0].abs().mean().item())
        findings |= {f"own {name}": own, f"zeros {name}": zeros, f"entropy {name}": entropy, f"slope {name}": slope}
        findings |= {f"kept_{name}": own[-1] / own[0], f"zeros_{name}": zeros[-1], f"slope_{name}": slope[-1],
                     f"entropy_{name}": entropy[-1]}  # fmt: skip
    findings["zeros_others"] = max(sum(findings[f"zeros {name}"]) for name in ("softmax", "sigmoid"))
    findings["entropy_ratio"] = findings["entropy_sparsemax"] / findings["entropy_softmax"]
    return findings


def draw_normalizations(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, middle, right = figure.subplots(1, 3)
    for name in ("softmax", "sigmoid", "sparsemax"):
        left.loglog(findings["lengths"], findings[f"own {name}"], "o-", label=name)
        middle.semilogx(findings["lengths"], findings[f"entropy {name}"], "o-")
        right.loglog(findings["lengths"], findings[f"slope {name}"], "o-")
    left.set(xlabel=tr("keys n", "键的个数 n"), ylabel=tr("weight of the matching key", "匹配键的权重"))
    middle.set(xlabel=tr("keys n", "键的个数 n"), ylabel=tr("entropy", "熵"))
    right.set(xlabel=tr("keys n", "键的个数 n"), ylabel=tr("gradient of this weight", "该权重的梯度"))
    left.legend()


def overflow(softmax=None, seed=0):
    import torch

    naive = softmax or (lambda x: x.exp() / x.exp().sum(-1, keepdim=True))
    stable = lambda x: (x - x.amax(-1, keepdim=True)).exp() / (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    findings = {"logits": list(range(2, 131, 1))}
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        errors = {}
        for kind, call in (("naive", naive), ("stable", stable)):
            rows = [torch.tensor([top, top - 1.0], dtype=dtype) for top in findings["logits"]]
            errors[kind] = [(call(x).double() - torch.softmax(x.double(), -1)).abs().max().item() for x in rows]
            findings[f"{kind}_{name}"] = [error if error == error else None for error in errors[kind]]  # NaN is None
        broken = [
            top for top, error in zip(findings["logits"], findings[f"naive_{name}"]) if error is None or error > 0.1
        ]
        findings[f"from_{name}"] = broken[0] if broken else None
        findings[f"stable_{name}_worst"] = max(errors["stable"])
        findings[f"log_max_{name}"] = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).log().item()
    first = findings["from_float32"]
    findings["from_over_log"] = None if first is None else first - findings["log_max_float32"]
    return findings


def draw_overflow(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for n, name in enumerate(("float32", "bfloat16", "float16")):
        pairs = [(x, y) for x, y in zip(findings["logits"], findings[f"naive_{name}"], strict=True) if y is not None]
        axis.semilogy(
            [x for x, _ in pairs],
            [y + 1e-10 for _, y in pairs],
            color=f"C{n}",
            label=tr(f"naive, {name}", f"朴素写法，{name}"),
        )
        if pairs and len(pairs) < len(findings["logits"]):
            axis.plot(pairs[-1][0], pairs[-1][1] + 1e-10, "X", color=f"C{n}", markersize=10)
        axis.semilogy(findings["logits"], [y + 1e-10 for y in findings[f"stable_{name}"]], ":", color=f"C{n}")
    axis.set(xlabel=tr("largest logit", "最大的 logit"), ylabel=tr("error of the weights", "权重的误差"))
    axis.set_ylim(5e-9, 20)
    axis.legend(loc="upper right")


CLAIMS = (
    Claim(
        "variance", "softmax", ("claim 1",),
        Text("The variance of a dot product is d", "点积的方差等于维度 d"),
        Text(
            "If the entries of queries and keys have variance 1, their dot products have variance d; divided by √d, "
            "they have variance 1 again.",
            "若查询与键的各分量方差为 1，则它们点积的方差为 d；除以 √d 之后，方差恢复为 1。",
        ),
        r"\operatorname{Var}(q\cdot k)=d_k,\qquad \operatorname{Var}\!\left(\frac{q\cdot k}{\sqrt{d_k}}\right)=1",
        variance,
        (
            between("ratio", 0.97, 1.03, "variance of q·k divided by d, mean over the widths", "q·k 的方差除以 d，对各维度平均", rule="mean"),
            between("scaled", 0.97, 1.03, "variance of q·k / √d, mean over the widths", "q·k / √d 的方差，对各维度平均", rule="mean"),
            at_most("off", 0.2, "largest relative deviation at any width", "任一维度下的最大相对偏差"),
        ),
        Text(
            "At d = 64 the variance is {plain64:.1f}, and {scaled64:.3f} after scaling. No width is off by more than "
            "{off:.1%}.",
            "d = 64 时方差为 {plain64:.1f}，缩放后为 {scaled64:.3f}。各个维度下的偏差都不超过 {off:.1%}。",
        ),
        draw_variance,
        Text("Variance against width, of normal queries and keys.", "正态分布的查询与键：点积方差随维度的变化。"),
        {"widths": (16, 64, 256)},
    ),
    Claim(
        "range", "softmax", ("claim 2",),
        Text("At d = 64 nearly all dot products lie within ±24", "d = 64 时，几乎所有点积都落在 ±24 之内"),
        Text(
            "The standard deviation is √64 = 8, so ±24 is three standard deviations; 0.27% of a normal distribution lie "
            "outside.",
            "标准差为 √64 = 8，±24 正好是三倍标准差；按正态分布，应只有 0.27% 落在外面。",
        ),
        r"P\left(|q\cdot k|\le 3\sqrt{d_k}\right)\approx 0.997",
        spread,
        (
            at_least("within24", 0.995, "share within ±24", "±24 之内的比例", rule="mean"),
            at_least("within20", 0.98, "share within ±20", "±20 之内的比例", rule="mean"),
        ),
        Text(
            "{within24:.2%} lie within ±24 (normal distribution: {normal24:.2%}) and {within20:.1%} within ±20: the "
            "tails of a sum of products are slightly heavier than normal.",
            "落在 ±24 之内的有 {within24:.2%}（正态分布给出 {normal24:.2%}），±20 之内有 {within20:.1%}：乘积之和的尾部比正态分布略厚。",
        ),
        draw_spread,
        Text("Distribution of dot products at d = 64.", "维度为 64 时点积的分布。"),
        {"pairs": 80_000},
    ),
    Claim(
        "saturation", "softmax", ("claim 3",),
        Text("Without scaling, the softmax saturates and its gradient vanishes", "不缩放时，softmax 会饱和，梯度随之消失"),
        Text(
            "As d grows, the spread of unscaled scores grows, one key gets all the weight, and the gradient of the "
            "softmax vanishes. Scaling by 1/√d prevents this.",
            "随着 d 增大，未缩放的得分彼此拉开，一个键独占全部权重，softmax 的梯度趋于 0。除以 √d 可以避免这种情况。",
        ),
        r"\frac{\partial \alpha_i}{\partial s_j}=\alpha_i(\delta_{ij}-\alpha_j)\;\to\;0\qquad(\alpha\to e_m)",
        saturation,
        (
            at_most("kept_plain", 0.05, "gradient at the largest width over the smallest, unscaled", "不缩放：最大与最小维度处梯度之比"),
            at_least("last_plain", 0.9, "largest weight at the largest width, unscaled", "不缩放：最大维度处的最大权重", rule="mean"),
            between("kept_scaled", 0.5, 2, "gradient at the largest width over the smallest, scaled", "缩放后：最大与最小维度处梯度之比", rule="mean"),
            at_most("last_scaled", 0.5, "largest weight at the largest width, scaled", "缩放后：最大维度处的最大权重", rule="mean"),
        ),
        Text(
            "From the smallest to the largest width, the gradient changes by a factor of {kept_plain:.1g} without "
            "scaling and {kept_scaled:.2f} with it. At the largest width, the largest of 32 weights is {last_plain:.3f} "
            "without and {last_scaled:.2f} with scaling.",
            "从最窄到最宽，不缩放时梯度只剩原来的 {kept_plain:.1g}，缩放后为 {kept_scaled:.2f}。此时 32 个权重中最大的一个：不缩放为 {last_plain:.3f}，缩放后为 "
            "{last_scaled:.2f}。",
        ),
        draw_saturation,
        Text("The largest weight among 32 keys, and the median norm of the softmax Jacobian, against the width.", "32 个键中最大的权重，以及 softmax 雅可比矩阵的范数（中位数）随维度的变化。"),
        {"widths": (4, 64, 4096), "rows": 64},
    ),
    Claim(
        "temperature", "softmax", ("mechanism 3",),
        Text("Temperature interpolates between argmax and uniform", "温度：从 argmax 到均匀分布"),
        Text(
            "softmax(x / T) sharpens as T goes to 0, until all weight is on the best key, and flattens as T grows, "
            "until all keys have equal weight.",
            "softmax(x / T) 随 T 降向 0 而变尖，最终全部权重落在最匹配的键上；随 T 增大而变平，最终所有键权重相同。",
        ),
        r"\operatorname{softmax}(x/T)\;\to\;\begin{cases}e_{\operatorname{argmax} x} & T\to 0\\ 1/n & T\to\infty\end{cases}",
        temperature,
        (
            at_least("sharpest", 0.999, "weight of the best key at T = gap / 10", "T 为分差的 1/10 时最匹配的键的权重"),
            at_most("flattest", 0.02, "largest difference of two weights at T = 10 spreads", "T 为得分极差的 10 倍时两个权重的最大差"),
            between("rises", 1, 1, "the entropy rises with T (1: at every step)", "熵随 T 上升（1 表示每一步都是）"),
        ),
        Text(
            "What is cold or hot depends on the scores. At a tenth of the gap between the two best scores the weight of the best key is at "
            "least {sharpest:.5f}; at ten times the distance between best and worst score, weights differ by at most {flattest:.4f}, and the "
            "entropy is {entropy_last:.4f} (maximum: {uniform:.4f}).",
            "高温与低温取决于得分本身。T 为最高与次高得分之差的十分之一时，最匹配的键至少占 {sharpest:.5f}；T 为最高与最低得分之差的十倍时，各权重之差不超过 "
            "{flattest:.4f}，熵为 {entropy_last:.4f}（上限 {uniform:.4f}）。",
        ),
        draw_temperature,
        Text("The weights of eight keys at five temperatures, and their entropy; the dashed line is the entropy of the uniform distribution.", "八个键在五种温度下的权重，以及熵随温度的变化；虚线为均匀分布的熵。"),
    ),
    Claim(
        "normalizations", "softmax", ("normalization",),
        Text("Sigmoid does not dilute, sparsemax drops keys", "sigmoid 不稀释，sparsemax 舍弃键"),
        Text(
            "The softmax spreads weight over all keys, so that the weight of one matching key fades as others are added. A "
            "sigmoid gives it the same weight at any length, and sparsemax gives most others a weight of exactly 0.",
            "softmax 把权重分给所有键，因此加入其他键后，某个匹配键的权重会变小。sigmoid 在任何长度下都给它相同的权重；sparsemax 使其余大多数键的权重恰好为 0。",
        ),
        r"\frac{e^{x_i}}{\sum_j e^{x_j}},\quad \frac{1}{1+e^{-x_i-b}},\quad \max(x_i-\tau,0)",
        normalizations,
        (
            between("kept_sigmoid", 1 - 1e-9, 1 + 1e-9, "weight of the matching key, most over fewest keys, sigmoid", "键最多与最少时匹配键权重之比，sigmoid"),
            at_most("kept_softmax", 0.1, "the same, softmax", "同上，softmax", rule="mean"),
            at_least("zeros_sparsemax", 0.9, "share of weights that are 0, sparsemax", "权重为 0 的比例，sparsemax", rule="mean"),
            between("zeros_others", 0, 0, "the same, softmax and sigmoid", "同上，softmax 与 sigmoid"),
            at_most("entropy_ratio", 0.5, "entropy of sparsemax over that of softmax", "sparsemax 与 softmax 的熵之比", rule="mean"),
        ),
        Text(
            "From the fewest to the most keys, the weight of a key with logit 3 among normal ones falls to {kept_softmax:.2g} of "
            "itself under softmax and to {kept_sparsemax:.2g} under sparsemax, and stays the same under sigmoid. At the most "
            "keys sparsemax gives {zeros_sparsemax:.1%} of them no weight; the entropy is {entropy_softmax:.1f} under softmax, "
            "{entropy_sigmoid:.1f} under sigmoid (weights divided by their sum) and {entropy_sparsemax:.1f} under sparsemax. "
            "The gradient of the weight by its logit is {slope_softmax:.2g}, {slope_sigmoid:.2g} and {slope_sparsemax:.2g}.",
            "其余键的 logit 服从标准正态分布。键从最少到最多时，logit 为 3 的键的权重在 softmax 下降到原来的 {kept_softmax:.2g}，在 sparsemax 下为 "
            "{kept_sparsemax:.2g}，在 sigmoid 下不变。键最多时，sparsemax 使 {zeros_sparsemax:.1%} 的键没有权重；熵在 softmax 下为 "
            "{entropy_softmax:.1f}，在 sigmoid 下为 {entropy_sigmoid:.1f}（权重除以总和），在 sparsemax 下为 {entropy_sparsemax:.1f}。该权重对其 "
            "logit 的梯度依次为 {slope_softmax:.2g}、{slope_sigmoid:.2g} 和 {slope_sparsemax:.2g}。",
        ),
        draw_normalizations,
        Text("The weight of the matching key, the entropy of the weights, and the gradient of that weight by its logit, against the number of keys.", "匹配键的权重、权重的熵，以及该权重对其 logit 的梯度，随键的个数的变化。"),
        {"lengths": (16, 128, 1024), "rows": 50},
    ),
    Claim(
        "overflow", "softmax", ("claim 12", "stability"),
        Text("A stable softmax subtracts the maximum", "softmax 必须先减去最大值"),
        Text(
            "In float32, exp overflows for logits above about 88, and the naive softmax becomes NaN. With the maximum "
            "subtracted, it is accurate for all logits.",
            "在 float32 中，logit 超过约 88 时 exp 就会溢出，朴素的 softmax 变成 NaN。先减去最大值，则对任何 logit 都正确。",
        ),
        r"\frac{e^{x_i}}{\sum_j e^{x_j}}=\frac{e^{x_i-m}}{\sum_j e^{x_j-m}},\quad m=\max_j x_j",
        overflow,
        (
            between("from_over_log", -1, 1, "first failing logit minus the logarithm of the largest float32", "最先失效的 logit 与 float32 最大值的对数之差"),
            at_most("stable_float32_worst", 1e-6, "error with the maximum subtracted, float32", "减去最大值后的误差，float32"),
        ),
        Text(
            "The naive form fails from a logit of {from_float32} in float32 (the logarithm of the largest float is "
            "{log_max_float32:.2f}), {from_bfloat16} in bfloat16 and already {from_float16} in float16. With the "
            "maximum subtracted the error stays at {stable_float32_worst:.0e}, {stable_bfloat16_worst:.0e} and "
            "{stable_float16_worst:.0e}.",
            "朴素写法在 float32 中从 logit = {from_float32} 起失效（最大浮点数的对数为 {log_max_float32:.2f}），在 bfloat16 中从 "
            "{from_bfloat16} 起，在 float16 中从 {from_float16} 起。减去最大值后，误差始终只有 "
            "{stable_float32_worst:.0e}、{stable_bfloat16_worst:.0e} 和 {stable_float16_worst:.0e}。",
        ),
        draw_overflow,
        Text("The error of the weights against the largest logit; a cross marks the last logit before NaN. Dotted: with the maximum subtracted.", "权重误差随最大 logit 的变化；叉号为变成 NaN 之前的最后一点。点线：先减去最大值。"),
        repetitions=1,
    ),
)  # fmt: skip
