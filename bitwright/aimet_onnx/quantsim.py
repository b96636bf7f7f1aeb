"""``aimet_onnx.quantsim``: the simulation under AIMET's names and signatures, its files, and formats of many weights at once."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from bitwright import onnx as front
from bitwright.aimet_common.defs import (
    QuantizationDataType,
    QuantScheme,
    int8,
    number_format,
    qtype,
    range_method,
)  # fmt: skip
from bitwright.aimet_common.names import absent_attribute, absent_names, differs
from bitwright.aimet_common.sites import ConnectedGraph, fit_products, grouped_scale_format, tie_joined
from bitwright.aimet_common.utils import file_version
from bitwright.aimet_onnx import defs
from bitwright.aimet_onnx.qc_quantize_op import QcQuantizeOp, quantized_constant, quantizer_of
from bitwright.aimet_onnx.utils import build_session, proto_of, simulated_proto, wrapped
from bitwright.core.graph.operators import block_axes, resolve_granularity
from bitwright.core.numerics.formats import FloatFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec
from bitwright.core.placement.aimet_config import written_kernels
from bitwright.errors import ConfigError, EncodingsError, GranularityError, ModelError
from bitwright.export.encodings.of_simulation import exported_names
from bitwright.export.encodings.read import read_encodings
from bitwright.export.files.onnx_file import moved_model
from bitwright.runtimes.onnxruntime import CPU, new_session, register_operators

__all__ = [
    "QuantScheme", "QuantizationDataType", "QuantizationSimModel", "clamp_activation_encodings", "compute_encodings",
    "encodings_to_onnx_qdq", "load_encodings_to_sim", "set_blockwise_quantization_for_weights",
    "set_grouped_blockwise_quantization_for_weights", "set_lpbq_for_params", "set_param_type",
]  # fmt: skip

__getattr__ = absent_names(__name__)


# ------------------------------------------------------------------------------------ exported files


def option(bias: bool | None, activation: str | None) -> dict[str, Any]:
    """Our options for AIMET's.

    Raises:
        ConfigError: signed activations.
    """
    if activation == "signed":
        raise ConfigError("force_activation_as", "'signed' grids are not written here", "use 'unsigned' or None")
    return {"bias": "float" if bias is False else "int32", "activation": "as_is" if activation is None else activation}


def export_files(
    write: Callable[..., Any], folder: Path, prefix: str, export_model: bool, options: dict[str, Any]
) -> None:
    """Write the float ``<prefix>.onnx``, ``<prefix>.encodings`` and ``<prefix>_qdq.onnx``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = write(work, "model", samples=False, **options)
        os.replace(made.encodings, folder / f"{prefix}.encodings")
        if export_model:
            moved_model(made.float_model, folder / f"{prefix}.onnx")
            moved_model(made.qdq, folder / f"{prefix}_qdq.onnx")


def qdq_model(write: Callable[..., Any], options: dict[str, Any]) -> onnx.ModelProto:
    """The QDQ model of an export."""
    with tempfile.TemporaryDirectory() as work:
        return onnx.load(str(write(work, "model", samples=False, **options).qdq))


# ------------------------------------------------------------------------------------ formats of the weights of several nodes


def _weight_quantizers(
    sim: QuantizationSimModel, op_types: Any, include: Iterable[str] | None, exclude: Iterable[str] | None
) -> list[QcQuantizeOp]:
    types = None if op_types is None else {op_types} if isinstance(op_types, str) else set(op_types)
    unwanted, wanted = set(exclude or ()), None if include is None else set(include)
    known = {op.name for op in sim.graph.ops}
    missing = sorted((unwanted | (wanted or set())) - known)
    if missing:
        raise ConfigError("nodes", f"there are no nodes {missing}", "use names of nodes of the model")
    return [
        quantizer_of(site.value, (site,), sim)
        for site in sim.quantizers.values()
        if site.role == "weight" and site.enabled and site.op not in unwanted
        and (wanted is None or site.op in wanted)
        and (types is None or sim.graph.op(site.op).type in types)
    ]  # fmt: skip


