"""Both front ends plan alike: models of the zoo, recorded by one and exported to ONNX for the other.

Every weight has the same format, symmetry and number of scales in both plans, wherever the exporter has put it
(transposed, computed, read by several nodes). Activations have the same number of sites, unless the exporter writes the
model in other operators: those models are listed with what it does.
"""

from __future__ import annotations

import math

import onnx
import pytest
import torch

from bitwright.core.graph.graph import Graph
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.onnx.model.graph import build_graph
from bitwright.onnx.model.load import load_model
from bitwright.torch import Inputs, TorchView
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.conformance.exported import PLANNED, REWRITTEN, exported
from tests.support.zoo import ZOO, Case

#: parameters that one of the two has no weight for
ONLY = {
    "rnn-projected-lstm": {"weight_hr_l0"},
    "masked-lm": {"positions.weight"},
    "masked-lm-sdpa": {"positions.weight"},
    "tuple-io": {"left.weight"},
}
FAST = {"chain-residual", "densenet", "functional", "mobilenet-v3-block", "shared-twice", "super-resolution", "vit-bmm"}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PLANNED]


def torch_plan(case: Case) -> tuple[Plan, Graph]:
    call = case.example()
    sim = TorchSim(case.build(), Inputs(call.args, call.kwargs))
    return sim.plan, sim.graph


def onnx_plan(proto: onnx.ModelProto) -> tuple[Plan, Graph]:
    graph = build_graph(load_model(proto).model).graph
    return place(graph, load_config()), graph


def weights(plan: Plan, graph: Graph, names: dict[str, str]) -> dict[frozenset[str], set[tuple[str, str, int]]]:
    """Parameters that make up a weight -> its format, symmetry and number of scales; -1 where its shape is unknown."""
    found: dict[frozenset[str], set[tuple[str, str, int]]] = {}
    for site in plan.sites.values():
        if site.role != "weight":
            continue
        value = graph.values[site.value]
        sources = (value.param,) if value.param else value.sources
        key = frozenset(names[s] for s in sources if s in names)
        scales = math.prod(site.spec.granularity.param_shape(value.shape, site.name))
        found.setdefault(key, set()).add((site.spec.format.name, str(site.spec.symmetry), scales))
    return found


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of that tensor."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def moving_sites(plan, graph):
    """Sites of activations, without constants that are watched as inputs are: PyTorch may make anew what the exporter stores."""
    sites = (s for s in plan.sites.values() if s.role in ("input", "output"))
    return sum(graph.values[s.value].kind != "constant" for s in sites)


@pytest.mark.slow_variants(
    "mobilenet-v3-block", "densenet", "vit-bmm", "shared-twice", "super-resolution", "chain-residual"
)
@pytest.mark.parametrize("name", NAMES)
def test_both_front_ends_plan_alike(name):
    case = ZOO[name]
    names = first_names(case.build())
    (one, one_graph), (other, other_graph) = torch_plan(case), onnx_plan(exported(name))
    found, expected = weights(other, other_graph, names), weights(one, one_graph, names)
    for only in ONLY.get(name, ()):
        assert (frozenset([only]) in found) != (frozenset([only]) in expected)
        found.pop(frozenset([only]), None)
        expected.pop(frozenset([only]), None)
    unknown = {key for key, kinds in found.items() if any(scales < 0 for *_, scales in kinds)}
    for key in unknown:  # computed by the exporter: weights of recurrent layers, put together gate by gate
        found[key] = {(*kind[:2], -1) for kind in found[key]}
        expected[key] = {(*kind[:2], -1) for kind in expected[key]}
    assert found == expected
    sites = [moving_sites(one, one_graph), moving_sites(other, other_graph)]
    assert (sites[0] != sites[1]) == (name in REWRITTEN), f"{sites[0]} sites in torch, {sites[1]} in ONNX"


def test_the_same_batch_norms_fold():
    from bitwright.methods.folding.batch_norm_search import find_folds
    from bitwright.onnx import fold_all_batch_norms

    case = ZOO["mobilenet-v3-block"]
    call = case.example()
    one = TorchView(case.build(), [Inputs(call.args, call.kwargs)])
    folds, refusals = find_folds(one.graph(), one)
    report = fold_all_batch_norms(exported("mobilenet-v3-block"))
    assert (len(report), len(report.refused)) == (len(folds), len(refusals)) == (3, 0)
