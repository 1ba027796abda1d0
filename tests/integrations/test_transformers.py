"""Hugging Face models of all families give the same results with regard as with eager attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from regard.integrations import mask_tensor
from regard.integrations.mask_tensor import MaskTensor
from regard.integrations.transformers import attend, enable
from tests.integrations.families import APART, DECODERS, ENCODERS, GROUPED, OTHERS, PAIRS, build, tokens

ALL = [*DECODERS, *ENCODERS, *PAIRS, *OTHERS]


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    torch.set_num_threads(1)
    enable()
    enable()  # a second call has no effect


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """The arguments of every attention call."""
    calls: list[dict] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append({"mask": args[4], **kwargs})
        return attend(*args, **kwargs)

    hf.AttentionInterface.register("regard", noting)
    yield calls
    hf.AttentionInterface.register("regard", attend)


def differences(ours: Any, expected: Any, real: Tensor | None) -> dict[str, float]:
    """The largest difference of each tensor output at real tokens."""
    errors = {}
    for name, value in expected.items():
        pairs = zip(ours[name], value, strict=True) if isinstance(value, tuple) else [(ours[name], value)]
        for a, b in pairs:
            if not isinstance(b, Tensor):
                continue
            assert a.shape == b.shape
            apart = (a - b).abs()
            apart = apart.transpose(1, 2) if "attentions" in name else apart
            if real is not None and apart.shape[:2] == real.shape:
                apart = apart[real.bool()]
            errors[name] = max(errors.get(name, 0.0), apart.max().item())
    return errors


def real_tokens(name: str, inputs: dict[str, Tensor]) -> Tensor | None:
    return None if name in PAIRS else inputs.get("attention_mask")


@pytest.mark.parametrize("name", ALL)
def test_logits_hidden_states_and_attentions_are_those_of_eager(name: str, calls: list[dict]) -> None:
    model, inputs = build(name)
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = model(**inputs, **options)
        model.set_attn_implementation("regard")
        ours = model(**inputs, **options)
        plain = model(**inputs)
    assert len(calls) >= 4
    actual = differences(ours, expected, real_tokens(name, inputs))
    assert max(actual.values()) < 1e-4, actual
    assert any("attentions" in key for key in actual)
    first = next(iter(expected))
    torch.testing.assert_close(plain[first], ours[first], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *PAIRS, "detr", "whisper"])
def test_masks_are_not_materialised_unless_the_model_reads_them(
    name: str, calls: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_ignore_mask(*_: Any) -> None:
        raise AssertionError("a dense mask was built")

    model, inputs = build(name)
    model.set_attn_implementation("regard")
    monkeypatch.setattr(mask_tensor, "additive_mask", read_ignore_mask)
    with torch.no_grad():
        model(**inputs)
    given = [call["mask"] for call in calls if call["mask"] is not None]
    assert given
    assert all(isinstance(mask, MaskTensor) and mask.intact for mask in given)


@pytest.mark.parametrize("name", APART)
def test_an_unsupported_model_warns_and_runs_eager_attention(
    name: str, calls: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("regard.integrations.transformers._log.warning_once", warnings.append)
    model, inputs = build(name)
    other = type(model)._from_config(model.config, attn_implementation="regard").eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(**inputs).logits, model(**inputs).logits)
    assert other.config._attn_implementation == "eager"
    assert len(warnings) == 1
    assert f"No attention module of {type(model).__name__} runs" in warnings[0]
    assert not calls


@pytest.mark.parametrize("name", [name for name in APART if name not in ("gptj",)])
def test_an_unsupported_model_is_right_with_our_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.config._attn_implementation_internal = "regard"  # bypasses the checks
        ours = model(**inputs).logits
    torch.testing.assert_close(ours[real], expected[real], atol=1e-5, rtol=1e-5)


GENERATE = ["gpt2", "llama", "mistral", "qwen2", "gemma2", "gpt_neox", "gpt_oss", "t5", "bart", "marian"]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATE)
def test_greedy_generation_is_that_of_eager(name: str, cache: str, calls: list[dict]) -> None:
    model, inputs = build(name)
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options, cache_implementation=cache)
    model.set_attn_implementation("regard")
    ours = model.generate(**inputs, **options, cache_implementation=cache)
    assert calls
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_prompt_in_pieces_equals_the_whole_prompt(name: str) -> None:
    model, inputs = build(name)
    model.set_attn_implementation("regard")
    ids, real = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        whole, cache, parts = model(**inputs).logits, None, []
        for start, stop in ((0, 6), (6, 7), (7, 11), (11, 13)):
            out = model(input_ids=ids[:, start:stop], attention_mask=real[:, :stop], past_key_values=cache)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[real.bool()], whole[real.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "gpt_oss", "swin"])
def test_gradients_of_a_training_step_are_those_of_eager(name: str) -> None:
    grads = []
    for implementation in ("eager", "regard"):
        model, inputs = build(name)
        model.set_attn_implementation(implementation)
        model.train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            for attribute in ("dropout", "attention_dropout", "dropout_prob"):
                if isinstance(getattr(part, attribute, None), float):
                    setattr(part, attribute, 0.0)
        real = inputs.get("attention_mask", torch.ones(2, 1)) == 1
        if name == "swin":
            loss = nn.functional.cross_entropy(model(**inputs).logits, torch.tensor([0, 1]))
        elif name == "t5":
            labels = inputs.pop("decoder_input_ids").contiguous()
            loss = model(**inputs, labels=labels).loss
        else:
            targets = inputs["input_ids"].masked_fill(~real, -100).flatten()
            loss = nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), targets)
        loss.backward()
        grads.append({key: parameter.grad for key, parameter in model.named_parameters()})
    theirs, ours = grads
    moved = [key for key, grad in theirs.items() if grad is not None]
    assert len(moved) > 10
    assert any("bias" in key or "sinks" in key or "weight" in key for key in moved)
    for key in moved:
        scale = theirs[key].abs().max().item()
        torch.testing.assert_close(ours[key], theirs[key], atol=1e-4 * max(scale, 1e-2), rtol=1e-3, msg=key)


def test_checkpointed_layers_are_computed_again_without_weights() -> None:
    """The layers of Llama 4 do not say whether they return weights; the model collects them, in forward only."""
    config = hf.Llama4TextConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Llama4ForCausalLM._from_config(config, attn_implementation="regard").train()
    ids, weight, grads = torch.randint(99, (2, 11)), model.model.layers[0].self_attn.q_proj.weight, []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        weight.grad = None
        model(ids, use_cache=False).logits.square().sum().backward()
        grads.append(weight.grad.clone())
    assert torch.equal(*grads)
    with torch.no_grad():
        assert len(model(ids, output_attentions=True).attentions) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_give_the_same_gradients(reentrant: bool) -> None:
    model, inputs = build("llama")
    model.set_attn_implementation("regard")
    model.train()
    model.enable_input_require_grads()
    weight, grads = model.model.layers[0].self_attn.q_proj.weight, []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        weight.grad = None
        model(**inputs, use_cache=False).logits.square().sum().backward()
        grads.append(weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama"])
def test_dropout_is_active_in_training_and_reproducible(name: str, calls: list[dict]) -> None:
    model, inputs = build(name)
    model.set_attn_implementation("regard")
    if name == "llama":
        for part in model.modules():
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = 0.3
    for part in model.modules():
        part.training = "ttention" in type(part).__name__ or part.training  # only attention is in training mode
        if isinstance(part, nn.Dropout):
            part.eval()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model(**inputs).logits)
    assert any(call["dropout"] > 0 for call in calls)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2])


def test_a_custom_mask_is_used() -> None:
    model, inputs = build("llama")
    ids = inputs["input_ids"]
    permits = torch.rand(3, 1, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    permits |= torch.eye(13, dtype=torch.bool)
    numbers = torch.zeros(permits.shape).masked_fill(~permits, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=numbers).logits
        soft = model(input_ids=ids, attention_mask=numbers.clamp(min=-2.0)).logits
        model.set_attn_implementation("regard")
        for mask in (numbers, permits, numbers.masked_fill(~permits, float("-inf")), numbers.double()):
            ours = model(input_ids=ids, attention_mask=mask).logits
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        ours = model(input_ids=ids, attention_mask=numbers.clamp(min=-2.0)).logits
        torch.testing.assert_close(ours, soft, atol=1e-4, rtol=1e-4)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Three packed sequences: ids, positions and edges."""
    lengths = (5, 1, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return tokens("left")["input_ids"][:1], positions, torch.tensor([0, 5, 6, 13], dtype=torch.int32)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_are_independent(name: str) -> None:
    model, _ = build(name)
    model.set_attn_implementation("regard")
    ids, positions, edges = packed()
    with torch.no_grad():
        apart = torch.cat([model(part[None]).logits for part in ids[0].tensor_split(edges[1:-1].long())], 1)
        by_positions = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 7, "max_length_k": 7}
        by_both = model(input_ids=ids, position_ids=positions, use_cache=False, **lengths).logits
        with pytest.raises(ValueError, match="pack without a cache"):
            attend(model, *torch.zeros(3, 1, 2, 3, 8), None, cu_seq_lens_q=edges, cu_seq_lens_k=edges + 1)
    torch.testing.assert_close(by_positions, apart, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_both, apart, atol=1e-4, rtol=1e-4)