def set_blockwise_quantization_for_weights(
    sim: QuantizationSimModel,
    op_types: str | tuple[str, ...],
    bitwidth: int,
    symmetric: bool,
    block_size: int,
    strict: bool = False,
    nodes_to_exclude: list[str] | None = None,
    *,
    excluded_nodes: list[str] | None = None,
) -> None:
    """Give weights one scale per block along the input channels.

    Args:
        op_types: types of nodes.
        strict: blocks that do not divide a weight are an error; otherwise it stays as it is.
        nodes_to_exclude: names of nodes to leave alone.

    Raises:
        GranularityError: ``strict``, and blocks that do not divide a weight; nothing is changed.
    """
    found = _weight_quantizers(sim, op_types, None, nodes_to_exclude or excluded_nodes)
    _set_blocks(found, defs.QSpec(qtype.int(bitwidth), defs.Blockwise(block_size), symmetric), strict)


def _set_blocks(found: list[QcQuantizeOp], spec: defs.QSpec, strict: bool) -> None:
    blocks: Any = spec.granularity
    fitting = []
    for quantizer in found:
        site = quantizer._site
        op, shape = site._graph.op(site.op), quantizer._value_shape
        axes = block_axes(op.type, op.attrs, site.port, shape)
        granularity = PerBlock(blocks.block_size).resolve(*axes)
        axis = granularity.axis if isinstance(granularity, PerBlock) else None
        if axis is not None and blocks.block_size > 0 and shape[axis] % blocks.block_size:  # AIMET has no padded blocks
            if strict:
                raise GranularityError(
                    site.name,
                    f"axis {axis} has {shape[axis]} elements, which blocks of {blocks.block_size} do not divide",
                    "choose a block size that divides it, or strict=False to leave such layers as they are",
                )
            continue
        fitting.append(quantizer)
    for quantizer in fitting:
        quantizer.set_qspec(spec)


def set_grouped_blockwise_quantization_for_weights(
    sim: QuantizationSimModel,
    op_types: str | tuple[str, ...],
    bitwidth: int,
    decompressed_bw: int,
    block_size: int,
    strict: bool = False,
    nodes_to_exclude: list[str] | None = None,
    *,
    excluded_nodes: list[str] | None = None,
) -> None:
    """Give weights one scale per block that is an integer multiple of one per channel (LPBQ).

    Args:
        op_types, strict, nodes_to_exclude: as for :func:`set_blockwise_quantization_for_weights`.
        decompressed_bw: bits of code times multiple.

    Raises:
        ConfigError: multiples of ``decompressed_bw - bitwidth`` bits are not supported; nothing is changed.
        GranularityError: ``strict``, and blocks that do not divide a weight; nothing is changed.
    """
    grouped_scale_format(bitwidth, decompressed_bw, "set_grouped_blockwise_quantization_for_weights")
    spec = defs.QSpec.lpbq(qtype.int(bitwidth), block_size, decompressed_bw - bitwidth)
    found = _weight_quantizers(sim, op_types, None, nodes_to_exclude or excluded_nodes)
    _set_blocks(found, spec, strict)


