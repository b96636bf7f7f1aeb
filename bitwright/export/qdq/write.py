"""Write a marked model as a standard ONNX model with QuantizeLinear and DequantizeLinear.

What integer runtimes need in order to recognise a quantized operator, and what is done about it:

- weights are stored as integers, each with a DequantizeLinear whose output bears the parameter's name (the
  integers are called ``<name>_q``); the float original is dropped unless something else reads it;
- biases are int32 with the scale of the products they are added to (``core.bias``); where that does not fit
  32 bits the weight's scale is raised;
- signed activations are written on the same grid counted from zero (``activation="unsigned"``): equal values,
  and the integer kernels that want uint8 accept them;
- a convolution pads for itself where a Pad with zeros stands in front of it;
- rows that are looked up in a table are gathered as codes, and shapes asked of codes, where the target gains by that;
- what is computed in float and then pooled goes on its grid after the pool, where the target gains by that;
- operators that only move data get a pair of the input's grid after them, so that no stretch of the graph
  falls back to float.

The file computes what the simulation computes, bit for bit per quantizer; how each format is written is the
table of :mod:`bitwright.export.qdq.forms`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, largest_code
from bitwright.errors import ConfigError, close_matches
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.qdq.forms import METADATA, Pair, note_metadata, write_activation, write_follower
from bitwright.export.qdq.half import Half, write_half
from bitwright.export.qdq.lookups import write_lookups
from bitwright.export.qdq.markers import bypass, close, copy_model, remove_unread, site_nodes, site_of
from bitwright.export.qdq.nbits import can_say, write_nbits
from bitwright.export.qdq.products import (
    ProductForm,
    check_weight_only,
    fill_softmax,
    float_products,
    guard_outputs,
    keep_apart,
    keep_both_pairs,
    keep_in_float,
    products_without_kernel,
)
from bitwright.export.qdq.rewrites import (
    close_scans,
    join_activations,
    keep_after_pool,
    measure_codes,
    pool_codes,
    round_after_pools,
)
from bitwright.export.qdq.run_time import write_run_time_layers, write_run_time_products
from bitwright.export.qdq.stored import unsigned
from bitwright.export.qdq.trace import carried, data_outputs, trace
from bitwright.export.qdq.weights import write_biases, write_constant
from bitwright.export.qdq.writing import ActivationForm, BiasForm, Note, Writing, Written
from bitwright.export.targets import Target, find_target
from bitwright.progress import collector_paused

OLDEST_OPSET, IR_VERSION = 13, 10


@dataclass(frozen=True)
class QdqResult:
    """Result of :func:`to_qdq`.

    Attributes:
        model: the QDQ model.
        tensors: site -> names of its dequantized tensors, in execution order; for weights the parameter's
            name.
        notes: what stayed in float or was written otherwise than asked for, and why.
        raised: weight sites whose scale was raised for the sake of an int32 bias -> the encoding written.
    """

    model: ir.Model
    tensors: dict[str, tuple[str, ...]]
    notes: tuple[Note, ...]
    raised: dict[str, Encoding]


@collector_paused()
def to_qdq(
    model: ir.Model,
    encodings: Mapping[str, Encoding],
    *,
    bias: BiasForm = "int32",
    activation: ActivationForm = "unsigned",
    weight_only: ProductForm = "exact",
    target: str | Target = "packed",
    half: Half | None = None,
    unsigned_weights: bool = False,
) -> QdqResult:
    """Write every marker as a quantizer of standard ONNX.

    Args:
        model: with a ``bitwright::Site`` marker at each quantized place (see
            :mod:`bitwright.export.qdq.markers`); opset 21 for 4 and 16 bits and for blocks, 19 for float8, else
            13. It is left as it is.
        encodings: site -> encoding with concrete axes. A marked site without one stays in float.
        bias: ``"int32"`` gives Conv, ConvTranspose, Gemm and MatMul with Add an int32 bias where input and
            weight are quantized, marked or not; ``"marked"`` does so for marked biases only; ``"float"``
            leaves all biases alone. ONNX Runtime quantizes float biases of its integer kernels by itself,
            so that they are not more exact there.
        activation: ``"unsigned"`` writes signed grids of activations as unsigned ones with shifted zero
            point; ``"as_is"`` keeps them signed, which needs ``session.qdqisint8allowed=1`` in ONNX
            Runtime, and which targets of symmetric kernels (TensorRT) get in any case.
        weight_only: MatMul and Gemm of float activations with quantized weights: ``"exact"`` computes them as simulated, in
            float; ONNX Runtime is kept from quantizing the activations by itself. Weights of 4 bits become MatMulNBits where
            the target runs that (``ort_cpu``). ``"nbits"`` asks for MatMulNBits whatever the target; ``"fused"`` leaves all to
            ONNX Runtime, which is fast and computes something else than the simulation.
        target: row of :mod:`bitwright.export.targets`: how many bits codes are stored in.
        half: what is written in half precision instead of float32, see :mod:`bitwright.export.qdq.half`.
        unsigned_weights: codes of 8-bit weights of products are written unsigned, around 128. Kernels of two unsigned factors
            add exactly on every CPU; those of uint8 and int8 saturate where there is no VNNI, and are faster where there is.

    Returns:
        A model with the names of the graph's inputs and outputs unchanged; time and memory are linear in
        nodes.

    Raises:
        ConfigError: an option has an unknown value.
        EncodingsError: an encoding does not fit its tensor.
        ExportError: a marker is malformed, a format cannot be written there, or the opset is too old for it.
    """
    _check_option("bias", bias, ("int32", "marked", "float"))
    _check_option("activation", activation, ("unsigned", "as_is"))
    check_weight_only(weight_only)
    row = find_target(target)
    activation = "as_is" if row.signed else activation
    bias = "float" if row.float_biases else bias
    return _run(Writing(copy_model(model), dict(encodings), bias, activation, weight_only, row, half, unsigned_weights))


def _check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        problem = f"{value!r} is not a value of this option{close_matches(str(value), known)}"
        raise ConfigError(f"to_qdq({name}=...)", problem, f"use one of {', '.join(map(repr, known))}")


def _run(w: Writing) -> QdqResult:
    """All steps, in order."""
    w.check_opset(OLDEST_OPSET, "per-channel DequantizeLinear")
    trace(w)
    if w.target.pools_floats:
        round_after_pools(w)
    if w.target.runtime == "onnxruntime":
        fill_softmax(w.builder, all_nodes(w.model.graph))
    _drop_vectors(w)
    if w.bias != "float":
        write_biases(w)
    for node in site_nodes(w.model):
        write = write_constant if node.inputs[0] in w.constants else _write_activation
        write(w, node, site_of(node))
    _write_followers(w)
    _write_products(w)
    guard_outputs(w.builder, all_nodes(w.model.graph))
    _tidy(w)
    _write_recurrent(w)
    write_nbits(w.builder, w.narrow_products)
    _rewrite_for_runtime(w)
    if w.half is not None:
        _write_half(w, w.half)
    version, what = w.builder.opset
    w.check_opset(version, what)
    names = {site: tuple(str(v.name) for v in values) for site, values in w.tensors.items()}
    return QdqResult(w.model, names, tuple(note for note in w.notes if not _of_half_bias(w, note)), w.raised)


def _rewrite_for_runtime(w: Writing) -> None:
    """Write what the runtime computes faster, or reads at all."""
    if w.target.gathers_codes:
        write_lookups(w.builder)
    if w.target.measures_codes:
        measure_codes(w.model)
    if w.target.spells_operators and w.half is None:
        join_activations(w.builder, w.model)
        pool_codes(w.builder, w.model)
    if w.target.closes_scans:
        close_scans(w.builder, w.model)


def _drop_vectors(w: Writing) -> None:
    """Store codes and not indices into codebooks where integer kernels read them, or nothing looks them up."""
    held = {site: encoding for site, encoding in w.encodings.items() if encoding.vectors is not None}
    if not held:
        return
    marked = [node for node in site_nodes(w.model) if site_of(node) in w.encodings]
    if not w.target.gathers_codes or any(node.inputs[0] not in w.constants for node in marked):
        w.encodings.update({site: replace(encoding, vectors=None) for site, encoding in held.items()})


def _of_half_bias(w: Writing, note: Note) -> bool:
    """Whether a note says that a bias is not int32, which a bias of half precision is not meant to be."""
    return note.kind == "float bias" and w.half is not None and w.half.operators == "all"


def _write_half(w: Writing, half: Half) -> None:
    """Write floats in half precision; notes operators that stay in float32."""
    done = write_half(w.builder, w.model, half, w.float_values if half.operators == "all" else ())
    for several in w.tensors.values():
        several[:] = [done.moved.get(value, value) for value in several]
    if half.operators == "none":
        return
    stay = f", {len(done.kept)} stay in float32" if done.kept else ""
    casts = f", with {done.casts} Cast{'s' if done.casts != 1 else ''}" if done.casts else ""
    w.note("model", "half precision", f"{done.done} operators compute in {half.kind}{stay}{casts}")
    for name, why in done.kept.items():
        w.note(name, "half precision", f"in float32: {why}")


def _write_activation(w: Writing, node: ir.Node, site: str) -> None:
    """Replace a marker by a quantizer, unless its tensor already went through the same one."""
    source, result, graph = node.inputs[0], node.outputs[0], node.graph
    assert source is not None and graph is not None
    encoding = w.encodings[site]
    place = w.places[node]
    twin = w.quantized.get((source, encoding, graph))
    if twin is not None:
        node.replace_input_with(0, twin)
        bypass(node, w.builder.outputs)
        w.written[twin].places.append(place)
        w.tensors.setdefault(site, []).append(twin)
        return
    if node in w.pooled:
        keep_after_pool(w, node)
    shown = unsigned(encoding) if w.activation == "unsigned" else encoding
    found = write_activation(w.builder, node, encoding, shown, site)
    if found.pair is not None:
        w.pairs[result] = found.pair
    w.quantized[source, encoding, graph] = w.quantized[result, encoding, graph] = result
    written = Written([place], "activation", encoding, found.scale, found.axis, source, pooled=w.pooled.get(node, 0))
    w.record(result, written)
    if encoding.dynamic:
        w.at_run_time[result] = source, encoding


def _write_followers(w: Writing) -> None:
    """Pairs of the same grid after operators that move data: integer runtimes then see through them."""
    own = w.builder.own
    for node in tuple(all_nodes(w.model.graph)):
        pair: Pair | None = None if node in own else carried(w, node, w.pairs)
        if pair is None:
            continue
        for value in data_outputs(node):
            if value.is_graph_output() or any(use.node not in own for use in value.uses()):
                w.pairs[write_follower(w.builder, value, pair)] = pair


def _write_products(w: Writing) -> None:
    """Keep float activations of products with quantized weights in float, or note that the runtime will not."""
    if w.at_run_time and w.weight_only == "fused":
        _write_integer_products(w)
    if mixed := products_without_kernel(w.model):
        keep_apart(w.builder, mixed)
        text = f"{_products(len(mixed))} of integer activations with weights that are not integers, computed in float"
        w.note("model", "float product", f"{text}: no kernel has both")
    if w.target.runtime == "onnxruntime":
        floats = {value for value, made in w.written.items() if not isinstance(made.encoding.format, IntFormat)}
        keep_in_float(w.builder, w.model, floats)
        keep_both_pairs(w.builder, all_nodes(w.model.graph))
    found = float_products(w.model)
    if not found:
        return
    if w.weight_only == "fused":
        text = (
            f"{_products(len(found))} of float activations with quantized weights, whose activations ONNX Runtime quantizes to 8 "
            "bits by itself, as no simulation does; session.qdq_matmulnbits_accuracy_level=1 makes it compute them in float"
        )
    else:
        text = f"{_products(len(found))} of float activations with quantized weights computed as simulated, in float"
        text += _write_as_simulated(w, found)
    w.note("model", "float product", text)


def _products(count: int) -> str:
    return f"{count} product{'s' if count != 1 else ''}"


def _write_integer_products(w: Writing) -> None:
    """Write products of dynamically quantized activations as integer products, and note their number."""
    done, left = write_run_time_products(w.builder, w.model, w.at_run_time)
    text = f"{_products(done)} of activations quantized at run time computed in integers"
    text += f"; {len(left)} in float, because no operator computes them" if left else ""
    w.note("model", "float product", text)


def _write_recurrent(w: Writing) -> None:
    """Write recurrent layers whose operands are quantized at run time as integer operators."""
    if w.at_run_time:
        write_run_time_layers(w.builder, w.model, w.at_run_time, unsigned_weights=w.unsigned_weights)


def _write_as_simulated(w: Writing, found: list[ir.Node]) -> str:
    """Keep the activations of products in float; returns a description of their form."""
    chosen = w.weight_only == "nbits" or w.target.multiplies_nbits
    w.narrow_products = [node for node in found if chosen and can_say(node)]
    left = [node for node in found if node not in w.narrow_products]
    could = 0 if chosen else sum(map(can_say, left))
    keep_apart(w.builder, left)
    text = "".join(_forms(len(w.narrow_products), len(left), could))
    return f"{text}; {w.target.exact_session}" if w.target.exact_session else text


def _reach(encoding: Encoding) -> float:
    """Least number of steps between zero and the largest value of a range chosen at run time."""
    whole = largest_code(encoding.format)
    return whole / 2 if isinstance(encoding.format, IntFormat) and not encoding.format.signed else whole


def _tidy(w: Writing) -> None:
    """Drop float originals, pass their names to the replacements, write metadata and versions."""
    for source, heir in w.heirs.items():
        name = source.name
        remove_unread(source)
        gone = not source.uses() and not source.is_graph_output() and not source.is_graph_input()
        if gone and heir is not source and not heir.is_graph_output():
            heir.name = name
    for result, written in w.written.items():
        node = result.producer()
        if node is None or not written.places or node.graph is None:
            continue
        note_metadata(
            node,
            places=written.places,
            role=written.role,
            format=written.encoding.format.name,
            scale=written.scale.name if written.scale is not None else None,
            axis=written.axis,
            entry=written.entry.name if written.entry is not None else None,
            perm=list(written.perm),
            pooled=written.pooled,
            reach=_reach(written.encoding) if written.encoding.dynamic or written.scale is None else 0,
        )
    close(w.model)
    w.model.metadata_props[METADATA] = "qdq"  # a model may have no quantizer to tell it by
    newest = w.model.opset_imports[""]
    w.model.ir_version = IR_VERSION if newest <= 21 else max(IR_VERSION, w.model.ir_version)


def _forms(narrow: int, left: int, could: int) -> Iterator[str]:
    """Counts of products with quantized weights: ``narrow`` as MatMulNBits, ``left`` not, of which ``could`` be."""
    if narrow:
        yield f"; {narrow} written as MatMulNBits"
    if left:
        yield f"; the weights of {left} are dequantized in every run of ONNX Runtime"
        yield (
            f": with target='ort_cpu' or weight_only='nbits', {could} run as MatMulNBits"
            if could
            else " (MatMulNBits has no form for them)"
        )