def test_packed_edges_alone_separate_sequences() -> None:
    query, key, value = torch.randn(3, 1, 2, 13, 8)
    edges = packed()[2]
    output, _ = attend(nn.Module(), query, key, value, None, is_causal=True, cu_seq_lens_q=edges)
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = [tensor[:, :, start:stop] for tensor in (query, key, value)]
        expected = nn.functional.scaled_dot_product_attention(*part, is_causal=True)
        torch.testing.assert_close(output[:, start:stop].transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def test_a_causal_model_can_be_bidirectional() -> None:
    model, inputs = build("llama")
    with torch.no_grad():
        expected = model(**inputs, is_causal=False).logits
        whole = model(input_ids=inputs["input_ids"], is_causal=False).logits
        model.set_attn_implementation("regard")
        ours = model(**inputs, is_causal=False).logits
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(ours[real], expected[real], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            model(input_ids=inputs["input_ids"], is_causal=False).logits, whole, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("keyword", "attribute", "queries", "causal"),
    [
        (None, False, 5, False),
        (True, False, 5, True),
        (False, True, 5, False),
        (None, True, 1, False),
        (True, True, 1, False),
    ],
)
def test_without_a_mask_the_keyword_decides(keyword: bool | None, attribute: bool, queries: int, causal: bool) -> None:
    module = nn.Module()
    module.is_causal = attribute  # type: ignore[assignment]
    key, value = torch.randn(2, 1, 2, 5, 8)
    query = torch.randn(1, 4, queries, 8)
    output, weights = attend(module, query, key, value, None, is_causal=keyword)
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert output.is_contiguous()
    assert weights is None


def test_ambiguous_calls_without_a_mask_raise() -> None:
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"is_causal=True and passes no mask.*create_causal_mask"):
        attend(module, query, key, value, None)
    with pytest.raises(ValueError, match="3 queries and 5 keys, which does not determine"):
        attend(module, query[:, :, :3], key, value, None, is_causal=True)


