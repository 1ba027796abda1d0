"""The words of a diagram in English and Chinese."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[..., str]
"""Returns the text of a key in one language, formatted; a key without a text is its own text."""

WORDS = {
    "tokens": ("Token ids", "词元编号"),
    "input": ("Input", "输入"),
    "source": ("Source", "源序列"),
    "target": ("Target so far", "已生成的目标序列"),
    "image": ("Image", "图像"),
    "text": ("Text", "文本"),
    "output": ("Output", "输出"),
    "encoder": ("Encoder", "编码器"),
    "decoder": ("Decoder", "解码器"),
    "stack": ("Stack of layers", "层的堆叠"),
    "layer": ("Layer", "层"),
    "pattern": ("Pattern of layers", "层的重复模式"),
    "layers": ("Layers", "层"),
    "self-attention": ("Self-attention", "自注意力"),
    "cross-attention": ("Cross-attention", "交叉注意力"),
    "attention": ("Attention", "注意力"),
    "feed-forward": ("Feed-forward", "前馈层"),
    "norm": ("Norm", "归一化"),
    "embedding": ("Embedding", "词嵌入"),
    "target_embedding": ("Target embedding", "目标词嵌入"),
    "position": ("Positions, added", "位置编码（相加）"),
    "target_position": ("Positions, added", "位置编码（相加）"),
    "segment": ("Segments, added", "段嵌入（相加）"),
    "embedding_norm": ("Norm", "归一化"),
    "target_embedding_norm": ("Norm", "归一化"),
    "head": ("Output layer", "输出层"),
    "classifier": ("Classifier", "分类层"),
    "pooling": ("Pooling", "池化"),
    "patches": ("Patches", "图块"),
    "backbone": ("Backbone", "骨干网络"),
    "tensors": ("Learned tensors", "可学习的张量"),
    "tied output": ("Output layer, tied", "输出层（与词嵌入共享）"),
    "projection": ("Projection", "投影"),
    "folded": ("× {times}, layers {first} to {last}", "× {times}，第 {first} 至 {last} 层"),
    "parameters": ("{count:,} parameters", "{count:,} 个参数"),
    "each": ("{count:,} parameters each", "每层 {count:,} 个参数"),
    "heads": ("{heads} heads × {width}", "{heads} 个头 × {width}"),
    "kv": ("{heads} heads × {width}, {kv_heads} key/value heads", "{heads} 个头 × {width}，{kv_heads} 个键值头"),
    "mask.none": ("no mask", "无掩码"),
    "rotary": ("rotary", "旋转位置"),
    "sink": ("sink", "汇点"),
    "added": ("added", "相加"),
    "about": ("{name}: {count:,} parameters", "{name}：{count:,} 个参数"),
    "hint": ("Click a box for its details", "点击方框查看详情"),
    "close": ("close", "关闭"),
    "row.module": ("Module", "模块"),
    "row.class": ("Class", "类"),
    "row.heads": ("Heads", "头"),
    "row.weights": ("Weights", "权重"),
    "row.result": ("Output", "输出"),
    "row.mask": ("Mask", "掩码"),
    "row.bias": ("Bias", "偏置"),
    "row.rotary": ("Rotary", "旋转位置"),
    "row.sink": ("Sink", "汇点"),
    "row.dropout": ("Dropout", "Dropout"),
    "row.description": ("Description", "描述"),
    "row.parameters": ("Parameters", "参数"),
    "row.buffers": ("Not trained", "不训练"),
    "row.copies": ("Copies", "副本"),
    "row.shared": ("Shared", "共享"),
    "row.activation": ("Activation", "激活函数"),
    "shared": ("with {path}, counted there", "与 {path} 共享，参数在那里计数"),
    "mask.all": ("none: every query may attend to every key", "无：每个查询都可以关注每个键"),
    "mask.call": ("none of its own; padding is masked in each call", "自身没有；每次调用时屏蔽填充"),
    "bias.stack": ("from the stack: {path}", "来自堆叠：{path}"),
    "more": ("and {count} more", "以及另外 {count} 个"),
    "none": ("none", "无"),
    "runs": ("each runs {times} times", "每层运行 {times} 次"),
    "rest": ("added to the residual stream", "加到残差上"),
}


def words(lang: str) -> Say:
    """Return the function that says keys in a language.

    >>> from regard.view.diagrams.words import words
    >>> words("zh")("heads", heads=4, width=8), words("en")("a name")
    ('4 个头 × 8', 'a name')
    """

    def say(key: str, **values: object) -> str:
        if key not in WORDS:
            return key
        return WORDS[key][lang == "zh"].format(**values)

    return say
