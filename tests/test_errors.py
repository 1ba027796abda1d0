"""Every wrong call, and words of its message: the argument, what is expected, what was given, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.nn.generate import stop_tokens

B, H, G, Q, K, D, E = 2, 4, 2, 5, 7, 8, 6


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


q, k, v = normal(B, H, Q, D), normal(B, G, K, D), normal(B, G, K, E)
bits = torch.ones(Q, K, dtype=torch.bool)
LAYER, HIDDEN = rg.nn.MultiHeadAttention(8, 2), normal(1, 3, 8)


def call(**description: Any) -> Callable[[], Any]:
    """`rg.attention(q, k, v, **description)`, where q, k and v may be given instead."""
    return lambda: rg.attention(**{"query": q, "key": k, "value": v} | description)


def weights(**part: Any) -> Callable[[], Any]:
    return lambda: rg.Attention().weights(q, k, **part)


def half_result(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
    return (p + j).float()


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    # query, key and value
    "query is an array": (call(query=q.numpy()), TypeError, ["query", "torch.Tensor", "ndarray", "as_tensor"]),
    "value is a list": (call(value=v.tolist()), TypeError, ["value", "torch.Tensor", "list"]),
    "key is None": (call(key=None), TypeError, ["key", "torch.Tensor", "NoneType"]),
    "integer query": (call(query=q.long()), TypeError, ["query", "float32", "torch.int64", "query.float()"]),
    "integer value": (call(value=v.int()), TypeError, ["value", "bfloat16", "torch.int32", "value.float()"]),
    "complex key": (call(key=k.to(torch.complex64)), TypeError, ["key", "float32", "torch.complex64"]),
    "bool query": (call(query=q > 0), TypeError, ["query", "torch.bool"]),
    "mixed dtypes": (
        call(value=v.double()), TypeError, ["one dtype", "query torch.float32", "value torch.float64", ".to("],
    ),
    "mixed devices": (call(key=k.to("meta")), TypeError, ["one device", "query cpu", "key meta", ".to("]),
    "one axis": (call(query=q[0, 0, 0]), ValueError, ["query", "two to four axes", "(8,)"]),
    "five axes": (call(query=q[None]), ValueError, ["query", "two to four axes", "(1, 2, 4, 5, 8)"]),
    "different numbers of axes": (call(key=k[0]), ValueError, ["same number of axes", "key (2, 7, 8)"]),
    "widths differ": (
        call(key=k[..., :5]), ValueError, ["same width D", "(2, 4, 5, 8)", "(2, 2, 7, 5)", "project"],
    ),
    "as many values as keys": (call(value=v[:, :, :4]), ValueError, ["value", "7 keys", "(2, 2, 4, 6)"]),
    "batches differ": (
        call(query=normal(3, H, Q, D)), ValueError, ["batch axis B", "or 1", "query (3, 4, 5, 8)", "key (2, 2, 7, 8)"],
    ),
    "batch of values differs": (call(value=v.repeat(2, 1, 1, 1)), ValueError, ["batch axis B", "value (4, 2, 7, 6)"]),
    "sparse query": (call(query=q.to_sparse()), TypeError, ["query", "dense", "torch.sparse_coo", "query.to_dense()"]),
    "mkldnn value": (call(value=v.to_mkldnn()), TypeError, ["value", "dense", "mkldnn", "value.to_dense()"]),
    "quantised key": (
        lambda: rg.attention(q, torch.quantize_per_tensor(k, 0.1, 0, torch.qint8), v), TypeError,
        ["key", "qint8", "key.dequantize()"],
    ),
    "nested query": (
        lambda: rg.attention(torch.nested.nested_tensor([q[0], q[1]]), k, v), TypeError,
        ["query", "nested", "rg.documents", "rg.padding(lengths)"],
    ),
    "jagged query": (
        lambda: rg.attention(torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged), k, v), TypeError,
        ["query", "nested"],
    ),
    "sparse mask": (call(mask=bits.to_sparse()), TypeError, ["mask", "dense", "sparse_coo", "mask.to_dense()"]),
    "sparse bias": (call(bias=normal(Q, K).to_sparse()), TypeError, ["bias", "dense", "sparse", "bias.to_dense()"]),
    "sparse query of linear attention": (
        lambda: rg.LinearAttention()(q.to_sparse(), k, v), TypeError, ["query", "dense", "query.to_dense()"],
    ),
    "heads of keys and values differ": (call(value=v[:, :1]), ValueError, ["key and value", "heads G", "(2, 1, 7, 6)"]),
    "H is no multiple of G": (
        call(query=normal(B, 3, Q, D)), ValueError, ["heads H", "multiple", "heads G", "3 and 2", "(2, 3, 5, 8)"],
    ),
    "G is larger than H": (call(query=q[:, :1]), ValueError, ["heads H", "multiple", "heads G", "1 and 2"]),
    # unknown keywords
    "is_causal": (call(is_causal=True), TypeError, ["attention()", "'is_causal'", "mask=rg.causal()", "offset=0"]),
    "attn_mask": (call(attn_mask=bits), TypeError, ["unexpected keyword", "'attn_mask'", "mask=", "bias="]),
    "scale": (call(scale=0.5), TypeError, ["unexpected keyword", "'scale'", "score=rg.Dot(scale=...)"]),
    "dropout_p": (call(dropout_p=0.1), TypeError, ["unexpected keyword", "'dropout_p'", "dropout="]),
    "enable_gqa": (call(enable_gqa=True), TypeError, ["unexpected keyword", "'enable_gqa'", "fewer heads"]),
    "is_causal of a description": (
        lambda: rg.Attention(is_causal=True), TypeError, ["Attention()", "'is_causal'", "mask=rg.causal()"],
    ),
    "attn_mask of a call": (
        lambda: rg.Attention()(q, k, v, attn_mask=bits), TypeError, ["Attention.forward()", "'attn_mask'", "mask="],
    ),
    "a slip in a call": (lambda: rg.Attention()(q, k, v, lse=True), TypeError, ["unexpected keyword", "'lse'"]),
    "embed_dim": (lambda: rg.nn.MultiHeadAttention(embed_dim=8, heads=2), TypeError, ["'embed_dim'", "d_model="]),
    "num_heads": (lambda: rg.nn.MultiHeadAttention(8, num_heads=2), TypeError, ["'num_heads'", "heads="]),
    "batch_first": (
        lambda: rg.nn.MultiHeadAttention(8, 2, batch_first=True), TypeError,
        ["'batch_first'", "always (B, N, d_model)"],
    ),
    "dropout of a module": (
        lambda: rg.nn.MultiHeadAttention(8, 2, dropout=0.1), TypeError,
        ["'dropout'", "attend=rg.Attention(dropout=...)"],
    ),
    "key_padding_mask": (
        lambda: LAYER(HIDDEN, key_padding_mask=bits), TypeError, ["'key_padding_mask'", "rg.padding(lengths)"],
    ),
    "attn_mask of a module": (lambda: LAYER(HIDDEN, attn_mask=bits), TypeError, ["'attn_mask'", "mask=", "bias="]),
    "is_causal of a module": (lambda: LAYER(HIDDEN, is_causal=True), TypeError, ["'is_causal'", "mask=rg.causal()"]),
    "need_weights": (lambda: LAYER(HIDDEN, need_weights=True), TypeError, ["'need_weights'", "weights"]),
    "stop as text": (lambda: stop_tokens("eos"), TypeError, ["stop", "token id or a list", "'eos'"]),
    "a slip of the pen": (lambda: rg.Attention(temperatur=2.0), TypeError, ["unexpected keyword", "'temperatur'"]),
    "a mask by its place": (lambda: rg.attention(q, k, v, rg.causal()), TypeError, ["3 positional arguments"]),
    # score
    "score is a string": (call(score="dot"), TypeError, ["score", "Dot()", "function", "str"]),
    "score is a class": (call(score=rg.Cosine), TypeError, ["score", "class Cosine", "Cosine()"]),
    "scale per head of another number": (
        call(score=rg.Dot(scale=torch.ones(3))), ValueError, ["scale", "4 heads", "(3,)"],
    ),
    "scale of cosine": (call(score=rg.Cosine(scale=torch.ones(5))), ValueError, ["scale", "4 heads", "(5,)"]),
    "scale is a string": (call(score=rg.Dot(scale="1")), TypeError, ["scale", "number or a tensor", "str"]),
    "scale is a list": (call(score=rg.Cosine(scale=[1.0])), TypeError, ["scale", "number or a tensor", "list"]),
    "softcap of 0": (lambda: rg.Dot(softcap=0.0), ValueError, ["softcap", "positive", "0.0", "leave it out"]),
    "softcap is negative": (lambda: rg.Dot(softcap=-1), ValueError, ["softcap", "positive", "-1"]),
    "softcap without end": (lambda: rg.Dot(softcap=float("inf")), ValueError, ["softcap", "positive number", "inf"]),
    "softcap is a string": (lambda: rg.Dot(softcap="30"), TypeError, ["softcap", "positive number", "str"]),
    "softcap is a tensor": (lambda: rg.Dot(softcap=torch.ones(1)), TypeError, ["softcap", "number", "Tensor"]),
    "additive weight of another width": (
        call(score=rg.Additive(torch.ones(5))), ValueError, ["Additive", "weight", "D = 8", "(5,)"],
    ),
    "additive weight for other heads": (
        call(score=rg.Additive(torch.ones(3, D))), ValueError, ["Additive", "weight", "H = 4", "(3, 8)"],
    ),
    "additive weight is an array": (
        lambda: rg.Additive(np.ones(8)), TypeError, ["Additive: weight", "floating-point tensor", "ndarray"],
    ),
    "additive weight of integers": (
        lambda: rg.Additive(torch.ones(8, dtype=torch.int64)), TypeError, ["Additive: weight", "torch.int64"],
    ),
    "bilinear matrix of another width": (
        call(score=rg.Bilinear(torch.eye(5))), ValueError, ["Bilinear", "matrix", "D = 8", "(5, 5)"],
    ),
    "bilinear matrix is a list": (
        lambda: rg.Bilinear([[1.0]]), TypeError, ["Bilinear: matrix", "floating-point tensor", "list"],
    ),
    "modifier returns nothing": (
        call(score=lambda s, b, h, p, j: None), TypeError, ["score", "function must return", "NoneType"],
    ),
    "modifier returns another shape": (
        call(score=lambda s, b, h, p, j: s.sum(-1)), TypeError, ["score", "function must return", "(2, 4, 5)"],
    ),
    "Modified of no function": (lambda: rg.Modified(3), TypeError, ["function", "(score, b, h, q_index", "int"]),
    "Modified of a score": (lambda: rg.Modified(rg.Dot()), TypeError, ["function", "Dot", "second"]),
    "Modified with no score": (lambda: rg.Modified(half_result, "dot"), TypeError, ["score", "Dot()", "str"]),
    # mask
    "a float mask": (call(mask=torch.zeros(Q, K)), TypeError, ["mask", "bool", "torch.float32", "bias="]),
    "an integer mask": (call(mask=bits.int()), TypeError, ["mask", "bool", "torch.int32", "True means may attend"]),
    "an array as a mask": (call(mask=bits.numpy()), TypeError, ["mask", "bool tensor", "ndarray", "as_tensor"]),
    "a pattern that was not called": (call(mask=rg.causal), TypeError, ["mask", "function", "causal()"]),
    "a mask that does not fit": (
        call(mask=bits[:, :5]), ValueError, ["mask", "(B, H, Q, K) = (2, 4, 5, 7)", "(1, 1, 5, 5)"],
    ),
    "a key mask (B, K)": (
        call(mask=torch.ones(B, K, dtype=torch.bool)), ValueError, ["mask", "(1, 1, 2, 7)", "mask[:, None, None, :]"],
    ),
    "a mask of five axes": (call(mask=bits[None, None, None]), ValueError, ["mask", "four axes", "(1, 1, 1, 5, 7)"]),
    "lengths beyond K": (call(mask=rg.padding([3, 8])), ValueError, ["lengths", "K = 7", "longest is 8", "cache"]),
    "one length beyond K": (call(mask=rg.padding(9)), ValueError, ["lengths", "K = 7", "9"]),
    "lengths for another batch": (
        call(mask=rg.padding([3, 4, 5])), ValueError, ["lengths", "2 batch rows", "got 3", "pass an int"],
    ),
    "lengths are negative": (lambda: rg.padding([3, -1]), ValueError, ["lengths", "not be negative", "-1"]),
    "a negative length": (lambda: rg.padding(-1), ValueError, ["lengths", "at least 0", "-1"]),
    "lengths are floats": (lambda: rg.padding([1.5]), TypeError, ["lengths", "whole numbers", "torch.float32"]),
    "lengths are a mask": (lambda: rg.padding(bits[0]), TypeError, ["lengths", "whole numbers", "torch.bool"]),
    "lengths are a matrix": (lambda: rg.padding([[1], [2]]), TypeError, ["lengths", "one per batch row", "(2, 1)"]),
    "lengths are a string": (lambda: rg.padding("3"), TypeError, ["lengths", "whole numbers", "str"]),
    "lengths are None": (lambda: rg.padding(None), TypeError, ["lengths", "whole numbers", "NoneType"]),
    "prefix for another batch": (call(mask=rg.prefix([1, 2, 3])), ValueError, ["length", "2 batch rows", "got 3"]),
    "prefix is negative": (lambda: rg.prefix(-2), ValueError, ["length", "at least 0", "-2"]),
    "ids of the wrong length": (
        call(mask=rg.documents([0, 0, 1])), ValueError, ["ids", "7 keys", "length 3", "offset + i"],
    ),
    "ids for another batch": (
        call(mask=rg.documents(torch.zeros(3, K, dtype=torch.int64))), ValueError, ["ids", "B = 2", "(3, 7)"],
    ),
    "ids are floats": (lambda: rg.documents(torch.zeros(K)), TypeError, ["ids", "whole numbers", "torch.float32"]),
    "ids of three axes": (lambda: rg.documents([[[0]]]), ValueError, ["ids", "(K,) or (B, K)", "(1, 1, 1)"]),
    "ids are a string": (lambda: rg.documents("aab"), TypeError, ["ids", "whole numbers", "str"]),
    "window before is negative": (lambda: rg.window(-1, 0), ValueError, ["before", "at least 0", "-1"]),
    "window after is a float": (lambda: rg.window(1, 0.5), ValueError, ["after", "whole number", "0.5"]),
    "window before is None": (lambda: rg.window(None, 0), ValueError, ["before", "whole number", "None"]),
    "window of True": (lambda: rg.window(True, 0), ValueError, ["before", "whole number", "True"]),
    "window without end": (lambda: rg.window(2**63, 0), ValueError, ["before", "below 2**31", str(2**63)]),
    "dilated width": (lambda: rg.dilated(-1, 2), ValueError, ["width", "at least 0", "-1"]),
    "dilated step": (lambda: rg.dilated(1, 0), ValueError, ["step", "at least 1", "0"]),
    "global_tokens of a number": (lambda: rg.global_tokens(3), TypeError, ["positions", "whole numbers", "3"]),
    "global_tokens of floats": (lambda: rg.global_tokens([1.5]), TypeError, ["positions", "whole numbers", "1.5"]),
    "global_tokens of bools": (lambda: rg.global_tokens([True]), TypeError, ["positions", "whole numbers", "True"]),
    "global_tokens of a string": (lambda: rg.global_tokens("01"), TypeError, ["positions", "whole numbers", "'01'"]),
    "global_tokens of both": (lambda: rg.global_tokens([0, [1]]), TypeError, ["positions", "list of them per batch"]),
    "negative global_tokens": (lambda: rg.global_tokens([-1]), ValueError, ["positions", "negative", "[-1]"]),
    "global_tokens for another batch": (
        call(mask=rg.global_tokens([[0], [1], [2]])), ValueError, ["positions", "2 batch rows", "3 lists"],
    ),
    "longformer of a number": (lambda: rg.longformer(2, 0), TypeError, ["positions", "whole numbers", "0"]),
    "longformer width": (lambda: rg.longformer(-2), ValueError, ["width", "at least 0", "-2"]),
    "longformer step": (lambda: rg.longformer(2, step=0), ValueError, ["step", "at least 1", "0"]),
    "bigbird size": (lambda: rg.bigbird(0), ValueError, ["size", "at least 1", "0"]),
    "bigbird blocks": (lambda: rg.bigbird(2, blocks=0), ValueError, ["blocks", "at least 1", "0"]),
    "bigbird random": (lambda: rg.bigbird(2, random=-1), ValueError, ["random", "at least 0", "-1"]),
    "blocks that cover too few keys": (
        call(mask=rg.blocks(bits[:4, :1], 4)), ValueError, ["blocks", "4 x 1 blocks of 4", "16 x 4", "7 x 7"],
    ),
    "blocks that cover too few queries": (
        call(mask=rg.blocks(bits[:1, :4], 4), offset=2), ValueError, ["blocks", "1 x 4 blocks", "4 x 16", "7 x 7"],
    ),
    "blocks for other heads": (
        call(mask=rg.blocks(torch.ones(3, 9, 9, dtype=torch.bool), 1)), ValueError, ["layout", "H = 4", "(1, 3, 9, 9)"],
    ),
    "blocks of numbers": (lambda: rg.blocks(torch.ones(2, 2), 2), TypeError, ["layout", "bool", "torch.float32"]),
    "blocks of one axis": (lambda: rg.blocks(bits[0], 2), TypeError, ["layout", "(rows, columns)", "(7,)"]),
    "blocks of None": (lambda: rg.blocks(None, 2), TypeError, ["layout", "bool tensor", "NoneType"]),
    "blocks of size 0": (lambda: rg.blocks(bits, 0), ValueError, ["size", "at least 1", "0"]),
    "random_blocks per row": (lambda: rg.random_blocks(0, 2), ValueError, ["per_row", "at least 1", "0"]),
    "random_blocks size": (lambda: rg.random_blocks(2, -4), ValueError, ["size", "at least 1", "-4"]),
    "random_blocks seed": (lambda: rg.random_blocks(2, 2, seed=2**80), ValueError, ["seed", "below 2**31"]),
    "edges to a key beyond K": (
        call(mask=rg.edges([(0, 9)])), ValueError, ["edges", "pairs", "key 9", "7 keys"],
    ),
    "edges as a tensor of pairs": (
        lambda: rg.edges(torch.tensor([(0, 1), (1, 2), (2, 3)])), ValueError, ["pairs", "(2, E)", "(3, 2)", ".T"],
    ),
    "edges as two lists": (
        lambda: rg.edges([[0, 1, 2], [3, 4, 5]]), ValueError, ["pairs", "[[0, 1, 2], [3, 4, 5]]", "torch.tensor"],
    ),
    "edges as two lists of two": (
        lambda: rg.edges([[0, 1], [2, 3]]), ValueError, ["pairs", "[[0, 1], [2, 3]]", "tuples", "torch.tensor"],
    ),
    "edges as two arrays": (lambda: rg.edges(np.nonzero(np.eye(2))), ValueError, ["pairs", "tuples", "torch.tensor"]),
    "edges of floats": (lambda: rg.edges(torch.ones(2, 3)), TypeError, ["pairs", "whole numbers", "torch.float32"]),
    "edges of None": (lambda: rg.edges(None), TypeError, ["pairs", "whole numbers", "NoneType"]),
    "negative edges": (lambda: rg.edges([(0, -1)]), ValueError, ["pairs", "negative", "-1"]),
    "where of no function": (lambda: rg.where(bits), TypeError, ["function", "callable", "(b, h, p, j)", "Tensor"]),
    "where that returns numbers": (
        call(mask=rg.where(half_result)), TypeError, ["where", "bool tensor", "torch.float32"],
    ),
    "where that returns a bool": (
        call(mask=rg.where(lambda b, h, p, j: True)), TypeError, ["where", "bool tensor", "returned bool"],
    ),
    "a mask & a tensor": (lambda: rg.causal() & bits, TypeError, ["a mask, got", "Tensor", "regard.dense(tensor)"]),
    "a tensor & a mask": (lambda: bits & rg.causal(), TypeError, ["a mask, got", "Tensor", "regard.dense(tensor)"]),
    "a mask | a tensor": (lambda: rg.causal() | bits, TypeError, ["a mask, got", "Tensor", "regard.dense(tensor)"]),
    "a tensor | a mask": (lambda: bits | rg.causal(), TypeError, ["a mask, got", "Tensor", "regard.dense(tensor)"]),
    "a mask & None": (lambda: rg.causal() & None, TypeError, ["a mask, got", "NoneType"]),
    "a mask and a mask": (lambda: rg.causal() and rg.window(1, 0), TypeError, ["&, | and ~", "and, or and not"]),
    "not a mask": (lambda: not rg.causal(), TypeError, ["&, | and ~", "and, or and not"]),
    "drawn over no keys": (lambda: rg.causal().draw(0), ValueError, ["keys", "at least 1", "0"]),
    "drawn in no width": (lambda: rg.causal().draw(4, width=0), ValueError, ["width", "at least 1", "0"]),
    # bias
    "a bool bias": (call(bias=bits), TypeError, ["bias", "add to the scores", "torch.bool", "mask="]),
    "an integer bias": (call(bias=bits.int()), TypeError, ["bias", "floating-point", "torch.int32"]),
    "an array as a bias": (call(bias=np.zeros((Q, K))), TypeError, ["bias", "floating-point tensor", "ndarray"]),
    "a bias that was not called": (call(bias=rg.alibi), TypeError, ["bias", "function", "alibi(heads)"]),
    "a bias that does not fit": (
        call(bias=torch.zeros(Q, 3)), ValueError, ["bias", "(B, H, Q, K) = (2, 4, 5, 7)", "(5, 3)"],
    ),
    "a bias + a tensor": (lambda: rg.alibi(4) + torch.zeros(1), TypeError, ["a bias", "Tensor", "dense_bias(tensor)"]),
    "a tensor + a bias": (lambda: torch.zeros(1) + rg.alibi(4), TypeError, ["a bias", "Tensor", "dense_bias(tensor)"]),
    "alibi for other heads": (call(bias=rg.alibi(3)), ValueError, ["alibi", "heads=3", "H = 4"]),
    "alibi for no heads": (lambda: rg.alibi(0), ValueError, ["heads", "at least 1", "0"]),
    "relative for other heads": (
        call(bias=rg.relative(torch.zeros(5, 3))), ValueError, ["relative: table", "H = 4", "(5, 3)"],
    ),
    "relative of an even table": (
        lambda: rg.relative(torch.zeros(6, 4)), ValueError, ["relative: table", "(2R+1, H)", "odd", "(6, 4)"],
    ),
    "relative with swapped axes": (
        lambda: rg.relative(torch.zeros(4, 5)), ValueError, ["relative: table", "(2R+1, H)", "(4, 5)"],
    ),
    "relative with swapped axes and an odd number of heads": (
        lambda: rg.attention(*(torch.zeros(1, 3, 2, D),) * 3, bias=rg.relative(torch.zeros(3, 5))),
        ValueError, ["relative: table", "(2R+1, H)", "(3, 5)", "swapped"],
    ),
    "relative of one axis": (lambda: rg.relative(torch.zeros(5)), TypeError, ["relative: table", "(2R+1, H)", "(5,)"]),
    "relative of an array": (
        lambda: rg.relative(np.zeros((4, 5))), TypeError, ["relative: table", "tensor", "ndarray"],
    ),
    "t5 for other heads": (call(bias=rg.t5(torch.zeros(32, 3))), ValueError, ["t5: table", "H = 4", "(32, 3)"]),
    "t5 with swapped axes": (call(bias=rg.t5(torch.zeros(4, 32))), ValueError, ["(buckets, H)", "(4, 32)", "swapped"]),
    "t5 of too few buckets": (lambda: rg.t5(torch.zeros(2, 4)), ValueError, ["t5", "table of 2", "at least 4"]),
    "t5 max_distance": (
        lambda: rg.t5(torch.zeros(32, 4), max_distance=8), ValueError, ["max_distance", "8 exact buckets", "is 8"],
    ),
    "t5 max_distance is a float": (
        lambda: rg.t5(torch.zeros(32, 4), max_distance=128.0), TypeError, ["max_distance", "whole number", "float"],
    ),
    "t5 of integers": (lambda: rg.t5(torch.zeros(32, 4).long()), TypeError, ["t5: table", "torch.int64"]),
    "shaw of an even table": (lambda: rg.shaw(torch.zeros(4, D)), ValueError, ["shaw: keys", "odd", "4"]),
    "shaw keys of another width": (
        call(bias=rg.shaw(torch.zeros(5, 3))), ValueError, ["shaw: keys", "D = 8", "(5, 3)"],
    ),
    "shaw values of another width": (
        call(bias=rg.shaw(torch.zeros(5, D), torch.zeros(5, 3))), ValueError, ["shaw: values", "E = 6", "(5, 3)"],
    ),
    "shaw keys for other heads": (
        call(bias=rg.shaw(torch.zeros(3, 5, D))), ValueError, ["shaw: keys", "H = 4", "(3, 5, 8)"],
    ),
    "shaw halves of different reach": (
        lambda: rg.shaw(torch.zeros(5, D), torch.zeros(7, E)), ValueError, ["shaw: values", "5", "7"],
    ),
    "shaw of a list": (lambda: rg.shaw([0.0]), TypeError, ["shaw: keys", "floating-point tensor", "list"]),
    # offset
    "offset is a float": (call(offset=1.5), TypeError, ["offset", "whole number", "torch.float32"]),
    "offset is a bool": (call(offset=True), TypeError, ["offset", "whole number", "torch.bool"]),
    "offset is a string": (call(offset="end"), TypeError, ["offset", "whole number", "str"]),
    "offset is a matrix": (call(offset=[[1, 2]]), TypeError, ["offset", "one per batch row", "(1, 2)"]),
    "offset for another batch": (
        call(offset=[1, 2, 3]), ValueError, ["offset", "2 batch rows", "got 3", "pass an int"],
    ),
    # temperature, sink and dropout
    "temperature of 0": (call(temperature=0), ValueError, ["temperature", "positive", "is 0"]),
    "temperature is negative": (call(temperature=-1.0), ValueError, ["temperature", "positive", "-1.0"]),
    "temperature overflows logits": (call(temperature=1e-40), ValueError, ["temperature", "1e-30", "is 1e-40"]),
    "temperature is infinite": (call(temperature=float("inf")), ValueError, ["temperature", "1e30", "is inf"]),
    "temperature is nan": (call(temperature=float("nan")), ValueError, ["temperature", "positive", "nan"]),
    "temperature is a tensor": (call(temperature=torch.ones(1)), TypeError, ["temperature", "Tensor", "scale"]),
    "temperature is a string": (call(temperature="1"), TypeError, ["temperature", "number", "str"]),
    "sink for other heads": (call(sink=torch.zeros(3)), ValueError, ["sink", "4 heads", "(3,)"]),
    "sink is a list": (call(sink=[0.0]), TypeError, ["sink", "logit", "one per head", "list"]),
    "sink is True": (call(sink=True), TypeError, ["sink", "logit", "bool"]),
    "sink of integers": (call(sink=torch.zeros(4).long()), TypeError, ["sink", "floating-point", "torch.int64"]),
    "sink is nan": (call(sink=float("nan")), ValueError, ["sink", "logit", "nan"]),
    "sink is infinite": (call(sink=float("inf")), ValueError, ["sink", "below infinity", "inf"]),
    "dropout of 1": (call(dropout=1), ValueError, ["dropout", "[0, 1)", "is 1"]),
    "dropout is negative": (call(dropout=-0.1), ValueError, ["dropout", "[0, 1)", "-0.1"]),
    "dropout is nan": (call(dropout=float("nan")), ValueError, ["dropout", "[0, 1)", "nan"]),
    "dropout is None": (call(dropout=None), TypeError, ["dropout", "[0, 1)", "NoneType"]),
    "dropout is True": (call(dropout=True), TypeError, ["dropout", "[0, 1)", "bool"]),
    # engine
    "an unknown engine": (
        call(engine="flash"), ValueError, ["engine", "'flash'", "sdpa", "flex", "reference", "tiled"],
    ),
    "sdpa with a sink and softcap": (
        call(engine="sdpa", sink=0.0, score=rg.Dot(softcap=2.0)), ValueError,
        ["engine 'sdpa' cannot", "no sink", "no softcap", "that can:", "reference", "tiled"],
    ),
    "sdpa with an additive score": (
        call(engine="sdpa", score=rg.Additive(torch.ones(D))), ValueError, ["dot products", "Additive((8,))"],
    ),
    "sdpa with a log-sum-exp": (call(engine="sdpa", return_lse=True), ValueError, ["no log-sum-exp", "can:"]),
    "sdpa with dropout": (call(engine="sdpa", dropout=0.5), ValueError, ["'sdpa'", "dropout", "that can:"]),
    "tiled with an empty axis": (
        call(engine="tiled", query=q[:, :, :0]), ValueError, ["'tiled'", "an axis is empty", "can: reference"],
    ),
    "flex that trains on a CPU": (
        call(engine="flex", query=normal(B, H, Q, D).requires_grad_()), ValueError, ["'flex'", "cannot train on a CPU"],
    ),
    "explain with an unknown engine": (
        lambda: rg.Attention().explain(q, k, v, engine="x"), ValueError, ["engine", "'x'", "tiled"],
    ),
    # inspection
    "rows beyond Q": (weights(rows=[0, 5]), ValueError, ["rows", "between -5 and 4", "[0, 5]"]),
    "one row beyond Q": (weights(rows=9), ValueError, ["rows", "between -5 and 4", "9"]),
    "columns before the first": (weights(columns=[-8]), ValueError, ["columns", "between -7 and 6", "-8"]),
    "heads beyond H": (weights(heads=torch.tensor([4])), ValueError, ["heads", "between -4 and 3", "4"]),
    "rows of floats": (weights(rows=[0.5]), TypeError, ["rows", "a slice, a list or an index tensor", "0.5"]),
    "rows as a float tensor": (weights(rows=torch.zeros(2)), TypeError, ["rows", "index tensor"]),
    "rows as a matrix": (weights(rows=[[0, 1]]), TypeError, ["rows", "a list or an index tensor", "[[0, 1]]"]),
    "rows as a string": (weights(rows="0"), TypeError, ["rows", "a slice, a list", "'0'"]),
    "rows as True": (weights(rows=True), TypeError, ["rows", "a slice, a list", "True"]),
    "a slice without a step": (weights(rows=slice(0, 4, 0)), TypeError, ["rows", "slice(0, 4, 0)"]),
    "map to one number": (lambda: rg.Attention().map(q, k, size=5), ValueError, ["size", "two whole numbers", "5"]),
    "map to nothing": (lambda: rg.Attention().map(q, k, size=(0, 4)), ValueError, ["size", "at least 1", "(0, 4)"]),
    "map to halves": (lambda: rg.Attention().map(q, k, size=(2.5, 4)), ValueError, ["size", "whole", "(2.5, 4)"]),
    "map to a cube": (lambda: rg.Attention().map(q, k, size=(2, 2, 2)), ValueError, ["size", "two", "(2, 2, 2)"]),
    "statistics of less than nothing": (
        lambda: rg.Attention().statistics(q, k, top=-1), ValueError, ["top", "at least 0", "-1"],
    ),
    "statistics of half a key": (
        lambda: rg.Attention().statistics(q, k, top=1.5), ValueError, ["top", "whole number", "1.5"],
    ),
    "weights of an array": (lambda: rg.Attention().weights(q.numpy(), k), TypeError, ["query", "ndarray"]),
    "weights of different widths": (lambda: rg.Attention().weights(q, k[..., :3]), ValueError, ["same width D"]),
    # merge
    "merge of nothing": (lambda: rg.merge([], []), ValueError, ["merge", "at least one", "0 and 0"]),
    "merge of more outputs than lses": (lambda: rg.merge([v, v], [v[..., 0]]), ValueError, ["merge", "2 and 1"]),
    "merge of lses that do not fit": (
        lambda: rg.merge([v], [v]), ValueError, ["merge", "lses (..., Q)", "(2, 2, 7, 6)"],
    ),
    "merge of numbers": (lambda: rg.merge([1], [2]), TypeError, ["merge", "tensors", "return_lse=True"]),
    "an engine that is no name": (call(engine=["a"]), ValueError, ["engine must be one of", "['a']"]),
    "no value": (lambda: rg.attention(q, k, None), TypeError, ["value", "torch.Tensor", "None", "weights"]),
    "merge of outputs that differ": (
        lambda: rg.merge([v, v[:, :, :3]], [v[..., 0], v[:, :, :3, 0]]), ValueError, ["outputs", "(2, 2, 3, 6)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG.values(), ids=list(WRONG))
def test_errors_name_the_problem(wrong: Callable[[], Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    message = str(caught.value)
    assert isinstance(caught.value, kind)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG.values(), ids=list(WRONG))
def test_no_message_hides_behind_another_exception(
    wrong: Callable[[], Any], kind: type[Exception], words: list
) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_under_autocast_a_wrong_argument_is_still_named() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="value must be a torch"):
        rg.attention(q, k, v.numpy())


@pytest.mark.parametrize(
    "right",
    [
        call(offset=np.int64(2)),
        call(offset=torch.tensor([1, 2], dtype=torch.int32)),
        call(offset=np.array([1, 2])),
        call(mask=rg.padding(np.array([3, 4]))),
        call(mask=rg.padding(torch.tensor([7]))),
        call(mask=rg.global_tokens([torch.tensor(0), torch.tensor(3)])),
        call(mask=rg.global_tokens(np.array([0, 3]))),
        call(mask=rg.documents(np.zeros(K, dtype=np.int32))),
        call(mask=rg.edges(np.array([[0], [1]]))),
        call(mask=rg.edges(zip((0, 1), (1, 2), strict=True))),
        call(temperature=2),
        call(sink=torch.zeros(1)),
        call(sink=0),
        call(dropout=0),
        call(score=rg.Dot(scale=2)),
        weights(rows=[]),
        weights(rows=slice(None, None, -1)),
        weights(rows=-1, columns=range(2), heads=np.array([0, 1])),
        weights(rows=torch.tensor([True, False, True, False, True])),
        lambda: rg.Attention().map(q, k, size=[3, 50]),
        lambda: rg.Attention().statistics(q, k, top=0),
        lambda: rg.Attention().statistics(q, k, top=20),
        lambda: rg.merge((v,), (v[..., 0],)),
    ],
)  # fmt: skip
def test_unusual_arguments_are_accepted(right: Callable[[], Any]) -> None:
    right()


def test_parts_of_the_weights_are_parts_of_the_whole() -> None:
    whole = rg.Attention().weights(q, k)
    parts = {"rows": slice(None, None, -1), "columns": [6, 0, -1], "heads": 2}
    torch.testing.assert_close(rg.Attention().weights(q, k, **parts), whole[:, 2:3].flip(2)[..., [6, 0, 6]])
    assert rg.Attention().weights(q, k, rows=[]).shape == (B, H, 0, K)
