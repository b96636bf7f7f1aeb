"""Optimize as torch's exporter does, without losing constants, and try rules only where they can match.

The exporter tries some 70 rules at every node, twice. Whether the operator of a node is that at which the pattern of a rule ends
is asked here first, which takes a tenth of the time and gives the same model.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer, rewriter
from onnxscript.optimizer import _constant_folding, _optimizer
from onnxscript.rewriter import _matcher

# what the rules of the exporter take for zero and for one, with a margin
_NEXT_TO_ZERO, _NEXT_TO_ONE = 1e-7, 1e-4
#: the names in the function whose place :func:`_optimize` takes, and attributes of rules that it reads
_KNOWN = {
    "_constant_folding", "FoldConstantsPass", "InlinePass", "LiftConstantsToInitializersPass", "ir", "passes", "PassManager",
    "LiftSubgraphInitializersToMainGraphPass", "DeduplicateInitializersPass", "CommonSubexpressionEliminationPass",
    "OutputFixPass", "NameFixPass", "RewritePass", "_DEFAULT_REWRITE_RULES", "RemoveUnusedFunctionsPass", "in_place", "model",
    "RemoveUnusedNodesPass", "RemoveUnusedOpsetsPass", "Sequential", "common_passes", "rewriter",
}  # fmt: skip


class _Rule:
    """A rule of the exporter that checks the operator of a node first."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self.name, self.remove_nodes, self.as_function = rule.name, rule.remove_nodes, rule.as_function
        self.graph_pre_visitor, self.graph_post_visitor = rule.graph_pre_visitor, rule.graph_post_visitor
        end = rule._target_pattern.output_nodes[0].op_identifier()
        self._end = end if isinstance(rule._matcher, _matcher.SimplePatternMatcher) else None

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        """As the rule; ``None`` where nothing matches."""
        if self._end is not None and (node.op_type != self._end[1] or node.domain != self._end[0]):
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


@functools.cache
def _rules() -> Any:
    """The rules of the exporter; ``None`` where this module does not support its implementation."""
    try:
        known = set(inspect.unwrap(_optimizer.optimize_ir).__code__.co_names) == _KNOWN
        rules: list[Any] = [_Rule(rule) for rule in rewriter._DEFAULT_REWRITE_RULES]
        return rewriter.RewriteRuleSet(rules) if known else None
    except AttributeError:
        return None


def _optimize(model: ir.Model) -> None:
    """As ``onnxscript.optimizer.optimize_ir``."""
    rules = _rules()
    if rules is None:
        optimizer.optimize_ir(model)
        return
    limits = (
        _constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
        _constant_folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
    )
    steps = (
        _constant_folding.FoldConstantsPass(
            shape_inference=True, input_size_limit=limits[0], output_size_limit=limits[1], should_fold=lambda node: None
        ),
        rewriter.RewritePass(rules),
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedFunctionsPass(),
        common_passes.RemoveUnusedOpsetsPass(),
    )
    ir.passes.Sequential(
        common_passes.InlinePass(),
        ir.passes.PassManager(steps, steps=2, early_stop=True),
        common_passes.RemoveUnusedNodesPass(),
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common_passes.LiftSubgraphInitializersToMainGraphPass(),
        common_passes.DeduplicateInitializersPass(),
        common_passes.CommonSubexpressionEliminationPass(),
        common_passes.OutputFixPass(),
        common_passes.NameFixPass(),
    )(model)


def optimized(model: ir.Model) -> ir.Model:
    """The model of an exported program, optimized as torch's exporter does, without losing constants.

    Its rules take an addition of up to 1e-8 for one of zero, and a product with up to 1.00001 for one with one: of
    ``x / (y + 1e-15)`` they leave ``x / y``. Such constants are inputs of the graph while the rules look at it. So are
    parameters of equal values, of which it would keep one: each has a name and an encoding of its own.
    """
    hidden = _hide(model)
    _optimize(model)
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in hidden]:
        graph.inputs.remove(value)
        if value.uses():
            value.const_value = hidden[str(value.name)]
            graph.register_initializer(value)
    if hidden:
        optimizer.fold_constants(model)
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common_passes.RemoveUnusedNodesPass()(model)
    return model


def _hide(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Turn constants that a rule would mistake for zero or one, or merge with equal ones, into inputs; returns them by name."""
    hidden: dict[str, ir.TensorProtocol] = {}
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Constant" and not node.domain]:
        given = node.attributes.get("value")
        if given is None or node.outputs[0].is_graph_output() or not _is_mistaken(given.as_tensor()):
            continue
        tensor, old = given.as_tensor(), node.outputs[0]
        name = f"{old.name}_exact_{len(hidden)}"
        value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype))
        for use in tuple(old.uses()):
            use.node.replace_input_with(use.idx, value)
        model.graph.inputs.append(value)
        hidden[name] = tensor
    for name, stored in _merged_or_mistaken(model):
        hidden[name] = stored
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    return hidden


def _merged_or_mistaken(model: ir.Model) -> list[tuple[str, ir.TensorProtocol]]:
    """Initializers that the exporter would merge with an equal one, or mistake for zero or one."""
    largest = common_passes.DeduplicateInitializersPass().size_limit
    seen: set[tuple[Any, ...]] = set()
    found = []
    for name, value in model.graph.initializers.items():
        stored = value.const_value
        if stored is None or value.is_graph_output():
            continue
        content = (stored.dtype, tuple(stored.shape), stored.tobytes()) if stored.size <= largest else (name,)
        if content in seen or _is_mistaken(stored):
            found.append((name, stored))
        seen.add(content)
    return found


def _is_mistaken(tensor: ir.TensorProtocol) -> bool:
    """Whether a scalar is close to zero or one but not equal to it."""
    if len(tensor.shape) or not tensor.dtype.is_floating_point():
        return False
    value = float(tensor.numpy())
    return (abs(value) <= _NEXT_TO_ZERO and value != 0) or (abs(value - 1) <= _NEXT_TO_ONE and value != 1)
