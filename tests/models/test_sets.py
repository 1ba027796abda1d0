"""Sets and graphs: invariance to the order of elements and nodes, and to padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard as rg
from regard.models import GraphConfig, NodeClassifier, SetConfig, SetTransformer

CONFIG = SetConfig(features=3, d_model=16, layers=2, heads=4, d_hidden=24, points=5, seeds=2, classes=4)
GRAPH = GraphConfig(features=7, d_model=16, layers=2, heads=4, d_hidden=24, classes=3)
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 1, 2, 5], [0, 1, 2, 3, 4, 5, 6, 1, 0, 2, 1, 6]])


def sets_model() -> SetTransformer:
    torch.manual_seed(0)
    return SetTransformer(CONFIG).double().eval()


def graph_model() -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(GRAPH).double().eval()


def test_the_order_of_elements_has_no_effect() -> None:
    model, sets = sets_model(), [torch.randn(n, 3).double() for n in (7, 1, 4)]
    mixed = [one[torch.randperm(len(one))] for one in sets]
    torch.testing.assert_close(model(mixed), model(sets), rtol=0, atol=1e-12)
    assert not torch.allclose(model(sets)[0], model(sets)[2], atol=1e-6)


def test_padding_of_a_set_has_no_effect() -> None:
    model, sets = sets_model(), [torch.randn(n, 3).double() for n in (7, 1, 4)]
    padded = torch.full((3, 9, 3), torch.nan).double()
    mask = torch.arange(9) < torch.tensor([7, 1, 4])[:, None]
    padded[mask] = torch.cat(sets)
    torch.testing.assert_close(model(padded, mask), model(sets), rtol=0, atol=1e-12)
    alone = torch.cat([model([one]) for one in sets])
    torch.testing.assert_close(model(sets), alone, rtol=0, atol=1e-12)


def test_every_real_element_has_an_effect() -> None:
    model, one = sets_model(), torch.randn(5, 3).double()
    assert not torch.allclose(model([one]), model([one[:-1]]), atol=1e-6)


def test_elements_of_the_wrong_width_raise() -> None:
    with pytest.raises(ValueError, match=r"sets must be \(B, N, 3\), got elements of shape \(2,\)"):
        sets_model()([torch.randn(4, 2).double()])


def test_permuting_nodes_permutes_the_results() -> None:
    model, x, order = graph_model(), torch.randn(1, 7, 7).double(), torch.randperm(7)
    position = order.argsort()  # node n is at position[n]
    output = model(x[:, order], rg.edges(position[EDGES]))
    torch.testing.assert_close(output, model(x, rg.edges(EDGES))[:, order], rtol=0, atol=1e-12)


def test_a_node_depends_on_nodes_at_most_one_edge_per_layer_away() -> None:
    model, x = graph_model(), torch.randn(1, 7, 7).double()
    before = model(x, rg.edges(EDGES))[0]
    x[0, 2] = torch.nan  # edges 0 - 1 - 2; 5 and 6 are in another component
    after = model(x, rg.edges(EDGES))[0]
    assert after.isnan().any(-1).tolist() == [True, True, True, False, False, False, False]
    torch.testing.assert_close(after[3:], before[3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", [sets_model(), graph_model()], ids=["sets", "graph"])
def test_saved_models_load_unchanged(model: torch.nn.Module, tmp_path: Path) -> None:
    rg.save(model, tmp_path)
    again = rg.load(tmp_path)
    assert type(again) is type(model)
    assert again.config == model.config
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))


def test_training_reaches_every_weight() -> None:
    model = SetTransformer(CONFIG)
    model([torch.randn(4, 3), torch.randn(6, 3)]).square().sum().backward()
    graph = NodeClassifier(GRAPH)
    graph(torch.randn(1, 7, 7), rg.edges(EDGES)).square().sum().backward()
    for name, weight in (*model.named_parameters(), *graph.named_parameters()):
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().sum() > 0 or name.endswith("qkv.bias"), name
