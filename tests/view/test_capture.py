"""A capture records the attention of a model by module name and leaves the model unchanged."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import regard as rg
from regard.attention import OBSERVERS
from regard.integrations.torch import replace
from regard.view import Record, capture

TEXT = rg.models.TextConfig(vocabulary=100, d_model=32, layers=3, heads=4, d_hidden=64)
LANGUAGE = rg.models.LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, kv_heads=2, d_hidden=64)
PAIR = rg.models.TransformerConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 100, shape)


def encoder() -> nn.Module:
    return rg.models.TextEncoder(TEXT).eval()


def apart(record: Record, others: Record) -> float:
    """The largest difference between the weights of two records of the same model."""
    assert [seen.name for seen in record.attentions] == [seen.name for seen in others.attentions]
    pairs = zip(record.attentions, others.attentions, strict=True)
    return max((one.weights() - other.weights()).abs().max().item() for one, other in pairs)


def test_every_layer_is_recorded_with_name_and_kind() -> None:
    model = rg.models.Transformer(PAIR).eval()
    with capture(model) as record:
        model(ids(1, 9), ids(1, 7))
    assert [(seen.name, seen.layer, seen.kind, seen.Q, seen.K) for seen in record.attentions] == [
        ("encoder.layers.0.attention", 0, "encoder", 9, 9),
        ("encoder.layers.1.attention", 1, "encoder", 9, 9),
        ("decoder.layers.0.attention", 0, "decoder", 7, 7),
        ("decoder.layers.0.cross", 0, "cross", 7, 9),
        ("decoder.layers.1.attention", 1, "decoder", 7, 7),
        ("decoder.layers.1.cross", 1, "cross", 7, 9),
    ]
    assert [record.stream_names(seen) for seen in record.attentions[1:4]] == [
        ("source", "source"), ("target", "target"), ("target", "source"),
    ]  # fmt: skip


def test_the_weights_are_those_that_the_layer_computes() -> None:
    layer = rg.nn.MultiHeadAttention(32, heads=4, kv_heads=2, attend=rg.Attention(mask=rg.causal(), bias=rg.alibi(4)))
    x, given = torch.randn(2, 11, 32), {}

    def note(self: rg.Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        given.update(weights=self.weights(query, key))

    with capture(layer) as record:
        layer(x, mask=rg.padding([11, 6]))
    with pytest.MonkeyPatch.context() as patch:
        run = rg.Attention.__call__
        patch.setattr(rg.Attention, "__call__", lambda self, *tensors: (note(self, *tensors), run(self, *tensors))[1])
        layer(x, mask=rg.padding([11, 6]))
    assert record.attentions[0].name == "MultiHeadAttention"
    for batch in (0, 1):
        torch.testing.assert_close(record.weights(0, batch=batch), given["weights"][batch].detach())


def test_outputs_are_bit_identical_and_no_hook_remains() -> None:
    model, inputs = encoder(), ids(2, 8)
    before = model(inputs)
    with capture(model):
        assert torch.equal(model(inputs), before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert OBSERVERS.get() == ()


def test_an_exception_inside_leaves_the_model_clean() -> None:
    model = encoder()
    with pytest.raises(RuntimeError, match="outside"), capture(model):  # noqa: PT012
        model(ids(1, 4))
        raise RuntimeError("outside")
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    with capture(model) as record:
        with pytest.raises(ValueError, match="positions"):
            model(ids(1, 600))  # raised inside the model: the module stack must be empty afterwards
        model(ids(1, 5))
    assert record.attentions[0].name == "stack.layers.0.attention"
    assert record.attentions[0].K == 5


def test_nested_captures_record_the_same() -> None:
    model = encoder()
    with capture(model) as outer, capture(model, layers=[1]) as inner:
        model(ids(1, 6))
    assert len(outer) == 3
    assert [seen.layer for seen in inner.attentions] == [1]
    assert torch.equal(outer.weights(1), inner.weights(1))


def test_only_the_capturing_thread_is_recorded() -> None:
    model, ready, go = encoder(), threading.Event(), threading.Event()

    def other() -> None:
        ready.wait()
        for length in range(3, 30):
            model(ids(1, length))
        go.set()

    thread = threading.Thread(target=other)
    thread.start()
    with capture(model) as record:
        ready.set()
        for _ in range(20):
            model(ids(1, 50))
        assert go.wait(30)
    thread.join()
    assert [seen.K for seen in record.attentions] == [50] * 3


def test_attention_outside_of_the_model_is_not_recorded() -> None:
    model = encoder()
    with capture(model) as record:
        rg.attention(*torch.randn(3, 1, 2, 5, 8))
    assert len(record) == 0
    with pytest.raises(ValueError, match=r"nothing was captured.*attn_implementation"):
        record.weights(0)


def test_packed_inputs_see_their_own_sequence_only() -> None:
    model = encoder()
    sequences = [ids(5), ids(3)]
    with capture(model) as record:
        model(sequences)
    seen = record.attentions[0]
    assert (seen.Q, seen.K) == (8, 8)
    weights = record.weights(0)
    assert not weights[:, :5, 5:].any()
    assert not weights[:, 5:, :5].any()
    with capture(model) as alone:
        model(sequences[1][None])
    torch.testing.assert_close(weights[:, 5:, 5:], alone.weights(0))


def test_repeated_calls_of_a_layer_are_separate_layers() -> None:
    config = rg.models.TextConfig(vocabulary=100, d_model=32, layers=4, distinct=1, heads=4, d_hidden=64)
    model = rg.models.TextEncoder(config).eval()
    with capture(model) as record:
        model(ids(1, 6))
        model(ids(1, 7))  # the last pass replaces the first
    assert [(seen.layer, seen.K) for seen in record.attentions] == [(n, 7) for n in range(4)]
    assert record.attentions[1].name == "stack.layers.0.attention (2)"
    assert (record.weights(0) - record.weights(1)).abs().max() > 1e-3


@pytest.mark.parametrize("windows", [(), (4,)], ids=["all", "window"])
def test_generation_with_a_cache_is_one_attention(windows: tuple) -> None:
    config = rg.models.LanguageConfig(
        vocabulary=100, d_model=32, layers=2, heads=4, kv_heads=2, d_hidden=64, rotary=rg.nn.Rotary(), windows=windows
    )
    model = rg.models.LanguageModel(config).eval()
    prompt = ids(2, 6)
    with capture(model) as steps:
        generated = model.generate(prompt, max_new_tokens=9)
    whole = torch.cat([prompt, torch.stack(generated)], 1)[:, :-1]
    with capture(model) as once:
        model(whole)
    assert [(seen.Q, seen.K) for seen in steps.attentions] == [(14, 14)] * 2
    assert apart(steps, once) < 1e-6
    for one, other in zip(steps.attentions, once.attentions, strict=True):
        torch.testing.assert_close(one.map((5, 4)), other.map((5, 4)))
        torch.testing.assert_close(one.statistics.entropy, other.statistics.entropy, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.statistics.mass, other.statistics.mass, atol=1e-5, rtol=1e-5)
        assert torch.equal(one.statistics.top_keys[..., 0], other.statistics.top_keys[..., 0])
        keys = torch.randint(0, 14, (14, 3))
        torch.testing.assert_close(one.weights_at(keys), other.weights_at(keys))


def test_a_generated_translation_is_recorded_completely() -> None:
    model = rg.models.Transformer(PAIR).eval()
    source = ids(1, 9)
    with capture(model) as steps:
        generated = model.generate(source, max_new_tokens=7)[0]
        generated = model.generate(source, max_new_tokens=7)[0]  # a second call starts a new sequence
    target = torch.cat([torch.tensor([1]), generated])[None, : steps.attentions[-1].Q]
    with capture(model) as once:
        model(source, target)
    assert apart(steps, once) < 1e-6


def test_prompts_of_different_lengths_keep_their_padding() -> None:
    model = rg.models.LanguageModel(LANGUAGE).eval()
    prompts = [ids(7), ids(3)]
    with capture(model) as record:
        model.generate(prompts, max_new_tokens=4)
    assert not record.weights(0, batch=1)[:, 4:, :4].any()
    torch.testing.assert_close(record.weights(0, batch=1)[:, 4:].sum(-1), torch.ones(4, 6))


def test_torch_modules_after_replace() -> None:
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    replace(model, report=lambda report: None)
    source, target = torch.randn(1, 9, 32), torch.randn(1, 7, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    with capture(model) as record:
        model(source, target, tgt_mask=causal)
    kinds = [(seen.kind, seen.layer, seen.Q, seen.K) for seen in record.attentions]
    assert kinds == [
        ("encoder", 0, 9, 9), ("encoder", 1, 9, 9), ("decoder", 0, 7, 7), ("cross", 0, 7, 9),
        ("decoder", 1, 7, 7), ("cross", 1, 7, 9),
    ]  # fmt: skip
    assert record.attentions[2].name == "decoder.layers.0.self_attn"


@pytest.mark.parametrize("need_weights", [True, False])
def test_one_torch_module_gives_its_own_weights(need_weights: bool) -> None:
    module = replace(nn.MultiheadAttention(32, 4, batch_first=True), report=lambda report: None).eval()
    x = torch.randn(1, 6, 32)
    _, expected = module(x, x, x, average_attn_weights=False)
    with capture(module) as record:
        module(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(record.weights(0), expected[0].detach())


def test_models_of_transformers() -> None:
    hf = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    config = hf.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100
    )
    model = hf.BertModel._from_config(config, attn_implementation="regard").eval()
    inputs, mask = ids(2, 7), torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with capture(model) as record:
        output = model(inputs, attention_mask=mask, output_attentions=True)
    assert [seen.name for seen in record.attentions] == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    for layer, expected in enumerate(output.attentions):
        for batch in (0, 1):
            torch.testing.assert_close(record.weights(layer, batch=batch), expected[batch].detach())


def test_generation_and_pairs_of_transformers() -> None:
    hf = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = hf.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64)
    model = hf.LlamaForCausalLM._from_config(config, attn_implementation="regard").eval()
    prompt = ids(1, 5)
    with capture(model) as steps, torch.no_grad():
        generated = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with capture(model) as once, torch.no_grad():
        model(generated[:, :-1])
    assert [(seen.kind, seen.Q, seen.K) for seen in steps.attentions] == [("decoder", 10, 10)] * 2
    assert apart(steps, once) < 1e-5
    config = hf.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    pair = hf.BartModel._from_config(config, attn_implementation="regard").eval()
    with capture(pair) as record, torch.no_grad():
        pair(ids(1, 9), decoder_input_ids=ids(1, 6))
    assert [(seen.kind, seen.Q, seen.K) for seen in record.attentions] == [
        ("encoder", 9, 9), ("decoder", 6, 6), ("cross", 6, 9),
    ]  # fmt: skip


def test_a_compiled_model_is_recorded() -> None:
    model = encoder()
    compiled = torch.compile(model, backend="eager")
    inputs = ids(1, 6)
    with torch.no_grad():
        before = compiled(inputs)
        with capture(model) as record:
            compiled(inputs)
        assert len(record) == 3
        assert torch.equal(compiled(inputs), before)


def test_a_capture_causes_no_recompilation() -> None:
    """A graph compiled before a capture is reused after it, and inside the capture of another model."""
    attend, tensors = rg.Attention(mask=rg.causal()), torch.randn(3, 1, 2, 8, 4)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v), backend=counter, fullgraph=True)
    compiled(*tensors)
    with capture(encoder()):
        pass
    compiled(*tensors)
    assert counter.frame_count == 1


def test_gradients_are_unchanged_and_the_graph_is_not_kept() -> None:
    model = encoder().train()
    with capture(model) as record:
        model(ids(1, 6)).sum().backward()
    assert model.embedding.weight.grad is not None
    seen = record.attentions[0]
    assert not seen.calls[0].query.requires_grad
    assert seen.calls[0].query.grad_fn is None


def test_a_capture_of_16k_tokens_stores_queries_keys_and_values_only() -> None:
    """Memory is linear in the number of tokens: weights are computed on request."""
    config = rg.models.LanguageConfig(
        vocabulary=50, d_model=8, layers=1, heads=2, d_hidden=8, positions=1 << 14, windows=(64,)
    )
    model, held = rg.models.LanguageModel(config).eval(), {}
    for length in (1 << 12, 1 << 14):
        with torch.no_grad(), capture(model) as record:
            model.hidden(torch.zeros(1, length, dtype=torch.long), torch.arange(length), rg.nn.LayerContext())
        held[length] = sum(seen.nbytes for seen in record.attentions)
        assert held[length] == 3 * length * 8 * 4
    assert held[1 << 14] == 4 * held[1 << 12]


@pytest.mark.parametrize(("layers", "kept"), [(1, [1]), ([0, 2], [0, 2]), (slice(1, None), [1, 2]), (range(2), [0, 1])])
def test_only_selected_layers_are_kept(layers: object, kept: list[int]) -> None:
    model = encoder()
    with capture(model, layers=layers) as record:  # type: ignore[arg-type]
        model(ids(1, 6))
    assert [seen.layer for seen in record.attentions] == kept


def test_a_non_module_raises() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, but is builtin_function"), capture(len):  # type: ignore[arg-type]
        pass


def test_attention_pooling_has_a_separate_stream() -> None:
    config = rg.models.TextConfig(vocabulary=100, d_model=32, layers=1, heads=4, d_hidden=64, pooling="attention")
    model = rg.models.SentenceEmbedder(config).eval()
    with capture(model) as record:
        model(ids(1, 6))
    seen = record.attention("pooling")
    assert seen.kind == "cross"
    assert record.stream_names(seen) == ("target", "source")
    assert len(record.streams["target"].tokens) == 1


def small(name: str) -> nn.Module:
    """A model of Transformers of one layer."""
    hf = pytest.importorskip("transformers")
    from regard.integrations.transformers import enable

    enable()
    sizes = {
        "T5ForConditionalGeneration": hf.T5Config(
            vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0,
        ),
        "BartForConditionalGeneration": hf.BartConfig(
            vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
            decoder_start_token_id=2, forced_eos_token_id=None,
        ),
        "GPT2LMHeadModel": hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4, n_positions=64),
        "LlamaForCausalLM": hf.LlamaConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        ),
    }  # fmt: skip
    return getattr(hf, name)._from_config(sizes[name], attn_implementation="regard").eval()


GENERATED = [
    ("T5ForConditionalGeneration", 7, {}), ("BartForConditionalGeneration", 7, {}), ("GPT2LMHeadModel", 1, {}),
    ("LlamaForCausalLM", 7, {"cache_implementation": "static"}), ("GPT2LMHeadModel", 4, {"num_beams": 3}),
    ("T5ForConditionalGeneration", 7, {"cache_implementation": "static"}),
    ("T5ForConditionalGeneration", 7, {"num_beams": 3}), ("BartForConditionalGeneration", 5, {"num_beams": 4}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:beam search was captured")
@pytest.mark.parametrize(("name", "length", "how"), GENERATED, ids=str)
def test_transformers_generation_equals_one_pass(name: str, length: int, how: dict) -> None:
    """Kinds, rows and weights are those of one pass over the embedded tokens, with every kind of cache."""
    model, source = small(name), ids(1, length)
    with torch.no_grad(), capture(model) as steps:
        model.generate(source, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **how)
    pair = hasattr(model.config, "decoder_start_token_id") and "Conditional" in name
    written = steps.attentions[-1].ids[0][None]
    with torch.no_grad(), capture(model) as once:
        model(source, decoder_input_ids=written) if pair else model(written)
    count = 6 if pair else length + 5
    assert [(seen.name, seen.kind, seen.layer) for seen in steps.attentions] == [
        (seen.name, seen.kind, seen.layer) for seen in once.attentions
    ]
    assert [seen.kind for seen in steps.attentions] == (["encoder", "decoder", "cross"] if pair else ["decoder"])
    assert count == steps.attentions[-1].Q
    assert apart(steps, once) < 1e-5
    assert {seen.layer for seen in steps.attentions} == {0}


@pytest.mark.parametrize("rows", [1, 2])
def test_beams_are_batch_rows(rows: int) -> None:
    """Each source shows the first beam at the end: its rows are those of one pass over its tokens."""
    model, source = rg.models.Transformer(PAIR).eval(), ids(rows, 9)
    with pytest.warns(UserWarning, match="need not be the one that was returned"), capture(model) as steps:
        model.generate(source, max_new_tokens=7, strategy=rg.nn.Beam(3))
    written = steps.attentions[-1].ids
    assert written.shape == (rows, 7)
    assert [(seen.kind, seen.Q, seen.K, seen.batch) for seen in steps.attentions[2:]] == [
        ("decoder", 7, 7, rows), ("cross", 7, 9, rows),
    ] * 2  # fmt: skip
    with capture(model) as once:
        model(source, written)
    for batch in range(rows):
        for one, other in zip(steps.attentions, once.attentions, strict=True):
            torch.testing.assert_close(one.weights(batch=batch), other.weights(batch=batch), atol=1e-6, rtol=1e-5)


def test_a_kind_is_that_of_the_last_pass() -> None:
    class Either(nn.Module):
        def forward(self, x: torch.Tensor, causal: bool) -> torch.Tensor:
            return rg.attention(x, x, x, mask=rg.causal() if causal else None)

    model, x = Either(), torch.randn(1, 2, 6, 8)
    with capture(model) as record:
        model(x, False)
        model(x, True)
    assert record.attentions[0].kind == "decoder"


def test_decode_labels_generated_tokens() -> None:
    from regard.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["the cat sat on the mat and a dog ran"] * 5, 300)
    count = tokenizer.get_vocab_size()
    model = rg.models.Transformer(
        rg.models.TransformerConfig(**{**vars(PAIR), "vocabulary": count, "suppress_tokens": (0, 1, 2, 3)})
    ).eval()
    source = torch.tensor([tokenizer.encode("the cat sat on the mat").ids])
    with capture(model) as record:
        generated = model.generate(source, max_new_tokens=5)[0]
    record.decode(tokenizer)
    assert [token.strip() for token in record.streams["source"].tokens][:3] == ["the", "cat", "sat"]
    names = [tokenizer.id_to_token(token) for token in generated.tolist()]
    shown = record.streams["generated"].tokens
    assert len(shown) == len(generated) == 5
    assert [name.strip("Ġ") for name in names[:4]] == [text.strip() for text in shown[:4]]
    assert shown[-1] == "?"  # never embedded
