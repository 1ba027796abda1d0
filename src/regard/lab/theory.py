"""The items of the theory. Each is measured by at least one claim."""

from __future__ import annotations

from regard.lab.claim import Text

ITEMS: dict[str, Text] = {
    "mechanism 1": Text("Attention is softmax(QKᵀ/√d)V, in four steps.", "注意力即 softmax(QKᵀ/√d)V，分四步。"),
    "mechanism 2": Text(
        "Scores: dot, additive with O(d²) parameters, cosine.", "打分：点积、加性（O(d²) 个参数）、余弦。"
    ),
    "mechanism 3": Text("Temperature interpolates between argmax and uniform.", "温度：从 argmax 到均匀分布。"),
    "mechanism 4": Text("A layer projects, attends and projects back.", "一层：投影、计算注意力、再投影回去。"),
    "mechanism 5": Text("Heads in parallel, concatenated and projected.", "多头并行，拼接后再投影。"),
    "mechanism 6": Text("Padding and causal masks, −∞ before the softmax.", "填充与因果掩码，在 softmax 之前置为 −∞。"),
    "mechanism 7": Text("Positions: sinusoidal, learned, relative.", "位置：正弦、可学习、相对。"),
    "mechanism 8": Text("The whole model; encoder and decoder.", "完整的模型；编码器与解码器。"),
    "mechanism 9": Text("Alternatives to O(n²).", "O(n²) 的替代方案。"),
    "claim 1": Text("Var(q·k) = d, and 1 after scaling.", "Var(q·k) = d，缩放后为 1。"),
    "claim 2": Text("At d = 64 nearly all products lie within ±24.", "d = 64 时几乎所有点积都在 ±24 之内。"),
    "claim 3": Text("Unscaled, the softmax saturates as d grows.", "不缩放时，softmax 随 d 增大而饱和。"),
    "claim 4": Text("Weights are a distribution, outputs in the hull.", "权重是分布，输出在凸包之内。"),
    "claim 5": Text("Equivariance, invariance, and what breaks them.", "等变、不变，以及什么会打破它们。"),
    "claim 6": Text("Permutation matrices.", "置换矩阵。"),
    "claim 7": Text("The path of gradients, and their size.", "梯度的路径与大小。"),
    "claim 8": Text("O(n²d) time, O(n²) memory, and alternatives.", "O(n²d) 时间、O(n²) 内存，以及更省的办法。"),
    "claim 9": Text("Scaling does not reduce the cost.", "缩放并不能解决开销。"),
    "claim 10": Text("Attention compared with CNN and RNN.", "注意力与 CNN、RNN 的比较。"),
    "claim 11": Text("Weights are a soft alignment.", "权重是软对齐。"),
    "claim 12": Text("The softmax needs its maximum subtracted.", "softmax 需要减去最大值。"),
    "example 1": Text("Two keys and their weights.", "两个键及其权重。"),
    "example 2": Text("softmax([3, −3]).", "softmax([3, −3])。"),
    "example 3": Text("softmax([8, 2, 1]).", "softmax([8, 2, 1])。"),
    "example 4": Text("softmax([2.5, 0, −2.5]).", "softmax([2.5, 0, −2.5])。"),
    "example 5": Text("Weights that are not normalised.", "未归一化的权重。"),
    "example 6": Text("Keys and values from the projected query.", "由投影后的查询计算键与值。"),
    "approximation": Text("The error of linear and window attention.", "线性注意力与窗口注意力的误差。"),
    "normalization": Text("What replaces the softmax.", "softmax 的替代。"),
    "bottleneck": Text("The fixed vector between two recurrent networks.", "两个循环网络之间的固定向量。"),
    "jacobian": Text("The product of the Jacobians of an RNN.", "RNN 各步雅可比矩阵之积。"),
    "sigma": Text("One, two and three standard deviations.", "一、二、三倍标准差。"),
    "row sums": Text("Row sums other than 1; L1 and L2 normalisation.", "不等于 1 的行和；L1 与 L2 归一化。"),
    "extrapolation": Text("Positions beyond the trained length.", "训练长度之外的位置。"),
    "stable gradients": Text(
        "Residual connections, layer norm, initialisation, clipping.", "残差连接、层归一化、初始化、裁剪。"
    ),
    "several heads": Text("Why several heads.", "为什么需要多个头。"),
    "stability": Text("Where the naive softmax overflows.", "朴素 softmax 在何处溢出。"),
}
"""Mechanism, claims and worked examples in the order of the theory, and questions about normalisation and accuracy."""

THEMES: dict[str, Text] = {
    "recurrence": Text("Why attention", "为什么需要注意力"),
    "mechanism": Text("The mechanism", "机制"),
    "softmax": Text("Scaling and softmax", "缩放与 softmax"),
    "symmetry": Text("Symmetry", "对称性"),
    "gradients": Text("Gradients", "梯度"),
    "cost": Text("Cost", "开销"),
    "approximation": Text("Approximations", "近似"),
    "architectures": Text("Compared with CNN and RNN", "与 CNN、RNN 相比"),
    "translation": Text("Attention between two sentences", "两个句子之间"),
    "examples": Text("Worked examples, recomputed", "重新计算书中算例"),
}
"""Chapters of the page."""