def bridgetower() -> tuple[Any, dict]:
    text = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    config = hf.BridgeTowerConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        text_config=text | {"intermediate_size": 37, "max_position_embeddings": 64},
        vision_config=vision,
    )
    return hf.BridgeTowerModel._from_config(config, attn_implementation="eager"), tokens("right") | {
        "pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    }


def qwen2_moe() -> tuple[Any, dict]:
    config = hf.Qwen2MoeConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    assert config.sliding_window == 0  # "unused"
    return hf.Qwen2MoeForCausalLM._from_config(config, attn_implementation="eager"), tokens("right")


def qformer() -> tuple[Any, dict]:
    config = hf.Blip2QFormerConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=37,
        encoder_hidden_size=24,
        cross_attention_frequency=1,
    )
    mask = torch.ones(27, 5, dtype=torch.long)
    mask[3, 2:] = 0
    inputs = {
        "query_embeds": torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)),
        "encoder_hidden_states": torch.randn(27, 5, 24, generator=torch.Generator().manual_seed(1)),
        "encoder_attention_mask": mask,
    }
    return hf.Blip2QFormerModel._from_config(config, attn_implementation="eager"), inputs


def granite_swa() -> tuple[Any, dict]:
    config = hf.GraniteSWAConfig(**GROUPED, sliding_window=4)
    return hf.GraniteSWAForCausalLM._from_config(config, attn_implementation="eager"), tokens("right")