def set_lpbq_for_params(
    sim: QuantizationSimModel,
    bitwidth: int,
    block_size: int,
    *,
    op_types: str | Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | None = None,
    nodes_to_include: Iterable[str] | None = None,
    strict: bool | None = None,
) -> None:
    """LPBQ with multiples of ``bitwidth`` bits, for types of nodes or for nodes by name.

    Args:
        strict: see :func:`set_grouped_blockwise_quantization_for_weights`; always, for ``nodes_to_include``.

    Raises:
        ValueError: both or neither of ``op_types`` and ``nodes_to_include``, or a node named twice.
        TypeError: ``strict`` beside ``nodes_to_include``.
        ConfigError, GranularityError: see there.
    """
    if (op_types is None) == (nodes_to_include is None) or (nodes_to_include and nodes_to_exclude):
        raise ValueError("give either op_types (and nodes_to_exclude), or nodes_to_include")
    if nodes_to_include is not None and strict is not None:
        raise TypeError("strict goes with op_types: nodes named one by one must fit")
    grouped_scale_format(bitwidth, 2 * bitwidth, "set_lpbq_for_params")
    spec = defs.QSpec.lpbq(qtype.int(bitwidth), block_size, bitwidth)
    found = _weight_quantizers(sim, op_types, nodes_to_include, nodes_to_exclude)
    _set_blocks(found, spec, nodes_to_include is not None or bool(strict))


def set_param_type(
    sim: QuantizationSimModel,
    param_type: Any,
    *,
    op_types: Any = None,
    nodes_to_include: Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | None = None,
    strict: bool = True,
    shift_zero_point: bool = False,
) -> None:
    """Give weights another number format and granularity.

    Args:
        param_type: a :class:`QSpec`, a number format or its name.
        op_types, nodes_to_include, nodes_to_exclude: which nodes; all by default.
        strict: blocks that do not divide a weight are an error; otherwise it stays as it is.

    Raises:
        ConfigError: a shifted zero point.
        GranularityError: see ``strict``.
    """
    spec = param_type if isinstance(param_type, defs.QSpec) else defs.QSpec(qtype.as_qtype(param_type))
    found = _weight_quantizers(sim, op_types, nodes_to_include, nodes_to_exclude)
    if shift_zero_point:
        spec = defs.QSpec(spec.dtype, spec.granularity, spec.symmetric, True)
    if isinstance(spec.granularity, defs.Blockwise) and not spec.shift_zero_point:
        _set_blocks(found, spec, strict)
        return
    for quantizer in found:
        quantizer.set_qspec(spec)


# ------------------------------------------------------------------------------------ the simulation


#: operators whose outputs AIMET has no quantizers for: they only move values
_MOVING = frozenset("Compress Flatten Gather Identity Reshape Shape Split Squeeze Tile Transpose Unsqueeze".split())
_NOT_GIVEN = object()
_LEGACY = (
    "dummy_input", "quant_scheme", "rounding_mode", "default_param_bw", "default_activation_bw", "use_symmetric_encodings",
    "use_cuda", "device", "config_file", "default_data_type", "user_onnx_libs", "path",
)  # fmt: skip


