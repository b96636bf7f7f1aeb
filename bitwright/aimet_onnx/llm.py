"""Number formats of a language model by the roles of its layers, under AIMET's names.

Home of ``aimet_onnx.llm_topology`` and ``aimet_onnx.llm_configurator``. Roles are found from the graph
(:mod:`bitwright.core.graph.roles`): the type of a model, which AIMET asks for, is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.aimet_common.names import absent_names
from bitwright.aimet_onnx.quantsim import QuantizationSimModel, set_param_type
from bitwright.aimet_onnx.utils import proto_of
from bitwright.core.graph.attention import attention_products
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import TRAITS
from bitwright.core.graph.roles import ROLE, named_by_role
from bitwright.errors import ConfigError
from bitwright.onnx.opened import OnnxOpened

__all__ = ["AttentionBlockTopology", "LlmTopology", "analyze_llm_topology", "configure_llm"]

__getattr__ = absent_names(__name__)

_ATTENTION = ("q", "k", "v", "kv", "qkv")
_LINEAR = (*_ATTENTION, "o", "gate", "up", "gate_up", "down", "expert")
_MOVES = frozenset((*TRAITS["identity"], *TRAITS["reshape"], "Transpose", "Slice", "Split", "Expand", "Tile", "Concat"))


@dataclass(frozen=True)
class AttentionBlockTopology:
    """A block of a decoder.

    Attributes:
        linears: role (``q``, ``k``, ``v``, ``kv``, ``qkv``, ``o``, ``gate``, ``up``, ``gate_up``, ``down``, ``expert``) ->
            names of nodes.
        norms: names of the nodes of its normalisations, several where one is written out.
    """

    linears: Mapping[str, tuple[str, ...]]
    norms: tuple[str, ...]


@dataclass(frozen=True)
class LlmTopology:
    """The parts of a decoder by name.

    Attributes:
        blocks: in execution order.
        lm_head: nodes that make the logits.
        kv_cache: inputs and outputs of the graph that hold keys and values.
    """

    blocks: tuple[AttentionBlockTopology, ...]
    lm_head: tuple[str, ...]
    kv_cache: tuple[str, ...]


def analyze_llm_topology(model: Any, model_type: str | None = None, *, ir_model: Any = None) -> LlmTopology:
    """Find the blocks, layers and caches of a decoder.

    Args:
        model: as for :class:`QuantizationSimModel`, or a simulation.
        model_type, ir_model: AIMET's; not needed here.

    Raises:
        ConfigError: there is no attention in the graph.
    """
    simulated = isinstance(model, QuantizationSimModel)
    graph = model.graph if simulated else OnnxOpened(proto_of(model), None, "analyze_llm_topology", None).view.graph()
    roles = {name: role.removeprefix(ROLE) for name, role in named_by_role(graph).items()}
    blocks = _blocks([(op.name, roles[op.name]) for op in graph.ops if op.name in roles])
    if not blocks:
        raise ConfigError(
            "analyze_llm_topology", "there is no attention with layers for queries, keys and values in the graph",
            "give the float graph of a decoder; set_param_type(sim, ..., nodes_to_include=...) takes any nodes",
        )  # fmt: skip
    lm_head = tuple(op.name for op in graph.ops if roles.get(op.name) == "lm_head")
    return LlmTopology(tuple(blocks), lm_head, _caches(graph))


def _blocks(named: Sequence[tuple[str, str]]) -> list[AttentionBlockTopology]:
    """The blocks of nodes and their roles in order; one begins where attention is projected again."""
    found: list[dict[str, tuple[str, ...]]] = []
    before: tuple[str, ...] = ()  # norms in front of the next block, or after the last one
    for name, role in named:
        if role in _ATTENTION and (not found or not found[-1].keys().isdisjoint(("o", "down"))):
            found.append({"norm": before})
            before = ()
        if role == "norm" and (not found or not found[-1].keys().isdisjoint(("down", "expert"))):
            before = (*before, name)
        elif role in (*_LINEAR, "norm") and found:
            found[-1][role] = (*found[-1].get(role, ()), name)
    return [AttentionBlockTopology({r: n for r, n in block.items() if r != "norm"}, block["norm"]) for block in found]


def _caches(graph: Graph) -> tuple[str, ...]:
    """Inputs and outputs of the graph that are keys or values, moved and joined at most."""
    waiting = [str(op.inputs[1]) for pair in attention_products(graph) for op in pair]
    seen: dict[str, None] = {}
    while waiting:
        value = waiting.pop()
        if value not in seen and _is_moved(graph, value):
            seen[value] = None
            waiting += _read(graph, value)
    return tuple(v for v in reversed(seen) if graph.is_output(v) or _is_input(graph, v))


def _is_moved(graph: Graph, value: str) -> bool:
    """Whether no operator computes the value, or one that only moves elements."""
    op = graph.producer(value)
    return op is None or op.type in _MOVES


def _read(graph: Graph, value: str) -> list[str]:
    op = graph.producer(value)
    return [] if op is None else [x for x in op.inputs if x is not None and graph.values[x].is_float]


def _is_input(graph: Graph, value: str) -> bool:
    return graph.producer(value) is None and not graph.values[value].is_static


def configure_llm(
    sim: QuantizationSimModel,
    topology: LlmTopology | None = None,
    *,
    kv_cache_type: Any = None,
    backbone_weight_type: Any = None,
    lm_head_weight_type: Any = None,
) -> None:
    """Give caches, the layers of the blocks, and the output layer number formats; what is ``None`` stays as it is.

    Args:
        topology: what :func:`analyze_llm_topology` returned; found in the simulation by default.
        kv_cache_type: a number format or its name.
        backbone_weight_type, lm_head_weight_type: a number format, its name, or a ``QSpec``.

    Raises:
        ConfigError: there are no caches, or no output layer, to give a format to.
    """
    found = topology or analyze_llm_topology(sim)
    backbone = tuple(name for block in found.blocks for names in block.linears.values() for name in names)
    for what, names, wanted in (
        ("backbone_weight_type", backbone, backbone_weight_type),
        ("lm_head_weight_type", found.lm_head, lm_head_weight_type),
        ("kv_cache_type", found.kv_cache, kv_cache_type),
    ):
        if wanted is None:
            continue
        if not names:
            raise ConfigError(f"configure_llm({what}=...)", "the topology names nothing that it is for", "leave it out")
        if what == "kv_cache_type":
            sim.set_tensor_precision(list(names), wanted, strict=False)
        else:
            set_param_type(sim, wanted, nodes_to_include=names)
