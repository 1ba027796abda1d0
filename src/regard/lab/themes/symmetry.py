"""Weights as distributions, outputs in the convex hull of the values, and permutations."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between
from regard.lab.draw import heatmap


def simplex(weights=None, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 4, 64, 32).double() * 3
    forms = {
        "dot": rg.Attention(),
        "causal": rg.Attention(mask=rg.causal()),
        "cosine": rg.Attention(score=rg.Cosine(5.0)),
        "additive": rg.Attention(score=rg.Additive(torch.randn(32).double())),
        "ALiBi": rg.Attention(bias=rg.alibi(heads=4)),
    }
    rows = {name: (weights or attend.weights)(q, k) for name, attend in forms.items()}
    empty = rg.Attention(mask=rg.window(2, 0), offset=0).weights(
        q, k[..., :32, :]
    )  # the last rows are beyond every key
    sink = rg.Attention(sink=torch.zeros(4).double()).weights(
        q / 3, k / 3
    )  # a logit that takes weight and has no value
    beyond = empty[..., 40:, :]
    return {
        "empty": beyond.sum(-1).abs().max().item(),
        "sink_most": sink.sum(-1).max().item(),
        "sink_least": sink.sum(-1).min().item(),
        "least": min(a.min().item() for a in rows.values()),
        "off": max((a.sum(-1) - 1).abs().max().item() for a in rows.values()),
        "names": list(rows),
        "tops": [a[0, 0, 40].sort(descending=True).values.cumsum(0).tolist() for a in rows.values()],
    }


def draw_simplex(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for name, row in zip(findings["names"], findings["tops"], strict=True):
        axis.plot(range(1, len(row) + 1), row, label=name)
    axis.axhline(1, color="gray", linestyle="--", linewidth=1)
    axis.set(
        xlabel=tr("keys, largest weight first", "键（按权重从大到小）"), ylabel=tr("cumulative weight", "累计权重")
    )
    axis.legend()


def hull(attend=None, queries=200, keys=9, seed=0):
    import math

    import torch

    import regard as rg

    torch.manual_seed(seed)
    q, k, v = torch.randn(queries, 2).double() * 4, torch.randn(keys, 2).double(), torch.randn(keys, 2).double()
    out = (attend or rg.attention)(q, k, v)
    angle = torch.arange(3600) * math.tau / 3600
    directions = torch.stack([angle.cos(), angle.sin()]).double()
    beyond = ((out @ directions) - (v @ directions).amax(0)).amax().item()  # farthest output minus farthest value
    return {"beyond": beyond, "values": v.tolist(), "outputs": out.tolist()}


def draw_hull(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    points = sorted(map(tuple, findings["values"]))
    outline: list[Any] = []
    for side in (points, points[::-1]):  # the lower edge, then the upper one
        edge: list[Any] = []
        for p in side:
            while len(edge) > 1 and _cross_product(edge[-2], edge[-1], p) <= 0:
                edge.pop()
            edge.append(p)
        outline += edge[:-1]
    axis.fill(*zip(*outline, strict=True), alpha=0.15, color="C0", label=tr("convex hull of the values", "值的凸包"))
    axis.plot(*zip(*findings["outputs"], strict=True), ".", color="C1", label=tr("outputs", "输出"), alpha=0.7)
    axis.plot(*zip(*findings["values"], strict=True), "o", color="C0", label=tr("values", "值"), markersize=7)
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    axis.set_aspect("equal")


def _cross_product(a: Any, b: Any, c: Any) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def equivariance(attend=None, length=24, seed=0):
    import torch

    import regard as rg

    attend = attend or rg.attention
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, length, 16).double()
    P = torch.eye(length).double()[torch.randperm(length)]
    plain, moved = attend(q, k, v), attend(P @ q, P @ k, P @ v)
    size = plain.norm()
    return {
        "equivariant": ((moved - P @ plain).norm() / size).item(),  # 0 if outputs are permuted like the inputs
        "invariant": ((moved - plain).norm() / size).item(),  # 0 if outputs do not change
        "plain": plain.tolist(), "moved": moved.tolist(), "back": (P.T @ moved).tolist(),
    }  # fmt: skip


def draw_equivariance(figure: Any, findings: Findings, tr: PickLabel) -> None:
    titles = (
        ("plain", "A(Q, K, V)"), ("moved", "A(PQ, PK, PV)"), ("back", "Pᵀ A(PQ, PK, PV)")
    )  # fmt: skip
    for axis, (name, title) in zip(figure.subplots(1, 3), titles, strict=True):
        heatmap(axis, findings[name], title)
        axis.set_ylabel(tr("query", "查询"))


def keys_values(attend=None, length=24, seed=0):
    import torch

    import regard as rg

    attend = attend or rg.attention
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, length, 16).double()
    order = torch.randperm(length)
    plain = attend(q, k, v)
    both, keys = attend(q, k[order], v[order]), attend(q, k[order], v)
    return {
        "both": ((both - plain).norm() / plain.norm()).item(),
        "keys": ((keys - plain).norm() / plain.norm()).item(),
    }


def draw_keys_values(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = (tr("keys and values together", "键与值一起置换"), tr("keys alone", "只置换键"))
    axis.barh(names, [max(findings["both"], 1e-17), findings["keys"]], color=["C0", "C1"], height=0.5)
    axis.set_xscale("log")
    axis.set(xlabel=tr("relative change of the output", "输出的相对变化"), xlim=(1e-17, 10))


def positions_break(positions=None, length=24, width=16, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    x, order = torch.randn(length, width).double(), torch.randperm(length)
    table = torch.randn(2 * length - 1, 1).double()
    ways = positions or {
        "none": rg.attention,
        "sinusoidal": lambda q, k, v: rg.attention(*(t + rg.sinusoidal(length, width).double() for t in (q, k, v))),
        "rotary": lambda q, k, v: rg.attention(
            *(rg.rotary(t[None, None], torch.arange(length))[0, 0] for t in (q, k)), v
        ),
        "ALiBi": lambda q, k, v: rg.attention(*(t.expand(8, -1, -1) for t in (q, k, v)), bias=rg.alibi(heads=8))[0],
        "relative": lambda q, k, v: rg.attention(q, k, v, bias=rg.relative(table)),
    }
    change = lambda a, b: ((a - b).norm() / b.norm()).item()
    moved = [change(attend(x[order], x[order], x[order]), attend(x, x, x)[order]) for attend in ways.values()]
    shuffled = [change(attend(x, x[order], x[order]), attend(x, x, x)) for attend in ways.values()]
    return {"names": list(ways), "equivariance": moved, "invariance": shuffled,
            "without": max(moved[0], shuffled[0]), "with": min(moved[1:] + shuffled[1:])}  # fmt: skip


def draw_positions_break(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for n, (name, label) in enumerate(
        (("equivariance", tr("all permuted: error of equivariance", "全部置换：偏离等变性")),
         ("invariance", tr("keys and values permuted: error of invariance", "置换键与值：偏离不变性")))
    ):  # fmt: skip
        axis.bar(
            [x + 0.38 * n for x in range(len(findings["names"]))],
            [max(y, 1e-17) for y in findings[name]],
            0.36,
            label=label,
        )
    axis.set_yscale("log")
    axis.set_xticks(
        [x + 0.19 for x in range(len(findings["names"]))],
        [
            tr(name, {"none": "无位置信息", "sinusoidal": "正弦", "rotary": "旋转", "relative": "相对"}.get(name, name))
            for name in findings["names"]
        ],
    )
    axis.set_ylim(1e-17, 1e5)
    axis.legend(loc="upper left", ncols=2)


def permutation_matrices(matrix=None, size=12, count=50, seed=0):
    import torch

    torch.manual_seed(seed)
    off = {"inverse": 0.0, "determinant": 0.0, "rows": 0.0, "columns": 0.0}
    signs = set()
    for _ in range(count):
        order = torch.randperm(size)
        P = torch.eye(size).double()[order] if matrix is None else matrix(size).double()
        A = torch.randn(size, size).double()
        sign = torch.linalg.det(P).item()
        errors = {
            "inverse": max(
                (P.T @ P - torch.eye(size)).abs().max().item(), (torch.linalg.inv(P) - P.T).abs().max().item()
            ),
            "determinant": abs(abs(sign) - 1),
            "rows": (P @ A - A[order]).abs().max().item(),  # row i of PA is row order[i] of A
            "columns": (A @ P - A[:, order.argsort()]).abs().max().item(),  # AP permutes columns by the inverse
        }
        off = {name: max(off[name], error) for name, error in errors.items()}
        signs.add(round(sign))
    return {**off, "worst": max(off.values()), "signs": sorted(signs), "example": P.tolist(), "a": A.tolist(),
            "pa": (P @ A).tolist(), "ap": (A @ P).tolist()}  # fmt: skip


def draw_permutation_matrices(figure: Any, findings: Findings, tr: PickLabel) -> None:
    titles = (
        ("example", "P"),
        ("a", "A"),
        ("pa", tr("PA: rows permuted", "PA：行被置换")),
        ("ap", tr("AP: columns permuted", "AP：列被置换")),
    )
    for axis, (name, title) in zip(figure.subplots(1, 4), titles, strict=True):
        heatmap(axis, findings[name], title)


CLAIMS = (
    Claim(
        "simplex", "symmetry", ("claim 4",),
        Text("Weights are non-negative and every row sums to 1", "权重非负，且每行之和为 1"),
        Text("For any score, mask or bias, a row of softmax weights is a probability distribution over the keys. There are two exceptions: a row that may attend to no key outputs 0, and with a sink (a logit without a value) the keys share less than 1.",
        "无论打分函数、掩码或偏置如何，softmax 的每一行权重都是键上的一个概率分布。例外有二：没有可关注键的行输出 0；若有汇点（只有 logit 而没有值），各键的权重之和小于 1。"),
        r"\alpha_{ij}\ge 0,\qquad \sum_j \alpha_{ij}=1",
        simplex,
        (
            at_least("least", 0, "smallest weight", "最小的权重"),
            at_most("off", 1e-12, "deviation of row sums from 1", "各行之和与 1 的偏差"),
            between("empty", 0, 0, "sum of a row without keys", "没有可关注键的行之和"),
            between("sink_most", 0, 1 - 1e-6, "largest sum of a row with a sink", "带汇点的行的最大权重之和"),
        ),
        Text("Over five kinds of attention the smallest weight is {least:.1e}, and row sums differ from 1 by at most {off:.1e}. Rows without keys sum to {empty:g}; with a sink, rows sum to {sink_least:.3f} to {sink_most:.3f}.", "在五种注意力中，最小的权重为 {least:.1e}，各行之和与 1 的偏差不超过 {off:.1e}。没有可关注键的行之和为 {empty:g}；带汇点时，各行之和在 {sink_least:.3f} 与 {sink_most:.3f} 之间。"),
        draw_simplex,
        Text("Cumulative weights of one row, largest first: they end at 1.", "一行权重从大到小累加：最终都到达 1。"),
    ),
    Claim(
        "hull", "symmetry", ("claim 4",),
        Text("The output lies in the convex hull of the values", "输出位于值的凸包之内"),
        Text("A weighted mean lies in the convex hull of its points: in no direction is an output farther out than the outermost value.", "加权平均位于各点的凸包之内：沿任何方向，输出都不会比最外侧的值更远。"),
        r"o_i=\sum_j\alpha_{ij}v_j\in\operatorname{conv}\{v_1,\dots,v_m\}",
        hull,
        (at_most("beyond", 1e-12, "distance of an output beyond the hull", "输出越出凸包的距离"),),
        Text("Over 3,600 directions, the outermost output is {beyond:.1e} beyond the hull (negative: inside).", "在 3600 个方向上，最靠外的输出超出凸包 {beyond:.1e}（负数表示在内部）。"),
        draw_hull,
        Text("200 outputs, and the nine values of which they are weighted means.", "200 个输出，以及它们所平均的九个值。"),
    ),
    Claim(
        "equivariance", "symmetry", ("claim 5",),
        Text("Attention is permutation equivariant", "注意力具有置换等变性"),
        Text("Permuting the tokens permutes the outputs in the same way and changes nothing else.",
        "把词元置换，输出就以同样的方式被置换，除此之外什么也不变。"),
        r"\operatorname{Attention}(PQ,PK,PV)=P\,\operatorname{Attention}(Q,K,V)",
        equivariance,
        (at_most("equivariant", 1e-12, "relative difference of the two sides", "等式两边的相对差"),),
        Text("The two sides differ by {equivariant:.1e} of their size in float64.",
        "在 float64 下，等式两边的相对差为 {equivariant:.1e}。"),
        draw_equivariance,
        Text("The output, the output of the permuted input, and the latter with its rows in the original order.",
        "输出、输入置换后的输出，以及把后者的行还原之后。"),
    ),
    Claim(
        "invariance", "symmetry", ("claim 5",),
        Text("“Attention is permutation invariant”", "“注意力具有置换不变性”"),
        Text("A source has this heading above the equation of equivariance. Invariance would mean that the output does not change at all.", "有资料在等变性的公式上方写了这样的标题。若真是不变性，输出应当完全不变。"),
        r"\operatorname{Attention}(PQ,PK,PV)\overset{?}{=}\operatorname{Attention}(Q,K,V)",
        equivariance,
        (at_most("invariant", 1e-12, "relative change of the output", "输出的相对变化"),),
        Text("The output changes by {invariant:.2f} of its size. Attention is equivariant (to {equivariant:.1e}).",
        "输出的相对变化为 {invariant:.2f}。注意力具有的是等变性（偏差 {equivariant:.1e}）。"),
        draw_equivariance,
        Text("The left and middle pictures would be the same if attention were invariant.", "若注意力真具有不变性，左图与中图应当相同。"),
    ),
    Claim(
        "keys-values", "symmetry", ("claim 5",),
        Text("Permuting keys and values together changes nothing", "键与值一起置换，输出不变"),
        Text("This is the invariance that attention has: keys and values are an unordered set.", "这才是注意力真正具有的不变性：键与值是没有次序的集合。"),
        r"\operatorname{Attention}(Q,PK,PV)=\operatorname{Attention}(Q,K,V)",
        keys_values,
        (
            at_most("both", 1e-12, "relative change, keys and values permuted together", "键与值一起置换时的相对变化"),
            at_least("keys", 0.01, "relative change, keys permuted alone", "只置换键时的相对变化"),
        ),
        Text("Permuting keys and values together changes the output by {both:.1e}; permuting keys alone changes it by {keys:.2f}.",
        "键与值一起置换，输出变化 {both:.1e}；只置换键，变化 {keys:.2f}。"),
        draw_keys_values,
        Text("Relative change of the output.", "输出的相对变化。"),
    ),
    Claim(
        "positions-break", "symmetry", ("claim 5", "mechanism 7"),
        Text("Positions break both symmetries", "位置信息打破这两种对称"),
        Text("With sinusoidal, rotary, ALiBi or relative positions, order matters.",
        "无论正弦、旋转、ALiBi 还是相对位置：加入之后，顺序就起作用了。"),
        r"f(x)=\operatorname{Attention}(x+p):\quad f(Px)\ne P f(x)",
        positions_break,
        (
            at_most("without", 1e-12, "violation of a symmetry without positions", "没有位置信息时对称性的偏差"),
            at_least("with", 0.01, "least violation with positions", "加入位置信息后的最小偏差"),
        ),
        Text("Without positions, both symmetries hold to {without:.1e}; with positions, they are violated by at least {with:.2f}.",
        "没有位置信息时，偏离对称性不超过 {without:.1e}；加入之后，至少偏离 {with:.2f}。"),
        draw_positions_break,
        Text("Error of equivariance and invariance for no positions and four kinds of positions.",
        "五种位置方案下，输出偏离等变性与不变性的程度。"),
    ),
    Claim(
        "permutation-matrices", "symmetry", ("claim 6",),
        Text("Permutation matrices are orthogonal, with determinant ±1", "置换矩阵是正交矩阵，行列式为 ±1"),
        Text("PᵀP = I, so the inverse is the transpose; PA permutes the rows of A, AP its columns.",
        "PᵀP = I，故逆矩阵就是转置；PA 置换 A 的行，AP 置换 A 的列。"),
        r"P^\top P=I,\quad P^{-1}=P^\top,\quad \det P=\pm 1",
        permutation_matrices,
        (at_most("worst", 1e-9, "largest error of the four properties", "四条性质的最大误差"),),
        Text("Over 50 random permutations the largest error is {worst:.1e}; the determinants are {signs}. (Row i of PA is row π(i) of A; the same P permutes columns by the inverse.)", "在 50 个随机置换中，各项偏差都不超过 {worst:.1e}；出现的行列式为 {signs}。（PA 的第 i 行是 A 的第 π(i) 行；同一个 P 对列的作用方向相反。）"),
        draw_permutation_matrices,
        Text("A permutation matrix, a matrix, and their two products.", "一个置换矩阵、一个矩阵，以及它们的两种乘积。"),
    ),
)  # fmt: skip
