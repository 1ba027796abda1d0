"""Masks of real tokens: the result of a row does not depend on padding, batch or compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard as rg
from regard.models import (
    ImageTextMatcher,
    LanguageConfig,
    LanguageModel,
    MatchConfig,
    PointerTransformer,
    Recommender,
    SentenceEmbedder,
    SequenceClassifier,
    SetConfig,
    SetTransformer,
    TextConfig,
    TextEncoder,
    Transformer,
    TransformerConfig,
    VisionConfig,
)
from regard.models.speech_recognition import SpeechConfig, SpeechRecognizer
from regard.models.speech_synthesis import SpeechSynthesizer, SpeechSynthesizerConfig
from regard.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config

SIZES: dict[str, Any] = {"vocabulary": 50, "d_model": 16, "layers": 1, "heads": 2, "d_hidden": 24}
TARGETS = torch.tensor([[1, 5, 6], [1, 9, 2], [1, 7, 7], [1, 3, 4]])
FRAMES = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Case(NamedTuple):
    """A model, and how to call it with ids (B, N), a mask (B, N) and the indices of the rows."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor, Tensor | None, list[int]], Tensor]
    by_token: bool = False  # whether there is a result for every token of the input


def language(**changes: Any) -> LanguageModel:
    return LanguageModel(LanguageConfig(**SIZES, **changes))


def translator(kind: type[Transformer] = Transformer, **changes: Any) -> Transformer:
    return kind(TransformerConfig(**SIZES, **changes))


def by_ids(model: Any, ids: Tensor, mask: Tensor | None, rows: list[int]) -> Tensor:
    return model(ids, mask)


def with_targets(model: Any, ids: Tensor, mask: Tensor | None, rows: list[int]) -> Tensor:
    return model(ids, TARGETS[rows], mask)


CASES = {
    "text": Case(lambda: TextEncoder(TextConfig(**SIZES)), by_ids, True),
    "text, first": Case(lambda: SequenceClassifier(TextConfig(**SIZES)), by_ids),
    "text, mean": Case(lambda: SentenceEmbedder(TextConfig(**SIZES, pooling="mean")), by_ids),
    "text, attention": Case(lambda: SentenceEmbedder(TextConfig(**SIZES, pooling="attention")), by_ids),
    "language, learned": Case(language, by_ids, True),
    "language, rotary": Case(lambda: language(rotary=rg.nn.Rotary(), norm="rms", gated=True), by_ids, True),
    "language, window": Case(lambda: language(windows=(3,)), by_ids, True),
    "recommender": Case(
        lambda: Recommender(LanguageConfig(**SIZES)), lambda model, ids, mask, rows: model.next_item_logits(ids, mask)
    ),
    "translation": Case(translator, with_targets),
    "translation, learned": Case(lambda: translator(position="learned"), with_targets),
    "translation, relative": Case(lambda: translator(position="relative"), with_targets),
    "translation, window": Case(lambda: translator(window=1), with_targets),
    "translation, copying": Case(lambda: translator(PointerTransformer), with_targets),
    "speaker": Case(
        lambda: SpeechSynthesizer(SpeechSynthesizerConfig(**SIZES, features=5, reduction=3)),
        lambda model, ids, mask, rows: model(ids, FRAMES[rows], mask),
    ),
    "match": Case(
        lambda: ImageTextMatcher(
            MatchConfig(
                TextConfig(**SIZES), VisionConfig(d_model=16, layers=1, heads=2, d_hidden=24, image=(16, 16), patch=8)
            )
        ),
        lambda model, ids, mask, rows: model(IMAGES[rows], ids, mask),
    ),
    "sets": Case(
        lambda: SetTransformer(SetConfig(features=1, d_model=16, layers=1, heads=2, d_hidden=24, points=3)),
        lambda model, ids, mask, rows: model(ids[..., None].double(), mask),
    ),
}
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 1, 0]], dtype=torch.bool)
IDS = torch.randint(3, 50, MASK.shape, generator=torch.Generator().manual_seed(2))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[name].make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def real(name: str, result: Tensor, mask: Tensor) -> Tensor:
    return result[mask] if CASES[name].by_token else result


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_result_alone_and_in_any_batch(name: str) -> None:
    model, call = build(name), CASES[name].call
    together = call(model, IDS, MASK, [0, 1, 2, 3])
    for row in range(4):
        alone = call(model, IDS[[row]], MASK[[row]], [row])
        actual, expected = real(name, together[[row]], MASK[[row]]), real(name, alone, MASK[[row]])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_padding_at_either_end_changes_nothing(name: str) -> None:
    model, call = build(name), CASES[name].call
    plain = call(model, IDS[:, 1:4], None, [0, 1, 2, 3])
    for columns in ([0, 1, 2], [1, 2, 3], [3, 4, 5]):
        ids, mask = torch.full((4, 6), 49), torch.zeros(4, 6, dtype=torch.bool)
        ids[:, columns], mask[:, columns] = IDS[:, 1:4], True
        result = real(name, call(model, ids, mask, [0, 1, 2, 3]), mask)
        torch.testing.assert_close(result.view(plain.shape), plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["text", "language, rotary", "speaker"])
