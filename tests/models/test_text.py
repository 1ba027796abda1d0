"""Text encoders compared with transformers, and in all forms of input."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import regard as rg
from regard.models import (
    MaskedLanguageModel,
    SentenceEmbedder,
    SequenceClassifier,
    TextConfig,
    TextEncoder,
    TokenClassifier,
)

BERT = TextConfig(vocabulary=100, d_model=32, layers=3, heads=4, d_hidden=64, positions=40)
LENGTHS = (12, 9, 1)
IDS = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
LIST = [row[:n] for row, n in zip(IDS, LENGTHS, strict=True)]


def filled(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.2)
    return model.eval()


def bert(their: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    ours = {f"{our_name}.weight": their[f"embeddings.{other}_embeddings.weight"]
            for our_name, other in (("embedding", "word"), ("position", "position"), ("segment", "token_type"))
            if f"embeddings.{other}_embeddings.weight" in their}  # fmt: skip
    pairs = {"attention.output": "attention.output.dense", "attention_residual.norm": "attention.output.LayerNorm",
             "feedforward.up": "intermediate.dense", "feedforward.output": "output.dense",
             "feedforward_residual.norm": "output.LayerNorm"}  # fmt: skip
    for kind in ("weight", "bias"):
        ours[f"embedding_norm.{kind}"] = their[f"embeddings.LayerNorm.{kind}"]
        for n in range(layers):
            here, there = f"stack.layers.{n}", f"encoder.layer.{n}"
            parts = [their[f"{there}.attention.self.{x}.{kind}"] for x in ("query", "key", "value")]
            ours[f"{here}.attention.qkv.{kind}"] = torch.cat(parts)
            for our_name, other in pairs.items():
                ours[f"{here}.{our_name}.{kind}"] = their[f"{there}.{other}.{kind}"]
    return ours


def albert(their: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ours = {f"{our_name}.weight": their[f"embeddings.{other}_embeddings.weight"]
            for our_name, other in (("embedding", "word"), ("position", "position"), ("segment", "token_type"))
            }  # fmt: skip
    there, here = "encoder.albert_layer_groups.0.albert_layers.0", "stack.layers.0"
    pairs = {"attention.output": "attention.dense", "attention_residual.norm": "attention.LayerNorm",
             "feedforward.up": "ffn", "feedforward.output": "ffn_output",
             "feedforward_residual.norm": "full_layer_layer_norm"}  # fmt: skip
    for kind in ("weight", "bias"):
        ours[f"embedding_norm.{kind}"] = their[f"embeddings.LayerNorm.{kind}"]
        ours[f"project.{kind}"] = their[f"encoder.embedding_hidden_mapping_in.{kind}"]
        parts = [their[f"{there}.attention.{x}.{kind}"] for x in ("query", "key", "value")]
        ours[f"{here}.attention.qkv.{kind}"] = torch.cat(parts)
        for our_name, other in pairs.items():
            ours[f"{here}.{our_name}.{kind}"] = their[f"{there}.{other}.{kind}"]
    return ours


SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 64, "max_position_embeddings": 40}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family", ["Bert", "Roberta", "Albert"])
def test_hidden_states_match_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    more: dict[str, Any] = {
        "Bert": {}, "Roberta": {"pad_token_id": 1}, "Albert": {"embedding_size": 16, "hidden_act": "gelu"}
    }[family]  # fmt: skip
    other = filled(getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**SIZES, **more)))
    config = {
        "Bert": BERT, "Roberta": dataclasses.replace(BERT, first_position=2),
        "Albert": dataclasses.replace(BERT, d_embedding=16, distinct=1),
    }[family]  # fmt: skip
    eps = other.config.layer_norm_eps
    model = TextEncoder(dataclasses.replace(config, eps=eps, segments=other.config.type_vocab_size)).eval()
    state = other.state_dict()
    model.load_state_dict(albert(state) if family == "Albert" else bert(state, 3))
    ids = IDS if family != "Roberta" else torch.where(REAL, IDS, 1)
    expected = other(ids, attention_mask=REAL.long()).last_hidden_state[REAL]
    torch.testing.assert_close(model(IDS, REAL)[REAL], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(model(LIST)), expected, rtol=0, atol=1e-5)
    segments = torch.randint(0, other.config.type_vocab_size, IDS.shape)
    expected = other(ids, attention_mask=REAL.long(), token_type_ids=segments).last_hidden_state[REAL]
    torch.testing.assert_close(model(IDS, REAL, segments=segments)[REAL], expected, rtol=0, atol=1e-5)
    listed = [row[:n] for row, n in zip(segments, LENGTHS, strict=True)]
    torch.testing.assert_close(torch.cat(model(LIST, segments=listed)), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("arrangement", ["pre", "post"])
@pytest.mark.parametrize("model_class", [MaskedLanguageModel, TokenClassifier])
def test_results_have_the_form_of_the_inputs(model_class: Any, arrangement: str) -> None:
    model = filled(model_class(dataclasses.replace(BERT, arrangement=arrangement, classes=5)))
    whole, packed, listed = model(IDS, REAL), model(rg.pack(LIST)), model(LIST)
    assert whole.shape == (3, 12, 5 if model_class is TokenClassifier else 100)
    assert packed.lengths == LENGTHS
    torch.testing.assert_close(packed.values, whole[REAL], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(listed), whole[REAL], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["first", "mean", "max", "attention"])
@pytest.mark.parametrize("model_class", [SequenceClassifier, SentenceEmbedder])
def test_one_result_per_sequence_for_all_forms_of_input(model_class: Any, pooling: str) -> None:
    model = filled(model_class(dataclasses.replace(BERT, pooling=pooling)))
    whole = model(IDS, REAL)
    assert whole.shape == (3, 2 if model_class is SequenceClassifier else 32)
    for inputs in (LIST, rg.pack(LIST)):
        torch.testing.assert_close(model(inputs), whole, rtol=0, atol=1e-5)
    for row, sequence in zip(whole, LIST, strict=True):
        torch.testing.assert_close(model([sequence])[0], row, rtol=0, atol=1e-5)
    if model_class is SentenceEmbedder:
        torch.testing.assert_close(whole.norm(dim=-1), torch.ones(3))


def test_packed_sequences_can_be_trained() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(dataclasses.replace(BERT, dropout=0.0))
    optimizer, classes, losses = torch.optim.AdamW(model.parameters(), 3e-3), torch.tensor([0, 1, 0]), []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(LIST), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_invalid_arguments_raise() -> None:
    model = TextEncoder(BERT).eval()
    with pytest.raises(ValueError, match="the model has 40 positions, but a sequence has 41 tokens"):
        model(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(TypeError, match=r"mask must be a \(B, N\) bool tensor"):
        model(IDS, REAL.long())
    with pytest.raises(ValueError, match="packed inputs and lists take no mask"):
        model(LIST, REAL)
    with pytest.raises(ValueError, match=r"try inputs\[None\]"):
        model(IDS[0])
    with pytest.raises(ValueError, match=r"arrangement must be one of pre, post, .*, got 'both'"):
        TextEncoder(dataclasses.replace(BERT, arrangement="both"))


@pytest.mark.parametrize(
    ("ids", "segments"),
    [
        (torch.ones(2, 3, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long)),
        (torch.ones(2, 3, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)),
        ([torch.tensor([5, 6, 7]), torch.tensor([8])], [torch.tensor([0]), torch.tensor([0, 1, 1])]),
    ],
)
def test_segments_of_the_wrong_form_raise(ids: Any, segments: Any) -> None:
    with pytest.raises(ValueError, match="segments must have the form of the ids"):
        TextEncoder(BERT)(ids, segments=segments)
