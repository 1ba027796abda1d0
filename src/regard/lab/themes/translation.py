"""Encoder and decoder: attention between two sentences."""

from __future__ import annotations

from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel, Text
from regard.lab.criteria import at_least, at_most
from regard.lab.draw import heatmap


def encoder_decoder(cross=None, steps=400, seed=0):
    import torch

    from regard.lab.toy_translator import ENGLISH, FRENCH, START, ids, pair, project_heads, translator

    net = translator(seed, steps)
    words = pair("the black cat follows a red train".split())
    source, target = (
        torch.tensor([ids(words.source, ENGLISH)]),
        torch.tensor([[START, *ids(words.target, FRENCH)[:-1]]]),
    )
    captured = []
    block = net.decoder.layers[0]
    hook = block.cross.register_forward_hook(lambda module, args, out: captured.extend([*args[:2], out]))
    with torch.no_grad():
        net(source, target)
        hook.remove()
        x, encoded, out = captured  # decoder states, encoder states, output
        # queries from the decoder, keys and values from the encoder
        q, k, v = (cross or project_heads)(block.cross, x, encoded)
        a = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        by_hand = block.cross.output((a @ v).transpose(1, 2).flatten(2))
    return {"off": ((by_hand - out).norm() / out.norm()).item(), "weights": a.mean(1)[0].tolist(),
            "source": [*words.source, "</s>"], "target": ["<s>", *words.target]}  # fmt: skip


def draw_encoder_decoder(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    figure.colorbar(
        heatmap(
            axis,
            findings["weights"],
            tr("weights, mean over heads", "权重（各头平均）"),
            findings["target"],
            findings["source"],
            vmin=0,
        ),
        ax=axis,
    )
    axis.set(xlabel=tr("keys: encoder", "键：编码器"), ylabel=tr("queries: decoder", "查询：解码器"))


def alignment(model=None, sentences=200, steps=400, seed=0):
    import random

    import torch

    from regard.lab.toy_translator import (
        FILLER,
        FRENCH,
        batch,
        cross_attention_weights,
        draw_pair,
        ids,
        pair,
        translator,
    )

    net = model or translator(seed, steps)  # trained on sentence pairs only, without alignments
    draw = random.Random(seed + 1)
    pairs = [draw_pair(draw) for _ in range(sentences)]
    source, target = batch(pairs)
    translations = net.generate(source, source != FILLER, max_new_tokens=12)
    right = sum(words.tolist() == ids(p.target, FRENCH)[:-1] for words, p in zip(translations, pairs)) / sentences
    # (sentence, head, word): source position with the largest weight
    best = cross_attention_weights(net, source, target[:, :-1]).argmax(-1)
    hits = torch.tensor([[best[n, h, i] == j for n, p in enumerate(pairs) for i, j in enumerate(p.comes_from)]
                         for h in range(best.shape[1])]).float().mean(1)  # fmt: skip
    chance = sum(len(p.target) / (len(p.source) + 1) for p in pairs) / sum(len(p.target) for p in pairs)
    shown = pair("the black cat follows a red train".split())
    weights = cross_attention_weights(net, *(side for side in batch([shown])))[0, hits.argmax()]
    return {"translated": right, "aligned": hits.max().item(), "heads": hits.tolist(), "chance": chance, "weights": weights[:-2].tolist(),
            "source": [*shown.source, "</s>"], "target": shown.target, "comes_from": shown.comes_from}  # fmt: skip


def draw_alignment(figure: Any, findings: Findings, tr: PickLabel) -> None:
    axis = figure.subplots()
    figure.colorbar(
        heatmap(
            axis,
            findings["weights"],
            tr("weights of the best head", "对齐最好的头的权重"),
            findings["target"],
            findings["source"],
            vmin=0,
            vmax=1,
        ),
        ax=axis,
    )
    axis.plot(
        findings["comes_from"],
        range(len(findings["target"])),
        "s",
        markerfacecolor="none",
        markeredgecolor="C1",
        markersize=11,
        markeredgewidth=1.8,
    )


CLAIMS = (
    Claim(
        "encoder-decoder", "translation", ("mechanism 8",),
        Text("The decoder's queries attend to the encoder's keys and values", "解码器的查询关注编码器的键与值"),
        Text("Cross-attention: queries are computed from the target sentence, keys and values from the source sentence.", "交叉注意力：查询由目标句算出，键与值由源句算出。"),
        r"Q=Y W_Q,\quad K=X W_K,\quad V=X W_V",
        encoder_decoder,
        (at_most("off", 1e-4, "relative difference (float32)", "相对差（float32）"),),
        Text("For a small translator trained for this page, a step-by-step computation differs from the module by {off:.1e} (float32).", "在为本页训练的小型翻译模型中，逐步计算的结果与模块相差 {off:.1e}（float32）。"),
        draw_encoder_decoder,
        Text("Source words to which the decoder attends for each word.", "解码器写每个词时关注哪些源语词。"),
        {"steps": 30},
        repetitions=3,
    ),
    Claim(
        "alignment", "translation", ("claim 11",),
        Text("The weights are a soft alignment", "权重就是一种软对齐"),
        Text("To generate a word, the decoder attends to its source word. Sentences are generated by rules here, so that the source of every word is known: in French, colours follow the noun.", "生成一个词时，解码器会关注它对应的源语词。这里的句子由规则生成，每个词的来源都已知：法语把颜色词放在名词之后。"),
        r"\operatorname{argmax}_j\alpha_{ij}=\operatorname{origin}(i)",
        alignment,
        (
            at_least("aligned", 0.3, "share of words on which the best head points to the source word: twice chance or more", "最好的头指向来源词的比例：至少为随机的两倍"),
            at_most("chance", 0.15, "the same for random weights", "随机权重的相应比例"),
            at_least("translated", 0.9, "share of new sentences translated correctly", "新句子中译对的比例"),
        ),
        Text("The largest weight of the best head is on the right source word in at least {aligned:.0%} of cases (chance: {chance:.0%}). The translator was trained for seconds without alignments and translates {translated:.0%} of new sentences correctly.", "对齐最好的头的最大权重至少有 {aligned:.0%} 落在正确的源语词上（随机为 {chance:.0%}）。该翻译模型只训练了几秒，没有用到对齐信息，能译对 {translated:.0%} 的新句子。"),
        draw_alignment,
        Text("The weights of the best head; squares mark the true source words.",
        "对齐最好的头的权重；方框标出每个词真正的来源。"),
        {"steps": 30, "sentences": 20},
        repetitions=3,
    ),
)  # fmt: skip
