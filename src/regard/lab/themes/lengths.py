"""Positions beyond the lengths of the training."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most


def beyond(accuracies=None, lengths=(16, 32, 64), steps=400, seed=0):
    from regard.lab import positions_task

    # Two causal blocks learn on rows of 16 which symbol is two places back, and are tested on longer rows
    measure = accuracies or positions_task.accuracies
    findings = {"lengths": list(lengths), "schemes": list(positions_task.SCHEMES)}
    for scheme in positions_task.SCHEMES:
        shares = measure(scheme, lengths, trained=lengths[0], steps=steps, seed=seed)
        findings |= {
            scheme: shares,
            f"{scheme} trained": shares[0],
            f"{scheme} twice": shares[1],
            f"{scheme} four": shares[-1],
        }
    return findings


def draw_beyond(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = {
        "sinusoidal": "正弦",
        "learned": "可学习",
        "rotary": "旋转",
        "relative": "相对",
        "causal mask alone": "只有因果掩码",
    }
    for scheme in findings["schemes"]:
        axis.plot(findings["lengths"], findings[scheme], "o-", label=tr(scheme, names.get(scheme, scheme)))
    axis.axhline(1 / 8, color="gray", linestyle="--", linewidth=1, label=tr("guessing", "随机猜测"))
    axis.set_xscale("log")
    axis.set_xticks(findings["lengths"], [str(n) for n in findings["lengths"]])
    axis.minorticks_off()
    axis.set(xlabel=tr("length of the row", "行的长度"), ylabel=tr("accuracy", "准确率"), ylim=(0, 1.05))
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


CAPTION = Text(
    "Accuracy on the last quarter of a row against its length; trained on rows of 16 symbols (chance: 12.5%).",
    "每行最后四分之一的准确率随行长的变化；训练时每行 16 个符号（随机猜测为 12.5%）。",
)
CLAIMS = (
    Claim(
        "any-length", "mechanism", ("extrapolation",),
        Text("“Sinusoidal positions support sequences of any length”", "“正弦位置编码支持任意长度的序列”"),
        Text("The table can be computed for any place, but a network has to have learned what its rows mean. Here it learns on rows of 16 which symbol is two places back.", "这张表在任何位置都能算出，但网络须学过其中各行的含义。这里它在长为 16 的行上学习：前面第二个位置上是哪个符号。"),
        r"PE_{p}\ \text{for}\ p\ge n_{\text{trained}}",
        beyond,
        (
            at_least("sinusoidal trained", 0.5, "accuracy at the trained length", "训练长度处的准确率"),
            at_least("sinusoidal four", 0.5, "accuracy at four times the trained length", "四倍训练长度处的准确率"),
        ),
        Text("With sinusoidal positions the accuracy is at least {sinusoidal trained:.0%} at the trained length and at most {sinusoidal four:.0%} at four times that length.", "使用正弦位置编码时，训练长度处的准确率至少 {sinusoidal trained:.0%}，四倍长度处至多 {sinusoidal four:.0%}。"),
        draw_beyond, CAPTION,
        {"steps": 20},
        repetitions=3,
    ),
    Claim(
        "beyond-trained", "mechanism", ("extrapolation",),
        Text("Positions by distance work beyond the trained length, positions by place do not", "按距离的位置编码在训练长度之外仍可用，按位置的则不行"),
        Text("A learned table has no trained vector for later places. Rotary and relative positions depend on distances, which occurred in training. A causal mask alone tells the number of earlier tokens, from which a network learns a little about the order.", "可学习的表没有训练过更靠后的位置。旋转与相对位置取决于距离，而这些距离在训练中出现过。只有因果掩码时，网络只能由前面词元的个数学到少许次序信息。"),
        r"\alpha_{ij}=f(q_i,k_j,\,i-j)\quad\text{or}\quad f(q_i+p_i,\,k_j+p_j)",
        beyond,
        (
            at_least("learned trained", 0.8, "learned table at the trained length", "可学习的表，训练长度处"),
            at_most("learned twice", 0.4, "learned table at twice the trained length", "可学习的表，两倍训练长度处"),
            at_least("rotary twice", 0.5, "rotary positions at twice the trained length", "旋转位置，两倍训练长度处"),
            at_least("relative twice", 0.5, "relative positions at twice the trained length", "相对位置，两倍训练长度处"),
            at_least("causal mask alone trained", 0.2, "a causal mask alone at the trained length", "只有因果掩码，训练长度处"),
        ),
        Text("At twice the trained length the accuracy is at most {learned twice:.0%} with a learned table, and at least {rotary twice:.0%} with rotary and {relative twice:.0%} with relative positions. ALiBi prefers near tokens but tells their order poorly: {ALiBi trained:.0%} at the trained length and {ALiBi four:.0%} at four times that. A causal mask alone reaches {causal mask alone trained:.0%} at the trained length.", "在两倍训练长度处，可学习的表准确率至多 {learned twice:.0%}，旋转位置至少 {rotary twice:.0%}，相对位置至少 {relative twice:.0%}。ALiBi 偏向近处的词元，但难以分辨次序：训练长度处 {ALiBi trained:.0%}，四倍长度处 {ALiBi four:.0%}。只有因果掩码时，训练长度处为 {causal mask alone trained:.0%}。"),
        draw_beyond, CAPTION,
        {"steps": 20},
        repetitions=3,
    ),
)  # fmt: skip
