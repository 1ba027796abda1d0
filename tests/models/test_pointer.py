"""Pointer-generator: distribution, loss and generation; coverage and encoder windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
import regard.view
from regard.models import PointerTransformer, Transformer, TransformerConfig
from regard.models.pointer import CopyMechanism
from regard.nn import Beam
from regard.view import capture

CONFIG = TransformerConfig(vocabulary=29, d_model=32, layers=2, heads=4, d_hidden=48)


def model_of(config: TransformerConfig = CONFIG, kind: type[Transformer] = PointerTransformer) -> Transformer:
    torch.manual_seed(0)
    return kind(config).eval()


def batch(sources: list[int], targets: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return tuple([torch.randint(3, 29, (n,), generator=draw) for n in lengths] for lengths in (sources, targets))


def test_the_distribution_is_a_mixture_of_vocabulary_and_source() -> None:
    torch.manual_seed(0)
    part = CopyMechanism(8).double()
    hidden, encoded = torch.randn(2, 3, 8).double(), torch.randn(2, 5, 8).double()
    logits, ids = torch.randn(2, 3, 11).double(), torch.tensor([[4, 7, 4, 9, 1], [2, 2, 2, 0, 0]])
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    output = part(logits, hidden, encoded, ids, mask).exp()
    for b in range(2):
        for n in range(3):
            gate = torch.sigmoid(part.gate(hidden[b, n]))
            scores = part.key(encoded[b, : int(mask[b].sum())]) @ part.query(hidden[b, n]) / 8**0.5
            want = gate * logits[b, n].softmax(0)
            for weight, token in zip(scores.softmax(0), ids[b].tolist(), strict=False):
                want[token] += (1 - gate[0]) * weight
            torch.testing.assert_close(output[b, n], want.float(), atol=1e-6, rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize(
    ("sources", "targets"), [([5, 1, 8], [3, 6, 2]), ([4, 4], [6, 6]), ([4, 4], [2, 3]), ([7], [1])]
)
def test_packed_padded_and_single_pairs_agree(sources: list[int], targets: list[int], window: int) -> None:
    model = model_of(replace(CONFIG, window=window))
    source, target = batch(sources, targets)
    listed, packed = model(source, target), rg.unpack(model(rg.pack(source), rg.pack(target)))
    ids = torch.nn.utils.rnn.pad_sequence(source, batch_first=True, padding_value=7)
    mask = torch.arange(ids.shape[1]) < torch.tensor(sources)[:, None]
    padded = model(ids, torch.nn.utils.rnn.pad_sequence(target, batch_first=True), mask)
    for n, (one, other) in enumerate(zip(source, target, strict=True)):
        want = model(one[None], other[None])[0]
        torch.testing.assert_close(want.exp().sum(-1), torch.ones(len(other)))
        for row in (listed[n], packed[n], padded[n, : len(other)]):
            torch.testing.assert_close(row, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("sources", "targets"), [([5, 1, 8], [3, 6, 2]), ([4, 4], [6, 6])])
def test_loss_and_gradients_match_the_cross_entropy(sources: list[int], targets: list[int]) -> None:
    model = model_of()
    source, target = batch(sources, targets)
    after = torch.randint(3, 29, (sum(targets),), generator=torch.Generator().manual_seed(2))
    after[0] = source[0][0]  # a label that can be copied
    model.loss(rg.pack(source), rg.pack(target), after).backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    want = F.nll_loss(model(rg.pack(source), rg.pack(target)).values, after, reduction="sum")
    want.backward()
    assert len(ours) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        assert bool(weight.grad.isfinite().all()), name
        torch.testing.assert_close(ours[name], weight.grad, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        loss = model.loss(rg.pack(source), rg.pack(target), after)
        smooth = model.loss(rg.pack(source), rg.pack(target), after, smoothing=0.1)
    torch.testing.assert_close(loss, want)
    assert float(smooth) != float(loss)


@pytest.mark.parametrize("strategy", [None, Beam(3)])
def test_batched_generation_matches_single_sources(strategy: Beam | None) -> None:
    model = model_of()
    source, _ = batch([5, 1, 8], [1, 1, 1])
    together = model.generate(source, max_new_tokens=6, strategy=strategy)
    for one, output in zip(source, together, strict=True):
        assert model.generate(one[None], max_new_tokens=6, strategy=strategy)[0].tolist() == output.tolist()
    if strategy is None:
        ids = [model.config.start]
        while len(ids) <= 6 and (token := int(model(source[0][None], torch.tensor([ids]))[0, -1].argmax())) != 2:
            ids.append(token)
        assert together[0].tolist() == ids[1:]


def test_copying_generates_unseen_target_tokens() -> None:
    """Train to repeat the first token; half of the tokens are never targets and can only be copied."""
    torch.manual_seed(0)
    model = PointerTransformer(replace(CONFIG, layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(120):
        source = [torch.randint(3, 16, (4,), generator=draw) for _ in range(16)]
        after = torch.stack([ids[0] for ids in source])
        loss = model.loss(rg.pack(source), rg.pack([torch.tensor([1])] * 16), after) / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    strange = torch.tensor([[16 + n, 3 + n, 7, 9] for n in range(8)])
    output = model(strange, torch.ones(8, 1, dtype=torch.long))[:, 0]
    assert (output.argmax(-1) == strange[:, 0]).sum() >= 4


def test_a_pointer_transformer_is_saved_and_loaded(tmp_path: object) -> None:
    model = model_of(replace(CONFIG, window=3))
    rg.save(model, tmp_path)
    again = rg.load(tmp_path)
    assert type(again) is PointerTransformer
    assert again.config == model.config
    source, target = batch([5, 2], [3, 3])
    for one, other in zip(model(source, target), again(source, target), strict=True):
        assert torch.equal(one, other)


def test_unsupported_uses_raise() -> None:
    with pytest.raises(ValueError, match="one vocabulary for source and target"):
        PointerTransformer(replace(CONFIG, target_vocabulary=31))
    model = model_of()
    with pytest.raises(TypeError, match="needs the source ids to decode"):
        model.decode(torch.tensor([[1]]), torch.zeros(1, 3, 32))


@pytest.mark.parametrize("kind", [Transformer, PointerTransformer])
def test_coverage_is_the_sum_of_cross_attention_over_the_target(kind: type[Transformer]) -> None:

    model = model_of(kind=kind)
    (source,), (target,) = batch([7], [4])
    with capture(model) as record:
        model(source[None], target[None])
    across = [seen.weights() for seen in record.attentions if seen.kind == "cross"]
    want = torch.stack(across).sum(2).mean((0, 1))
    result = model.coverage(source, target)
    torch.testing.assert_close(result, want)
    torch.testing.assert_close(result.sum(), torch.tensor(4.0))


def test_an_encoder_window_covers_neighbours_and_the_first_token_only() -> None:
    model = model_of(replace(CONFIG, window=1, layers=1), kind=Transformer)
    (source,), _ = batch([9], [1])

    def changed(at: int) -> list[int]:
        other = source.clone()
        other[at] = 3 + (source[at] + 5) % 20
        differs = (model.encode(source[None]) - model.encode(other[None])).abs().amax(-1)[0] > 1e-6
        return differs.nonzero()[:, 0].tolist()

    assert changed(5) == [0, 4, 5, 6]
    assert changed(0) == list(range(9))


def test_a_window_does_not_depend_on_the_start_of_a_sequence() -> None:
    """Padding on either side, and earlier sequences in the same row, have no effect."""
    model = model_of(replace(CONFIG, window=2), kind=Transformer)
    source, _ = batch([9, 4, 11], [1, 1, 1])
    packed = rg.unpack(model.encode(rg.pack(source)))
    for n, one in enumerate(source):
        want = model.encode(one[None])[0]
        torch.testing.assert_close(packed[n], want, atol=1e-5, rtol=1e-5)
        front, behind = F.pad(one, (3, 0), value=5)[None], F.pad(one, (0, 3), value=5)[None]
        real = torch.ones(1, len(one), dtype=torch.bool)
        torch.testing.assert_close(model.encode(front, F.pad(real, (3, 0)))[0, 3:], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.encode(behind, F.pad(real, (0, 3)))[0, :-3], want, atol=1e-5, rtol=1e-5)


def test_log_probabilities_of_a_float64_model_are_float64() -> None:
    model = model_of(kind=PointerTransformer).double()
    output = model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]]))
    assert output.dtype == torch.float64
    torch.testing.assert_close(output.exp().sum(-1), torch.ones(1, 2, dtype=torch.float64), rtol=0, atol=1e-14)
