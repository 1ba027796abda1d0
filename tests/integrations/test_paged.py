"""Continuous batching with a paged cache, and models that choose keys by an indexer, as with eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from regard.integrations import transformers as integration
from regard.integrations.transformers import attend, enable
from tests.integrations.families import GROUPED, VOCABULARY

SIZES = GROUPED | {"intermediate_size": 32, "eos_token_id": None, "bos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "head_dim": 8}),
    "gpt-oss": ("GptOss", {"sliding_window": 5, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    torch.set_num_threads(1)
    enable()


def build(name: str) -> Any:
    torch.manual_seed(0)
    kind, more = MODELS[name]
    config = getattr(hf, f"{kind}Config")(**SIZES, **more)
    model = getattr(hf, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("implementation", ["regard", "paged|regard"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")
def test_continuous_batching_generates_the_tokens_of_eager_attention(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, generator = build(name), torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 17, 9, 1, 30)]
    options = hf.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected.append(model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)[0].tolist())
    masks, paged = [], integration._paged_pattern
    monkeypatch.setattr(integration, "_paged_pattern", lambda *args: masks.append(paged(*args)) or masks[-1])
    model.set_attn_implementation(implementation)
    actual = model.generate_batch(prompts, generation_config=options, progress_bar=False)
    rows = [actual[key] for key in sorted(actual, key=lambda key: int(key.split("_")[-1]))]
    assert [prompt + row.generated_tokens for prompt, row in zip(prompts, rows, strict=True)] == expected
    assert model.config._attn_implementation == "regard"
    assert masks, "regard did not attend to the paged cache"
    assert all("varlen" in repr(pattern.mask) for pattern in masks)


def test_other_attentions_still_take_part_in_continuous_batching() -> None:
    model = build("llama")
    options = hf.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    actual = model.generate_batch([[5, 6, 7]], generation_config=options, progress_bar=False)
    assert [len(row.generated_tokens) for row in actual.values()] == [2]


class Paged:
    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict) -> Any:
        return key_states, value_states


class Layer(nn.Module):
    layer_idx = 0


@pytest.mark.parametrize("given", [{"attention_mask": torch.zeros(1, 1, 5, 5)}, {"block_table": torch.zeros(1, 1)}])
def test_a_paged_cache_with_a_mask_or_block_table_raises(given: dict) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    edges = torch.tensor([0, 5], dtype=torch.int32)
    arguments = {"attention_mask": None, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges} | given
    with pytest.raises(NotImplementedError, match=r"a paged cache with a (mask tensor|block table) is not supported"):
        attend(Layer(), query, key, value, cache=Paged(), **arguments)


INDEXED = {
    "deepseek_v32": {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    "glm_moe_dsa": {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
}
LATENT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_keys_chosen_by_an_indexer_are_those_of_eager_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(name, **(LATENT | INDEXED[name]))
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, VOCABULARY, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["indices"].shape[-1])
        return attend(*args, **kwargs)

    hf.AttentionInterface.register("regard", counting)
    try:
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
            model.set_attn_implementation("regard")
            actual = model(ids, attention_mask=mask).logits
            assert calls == [4, 4]
            again = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    finally:
        hf.AttentionInterface.register("regard", attend)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
    assert torch.equal(again, tokens)


def test_blocks_chosen_by_an_indexer_hide_all_other_keys() -> None:
    query, key, value = torch.randn(1, 4, 3, 8), *torch.randn(2, 1, 2, 8, 8)
    module = nn.Module()
    module.indexer = nn.Module()
    module.indexer.block_size = 2
    chosen = torch.tensor([[[[0, -1], [1, 3], [2, 0]], [[3, 3], [0, 1], [-1, 2]]]])  # (B, heads of the indexer, Q, n)
    out, _ = attend(module, query, key, value, None, scaling=1.0, block_indices=chosen)
    for head in range(4):
        for row in range(3):
            blocks = {n for n in chosen[0, head // 2, row].tolist() if n >= 0}
            keys = [place for block in sorted(blocks) for place in (2 * block, 2 * block + 1)]
            weights = (key[0, head // 2, keys] @ query[0, head, row]).softmax(0)
            torch.testing.assert_close(out[0, row, head], weights @ value[0, head // 2, keys])