@pytest.mark.parametrize("family", [bridgetower, qwen2_moe, qformer, granite_swa])
def test_families_with_unusual_calls_match_eager(family: Any, calls: list[dict]) -> None:
    """An unmasked stream of causal modules, an unused window of 0, queries that all batch rows share,
    returned weights without the sink.
    """
    torch.manual_seed(0)
    model, inputs = family()
    model.eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    real = inputs.get("attention_mask")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        model.set_attn_implementation("regard")
        ours = model(**inputs, output_attentions=True)
    assert calls
    actual, right = (torch.utils._pytree.tree_flatten_with_path(dict(output))[0] for output in (ours, expected))
    assert len(actual) == len(right) > 2
    for (path, a), (_, b) in zip(actual, right, strict=True):
        if isinstance(b, Tensor):  # the rest is a cache
            assert a.shape == b.shape, path
            apart = (a - b).abs().transpose(1, -2 if "attentions" in str(path) else 1)
            if real is not None and apart.shape[:2] == real.shape:
                apart = apart[real.bool()]
            assert apart.max() < 1e-4, path


def test_weights_are_collected_if_the_layer_does_not_request_them() -> None:
    """Some layers pass `output_attentions=False` by default while the model collects their weights by hooks."""
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    token = _active_collector.set({"attentions": []})
    try:
        assert attend(nn.Module(), query, key, value, None, output_attentions=False)[1] is not None
    finally:
        _active_collector.reset(token)
    assert attend(nn.Module(), query, key, value, None, output_attentions=False)[1] is None


def test_a_row_without_visible_keys_is_zero() -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 8)
    permits = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    permits[0, :, 2] = False
    for mask in (permits, torch.zeros(permits.shape).masked_fill(~permits, torch.finfo(torch.float32).min)):
        output, weights = attend(nn.Module(), query, key, value, mask, output_attentions=True)
        assert (output[0, 2] == 0).all()
        assert weights is not None
        assert (weights[0, :, 2] == 0).all()
        assert output.isfinite().all()


def test_a_saved_model_is_loaded_with_regard(tmp_path: Path) -> None:
    model, inputs = build("bert")
    model.save_pretrained(tmp_path)
    loaded = hf.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="regard").eval()
    assert loaded.config._attn_implementation == "regard"
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)


def test_weights_are_returned_without_output_attentions_in_the_call() -> None:
    torch.manual_seed(0)
    config = hf.LongT5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, local_radius=3, decoder_start_token_id=0
    )
    model = hf.LongT5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    inputs = {**tokens("right"), "decoder_input_ids": tokens("left")["input_ids"][:, :7]}
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        model.set_attn_implementation("regard")
        ours = model(**inputs, output_attentions=True)
    assert max(differences(ours, expected, None).values()) < 1e-4
    assert len(ours.decoder_attentions) == 1


@pytest.mark.parametrize("name", ["sinks"])
def test_unsupported_arguments_raise(name: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=f"passes '{name}' to its attention.*set_attn_implementation"):
        attend(nn.Module(), query, key, value, None, **{name: torch.zeros(1)})


def test_a_model_compiles_to_one_graph() -> None:
    model, inputs = build("llama")
    model.set_attn_implementation("regard")
    real = inputs["attention_mask"].bool()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(**inputs, use_cache=False, return_dict=False)[0]
        ours = compiled(**inputs, use_cache=False, return_dict=False)[0]
    torch.testing.assert_close(ours[real], expected[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_with_left_padding(dtype: torch.dtype) -> None:
    model, left = build("llama")
    inputs = tokens("right")
    real = inputs["attention_mask"].bool()
    with torch.inference_mode():
        expected = model.double()(**inputs).logits
        eager = model.to(dtype)(**inputs).logits
        model.set_attn_implementation("regard")
        ours = model(**inputs).logits
        assert ours.dtype == dtype
        error, theirs = ((x.double() - expected)[real].abs().max() for x in (ours, eager))
        assert error <= 2 * theirs + 1e-6
        assert model(**left).logits.isfinite().all()  # eager attention gives NaN in float64


def test_parts_of_a_composite_model_are_set_explicitly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model, _ = build("detr")
        model.set_attn_implementation("regard")
    assert not any("undefined behavior" in record.message for record in caplog.records)