class QuantizationSimModel(front.QuantizationSimModel):
    """:class:`bitwright.onnx.QuantizationSimModel` with AIMET's methods and quantizers by tensor name.

    Args:
        model: ``ModelProto``, ONNX Runtime's ``ONNXModel`` wrapper, or a path.
        param_type, activation_type: number formats: ``int8``, ``int16``, ``float16``, ... or their names.
        quant_scheme: a :class:`QuantScheme`, or the name of a range method (AIMET's or Bitwright's).
        config_file: path, name or dict of a configuration; ``None`` is AIMET's default, one scale per channel.
        dummy_input, providers: as there.
        user_onnx_libs: libraries of custom operators, loaded into every session from now on.
        path, session_options_kwargs: accepted; nothing is written and sessions are ONNX Runtime's own.
        legacy: the older arguments ``default_param_bw``, ``default_activation_bw``, ``use_cuda``,
            ``use_symmetric_encodings``, ``default_data_type``, ``rounding_mode``, ``device``, also by position.

    Raises:
        ConfigError: (a ValueError) a library cannot be loaded, or an unknown argument.
    """

    def __init__(
        self,
        model: Any,
        *args: Any,
        param_type: qtype | str = int8,
        activation_type: qtype | str = int8,
        quant_scheme: Any = QuantScheme.min_max,
        config_file: str | Path | dict[str, Any] | None = None,
        dummy_input: Any = None,
        user_onnx_libs: list[str] | None = None,
        providers: Sequence[Any] | None = None,
        path: str | None = None,
        session_options_kwargs: dict[str, Any] | None = None,
        **legacy: Any,
    ) -> None:
        given = {"quant_scheme": quant_scheme, "config_file": config_file, "dummy_input": dummy_input,
                 "user_onnx_libs": user_onnx_libs, **dict(zip(_LEGACY, args, strict=False)), **legacy}  # fmt: skip
        unknown = sorted(set(given) - {*_LEGACY, "memory_budget", "threads"})
        if unknown or given.get("rounding_mode", "nearest") != "nearest":
            raise TypeError(f"QuantizationSimModel has no arguments {unknown or ['rounding_mode']}")
        if (param_type, activation_type) != (int8, int8) and _LEGACY_TYPES & given.keys():
            raise ModelError("param_type, activation_type", "they replace default_param_bw and the like", "give either")
        for library in given["user_onnx_libs"] or ():
            register_operators(library)
        weights, activations = _formats(param_type, activation_type, given)
        if providers is None and given.get("use_cuda"):
            providers = _cuda(int(given.get("device", 0)))
        self._source = proto_of(model)
        self._watching: Any = None  # what session is while a block of compute_encodings is open
        self._in_float: Any = None
        super().__init__(
            self._source,
            given["dummy_input"],
            range_method(given["quant_scheme"]),
            config_file="default" if given["config_file"] is None else given["config_file"],
            providers=providers,
            preset=Preset(weights, activations),
            **{name: given[name] for name in ("memory_budget", "threads") if name in given},
        )
        fit_products(self)
        tie_joined(self)
        self._share_columns()
        if given.get("use_symmetric_encodings"):
            for quantizer in self.get_all_quantizers()[1]:
                if quantizer.enabled:
                    quantizer.symmetric = True

    def __getattr__(self, name: str) -> Any:
        raise absent_attribute("aimet_onnx.quantsim.QuantizationSimModel", name)

    def _share_columns(self) -> None:
        """Give the matrices of a batched product one scale per column, as AIMET has it; ours have one of each matrix."""
        for site in (
            s for s in self.quantizers.values() if s.role == "weight" and self.graph.op(s.op).type == "MatMul"
        ):
            spec, shape = site.quantizer.spec, self.graph.values[site.value].shape
            if len(shape) > 2 and spec.granularity == resolve_granularity("MatMul", {}, 1, PerChannel(), shape):
                site.spec = replace(spec, granularity=PerChannel(len(shape) - 1))

    # -- quantizers

    @property
    def qc_quantize_op_dict(self) -> dict[str, QcQuantizeOp]:
        """Tensor name -> its quantizer, which may be off; of every float tensor that is not only moved."""
        held: dict[str, list[Any]] = {}
        for site in self.quantizers.values():
            held.setdefault(site.value, []).append(site)
        moved = {name for op in self.graph.ops if op.type in _MOVING for name in op.outputs}
        moved -= {site.value for site in self.quantizers.values() if site.enabled}
        floats = (name for name, value in self.graph.values.items() if value.is_float and name not in moved)
        return {name: quantizer_of(name, tuple(held.get(name, ())), self) for name in floats}

    def get_qc_quantize_op(self) -> dict[str, QcQuantizeOp]:
        """:attr:`qc_quantize_op_dict`."""
        return self.qc_quantize_op_dict

    @property
    def connected_graph(self) -> ConnectedGraph:
        """The operators of the model."""
        return ConnectedGraph(self._source, self.graph, {node.name: node for node in self._source.graph.node})

    @property
    def param_names(self) -> list[str]:
        """Names of the parameters."""
        return [name for name, value in self.graph.values.items() if value.is_float and value.is_static]

    @property
    def activation_names(self) -> list[str]:
        """Names of inputs, outputs and what lies between."""
        return [name for name in self.qc_quantize_op_dict if not self.graph.values[name].is_static]

    @property
    def input_quantizers_name(self) -> list[str]:
        """Names of the model's inputs."""
        return list(self.graph.inputs)

    def get_op_quantizers(self, op: Any) -> tuple[list[QcQuantizeOp], list[QcQuantizeOp], dict[str, QcQuantizeOp]]:
        """Quantizers in effect at a node (its name, or an object with one): of inputs, outputs and parameters.

        Raises:
            ConfigError: no node of this name.
        """
        name = op if isinstance(op, str) else op.name
        found = next((o for o in self.graph.ops if o.name == name), None)
        if found is None:
            raise ConfigError("get_op_quantizers", f"there is no node {name!r}", "use the name of a node of the model")
        table = self.qc_quantize_op_dict
        inputs, params = [], {}
        for port, value in enumerate(found.inputs):
            if value is None or value not in table or not table[value].enabled:
                continue
            if self.graph.values[value].is_static:
                params[{0: "input", 1: "weight", 2: "bias"}.get(port, f"param{port}")] = table[value]
            else:
                inputs.append(table[value])
        outputs = [table[value] for value in found.outputs if value in table and table[value].enabled]
        return inputs, outputs, params

    def get_all_quantizers(self) -> tuple[list[QcQuantizeOp], list[QcQuantizeOp]]:
        """Quantizers of parameters, and of activations."""
        table = self.qc_quantize_op_dict
        return [table[n] for n in self.param_names if n in table], [
            table[n] for n in self.activation_names if n in table
        ]

    def set_quantizers(self, quantizer_dict: dict[str, QcQuantizeOp]) -> None:
        """Make the quantizers of these tensors what those given are.

        Raises:
            KeyError: the model has no tensor of a name.
        """
        table = self.qc_quantize_op_dict
        for name in quantizer_dict:
            if name not in table:
                raise KeyError(f"the model has no tensor {name!r}")
        for name, quantizer in quantizer_dict.items():
            own = table[name]
            if own.sites != quantizer.sites:
                own._respec(quantizer._spec, quantizer._site.encoding)
                own.enabled = quantizer.enabled

    def set_tensor_precision(self, names: str | list[str], precision: qtype | str, *, strict: bool = True) -> None:
        """Give tensors another number format.

        Raises:
            ConfigError: ``strict``, and a name is not a tensor, or one that has no quantizer in effect; nothing is changed.
        """
        several = [names] if isinstance(names, str) else list(names)
        table = self.qc_quantize_op_dict
        wrong = [name for name in several if name not in table or not table[name].enabled]
        if wrong and strict:
            raise ConfigError(
                "set_tensor_precision", f"no quantizer in effect at {', '.join(map(repr, wrong))}",
                "name tensors that sim.coverage() shows as quantized, or pass strict=False",
            )  # fmt: skip
        for name in several:
            if name not in wrong:
                table[name].set_precision(precision)

    # -- running

    build_session = staticmethod(build_session)

    def get_supported_kernels(self) -> dict[str, list[dict[str, Any]]]:
        """Kernels of the target by the configuration: ``defaults`` and operator types, with AIMET's entries."""
        return written_kernels(self.rules, QuantizationDataType.__getitem__)

    @property
    def model(self) -> Any:
        """The simulation as a model, in ONNX Runtime's ``ONNXModel`` wrapper; the float model until something is calibrated.

        Quantizers are QuantizeLinear and DequantizeLinear. :func:`~bitwright.aimet_onnx.utils.build_session` runs it as
        :attr:`session` does, and :class:`LayerOutputUtil` knows its tensors by the names that they have in the float model.
        """
        plain = wrapped(copy.deepcopy(self._source))
        if not self._all_calibrated():
            return plain
        simulation = self.simulation()
        if simulation.file is not None:
            differs(
                "sim.model",
                "it is the float model, since the simulation is too large for one protobuf; use sim.session",
            )
            return plain
        shown = {self.quantizers[n].value: str(v[0].name) for n, v in simulation.results.items() if v}
        outputs = [name for name in self.graph.inputs if name in shown]
        outputs += [name for op in self.graph.ops for name in op.outputs]
        made = wrapped(simulated_proto(simulation.model, [(name, shown.get(name, name)) for name in outputs]))
        made.float_model = plain.model
        return made

    def _all_calibrated(self) -> bool:
        sites = [s for s in self.quantizers.values() if s.enabled and not s.quantizer.derived]
        self.calibrated = self.calibrated or all(site.encoding is not None for site in sites)
        return self.calibrated

    @property
    def session(self) -> Any:
        """The simulation as a session; in float as long as nothing is calibrated, as in AIMET."""
        if self._watching is not None:
            return self._watching
        if self._all_calibrated():
            return super().session
        return _float_session(self)

    # -- calibration

    def compute_encodings(  # type: ignore[override]
        self, inputs: Any = None, forward_pass_callback_args: Any = _NOT_GIVEN, **options: Any
    ) -> None:
        """Find the encodings on feeds, or by running ``callback(session)``, or ``callback(session, args)``.

        The callback is also known as ``forward_pass_callback``.

        Raises:
            TypeError: neither feeds nor a callback, both, or arguments without a callback.
        """
        given = forward_pass_callback_args is not _NOT_GIVEN
        if "forward_pass_callback" in options:
            if inputs is not None:
                raise TypeError("give compute_encodings feeds or a callback, once")
            inputs = options.pop("forward_pass_callback")
        if not callable(inputs):
            if given or isinstance(inputs, (int, float)):
                raise TypeError("give compute_encodings feeds, a callback, or a callback and its arguments")
            super().compute_encodings(inputs, **options)
            return
        if given:
            warnings.warn("give compute_encodings a callback of the session alone", DeprecationWarning, stacklevel=2)
        callback = inputs

        def run(session: Any) -> None:
            callback(session, forward_pass_callback_args) if given else callback(session)

        super().compute_encodings(run, **options)

    # -- files

    def export(  # type: ignore[override]
        self,
        path: str | Path,
        filename_prefix: str,
        export_model: bool = True,
        *,
        export_int32_bias: bool | None = None,
        encoding_version: str | None = None,
        force_activation_as: str | None = "unsigned",
        **options: Any,
    ) -> None:
        """Write ``<prefix>.onnx`` (float), ``<prefix>.encodings``, and ``<prefix>_qdq.onnx``.

        Args:
            export_model: ``False`` writes the encodings alone.
            options: of :meth:`bitwright.onnx.QuantizationSimModel.export`.
        """
        options.update(option(export_int32_bias, force_activation_as))
        options["encoding_version"] = file_version(encoding_version)
        export_files(super().export, Path(path), filename_prefix, export_model, options)

    def to_onnx_qdq(
        self,
        *,
        export_int32_bias: bool = False,
        prequantize_constants: bool = False,
        force_activation_as: str | None = "unsigned",
    ) -> onnx.ModelProto:
        """The model with QuantizeLinear and DequantizeLinear; weights are always stored as integers."""
        return qdq_model(super().export, option(export_int32_bias, force_activation_as))

    @classmethod
    def from_onnx_qdq(cls, model: Any, strict: bool = False, **kwargs: Any) -> QuantizationSimModel:
        """A simulation of a model with QuantizeLinear and DequantizeLinear, whose encodings are in effect and frozen."""
        return cls(model, **kwargs)

    @classmethod
    def remove_quantizers(cls, model: Any) -> Any:
        """The float model that :attr:`model` of a simulation was made from, in the same wrapper; others as they are."""
        found = getattr(model, "float_model", None)
        return model if found is None else wrapped(copy.deepcopy(found))

    def fold_param_quantizers(self) -> None:
        """Write the quantized values into the parameters and switch their quantizers off."""
        for site in list(self.quantizers.values()):
            param = self.graph.values[site.value].param
            if site.role == "weight" and site.enabled and site.encoding is not None and param is not None:
                values = self.constants[site.name]
                self.set_parameter(param, quantized_constant(values, site.encoding))
                site.enabled = False

    def set_and_freeze_param_encodings(self, encoding_path: str | Path | dict[str, Any]) -> None:
        """Take the parameter encodings of a file and keep them through calibration."""
        super().set_and_freeze_param_encodings(encoding_path)