def test_a_compiled_model_gives_the_same(name: str) -> None:
    model, call = build(name), CASES[name].call
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for rows in ([0, 1, 2, 3], [0, 2]):
        actual, expected = (call(each, IDS[rows], MASK[rows], rows) for each in (compiled, model))
        close = real(name, actual, MASK[rows]), real(name, expected, MASK[rows])
        torch.testing.assert_close(*close, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_the_wrong_shape_or_dtype_raises(name: str) -> None:
    model, call = build(name), CASES[name].call
    for mask in (torch.ones(4, 5, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)):
        with pytest.raises(ValueError, match="mask must be"):
            call(model, IDS, mask, [0, 1, 2, 3])
    with pytest.raises(TypeError, match="bool"):
        call(model, IDS, MASK.long(), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (transformers.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                 intermediate_size=24, max_position_embeddings=20), "BertForMaskedLM"),
        (transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=20, bos_token_id=None,
                                 eos_token_id=None), "GPT2LMHeadModel"),
        (transformers.LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                  intermediate_size=24, bos_token_id=None, eos_token_id=None), "LlamaForCausalLM"),
    ],
    ids=["bert", "gpt2", "llama"],
)  # fmt: skip
def test_holes_count_as_positions_as_in_transformers(config: Any, kind: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    other = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 1, 1]], dtype=torch.bool)
    with torch.no_grad():
        ours, theirs = rg.load(tmp_path)(IDS[:2], mask), other(IDS[:2], attention_mask=mask.long()).logits
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_left_padded_wave_raises(compiled: bool) -> None:
    sizes = {"channels": (8,), "kernels": (4,), "strides": (2,), "position_kernel": 4, "position_groups": 2}
    config = Wav2Vec2Config(labels=5, d_model=16, layers=1, heads=2, d_hidden=24, **sizes)  # type: ignore[arg-type]
    model: Any = Wav2Vec2(config).eval()
    model = torch.compile(model, backend="eager") if compiled else model
    waves, mask = torch.randn(2, 40), torch.arange(40) < torch.tensor([[40], [22]])
    assert model(waves, mask).shape == (2, config.length(40), 5)
    with pytest.raises((ValueError, RuntimeError), match="first frames of each row"):
        model(waves, mask.flip(1))


NOTHING = torch.tensor([], dtype=torch.int64)
LIST = [torch.tensor([5, 6, 7]), NOTHING, torch.tensor([8, 9])]
PADDED, THERE = rg.pack(LIST).padded()
ROWS = [0, 1, 2]
LISTED = [name for name in CASES if name not in ("speaker", "match", "sets", "recommender")]


def listed(name: str, sequences: list[Tensor], rows: list[int]) -> Any:
    model = build(name)
    if CASES[name].call is with_targets:
        return model(sequences, [TARGETS[row] for row in rows])
    return model(sequences)


@pytest.mark.parametrize("name", LISTED)
def test_an_empty_sequence_is_supported(name: str) -> None:
    """Its result in a list equals that alone and that of an all-padding row; other rows do not change."""
    together, padded = listed(name, LIST, ROWS), CASES[name].call(build(name), PADDED, THERE, ROWS)
    for row, sequence in enumerate(LIST):
        alone = listed(name, [sequence], [row])[0]
        real_ones = padded[row, : len(sequence)] if CASES[name].by_token else padded[row]
        for other in (alone, real_ones):
            assert other.isfinite().all()
            torch.testing.assert_close(together[row], other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LISTED)
def test_empty_batches_are_supported(name: str) -> None:
    call, model = CASES[name].call, build(name)
    none, empty = rg.nn.Packed(NOTHING, ()), torch.zeros(2, 0, dtype=torch.int64)
    rows = (model(none, none) if call is with_targets else model(none)), call(model, empty, None, [0, 1])
    plain = call(model, IDS[:2], None, [0, 1])
    assert (rows[0].values if isinstance(rows[0], rg.nn.Packed) else rows[0]).shape[0] == 0
    assert rows[1].shape == ((2, 0, *plain.shape[2:]) if CASES[name].by_token else plain.shape)
    assert rows[1].isfinite().all()
    assert call(model, IDS[:0], MASK[:0], []).shape == (0, *plain.shape[1:])


def test_a_pointer_generates_from_the_vocabulary_for_an_empty_source() -> None:
    model = build("translation, copying")
    assert isinstance(model, PointerTransformer)
    targets, after = [TARGETS[row] for row in ROWS], torch.arange(9) + 3
    output = model(rg.pack(LIST), rg.pack(targets))
    torch.testing.assert_close(output.values.exp().sum(-1), torch.ones(9, dtype=torch.float64))
    loss = model.loss(rg.pack(LIST), rg.pack(targets), after)
    torch.testing.assert_close(loss, -output.values.gather(1, after[:, None]).sum())
    loss.backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def test_audio_without_frames_has_empty_output() -> None:
    torch.manual_seed(0)
    model = (
        SpeechRecognizer(SpeechConfig(labels=5, d_model=16, layers=1, heads=2, d_hidden=24, features=4)).double().eval()
    )
    sound, silent = torch.randn(9, 4).double(), torch.zeros(0, 4).double()
    output = model([silent, sound, silent])
    assert [len(each) for each in output] == [0, 3, 0]
    torch.testing.assert_close(output[1], model(sound[None])[0])
    assert [len(each) for each in model([silent])] == [0]
    assert model(rg.nn.Packed(silent, ())).values.shape == (0, 5)


def test_an_empty_packed_batch_prints_and_unpacks() -> None:
    assert str(rg.nn.Packed(NOTHING, (0, 0)).mask) == "documents([])\n"
    assert [len(each) for each in rg.unpack(rg.nn.Packed(NOTHING, (0, 0)))] == [0, 0]
    assert rg.unpack(rg.nn.Packed(NOTHING, ())) == []
    with pytest.raises(ValueError, match="negative"):
        rg.nn.Packed(torch.arange(3), (4, -1))
