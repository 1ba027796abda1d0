"""The mechanism step by step, with the weights of a trained model."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between
from regard.lab.draw import heatmap


def steps(attend=None, source=None, head=3, seed=0):
    import torch

    import regard as rg
    from regard.lab.weights import sample

    real = sample(source)  # a sentence in one layer of a trained model
    q, k, v = (part[head % len(part)].double() for part in (real.query, real.key, real.value))
    scores = q @ k.T  # 1. similarity of every query with every key
    scaled = scores / q.shape[-1] ** 0.5  # 2. scale
    weights = torch.softmax(scaled, -1)  # 3. softmax
    output = weights @ v  # 4. weighted sum of the values
    once = (attend or rg.attention)(q, k, v)
    return {**real.weight_names(), "tokens": real.tokens, "scores": scores.tolist(), "scaled": scaled.tolist(),
            "weights": weights.tolist(), "output": output.tolist(), "width": q.shape[-1],
            "off": ((once - output).norm() / output.norm()).item()}  # fmt: skip


def draw_steps(figure: Any, findings: Findings, tr: PickLabel) -> None:
    figure.set_size_inches(7.6, 5.6)
    axes = figure.subplots(2, 2).flatten()
    words = findings["tokens"]
    top = max(abs(x) for row in findings["scores"] for x in row)
    titles = (
        ("scores", tr("1. similarity  QKᵀ", "1. 相似度 QKᵀ"), {"cmap": "RdBu_r", "vmin": -top, "vmax": top}),
        ("scaled", tr("2. scaled  QKᵀ / √d", "2. 缩放 QKᵀ / √d"), {"cmap": "RdBu_r", "vmin": -top, "vmax": top}),
        ("weights", tr("3. softmax: weights", "3. softmax：权重"), {"vmin": 0}),
    )
    for axis, (name, title, style) in zip(axes, titles, strict=False):
        figure.colorbar(heatmap(axis, findings[name], title, words, words, **style), ax=axis, shrink=0.8)
    figure.colorbar(
        heatmap(axes[3], findings["output"], tr("4. weighted sum: output", "4. 加权和：输出"), words, cmap="RdBu_r"),
        ax=axes[3],
        shrink=0.8,
    )
    axes[3].set_xlabel(tr(f"{findings['width']} numbers per token", f"每个词元 {findings['width']} 个数"))


def layer(build=None, d_model=48, d_key=16, d_value=24, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    net = (build or rg.nn.SelfAttention)(d_model, d_key, d_value).double()
    x = torch.randn(1, 10, d_model).double()
    q, k, v = net.query(x), net.key(x), net.value(x)  # d_model to d_key, d_key, d_value
    by_hand = net.output(torch.softmax(q @ k.mT / d_key**0.5, -1) @ v)  # and back to d_model
    return {"off": ((net(x) - by_hand).norm() / by_hand.norm()).item(), "shapes": [list(t.shape[1:]) for t in (x, q, k, v, by_hand)],
            "parts": ["x", "q", "k", "v", "output"], "d_key": q.shape[-1], "d_value": v.shape[-1],
            "d_out": net(x).shape[-1],
            "values": [t[0].tolist() for t in (x, q, k, v, by_hand)]}  # fmt: skip


def draw_layer(figure: Any, findings: Findings, tr: PickLabel) -> None:
    widths = [shape[1] for shape in findings["shapes"]]
    axes = figure.subplots(1, 5, width_ratios=[w + 8 for w in widths])
    names = {
        "x": tr("input x", "输入 x"),
        "q": "q = x·W_q",
        "k": "k = x·W_k",
        "v": "v = x·W_v",
        "output": tr("output", "输出"),
    }
    for axis, part, values, width in zip(axes, findings["parts"], findings["values"], widths, strict=True):
        heatmap(axis, values, names[part], cmap="RdBu_r", vmin=-3, vmax=3)
        axis.set_xlabel(str(width))
    axes[0].set_ylabel(tr("10 tokens", "10 个词元"))


def heads(combine=None, source=None, seed=0):
    import torch

    from regard.lab.weights import sample

    real = sample(source)
    outputs, weights = [], []
    for q, k, v in zip(real.query, real.key, real.value):  # each head separately
        a = torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1)
        weights.append(a)
        outputs.append(a @ v)
    concatenated = (combine or (lambda parts: torch.cat(parts, -1)))(outputs)
    with torch.no_grad():
        by_hand = real.layer.output(concatenated)  # Concat(head_1 .. head_h) W^O
        whole = real.layer(real.x[None])[0]
    weights = torch.stack(weights)
    pairs = [(a - b).abs().sum(-1).mean().item() / 2 for n, a in enumerate(weights) for b in weights[n + 1 :]]
    return {**real.weight_names(), "tokens": real.tokens, "heads": len(weights), "weights": weights[:8].tolist(),
            "apart": sum(pairs) / len(pairs), "off": ((by_hand - whole).norm() / whole.norm()).item()}  # fmt: skip


def draw_heads(figure: Any, findings: Findings, tr: PickLabel) -> None:
    count = len(findings["weights"])
    columns = min(count, 4)
    figure.set_size_inches(7.6, 2.4 * -(-count // columns) + 0.3)
    for n, (axis, weights) in enumerate(
        zip(figure.subplots(-(-count // columns), columns, squeeze=False).flatten(), findings["weights"], strict=False)
    ):
        first, bottom = n % columns == 0, n >= count - columns
        heatmap(
            axis,
            weights,
            tr(f"head {n}", f"第 {n} 头"),  # counted from 0, as in the viewer
            findings["tokens"] if first else (),
            findings["tokens"] if bottom else (),
            vmin=0,
            vmax=1,
        )


def scores(additive=None, widths=(8, 16, 32, 64), seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import growth

    torch.manual_seed(seed)
    q, k, w = torch.randn(6, 16).double(), torch.randn(9, 16).double(), torch.randn(16).double()
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    pairs = {
        "dot": (rg.Dot(1.0), q @ k.T),
        "additive": (rg.Additive(w), torch.tanh(q[:, None] + k[None]) @ w),
        "cosine": (rg.Cosine(), unit(q) @ unit(k).T),
    }
    off = [
        (rg.Attention(score=score).weights(q, k) - torch.softmax(by_hand, -1)).abs().max().item()
        for score, by_hand in pairs.values()
    ]
    count = lambda module: sum(p.numel() for p in module.parameters())
    sizes = [count((additive or rg.nn.AdditiveAttention)(d, d, d)) for d in widths]
    return {"widths": list(widths), "additive": sizes, "power": growth(widths, sizes).power, "last": sizes[-1],
            "off": max(off), "names": list(pairs), "tables": [by_hand.tolist() for _, by_hand in pairs.values()],
            "dot": 0}  # fmt: skip


def draw_scores(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axes = figure.subplots(1, 4)
    names = {"dot": tr("dot", "点积"), "additive": tr("additive", "加性"), "cosine": tr("cosine", "余弦")}
    for axis, name, table in zip(axes, findings["names"], findings["tables"], strict=False):
        heatmap(axis, table, names[name], cmap="RdBu_r")
    axes[3].loglog(findings["widths"], findings["additive"], "o-", label=f"d^{findings['power']:.2f}")
    axes[3].set(title=tr("parameters, additive", "加性打分的参数量"), xlabel="d")
    axes[3].minorticks_off()
    axes[3].set_xticks(findings["widths"], findings["widths"])
    axes[3].legend()


def masks(attend=None, source=None, real_tokens=6, seed=0):
    import torch

    import regard as rg
    from regard.lab.weights import sample

    real = sample(source)
    q, k = real.query[0].double(), real.key[0].double()
    n = len(q)
    kinds = {"none": None, "padding": rg.padding([real_tokens]), "causal": rg.causal()}
    visible = {
        "none": torch.ones(n, n).bool(),
        "padding": (torch.arange(n) < real_tokens).expand(n, n),
        "causal": torch.ones(n, n).tril().bool(),
    }
    attend = attend or (lambda mask: rg.Attention(mask=mask).weights(q, k))
    findings = {**real.weight_names(), "tokens": real.tokens, "off": 0.0, "leaked": 0.0, "kinds": list(kinds)}
    for name, mask in kinds.items():
        by_hand = torch.softmax((q @ k.T / q.shape[-1] ** 0.5).masked_fill(~visible[name], -torch.inf), -1)
        weights = attend(mask)
        findings["leaked"] = max(
            findings["leaked"], weights[~visible[name]].abs().max().item() if (~visible[name]).any() else 0.0
        )
        findings["off"] = max(findings["off"], (weights - by_hand).abs().max().item())
        findings[name] = weights.tolist()
    return findings


def draw_masks(figure: Any, findings: Findings, tr: PickLabel) -> None:
    figure.set_size_inches(7.6, 3.3)
    titles = {
        "none": tr("no mask", "无掩码"),
        "padding": tr("padding: six real tokens", "填充掩码：六个真实词元"),
        "causal": tr("causal: j ≤ i", "因果掩码：j ≤ i"),
    }
    for n, (axis, name) in enumerate(zip(figure.subplots(1, 3), findings["kinds"], strict=True)):
        heatmap(
            axis, findings[name], titles[name], findings["tokens"] if n == 0 else (), findings["tokens"], vmin=0, vmax=1
        )


def positions(table=None, length=64, width=32, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    pe = (table or rg.sinusoidal)(length, width).double()
    pos, i = torch.arange(length).double()[:, None], torch.arange(0, width, 2).double()
    angle = pos / 10000 ** (i / width)
    formula = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    products = pe @ pe.T  # depend on the distance only
    along = [products.diagonal(d) for d in range(length // 2)]
    learned = rg.learned(length, width)
    q, k = torch.randn(2, 20, width).double()
    keys = torch.randn(9, width).double()  # Shaw: a vector for every distance from -4 to 4
    distance = (torch.arange(20)[None] - torch.arange(20)[:, None]).clamp(-4, 4) + 4
    by_hand = torch.softmax((q @ k.T + torch.einsum("qd,qkd->qk", q, keys[distance])) / width**0.5, -1)
    shaw = rg.Attention(bias=rg.shaw(keys)).weights(q, k)
    return {"off": (pe - formula).abs().max().item(), "shaw": (shaw - by_hand).abs().max().item(), "learned": int(learned.requires_grad),
            "drift": max((d.max() - d.min()).item() for d in along), "table": pe.tolist(),
            "along": [d.mean().item() for d in along]}  # fmt: skip


def draw_positions(figure: Any, findings: Findings, tr: PickLabel) -> None:
    left, right = figure.subplots(1, 2)
    heatmap(left, findings["table"], tr("sinusoidal table", "正弦位置编码"), cmap="RdBu_r")
    left.set(xlabel=tr("coordinate", "维度"), ylabel=tr("position", "位置"))
    right.plot(findings["along"])
    right.set(xlabel=tr("distance between two positions", "两个位置的距离"), ylabel=tr("their product", "编码的内积"))


def model(classifier=None, seed=0):
    import torch

    import regard as rg

    torch.manual_seed(seed)
    config = rg.models.TextConfig(
        vocabulary=50, d_model=32, layers=3, heads=4, d_hidden=64, segments=0, pooling="mean", classes=3
    )
    net = (classifier or rg.models.SequenceClassifier)(config).double().eval()
    ids, body = torch.randint(50, (1, 12)), net.encoder
    x = body.embedding_norm(body.embedding(ids) + body.position(torch.arange(12)))  # embedding + position
    names, sizes = ["embedding"], [x.norm(dim=-1).mean().item()]
    for block in body.stack.layers:  # N times
        x = block.attention_residual.norm(x + block.attention(x))  # multi-head self-attention, residual, layer norm
        x = block.feedforward_residual.norm(x + block.feedforward(x))  # feed-forward, residual, layer norm
        sizes.append(x.norm(dim=-1).mean().item())
        names.append(f"block {len(names)}")
    pooled = x.mean(1)  # pooling
    by_hand = net.classifier(torch.tanh(net.transform(pooled)))  # output layer
    off = ((net(ids) - by_hand).norm() / by_hand.norm()).item()
    return {
        "off": off,
        "names": names,
        "sizes": sizes,
        "states": x[0].tolist(),
        "pooled": pooled.tolist(),
        "logits": by_hand.tolist(),
    }


def draw_model(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axes = figure.subplots(1, 3, width_ratios=[5, 5, 2])
    heatmap(axes[0], findings["states"], tr("after the last block", "最后一个块之后"), cmap="RdBu_r")
    heatmap(axes[1], findings["pooled"], tr("pooled", "池化之后"), cmap="RdBu_r")
    heatmap(axes[2], findings["logits"], tr("logits", "输出"), cmap="RdBu_r")


WEIGHTS = Text("Weights: {weights_en}.", "所用权重：{weights_zh}。")

CLAIMS = (
    Claim(
        "steps", "mechanism", ("mechanism 1",),
        Text("Attention in four steps", "注意力的四个步骤"),
        Text("Similarity of queries with keys, scaling, softmax, weighted sum of the values.",
        "查询与键的相似度、缩放、softmax、对值加权求和。"),
        r"\operatorname{Attention}(Q,K,V)=\operatorname{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right)V",
        steps,
        (at_most("off", 1e-10, "relative difference", "相对差"),),
        Text(f"The four steps and one call of regard differ by {{off:.1e}}. {WEIGHTS.en}",
        f"四个步骤与 regard 的一次调用相差 {{off:.1e}}。{WEIGHTS.zh}"),
        draw_steps,
        Text("One head on a sentence: each row is a query, each column a key.", "一个注意力头在一句话上的计算：每行是一个查询，每列是一个键。"),
        repetitions=1,
    ),
    Claim(
        "scores", "mechanism", ("mechanism 2",),
        Text("Three scores: dot, additive, cosine", "三种打分：点积、加性、余弦"),
        Text("The additive score has O(d²) parameters in its two projections; the plain dot product has none.",
        "加性打分的两个投影要学习 O(d²) 个参数，而点积一个也没有。"),
        r"q\cdot k,\qquad v^\top\tanh(W_qq+W_kk),\qquad \frac{q\cdot k}{|q||k|}",
        scores,
        (
            at_most("off", 1e-12, "difference between formulas and scores", "公式与打分之差"),
            between("power", 1.88, 2.12, "power of d with which the additive parameters grow", "加性参数量增长所依 d 的幂次"),
            between("dot", 0, 0, "parameters of the dot product", "点积的参数个数"),
        ),
        Text("The formulas agree with regard's scores to {off:.0e}. The additive parameters grow like d^{power:.2f}, to {last:,} at d = 64; the dot product has {dot}.", "公式与 regard 的打分一致（误差 {off:.0e}）。加性打分的参数量按 d^{power:.2f} 增长，d = 64 时为 {last:,} 个；点积有 {dot} 个。"),
        draw_scores,
        Text("Three scores of the same queries and keys, and the number of parameters of the additive one.",
        "同一组查询与键的三种打分，以及加性打分的参数量。"),
    ),
    Claim(
        "layer", "mechanism", ("mechanism 4",),
        Text("A self-attention layer", "一个自注意力层"),
        Text("Three projections from d_model to d_key, d_key and d_value; attention; and a projection back to d_model.", "三个投影把 d_model 变为 d_key、d_key 与 d_value；计算注意力；再投影回 d_model。"),
        r"\operatorname{softmax}\!\left(\frac{XW_Q(XW_K)^\top}{\sqrt{d_k}}\right)XW_V\,W_O",
        layer,
        (at_most("off", 1e-12, "relative difference", "相对差"),),
        Text("A step-by-step computation differs from the module by {off:.1e}; the widths are {d_key}, {d_key}, {d_value} and finally {d_out}.",
        "逐步计算与模块相差 {off:.1e}；宽度依次为 {d_key}、{d_key}、{d_value}，最后回到 {d_out}。"),
        draw_layer,
        Text("Ten tokens in the stages of a layer, and the width of each stage.", "十个词元经过一层的过程，以及各部分的宽度。"),
    ),
    Claim(
        "heads", "mechanism", ("mechanism 5",),
        Text("Heads attend to different tokens in parallel", "多个头并行地关注不同的内容"),
        Text("h projections in parallel, whose outputs are concatenated and projected again.",
        "h 组投影并行计算，把输出拼接起来，再做一次投影。"),
        r"\operatorname{MultiHead}(X)=\operatorname{Concat}(\mathrm{head}_1,\dots,\mathrm{head}_h)W^O",
        heads,
        (
            at_most("off", 1e-5, "relative difference (float32)", "相对差（float32）"),
            at_least("apart", 0.05, "mean share of weight in which two heads differ", "两个头之间平均相差的权重份额"),
        ),
        Text(f"The {{heads}} heads, computed separately, concatenated and projected, differ from the layer by {{off:.1e}} (float32). Two heads differ in {{apart:.0%}} of their weight on average. {WEIGHTS.en}", f"{{heads}} 个头分别计算、拼接、投影，与整层相差 {{off:.1e}}（float32）。任意两个头平均有 {{apart:.0%}} 的权重不同。{WEIGHTS.zh}"),
        draw_heads,
        Text("The weights of the first heads on the same sentence.", "前几个头在同一句话上的权重。"),
        repetitions=1,
    ),
    Claim(
        "masks", "mechanism", ("mechanism 6",),
        Text("Masked keys have no weight", "被屏蔽的键没有权重"),
        Text("A padding mask hides padding tokens, a causal mask hides later tokens. Masked scores are −∞ before the softmax.",
        "填充掩码屏蔽填充词元，因果掩码屏蔽后面的词元。被屏蔽的得分在 softmax 之前为 −∞。"),
        r"s_{ij}\leftarrow-\infty\quad(M_{ij}=0),\qquad M^{\text{causal}}_{ij}=[\,j\le i\,]",
        masks,
        (
            between("leaked", 0, 0, "largest weight of a masked key", "被屏蔽的键的最大权重"),
            at_most("off", 1e-10, "difference from −∞ before the softmax", "与 softmax 之前置 −∞ 之差"),
        ),
        Text(f"The weight of masked keys is exactly {{leaked:g}}; the other weights agree with −∞ before the softmax to {{off:.0e}}. {WEIGHTS.en}", f"被屏蔽的键的权重恰为 {{leaked:g}}；其余与“softmax 前置为 −∞”相差 {{off:.0e}}。{WEIGHTS.zh}"),
        draw_masks,
        Text("The same head without a mask, with padding and with a causal mask.", "同一个头：无掩码、填充掩码、因果掩码。"),
        repetitions=1,
    ),
    Claim(
        "positions", "mechanism", ("mechanism 7",),
        Text("Positions: sinusoidal, learned, relative", "位置：正弦、可学习、相对"),
        Text("Sines and cosines of decreasing frequency; a trained table; or, following Shaw et al., a vector for every distance.", "频率递减的正弦与余弦；可训练的表；或如 Shaw 等人那样，每个距离对应一个向量。"),
        r"PE_{p,2i}=\sin\frac{p}{10000^{2i/d}},\qquad PE_{p,2i+1}=\cos\frac{p}{10000^{2i/d}}",
        positions,
        (
            at_most("off", 1e-6, "difference from the sinusoidal formula", "与正弦公式之差"),
            at_most("shaw", 1e-12, "difference from Shaw's formula", "与 Shaw 公式之差"),
            at_most("drift", 1e-4, "spread of products at equal distance", "相同距离处内积的最大差异"),
            between("learned", 1, 1, "the learned table has a gradient (1: yes)", "可学习的表带有梯度（1 表示是）"),
        ),
        Text("regard's table agrees with the formula to {off:.0e}, its relative scores with Shaw's to {shaw:.0e}. Products of two sinusoidal positions depend only on their distance (to {drift:.0e}).", "regard 的编码表与公式相差 {off:.0e}，相对打分与 Shaw 的公式相差 {shaw:.0e}。两个正弦编码的内积只取决于它们的距离（误差 {drift:.0e}）。"),
        draw_positions,
        Text("The sinusoidal table, and the product of two of its rows against their distance.",
        "正弦编码表，以及其中两行的内积随距离的变化。"),
    ),
    Claim(
        "model", "mechanism", ("mechanism 8",),
        Text("The whole model, from tokens to output", "完整的模型：从词元到输出"),
        Text("Embedding and position; N times self-attention and feed-forward, each with residual and layer norm; pooling; output layer.", "词嵌入与位置；N 次“自注意力 + 前馈”，各带残差与层归一化；池化；输出层。"),
        r"x\leftarrow\operatorname{LN}(x+\operatorname{MHA}(x)),\qquad x\leftarrow\operatorname{LN}(x+\operatorname{FFN}(x))",
        model,
        (at_most("off", 1e-10, "relative difference", "相对差"),),
        Text("Composed step by step in this order, the model differs from regard's classifier by {off:.1e}.", "按此顺序手工拼装，与 regard 的分类模型相差 {off:.1e}。"),
        draw_model,
        Text("Hidden states of twelve tokens, their mean, and the logits of three classes.",
        "十二个词元的隐藏状态、它们的平均，以及三个类别的输出。"),
    ),
)  # fmt: skip
