"""Both front ends plan alike: models of the zoo, recorded by one and exported to ONNX for the other.

Every weight has the same format, symmetry and number of scales in both plans, wherever the exporter has put it
(transposed, computed, read by several nodes). Activations have the same number of sites, unless the exporter writes the
model in other operators: those models are listed with what it does.
"""

from __future__ import annotations

import logging
import math
import warnings

import onnx
import pytest
import torch

from bitwright.core.config import load_config
from bitwright.core.graph import Graph
from bitwright.core.placement import Plan, place
from bitwright.onnx.graph import build_graph
from bitwright.onnx.load import load_model
from bitwright.torch import Inputs, TorchView
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.zoo import ZOO, Case

#: torch.onnx.export refuses these (data-dependent branches, dataclasses, packed sequences, 3-D pools, optional outputs);
#: to two values of "arithmetic" it gives one name
NOT_EXPORTED = {
    "arithmetic",
    "conv3d-net",
    "gru-packed",
    "branch",
    "dataclass-io",
    "dataclass-io-optional",
    "dict-io",
}
#: models whose inputs or parameters ONNX Runtime and numpy share no type for
NOT_COMPARED = {"resnet18-bfloat16", "vit-bfloat16"}
#: what the exporter writes in other operators, so that the plans differ in activations
REWRITTEN = {
    "activations": "SiLU, Softsign and others as several operators",
    "audio-net": "GLU as Split, Sigmoid, Mul",
    "cell-loop": "a recurrent cell as its operators, and the loop over time unrolled",
    "embedding-bag": "a Loop over the bags",
    "encoder-post-norm": "attention with factors on queries and on keys",
    "encoder-pre-norm": "attention with factors on queries and on keys",
    "layer-loop": "the loop over a layer unrolled",
    "llama": "rotary angles as constants, normalisation as several operators",
    "llama-cached": "rotary angles as constants, normalisation as several operators",
    "masked-lm": "the lookup of positions as a constant",
    "masked-lm-sdpa": "the lookup of positions as a constant, attention with factors on queries and on keys",
    "norms": "group normalisation as instance normalisation, product and sum",
    "shared-twice": "a module that is called twice as two nodes",
    "siamese": "a module that is called twice as two nodes",
    "siamese-double": "a module that is called twice as two nodes",
    "tuple-io": "a bilinear layer as two products",
    "vit-half": "attention with factors on queries and on keys",
    "vit-sdpa": "attention with factors on queries and on keys",
}
#: parameters that one of the two has no weight for
ONLY = {
    "cell-loop": {"cell.weight_ih", "cell.weight_hh"},
    "masked-lm": {"positions.weight"},
    "masked-lm-sdpa": {"positions.weight"},
    "tuple-io": {"left.weight"},
}
FAST = {
    "chain-residual",
    "densenet",
    "functional",
    "mobilenet-v3-block",
    "shared-twice",
    "super-resolution",
    "vit-bmm",
}
NAMES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in ZOO
    if name not in NOT_EXPORTED | NOT_COMPARED
]


def export(case: Case) -> onnx.ModelProto:
    """The case in the form nearest to what its code says."""
    call = case.example()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            case.build(), call.args, kwargs=call.kwargs or None, dynamo=True, verbose=False, optimize=False
        )
    assert program is not None
    return program.model_proto


def torch_plan(case: Case) -> tuple[Plan, Graph]:
    call = case.example()
    sim = TorchSim(case.build(), Inputs(call.args, call.kwargs))
    return sim.plan, sim.graph


def onnx_plan(proto: onnx.ModelProto) -> tuple[Plan, Graph]:
    graph = build_graph(load_model(proto).model).graph
    return place(graph, load_config()), graph


def weights(
    plan: Plan, graph: Graph, names: dict[str, str]
) -> dict[frozenset[str], set[tuple[str, str, int]]]:
    """Parameters that make up a weight -> its format, symmetry and number of scales."""
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


@pytest.mark.parametrize("name", NAMES)
def test_both_front_ends_plan_alike(name):
    case = ZOO[name]
    names = first_names(case.build())
    (one, one_graph), (other, other_graph) = torch_plan(case), onnx_plan(export(case))
    found, expected = weights(other, other_graph, names), weights(one, one_graph, names)
    for only in ONLY.get(name, ()):
        assert (frozenset([only]) in found) != (frozenset([only]) in expected)
        found.pop(frozenset([only]), None)
        expected.pop(frozenset([only]), None)
    assert found == expected
    sites = [sum(s.role in ("input", "output") for s in plan.sites.values()) for plan in (one, other)]
    assert (sites[0] != sites[1]) == (name in REWRITTEN), f"{sites[0]} sites in torch, {sites[1]} in ONNX"


def test_the_same_batch_norms_fold():
    from bitwright.algorithms.batch_norm_fold import find_folds
    from bitwright.onnx.batch_norm_fold import fold_all_batch_norms

    case = ZOO["mobilenet-v3-block"]
    call = case.example()
    one = TorchView(case.build(), [Inputs(call.args, call.kwargs)])
    folds, refusals = find_folds(one.graph(), one)
    report = fold_all_batch_norms(export(case))
    assert (len(report), len(report.refused)) == (len(folds), len(refusals)) == (3, 0)
