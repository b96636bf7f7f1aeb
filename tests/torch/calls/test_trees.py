"""Tensors are found and replaced in whatever a model takes and returns, in one order, and containers keep their types."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls.inputs import flatten_tensors, map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Held:
    image: Any
    scale: float = 1.0


A, B, C = (torch.full((2,), float(i)) for i in range(3))
PACKED = torch.nn.utils.rnn.pack_sequence([A, B[:1]])
CASES = {
    "tensor": A,
    "atom": 3,
    "nothing": None,
    "flat": (A, 1, "same", B),
    "nested": [(A, {"b": B, "n": None}), [C], ()],
    "named": Pair(A, Pair(B, 2.0)),
    "ordered": OrderedDict(x=A, y=(B,)),
    "dataclass": (Held(A), Held(Held(B))),
    "size": (A, torch.Size([2, 3]), torch.float16),
    "packed": (PACKED, C),
    "twice": (A, [A, A]),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_without_paths_are_those_with_paths(case: str) -> None:
    found = tensors_in(CASES[case])
    assert [id(t) for t in found] == [id(t) for _, t in flatten_tensors(CASES[case])]


@pytest.mark.parametrize("case", CASES)
def test_mapping_visits_tensors_in_order_and_keeps_types(case: str) -> None:
    seen: list[torch.Tensor] = []
    copy = map_tensors(CASES[case], lambda t: seen.append(t) or t)
    outside = [t for t in tensors_in(CASES[case]) if not any(t is part for part in PACKED)]  # it stays whole
    assert sorted(map(id, seen)) == sorted(map(id, outside))
    # a size becomes a plain tuple: what stands in its place need not be numbers
    assert repr(copy).replace("torch.Size([2, 3])", "(2, 3)") == repr(CASES[case]).replace(
        "torch.Size([2, 3])", "(2, 3)"
    )


def test_paths_name_keys_fields_and_places() -> None:
    given = {"batch": Held((A, 1)), "rest": [B, Pair(2, C)]}
    assert [path for path, _ in flatten_tensors(given)] == ["batch.image.0", "rest.0", "rest.1.right"]


class OwnLength(tuple):  # type: ignore[type-arg]
    """As the irreducible representations of e3nn, which have a dimension and refuse to have a length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_of_a_class_of_its_own_is_not_asked_for_its_length() -> None:
    held = OwnLength((A, 1))
    assert [path for path, _ in flatten_tensors({"kind": held})] == ["kind.0"]
    assert tensors_in(held)[0] is A
    assert map_tensors((held, B), lambda t: t)[0] is held
    model = torch.nn.Linear(4, 4)
    model.kind = OwnLength((1, -1))  # type: ignore[assignment]
    sim = QuantizationSimModel(model, torch.randn(2, 4))
    sim.compute_encodings([torch.randn(2, 4)], progress=False)
    assert sim.model(torch.randn(2, 4)).shape == (2, 4)
