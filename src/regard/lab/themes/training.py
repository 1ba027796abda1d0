"""What keeps the gradients of a deep network in range: residual connections, layer norm, initialisation, clipping."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most, between


def layer_gradients(forms=None, layers=24, tokens=16, width=32, seed=0):
    import torch
    from torch.nn.functional import layer_norm

    import regard as rg

    torch.manual_seed(seed)

    def parts(gain):
        attention, feedforward = rg.nn.MultiHeadAttention(width, heads=2), rg.nn.FeedForward(width, 4 * width)
        with torch.no_grad():
            for parameter in (*attention.parameters(), *feedforward.parameters()):
                parameter *= gain
        return attention.double(), feedforward.double()

    norm = lambda x: layer_norm(x, (width,))
    forms = forms or {  # how one part changes the state x, and the factor of the initial weights
        "plain": (lambda x, part: part(x), 1.0),
        "larger weights": (lambda x, part: part(x), 1.5),
        "norm": (lambda x, part: norm(part(x)), 1.0),
        "residual": (lambda x, part: x + part(x), 1.0),
        "residual, larger weights": (lambda x, part: x + part(x), 1.5),
        "residual and norm": (lambda x, part: x + part(norm(x)), 1.0),
    }
    findings = {"names": list(forms), "layers": list(range(1, layers + 1))}
    for name, (combine, gain) in forms.items():
        x, states = torch.randn(4, tokens, width).double(), []
        for _ in range(layers):
            x = x.detach().requires_grad_() if not states else x
            x.retain_grad()
            states.append(x)
            for part in parts(gain):
                x = combine(x, part)
        (x * torch.randn_like(x)).sum().backward()
        sizes = [state.grad.norm().item() for state in states]
        findings |= {name: sizes, "ratio " + name: sizes[0] / max(sizes[-1], 1e-300)}  # first layer over the last
    return findings


def draw_layer_gradients(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = {
        "plain": "无残差、无归一化", "larger weights": "无残差，权重较大", "norm": "只有层归一化", "residual": "只有残差",
        "residual, larger weights": "残差，权重较大", "residual and norm": "残差与层归一化",
    }  # fmt: skip
    for name in findings["names"]:
        sizes = [max(y, 1e-45) for y in findings[name]]
        axis.semilogy(findings["layers"], sizes, label=tr(name, names.get(name, name)))
    axis.set(xlabel=tr("layer", "层"), ylabel=tr("norm of the gradient", "梯度的范数"))
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def clipping(clip=None, width=32, seed=0):
    import torch

    torch.manual_seed(seed)
    clip = clip or torch.nn.utils.clip_grad_norm_
    net = torch.nn.RNN(width, width, batch_first=True)
    with torch.no_grad():
        net.weight_hh_l0 *= 3.5
    before, after, cosines = [], [], []
    for scale in (0.001, 0.1, 10.0, 1000.0):
        net.zero_grad()
        (net(torch.randn(4, 20, width))[0][:, -1].sum() * scale).backward()
        flat = torch.cat([p.grad.flatten().double() for p in net.parameters()])
        clip(net.parameters(), 1.0)
        clipped = torch.cat([p.grad.flatten().double() for p in net.parameters()])
        before.append(flat.norm().item())
        after.append(clipped.norm().item())
        cosines.append(torch.cosine_similarity(flat, clipped, 0).item())
    small = [abs(a / b - 1) for a, b in zip(after, before) if b < 1]
    return {
        "before": before,
        "after": after,
        "most": max(after),
        "cosine": min(cosines),
        "small": max(small, default=0.0),
    }


def draw_clipping(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    axis.loglog(findings["before"], findings["after"], "o-", label=tr("clipped", "裁剪后"))
    axis.loglog(findings["before"], findings["before"], ":", color="gray", label=tr("not clipped", "不裁剪"))
    axis.set(xlabel=tr("norm of the gradient", "梯度的范数"), ylabel=tr("norm that is used", "实际使用的范数"))
    axis.legend()


def several_heads(build=None, width=32, tokens=8, steps=300, seed=0):
    import torch

    import regard as rg
    from regard.lab.complexity import one_thread

    half = width // 2

    def batch():  # two marked tokens at random places; wanted: the value of the first minus that of the second
        x = torch.zeros(64, tokens, width)
        x[..., :half] = torch.randn(64, tokens, half)
        first, second = torch.rand(64, tokens).argsort(-1)[:, :2].T
        rows = torch.arange(64)
        x[rows, first, -1], x[rows, second, -2], x[..., -3] = 6.0, 6.0, 1.0
        return x, (x[rows, first] - x[rows, second])[:, :half]

    def train(layer):
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / steps)
            x, wanted = batch()
            loss = (layer(x)[:, 0, :half] - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def set_by_hand(layer):  # head 0 looks for the first mark, head 1 for the second, and the output subtracts
        query, key, value = torch.zeros(3, width, width)
        query[0, -3] = query[half, -3] = 40.0
        key[0, -1] = key[half, -2] = 1.0
        value[:half, :half] = value[half:, :half] = torch.eye(half)
        with torch.no_grad():
            layer.qkv.weight.copy_(torch.cat([query, key, value]))
            layer.output.weight.zero_()
            layer.output.weight[:half] = torch.cat([torch.eye(half), -torch.eye(half)], 1)
            layer.qkv.bias.zero_()
            layer.output.bias.zero_()

    torch.manual_seed(seed)
    one, two = (build or rg.nn.MultiHeadAttention)(width, heads=1), rg.nn.MultiHeadAttention(width, heads=2)
    with one_thread():
        train(one)
    set_by_hand(two)
    with torch.no_grad():
        x, wanted = batch()
        errors = [((layer(x)[:, 0, :half] - wanted).norm() / wanted.norm()).item() for layer in (one, two)]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in (one, two)]
    return {"one": errors[0], "two": errors[1], "limit": 0.5**0.5, "sizes": sizes[1] - sizes[0]}


def draw_several_heads(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    names = [
        tr("one head, trained", "一个头，训练所得"),
        tr("one head, limit", "一个头，极限"),
        tr("two heads, set by hand", "两个头，手工设定"),
    ]
    axis.barh(names, [findings["one"], findings["limit"], findings["two"]], 0.5, color=["C1", "gray", "C0"])
    axis.set(xlabel=tr("relative error", "相对误差"), xlim=(0, 1.1))


CLAIMS = (
    Claim(
        "layer-gradients", "gradients", ("stable gradients",),
        Text("Residual connections and layer norm keep the gradient in range through many layers", "残差连接与层归一化使梯度穿过多层后仍在适当范围"),
        Text("The gradient with respect to the state before each of 24 layers of attention and feed-forward, at the start of training. Without residual connections it depends exponentially on the depth, and the initial weights decide which way.", "训练开始时，24 层“注意力 + 前馈”中各层输入状态的梯度。没有残差连接时，它随深度指数变化，方向由初始权重决定。"),
        r"\frac{\partial}{\partial x}\left(x+f(\operatorname{LN}(x))\right)=I+\frac{\partial f(\operatorname{LN}(x))}{\partial x}",
        layer_gradients,
        (
            at_most("ratio plain", 1e-3, "gradient at the first layer over the last, plain", "首层与末层梯度之比，无残差、无归一化"),
            between("ratio residual and norm", 0.1, 30, "the same, residual connections and layer norm", "同上，残差与层归一化"),
            at_least("ratio residual, larger weights", 1e3, "the same, residual connections without norm, weights 1.5 times as large", "同上，残差而无归一化，权重为 1.5 倍"),
        ),
        Text("From the last layer to the first the gradient changes by a factor of at most {ratio plain:.0e} without residual connections and {ratio residual and norm:.1f} with residual connections and layer norm. With residual connections alone it is {ratio residual:.0e}, and at least {ratio residual, larger weights:.0e} if the initial weights are 1.5 times as large: the norm is what makes the network insensitive to the size of its weights.", "由末层到首层，梯度的倍数：无残差时至多 {ratio plain:.0e}，有残差与层归一化时为 {ratio residual and norm:.1f}。只有残差时为 {ratio residual:.0e}；若初始权重为 1.5 倍，则至少为 {ratio residual, larger weights:.0e}：使网络对权重大小不敏感的是归一化。"),
        draw_layer_gradients,
        Text("The norm of the gradient before each layer.", "各层输入处梯度的范数。"),
        {"layers": 16},
    ),
    Claim(
        "clipping", "gradients", ("stable gradients",),
        Text("Clipping bounds the norm of a gradient and keeps its direction", "梯度裁剪限制范数，不改变方向"),
        Text("A gradient that is longer than the bound is shortened to it; a shorter one is not changed. Clipping therefore cures explosion, and nothing of what vanishes.", "比上限长的梯度缩短到上限，较短的不变。因此裁剪能防止爆炸，对消失没有作用。"),
        r"g\leftarrow g\cdot\min\left(1,\frac{c}{\lVert g\rVert}\right)",
        clipping,
        (
            at_most("most", 1.001, "largest norm after clipping to 1", "裁剪到 1 之后的最大范数"),
            at_least("cosine", 0.99999, "cosine of the angle between gradient and clipped gradient", "梯度与裁剪后梯度夹角的余弦"),
            at_most("small", 1e-6, "relative change of gradients shorter than 1", "短于 1 的梯度的相对变化"),
        ),
        Text("After clipping to 1 no norm exceeds {most:.4f}; directions agree to a cosine of {cosine:.6f}, and gradients that were shorter change by {small:.0e}.", "裁剪到 1 之后，范数不超过 {most:.4f}；方向的余弦至少 {cosine:.6f}，原本较短的梯度变化 {small:.0e}。"),
        draw_clipping,
        Text("The norm of the gradients of an RNN before and after clipping.", "一个 RNN 的梯度在裁剪前后的范数。"),
    ),
    Claim(
        "several-heads", "mechanism", ("several heads",),
        Text("One head reads one mixture; two heads read two places at once", "一个头只读一种混合；两个头可同时读两处"),
        Text("A layer has to return the value at one marked place minus the value at another. One head has one convex combination, in which no weight is negative; the best it can do is to return the first value, with a relative error of 1/√2. Two heads have two combinations, with the same number of parameters.", "一层须输出某个标记处的值减去另一标记处的值。一个头只有一个凸组合，权重都不为负；它至多能给出第一个值，相对误差为 1/√2。两个头有两个凸组合，而参数量相同。"),
        r"W^O\left[\textstyle\sum_j\alpha^1_jv^1_j;\ \sum_j\alpha^2_jv^2_j\right]\approx v_a-v_b",
        several_heads,
        (
            at_least("one", 0.5, "relative error of one head after training", "一个头训练之后的相对误差"),
            at_most("two", 0.01, "relative error of two heads, weights set by hand", "两个头的相对误差，权重由手工设定"),
            between("sizes", 0, 0, "difference of the numbers of parameters", "参数量之差"),
        ),
        Text("A trained head has an error of at least {one:.0%} (limit: {limit:.0%}); two heads whose weights were set by hand have at most {two:.0e}.", "一个头训练之后的误差至少 {one:.0%}（极限为 {limit:.0%}）；两个头由手工设定权重，误差至多 {two:.0e}。"),
        draw_several_heads,
        Text("The relative error of one head and of two.", "一个头与两个头的相对误差。"),
        {"steps": 100},
        repetitions=3,
    ),
)  # fmt: skip
