"""The predicted cost of a training step against counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.cli.plan_report import PlanReport, format_quantity, parse_amount
from regard.distributed.cost import LAYOUT, Machine, ModelShape, Split, cost, splits
from regard.engines.cost import backward_flops, forward_flops, visited_entries
from regard.geometry import Frame
from regard.models import LanguageConfig, LanguageModel, TextConfig, TextEncoder
from regard.nn import Packed, Rotary
from tests.distributed import training_step
from tests.distributed.world import all_well, run

LLAMA: dict[str, Any] = {
    "vocabulary": 50, "d_model": 32, "layers": 2, "heads": 4, "d_hidden": 40,
    "rotary": Rotary(), "norm": "rms", "activation": "silu", "gated": True, "bias": False,
}  # fmt: skip
GPT: dict[str, Any] = {"vocabulary": 50, "d_model": 32, "layers": 3, "heads": 4, "d_hidden": 40, "positions": 300}
KINDS: list[dict[str, Any]] = [
    LLAMA, GPT, LLAMA | {"dropout": 0.1, "kv_heads": 2}, LLAMA | {"arrangement": "sandwich"},
    GPT | {"arrangement": "post"}, LLAMA | {"qk_norm": True}, LLAMA | {"tied": False, "d_head": 16},
    GPT | {"activation": "relu"}, GPT | {"dropout": 0.1, "windows": (16, None)},
]  # fmt: skip


def build_model(**values: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageConfig(**values))


@pytest.mark.parametrize("values", KINDS)
def test_weights_and_saved_activations_are_exact(values: dict[str, Any]) -> None:
    model = build_model(**values)
    predicted_cost = ModelShape.of(model)
    assert predicted_cost.count == sum(weight.numel() for weight in model.parameters())
    ids = torch.randint(50, (256,))
    with training_step.saved_bytes(model) as saved:
        model.loss(Packed(ids, (256,)), ids)
    predicted = cost(predicted_cost, Split(), Machine(), sequence=256, batch=1).memory["activations"]
    assert predicted == saved[0]


@pytest.mark.parametrize("values", [LLAMA, GPT, GPT | {"tied": False}])
def test_dense_flops_equal_those_that_torch_counts(values: dict[str, Any]) -> None:
    model = build_model(**values)
    ids = torch.randint(50, (1, 128))
    with FlopCounterMode(display=False) as counted:  # it does not count attention kernels
        torch.nn.functional.cross_entropy(model(ids)[0], ids[0]).backward()
    predicted_cost = cost(ModelShape.of(model), Split(), Machine(), sequence=128, batch=1)
    assert predicted_cost.flops["dense"] == counted.get_total_flops()


def test_attention_flops_equal_those_of_torch_and_explain() -> None:
    q, k, v = torch.randn(3, 1, 4, 128, 16, requires_grad=True)
    attend = rg.Attention()
    with FlopCounterMode(display=False) as forward:
        out = attend(q, k, v, engine="reference")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    count = visited_entries(None, Frame(1, 4, 128, 128, 0))
    assert forward_flops(count, attend.score, 16, 16) == forward.get_total_flops()  # type: ignore[arg-type]
    again = 2 * 16 * count  # scores are recomputed
    assert backward_flops(count, attend.score, 16, 16) == backward.get_total_flops() + again  # type: ignore[arg-type]
    causal = rg.Attention(mask=rg.causal())
    predicted_cost = cost(ModelShape.of(build_model(**LLAMA)), Split(), Machine(), sequence=128, batch=1).flops[
        "attention"
    ]
    explained = causal.explain(*torch.randn(3, 1, 4, 128, 8)).flops
    assert predicted_cost == LLAMA["layers"] * explained * 3.5  # 4 + 10 D for 4 D


def test_balanced_shards_have_equal_work() -> None:
    model = ModelShape.of(build_model(**LLAMA))
    alone, shared = (
        cost(model, split, Machine(), sequence=4096, batch=1) for split in (Split(), Split(sequence=4, method="ring"))
    )
    assert LAYOUT == "balanced"
    assert shared.flops["attention"] == pytest.approx(alone.flops["attention"] / 4, rel=0.02)
    assert shared.flops["dense"] == alone.flops["dense"] / 4


def test_sent_bytes_equal_the_prediction() -> None:
    model = ModelShape.of(LanguageModel(training_step.CONFIG))
    steps = all_well(run(training_step.steps, 2))
    for split in training_step.SPLITS:
        predicted_cost = cost(model, split, Machine(), sequence=training_step.SEQUENCE, batch=training_step.BATCH).sent
        predicted_cost |= {
            name: size // 2 for name, size in predicted_cost.items() if name == "reduce-scatter"
        }  # gloo sums on every rank
        most = {name: max(each[str(split)][name] for each in steps) for name in predicted_cost}
        assert most == predicted_cost, split


def test_bytes_of_a_long_ring_are_extrapolated() -> None:
    model = ModelShape.of(build_model(**LLAMA))
    short, long = (
        cost(model, Split(sequence=ranks, method="ring"), Machine(), sequence=4096, batch=1).sent["ring"]
        for ranks in (16, 32)
    )
    exact = rg.distributed.bytes_moved(
        rg.Attention(mask=rg.causal()), ranks=32, B=1, H=4, Q=4096, D=8, method="ring", layout=LAYOUT
    )
    assert long == pytest.approx(2 * max(exact.sent), rel=0.01)
    assert long > short


def test_an_fsdp_rank_holds_a_shard_and_gathered_blocks() -> None:
    model = ModelShape.of(build_model(**GPT))
    whole, shared = (
        cost(model, Split(data=4, fsdp=fsdp), Machine(), sequence=64, batch=4).memory for fsdp in (False, True)
    )
    assert shared["weights"] == pytest.approx(whole["weights"] / 4, rel=0.05)
    assert shared["optimizer"] == 3 * shared["weights"]
    assert shared["gradients"] == 0  # they replace activations
    assert cost(model, Split(data=4), Machine(), sequence=64, batch=8).memory["gradients"] == whole["weights"]
    assert shared["activations"] == whole["activations"]


def test_a_machine_with_fewer_cores_than_threads_is_slower() -> None:
    model, machine = ModelShape.of(build_model(**LLAMA)), Machine(bandwidth=1e9)
    crowded = replace(machine, ranks=4, cores=2)
    times = [cost(model, Split(data=4), each, sequence=64, batch=4).seconds for each in (machine, crowded)]
    assert times[1]["dense"] == 2 * times[0]["dense"]
    assert (
        times[1]["communication"] == 2 * times[0]["communication"]
    )  # within one machine, communication uses the cores
    apart = replace(crowded, ranks=2, cores=1)
    assert cost(model, Split(data=4), apart, sequence=64, batch=4).seconds["communication"] == times[0]["communication"]


def test_the_recommended_layout_is_the_fastest_that_fits() -> None:
    model = ModelShape.of(build_model(**LLAMA))
    ways = [str(split) for split in splits(model, 4, sequence=512, batch=4)]
    assert ways == [
        "data 4", "data 4, fsdp", "data 2 x ring 2", "data 2 x ring 2, fsdp", "data 2 x heads 2",
        "data 2 x heads 2, fsdp", "ring 4", "ring 4, fsdp", "heads 4", "heads 4, fsdp",
    ]  # fmt: skip
    roomy = PlanReport.of(model, Machine(memory=1e12), sequence=512, ranks=4, batch=4)
    assert roomy.best is not None
    assert roomy.best.time == min(each.time for each in roomy.costs)
    tight = PlanReport.of(
        model, Machine(memory=1.5 * min(each.peak for each in roomy.costs)), sequence=512, ranks=4, batch=4
    )
    assert tight.best is not None
    assert tight.best.time == min(each.time for each in roomy.costs if each.peak <= tight.machine.memory)
    assert tight.best.split != roomy.best.split
    assert any("needs" in reason and "of it for activations" in reason for reason in tight.reasons())
    none = PlanReport.of(model, Machine(memory=1e3), sequence=512, ranks=4, batch=4)
    assert none.best is None
    assert none.recommendation().startswith("No layout fits: ")


def test_heads_are_not_split_over_more_ranks_than_kv_heads() -> None:
    model = ModelShape.of(build_model(**LLAMA | {"kv_heads": 2}))
    assert {split.sequence for split in splits(model, 4, sequence=512, batch=4) if split.method == "heads"} == {2}


def test_other_models_than_language_models_raise() -> None:
    encoder = TextEncoder(TextConfig(vocabulary=50, d_model=32, layers=1, heads=4, d_hidden=40))
    with pytest.raises(
        ValueError, match="expected a decoder-only language model, such as GPT-2 or Llama, got TextEncoder"
    ):
        ModelShape.of(encoder)


@pytest.mark.parametrize(
    ("text", "value"), [("16GB", 16e9), ("1 GiB", 2**30), ("10Gbit/s", 1.25e9), ("50G", 5e10), ("1e9", 1e9)]
)
def test_amounts_are_parsed_with_units(text: str, value: float) -> None:
    assert parse_amount("memory", text) == value


@pytest.mark.parametrize("text", ["much", "", "-1GB", "0", "3XB", "1..2"])
def test_invalid_amounts_raise(text: str) -> None:
    with pytest.raises(ValueError, match="--memory must be"):
        parse_amount("memory", text)


def test_quantities_have_three_digits() -> None:
    assert [format_quantity(n) for n in (0, 999, 1234, 999_600, 2.5e15)] == ["0 ", "999 ", "1.23 k", "1 M", "2.5 P"]
