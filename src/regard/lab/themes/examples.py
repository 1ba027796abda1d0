"""Printed worked examples, recomputed."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most


def example_weights(attend=None, seed=0):
    import torch

    import regard as rg

    q, k = torch.tensor([[1.0, 2, 3]]), torch.tensor([[4.0, 5, 6], [7, 8, 9]])
    v = torch.tensor([[10.0, 11, 12], [13, 14, 15]])
    q, k, v = q.double(), k.double(), v.double()
    weights = rg.Attention().weights(q, k)[0]
    output = (attend or rg.attention)(q, k, v)[0]
    printed = torch.tensor([0.387, 0.613]).double()
    return {
        "scaled": (q @ k.T / 3**0.5)[0].tolist(), "weights": weights.tolist(), "output": output.tolist(),
        "printed_output": [12.74, 13.51, 14.28], "printed_weights": printed.tolist(),
        "from_printed": (printed @ v).tolist(),  # output for the printed weights
        "off": (output - torch.tensor([12.74, 13.51, 14.28])).abs().max().item(),
        "small": weights[0].item(), "first": output[0].item(),
    }  # fmt: skip


def draw_example_weights(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, right = figure.subplots(1, 2)
    bars(left, ["α₁", "α₂"], findings["printed_weights"], findings["weights"], tr)
    bars(right, ["o₁", "o₂", "o₃"], findings["printed_output"], findings["output"], tr)
    right.plot(
        [0.19, 1.19, 2.19],
        findings["from_printed"],
        "D",
        color="C4",
        zorder=5,
        label=tr("from the printed weights", "由印出的权重算得"),
    )
    right.set_ylim(11, 15.6)
    left.legend()
    right.legend()


def bars(axis: Any, names: list[str], printed: list[float], measured: list[float], tr: PickLabel) -> None:
    """Draw printed and measured numbers next to each other."""
    axis.bar([n for n in range(len(names))], printed, 0.36, color="C1", label=tr("as printed", "原文"))
    axis.bar([n + 0.38 for n in range(len(names))], measured, 0.36, color="C0", label=tr("measured", "实测"))
    axis.set_xticks([n + 0.19 for n in range(len(names))], names)


def example_softmax_3(softmax=None, seed=0):
    import torch

    x, printed = torch.tensor([3.0, -3.0]).double(), torch.tensor([0.95, 0.05]).double()
    right = (softmax or torch.softmax)(x, -1)
    return {"x": x.tolist(), "printed": printed.tolist(), "right": right.tolist(),
            "off": (right - printed).abs().max().item(), "a": right[0].item(), "b": right[1].item()}  # fmt: skip


def example_softmax_8(softmax=None, seed=0):
    import torch

    x, printed = torch.tensor([8.0, 2.0, 1.0]).double(), torch.tensor([0.87, 0.09, 0.04]).double()
    right = (softmax or torch.softmax)(x, -1)
    return {"x": x.tolist(), "printed": printed.tolist(), "right": right.tolist(),
            "off": (right - printed).abs().max().item(), "a": right[0].item(), "b": right[1].item(),
            "c": right[2].item()}  # fmt: skip


def example_softmax_2(softmax=None, seed=0):
    import torch

    x, printed = torch.tensor([2.5, 0.0, -2.5]).double(), torch.tensor([0.92, 0.08, 0.0]).double()
    right = (softmax or torch.softmax)(x, -1)
    return {"x": x.tolist(), "printed": printed.tolist(), "right": right.tolist(),
            "off": (right - printed).abs().max().item(), "a": right[0].item(), "b": right[1].item(),
            "c": right[2].item()}  # fmt: skip


def draw_softmax(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    bars(axis, [f"x = {x:g}" for x in findings["x"]], findings["printed"], findings["right"], tr)
    axis.set_ylabel(tr("weight", "权重"))
    axis.legend()


def unnormalised(weights=None, seed=0):
    import torch

    torch.manual_seed(seed)
    scores = torch.linspace(-3, 3, 61).double()
    printed = weights or (lambda s: s * s.exp())  # (q·k/√d) · exp(q·k/√d), as the source prints it
    rows = printed(torch.randn(1000, 8).double())
    return {"least": rows.min().item(), "sum_least": rows.sum(-1).min().item(), "sum_most": rows.sum(-1).max().item(),
            "off": (rows.sum(-1) - 1).abs().max().item(), "scores": scores.tolist(),
            "printed": printed(scores).tolist(),
            "right": torch.softmax(scores, -1).tolist(), "exp": scores.exp().tolist()}  # fmt: skip


def draw_unnormalised(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    axis.plot(findings["scores"], findings["printed"], color="C1", label=tr("as printed: s·exp(s)", "原文：s·exp(s)"))
    axis.plot(
        findings["scores"],
        findings["exp"],
        color="C0",
        label=tr("softmax, before it is divided by its sum: exp(s)", "softmax（除以总和之前）：exp(s)"),
    )
    axis.axhline(0, color="gray", linewidth=0.8)
    axis.set(xlabel=tr("score s", "得分 s"), ylim=(-3, 12))
    axis.legend()


def projected_query(project=None, d_model=32, d_key=8, tokens=64, seed=0):
    import torch

    import regard as rg

    def best_fit(source, wanted):  # the W for which source @ W is nearest to the keys or values of a layer
        fitted = source @ torch.linalg.lstsq(source, wanted).solution
        return ((fitted - wanted).norm() / wanted.norm()).item()

    torch.manual_seed(seed)
    findings = {"parts": ["keys", "values"]}
    for name, width in (("square", d_model), ("narrow", d_key)):
        layer = rg.nn.SelfAttention(d_model=d_model, d_key=width, d_value=width).double()
        x = torch.randn(tokens, d_model).double()
        projected = (project or (lambda x, layer: x @ layer.query.weight.T))(x, layer)
        findings[name] = [best_fit(projected, x @ part.weight.T) for part in (layer.key, layer.value)]
        findings[f"worst {name}"] = max(findings[name])
    return findings


def draw_projected_query(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for n, (name, label) in enumerate(
        (
            ("square", tr("W_q square and invertible", "W_q 为可逆方阵")),
            ("narrow", tr("W_q narrower than the input", "W_q 比输入窄")),
        )
    ):
        axis.bar([x + 0.38 * n for x in range(2)], [max(y, 1e-17) for y in findings[name]], 0.36, label=label)
    axis.set_yscale("log")
    axis.set_ylim(1e-17, 10)
    axis.set_xticks([0.19, 1.19], [tr("keys", "键"), tr("values", "值")])
    axis.set_ylabel(tr("relative error of the best W", "最优 W 的相对误差"))
    axis.legend()


CLAIMS = (
    Claim(
        "example-weights", "examples", ("example 1",),
        Text("A worked example with two keys", "两个键的算例"),
        Text("Printed: q = [1,2,3], keys [4,5,6] and [7,8,9], values [10,11,12] and [13,14,15], d = 3 give weights of about 0.387 and 0.613 and the output [12.74, 13.51, 14.28].", "原文：q = [1,2,3]，键为 [4,5,6] 与 [7,8,9]，值为 [10,11,12] 与 [13,14,15]，d = 3；权重约为 0.387 与 0.613，输出为 [12.74, 13.51, 14.28]。"),
        r"\alpha=\operatorname{softmax}\!\left(\frac{32}{\sqrt3},\frac{50}{\sqrt3}\right)",
        example_weights,
        (at_most("off", 0.01, "largest deviation from the printed output", "与印出的输出的最大偏差"),),
        Text("The scaled scores are {scaled[0]:.3f} and {scaled[1]:.3f}, the weights {weights[0]:.2e} and {weights[1]:.5f}, the output [{output[0]:.5f}, {output[1]:.5f}, {output[2]:.5f}]. The printed weights do not match the printed output either; they would result in [{from_printed[0]:.2f}, {from_printed[1]:.2f}, {from_printed[2]:.2f}].", "缩放后的得分为 {scaled[0]:.3f} 与 {scaled[1]:.3f}，权重为 {weights[0]:.2e} 与 {weights[1]:.5f}，输出为 [{output[0]:.5f}, {output[1]:.5f}, {output[2]:.5f}]。印出的权重甚至得不出印出的输出，而应得 [{from_printed[0]:.2f}, {from_printed[1]:.2f}, {from_printed[2]:.2f}]。"),
        draw_example_weights,
        Text("Weights and output as printed and as measured; diamonds: output for the printed weights.",
        "权重与输出：原文与实测；菱形为由印出的权重算得的输出。"),
        repetitions=1,
    ),
    *(
        Claim(
            name, "examples", (of,),
            Text(f"softmax({x}) = {printed}", f"softmax({x}) = {printed}"),
            Text("As printed in a source.", "某资料中印出的数值。"),
            rf"\operatorname{{softmax}}({x})",
            measure,
            (
                at_most("off", 0.01, "largest deviation from a printed number: one unit of the last digit", "与印出数值的最大偏差：末位数字的一个单位"),
                at_most("off", 0.005, "the same: half a unit, as rounding allows", "同上：舍入所允许的半个单位", part=True),
            ),
            Text(f"The result is {right}; the printed numbers are off by up to {{off:.3f}}{en}.",
            f"应为 {right}；印出的数值最多偏差 {{off:.3f}}{zh}。"),
            draw_softmax,
            Text("As printed and as measured.", "原文与实测。"),
            repetitions=1,
        )
        for name, of, x, printed, right, measure, en, zh in (
            ("example-softmax-3", "example 2", "[3, -3]", "[0.95, 0.05]", "[{a:.4f}, {b:.4f}]", example_softmax_3, "",
            ""),
            ("example-softmax-8", "example 3", "[8, 2, 1]", "[0.87, 0.09, 0.04]", "[{a:.4f}, {b:.4f}, {c:.4f}]",
            example_softmax_8, "", ""),
            ("example-softmax-2", "example 4", "[2.5, 0, -2.5]", "[0.92, 0.08, 0.00]", "[{a:.3f}, {b:.3f}, {c:.3f}]",
            example_softmax_2, ", about one unit of the last digit printed", "，约为末位数字的一个单位"),
        )
    ),
    Claim(
        "example-unnormalised", "examples", ("example 5",),
        Text("Weights as score times exponential, not normalised", "权重写成“得分乘以指数”，且未归一化"),
        Text("A source prints α = (q·k/√d) · exp(q·k/√d). Weights must be a distribution: non-negative, summing to 1.",
        "某资料印作 α = (q·k/√d) · exp(q·k/√d)。而权重应是一个分布：非负，且和为 1。"),
        r"\alpha_{ij}\overset{?}{=}\frac{q_i\cdot k_j}{\sqrt d}\,\exp\!\left(\frac{q_i\cdot k_j}{\sqrt d}\right)",
        unnormalised,
        (at_least("least", 0, "smallest weight as printed", "按原文算得的最小权重"), at_most("off", 1e-9, "deviation of row sums from 1", "各行之和与 1 的偏差")),
        Text("The printed form is as small as {least:.3f}, and its rows sum to values from {sum_least:.2f} to {sum_most:.0f}. The correct form is exp(s) divided by its sum over the keys.", "印出的形式最低可达 {least:.3f}，每行之和可为 {sum_least:.2f} 至 {sum_most:.0f} 之间的任何值。正确的是 exp(s) 再除以它对所有键的总和。"),
        draw_unnormalised,
        Text("The printed form is negative for negative scores.", "得分为负时，印出的形式也为负。"),
    ),
    Claim(
        "example-projection", "examples", ("example 6",),
        Text("“Keys and values are computed from the projected query”", "“键与值由投影后的查询计算”"),
        Text("With a square, invertible W_Q this is only another way to write a layer: W_Q⁻¹W_K in place of W_K. With a W_Q that is narrower than the input, as in every layer with several heads, keys and values lose what it discards.",
        "若 W_Q 为可逆方阵，这只是同一层的另一种写法：以 W_Q⁻¹W_K 代替 W_K。若 W_Q 比输入窄（多头层皆如此），它所丢弃的内容，键与值也就得不到。"),
        r"K\overset{?}{=}(XW_Q)W_K,\; V\overset{?}{=}(XW_Q)W_V",
        projected_query,
        (
            at_most("worst square", 1e-8, "relative error of the best W, W_Q square", "最优 W 的相对误差，W_Q 为方阵"),
            at_most("worst narrow", 1e-8, "relative error of the best W, W_Q narrower than the input", "最优 W 的相对误差，W_Q 比输入窄", part=True),
        ),
        Text("For a square W_Q there is a W that gives the keys and values of any layer, to {worst square:.0e}. For a W_Q from 32 to 8 numbers the best W leaves an error of at least {worst narrow:.0%}. Keys and values are computed from the input itself.", "W_Q 为方阵时，总有一个 W 能给出任意一层的键与值（误差 {worst square:.0e}）。W_Q 由 32 维降到 8 维时，最优的 W 仍有至少 {worst narrow:.0%} 的误差。键与值应由输入本身算得。"),
        draw_projected_query,
        Text("How well keys and values of a layer can be computed from its queries.", "由一层的查询能在多大程度上算得它的键与值。"),
    ),
)  # fmt: skip
