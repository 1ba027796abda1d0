"""Why attention was added to recurrent networks: the fixed vector between two of them, and the product of their Jacobians."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most


def bottleneck(copy=None, lengths=(2, 4, 8, 16, 24), width=32, steps=250, seed=0):
    from regard.lab.encoder_decoder import accuracies

    copy = copy or accuracies  # trains a GRU encoder-decoder to copy rows of symbols, and tests it
    findings = {"lengths": list(lengths)}
    for name, attend in (("vector", False), ("attention", True)):
        findings[name] = copy(attend, lengths, width=width, steps=steps, seed=seed)
        findings |= {f"short {name}": findings[name][0], f"long {name}": findings[name][-1]}
    return findings


def draw_bottleneck(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for name, label in (
        ("attention", tr("with additive attention", "有加性注意力")),
        ("vector", tr("one vector between the two", "两者之间只有一个向量")),
    ):
        axis.plot(findings["lengths"], findings[name], "o-", label=label)
    axis.axhline(1 / 8, color="gray", linestyle="--", linewidth=1, label=tr("guessing", "随机猜测"))
    axis.set(xlabel=tr("length of the sentence", "句子长度"), ylabel=tr("accuracy", "准确率"), ylim=(0, 1.05))
    axis.legend()


def jacobians(step=None, length=40, width=32, seed=0):
    import math

    import torch

    from regard.lab.complexity import slope

    torch.manual_seed(seed)
    W, U = torch.randn(2, width, width).double() / width**0.5
    W = W / torch.linalg.eigvals(W).abs().max()  # spectral radius 1
    inputs = torch.randn(length, width).double() * 0.01
    findings = {"steps": list(range(1, length + 1)), "off": 0.0}
    for name, radius in (("fading", 0.8), ("growing", 1.25)):

        def advance(h, x, radius=radius):
            return torch.tanh(radius * W @ h + U @ x) if radius < 1 else radius * W @ h + U @ x

        h = h0 = torch.randn(width).double() * 0.01
        product, norms, bounds = torch.eye(width).double(), [], [1.0]
        for x in inputs:
            jacobian = (step or torch.autograd.functional.jacobian)(lambda state: advance(state, x), h)
            h, product = advance(h, x), jacobian @ product
            norms.append(torch.linalg.matrix_norm(product, 2).item())
            bounds.append(bounds[-1] * torch.linalg.matrix_norm(jacobian, 2).item())

        def run(state):
            for x in inputs:
                state = advance(state, x)
            return state

        whole = torch.autograd.functional.jacobian(run, h0)  # of the last state by the first
        late = range(length // 2, length)
        rate = slope(list(late), [math.log(norms[n]) for n in late]).power
        off = ((whole - product).norm() / whole.norm()).item()
        findings |= {"norms " + name: norms, "bounds " + name: bounds[1:], "rate " + name: math.exp(rate),
                     "step " + name: bounds[-1] ** (1 / length), "off": max(findings["off"], off)}  # fmt: skip
    return findings | {"over": findings["norms fading"][-1], "above": findings["step fading"]}


def draw_jacobians(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for n, (name, radius) in enumerate((("fading", 0.8), ("growing", 1.25))):
        label = tr(f"spectral radius {radius}", f"谱半径 {radius}")
        axis.semilogy(findings["steps"], findings["norms " + name], color=f"C{n}", label=label)
        label = tr("product of the norms of the steps", "各步范数之积")
        axis.semilogy(findings["steps"], findings["bounds " + name], ":", color=f"C{n}", label=label)
    axis.set(xlabel=tr("steps", "步数"), ylabel=tr("norm of ∂h_n / ∂h_0", "∂h_n / ∂h_0 的范数"))
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


PICTURE = Text(
    "The norm of the derivative of a state by the first one against the number of steps; dotted, the product of the norms.",
    "状态对初始状态之导数的范数随步数的变化；点线为各步范数之积。",
)
CLAIMS = (
    Claim(
        "bottleneck", "recurrence", ("bottleneck",),
        Text("One vector between encoder and decoder is a bottleneck; attention removes it", "编码器与解码器之间只有一个向量，就是瓶颈；注意力消除了它"),
        Text("A recurrent encoder-decoder has to copy a row of symbols. Without attention, everything that the decoder knows of the row is the last state of the encoder; with additive attention it reads all states.", "循环的编码器—解码器须照抄一行符号。没有注意力时，解码器对这行的全部了解只是编码器的最后一个状态；有加性注意力时，它读取所有状态。"),
        r"c=h_n\qquad\text{or}\qquad c_i=\sum_j\alpha_{ij}h_j,\quad \alpha_{ij}\propto\exp\left(v^\top\tanh(W_qs_i+W_kh_j)\right)",
        bottleneck,
        (
            at_least("long attention", 0.9, "accuracy at the greatest length with attention", "最大长度处的准确率，有注意力"),
            at_most("long vector", 0.5, "the same with one vector", "同上，只有一个向量"),
            at_least("short attention", 0.9, "accuracy at the least length with attention", "最小长度处的准确率，有注意力"),
        ),
        Text("With one vector the accuracy falls from {short vector:.0%} for two symbols to {long vector:.0%} for the longest rows; with attention it is {long attention:.0%} there. Both were trained on the same rows for the same number of steps.", "只有一个向量时，准确率由两个符号时的 {short vector:.0%} 降到最长时的 {long vector:.0%}；有注意力时，最长处仍为 {long attention:.0%}。两者在同样的数据上训练了同样的步数。"),
        draw_bottleneck,
        Text("Accuracy per symbol against the length of the row (chance: 12.5%).", "每个符号的准确率随行长的变化（随机猜测为 12.5%）。"),
        {"steps": 20, "lengths": (2, 6), "width": 16},
        repetitions=3,
    ),
    Claim(
        "rnn-jacobian", "recurrence", ("jacobian",),
        Text("The gradient through an RNN is a product of Jacobians, which fades or explodes exponentially", "穿过 RNN 的梯度是雅可比矩阵之积，指数衰减或爆炸"),
        Text("The derivative of the last state by the first is the product of the derivatives of all steps. If the recurrent matrix has a spectral radius below 1 it fades; above 1, in a linear RNN, it explodes.", "最后的状态对最初状态的导数，等于各步导数之积。循环矩阵的谱半径小于 1 时它衰减；大于 1 时，在线性 RNN 中爆炸。"),
        r"\frac{\partial h_n}{\partial h_0}=\prod_{t=1}^{n}\frac{\partial h_t}{\partial h_{t-1}}",
        jacobians,
        (
            at_most("off", 1e-9, "relative difference of the product and the derivative", "乘积与导数的相对差"),
            at_most("rate fading", 0.95, "factor per step at a spectral radius of 0.8", "谱半径为 0.8 时每一步的倍数"),
            at_least("rate growing", 1.05, "factor per step at a spectral radius of 1.25", "谱半径为 1.25 时每一步的倍数"),
        ),
        Text("The product agrees with autograd's derivative through all steps to {off:.0e}. Late steps multiply its norm by {rate fading:.2f} at a spectral radius of 0.8 and by {rate growing:.2f} at 1.25.", "乘积与自动求导穿过所有步所得的导数相差 {off:.0e}。后期每一步使其范数乘以：谱半径 0.8 时 {rate fading:.2f}，1.25 时 {rate growing:.2f}。"),
        draw_jacobians, PICTURE,
    ),
    Claim(
        "jacobian-norms", "recurrence", ("jacobian",),
        Text("“If the steps have norms above 1, the gradient explodes”", "“各步的范数大于 1，梯度就会爆炸”"),
        Text("A text equates the norm of the product with the product of the norms. For matrices that is only an upper bound: here every step has a norm above 1.", "有资料把“乘积的范数”写成“范数的乘积”。对矩阵而言，后者只是上界：这里每一步的范数都大于 1。"),
        r"\left\lVert\prod_t J_t\right\rVert\overset{?}{\approx}\prod_t\left\lVert J_t\right\rVert",
        jacobians,
        (
            at_least("above", 1, "mean norm of a step at a spectral radius of 0.8", "谱半径为 0.8 时各步范数的平均"),
            at_least("over", 1, "norm of the product after all steps", "走完所有步后乘积的范数"),
        ),
        Text("The steps have norms of at least {above:.2f} on average, but the product falls to at most {over:.0e}: what decides is the spectral radius, 0.8.", "各步的范数平均至少为 {above:.2f}，而乘积至多只剩 {over:.0e}：起决定作用的是谱半径 0.8。"),
        draw_jacobians, PICTURE,
    ),
)  # fmt: skip
