"""Changes of attention, compared with a dense computation that uses none of the library's code."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.view import Change, Record, ablate, capture
from tests.view.models import PAIR, Attends

HEADS, GROUPS, N, D = 4, 2, 7, 8
CONFIG = rg.models.LanguageConfig(vocabulary=60, d_model=32, layers=2, heads=4, d_hidden=48)


@pytest.fixture(scope="module")
def language() -> rg.models.LanguageModel:
    torch.manual_seed(0)
    return rg.models.LanguageModel(CONFIG).double().eval()


@pytest.fixture(scope="module")
def record(language: rg.models.LanguageModel) -> Record:
    with capture(language) as record:
        language(torch.tensor([[5, 9, 30, 5, 9, 41]]))
    return record


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor, changes: list[Change], causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Weights (B, H, Q, K) and output, entry by entry, with causal mask, bias and sink."""
    B, H, Q, _ = q.shape
    K = k.shape[2]
    weights, output = torch.zeros(B, H, Q, K, dtype=q.dtype), torch.zeros(B, H, Q, v.shape[3], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            in_head = [change for change in changes if change.head is None or h in change.head]
            temperature = math.prod(change.temperature for change in in_head)
            for i in range(Q):
                forced = {key for change in in_head for query, key in change.force if query == i}
                hidden = {key for change in in_head for query, key in change.forbid if query == i}
                seen = forced or {j for j in range(K) if (not causal or j <= i + K - Q) and j not in hidden}
                group = h // (H // k.shape[1])
                logits = {
                    j: (float(q[b, h, i] @ k[b, group, j]) / math.sqrt(q.shape[3]) + float(bias[h, i, j])) / temperature
                    for j in seen
                }
                total = sum(map(math.exp, logits.values())) + math.exp(float(sink[h]))
                for j, logit in logits.items():
                    weights[b, h, i, j] = math.exp(logit) / total
                    output[b, h, i] += math.exp(logit) / total * v[b, group, j]
            output[b, h] *= math.prod(change.factor for change in in_head)
    return weights, output


CHANGES = {
    "head off": [Change(head=2, factor=0.0)],
    "temperature": [Change(temperature=0.25)],
    "forbid": [Change(forbid=[(3, 0), (3, 1), (5, 5)]), Change(head=[1], forbid=[(0, 0)])],
    "force a hidden key": [Change(head=[0, 3], force=[(2, 6), (4, 1), (4, 0)])],
    "all": [
        Change(temperature=3.0), Change(head=1, factor=-0.5), Change(forbid=[(6, 2)]), Change(head=1, force=[(1, 5)]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_equal_a_dense_computation(name: str) -> None:
    torch.manual_seed(1)
    q, (k, v) = torch.randn(2, HEADS, N, D, dtype=torch.float64), torch.randn(2, 2, GROUPS, N, D, dtype=torch.float64)
    bias, sink = torch.randn(HEADS, N, N, dtype=torch.float64), torch.randn(HEADS, dtype=torch.float64)
    attend = rg.Attention(mask=rg.causal(), bias=bias[None], sink=sink)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = attend

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(q, k, v)

    model = Model().eval()
    changes = CHANGES[name]
    with ablate(model, *changes), capture(model) as record:
        changed_output = model(q, k, v)
    weights, output = dense(q, k, v, bias, sink, changes)
    torch.testing.assert_close(changed_output, output, rtol=1e-12, atol=1e-12)
    for b in range(2):
        torch.testing.assert_close(record.select(b).weights(0), weights[b], rtol=1e-12, atol=1e-12)
    assert torch.equal(model(q, k, v), attend(q, k, v))  # nothing remains after the block


def test_a_head_that_is_off_is_a_head_without_output_weights(language: rg.models.LanguageModel) -> None:
    ids = torch.randint(60, (1, 90))
    with ablate(language, Change(layer=1, head=[1, 3], factor=0.0)):
        output = language(ids)
    weight = dict(language.named_parameters())["stack.layers.1.attention.output.weight"]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.view(32, 4, 8)[:, [1, 3]] = 0
        expected = language(ids)
        weight.copy_(before)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert (output - language(ids)).abs().max() > 1e-3


def test_a_record_is_changed_like_its_model(language: rg.models.LanguageModel) -> None:
    ids = torch.tensor([[5, 9, 30, 5, 9, 41]])
    with capture(language) as record:
        language(ids)
    changed = record.ablate(
        Change(layer=0, head=1, forbid=[(4, 2)]),
        Change(layer="1", temperature=2.0),
        Change(layer=1, head=0, factor=0.0),
    )
    assert changed.weights(0, head=1)[4, 2] == 0
    assert record.weights(0, head=1)[4, 2] > 0
    torch.testing.assert_close(changed.weights(0, head=0), record.weights(0, head=0), rtol=0, atol=0)
    with ablate(language, *changed.changes):
        expected = language(ids)
    torch.testing.assert_close(changed.output.values, expected, rtol=0, atol=0)
    again = changed.ablate(Change(layer=0, head=2, factor=0.5))
    assert len(again.changes) == 4
    torch.testing.assert_close(record.ablate().output.values, record.output.values, rtol=0, atol=0)


def test_a_token_is_replaced_by_id_or_text(language: rg.models.LanguageModel, record: Record) -> None:
    changed = record.ablate(tokens={2: 7})
    expected = language(torch.tensor([[5, 9, 7, 5, 9, 41]]))
    torch.testing.assert_close(changed.output.values, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no tokenizer"):
        record.ablate(tokens={2: "word"})
    with pytest.raises(ValueError, match=r"positions of source tokens are 0 \.\.\. 5"):
        record.ablate(tokens={6: 7})
    with pytest.raises(ValueError, match="not called with token ids as its target"):
        record.ablate(target_tokens={0: 7})


def test_a_letter_that_names_a_byte_is_replaced_by_its_text(language: rg.models.LanguageModel) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["é", "Ã©", "Ġ", "a", "Ġa"]  # the names of byte E9, of the letter é, of a space, of a, and of " a"
    tokenizer = Tokenizer(models.BPE({"Ã": 5, "©": 6} | {piece: n for n, piece in enumerate(pieces)}, [("Ã", "©")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    with capture(language) as record:
        language(torch.tensor([[3, 2, 3]]))
    changed = record.decode(tokenizer).ablate(tokens={1: "é"})
    assert changed.streams["source"].tokens == ("a", "é", "a")
    assert changed.call is not None
    assert changed.call.ids("source").tolist() == [3, 1, 3]


def test_the_target_of_a_translator_is_replaced_and_pairs_of_every_kind_are_changed() -> None:
    torch.manual_seed(0)
    model = rg.models.Transformer(PAIR).double().eval()
    source, target = torch.randint(5, 100, (1, 9)), torch.randint(5, 100, (1, 7))
    with capture(model) as record:
        model(source, target)
    changed = record.ablate(
        Change(kind="cross", layer=1, head=2, force=[(3, 8)]), Change(kind="encoder", layer=0, forbid=[(8, 8)]),
        target_tokens={2: 11},
    )  # fmt: skip
    assert changed.weights(1, head=2, kind="cross")[3].tolist() == [0] * 8 + [1]
    assert changed.weights(0, kind="encoder")[:, 8, 8].tolist() == [0] * 4
    edited = target.clone()
    edited[0, 2] = 11
    with capture(model) as other:
        model(source, edited)
    torch.testing.assert_close(changed.weights(0, kind="decoder"), other.weights(0, kind="decoder"), rtol=0, atol=0)
    packed = rg.pack([source[0]]), rg.pack([target[0]])
    with capture(model) as record:
        model(*packed)
    torch.testing.assert_close(
        record.ablate(target_tokens={2: 11}).weights(0, kind="decoder"), other.weights(0, kind="decoder")
    )


def test_generation_under_changes() -> None:
    torch.manual_seed(3)
    model = rg.models.LanguageModel(CONFIG).double().eval()
    ids = torch.tensor([[5, 9, 30, 5]])
    with capture(model) as record:
        model(ids)
    actual = record.generate(6, beams=3)
    expected = model.generate(ids, max_new_tokens=6, strategy=rg.nn.Beam(3))[0]
    assert len(actual) == 3
    assert actual[0].prompt == 4
    assert actual[0].call.ids("source").tolist() == [5, 9, 30, 5, *expected.tolist()]
    assert [each.score for each in actual] == sorted((each.score for each in actual), reverse=True)
    off = Change(layer=0, factor=0.0)
    changed = record.ablate(off).generate(6)[0]
    with ablate(model, off):
        expected = model.generate(ids, max_new_tokens=6)[0]
    assert changed.call.ids("source")[4:].tolist() == expected.tolist()
    log = changed.output.log_likelihood(changed.call.ids("source"))[3:].mean().item()
    assert changed.score == pytest.approx(log, rel=1e-5)  # beam search sums in float32


def test_a_translator_generates_as_without_a_record() -> None:
    torch.manual_seed(2)
    model = rg.models.Transformer(dataclasses.replace(PAIR, suppress_tokens=(7, 20))).double().eval()
    source = torch.randint(5, 100, (1, 6))
    with capture(model) as record:
        model(source, torch.tensor([[model.config.start, 30]]))
    expected = model.generate(source, max_new_tokens=5, strategy=rg.nn.Beam(2))[0]
    assert record.generate(5, beams=2)[0].call.ids("target")[1:].tolist() == expected.tolist()
    change = Change(kind="cross", layer=0, force=[(2, 0)])
    actual = record.ablate(Change(kind="cross", layer=0, force=[(1, 0)])).generate(4)[0]
    assert actual.weights(0, kind="cross")[:, 1, 0].tolist() == pytest.approx([1.0] * 4, rel=1e-12)
    with pytest.raises(ValueError, match=r"the pair \(2, 0\) is outside"):
        record.ablate(change)


def test_self_attention_pairs_apply_while_generating_with_a_cache(language: rg.models.LanguageModel) -> None:
    ids = torch.tensor([[5, 9, 30, 5, 9, 41]])
    change = Change(layer=0, forbid=[(5, 1), (4, 4)])
    with ablate(language, change):
        expected = language(ids)[:, -1]
        state, first = language.start_generation(ids[:, :3])
        state.step(first)
        for n in range(3, 6):
            actual = state.step(ids[:, n : n + 1])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_cross_attention_pairs_are_refused_while_generating_with_a_cache() -> None:
    model = rg.models.Transformer(PAIR).eval()
    with (
        pytest.raises(NotImplementedError, match="pairs of cross-attention cannot be changed while"),
        ablate(model, Change(kind="cross", forbid=[(0, 0)])),
    ):
        model.generate(torch.randint(5, 100, (1, 4)), max_new_tokens=3)


def test_any_row_of_the_batch_is_shown(language: rg.models.LanguageModel) -> None:
    rows = torch.tensor([[5, 9, 30, 5, 9, 41], [1, 2, 3, 4, 5, 6]])
    with capture(language) as record:
        language(rows)
    with capture(language) as alone:
        language(rows[1:])
    second = record.select(1)
    torch.testing.assert_close(second.weights(1), alone.weights(1))
    torch.testing.assert_close(second.attentions[1].map((3, 3)), alone.attentions[1].map((3, 3)))
    whole = (0, 6), (0, 6), (6, 6)
    scaled, expected = record.attentions[1].window(0, *whole, 1, scaled=True), alone.window(1, 0, *whole, scaled=True)
    np.testing.assert_allclose(scaled.weights, expected.weights, rtol=1e-6)
    ours, theirs = (each.document.about["attentions"][0]["means"] for each in (second, alone))
    assert all(ours[name] == pytest.approx(theirs[name], rel=1e-9) for name in theirs)
    assert record.document.about["attentions"][0]["means"] != second.document.about["attentions"][0]["means"]
    changed = second.ablate(tokens={0: 8})
    assert changed.call.ids("source", 1).tolist() == [8, 2, 3, 4, 5, 6]
    assert changed.call.ids("source", 0).tolist() == rows[0].tolist()
    with pytest.raises(ValueError, match=r"row must be in 0 \.\.\. 1"):
        record.select(2)


def test_a_record_that_cannot_be_run_again_says_so(language: rg.models.LanguageModel) -> None:
    with capture(language) as record:
        language.generate(torch.tensor([[5, 9]]), max_new_tokens=3)
    with pytest.raises(ValueError, match="needs one forward call of the whole model"):
        record.ablate(Change(factor=0.0))
    model = rg.models.LanguageModel(CONFIG).eval()
    with capture(model) as record:
        model(torch.tensor([[5, 9]]))
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(ValueError, match="parameters of the model have changed"):
        record.ablate(Change(factor=0.0))
    model.train()
    with capture(model) as record:
        model(torch.tensor([[5, 9]]))
    with pytest.raises(ValueError, match="training mode"):
        record.ablate(Change(factor=0.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "a change needs factor"),
        ({"factor": math.nan}, "factor must be a finite number"),
        ({"factor": True}, "factor must be a number"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"temperature": 1e-40}, "temperature must be a positive number in 1e-30"),
        ({"factor": -1e39}, "factor must be a finite number"),
        ({"temperature": 2.0, "head": 1}, "applies to all heads"),
        ({"head": [], "factor": 0.0}, "empty list"),
        ({"head": -1, "factor": 0.0}, "head must not be negative"),
        ({"layer": 1.5, "factor": 0.0}, "layer must be a whole number"),
        ({"kind": "other", "factor": 0.0}, "kind must be one of encoder, decoder, cross"),
        ({"forbid": [(1, 2, 3)]}, r"forbid must be \(query, key\) pairs"),
        ({"force": [(1, -2)]}, "must not be negative"),
        ({"forbid": [(1, 2)], "force": [(1, 2)]}, "both forbidden and forced"),
    ],
)
def test_a_wrong_change_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        Change(**arguments)


def test_a_change_that_applies_to_nothing_is_refused(language: rg.models.LanguageModel, record: Record) -> None:
    for change, words in (
        (Change(layer=9, factor=0.0), "applies to no attention; the record has decoder 0, decoder 1"),
        (Change(head=9, factor=0.0), "head must be in 0 ... 3, but is 9"),
        (Change(forbid=[(0, 6)]), r"the pair \(0, 6\) is outside"),
    ):
        with pytest.raises(ValueError, match=words):
            record.ablate(change)
    ids = torch.tensor([[5, 9]])
    with pytest.raises(ValueError, match="applied to no attention"), ablate(language, Change(layer=9, factor=0.0)):
        language(ids)
    with (
        pytest.raises(ValueError, match="names head 9, but the layer has 4 heads"),
        ablate(language, Change(head=9, factor=0.0)),
    ):
        language(ids)
    with ablate(language, off := Change(factor=0.0)):
        language(ids)
        with pytest.raises(ValueError, match="cannot be nested"), ablate(language, off):
            pass


@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_modules_after_replace(need_weights: bool) -> None:
    from regard.integrations.torch import replace

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0]

    model = replace(Model().double().eval())
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    with ablate(model, Change(head=1, factor=0.0)):
        output = model(x)
    with torch.no_grad():
        model.attention.out_proj.weight.view(16, 4, 4)[:, 1] = 0
    torch.testing.assert_close(output, model(x), rtol=1e-12, atol=1e-12)


def test_transformers_returns_the_changed_weights() -> None:
    transformers = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=50
    )
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation="regard").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), ablate(model, Change(layer=1, head=3, forbid=[(0, 2)])), capture(model) as record:
        output = model(ids, output_attentions=True)
    torch.testing.assert_close(output.attentions[1][0], record.weights(1))
    assert record.weights(1, head=3)[0, 2] == 0
    assert record.weights(0).min() > 0
    assert record.output.kind == "tokens"
    torch.testing.assert_close(record.ablate().output.values, record.ablate().output.values)


def tiny_transformers(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    torch.manual_seed(0)
    model, config = (getattr(transformers, name + part) for part in ("ForConditionalGeneration", "Config"))
    config = config(vocab_size=60, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48, **options)
    return model._from_config(config, attn_implementation="regard").double().eval()


def test_pairs_of_cross_attention_with_the_cache_of_transformers() -> None:
    model = tiny_transformers("T5", decoder_start_token_id=0)
    source, target = torch.randint(60, (1, 9)), torch.randint(60, (1, 5))
    change = Change(kind="cross", layer=1, head=2, force=[(3, 8)])
    with torch.no_grad(), capture(model) as record:
        model(input_ids=source, decoder_input_ids=target)
    with torch.no_grad(), ablate(model, change):
        expected = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    changed = record.ablate(change)
    assert changed.weights(1, head=2, kind="cross")[3].tolist() == pytest.approx([0] * 8 + [1])
    torch.testing.assert_close(changed.output.values, expected, rtol=1e-12, atol=1e-12)
    assert (expected - record.output.values).abs().max() > 1e-6
    with pytest.raises(NotImplementedError, match="pairs of cross-attention cannot be"), ablate(model, change):
        model.generate(input_ids=source, max_new_tokens=4)


def test_pairs_are_refused_with_a_cache_of_transformers_that_drops_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    config = transformers.MistralConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="regard").eval()
    ids = torch.randint(3, 60, (1, 3))
    for tokens, fits in ((2, True), (9, False)):
        with ablate(model, Change(forbid=[(2, 1)])):
            if fits:
                model.generate(ids, max_new_tokens=tokens, do_sample=False)
            else:
                with pytest.raises(NotImplementedError, match="a cache that drops tokens"):
                    model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None)


def test_recomputed_layers_of_transformers_are_refused() -> None:
    model = tiny_transformers("T5", decoder_start_token_id=0).train()
    model.encoder.gradient_checkpointing = True
    with pytest.raises(ValueError, match="recomputes its layers in backward"), ablate(model, Change(factor=0.0)):
        pass


def test_a_module_outside_of_the_model_does_not_change() -> None:
    inside, outside = (Attends(rg.Attention()).eval() for _ in range(2))
    x = torch.randn(1, 2, 5, 8)
    expected = outside(x)
    with ablate(inside, Change(factor=0.0)):
        assert torch.equal(outside(x), expected)
        assert inside(x).abs().max() == 0


def test_attentions_with_the_same_query_are_told_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attends(rg.Attention()), Attends(rg.Attention())

        def forward(self, query: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
            return self.first(query, keys[0]), self.second(query, keys[1]), self.second(query, keys[1])

    model, (query, *keys) = Model(), torch.randn(3, 1, 2, 5, 4)
    for layer in (1, "second"):
        with ablate(model, Change(layer=layer, factor=0.0)):
            first, second, third = model(query, *keys)
        assert bool(first.any())
        assert not second.any()
        assert torch.equal(third, model(query, *keys)[2])
    with ablate(model, Change(layer="second (2)", factor=0.0)):
        assert [bool(each.any()) for each in model(query, *keys)] == [True, True, False]


@pytest.mark.parametrize("change", [Change(layer=0, forbid=[(10, 9)]), Change(layer=0, force=[(3, 3)])])
def test_pairs_are_refused_with_a_cache_that_drops_tokens(change: Change) -> None:
    ids = torch.randint(60, (1, 12))
    model = rg.models.LanguageModel(dataclasses.replace(CONFIG, windows=(4, None))).eval()

    def step_through(stop: int) -> Tensor:
        state, first = model.start_generation(ids[:, :3])
        actual = state.step(first)
        for n in range(3, stop):
            actual = state.step(ids[:, n : n + 1])
        return actual

    with ablate(model, change):
        torch.testing.assert_close(step_through(4), model(ids)[:, 3])
    with pytest.raises(NotImplementedError, match="a cache that drops tokens"), ablate(model, change):
        step_through(12)
    with ablate(model, dataclasses.replace(change, layer=1)):  # its cache keeps all tokens
        torch.testing.assert_close(step_through(12), model(ids)[:, -1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_under_changes_are_those_of_the_changed_model(checkpointing: bool) -> None:
    torch.manual_seed(0)
    parts = [(rg.nn.MultiHeadAttention(16, heads=2), rg.nn.FeedForward(16, 24)) for _ in range(2)]
    blocks = [rg.nn.Block(*each, residual=lambda: rg.nn.PreNorm(16)) for each in parts]
    model = rg.nn.Encoder(blocks, checkpointing=checkpointing).double().train()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    weight = model.layers[0].attention.qkv.weight
    with ablate(model, Change(layer=0, temperature=4.0)):
        output = model(x)
    actual = torch.autograd.grad(output.square().sum(), weight)[0]  # after the block
    with torch.no_grad():
        weight[:16] /= 4.0  # queries; their biases below
        model.layers[0].attention.qkv.bias[:16] /= 4.0
    expected = torch.autograd.grad(model(x).square().sum(), weight)[0]
    expected[:16] /= 4.0
    torch.testing.assert_close(actual, expected)


def test_a_capture_inside_an_ablation_keeps_its_changes(language: rg.models.LanguageModel) -> None:
    ids = torch.tensor([[5, 9, 30, 5, 9, 41]])
    changes = Change(layer=0, head=1, factor=0.0), Change(kind="decoder", temperature=2.0)
    with ablate(language, *changes), capture(language) as inside:
        expected = language(ids)
    with capture(language) as outside, ablate(language, *changes):
        language(ids)
    for record in (inside, outside):
        assert record.explain_weight(0, head=1, query=3, key=2).contribution == 0
        assert record.explain_weight(0, head=0, query=3, key=2).contribution > 0
        assert len(record.changes) == 3
        torch.testing.assert_close(record.ablate().output.values, expected, rtol=0, atol=0)
    with capture(language) as plain:
        with ablate(language, *changes):
            language(ids)
        language(ids)
    assert plain.changes == ()
    assert plain.explain_weight(0, head=1, query=3, key=2).factor == 1


def test_parameters_changed_through_data_are_noticed() -> None:
    model = rg.models.LanguageModel(CONFIG).eval()
    with capture(model) as record:
        model(torch.tensor([[5, 9]]))
    record.ablate(Change(factor=0.0))
    next(model.parameters()).data[0, 0] += 1
    with pytest.raises(ValueError, match="parameters of the model have changed"):
        record.ablate(Change(factor=0.0))
