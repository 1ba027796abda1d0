"""Attention compared with convolution and recurrence, with equal numbers of parameters and on the same tasks."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text, Verdict, grade
from regard.lab.draw import plot_growth

NAMES = {"attention": "注意力"}


def receptive_field(bodies=None, length=64, size=6000, seed=0):
    import torch

    from regard.lab.architectures import build

    torch.manual_seed(seed)
    findings = {"length": length, "names": ["attention", "CNN", "RNN"]}
    for kind in findings["names"]:
        model = (bodies or build)(kind, size)
        x = torch.randn(1, length, model.embedding.embedding_dim, requires_grad=True)
        (gradient,) = torch.autograd.grad(model.answer(model.body(x)[:, -1]).square().sum(), x)
        reach = gradient[0].norm(dim=-1).flip(0)  # nearest first
        findings[kind] = (reach / reach[0]).tolist()
        findings["sees " + kind] = int((reach > 0).sum())
        findings["parameters " + kind] = sum(p.numel() for p in model.parameters())
    return findings


def draw_receptive_field(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    for name in findings["names"]:
        axis.semilogy(
            range(findings["length"]),
            [y if y > 0 else None for y in findings[name]],
            "o-",
            markersize=3,
            label=tr(name, NAMES.get(name, name)),
        )
    axis.set(
        xlabel=tr("distance from the last position", "与最后位置的距离"),
        ylabel=tr("influence, nearest = 1", "影响（最近处 = 1）"),
    )
    axis.legend()


def parallelism(kinds=("attention", "CNN", "RNN"), lengths=(64, 128, 256, 512), size=6000, seed=0):
    import torch

    from regard.lab.architectures import build
    from regard.lab.complexity import depth, growth, min_seconds

    torch.manual_seed(seed)
    findings = {"lengths": list(lengths), "kinds": list(kinds)}
    for role, kind in zip(("attention", "CNN", "RNN"), kinds):
        model = build(kind, size)
        rows = [torch.randint(16, (4, n)) for n in lengths]
        chain = [depth(model(x)) for x in rows]
        with torch.no_grad():
            time = min_seconds([lambda x=x: model(x) for x in rows], 5)
        fit = growth(lengths, time)
        findings |= {"depth " + role: chain, "time " + role: time, "power " + role: fit.power, "chain " + role: chain[-1],
                  "interval " + role: [fit.low, fit.high], "steps " + role: growth(lengths, chain).power}  # fmt: skip
    return findings


def judge_parallelism(findings: Findings) -> Verdict:
    return grade(findings["steps attention"] < 0.05 and findings["steps CNN"] < 0.05 and findings["steps RNN"] > 0.9)


def draw_parallelism(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, right = figure.subplots(1, 2)
    for kind, label, axis in (
        ("depth", tr("dependent steps", "必须依次进行的步数"), left),
        ("time", tr("seconds of one core", "单核时间（秒）"), right),
    ):
        plot_growth(
            axis,
            findings,
            [(f"{kind} {name}", tr(name, NAMES.get(name, name))) for name in ("attention", "CNN", "RNN")],
            tr,
        )
        axis.set_ylabel(label)


def memory_length(attend=None, lengths=(128, 256, 512, 1024), size=6000, seed=0):
    import math

    import torch

    import regard as rg
    from regard.lab.architectures import build
    from regard.lab.complexity import saved_bytes

    torch.manual_seed(seed)
    findings = {"lengths": list(lengths)}
    dense = attend or (lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v)
    calls = {kind: build(kind, size) for kind in ("CNN", "RNN")}
    for name, call in (("weights stored", dense), ("fused", rg.attention)):
        projections = torch.nn.Linear(32, 96)
        calls[name] = lambda x, call=call, p=projections: call(
            *p(torch.nn.functional.one_hot(x, 32).float())[:, None].chunk(3, -1)
        )
    for name, call in calls.items():
        own = list(call.parameters()) if isinstance(call, torch.nn.Module) else []
        kept = [saved_bytes(lambda n=n: call(torch.randint(16, (1, n))), *own) for n in lengths]
        findings |= {name: kept, "power " + name: math.log2(kept[-1] / kept[-2])}  # over the last doubling
    return findings


def judge_memory(findings: Findings) -> Verdict:
    linear = all(findings["power " + name] < 1.15 for name in ("CNN", "RNN"))
    return grade(linear and findings["power weights stored"] > 1.7)


def draw_memory_length(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = {
        "weights stored": tr("attention, weights stored", "注意力，保存权重"),
        "fused": tr("attention, fused (regard)", "注意力，融合计算（regard）"),
    }
    plot_growth(
        axis,
        findings,
        [
            (name, f"{names.get(name, name)}, n^{findings['power ' + name]:.2f}")
            for name in ("weights stored", "fused", "CNN", "RNN")
        ],
        tr,
    )
    axis.set_ylabel(tr("bytes kept for the backward pass", "为反向传播保留的字节数"))


def recall(kinds=("attention", "CNN", "RNN", "GRU"), length=32, size=6000, steps=260, rows=48, seed=0):
    from regard.lab.architectures import parameters, train_and_test
    from regard.lab.architectures import recall as task

    findings = {"bins": [0, 5, 10, 15, 20, 25, length], "kinds": list(kinds)}
    for role, kind in zip(("attention", "CNN", "RNN", "GRU"), kinds):
        model, right, distances = train_and_test(kind, task, seed, size=size, length=length, steps=steps, rows=rows)
        within = [(distances >= a) & (distances < b) for a, b in zip(findings["bins"], findings["bins"][1:])]
        findings[role] = [right[chosen].float().mean().item() for chosen in within]
        findings |= {
            "near " + role: findings[role][0],
            "far " + role: findings[role][-1],
            "parameters " + role: parameters(model),
        }
    return findings


def judge_recall(findings: Findings) -> Verdict:
    far = {name: findings["far " + name] for name in ("attention", "CNN", "RNN")}
    wins = far["attention"] > 0.9 and far["CNN"] < 0.5
    return grade(wins and far["RNN"] < far["attention"] - 0.1, wins)


def draw_recall(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    ticks = [f"{a}–{b - 1}" for a, b in zip(findings["bins"], findings["bins"][1:], strict=False)]
    for name in ("attention", "CNN", "RNN", "GRU"):
        axis.plot(ticks, findings[name], "o-", label=tr(name, NAMES.get(name, name)))
    axis.axhline(1 / 8, color="gray", linestyle="--", linewidth=1, label=tr("guessing", "随机猜测"))
    axis.set(
        xlabel=tr("distance of the marked symbol from the end", "标记符号与末尾的距离"),
        ylabel=tr("accuracy", "正确率"),
        ylim=(0, 1.05),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def data_hunger(kinds=("attention", "CNN", "RNN"), counts=(64, 512, 4096), size=6000, length=12, steps=180, seed=0):
    from regard.lab.architectures import local_recall, recall, train_and_test

    findings = {"counts": list(counts)}
    for name, task in (("order", local_recall), ("recall", lambda n, _, draw: recall(n, 5, draw))):
        for role, kind in zip(("attention", "CNN", "RNN"), kinds):
            options = {"size": size, "length": length, "steps": steps, "rows": 64}
            findings[f"{name} {role}"] = [
                train_and_test(kind, task, seed, count=n, **options)[1].float().mean().item() for n in counts
            ]
            findings[f"mean {name} {role}"] = sum(findings[f"{name} {role}"]) / len(counts)
    return findings


def judge_data(findings: Findings) -> Verdict:
    """Attention needs more data if it is less accurate than a CNN trained on the same data."""
    hungry = [findings[f"mean {task} attention"] < findings[f"mean {task} CNN"] - 0.02 for task in ("order", "recall")]
    return grade(all(hungry), any(hungry))


def draw_data_hunger(figure: Any, findings: Findings, tr: PickLabel) -> None:
    titles = (
        ("order", tr("what follows the marker?", "标记之后是什么？")),
        ("recall", tr("which symbol is marked?", "哪个符号被标记？")),
    )
    for axis, (task, title) in zip(figure.subplots(1, 2, sharey=True), titles, strict=True):
        for name in ("attention", "CNN", "RNN"):
            axis.semilogx(findings["counts"], findings[f"{task} {name}"], "o-", label=tr(name, NAMES.get(name, name)))
        axis.set(title=title, xlabel=tr("training examples", "训练样本数"), ylim=(0, 1.05))
        axis.set_xticks(findings["counts"], [str(n) for n in findings["counts"]])
        axis.minorticks_off()
        axis.legend()


CLAIMS = (
    Claim(
        "receptive-field", "architectures", ("claim 10",),
        Text("Attention has a global receptive field, a CNN a local one", "注意力一眼看到全部，CNN 只看到邻域"),
        Text("The receptive field of two layers: all n positions for attention; 2·(5−1)/2 + 1 = 5 positions back for convolutions with kernel size 5; all positions for an RNN, but through a chain of steps.", "两层网络的感受野：注意力为全部 n 个位置；核宽为 5 的卷积，向后只有 2·(5−1)/2 + 1 = 5 个位置；RNN 也是全部，但要经过一条长链。"),
        r"R_{\text{attention}}=n,\qquad R_{\text{CNN}}=1+L\,\frac{k-1}{2}",
        receptive_field,
        lambda findings: grade(findings["sees attention"] == findings["length"] and findings["sees CNN"] == 5 and findings["sees RNN"] == findings["length"], findings["sees attention"] == findings["length"] and findings["sees CNN"] < findings["length"]),
        Text("Of {length} positions, {sees attention} influence the output of attention, {sees CNN} that of the CNN and {sees RNN} that of the RNN (with {parameters attention:,}, {parameters CNN:,} and {parameters RNN:,} parameters).", "在 {length} 个位置中，注意力看到 {sees attention} 个，CNN 看到 {sees CNN} 个，RNN 看到 {sees RNN} 个（参数量分别为 {parameters attention:,}、{parameters CNN:,} 与 {parameters RNN:,}）。"),
        draw_receptive_field,
        Text("The influence of every position on the last output.", "各位置对最后一个输出的影响。"),
    ),
    Claim(
        "parallelism", "architectures", ("claim 10",),
        Text("Attention and CNN compute all positions in parallel, an RNN one after the other",
        "注意力与 CNN 并行计算所有位置，RNN 只能逐步进行"),
        Text("The longest chain of dependent operations grows with the length for an RNN, but not for attention and CNN.", "对注意力与 CNN，必须依次进行的运算链不随长度增长；对 RNN 则随长度增长。"),
        r"S_{\text{attention}},S_{\text{CNN}}=O(1),\qquad S_{\text{RNN}}=O(n)",
        parallelism, judge_parallelism,
        Text("At the greatest length, the longest chain of dependent operations has {chain attention} operations for attention, {chain CNN} for the CNN and {chain RNN} for the RNN (n^{steps RNN:.2f}). On one core, time grows like n^{power attention:.2f}, n^{power CNN:.2f} and n^{power RNN:.2f}.", "在最大长度下，必须依次进行的运算：注意力 {chain attention} 个，CNN {chain CNN} 个，RNN {chain RNN} 个（n^{steps RNN:.2f}）。在单核上，时间分别按 n^{power attention:.2f}、n^{power CNN:.2f} 与 n^{power RNN:.2f} 增长。"),
        draw_parallelism,
        Text("The longest chain of operations, and the processor time, against length.", "最长的运算链，以及处理器时间，随长度的变化。"),
        {"lengths": (32, 64, 128)},
    ),
    Claim(
        "memory-length", "architectures", ("claim 10",),
        Text("Training memory grows with n² for attention, with n for CNN and RNN",
        "训练所需内存：注意力按 n² 增长，CNN 与 RNN 按 n 增长"),
        Text("Memory kept for the backward pass, if attention stores its weights.", "指注意力保存权重时，为反向传播所需保留的内容。"),
        r"M_{\text{attention}}=O(n^2),\qquad M_{\text{CNN}},M_{\text{RNN}}=O(n)",
        memory_length, judge_memory,
        Text("Kept bytes grow like n^{power weights stored:.2f} for attention that stores its weights, n^{power CNN:.2f} for the CNN and n^{power RNN:.2f} for the RNN; and like n^{power fused:.2f} for attention as regard computes it.", "保留的字节数：保存权重的注意力按 n^{power weights stored:.2f} 增长，CNN 按 n^{power CNN:.2f}，RNN 按 n^{power RNN:.2f}；而 regard 的注意力按 n^{power fused:.2f}。"),
        draw_memory_length,
        Text("Bytes kept for the backward pass, against length.", "为反向传播保留的字节数随长度的变化。"),
        {"lengths": (256, 512)},
    ),
    Claim(
        "recall", "architectures", ("claim 10",),
        Text("Attention recalls distant symbols; CNN and plain RNN do not", "注意力能记起远处的内容，CNN 与普通 RNN 不能"),
        Text("One symbol of a row is marked, and the network has to name it at the end of the row. All networks have about the same number of parameters and the same data.", "一行符号中有一个被标记，网络须在行末说出它是哪一个。各网络参数量相同，看到的数据也相同。"),
        r"P(\hat{y}=y\mid t),\qquad t=n-1-p",
        recall, judge_recall,
        Text("At distances of 25 and more, attention recalls {far attention:.0%}, the CNN {far CNN:.0%}, the plain RNN {far RNN:.0%} and the GRU {far GRU:.0%} (chance: 12.5%).", "距离 25 以上时，正确率为：注意力 {far attention:.0%}，CNN {far CNN:.0%}，普通 RNN {far RNN:.0%}，GRU {far GRU:.0%}（随机猜测为 12.5%）。"),
        draw_recall,
        Text("Accuracy against distance, after the same training.", "经过同样的训练后，正确率随距离的变化。"),
        {"steps": 4, "size": 2000},
    ),
    Claim(
        "data-hunger", "architectures", ("claim 10",),
        Text("Attention needs more data than a CNN", "注意力比 CNN 需要更多数据"),
        Text("It has no built-in notion of neighbourhood and has to learn it. Two tasks within the receptive field of all networks: name the symbol after the marker, where neighbourhood matters, and name the marked symbol, where it does not.", "它事先不知道何为“相邻”，必须从数据中学到。两个问题都在各网络的感受野之内：一问标记之后是什么（全靠相邻关系），二问哪个符号被标记（与相邻无关）。"),
        r"P(\hat{y}=y\mid N)",
        data_hunger, judge_data,
        Text("Averaged over all amounts of data, the accuracy is {mean order attention:.0%} for attention and {mean order CNN:.0%} for the CNN (RNN: {mean order RNN:.0%}) where neighbourhood matters, and {mean recall attention:.0%} and {mean recall CNN:.0%} (RNN: {mean recall RNN:.0%}) where it does not: attention needs more data to learn what is not built in.", "相邻关系重要时，在各种数据量下平均：注意力正确率 {mean order attention:.0%}，CNN {mean order CNN:.0%}（RNN {mean order RNN:.0%}）。相邻无关时：{mean recall attention:.0%} 对 {mean recall CNN:.0%}（RNN {mean recall RNN:.0%}）。它缺的是事先不知道的那部分。"),
        draw_data_hunger,
        Text("Accuracy on new rows against the number of training examples, after the same number of steps.",
        "在新数据上的正确率随训练样本数的变化；训练步数相同。"),
        {"counts": (64, 256), "steps": 4, "size": 2000},
    ),
)  # fmt: skip
