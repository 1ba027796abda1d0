"""Language models compared with transformers: logits with and without cache, generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import regard as rg
from regard.models import LanguageConfig, LanguageModel, LatentSizes
from regard.nn import Beam, Cache, Rotary, Sample, WindowCache

GPT2 = LanguageConfig(vocabulary=100, d_model=32, layers=3, heads=4, d_hidden=128, positions=64)
LLAMA = LanguageConfig(
    vocabulary=100, d_model=32, layers=3, heads=4, kv_heads=2, d_hidden=48, rotary=Rotary(), norm="rms", eps=1e-6,
    activation="silu", gated=True, bias=False, tied=False,
)  # fmt: skip
MISTRAL = dataclasses.replace(LLAMA, windows=(4,))
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True)
GEMMA2 = dataclasses.replace(
    LLAMA, norm="unit_rms", activation="gelu_tanh", tied=True, arrangement="sandwich", d_head=16, windows=(4, None),
    scale=24**-0.5, softcap=50.0, final_softcap=30.0, embedding_scale=32**0.5,
)  # fmt: skip
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "gemma2": GEMMA2}


def filled(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.2)
    return model.eval()


def theirs(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=100, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        return filled(transformers.GPT2LMHeadModel(config))
    more: dict[str, Any] = {"llama": {}, "mistral": {"sliding_window": 4}, "qwen2": {}}.get(name) or {}
    if name == "gemma2":
        more = {
            "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24, "attn_implementation": "eager"
        }  # fmt: skip
    words = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "gemma2": "Gemma2"}[name]
    config = getattr(transformers, f"{words}Config")(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, **more,
    )  # fmt: skip
    return filled(getattr(transformers, f"{words}ForCausalLM")(config))


def converted(their: dict[str, torch.Tensor], config: LanguageConfig) -> dict[str, torch.Tensor]:
    ours: dict[str, torch.Tensor] = {}
    if config.rotary is None:
        ours |= {
            "embedding.weight": their["transformer.wte.weight"],
            "position.weight": their["transformer.wpe.weight"],
        }
        pairs = {"attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "feedforward.up": "mlp.c_fc",
                 "feedforward.output": "mlp.c_proj", "attention_residual.norm": "ln_1",
                 "feedforward_residual.norm": "ln_2"}  # fmt: skip
        for kind in ("weight", "bias"):
            ours[f"stack.norm.{kind}"] = their[f"transformer.ln_f.{kind}"]
            for n in range(config.layers):
                for our_name, other in pairs.items():
                    tensor = their[f"transformer.h.{n}.{other}.{kind}"]
                    ours[f"stack.layers.{n}.{our_name}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
        return ours
    ours |= {"embedding.weight": their["model.embed_tokens.weight"], "stack.norm.weight": their["model.norm.weight"]}
    if not config.tied:
        ours["head.weight"] = their["lm_head.weight"]
    for n in range(config.layers):
        here, there = f"stack.layers.{n}", f"model.layers.{n}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            ours[f"{here}.attention.qkv.{kind}"] = torch.cat(
                [their[f"{there}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            )
        ours[f"{here}.attention.output.weight"] = their[f"{there}.self_attn.o_proj.weight"]
        ours[f"{here}.feedforward.up.weight"] = torch.cat(
            [their[f"{there}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        )
        ours[f"{here}.feedforward.output.weight"] = their[f"{there}.mlp.down_proj.weight"]
        norms = {"attention_residual.norm": "input_layernorm", "feedforward_residual.norm": "post_attention_layernorm"}
        if config.arrangement == "sandwich":
            norms |= {"attention_residual.after": "post_attention_layernorm",
                      "feedforward_residual.norm": "pre_feedforward_layernorm",
                      "feedforward_residual.after": "post_feedforward_layernorm"}  # fmt: skip
        for our_name, other in norms.items():
            ours[f"{here}.{our_name}.weight"] = their[f"{there}.{other}.weight"]
    return ours


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[LanguageModel, Any]:
    other, config = theirs(request.param), FAMILIES[request.param]
    model = LanguageModel(config).eval()
    model.load_state_dict(converted(other.state_dict(), config))
    return model, other


IDS = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_logits_match_transformers_with_and_without_a_cache(pair: tuple[LanguageModel, Any]) -> None:
    model, other = pair
    expected = other(IDS).logits
    torch.testing.assert_close(model(IDS), expected, rtol=1e-5, atol=1e-5)
    state, first = model.start_generation(IDS[:, :5])
    steps = [state.step(first)] + [state.step(IDS[:, n : n + 1]) for n in range(5, 12)]
    torch.testing.assert_close(torch.stack(steps, 1), expected[:, 4:], rtol=1e-5, atol=1e-5)


def test_generation_matches_transformers(pair: tuple[LanguageModel, Any]) -> None:
    model, other = pair
    prompts = [IDS[0, :7], IDS[1, :3]]
    for tokens, prompt in zip(model.generate(prompts, max_new_tokens=10), prompts, strict=True):
        expected = other.generate(prompt[None], max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tokens.tolist() == expected[0, len(prompt) :].tolist()
    stop = int(model.generate(prompts, max_new_tokens=3, strategy=Beam(4))[0][-1])
    for tokens, prompt in zip(
        model.generate(prompts, max_new_tokens=10, strategy=Beam(4), stop=[stop]), prompts, strict=True
    ):
        expected = other.generate(
            prompt[None], max_new_tokens=10, do_sample=False, num_beams=4, eos_token_id=stop, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert tokens.tolist() == (expected[: expected.index(stop)] if stop in expected else expected)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    model = filled(LanguageModel(FAMILIES[request.param]))
    assert isinstance(model, LanguageModel)
    return model


@torch.no_grad()
def test_packed_padded_and_single_sequences_have_the_same_logits(model: LanguageModel) -> None:
    lengths = (12, 5)
    sequences = [IDS[n, :length] for n, length in enumerate(lengths)]
    alone = [model(sequence[None])[0] for sequence in sequences]
    right = torch.arange(12) < torch.tensor(lengths)[:, None]
    left = right.flip(1)
    filled_left = torch.zeros(2, 12, dtype=torch.long)
    filled_left[left] = torch.cat(sequences)
    expected = torch.cat(alone)
    for logits in (
        torch.cat(model(sequences)), model(rg.pack(sequences)).values, model(IDS, right)[right],
        model(filled_left, left)[left],
    ):  # fmt: skip
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_prompts_of_different_lengths_are_continued_independently(model: LanguageModel) -> None:
    prompts = [IDS[0, :9], IDS[1, :2], IDS[0, 3:8]]
    for strategy in (None, Beam(3)):
        together = model.generate(prompts, max_new_tokens=8, strategy=strategy)
        for tokens, prompt in zip(together, prompts, strict=True):
            assert tokens.tolist() == model.generate([prompt], max_new_tokens=8, strategy=strategy)[0].tolist()


def test_tokens_can_be_streamed(model: LanguageModel) -> None:
    expected = model.generate(IDS[:1, :4], max_new_tokens=6)[0].tolist()
    stream = model.stream(IDS[0, :4], max_new_tokens=6)
    assert next(stream) == expected[0]
    assert list(stream) == expected[1:]
    assert (
        list(model.stream(IDS[0, :4], max_new_tokens=6, stop=[expected[2]])) == expected[: expected.index(expected[2])]
    )
    drawn = [
        model.generate(IDS[:, :4], max_new_tokens=6, strategy=Sample(top_p=0.9, seed=3))[1].tolist() for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_layers_with_a_window_cache_only_the_window() -> None:
    kinds = [type(cache) for cache in LanguageModel(GEMMA2).stack.cache()]
    assert kinds == [WindowCache, Cache, WindowCache]


@pytest.mark.parametrize("bias", [True, False])
def test_latent_attention_has_the_biases_of_the_model(bias: bool) -> None:
    sizes = LatentSizes(d_latent=8, d_rotary=4, d_value=8)
    model = LanguageModel(dataclasses.replace(GPT2, latent=sizes, bias=bias))
    assert (model.stack.layers[0].attention.output.bias is not None) == bias


def test_exceeding_the_positions_raises() -> None:
    model = LanguageModel(dataclasses.replace(GPT2, positions=8)).eval()
    with pytest.raises(ValueError, match="has 8 positions, but the sequence has 9 tokens"):
        model.generate(IDS[:, :5], max_new_tokens=9)


def test_training_lowers_the_loss_on_packed_sequences() -> None:
    torch.manual_seed(0)
    model = LanguageModel(LLAMA)
    sequences = [torch.arange(n, n + length) % 20 for n, length in ((0, 9), (5, 4), (11, 7))]
    packed, optimizer = rg.pack([s[:-1] for s in sequences]), torch.optim.AdamW(model.parameters(), 1e-2)
    target, losses = torch.cat([s[1:] for s in sequences]), []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(packed).values, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
