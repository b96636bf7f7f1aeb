"""Number formats of a language model by the roles of its layers, under AIMET's names.

Home of ``aimet_onnx.llm_topology`` and ``aimet_onnx.llm_configurator``. Roles are found from the graph
(:mod:`bitwright.core.graph.roles`): the type of a model, which AIMET asks for, is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_onnx.quantsim import QuantizationSimModel, set_param_type
from bitwright.aimet_onnx.utils import proto_of
from bitwright.core.graph.attention import attention_products
from bitwright.core.graph.graph import Graph, Op
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
        norms: names of the nodes of its normalisations.
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
    blocks: list[dict[str, list[str]]] = []
    for op in graph.ops:
        role = roles.get(op.name, "")
        if role in _ATTENTION and (not blocks or not blocks[-1].keys().isdisjoint(("o", "down"))):
            blocks.append({})
        if blocks and role in (*_LINEAR, "norm"):
            blocks[-1].setdefault(role, []).append(op.name)
    if not blocks:
        raise ConfigError(
            "analyze_llm_topology", "there is no attention with layers for queries, keys and values in the graph",
            "give the float graph of a decoder; set_param_type(sim, ..., nodes_to_include=...) takes any nodes",
        )  # fmt: skip
    return LlmTopology(
        tuple(
            AttentionBlockTopology(
                {role: tuple(names) for role, names in block.items() if role != "norm"}, tuple(block.get("norm", ()))
            )
            for block in blocks
        ),
        tuple(op.name for op in graph.ops if roles.get(op.name) == "lm_head"),
        tuple(_caches(graph)),
    )


def _caches(graph: Graph) -> Iterator[str]:
    """Inputs and outputs of the graph that are keys or values, moved and joined at most."""
    seen: dict[str, None] = {}
    waiting = [str(op.inputs[1]) for pair in attention_products(graph) for op in pair]
    while waiting:
        value = waiting.pop()
        op: Op | None = graph.producer(value)
        if value in seen or (op is not None and op.type not in _MOVES):
            continue
        seen[value] = None
        waiting += [x for x in op.inputs if x is not None and graph.values[x].is_float] if op is not None else []
    made = {value for op in graph.ops for value in op.outputs}
    return (v for v in reversed(seen) if graph.is_output(v) or (v not in made and not graph.values[v].is_static))


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
