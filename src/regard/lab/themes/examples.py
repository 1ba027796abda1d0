"""Printed worked examples, recomputed."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text, grade


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
    axis.set(xlabel=tr("score s", "分数 s"), ylim=(-3, 12))
    axis.legend()


def projected_query(layer=None, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    layer = layer or rg.nn.SelfAttention(d_model=32, d_key=8, d_value=8)
    x = torch.randn(1, 12, 32)
    # Two inputs with the same queries: x, and x moved within the null space of W_q.
    null_space = torch.linalg.svd(layer.query.weight.detach()).Vh[8:]  # directions that the query projection maps to 0
    moved = x + torch.randn(1, 12, len(null_space)) @ null_space
    same_queries = (layer.query(moved) - layer.query(x)).norm() / layer.query(x).norm()
    keys, values = ((part(moved) - part(x)).norm() / part(x).norm() for part in (layer.key, layer.value))
    output = (layer(moved) - layer(x)).norm() / layer(x).norm()
    return {"queries": same_queries.item(), "keys": keys.item(), "values": values.item(), "output": output.item()}


def draw_projected_query(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = (tr("queries", "查询"), tr("keys", "键"), tr("values", "值"), tr("output", "输出"))
    axis.bar(
        names, [findings[name] for name in ("queries", "keys", "values", "output")], 0.5, color=["C0", "C1", "C1", "C1"]
    )
    axis.set_ylabel(tr("relative change", "相对变化"))


CLAIMS = (
    Claim(
        "example-weights", "examples", ("example 1",),
        Text("A worked example with two keys", "两个键的算例"),
        Text("Printed: q = [1,2,3], keys [4,5,6] and [7,8,9], values [10,11,12] and [13,14,15], d = 3 give weights of about 0.387 and 0.613 and the output [12.74, 13.51, 14.28].", "原文：q = [1,2,3]，键为 [4,5,6] 与 [7,8,9]，值为 [10,11,12] 与 [13,14,15]，d = 3；权重约为 0.387 与 0.613，输出为 [12.74, 13.51, 14.28]。"),
        r"\alpha=\operatorname{softmax}\!\left(\frac{32}{\sqrt3},\frac{50}{\sqrt3}\right)",
        example_weights,
        lambda findings: grade(findings["off"] < 0.01, findings["off"] < 0.1),
        Text("The scaled scores are {scaled[0]:.3f} and {scaled[1]:.3f}, the weights {weights[0]:.2e} and {weights[1]:.5f}, the output [{output[0]:.5f}, {output[1]:.5f}, {output[2]:.5f}]. The printed weights do not match the printed output either; they would result in [{from_printed[0]:.2f}, {from_printed[1]:.2f}, {from_printed[2]:.2f}].", "缩放后的分数为 {scaled[0]:.3f} 与 {scaled[1]:.3f}，权重为 {weights[0]:.2e} 与 {weights[1]:.5f}，输出为 [{output[0]:.5f}, {output[1]:.5f}, {output[2]:.5f}]。印出的权重甚至得不出印出的输出，而应得 [{from_printed[0]:.2f}, {from_printed[1]:.2f}, {from_printed[2]:.2f}]。"),
        draw_example_weights,
        Text("Weights and output as printed and as measured; diamonds: output for the printed weights.",
        "权重与输出：原文与实测；菱形为由印出的权重算得的输出。"),
    ),
    *(
        Claim(
            name, "examples", (of,),
            Text(f"softmax({x}) = {printed}", f"softmax({x}) = {printed}"),
            Text("As printed in a source.", "某资料中印出的数值。"),
            rf"\operatorname{{softmax}}({x})",
            measure,
            # rounding allows half a unit of the last printed digit
            lambda findings: grade(findings["off"] <= 0.005, findings["off"] <= 0.01),
            Text(f"The result is {right}; the printed numbers are off by up to {{off:.3f}}{en}.",
            f"应为 {right}；印出的数值最多偏差 {{off:.3f}}{zh}。"),
            draw_softmax,
            Text("As printed and as measured.", "原文与实测。"),
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
        Text("Weights as score times exponential, not normalised", "权重写成“分数乘以指数”，且未归一化"),
        Text("A source prints α = (q·k/√d) · exp(q·k/√d). Weights must be a distribution: non-negative, summing to 1.",
        "某资料印作 α = (q·k/√d) · exp(q·k/√d)。而权重应是一个分布：非负，且和为 1。"),
        r"\alpha_{ij}\overset{?}{=}\frac{q_i\cdot k_j}{\sqrt d}\,\exp\!\left(\frac{q_i\cdot k_j}{\sqrt d}\right)",
        unnormalised,
        lambda findings: grade(findings["least"] >= 0 and findings["off"] < 1e-9),
        Text("The printed form is as small as {least:.3f}, and its rows sum to values from {sum_least:.2f} to {sum_most:.0f}. The correct form is exp(s) divided by its sum over the keys.", "印出的形式最低可达 {least:.3f}，每行之和可为 {sum_least:.2f} 至 {sum_most:.0f} 之间的任何值。正确的是 exp(s) 再除以它对所有键的总和。"),
        draw_unnormalised,
        Text("The printed form is negative for negative scores.", "分数为负时，印出的形式也为负。"),
    ),
    Claim(
        "example-projection", "examples", ("example 6",),
        Text("“Keys and values are computed from the projected query”", "“键与值由投影后的查询计算”"),
        Text("Then two inputs with the same queries would have the same keys, values and output.",
        "若真如此，查询相同的两个输入就应有相同的键、值和输出。"),
        r"K\overset{?}{=}(XW_Q)W_K,\; V\overset{?}{=}(XW_Q)W_V",
        projected_query,
        lambda findings: grade(findings["queries"] < 1e-4 and max(findings["keys"], findings["values"], findings["output"]) < 1e-3),
        Text("Two inputs whose queries differ by {queries:.0e} have keys that differ by {keys:.2f}, values by {values:.2f} and outputs by {output:.2f}: keys and values are computed from the input itself.", "两个输入的查询只差 {queries:.0e}，键却相差 {keys:.2f}，值相差 {values:.2f}，输出相差 {output:.2f}：键与值来自输入本身。"),
        draw_projected_query,
        Text("Relative change of each part of a layer when the input is moved within the null space of the query projection.",
        "沿着查询投影“看不见”的方向移动输入时，各部分的相对变化。"),
    ),
)  # fmt: skip
