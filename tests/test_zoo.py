"""The zoo itself: every model runs, gives the same every time, and has statistics worth folding."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import Case
from tests.support.zoo import FOLDING_ZOO, ZOO, cases, chain, chain_input

ALL = [pytest.param(case, id=name) for zoo in (ZOO, FOLDING_ZOO) for name, case in zoo.items()]


def tensors(value: Any) -> list[Tensor]:
    """The tensors in what a model returned, in order."""
    found, stack = [], [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, field.name) for field in dataclasses.fields(item))
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two outputs hold equal tensors of equal types."""
    pairs = list(zip(tensors(left), tensors(right), strict=True))
    return bool(pairs) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("case", ALL)
def test_runs_and_repeats(case: Case):
    model = case.build()
    first = case.run(model)
    assert all(torch.isfinite(t).all() for t in tensors(first))
    assert same(first, case.run(model)), "the second run differs"
    assert same(first, case.run(case.build())), "a second build differs"
    assert same(first, case.run(copy.deepcopy(model))), "a copy differs"
    assert not same(first, case.run(model, seed=1)), "the input does not matter"


@pytest.mark.parametrize("case", ALL)
def test_global_seed_neither_matters_nor_moves_and_batch_norms_are_not_trivial(case: Case):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = case.build()
    first = model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    second = case.build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert (module.running_var - 1).abs().max() > 1e-3, name
            if module.affine:
                assert (module.weight - 1).abs().max() > 1e-3, name


def test_branch_takes_both_sides():
    case = ZOO["branch"]
    model = case.build()
    assert {bool(model.stem(case.example(seed).args[0]).sum() > 0) for seed in range(10)} == {True, False}


def test_cases_are_selected_by_all_tags():
    assert {case.name for case in cases("residual", "half")} == {"resnet18-half"}
    assert len(cases()) == len(ZOO)


def test_folding_zoo_says_what_it_expects():
    for case in FOLDING_ZOO.values():
        assert (case.pairs > 0) == (case.expect == "folds"), case.name
        assert bool(case.why) == (case.expect == "refuses"), case.name


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_chain_keeps_its_signal(residual: bool):
    limit = sys.getrecursionlimit()
    with torch.no_grad():
        model, again = chain(1200, residual), chain(1200, residual)
        outputs = [model(chain_input(0)), again(chain_input(0)), model(chain_input(1))]
    assert torch.equal(outputs[0], outputs[1])
    assert 1e-2 < outputs[2].abs().max() < 1e2
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("case", [case for case in ALL if not str(case.id).endswith("without-shift")])
def test_no_weight_of_a_norm_and_no_bias_is_trivial(case: Case):
    """A factor of one and a bias of zero hide what is done with them; one case has no shift on purpose."""
    for name, module in case.build().named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            norm = "norm" in type(module).__name__.lower() or kind.endswith("bias")
            if norm and parameter.dim() == 1 and parameter.numel() > 1 and parameter.is_floating_point():
                assert bool((parameter != parameter[0]).any()), f"{name}.{kind}"
