"""Errors of linear and window attention relative to exact attention."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between


def linear_error(attend=None, spreads=(0.05, 0.1, 0.2, 0.5, 1.0, 2.0), length=256, width=32, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    attend = attend or rg.LinearAttention("elu")
    errors, uniform = [], []
    for spread in spreads:  # standard deviation of the entries of queries and keys
        q, k, v = torch.randn(3, 8, length, width)
        exact = rg.attention(q * spread, k * spread, v)
        errors.append(((attend(q * spread, k * spread, v) - exact).norm() / exact.norm()).item())
        uniform.append(((v.mean(1, keepdim=True) - exact).norm() / exact.norm()).item())
    return {"spreads": list(spreads), "errors": errors, "uniform": uniform, "at_one": errors[spreads.index(1.0)],
            "least": min(errors), "most": max(errors)}  # fmt: skip


def draw_linear_error(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    axis.loglog(
        findings["spreads"], findings["errors"], "o-", label=tr("linear attention, ELU + 1", "线性注意力，ELU + 1")
    )
    axis.loglog(
        findings["spreads"], findings["uniform"], "o:", color="gray", label=tr("the mean of all values", "所有值的平均")
    )
    axis.set(
        xlabel=tr("standard deviation of queries and keys", "查询与键的标准差"),
        ylabel=tr("error against softmax", "相对 softmax 的误差"),
    )
    axis.legend()


def favor_error(features=None, counts=(16, 64, 256, 1024), length=128, width=32, draws=5, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import growth

    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 4, length, width)
    features = features or rg.favor
    findings = {"counts": list(counts), "spreads": {"narrow": 0.25, "middle": 0.5, "wide": 1.0}}
    for name, spread in findings["spreads"].items():
        exact = rg.attention(q * spread, k * spread, v)
        errors = []
        for count in counts:
            outputs = [rg.LinearAttention(features(count, seed + n))(q * spread, k * spread, v) for n in range(draws)]
            errors.append(sum(((out - exact).norm() / exact.norm()).item() for out in outputs) / draws)
        findings |= {f"error {name}": errors, f"power {name}": growth(counts, errors).power, f"last {name}": errors[-1]}
    return findings


def draw_favor_error(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for name, spread in findings["spreads"].items():
        axis.loglog(
            findings["counts"],
            findings[f"error {name}"],
            "o-",
            label=tr("spread", "标准差") + f" {spread}: m^{findings[f'power {name}']:.2f}",
        )
    axis.set_xticks(findings["counts"], [str(n) for n in findings["counts"]])
    axis.minorticks_off()
    axis.set(xlabel=tr("features m", "特征数 m"), ylabel=tr("error against softmax", "相对 softmax 的误差"))
    axis.legend()


def window_error(mask=None, reaches=(0, 1, 2, 4, 8, 16, 32, 64, 128, 255), length=256, width=32, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    mask = mask or (lambda reach: rg.window(reach, reach))
    x = torch.randn(4, length, width)
    near = x.clone()
    for n in range(1, length):  # neighbours are similar, as in speech or images
        near[:, n] = 0.9 * near[:, n - 1] + (1 - 0.9**2) ** 0.5 * x[:, n]
    findings = {"reaches": list(reaches)}
    for name, t in (("anywhere", x), ("near", near)):
        q, k, v = 3 * t, t, torch.randn(4, length, width)  # a query matches tokens similar to itself
        q = q.roll(97, 1) if name == "anywhere" else q
        exact = rg.attention(q, k, v)
        findings[name] = [((rg.attention(q, k, v, mask=mask(r)) - exact).norm() / exact.norm()).item() for r in reaches]
    findings |= {"whole": findings["near"][-1], "near16": findings["near"][reaches.index(16)], "anywhere16": findings["anywhere"][reaches.index(16)],
              "rise": max(b - a for a, b in zip(findings["near"], findings["near"][1:]))}  # fmt: skip
    return findings


def draw_window_error(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    axis.semilogx(
        [r + 1 for r in findings["reaches"]],
        findings["near"],
        "o-",
        label=tr("matching keys are near", "匹配的键在附近"),
    )
    axis.semilogx(
        [r + 1 for r in findings["reaches"]],
        findings["anywhere"],
        "o-",
        label=tr("matching keys are 97 positions away", "匹配的键在 97 个位置之外"),
    )
    axis.set_xticks([r + 1 for r in findings["reaches"]], [str(r) for r in findings["reaches"]])
    axis.minorticks_off()
    axis.set(
        xlabel=tr("reach of the window to each side", "窗口半径"),
        ylabel=tr("error against exact attention", "相对精确注意力的误差"),
    )
    axis.legend()


CLAIMS = (
    Claim(
        "linear-error", "approximation", ("mechanism 9", "approximation"),
        Text("Linear attention with ELU is a different kernel, not an approximation of softmax",
        "使用 ELU 的线性注意力是另一种核，而不是 softmax 的近似"),
        Text("It replaces the exponential of q·k by the product of elu(q)+1 and elu(k)+1. How close are the two?", "它以 (elu(q)+1)·(elu(k)+1) 代替 q·k 的指数。两者究竟有多接近？"),
        r"\phi(q)^\top\phi(k),\ \phi(x)=\operatorname{elu}(x)+1\quad\not\approx\quad e^{q\cdot k/\sqrt d}",
        linear_error,
        (
            at_least("at_one", 0.3, "relative error at a spread of 1", "标准差为 1 时的相对误差", rule="mean"),
            at_most("least", 0.05, "relative error at the smallest spread", "标准差最小时的相对误差", rule="mean"),
        ),
        Text("At unit variance the outputs differ by {at_one:.0%} of their size. They agree (to {least:.1%}) only where scores are so small that all values have almost the same weight. A model has to be trained with linear attention to use it.", "方差为 1 时，两者的输出相差 {at_one:.0%}。只有当得分小到各个值的权重几乎相同时才一致（相差 {least:.1%}）：必须用它来训练模型。"),
        draw_linear_error,
        Text("The relative error of the output against the spread of queries and keys.", "输出的相对误差随查询与键的离散程度的变化。"),
        {"length": 64},
    ),
    Claim(
        "favor-error", "approximation", ("mechanism 9", "approximation"),
        Text("Performer's error falls with the square root of its features", "Performer 的误差随特征数的平方根下降"),
        Text("FAVOR+ is an unbiased estimate of the exponential kernel from m random features: four times as many features halve the error.", "FAVOR+ 用 m 个随机特征无偏地估计指数核：特征数增至四倍，误差减半。"),
        r"\operatorname{error}\propto m^{-1/2}",
        favor_error,
        (
            between("power narrow", -0.6, -0.4, "power of m at a spread of 0.25", "标准差为 0.25 时 m 的幂次", rule="mean"),
            between("power wide", -0.6, -0.4, "power of m at a spread of 1", "标准差为 1 时 m 的幂次", rule="mean", part=True),
        ),
        Text("At a spread of 0.25 the error falls like m^{power narrow:.2f}, to {last narrow:.1%} with the largest number of features; at 0.5 like m^{power middle:.2f}, and at 1 only like m^{power wide:.2f}, where it is still {last wide:.0%}: the law holds where scores are small, large ones are approximated poorly.", "标准差为 0.25 时，误差按 m^{power narrow:.2f} 下降，特征最多时为 {last narrow:.1%}；为 0.5 时按 m^{power middle:.2f}；为 1 时只按 m^{power wide:.2f}，仍有 {last wide:.0%}。得分小时此规律成立，得分大时近似很差。"),
        draw_favor_error,
        Text("The relative error of the output against the number of features, for three spreads of queries and keys.",
        "三种离散程度下，输出的相对误差随特征数的变化。"),
    ),
    Claim(
        "window-error", "approximation", ("mechanism 9", "approximation"),
        Text("A window is as good as exact attention where matching keys are near", "若匹配的键就在附近，窗口与精确注意力一样好"),
        Text("The error falls as the window widens, to 0 when it covers all keys; how fast depends on where the weight is.", "窗口越宽误差越小，覆盖全部时为 0；下降的快慢取决于权重在哪里。"),
        r"\left\lVert A_w-A\right\rVert\to 0\quad(w\to n)",
        window_error,
        (
            at_most("whole", 1e-5, "error when the window covers all keys", "窗口覆盖全部键时的误差"),
            at_most("near16", 0.1, "error at a reach of 16, matching keys near", "半径 16、匹配的键在附近时的误差", rule="mean"),
            at_least("anywhere16", 0.5, "error at a reach of 16, matching keys far", "半径 16、匹配的键在远处时的误差", rule="mean"),
            at_most("rise", 0.05, "largest rise of the error from one reach to the next", "从一个半径到下一个，误差的最大上升"),
        ),
        Text("With a reach of 16 the error is {near16:.1%} if neighbours are similar, and {anywhere16:.0%} if matching keys are 97 positions away. At full reach it is {whole:.0e}.", "半径为 16 时，若相邻词元彼此相似，误差为 {near16:.1%}；若匹配的键在 97 个位置之外，误差为 {anywhere16:.0%}。完全覆盖时为 {whole:.0e}。"),
        draw_window_error,
        Text("The relative error of the output against the reach of the window.", "输出的相对误差随窗口半径的变化。"),
    ),
)  # fmt: skip
