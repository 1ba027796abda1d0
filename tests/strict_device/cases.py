"""Attention, modules, models, training, evaluation and capture run on another device than the CPU, with equal results.

The device is that of `tests.strict_device.device`: it refuses to mix devices as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard import nn as rnn
from regard.check import PROPERTIES, check, target
from regard.check.targets.devices import available_device, on_device
from regard.data.readers import Row
from regard.engines.mask_layout import mask_layout
from regard.errors import BadRows
from regard.tasks import Sources
from regard.training.loop import Objective, build_optimizer
from regard.training.sources import read_examples
from regard.training.task import to_device
from regard.view import Change, capture
from tests.models import test_masks as models
from tests.strict_device.device import TYPE, MixedDevices, StrictTensor, strict_device
from tests.tasks.tiny_runs import new_run
from tests.view.models import PAIR

H, N = 4, 12
CPU = torch.device("cpu")
IDS = torch.arange(N) // 4


@pytest.fixture
def device() -> Iterator[torch.device]:
    torch.set_num_threads(1)
    with strict_device() as chosen:
        yield chosen


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert all(isinstance(one, StrictTensor) for one in ours), "a result is on the CPU"
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


def test_the_device_refuses_what_a_gpu_refuses(device: torch.device) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    with pytest.raises(MixedDevices, match="and of the CPU, one of shape"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match="to numpy"):
        x.detach().numpy()
    with pytest.raises(MixedDevices, match="generator"):
        torch.randn(3, device=device, generator=torch.Generator())
    (x * torch.tensor(2.0)).sum().backward()  # a number of the CPU may be used
    assert x.grad is not None
    assert x.grad.cpu().tolist() == [2.0] * 3
    assert x[torch.tensor([0, 2])].device == device  # so may indices


def same_document(ids: Tensor) -> rg.Mask:
    return rg.where(lambda b, h, p, j: (ids[p] == ids[j]) & (j < 9 * ids.amax())) & rg.causal()


# `move` puts tensors on the device of the call
DESCRIPTIONS: dict[str, Callable[[Callable[[Tensor], Tensor]], dict[str, Any]]] = {
    "plain": lambda move: {},
    "window": lambda move: {"mask": rg.causal() & rg.window(3, 1)},
    "padding": lambda move: {"mask": rg.padding(move(torch.tensor([5, 9])))},
    "documents": lambda move: {"mask": rg.documents(move(IDS)) | rg.global_tokens([1])},
    "dense": lambda move: {"mask": rg.dense(move(draw(N, N, seed=5) < 0.5))},
    "edges": lambda move: {"mask": rg.edges(move(torch.tensor([[0, 1, 5, 9], [3, 1, 8, 9]])))},
    "blocks": lambda move: {"mask": rg.blocks(move(draw(H, 3, 3, seed=6) < 0.5), 4)},
    "varlen": lambda move: {"mask": rg.varlen(move(torch.tensor([0, 4, N])))},
    "tree": lambda move: {"mask": rg.tree(move(torch.arange(-1, N - 1)))},
    "selected": lambda move: {"mask": rg.selected(move(torch.zeros(1, H, N, 1, dtype=torch.int64)), 4)},
    "ranges": lambda move: {"mask": rg.ranges(move(torch.zeros(N).long()), move(torch.arange(1, N + 1)))},
    "neighborhood": lambda move: {"mask": rg.neighborhood((3, 4), (3, 3))},
    "where": lambda move: {"mask": rg.where(lambda b, h, p, j: (p + j + h) % 2 == 0)},
    "where, with a tensor": lambda move: {"mask": same_document(move(IDS))},
    "an offset per row": lambda move: {"mask": rg.causal(), "offset": move(torch.tensor([0, 3]))},
    "alibi and a dense bias": lambda move: {"bias": rg.alibi(H) + rg.dense_bias(move(draw(N, N, seed=7)))},
    "t5": lambda move: {"bias": rg.t5(move(draw(8, H, seed=7)))},
    "relative": lambda move: {"bias": rg.relative(move(draw(9, H, seed=7)))},
    "shaw": lambda move: {"bias": rg.shaw(move(draw(9, 8, seed=7)), move(draw(9, 8, seed=8)))},
    "softcap and sink": lambda move: {"score": rg.Dot(softcap=2.0), "sink": move(draw(H, seed=7))},
    "cosine": lambda move: {"score": rg.Cosine(scale=move(draw(H, seed=7))), "sink": 0.5},
    "bilinear": lambda move: {"score": rg.Bilinear(move(draw(8, 8, seed=7) / 8**0.5))},
    "additive": lambda move: {"score": rg.Additive(move(draw(8, seed=7)))},
    "modifier": lambda move: {"score": lambda s, b, h, p, j: s - 0.1 * (p - j).abs()},
    "dropout": lambda move: {"dropout": 0.3},
    "sigmoid": lambda move: {"normalization": rg.Sigmoid(0.1)},
    "entmax": lambda move: {"normalization": rg.Entmax(1.5)},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_attention(name: str, device: torch.device) -> None:
    actual = []
    for place in (CPU, device):
        query, key, value = (draw(2, H, N, 8, seed=n).to(place).requires_grad_() for n in range(3))
        attend = rg.Attention(**DESCRIPTIONS[name](lambda tensor, place=place: tensor.to(place)))
        results = []
        for engine in (None, "tiled", "reference"):
            torch.manual_seed(1)
            output = attend(query, key, value, engine=engine)
            results += [output, *torch.autograd.grad(output.sum(), (query, key, value))]
        statistics = attend.statistics(query.detach(), key.detach(), top=2)
        results += [attend.weights(query, key, rows=[1, 2]), attend.map(query.detach(), key.detach(), size=(3, 3))]
        actual.append([*results, statistics.lse, statistics.entropy])
        attend.explain(query, key, value)
    same(actual[1], actual[0])


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_mask_layout_is_built_on_the_cpu(name: str, device: torch.device) -> None:
    query = draw(2, H, N, 8, seed=1).to(device)
    problem = rg.Attention(**DESCRIPTIONS[name](lambda tensor: tensor.to(device))).problem(query, query, query)
    if problem.mask is None:
        pytest.skip("no mask")
    assert all(tensor.is_cpu for tensor in mask_layout(problem.mask, problem.frame.cache_key()).tensors)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "DeltaNet": lambda: rnn.DeltaNet(16, heads=2),
    "GatedDeltaNet": lambda: rnn.GatedDeltaNet(16, heads=2),
    "GatedLinearAttention": lambda: rnn.GatedLinearAttention(16, heads=2),
    "Mamba2": lambda: rnn.Mamba2(16, heads=2),
    "Retention": lambda: rnn.Retention(16, heads=2),
    "LatentAttention": lambda: rnn.LatentAttention(16, heads=2, d_latent=8, d_rotary=4, d_head=8, d_value=8),
    "DifferentialAttention": lambda: rnn.DifferentialAttention(16, heads=2),
    "TalkingHeadsAttention": lambda: rnn.TalkingHeadsAttention(16, heads=2),
    "MultiHeadAttention": lambda: rnn.MultiHeadAttention(16, heads=2),
    "AttentionPooling": lambda: rnn.AttentionPooling(16),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    actual = []
    for place in (CPU, device):
        own = deepcopy(module).to(place)
        output = own(draw(2, 7, 16, seed=1).to(place))
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        grads = [parameter.grad for parameter in own.parameters() if parameter.grad is not None]
        actual.append([output.detach(), *grads])
    same(actual[1], actual[0])


@pytest.mark.parametrize("name", models.CASES)
def test_models(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, actual = models.build(name), []
    for place in (CPU, device):
        for given in ("FRAMES", "IMAGES", "TARGETS"):
            monkeypatch.setattr(models, given, getattr(models, given).to(place))
        own = deepcopy(model).to(place)
        output = models.CASES[name].call(own, models.IDS.to(place), models.MASK.to(place), [0, 1, 2, 3])
        output.square().sum().backward()
        assert all(each.grad is None or each.grad.device.type == place.type for each in own.parameters())
        actual.append([output.detach()])
    same(actual[1], actual[0])


@pytest.mark.parametrize("strategy", [None, rnn.Beam(2)], ids=str)
def test_generation(strategy: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    config = rg.models.LanguageConfig(
        vocabulary=50, d_model=16, layers=2, heads=2, kv_heads=1, d_hidden=24, rotary=rnn.Rotary(), windows=(None, 3)
    )
    model = rg.models.LanguageModel(config).eval()
    prompts, own = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])], deepcopy(model).to(device)
    there = [prompt.to(device) for prompt in prompts]
    expected = model.generate(prompts, max_new_tokens=5, strategy=strategy)
    same(own.generate(there, max_new_tokens=5, strategy=strategy), expected)
    for kept in (torch.bfloat16, torch.int8):
        assert len(own.generate(there, max_new_tokens=3, cache_dtype=kept)) == 2


@pytest.mark.parametrize("name", ["classify", "embed", "language", "masked", "translate"])
def test_tasks_train_evaluate_and_predict(name: str, device: torch.device, tmp_path: Path) -> None:
    run = new_run(tmp_path, name)
    task, examples = run.task, read_examples(run.task, Sources.from_json(run.about["sources"]), 1)
    torch.manual_seed(0)
    model = task.model(run.processor).to(device)
    items = task.dataset(run.processor, examples.train, BadRows())
    batch = to_device(items.batch(np.arange(4), np.random.default_rng(0)), device)
    objective, optimizer = Objective(task, model, 0.1), build_optimizer(model, run.recipe)
    before = float(objective(batch, 0.0))
    for _ in range(3):
        objective(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert float(objective(batch, 0.0)) < before
    ours = task.evaluate(model, run.processor, examples.validation[:4])
    expected = task.evaluate(deepcopy(model).to("cpu"), run.processor, examples.validation[:4])
    assert ours == pytest.approx(expected, rel=1e-3)
    if name != "language":  # it draws from a generator of the device, which this one lacks
        row = Row("input 1", ("the [mask] cat" if name == "masked" else "the red cat sees",))
        assert len(list(task.predict(model, run.processor, [row], BadRows(skip=True)))) <= 1


def test_a_captured_model_is_shown(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = rg.models.Transformer(PAIR).eval()
    source, target = torch.randint(5, 100, (1, 9)), torch.randint(5, 100, (1, 7))
    with capture(model) as expected:
        model(source, target)
    own = deepcopy(model).to(device)
    with capture(own) as record:
        own(source.to(device), target.to(device))
    for one, other in zip(record.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(one.statistics[:4], other.statistics[:4], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(record.head_patterns) == len(expected.head_patterns)
    torch.testing.assert_close(record.rollout(), expected.rollout(), rtol=1e-4, atol=1e-5)
    record.explain_weight(0, head=1, query=2, key=3, kind="cross")
    assert record.save(tmp_path / "page.html").stat().st_size > 1000
    changed = record.ablate(Change(0, head=1, factor=0.0))
    torch.testing.assert_close(changed.attentions[-1].weights().sum(-1), torch.ones(4, 7), rtol=1e-4, atol=1e-4)


def test_targets_of_the_check(device: torch.device) -> None:
    assert available_device(TYPE).type == device.type
    right = target("regard-reference")
    seen = []

    def attention(*tensors: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        given = [each for each in (*tensors, *options.values()) if isinstance(each, torch.Tensor)]
        seen.extend(isinstance(each, StrictTensor) for each in given)
        return right.attention(*tensors, **options)

    moved = on_device(right.__class__("ours", attention, setup=right.setup), device)
    names = ["mask-definition", "causal", "gradient", "inputs-untouched"]
    outcomes = list(check([moved], [PROPERTIES[name] for name in names]))
    assert seen
    assert all(seen)
    assert moved.name == f"ours on {device}"
    assert not [outcome.reason for outcome in outcomes if outcome.status == "failed"]
    assert outcomes[-1].status == "not applicable"


def test_a_wrong_attention_fails_with_a_program_for_the_device(device: torch.device) -> None:
    wrong = on_device(target("torch.nn.functional:softsign").__class__("wrong", lambda q, k, v: v), device)
    (outcome,) = check([wrong], [PROPERTIES["definition"]])
    assert outcome.status == "failed"
    assert f"x.to('{device}')" in outcome.code
