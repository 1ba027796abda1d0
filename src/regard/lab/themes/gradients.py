"""Gradients with respect to values and to distant inputs."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between
from regard.lab.draw import heatmap


def gradient_path(attend=None, length=24, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    q, k, v = torch.randn(3, length, 16).double()
    v.requires_grad_()
    out = (attend or rg.attention)(q, k, v)
    upstream = torch.randn_like(out)  # dL/dout
    (gradient,) = torch.autograd.grad(out, v, upstream)
    weights = rg.Attention().weights(q, k)
    expected = weights.T @ upstream  # sum over i of a_ij dL/dout_i
    return {"off": ((gradient - expected).norm() / expected.norm()).item(),
            "gradient": gradient.tolist(), "expected": expected.tolist(), "weights": weights.T.tolist()}  # fmt: skip


def draw_gradient_path(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, middle, right = figure.subplots(1, 3)
    heatmap(left, findings["weights"], tr("weights, transposed", "权重的转置"))
    heatmap(middle, findings["expected"], "αᵀ · dL/dout")
    heatmap(right, findings["gradient"], tr("dL/dV from autograd", "自动求导得到的 dL/dV"))


def gradient_distance(reader=None, length=64, width=64, repeats=4, seed=0):
    import math

    import torch

    import regard as rg
    from regard.lab.complexity import slope

    def recurrent(kind, gain=1.0, forget=0.0):
        net = kind(width, width, batch_first=True)
        with torch.no_grad():
            net.weight_hh_l0 *= gain
            if forget:
                net.bias_ih_l0[width : 2 * width] = forget  # common initialisation of an LSTM
        return lambda x: net(x)[0]

    makers = reader or {
        "attention": lambda: rg.nn.SelfAttention(d_model=width, d_key=width, d_value=width),
        "RNN": lambda: recurrent(torch.nn.RNN),
        "RNN, larger weights": lambda: recurrent(torch.nn.RNN, gain=3.5),
        "LSTM": lambda: recurrent(torch.nn.LSTM),
        "LSTM, forget bias 2": lambda: recurrent(torch.nn.LSTM, forget=2.0),
        "GRU": lambda: recurrent(torch.nn.GRU),
    }
    torch.manual_seed(seed)
    findings = {"distances": list(range(length))}
    for name, make in makers.items():
        logs = []
        for _ in range(repeats):
            x = (torch.randn(4, length, width) * 0.1).requires_grad_()
            (gradient,) = torch.autograd.grad((make()(x)[:, -1] * torch.randn(width)).sum(), x)
            logs.append(gradient.double().norm(dim=-1).clamp_min(1e-300).log().mean(0).flip(0))  # nearest first
        mean = torch.stack(logs).mean(0)
        measurable = [
            d for d in range(1, length) if mean[d] - mean[1] > -60
        ]  # beyond float32's digits there is only noise
        findings[name] = (mean - mean[0]).exp().tolist()
        findings["rate " + name] = math.exp(
            slope(measurable, [mean[d].item() for d in measurable]).power
        )  # factor per step
    gated = ("LSTM", "LSTM, forget bias 2", "GRU")
    return findings | {"slower": min(findings["rate " + name] for name in gated) - findings["rate RNN"]}


def draw_gradient_distance(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = {
        "attention": "注意力",
        "RNN, larger weights": "RNN（更大的权重）",
        "LSTM, forget bias 2": "LSTM（遗忘偏置 2）",
    }
    for key in findings:
        if key.startswith("rate "):
            name = key.removeprefix("rate ")
            axis.semilogy(findings["distances"], findings[name], label=tr(name, names.get(name, name)))
    axis.set(
        xlabel=tr("distance from the last token", "与最后一个词元的距离"),
        ylabel=tr("gradient, nearest = 1", "梯度（最近处 = 1）"),
        ylim=(1e-20, 1e8),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def gradient_dilution(attend=None, lengths=(16, 64, 256, 1024), width=32, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import growth

    torch.manual_seed(seed)
    findings = {"lengths": list(lengths)}
    for name, sharpness in (("flat", 1.0), ("peaked", 6.0)):
        medians = []
        for n in lengths:
            q, k, v = (
                torch.randn(64, 1, width).double(),
                torch.randn(64, n, width).double(),
                torch.randn(64, n, width).double(),
            )
            v.requires_grad_()
            out = (attend or rg.attention)(sharpness * q, k, v)  # the last position of 64 sequences
            (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out) / width**0.5)
            medians.append(gradient.norm(dim=-1).median().item())
        findings |= {
            name: medians,
            "kept " + name: medians[-1] / medians[0],
            "power " + name: growth(lengths, medians).power,
        }
    return findings | {"last": findings["peaked"][-1]}


def draw_gradient_dilution(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for name, label in (
        ("flat", tr("scores of variance 1", "得分方差为 1")),
        ("peaked", tr("scores six times larger", "得分大六倍")),
    ):
        axis.loglog(findings["lengths"], [max(y, 1e-30) for y in findings[name]], "o-", label=label)
    axis.set_xticks(findings["lengths"], [str(n) for n in findings["lengths"]])
    axis.minorticks_off()
    axis.set(xlabel=tr("length n", "长度 n"), ylabel=tr("median gradient of a value", "值的梯度（中位数）"))
    axis.legend()


CLAIMS = (
    Claim(
        "gradient-path", "gradients", ("claim 7",),
        Text("The gradient of a value is the weighted sum of the outputs' gradients", "值的梯度是各输出梯度的加权和"),
        Text("Every output is connected to every value in one step, whose derivative is the weight.", "从每个输出到每个值只有一步，系数就是权重。"),
        r"\frac{\partial L}{\partial V_j}=\sum_i \alpha_{ij}\,\frac{\partial L}{\partial o_i}",
        gradient_path,
        (at_most("off", 1e-12, "relative difference from the formula", "与公式的相对差"),),
        Text("The gradient from autograd differs from the formula by {off:.1e}.", "自动求导的结果与公式相差 {off:.1e}。"),
        draw_gradient_path,
        Text("Weights, and the gradient of the values from the formula and from autograd.", "权重，以及由公式与自动求导得到的值的梯度。"),
    ),
    Claim(
        "gradient-distance", "gradients", ("claim 7",),
        Text("Gradients do not fade with distance in attention; in an RNN they do, exponentially",
        "注意力中的梯度不随距离衰减；RNN 中则指数衰减"),
        Text("For attention the gradient of the last output is flat over the distance. For a plain RNN it decays (or, with larger weights, grows) exponentially; for LSTM and GRU it decays more slowly.", "在注意力中，最后一个输出的梯度与距离无关。在普通 RNN 中，它指数衰减（权重较大时则指数增长）；在 LSTM 与 GRU 中衰减较慢。"),
        r"\left\lVert\frac{\partial o_n}{\partial x_{n-t}}\right\rVert\propto \rho^{\,t}",
        gradient_distance,
        (
            between("rate attention", 0.99, 1.01, "factor per step, attention", "每一步的倍数，注意力", rule="mean"),
            at_most("rate RNN", 0.9, "factor per step, RNN", "每一步的倍数，RNN", rule="mean"),
            at_least("rate RNN, larger weights", 1.02, "factor per step, RNN with larger weights", "每一步的倍数，权重较大的 RNN", rule="mean"),
            at_least("slower", 0.01, "least factor of a gated network minus that of the RNN", "门控网络的最小倍数与 RNN 之差", rule="mean"),
        ),
        Text("Each step multiplies the gradient by {rate attention:.3f} in attention, {rate RNN:.2f} in an RNN ({rate RNN, larger weights:.2f} with larger weights), {rate GRU:.2f} in a GRU and {rate LSTM:.2f} in an LSTM with torch's initialisation, {rate LSTM, forget bias 2:.2f} with an open forget gate: how much a gated network remembers depends on its gates.", "每一步，梯度在注意力中乘以 {rate attention:.3f}，在 RNN 中乘以 {rate RNN:.2f}（权重较大时为 {rate RNN, larger weights:.2f}），在 GRU 中乘以 {rate GRU:.2f}；在 LSTM 中，按 torch 默认初始化为 {rate LSTM:.2f}，遗忘门打开时为 {rate LSTM, forget bias 2:.2f}：门控网络能记住多少，取决于它的门。"),
        draw_gradient_distance,
        Text("The gradient of the last output with respect to inputs before it, at the start of training; all of width 64.", "训练开始时，最后一个输出对之前各输入的梯度；宽度均为 64。"),
        {"length": 32, "width": 16, "repeats": 1},
    ),
    Claim(
        "gradient-dilution", "gradients", ("claim 7",),
        Text("“With attention no gradient vanishes”", "“注意力没有梯度消失”"),
        Text("It does not fade with the distance, but it is shared: the weights of a row sum to 1, so among n keys the gradient of one is about 1/n of the whole, and if the weights are peaked most keys get next to none.", "梯度不随距离衰减，却要由各键分摊：一行的权重之和为 1，因此 n 个键中每个约得 1/n；若权重集中，多数键几乎得不到。"),
        r"\left\lVert\frac{\partial o_i}{\partial v_j}\right\rVert=\alpha_{ij},\qquad \sum_j\alpha_{ij}=1",
        gradient_dilution,
        (
            at_least("kept flat", 0.5, "median gradient at 1,024 keys over that at 16, scores of variance 1", "1024 个与 16 个键时梯度中位数之比，得分方差为 1"),
            at_least("last", 1e-6, "median gradient at 1,024 keys, scores six times larger", "1024 个键时梯度的中位数，得分大六倍"),
        ),
        Text("From 16 to 1,024 keys the median gradient of a value falls to at most {kept flat:.3f} of itself, like n^{power flat:.2f}. With peaked weights it is at most {last:.0e}.", "键由 16 个增至 1024 个，值的梯度的中位数至多剩下原来的 {kept flat:.3f}，按 n^{power flat:.2f} 变化。权重集中时至多只有 {last:.0e}。"),
        draw_gradient_dilution,
        Text("The median over all keys of the gradient of one output by a value, against the number of keys.", "一个输出对值的梯度（对所有键取中位数）随键数的变化。"),
    ),
)  # fmt: skip
