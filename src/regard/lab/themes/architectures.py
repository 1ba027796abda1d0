"""Attention compared with convolution and recurrence, with equal numbers of parameters and on the same tasks."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between
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
    from regard.lab.complexity import depth, flops, growth

    torch.manual_seed(seed)
    findings = {"lengths": list(lengths), "kinds": list(kinds)}
    for role, kind in zip(("attention", "CNN", "RNN"), kinds):
        model = build(kind, size)
        rows = [torch.randint(16, (4, n)) for n in lengths]
        chain = [depth(model(x)) for x in rows]  # of dependent operations, in the graph that autograd records
        wide = [flops(lambda x=x: model(x)) / steps for x, steps in zip(rows, chain)]
        findings |= {"depth " + role: chain, "width " + role: wide, "chain " + role: chain[-1], "wide " + role: wide[-1],
                     "steps " + role: growth(lengths, chain).power}  # fmt: skip
    return findings


def draw_parallelism(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, right = figure.subplots(1, 2)
    for kind, label, axis in (
        ("depth", tr("dependent steps", "必须依次进行的步数"), left),
        ("width", tr("operations / longest chain", "总运算量 / 最长链"), right),
    ):
        plot_growth(
            axis,
            findings,
            [(f"{kind} {name}", tr(name, NAMES.get(name, name))) for name in ("attention", "CNN", "RNN")],
            tr,
        )
        axis.set_ylabel(label)


def memory_length(attend=None, lengths=(128, 256, 384, 512), size=6000, seed=0):
    import torch

    import regard as rg
    from regard.lab.architectures import build
    from regard.lab.complexity import degree, saved_bytes

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
        findings |= {name: kept, "degree " + name: degree(kept)}  # of the polynomial through equal steps of n
    return findings


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
            (name, f"{names.get(name, name)}, n^{findings['degree ' + name]}")
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
    findings["RNN minus attention"] = findings["far RNN"] - findings["far attention"]
    return findings


def draw_recall(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    ticks = [f"{a}–{b - 1}" for a, b in zip(findings["bins"], findings["bins"][1:], strict=False)]
    for name in ("attention", "CNN", "RNN", "GRU"):
        axis.plot(ticks, findings[name], "o-", label=tr(name, NAMES.get(name, name)))
    axis.axhline(1 / 8, color="gray", linestyle="--", linewidth=1, label=tr("guessing", "随机猜测"))
    axis.set(
        xlabel=tr("distance of the marked symbol from the end", "标记符号与末尾的距离"),
        ylabel=tr("accuracy", "准确率"),
        ylim=(0, 1.05),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def data_hunger(kinds=("attention", "CNN"), counts=(64, 256, 1024), size=6000, length=12, steps=2000, seed=0):
    from regard.lab.architectures import local_recall, recall, train_and_test

    findings = {"counts": list(counts)}
    losses = []
    for name, task in (("order", local_recall), ("recall", lambda n, _, draw: recall(n, 5, draw))):
        for role, kind in zip(("attention", "CNN"), kinds):
            options = {
                "size": size,
                "length": length,
                "steps": steps,
                "rows": 64,
            }  # to convergence: until the loss is 0.02
            runs = [train_and_test(kind, task, seed, until=0.02, count=n, **options) for n in counts]
            findings[f"{name} {role}"] = [right.float().mean().item() for _, right, _ in runs]
            losses += [model.loss for model, _, _ in runs]
        differences = [c - a for c, a in zip(findings[f"{name} CNN"], findings[f"{name} attention"])]
        findings[f"lead {name}"] = differences[1]
    return findings | {"loss": max(losses)}


def draw_data_hunger(figure: Any, findings: Findings, tr: PickLabel) -> None:
    titles = (
        ("order", tr("what follows the marker?", "标记之后是什么？")),
        ("recall", tr("which symbol is marked?", "哪个符号被标记？")),
    )
    for axis, (task, title) in zip(figure.subplots(1, 2, sharey=True), titles, strict=True):
        for name in ("attention", "CNN"):
            axis.semilogx(findings["counts"], findings[f"{task} {name}"], "o-", label=tr(name, NAMES.get(name, name)))
        axis.set(title=title, xlabel=tr("training examples", "训练样本数"), ylim=(0, 1.05))
        axis.set_xticks(findings["counts"], [str(n) for n in findings["counts"]])
        axis.minorticks_off()
        axis.legend()


CLAIMS = (
    Claim(
        "receptive-field", "architectures", ("claim 10",),
        Text("Attention has a global receptive field, a CNN a local one", "注意力的感受野是全局的，CNN 的是局部的"),
        Text("The receptive field of two layers: all n positions for attention; 2·(5−1)/2 + 1 = 5 positions back for convolutions with kernel size 5; all positions for an RNN, but through a chain of steps.", "两层网络的感受野：注意力为全部 n 个位置；核宽为 5 的卷积，只有最近的 2·(5−1)/2 + 1 = 5 个位置；RNN 也是全部，但要经过一条长链。"),
        r"R_{\text{attention}}=n,\qquad R_{\text{CNN}}=1+L\,\frac{k-1}{2}",
        receptive_field,
        (
            between("sees attention", 64, 64, "positions that influence attention, of 64", "影响注意力输出的位置数，共 64 个"),
            between("sees CNN", 5, 5, "positions that influence the CNN", "影响 CNN 输出的位置数"),
            between("sees RNN", 64, 64, "positions that influence the RNN", "影响 RNN 输出的位置数"),
        ),
        Text("Of {length} positions, {sees attention} influence the output of attention, {sees CNN} that of the CNN and {sees RNN} that of the RNN (with {parameters attention:,}, {parameters CNN:,} and {parameters RNN:,} parameters).", "在 {length} 个位置中，影响注意力输出的有 {sees attention} 个，影响 CNN 输出的有 {sees CNN} 个，影响 RNN 输出的有 {sees RNN} 个（参数量分别为 {parameters attention:,}、{parameters CNN:,} 与 {parameters RNN:,}）。"),
        draw_receptive_field,
        Text("The influence of every position on the last output.", "各位置对最后一个输出的影响。"),
    ),
    Claim(
        "parallelism", "architectures", ("claim 10",),
        Text("Attention and CNN compute all positions in parallel, an RNN one after the other",
        "注意力与 CNN 并行计算所有位置，RNN 只能逐步进行"),
        Text("The longest chain of dependent operations grows with the length for an RNN, but not for attention and CNN.", "对注意力与 CNN，必须依次进行的运算链不随长度增长；对 RNN 则随长度增长。"),
        r"S_{\text{attention}},S_{\text{CNN}}=O(1),\qquad S_{\text{RNN}}=O(n)",
        parallelism,
        (
            between("steps attention", 0, 0, "power of n of the longest chain, attention", "最长链增长的幂次，注意力"),
            between("steps CNN", 0, 0, "power of n of the longest chain, CNN", "最长链增长的幂次，CNN"),
            between("steps RNN", 0.9, 1.1, "power of n of the longest chain, RNN", "最长链增长的幂次，RNN"),
        ),
        Text("At the greatest length, the longest chain of dependent operations has {chain attention} operations for attention, {chain CNN} for the CNN and {chain RNN} for the RNN (n^{steps RNN:.2f}). Divided by its chain, the work is {wide attention:,.0f} multiplications at once for attention and {wide CNN:,.0f} for the CNN, and {wide RNN:,.0f} for the RNN at any length: no number of processors makes it faster than its chain.", "在最大长度下，必须依次进行的运算：注意力 {chain attention} 个，CNN {chain CNN} 个，RNN {chain RNN} 个（n^{steps RNN:.2f}）。总运算量除以链长，即可同时进行的乘法：注意力 {wide attention:,.0f} 次，CNN {wide CNN:,.0f} 次；RNN 在任何长度下都只有 {wide RNN:,.0f} 次：处理器再多，也快不过它的链。"),
        draw_parallelism,
        Text("The longest chain of operations, and the operations divided by it, against length.", "最长的运算链，以及总运算量与链长之比，随长度的变化。"),
        {"lengths": (32, 64, 128)},
        repetitions=1,
    ),
    Claim(
        "memory-length", "architectures", ("claim 10",),
        Text("Training memory grows with n² for attention, with n for CNN and RNN",
        "训练所需内存：注意力按 n² 增长，CNN 与 RNN 按 n 增长"),
        Text("Memory kept for the backward pass, if attention stores its weights.", "指注意力保存权重时，为反向传播所需保留的内容。"),
        r"M_{\text{attention}}=O(n^2),\qquad M_{\text{CNN}},M_{\text{RNN}}=O(n)",
        memory_length,
        (
            between("degree weights stored", 2, 2, "degree of the polynomial of kept bytes, attention with stored weights", "保留字节数作为 n 的多项式的次数，保存权重的注意力"),
            between("degree CNN", 1, 1, "the same, CNN", "同上，CNN"),
            between("degree RNN", 1, 1, "the same, RNN", "同上，RNN"),
        ),
        Text("As a function of n, the kept bytes are a polynomial of degree {degree weights stored} for attention that stores its weights, of degree {degree CNN} for the CNN and {degree RNN} for the RNN; and of degree {degree fused} for attention as regard computes it.", "保留的字节数是 n 的多项式：保存权重的注意力为 {degree weights stored} 次，CNN 为 {degree CNN} 次，RNN 为 {degree RNN} 次；而 regard 的注意力为 {degree fused} 次。"),
        draw_memory_length,
        Text("Bytes kept for the backward pass, against length.", "为反向传播保留的字节数随长度的变化。"),
        {"lengths": (64, 128, 192, 256)},
        repetitions=1,
    ),
    Claim(
        "recall", "architectures", ("claim 10",),
        Text("Attention recalls distant symbols; CNN and plain RNN do not", "注意力能记起远处的符号，CNN 与普通 RNN 不能"),
        Text("One symbol of a row is marked, and the network has to name it at the end of the row. All networks have about the same number of parameters and the same data.", "一行符号中有一个被标记，网络须在行末说出它是哪一个。各网络的参数量大致相同，训练数据也相同。"),
        r"P(\hat{y}=y\mid t),\qquad t=n-1-p",
        recall,
        (
            at_least("far attention", 0.9, "accuracy at distances of 25 and more, attention", "距离 25 以上的准确率，注意力"),
            at_most("far CNN", 0.5, "the same, CNN", "同上，CNN"),
            at_most("RNN minus attention", -0.1, "the same, RNN minus attention", "同上，RNN 减注意力"),
        ),
        Text("At distances of 25 and more, attention recalls {far attention:.0%}, the CNN {far CNN:.0%}, the plain RNN {far RNN:.0%} and the GRU {far GRU:.0%} (chance: 12.5%).", "距离 25 以上时，准确率为：注意力 {far attention:.0%}，CNN {far CNN:.0%}，普通 RNN {far RNN:.0%}，GRU {far GRU:.0%}（随机猜测为 12.5%）。"),
        draw_recall,
        Text("Accuracy against distance, after the same training.", "经过同样的训练后，准确率随距离的变化。"),
        {"steps": 4, "size": 2000},
        repetitions=3,
    ),
    Claim(
        "data-hunger", "architectures", ("claim 10",),
        Text("Attention needs more data than a CNN", "注意力比 CNN 需要更多数据"),
        Text("It has no built-in notion of neighbourhood and has to learn it. Two tasks within the receptive field of all networks: name the symbol after the marker, where neighbourhood matters, and name the marked symbol, where it does not.", "它事先不知道何为“相邻”，必须从数据中学到。两个任务都在各网络的感受野之内：说出标记之后的符号（相邻关系重要），以及说出被标记的符号（与相邻无关）。"),
        r"P(\hat{y}=y\mid N)",
        data_hunger,
        (
            at_most("loss", 0.05, "largest training loss: all networks have converged", "最大的训练损失：各网络均已收敛"),
            at_least("lead order", 0.1, "accuracy of the CNN minus attention with 256 rows, symbol after the marker", "256 行训练数据时 CNN 与注意力的准确率之差，标记之后的符号"),
            at_least("lead recall", 0.1, "the same, marked symbol", "同上，被标记的符号", part=True),
        ),
        Text("With 256 training rows, all learned until the training loss was at most {loss:.2f}, the CNN leads by {lead order:.0%} where neighbourhood matters and by {lead recall:.0%} where it does not (negative: attention leads): attention needs more data to learn what is not built in.", "用 256 行数据训练，直到训练损失都不超过 {loss:.2f}：相邻关系重要时 CNN 的准确率领先 {lead order:.0%}，相邻无关时领先 {lead recall:.0%}（负数表示注意力领先）。注意力需要更多数据，去学它事先不知道的那部分。"),
        draw_data_hunger,
        Text("Accuracy on new rows against the number of training examples; every network is trained until it has converged.",
        "在新数据上的准确率随训练样本数的变化；各网络都训练到收敛。"),
        {"counts": (32, 64), "steps": 4, "size": 2000},
        repetitions=3,
    ),
)  # fmt: skip
