"""Encoder-decoders: forms of input, masking, generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.models import Transformer, TransformerConfig
from regard.nn import Beam, Greedy

CLASSIC = TransformerConfig(vocabulary=23, d_model=32, layers=2, heads=4, d_hidden=48, decoder_layers=3)
KINDS = {
    "classic": CLASSIC,
    "after": replace(CLASSIC, arrangement="post", position="learned", positions=16),
    "two vocabularies": replace(CLASSIC, target_vocabulary=19, tied=False),
    "marian": replace(CLASSIC, position="halves", arrangement="post", activation="silu", logits_bias=True),
    "t5": replace(CLASSIC, position="relative", buckets=8, max_distance=10, norm="rms", bias=False, scale=1.0,
                  embedding_scale=1.0, output_scale=32**-0.5, d_head=10),
    "t5 1.1": replace(CLASSIC, position="relative", norm="rms", bias=False, scale=1.0, embedding_scale=1.0,
                      activation="gelu_tanh", gated=True, tied=False),
}  # fmt: skip


def model_of(config: TransformerConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config).eval()


def batch(sources: list[int], targets: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return tuple([torch.randint(3, 19, (n,), generator=draw) for n in lengths] for lengths in (sources, targets))


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@pytest.fixture(params=list(KINDS))
def model(request: pytest.FixtureRequest) -> Transformer:
    return model_of(KINDS[request.param])


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([5, 1, 8], [3, 6, 2]), ([4, 4, 4], [3, 6, 2]), ([5, 1, 8], [4, 4, 4]), ([4, 4], [6, 6]), ([5], [3])],
)
def test_packed_pairs_match_padded_ones(model: Transformer, sources: list[int], targets: list[int]) -> None:
    source, target = batch(sources, targets)
    (ids, mask), (target_ids, _) = padded(source), padded(target)
    want = [row[: len(one)] for row, one in zip(model(ids, target_ids, mask), target, strict=True)]
    listed = model(source, target)
    packed = model(rg.pack(source), rg.pack(target))
    for rows in (listed, rg.unpack(packed)):
        for one, other in zip(rows, want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_target_tensor_can_be_combined_with_a_packed_source(model: Transformer) -> None:
    source, target = batch([5, 1, 8], [4, 4, 4])
    ids, mask = padded(source)
    want = model(ids, torch.stack(target), mask)
    torch.testing.assert_close(model(rg.pack(source), torch.stack(target)), want, atol=1e-5, rtol=1e-5)


def test_packed_and_padded_pairs_have_the_same_gradients(model: Transformer) -> None:
    source, target = batch([5, 1, 8], [3, 6, 2])
    (ids, mask), (target_ids, target_mask) = padded(source), padded(target)
    model.train()

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        (logits.log_softmax(-1)[:, 4].sum() + logits.square().mean()).backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    packed = gradients(model(rg.pack(source), rg.pack(target)).values)
    plain = gradients(model(ids, target_ids, mask)[target_mask])
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, f"{name} gets no gradient"
        scale = gradient.abs().max().item()
        torch.testing.assert_close(packed[name], gradient, atol=1e-5 * max(scale, 1), rtol=1e-4)


def test_target_tokens_do_not_depend_on_later_ones_or_source_padding(model: Transformer) -> None:
    source, target = batch([6], [5])
    ids, target_ids = source[0][None], target[0][None]
    mask = torch.arange(6)[None] < 4
    before = model(ids, target_ids, mask)
    other, other_ids = target_ids.clone(), ids.clone()
    other[0, 3:], other_ids[0, 4:] = 3, 5
    torch.testing.assert_close(model(other_ids, other, mask)[:, :3], before[:, :3])
    other_ids[0, 3] = (other_ids[0, 3] + 1) % 19
    assert not torch.allclose(model(other_ids, other, mask)[:, :3], before[:, :3], atol=1e-3)


def test_encode_and_decode_compose_to_forward(model: Transformer) -> None:
    source, target = batch([6, 6], [5, 5])
    ids, target_ids = torch.stack(source), torch.stack(target)
    encoded = model.encode(ids)
    assert encoded.shape == (2, 6, 32)
    torch.testing.assert_close(model.decode(target_ids, encoded), model(ids, target_ids))


@pytest.mark.parametrize("form", ["padded", "packed", "list"])
def test_greedy_generation_matches_uncached_argmax(model: Transformer, form: str) -> None:
    source, _ = batch([5, 1, 8], [1, 1, 1])
    want = []
    for ids in source:
        target = torch.tensor([model.config.start])
        while len(target) < 13 and target[-1] != model.config.stop:
            target = torch.cat((target, model(ids[None], target[None])[0, -1:].argmax(-1)))
        want.append([token for token in target[1:].tolist() if token != model.config.stop])
    if form == "padded":
        generated = model.generate(*padded(source), max_new_tokens=12)
    else:
        generated = model.generate(
            rg.pack(source) if form == "packed" else source, max_new_tokens=12, strategy=Greedy()
        )
    assert [row.tolist() for row in generated] == want


def log_probability(model: Transformer, source: Tensor, tokens: list[int]) -> float:
    logits = model(source[None], torch.tensor([[model.config.start, *tokens[:-1]]]))[0]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].sum().item()


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["classic", "marian", "t5"])
def test_a_wide_beam_finds_the_best_sequence(kind: str, penalty: float) -> None:
    model = model_of(replace(KINDS[kind], vocabulary=5, start=0, stop=1, suppress_tokens=(0,)))
    for weight in model.parameters():
        weight.data *= 1.5  # so that the choice of a token affects later ones
    max_new_tokens, (source, _) = 3, batch([4, 2], [1, 1])
    source = [ids % 5 for ids in source]
    # (64, 3): all sequences of three tokens
    every = torch.cartesian_prod(*[torch.arange(1, 5)] * max_new_tokens)
    before = torch.cat((torch.zeros_like(every[:, :1]), every[:, :-1]), 1)
    for ids, generated in zip(
        source, model.generate(source, max_new_tokens=max_new_tokens, strategy=Beam(27, penalty)), strict=True
    ):
        chosen = (
            model(ids.expand(64, -1), before).log_softmax(-1).gather(-1, every[..., None])[..., 0].cumsum(1)
        )  # (64, 3)
        best = (-float("inf"), [])
        for tokens, sums in zip(every.tolist(), chosen.tolist(), strict=True):
            length = tokens.index(1) + 1 if 1 in tokens else max_new_tokens
            best = max(best, (sums[length - 1] / length**penalty, [token for token in tokens[:length] if token != 1]))
        assert generated.tolist() == best[1]


def test_a_beam_of_one_is_greedy_and_wider_ones_are_not_worse() -> None:
    model = model_of(KINDS["classic"])
    for weight in model.parameters():
        weight.data *= 1.5
    source, _ = batch([5, 3, 8, 6], [1, 1, 1, 1])
    greedy, one, wide = (
        model.generate(source, max_new_tokens=8, strategy=strategy)
        for strategy in (Greedy(), Beam(1, 0.0), Beam(6, 0.0))
    )
    assert [row.tolist() for row in one] == [row.tolist() for row in greedy]
    likely = [[log_probability(model, ids, [*row.tolist(), 2][:8]) for ids, row in zip(source, rows, strict=True)]
              for rows in (greedy, wide)]  # fmt: skip
    assert sum(likely[1]) > sum(likely[0])


def test_the_source_is_encoded_and_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(CLASSIC), []
    forward = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda *args, **more: calls.append(0) or forward(*args, **more))
    cross = model.decoder.layers[0].cross
    project, projected = cross._key_value, []
    monkeypatch.setattr(cross, "_key_value", lambda *args: projected.append(len(args[0])) or project(*args))
    source, _ = batch([5, 5], [1, 1])
    model.generate(torch.stack(source), max_new_tokens=6, strategy=Beam(4))
    assert len(calls) == 1
    assert projected == [2]  # the two sources, not their eight beams


def test_learned_positions_are_limited_and_sinusoidal_ones_are_not() -> None:
    source, target = batch([20], [3])
    with pytest.raises(ValueError, match="has 16 positions, but the sequence has 20 tokens"):
        model_of(KINDS["after"])(source, target)
    long = torch.randint(3, 19, (1, 700))
    assert model_of(CLASSIC)(long, target[0][None]).isfinite().all()


def test_mismatched_inputs_raise() -> None:
    model = model_of(CLASSIC)
    source, target = batch([5, 3], [2, 4])
    with pytest.raises(TypeError, match="packed target needs a packed source"):
        model(torch.stack([source[0], source[0]]), target)
    with pytest.raises(ValueError, match="same number of sequences, got 2 and 1"):
        model(source, target[:1])
    with pytest.raises(ValueError, match="equal batch sizes, got 1 and 2"):
        model(source[0][None], torch.stack([target[0], target[0]]))
    with pytest.raises(
        ValueError, match="position must be one of sinusoidal, halves, fairseq, learned, relative, got 'x'"
    ):
        Transformer(replace(CLASSIC, position="x"))


def test_a_compiled_model_gives_the_same_logits() -> None:
    model = model_of(replace(CLASSIC, layers=1, decoder_layers=1))
    source, target = batch([6, 6], [5, 5])
    ids, target_ids = torch.stack(source), torch.stack(target)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, target_ids), model(ids, target_ids), atol=1e-5, rtol=1e-5)