_LEGACY_TYPES = {"default_param_bw", "default_activation_bw", "default_data_type"}


def _formats(param_type: Any, activation_type: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """Specs of weights and of activations; older arguments win over number formats."""
    kind = given.get("default_data_type", QuantizationDataType.int)
    if "default_param_bw" in given or "default_data_type" in given:
        param_type = qtype.from_legacy_repr(kind, int(given.get("default_param_bw", 8)))
    if "default_activation_bw" in given or "default_data_type" in given:
        activation_type = qtype.from_legacy_repr(kind, int(given.get("default_activation_bw", 8)))
    weight, activation = number_format(param_type), number_format(activation_type, signed=False)
    is_float = isinstance(activation, FloatFormat)
    symmetry: Any = "symmetric" if is_float else "asymmetric"
    return (
        None if weight is None else weight_spec(weight),
        None if activation is None else activation_spec(activation, symmetry=symmetry),
    )


def _cuda(device: int) -> list[Any] | None:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        differs("use_cuda=True", "this ONNX Runtime has no CUDA provider; the CPU is used")
        return None
    return [("CUDAExecutionProvider", {"device_id": device}), "CPUExecutionProvider"]


def _float_session(sim: QuantizationSimModel) -> Any:
    if sim._in_float is None:
        sim._in_float = new_session(sim._source.SerializeToString(), providers=sim.providers or CPU)
    return sim._in_float


@contextmanager
def compute_encodings(sim: QuantizationSimModel) -> Iterator[None]:
    """Calibrate on every ``sim.session.run`` inside the block; the encodings are in effect at its end.

    Raises:
        CalibrationError: (a RuntimeError) the session did not run in the block.
    """
    with sim.calibrating() as session:
        sim._watching = session
        try:
            yield
        finally:
            sim._watching = None


class EncodingsMismatchError(EncodingsError, AssertionError):
    """Encodings are those of another model, or of a simulation with other settings."""


@dataclass(frozen=True)
class EncodingMismatch:
    """Settings of a quantizer that a file of encodings has otherwise: ``(before, in the file)`` or ``None`` where they agree."""

    quantizer_name: str
    enabled_mismatch: tuple[bool, bool] | None = None
    dtype_mismatch: tuple[str, str] | None = None
    bitwidth_mismatch: tuple[int, int] | None = None
    is_symmetric_mismatch: tuple[bool, bool] | None = None

    def __str__(self) -> str:
        pairs = ((key, value) for key, value in vars(self).items() if isinstance(value, tuple))
        return f"{self.quantizer_name}: " + ", ".join(
            f"{k.removesuffix('_mismatch')} {a} -> {b}" for k, (a, b) in pairs
        )


def _check_names(sim: QuantizationSimModel, source: Any) -> None:
    """Refuse names of a file that are neither tensors nor sites of the model, nor known from its exported sites."""
    exported, carried = exported_names(source)
    known = set(carried).union(sim.graph.values, sim.quantizers, *exported.values())
    unknown = sorted({record.name for record in read_encodings(source).records} - known)
    if unknown:
        raise EncodingsMismatchError(
            "load_encodings_to_sim", f"the model has no tensors {unknown[:5]}", "load the file of this model"
        )


def _mismatches(names: Iterable[str], before: Any, table: Any, strict: bool) -> list[EncodingMismatch]:
    """Settings of the quantizers of tensors that are not what they were; an error if ``strict``."""
    found = [m for name in names if (m := _mismatch(name, before[name], _settings(table[name])))]
    if strict and found:
        raise EncodingsMismatchError(
            "load_encodings_to_sim", f"quantizers differ from the file: {'; '.join(map(str, found[:5]))}",
            "make the simulation as the one of the file, or pass strict=False to take the settings of the file",
        )  # fmt: skip
    return found


def _settings(quantizer: QcQuantizeOp) -> dict[str, Any]:
    return {
        "enabled": quantizer.enabled,
        "dtype": quantizer.data_type.name,
        "bitwidth": quantizer.bitwidth,
        "is_symmetric": quantizer.symmetric,
    }


def _mismatch(name: str, before: dict[str, Any], after: dict[str, Any]) -> EncodingMismatch | None:
    """What differs; of a quantizer that was off, that alone."""
    if not before["enabled"]:
        return EncodingMismatch(name, (False, True))
    other = {f"{key}_mismatch": (before[key], after[key]) for key in before if before[key] != after[key]}
    other.pop("enabled_mismatch", None)
    return EncodingMismatch(name, **other) if other else None


def load_encodings_to_sim(
    quant_sim_model: QuantizationSimModel,
    onnx_encoding_path: str | Path | dict[str, Any],
    strict: bool = True,
    *,
    allow_overwrite: bool = True,
    disable_missing_quantizers: bool = True,
) -> list[EncodingMismatch]:
    """Take the encodings of a file or dict.

    Args:
        strict: refuse names that the model does not have, and settings that differ.
        allow_overwrite: whether calibration may change what was loaded.
        disable_missing_quantizers: switch quantizers off that the file has nothing for.

    Returns:
        Settings of quantizers that the file has otherwise, which they have from now on.

    Raises:
        EncodingsError: (a ValueError) see :meth:`bitwright.onnx.QuantizationSimModel.load_encodings`.
        EncodingsMismatchError: (an AssertionError too) the model has no tensor of a name; or, if ``strict``, settings differ.
    """
    sim, table = quant_sim_model, quant_sim_model.qc_quantize_op_dict
    before = {name: _settings(quantizer) for name, quantizer in table.items()}
    off = [name for name, site in sim.quantizers.items() if not site.enabled]
    _check_names(sim, onnx_encoding_path)
    restore = sim.quantizers.remember()
    try:
        found = sim.load_encodings(onnx_encoding_path, strict, partial=True)
        told = {sim.quantizers[name].value for name in found}
        mismatches = _mismatches(told, before, table, strict)
    except BaseException:
        restore()
        raise
    served = {id(sim.quantizers[name].quantizer) for name in found}
    for name, site in sim.quantizers.items():
        missing = id(site.quantizer) not in served and not site.quantizer.derived
        if name in found:
            site.enabled = True
            site.frozen = site.frozen or not allow_overwrite
        elif name in off or (missing and disable_missing_quantizers):
            site.enabled = False
    return mismatches


def encodings_to_onnx_qdq(
    model: Any, encodings: Any, *, prequantize_constants: bool = False, force_activation_as: str | None = "unsigned"
) -> onnx.ModelProto:
    """A model with QuantizeLinear and DequantizeLinear where the encodings say so."""
    sim = QuantizationSimModel(model)
    load_encodings_to_sim(sim, encodings, strict=False)
    return sim.to_onnx_qdq(force_activation_as=force_activation_as)


def clamp_activation_encodings(quant_sim: QuantizationSimModel, clamp_val: float) -> None:
    """Cut the ranges of activations at plus and minus ``clamp_val``."""
    for quantizer in quant_sim.get_all_quantizers()[1]:
        if quantizer.enabled:
            quantizer.clip_and_recompute_encodings(clamp_val)
